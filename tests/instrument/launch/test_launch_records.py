"""Results of the launcher from the records of its ranks, and from ranks without one."""

from __future__ import annotations

import errno
import io
import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from instrument.launch.launcher import RunResult, _launch_config, describe_ranks
from instrument.launch.options import RunOptions
from instrument.launch.output import RankPipes, Terminal
from instrument.launch.record import RankRecord, RecordWriter, State, StepCounter, read_record, record_path, write_json
from instrument.launch.rundir import RunDirectory, RunEnd, Status, collect_records
from instrument.launch.watch.monitor import find_causes, progress_line
from instrument.launch.window import StepWindow
from instrument.launch.worker import WorkerConfig
from pptrace.errors import PptraceError

RECORD = RankRecord(rank=3, local_rank=1, host="here", pid=os.getpid())


def test_a_record_reads_back_as_it_was_written(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, RECORD)
    writer.add_facts(mesh={"pp": 2})
    writer.update(state=State.FAILED, error="ValueError: é")
    assert read_record(record_path(tmp_path, 3)) == writer.record
    assert writer.record.facts == {"mesh": {"pp": 2}}
    assert [path.name for path in tmp_path.iterdir()] == ["rank3.facts.json"]


def test_a_record_that_cannot_be_written_ends_no_script_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    writer = RecordWriter(tmp_path, RECORD)
    fill_disk(monkeypatch)
    writer.update(steps_seen=3)
    writer.update(state=State.OK)
    assert capfd.readouterr().err.splitlines() == [
        f"pptrace: {record_path(tmp_path, 3)}: cannot be written (No space left on device); the script goes on"
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["rank3.facts.json"]
    monkeypatch.undo()
    writer.update(exit_code=0)
    assert read_record(record_path(tmp_path, 3)) == writer.record
    assert writer.record.steps_seen == 3


def test_a_full_disk_at_the_end_of_a_run_is_one_error_that_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory(RunOptions(command=("train.py",), run_dir=tmp_path / "run"))
    directory.begin()
    fill_disk(monkeypatch)
    with pytest.raises(PptraceError, match=r"run\.json: cannot be written \(No space left on device\)"):
        directory.finish(RunEnd(Status.OK, 0), [RECORD])


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files be made, and nothing be written into them."""

    def write(path: Path, text: str, **_: object) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", write)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rank": 1}', '{"state": "asleep"}'])
def test_a_record_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    record_path(tmp_path, 3).write_text(text)
    assert read_record(record_path(tmp_path, 3)) is None


@pytest.mark.parametrize(
    ("code", "state", "error"),
    [
        (-9, State.KILLED, "by SIGKILL; the kernel does so when memory runs out"),
        (-11, State.KILLED, "by SIGSEGV"),
        (3, State.FAILED, "exited with code 3"),
        (0, State.OK, None),
        (None, State.KILLED, "it ended without a word"),
    ],
)
def test_a_rank_that_ended_without_a_word_is_judged_by_its_exit_code(
    tmp_path: Path, code: int | None, state: State, error: str | None
) -> None:
    RecordWriter(tmp_path, RECORD)
    StepCounter(tmp_path, 1).write(12, 20)
    codes = {} if code is None else {3: code}
    (record,) = collect_records(tmp_path, tmp_path, {1: 3}, codes)
    assert (record.state, record.exit_code, record.error, record.steps_seen) == (state, code, error, 12)


def test_a_rank_that_had_to_be_killed_is_said_to_have_ignored_its_end(tmp_path: Path) -> None:
    RecordWriter(tmp_path, RECORD)
    (record,) = collect_records(tmp_path, tmp_path, {1: 3}, {3: -9}, forced={3})
    assert (record.state, record.error) == (State.KILLED, "it did not end when told to")


def test_a_rank_whose_trace_is_missing_from_the_directory_has_none(tmp_path: Path) -> None:
    write_json(record_path(tmp_path, 3), asdict(replace(RECORD, state=State.OK, trace="rank3.json.gz")))
    (record,) = collect_records(tmp_path, tmp_path, {1: 3}, {})
    assert record.trace is None


def test_the_run_directory_can_be_read_from_the_start_and_is_clean_at_the_end(tmp_path: Path) -> None:
    options = RunOptions(("train.py", "-x"), tmp_path / "a" / "b", nproc=2)
    directory = RunDirectory(options)
    directory.begin()
    path = options.run_dir / "run.json"
    begun = json.loads(path.read_text())
    assert (begun["status"], begun["ended_at"], begun["ranks"]) == ("running", None, [])
    plan = {"name": "gpipe", "num_microbatches": 1, "rows": [["0F0"], []]}
    writer = RecordWriter(options.run_dir, replace(RECORD, rank=0, state=State.OK, exit_code=0))
    writer.add_facts(mesh={"pp": 2}, plan=plan, versions={"torch": "2"})
    (options.run_dir / ".rank0.json.gz.raw").write_text("half a trace")
    directory.finish(RunEnd(Status.OK, 0), [writer.record])
    ended = json.loads(path.read_text())
    assert (ended["status"], ended["mesh"], ended["plan"]) == ("ok", {"pp": 2}, plan)
    assert ended["ranks"][0]["status"] == "ok"
    assert ended["started_at"] <= ended["ended_at"]
    assert [item.name for item in options.run_dir.iterdir()] == ["run.json"]


def failed(rank: int, at: int, error: str) -> RankRecord:
    return replace(RECORD, rank=rank, state=State.FAILED, failed_at_ns=at, error=error)


def test_the_causes_are_all_failures_that_are_no_lost_connections_the_first_one_first() -> None:
    lost = failed(0, 10, "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:1")
    raised = failed(1, 20, "ValueError: boom")
    later = failed(2, 30, "ValueError: boom too")
    assert find_causes([later, lost, raised]) == [raised, later]
    assert find_causes([lost, replace(lost, rank=3, failed_at_ns=20)]) == [lost]


def test_ranks_that_ended_alike_share_a_line_and_the_cause_is_not_repeated(tmp_path: Path) -> None:
    lost = "RuntimeError: [/src/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:1. This is typically caused by"
    ranks = (
        replace(failed(0, 10, lost), trace="rank0.json.gz", steps_seen=2),
        replace(failed(1, 5, "ValueError: boom"), steps_seen=1),
        *(replace(RECORD, rank=rank, state=State.OK, note="1 step seen") for rank in (2, 3, 4)),
    )
    assert describe_ranks(RunResult(tmp_path, RunEnd(Status.FAILED, 1), ranks, causes=(1,))) == [
        "rank 0 failed: RuntimeError: Connection closed by peer [127.0.0.1]:1 (2 steps; its trace is kept)",
        "rank 1 failed (1 step; no trace)",
        "ranks 2 to 4: 1 step seen",
    ]


def test_errors_of_several_causes_are_not_repeated_unless_another_rank_had_them_too(tmp_path: Path) -> None:
    ranks = (failed(0, 5, "ValueError: boom"), failed(1, 6, "KeyError: 7"), failed(2, 9, "KeyError: 7"))
    assert describe_ranks(RunResult(tmp_path, RunEnd(Status.FAILED, 1), ranks, causes=(0, 1))) == [
        "rank 0 failed (0 steps; no trace)",
        "ranks 1 to 2 failed: KeyError: 7 (0 steps; no trace)",
    ]
    assert describe_ranks(RunResult(tmp_path, RunEnd(Status.FAILED, 1), ranks, causes=(0, 1, 2))) == [
        "ranks 0 to 2 failed (0 steps; no trace)"
    ]


@pytest.mark.parametrize(
    ("counts", "profiler", "expected"),
    [
        ({0: (0, 0), 1: (0, 0)}, "torch", "pptrace: 9 s, step 0, profiling from step 2"),
        ({0: (4, 8), 1: (3, 8)}, "torch", "pptrace: 9 s, step 3 of 8, slowest: rank 1, profiling"),
        ({0: (6, 8), 1: (6, 8)}, "torch", "pptrace: 9 s, step 6 of 8, profiled"),
        ({0: (6, 8)}, "none", "pptrace: 9 s, step 6 of 8"),
    ],
)
def test_progress_is_that_of_the_slowest_rank(
    counts: dict[int, tuple[int, int]], profiler: str, expected: str, tmp_path: Path
) -> None:
    options = RunOptions(("train.py",), tmp_path, profiler=profiler, window=StepWindow(2, 5))
    assert progress_line(counts, options, 9.2) == expected


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_go_above_the_status_line_of_a_terminal() -> None:
    out, err = io.StringIO(), Screen()
    terminal = Terminal(out, err)
    terminal.status("step 1")
    terminal.out("loss 3.2")
    terminal.status("")
    assert out.getvalue() == "loss 3.2\n"
    assert err.getvalue() == "\r\x1b[2Kstep 1\r\x1b[2Kstep 1\r\x1b[2K"


def test_each_line_of_a_rank_is_whole_and_named_and_progress_bars_keep_their_last_state() -> None:
    out, err = io.StringIO(), io.StringIO()
    pipes = RankPipes(Terminal(out, err))
    indices = pipes.reify({0: {"RANK": "2", "WORLD_SIZE": "12"}, 1: {"RANK": "3", "WORLD_SIZE": "12"}})
    with Path(indices.stdouts[1]).open("wb") as file:
        os.write(file.fileno(), b"one\ntw")
        os.write(file.fileno(), b"o\n 10%\r 90%\r100%\nend")
    with Path(indices.stderrs[0]).open("wb") as file:
        os.write(file.fileno(), b"USDT:2026 profiler_start\n\xff!\n")
    pipes.close()
    assert pipes.ranks == {0: 2, 1: 3}
    assert out.getvalue().splitlines() == ["[rank  3] one", "[rank  3] two", "[rank  3] 100%", "[rank  3] end"]
    assert err.getvalue() == "[rank  2] \ufffd!\n"


def test_ranks_of_one_node_meet_without_the_hosts_name(tmp_path: Path) -> None:
    """A machine without a network may not find its own name, and ranks then wait for each other until the rendezvous ends."""
    alone = _launch_config(RunOptions(("train.py",), tmp_path), RankPipes(Terminal()))
    assert (alone.local_addr, alone.rdzv_endpoint) == ("localhost", "localhost:0")
    several = RunOptions(("train.py",), tmp_path, nnodes=2, rdzv_endpoint="node0:29500")
    assert _launch_config(several, RankPipes(Terminal())).local_addr is None


def test_ranks_get_all_that_the_launcher_was_asked_for(tmp_path: Path) -> None:
    options = RunOptions(("train.py",), tmp_path / "run", window=StepWindow(1, 4), memory=True, ranks=frozenset({1}))
    config = WorkerConfig(options, tmp_path)
    assert WorkerConfig.from_environ(config.hand_over()) == config
