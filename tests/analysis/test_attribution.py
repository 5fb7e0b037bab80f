"""Costs of the ops and transfers of a step, and the waterfall that they become."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from itertools import chain, pairwise

import numpy as np
import pytest

from pptrace.analysis.attribution import waterfalls
from pptrace.analysis.step_parts import Waterfall
from pptrace.model.tables import COMMS, OPS, empty_table, make_table
from pptrace.schedule.actions import Key, Kind
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build
from pptrace.schedule.text import from_rows
from pptrace.simulator import Costs, simulate
from pptrace.slices import slice_of
from tests.support.waterfall_by_keys import MeasuredCosts, measured_costs, merge_costs, waterfall

NO_OPS = slice_of(empty_table(OPS))


@pytest.mark.parametrize(
    ("asked", "moving", "moved", "cost"),
    [
        (100, 130, 170, 40),  # its reader was there before its sender: it cost the moving
        (150, 130, 170, 20),  # posted ahead, and still on its way when its reader came
        (180, 130, 170, 0),  # posted ahead, and there when its reader came
    ],
)
def test_a_transfer_costs_what_its_reader_waited_while_it_moved(asked: int, moving: int, moved: int, cost: int) -> None:
    row = {"kind": "recv", "direction": "F", "stage": 2, "microbatch": 5, "match": 7, "asked_ns": asked}
    row |= {"transfer_start_ns": moving, "transfer_end_ns": moved}
    blank = {name: 0 if dtype == "int64" else "" for name, dtype in COMMS.items()} | row
    costs = measured_costs(NO_OPS, slice_of(make_table(COMMS, {name: [blank[name]] for name in COMMS})))
    assert costs.transfers == {(Kind.F, 1, 5): cost}


def test_a_gradient_belongs_to_the_b_or_i_that_made_it_and_an_unmatched_message_costs_nothing() -> None:
    blank = {name: 0 if dtype == "int64" else "" for name, dtype in COMMS.items()}
    blank |= {"kind": "recv", "direction": "B", "stage": 1, "microbatch": 3, "transfer_end_ns": 9}
    rows = [blank | {"match": 0}, blank | {"match": -1, "microbatch": 4}]
    table = make_table(COMMS, {name: [row[name] for row in rows] for name in COMMS})
    costs = measured_costs(NO_OPS, slice_of(table))
    assert costs.transfers == {(Kind.B, 2, 3): 9, (Kind.I, 2, 3): 9}


def test_what_an_op_communicates_inside_itself_is_communication_and_not_compute() -> None:
    """Two microbatches on one stage: forwards of 100 ns of which 30 are communication, backwards of 200 of which 50 are."""
    plan = build("1f1b", 1, 2)
    ops = {(Kind.F, 0, mb): 100 for mb in (0, 1)} | {(Kind.B, 0, mb): 200 for mb in (0, 1)}
    within = {(Kind.F, 0, mb): 30 for mb in (0, 1)} | {(Kind.B, 0, mb): 50 for mb in (0, 1)}
    parts = waterfall(plan, MeasuredCosts(ops, {}, within), span_ns=640)
    assert parts is not None
    assert (parts.compute, parts.structural, parts.imbalance, parts.jitter) == (440, 0, 0, 0)
    assert (parts.communication, parts.unexplained) == (160, 40)


def attributed(
    plan: Plan, ops: dict[Key, int], within: dict[Key, int], transfers: dict[Key, int], span: int
) -> Waterfall:
    """The waterfall of a step from its definition, by simulations of the plan."""
    computing = {key: ops[key] - within[key] for key in ops}

    def means(group: Callable[[Key], Hashable]) -> dict[Key, int]:
        members: dict[Hashable, list[int]] = {}
        for key, cost in computing.items():
            members.setdefault(group(key), []).append(cost)
        return {key: round(sum(values) / len(values)) for key in ops for values in [members[group(key)]]}

    def makespan(costs: dict[Key, int], transfers: dict[Key, int] | None = None) -> int:
        return simulate(plan, Costs(ops=costs, transfers=transfers or {})).makespan_ns

    even = sum(computing.values()) // plan.pp
    lengths = [makespan(means(lambda key: key[0])), makespan(means(lambda key: key[:2])), makespan(computing)]
    lengths.append(makespan(ops, transfers))
    parts = [after - before for before, after in pairwise([even, *lengths, span])]
    return Waterfall(even, *parts[:4], None, parts[4])


DUPLICATE = from_rows([["0F0", "0F0", "0B0", "0F1", "0B1"], ["1F0", "1B0", "1F1", "1B1"]], "custom")


@pytest.mark.parametrize(
    "plan",
    [build("1f1b", 3, 5), build("zb-h1", 2, 4), build("interleaved-1f1b", 2, 4, 2), build("dualpipe", 2, 4), DUPLICATE],
    ids=lambda plan: plan.name,
)
def test_steps_attributed_together_are_those_attributed_alone_by_their_definition(plan: Plan) -> None:
    table, chance = plan.table, random.Random(plan.name)
    keys = [action.key for row in plan.ranks for action in row]
    senders = {
        half.key for action in chain.from_iterable(plan.ranks) for half in action.halves if half.kind is not Kind.W
    }
    steps = []
    for _ in range(4):
        ops = {key: chance.randrange(50, 1000) for key in keys}
        within = {key: chance.randrange(50) for key in keys}
        steps.append(
            (ops, within, {key: chance.randrange(90) for key in sorted(senders)}, chance.randrange(5000, 9000))
        )
    together = waterfalls(
        table,
        np.array([[ops[key] - within[key] for key in keys] for ops, within, *_ in steps]),
        np.array([[within[key] for key in keys] for _, within, *_ in steps]),
        np.array([Costs(transfers=transfers).latencies(table) for *_, transfers, _ in steps]),
        [span for *_, span in steps],
    )
    for (ops, within, transfers, span), one in zip(steps, together, strict=True):
        assert one == attributed(plan, ops, within, transfers, span)
        assert one == waterfall(plan, MeasuredCosts(ops, transfers, within), span)
    assert {part.communication > 0 for part in together} == {True}


def test_the_parts_of_1f1b_with_a_slow_last_stage_by_hand() -> None:
    """p=2, m=4, F and B take 10 and 20 on the first stage, 30 and 60 on the last; the first F 16 and the last one 4.

    Compute: (4·30 + 4·90)/2 = 240. At the mean of both stages, 20 and 40, 1F1B takes (m + p − 1)(20 + 40) = 300. At their
    own costs the last stage never waits after its first F: 10 + 4·90, then the last B, 20: 390. It begins 6 later by
    the first F. Messages of 5 delay its beginning once and the last B once.
    """
    plan = build("1f1b", 2, 4)
    ops = {
        (kind, stage, mb): cost * (3 if stage else 1)
        for kind, cost in ((Kind.F, 10), (Kind.B, 20))
        for stage in (0, 1)
        for mb in range(4)
    }
    ops |= {(Kind.F, 0, 0): 16, (Kind.F, 0, 3): 4}
    transfers = {(Kind.F, 0, mb): 5 for mb in range(4)} | {(Kind.B, 1, mb): 5 for mb in range(4)}
    ranks = [
        MeasuredCosts(
            {key: cost for key, cost in ops.items() if key[1] == stage},
            {key: cost for key, cost in transfers.items() if key[1] != stage},  # measured where they arrive
        )
        for stage in (0, 1)
    ]
    parts = waterfall(plan, merge_costs(ranks), span_ns=425)
    assert parts is not None
    assert (parts.compute, parts.structural, parts.imbalance, parts.jitter) == (240, 60, 90, 6)
    assert (parts.communication, parts.host, parts.unexplained) == (10, None, 19)
    del ops[Kind.B, 1, 2]
    assert waterfall(plan, MeasuredCosts(ops, transfers), span_ns=425) is None, "an op is missing"
