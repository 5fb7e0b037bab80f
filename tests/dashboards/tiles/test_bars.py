"""A bar by its place, and the shifts that let the same work of all ranks begin at one time, against the tables of the run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from pptrace.model.mesh import MeshInfo
from pptrace.report.tiles.bars import Place, aligned_at, bar_at
from pptrace.report.tiles.journey import journey
from pptrace.report.tiles.layout import layout_of
from pptrace.report.tiles.measured import COMM_CLASSES, COMMS, OPS, PHASES, comms_table
from pptrace.report.tiles.replayed import PLANNED, ranks_of
from pptrace.report.tiles.timeline import MEASURED, Timeline, bars_of
from pptrace.schedule.registry import build
from pptrace.timeline.windows import StepWindow
from pptrace.workflow.analyse import Analysis
from pptrace.workflow.load import load


@pytest.fixture(scope="module")
def analysis(run_p4: Path) -> Analysis:
    return load([run_p4])


@pytest.fixture(scope="module")
def timeline(analysis: Analysis) -> Timeline:
    return Timeline(analysis)


def start_of(table: pd.DataFrame, origin: int, **wanted: Any) -> int:
    """The start of the only row of these values, from the run's origin."""
    for name, value in wanted.items():
        table = table[table[name] == value]
    assert len(table) == 1
    return int(table["start_ns"].iloc[0]) - origin


def test_a_bar_is_found_by_its_place_and_by_no_other(timeline: Timeline, analysis: Analysis) -> None:
    ops = analysis.data.ops
    start = start_of(ops, timeline.origin_ns, rank=2, step=3, kind="B", microbatch=5)
    found = bar_at(timeline, Place(MEASURED, 0, OPS, 2, 0, start))
    assert (found["at"], found["start"], found["step"], found["microbatch"], found["depth"]) == (2, start, 3, 5, 0)
    assert dict(found["lines"])[""] == "Backward of microbatch 5"
    wrong = [(1, 0, start), (2, 1, start), (2, 0, start + 1), (9, 0, start), (2, 0, -1), (2, 0, 10**18)]
    for rank, lane, at in wrong:
        with pytest.raises(LookupError):
            bar_at(timeline, Place(MEASURED, 0, OPS, rank, lane, at))
    with pytest.raises(LookupError):
        bar_at(timeline, Place("nothing", 0, OPS, 2, 0, start))


def test_a_timeline_lasts_until_the_last_bar_of_any_rank_ends(timeline: Timeline, analysis: Analysis) -> None:
    ends = [int(table["end_ns"].max()) for table in (analysis.data.ops, analysis.data.comms)]
    assert bars_of(analysis).span_ns == max(ends) - timeline.origin_ns


def test_bars_of_phases_are_those_of_the_report(timeline: Timeline, analysis: Analysis) -> None:
    back = timeline.measured["back"]
    for index, rank in enumerate(analysis.report.steps[1].ranks):
        tracks = [track for track in back.tracks.of_rank[index].tolist() if back.tracks.lane[track] == PHASES]
        bars = {
            (int(back.tracks.start[row]) + timeline.origin_ns, int(back.tracks.length[row]))
            for track in tracks
            for row in range(*back.tracks.ptr[track : track + 2].tolist())
        }
        lengths = {(phase.start_ns, phase.end_ns - phase.start_ns) for phase in rank.phases.values()}
        assert {bar for bar in lengths if bar[1]} <= bars


def test_messages_of_a_journey_are_late_behind_the_planned_end_of_the_op_that_sends_them(timeline: Timeline) -> None:
    planned = {(hop["what"], hop["stage"]): hop["end_ns"] for hop in journey(timeline, PLANNED, 2, 0, 5)}
    messages = [hop for hop in journey(timeline, MEASURED, 2, 0, 5) if hop["what"] in ("send", "recv")]
    assert len(messages) == 2 * 2 * 3
    for hop in messages:
        away = 0 if hop["what"] == "send" else -1 if hop["direction"] == "F" else 1
        at = hop["start_ns"] if hop["what"] == "send" else hop["end_ns"]
        assert hop["late_ns"] == at - planned[hop["direction"], hop["stage"] + away]


def test_a_plan_is_drawn_on_the_ranks_of_its_pipeline_if_it_has_as_many() -> None:
    mesh = MeshInfo(4, 2, 1, 1, 1, 2, 1, pipelines=((0, 2), (1, 3)))
    window = StepWindow(0, (1, 3), 0, 9)
    assert ranks_of(window, build("1f1b", 2, 4), mesh) == (1, 3)
    assert ranks_of(window, build("1f1b", 3, 4), mesh) == (0, 1, 2)


@pytest.mark.parametrize("kind", ["F", "B"])
def test_every_rank_is_shifted_to_the_chosen_ops_start(kind: str, timeline: Timeline, analysis: Analysis) -> None:
    ops = analysis.data.ops
    starts = [start_of(ops, timeline.origin_ns, rank=rank, step=2, kind=kind, microbatch=6) for rank in range(4)]
    answer = aligned_at(timeline, Place(MEASURED, 0, OPS, 1, 0, starts[1]))
    assert answer["shifts"] == [[rank, starts[1] - start] for rank, start in enumerate(starts)]
    assert (answer["start"], answer["missing"]) == (starts[1], [])
    assert answer["name"].endswith("of microbatch 6 in step 2")
    planned = timeline.picture(PLANNED, 2)
    first = int(planned[OPS].tracks.start[0])
    assert dict(aligned_at(timeline, Place(PLANNED, 2, OPS, 0, 0, first))["shifts"])[0] == 0


def test_ranks_without_the_chosen_message_are_named(timeline: Timeline, analysis: Analysis) -> None:
    comms = analysis.data.comms
    wanted = {"step": 4, "kind": "send", "direction": "F", "microbatch": 3}
    starts = [start_of(comms, timeline.origin_ns, rank=rank, **wanted) for rank in range(3)]
    answer = aligned_at(timeline, Place(MEASURED, 0, COMMS, 0, 1, starts[0]))
    assert answer["shifts"] == [[rank, starts[0] - start] for rank, start in enumerate(starts)]
    assert answer["missing"] == [3]
    assert answer["name"] == "send (pp) of microbatch 3 in step 4"
    with pytest.raises(LookupError):
        aligned_at(timeline, Place(MEASURED, 0, "back", 0, 1, starts[0]))


def test_members_of_a_collective_have_that_one_and_others_the_one_of_the_same_order() -> None:
    """Rank 1 has no trace of the first collective of its group; rank 2 is in no group with the chosen one."""
    rows = [(0, 10, 0), (0, 50, 8), (1, 58, 8), (2, 13, -1), (2, 71, -1)]
    comms = pd.DataFrame(rows, columns=["rank", "start_ns", "match"])
    comms = comms.assign(step=0, kind="all_reduce", axis="dp", direction="", stage=-1, microbatch=-1)
    comms = comms.assign(peer=-1, bytes=4, end_ns=comms["start_ns"] + 5)
    comms = comms.assign(transfer_start_ns=comms["start_ns"], transfer_end_ns=comms["end_ns"])
    position = {rank: rank for rank in range(3)}
    picture = {COMMS: comms_table(comms, position, 0)}
    tracks = picture[COMMS].tracks
    classes = {int(start): COMM_CLASSES[group] for start, group in zip(tracks.start, tracks.group, strict=True)}
    assert classes == {10: "transfer", 50: "transfer", 58: "transfer", 13: "either", 71: "either"}
    layout = layout_of(position, MeshInfo(3, 1, 1, 1, 1, 3, 1), {})
    of_run: Any = SimpleNamespace(layout=layout, table=lambda source, step, name, rank: picture[name])
    answer = aligned_at(of_run, Place(MEASURED, 0, COMMS, 0, 2, 50))
    assert answer["shifts"] == [[0, 0], [1, 50 - 58], [2, 50 - 71]]
    assert answer["name"] == "all_reduce (dp) in step 0"
    first = aligned_at(of_run, Place(MEASURED, 0, COMMS, 0, 2, 10))
    assert dict(first["shifts"])[2] == 10 - 13
