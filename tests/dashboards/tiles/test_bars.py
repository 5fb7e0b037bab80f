"""A bar by its place, and the shifts that let the same work of all ranks begin at one time, against the tables of the run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from pptrace.model.mesh import MeshInfo
from pptrace.report.tiles.bars import Place, aligned_at, bar_at
from pptrace.report.tiles.layout import layout_of
from pptrace.report.tiles.measured import COMM_CLASSES, COMMS, OPS, comms_table
from pptrace.report.tiles.replayed import PLANNED
from pptrace.report.tiles.timeline import MEASURED, Timeline
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
    rows = [(0, 10, 7), (0, 50, 8), (1, 58, 8), (2, 13, -1), (2, 71, -1)]
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
