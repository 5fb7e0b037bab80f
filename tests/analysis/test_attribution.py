"""What the ops and transfers of a step cost, and how that becomes a waterfall."""

from __future__ import annotations

import pytest

from pptrace.analysis.attribution import MeasuredCosts, measured_costs, waterfall
from pptrace.model.tables import COMMS, OPS, empty_table, make_table
from pptrace.schedule.actions import Kind
from pptrace.schedule.registry import build
from pptrace.slices import slice_of

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
    found = waterfall(plan, MeasuredCosts(ops, {}, within), span_ns=640)
    assert found is not None
    assert (found.compute, found.structural, found.imbalance, found.jitter) == (440, 0, 0, 0)
    assert (found.communication, found.unexplained) == (160, 40)
