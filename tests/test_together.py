"""Collectives without a group that end together on ranks of a pipeline, and what ends apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
import pytest
from msgspec.structs import replace

from pptrace.clock import Clock, ClockMethod
from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import COMMS, OPS, make_table
from pptrace.recognise.messages.match import with_transfers
from pptrace.recognise.messages.match_without_groups import match_by_end_times

US = 1000
STEP = 100_000 * US
LAST = {0: 40_000 * US, 1: 30_000 * US, 2: 20_000 * US, 3: 10_000 * US}
"""By rank: when its last op of a step ends; the backwards run towards the first stage."""
MESH = MeshInfo(4, pp=4, vpp=1, tp=1, cp=1, dp=1, ep=1, pipelines=((0, 1, 2, 3),))
CLOCK = Clock(ClockMethod.BOUNDS, dict.fromkeys(range(4), 0), 300 * US)

Calls = Mapping[int, Sequence[tuple[int, int]]]
"""By rank: (start, end) of its calls in a step, µs."""

NORM: Calls = {rank: [(LAST[rank] // US + 200, 40_260 + rank)] for rank in range(4)}


def tables(*steps: Calls, **columns: object) -> tuple[pd.DataFrame, pd.DataFrame]:
    """All-reduces of these steps and, of each rank, one op that they follow."""
    calls = [
        {"rank": rank, "step": step, "start_ns": step * STEP + start * US, "end_ns": step * STEP + end * US}
        for step, given in enumerate(steps)
        for rank, spans in given.items()
        for start, end in spans
    ]
    unknown = {name: -1 if dtype == "int64" else "" for name, dtype in COMMS.items()}
    columns_of_call = {"kind": "all_reduce", "axis": "unknown", "clock": "device", **columns}
    comms = pd.DataFrame([{**unknown, **columns_of_call, **call, "posted_ns": call["start_ns"]} for call in calls])
    ops = [
        {"rank": rank, "step": step, "kind": "B", "start_ns": step * STEP, "end_ns": step * STEP + end}
        for step in range(len(steps))
        for rank, end in LAST.items()
    ]
    empty = {name: -1 if dtype == "int64" else "" for name, dtype in OPS.items()}
    rows = pd.DataFrame([{**empty, **op} for op in ops])
    return make_table(COMMS, {name: comms[name] for name in COMMS}), make_table(OPS, {name: rows[name] for name in OPS})


def matches(*steps: Calls, at: Clock = CLOCK, mesh: MeshInfo = MESH, **columns: object) -> list[int]:
    comms, ops = tables(*steps, **columns)
    matched, warnings = match_by_end_times(comms, ops, mesh, at)
    assert bool(warnings) == bool((matched["match"] >= 0).any())
    return matched["match"].tolist()


def test_what_ends_together_in_every_step_is_one_and_its_early_ranks_wait() -> None:
    comms, ops = tables(NORM, NORM)
    matched, warnings = match_by_end_times(comms, ops, MESH, CLOCK)
    assert matched["match"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    begins = with_transfers(matched)["transfer_start_ns"] % STEP
    assert set(begins) == {LAST[0] + 200 * US}
    assert warnings[0].endswith("2 on ranks 0, 1, 2, 3")


@pytest.mark.parametrize(
    "other",
    [
        {**NORM, 2: [(20_200, 40_900)]},  # ends apart
        {rank: NORM[rank] for rank in (0, 1, 3)},  # not called
        {**NORM, 1: [*NORM[1], (40_300, 40_310)]},  # another ends as near
    ],
    ids=str,
)
def test_it_has_to_in_every_step(other: Calls) -> None:
    assert set(matches(NORM, other)) == {-1}


def test_before_it_the_ends_of_the_pipeline_may_have_one_of_their_own() -> None:
    both = {**NORM, 0: [(40_010, 40_100), (40_200, 40_260)], 3: [(10_010, 40_102), (40_200, 40_263)]}
    result = matches(both, both)
    assert result[:2] == [2, 0]
    assert result[4:6] == [2, 0]
    assert result[2:4] == [0, 0]


def test_gradients_of_a_stages_replicas_before_it_are_left_alone() -> None:
    grads = {
        rank: [(LAST[rank] // US + 10, LAST[rank] // US + 100), (LAST[rank] // US + 200, 40_260)] for rank in range(4)
    }
    assert matches(grads, grads) == [-1, 0, -1, 0, -1, 0, -1, 0, -1, 1, -1, 1, -1, 1, -1, 1]


def test_what_lies_outside_the_ranges_of_steps_belongs_to_the_ops_before_it() -> None:
    comms, ops = tables(NORM, NORM)
    matched, _ = match_by_end_times(comms.assign(step=-1), ops, MESH, CLOCK)
    assert matched["match"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_calls_among_the_ops_are_left_alone() -> None:
    inside = {rank: [(LAST[rank] // US - 10, LAST[rank] // US + 100)] for rank in range(4)}
    assert set(matches(inside)) == {-1}


def test_other_kinds_sizes_and_clocks_are_left_alone() -> None:
    assert set(matches(NORM, kind="broadcast")) == {-1}
    assert set(matches(NORM, group_size=2)) == {-1}
    assert set(matches(NORM, group_size=4)) == {0}
    assert set(matches(NORM, at=replace(CLOCK, method=ClockMethod.NONE, uncertainty_ns=None))) == {-1}
    assert set(matches(NORM, at=replace(CLOCK, unrelated=frozenset({3}), uncertainty_ns=None))) == {-1}
    assert set(matches(NORM, mesh=replace(MESH, num_ranks=8, pipelines=((0, 1, 2, 3), (4, 5, 6, 7))))) == {0}
    assert set(matches(NORM, axis="dp")) == {-1}
