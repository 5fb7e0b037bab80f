"""Flight-recorder dumps beside traces: they name what the traces' calls do not say, and change nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pandas as pd
import pytest

from pptrace.schedule.actions import Kind
from pptrace.schedule.registry import build
from pptrace.workflow.analyse import Analysis
from pptrace.workflow.load import load
from tests.roundtrip.files import WRITERS, step_begins
from tests.roundtrip.styles import Style, TorchBatched, Unlabelled
from tests.roundtrip.test_roundtrip import check_messages, cost
from tests.support.flight_recorder import Entry, entry, write_dump
from tests.support.found_ops import message_names
from tests.support.synthetic import LEAD, Done, PaperRun, groups_of, run_on_paper

STEPS = 2
GROUP = ("17", "mesh_pp")


def paper(schedule: str) -> PaperRun:
    p, m, v = {"1f1b": (3, 5, 1), "interleaved-1f1b": (2, 4, 2)}[schedule]
    return run_on_paper(build(schedule, p, m, v), cost, latency=130)


def entries(run: PaperRun, rank: int) -> Iterator[Entry]:
    """Entries of the recorder for a rank's messages, all of them in batches: what becomes of one is told at its batch's end."""
    seq = 0
    for step in range(STEPS):
        for group in groups_of(run.ranks[rank]):
            if group[0].action.kind.is_p2p:
                seq += 1
                at = step_begins(run, step) + group[0].start - LEAD + 3
                yield from (posted(name_of(run, rank, done), seq, at, "scheduled", [4, 512]) for done in group)
                yield posted("nccl:coalesced", seq, at, "completed", None)


def name_of(run: PaperRun, rank: int, done: Done) -> str:
    return (
        f"nccl:send {rank}->{peer_of(run, done)}"
        if done.action.kind.is_send
        else f"nccl:recv {rank}<-{peer_of(run, done)}"
    )


def peer_of(run: PaperRun, done: Done) -> int:
    is_forward = done.action.kind in (Kind.SEND_F, Kind.RECV_F)
    return run.plan.placement[done.action.stage + (1 if is_forward == done.action.kind.is_send else -1)]


def posted(name: str, seq: int, at: int, state: str, shape: list[int] | None) -> Entry:
    """A call of the pipeline's group of which no time but that of its posting is known."""
    sizes, dtypes = ([shape], ["BFloat16"]) if shape else ([], [])
    times = {"time_created_ns": at, "duration_ms": None}
    kinds = {"input_dtypes": dtypes, "output_dtypes": dtypes}
    order = {"record_id": seq, "collective_seq_id": 0, "op_id": seq, "is_p2p": True}
    return entry(name, seq, state, GROUP, input_sizes=sizes, output_sizes=sizes, **times, **kinds, **order)


def dump(folder: Path, rank: int, rows: Sequence[Entry], p: int, as_json: bool = False) -> None:
    groups = {"0 default_pg": range(p), " ".join(GROUP): range(p)}
    write_dump(folder / f"nccl_trace_rank_{rank}", rows, groups, "2.4", as_json)


def analysed(
    folder: Path,
    style: Style,
    form: str,
    run: PaperRun,
    changed: Callable[[int, list[Entry]], list[Entry]] = lambda rank, rows: rows,
    as_json: bool = False,
) -> Analysis:
    """The run's traces with a dump of each rank beside them."""
    WRITERS[form](style, run, STEPS, folder)
    for rank in range(run.plan.pp):
        dump(folder, rank, changed(rank, list(entries(run, rank))), run.plan.pp, as_json)
    return load([folder], cache=False)


def messages(analysis: Analysis) -> pd.DataFrame:
    comms = analysis.data.comms
    return comms[comms["kind"].isin(("send", "recv", "send_recv"))]


def warnings_of(analysis: Analysis) -> list[str]:
    return [line for line in analysis.report.warnings if "flight-recorder" in line]


@pytest.mark.parametrize(
    ("style", "form", "schedule", "as_json"),
    [
        (TorchBatched, "kineto", "1f1b", True),
        (Unlabelled, "kineto", "1f1b", False),
        (Unlabelled, "kineto", "interleaved-1f1b", False),
        (Unlabelled, "nsight", "interleaved-1f1b", True),
    ],
    ids=str,
)
def test_messages_that_show_as_kernels_alone_are_those_of_the_plan_with_their_peers_and_sizes(
    tmp_path: Path, style: type[Style], form: str, schedule: str, as_json: bool
) -> None:
    run = paper(schedule)
    analysis = analysed(tmp_path, style(), form, run, as_json=as_json)
    assert [info.rank for info in analysis.report.inputs] == list(range(run.plan.pp))
    assert analysis.mesh.pipelines == (tuple(range(run.plan.pp)),)
    check_messages(run, STEPS, analysis.data)
    result = messages(analysis)
    assert set(result["axis"]) == {"pp"}
    assert set(result.loc[result["bytes"] >= 0, "bytes"]) <= {4096}
    truth = {(rank, str(d.action), peer_of(run, d)) for rank in range(run.plan.pp) for d in run.transfers(rank)}
    assert set(zip(result["rank"], message_names(result), result["peer"], strict=True)) == truth
    assert len(warnings_of(analysis)) == 1
    assert "name the groups, peers and sizes of all" in warnings_of(analysis)[0]


def test_a_dump_that_keeps_the_last_calls_alone_names_those(tmp_path: Path) -> None:
    run = paper("interleaved-1f1b")
    analysis = analysed(tmp_path, Unlabelled(), "kineto", run, lambda rank, rows: rows[-len(rows) // 3 :])
    result = messages(analysis)
    named = result["peer"] >= 0
    assert 0 < named.sum() < len(result)
    assert (result.loc[named, "match"] >= 0).all()
    assert result.loc[named, "start_ns"].min() > result.loc[~named, "start_ns"].max()


OTHERS: dict[str, Callable[[int, list[Entry]], list[Entry]]] = {
    "another time": lambda rank, rows: [{**row, "time_created_ns": row["time_created_ns"] + 10**12} for row in rows],
    "a call missing": lambda rank, rows: [row for row in rows if row["p2p_seq_id"] != rows[-1]["p2p_seq_id"] // 2],
    "at any time": lambda rank, rows: [{**row, "time_created_ns": rows[0]["time_created_ns"]} for row in rows],
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_dump_whose_calls_are_not_the_traces_changes_nothing_and_says_so(tmp_path: Path, case: str) -> None:
    run = paper("interleaved-1f1b")
    (tmp_path / "without").mkdir()
    WRITERS["kineto"](Unlabelled(), run, STEPS, tmp_path / "without")
    without = load([tmp_path / "without"], cache=False)
    analysis = analysed(tmp_path / "with", Unlabelled(), "kineto", run, OTHERS[case])
    pd.testing.assert_frame_equal(analysis.data.comms, without.data.comms)
    (line,) = warnings_of(analysis)
    assert line.startswith("flight-recorder dump nccl_trace_rank_0 and 1 more: ")
    assert line.endswith("not used")


def test_dumps_of_no_rank_with_a_trace_and_damaged_ones_are_told_and_left_out(tmp_path: Path) -> None:
    run = paper("interleaved-1f1b")
    WRITERS["kineto"](Unlabelled(), run, STEPS, tmp_path)
    dump(tmp_path, 5, list(entries(run, 0)), run.plan.pp)
    dump(tmp_path, 1, list(entries(run, 1)), run.plan.pp)
    whole = tmp_path / "nccl_trace_rank_1"
    whole.write_bytes(whole.read_bytes()[:-9])
    analysis = load([tmp_path], cache=False)
    assert [info.rank for info in analysis.report.inputs] == [0, 1]
    assert warnings_of(analysis) == ["flight-recorder dump nccl_trace_rank_5: no trace is of its rank: not used"]
    assert any("damaged dump" in line and "left out" in line for line in analysis.report.warnings)
