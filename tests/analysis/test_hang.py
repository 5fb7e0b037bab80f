"""Verdicts from flight-recorder dumps in the formats of NCCL and gloo, by ``pptrace hang``."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.flight_recorder import BEGIN_NS, Entry, entry, write_dump
from tests.support.programs import SAMPLES, one_line, pptrace_here


def verdict(*paths: Path) -> tuple[str, list[int]] | None:
    ended = pptrace_here("hang", *paths, "--json", "-")
    assert ended.code == 0, ended
    hang = json.loads(ended.out)["hang"]
    return None if hang is None else (hang["verdict"], hang["ranks"])


def three_dimensions(folder: Path, guilty: int, entries: Sequence[Entry]) -> None:
    """16 ranks as tp 4 × dp 4: ``guilty`` has ``entries``, so its tp group waits for it, and all others for that group."""
    for rank in range(16):
        group = (str(1 + rank // 4), "mesh_tp")
        groups = {"0 default_pg": range(16), f"{group[0]} mesh_tp": range(rank // 4 * 4, rank // 4 * 4 + 4)}
        own = [entry("nccl:all_reduce", seq, "completed", group) for seq in range(1, 6)]
        near = rank // 4 == guilty // 4
        own.append(entry("nccl:all_reduce", 6, "started" if near else "completed", group))
        own += [] if near else [entry("nccl:_all_gather_base", 1, "started")]
        write_dump(folder / f"job_dump_{rank}", entries if rank == guilty else own, groups)


def test_an_empty_dump_is_evidence_and_the_text_is_short(tmp_path: Path) -> None:
    three_dimensions(tmp_path, 10, [])
    assert verdict(tmp_path) == ("missing", [10])
    ended = pptrace_here("hang", tmp_path)
    assert ended.out.splitlines() == [
        "missing: rank 10 is missing (a dump without calls); ranks 0–9, 11–15 only wait, 1 hop away",
        "  ranks 0–7, 12–15 wait in all_gather #1 of group default_pg for ranks 8–11",
        "  ranks 8, 9, 11 wait in all_reduce #6 of group mesh_tp for rank 10",
    ]
    ended = pptrace_here("analyze", tmp_path, "--no-cache")
    assert ended.out.startswith("The run hung: missing: rank 10 is missing")
    (tmp_path / "job_dump_10").write_bytes(b"")
    assert "rank 10 is missing (an empty dump)" in pptrace_here("hang", tmp_path).out
    (tmp_path / "job_dump_10").unlink()
    assert verdict(tmp_path) == ("missing", [10])
    assert verdict(*tmp_path.iterdir()) == ("missing", [10])


def test_one_dump_alone_blames_nobody_whose_dump_was_not_given(tmp_path: Path) -> None:
    three_dimensions(tmp_path, 10, [])
    assert verdict(tmp_path / "job_dump_0") is None
    for rank in range(1, 16):
        (tmp_path / f"job_dump_{rank}").unlink()
    ended = pptrace_here("hang", tmp_path)
    assert ended.out == ("no hang found: rank 0 waits for ranks 1–15, of which nothing is known here (read rank 0)\n")
    assert ended.err == "pptrace: no dump of ranks 1–15: not copied, or the process had died\n"


OPEN = {"p2p_seq_id": 0}
"""Of a dump of open calls, in a group without messages."""
TENSOR, EXPERT, PIPELINE = ("41", "tp"), ("74", "ep"), ("43", "pp")


def device_error(folder: Path) -> None:
    """Dumps of open calls of four ranks, tp 2 × ep 4, with a message from 1 to 0.

    Rank 1's device has failed: the calls in its dump are complete on others, and its host has gone on.
    """
    for rank in range(4):
        tensor = (rank // 2 * 2, rank // 2 * 2 + 1)
        groups = {"0 default_pg": range(4), "7 dp": [rank], "41 tp": tensor, "43 pp": tensor, "74 ep": range(4)}
        waiting = [entry("nccl:all_to_all", seq, "scheduled", EXPERT, **OPEN) for seq in (537, 538)]
        status = {0: (163, 163), 1: (9, 9), 5: (2817, 2817), 6: (11980, 11980), 11: (538, 536)}
        if rank == 1:
            old = [entry("nccl:_all_gather_base", seq, "scheduled", TENSOR, **OPEN) for seq in (2806, 2807)]
            old += [entry("nccl:all_to_all", seq, "scheduled", EXPERT, **OPEN) for seq in (530, 536)]
            waiting = [*old, entry("nccl:send 1->0", 11977, "scheduled", PIPELINE), *waiting]
            status |= {5: (2817, 2805), 6: (11980, 11976), 11: (538, 529)}
        if rank == 0:
            waiting = [entry("nccl:recv 0<-1", 3694, "scheduled", PIPELINE), *waiting]
        numbered = [{**call, "pg_id": {"41": 5, "43": 6, "74": 11}[call["process_group"][0]]} for call in waiting]
        write_dump(folder / f"_dump_{rank}", numbered, groups, "2.9", status=status)


def test_a_rank_whose_open_calls_others_have_completed_is_the_one_to_blame(tmp_path: Path) -> None:
    device_error(tmp_path)
    ended = pptrace_here("hang", tmp_path)
    assert ended.out.splitlines() == [
        "late: rank 1 is stuck in all_gather #2806 of group tp, which others have completed; "
        "ranks 0, 2, 3 only wait, 1 hop away",
        "  ranks 2 and 3 wait in all_to_all #537 of group ep for ranks 0 and 1",
        "  rank 0 waits in recv #3694 from rank 1",
    ]
    (tmp_path / "_dump_2").unlink()
    assert verdict(tmp_path) == ("missing", [1, 2])


def test_the_number_of_a_group_with_messages_says_nothing_of_its_collectives(tmp_path: Path) -> None:
    """The last call that is complete on rank 0 is message 12 of the group, not its all-reduce 5."""
    groups = {"0 default_pg": [0, 1]}
    first, second = (entry("nccl:all_reduce", seq, "scheduled", p2p_seq_id=12) for seq in (5, 6))
    write_dump(tmp_path / "a_dump_0", [second], groups, status={0: (12, 12)})
    write_dump(tmp_path / "a_dump_1", [first, second], groups, status={0: (12, 4)})
    assert verdict(tmp_path) is None
    for rank, calls, last in ((0, [second], (6, 5)), (1, [first, second], (6, 4))):
        write_dump(tmp_path / f"a_dump_{rank}", [{**each, **OPEN} for each in calls], groups, status={0: last})
    assert verdict(tmp_path) == ("late", [1])


def test_a_call_that_is_open_in_a_dump_is_not_complete_whatever_the_status_of_its_group(tmp_path: Path) -> None:
    """A call that failed counts as complete there."""
    calls = [entry("nccl:all_reduce", seq, "scheduled", **OPEN) for seq in (5, 6)]
    for rank in (0, 1):
        write_dump(tmp_path / f"a_dump_{rank}", calls, {"0 default_pg": [0, 1]}, status={0: (6, 6 if rank else 4)})
    assert verdict(tmp_path) is None


def test_dumps_of_gloo_blame_no_rank_for_a_call_that_others_have_completed(tmp_path: Path) -> None:
    for rank, retired in enumerate((True, False, True)):
        calls = [entry("gloo:all_reduce", 5, "scheduled", retired=retired), entry("gloo:barrier", 6, "scheduled")]
        write_dump(tmp_path / f"a_dump_{rank}", calls, {"0 default_pg": range(3)})
    assert verdict(tmp_path) is None


@pytest.mark.parametrize("is_numbered", [True, False])
def test_a_rank_all_of_whose_calls_are_complete_is_late_and_not_missing(tmp_path: Path, is_numbered: bool) -> None:
    groups = {"0 default_pg": range(4), "72 ep": range(4), **({} if is_numbered else {"90 more": range(4)})}
    waiting = [entry("nccl:all_to_all", seq, "scheduled", ("72", "ep"), pg_id=11, **OPEN) for seq in (5265, 5266)]
    for rank in range(4):
        late = rank in (1, 3)
        last = (5264, 5264) if late else (5266, 5264)
        calls = [] if late else waiting
        write_dump(tmp_path / f"_dump_{rank}", calls, groups, "2.9", status={0: (14145, 14145), 11: last})
    last = "after #5264 of group ep" if is_numbered else "with none open"
    assert pptrace_here("hang", tmp_path).out.splitlines() == [
        f"late: ranks 1 and 3 are outside of any communication call, {last}; ranks 0 and 2 only wait, 1 hop away",
        "  ranks 0 and 2 wait in all_to_all #5265 of group ep for ranks 1 and 3",
    ]


@pytest.mark.parametrize("backend", ["nccl", "our-backend.v1", "2ccl", "cuda:nccl"])
def test_any_backend_s_recorder_tells_who_is_late(tmp_path: Path, backend: str) -> None:
    groups = {"0 default_pg": [0, 1]}
    done = [entry(f"{backend}:all_reduce", seq, "completed") for seq in (1, 2)]
    write_dump(tmp_path / "job_dump_0", [*done, entry(f"{backend}:_all_gather_base", 3, "started")], groups)
    write_dump(tmp_path / "job_dump_1", done, groups)
    assert verdict(tmp_path) == ("late", [1])


def test_dumps_of_a_run_that_goes_on_are_no_hang(tmp_path: Path) -> None:
    groups = {"0 default_pg": [0, 1]}
    write_dump(
        tmp_path / "a_dump_0",
        [entry("nccl:all_reduce", 1, "completed"), entry("nccl:all_reduce", 2, "started")],
        groups,
    )
    write_dump(tmp_path / "a_dump_1", [entry("nccl:all_reduce", 1, "completed")], groups)
    assert verdict(tmp_path) == ("late", [1])
    for rank in (0, 1):
        os.utime(tmp_path / f"a_dump_{rank}", ns=(BEGIN_NS + 10**8, BEGIN_NS + 10**8))
    assert verdict(tmp_path) is None
    write_dump(tmp_path / "a_dump_0", [entry("nccl:all_reduce", 1, "completed")], groups)
    assert pptrace_here("hang", tmp_path).out == "no hang found: no rank waits for another (read ranks 0 and 1)\n"


def test_a_dump_that_cannot_be_read_is_not_said_to_be_read(tmp_path: Path) -> None:
    for rank in range(4):
        write_dump(tmp_path / f"a_dump_{rank}", [entry("nccl:all_reduce", 1, "completed")], {"0 default_pg": range(4)})
    (tmp_path / "a_dump_2").write_bytes((tmp_path / "a_dump_2").read_bytes()[:60])
    assert pptrace_here("hang", tmp_path).out == (
        "no hang found: no rank waits for another (read ranks 0, 1, 3; no dump of rank 2 can be read)\n"
    )


def test_of_gloo_s_dumps_no_collective_that_is_open_proves_no_rank_to_be_free(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_dump(tmp_path / f"a_dump_{rank}", [entry("gloo:all_reduce", 1, "completed")], {"0 default_pg": [0, 1]})
    assert pptrace_here("hang", tmp_path).out == (
        "no hang found: no rank waits for another in a collective; ranks may wait in messages, which gloo's recorder "
        "does not keep (read ranks 0 and 1)\n"
    )


def test_what_holds_no_dump_ends_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    assert "no flight-recorder dump in it" in one_line(pptrace_here("hang", tmp_path), 1)
    assert "not found" in one_line(pptrace_here("hang", tmp_path / "absent"), 1)
    (tmp_path / "rank0.json").write_text('{"traceEvents": [{"ph": "X", "ts": 1, "dur": 1}]}')
    assert "but what `pptrace analyze` reads" in one_line(pptrace_here("hang", tmp_path / "rank0.json"), 1)
    (tmp_path / "nccl_trace_rank_0").write_bytes(b"\x80\x02}q\x00X\x09\x00\x00\x00pg_config")
    assert "damaged dump" in one_line(pptrace_here("hang", tmp_path / "nccl_trace_rank_0"), 1)


def test_a_run_directory_says_what_the_launcher_saw(tmp_path: Path) -> None:
    edges = [{"rank": 0, "waits_for": [1], "call": "recv", "group": "pp", "seq": 3}]
    hang = {"verdict": "late", "ranks": [1], "detail": "late: rank 1 is asleep", "edges": edges}
    run = {"schema": "pptrace.run/1", "status": "timeout", "ranks": [{"rank": 0}, {"rank": 1}], "hang": hang}
    (tmp_path / "run.json").write_text(json.dumps(run))
    assert pptrace_here("hang", tmp_path).out == "late: rank 1 is asleep\n  rank 0 waits in recv #3 from rank 1\n"
    (tmp_path / "run.json").write_text(json.dumps({**run, "status": "ok", "hang": None}))
    assert verdict(tmp_path) is None


def test_analyze_begins_with_the_verdict_that_the_run_wrote_down(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(SAMPLES / "1f1b_p2", folder)
    run = json.loads((folder / "run.json").read_text())
    assert json.loads(pptrace_here("analyze", folder, "--json", "-", "--no-cache").out)["hang"] is None
    edges = [{"rank": 0, "waits_for": [1], "call": "recv", "group": "pp", "seq": 3}]
    hang = {"verdict": "late", "ranks": [1], "detail": "late: rank 1 is asleep", "edges": edges}
    (folder / "run.json").write_text(json.dumps({**run, "hang": hang}))
    assert json.loads(pptrace_here("analyze", folder, "--json", "-", "--no-cache").out)["hang"] == hang
    text = pptrace_here("analyze", folder, "--no-cache").out
    assert text.startswith("The run hung: late: rank 1 is asleep\n  rank 0 waits in recv #3 from rank 1")
    (folder / "run.json").write_text(json.dumps({**run, "hang": {"verdict": "maybe"}}))
    assert json.loads(pptrace_here("analyze", folder, "--json", "-", "--no-cache").out)["hang"] is None
