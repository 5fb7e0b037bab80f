"""The tables of communication."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pptrace.model.report_table import Amount, ReportTable
from pptrace.report.tables import tables_of_step
from pptrace.workflow.load import load
from tests.support.programs import SAMPLES


def test_bytes_are_held_against_predictions_only_where_both_are_known() -> None:
    step = load([SAMPLES / "1f1b_p2"]).report.typical_step
    rows = sum(len(rank.comms) for rank in step.ranks)
    first = step.ranks[0]
    assert first.comms[0].predicted_bytes is not None
    unmeasured = replace(first, comms=(replace(first.comms[0], bytes=None), *first.comms[1:]))
    partly = replace(step, ranks=(unmeasured, *step.ranks[1:]))
    silent = replace(step, ranks=tuple(replace(rank, comms=()) for rank in step.ranks))

    def table_of(measured: object) -> ReportTable:
        (table,) = (table for table in tables_of_step(measured, Amount.WHOLE) if table.key == "comms")
        return table

    sentence = "bytes: predicted from the model's sizes and options = measured, in all {} rows"
    assert table_of(step).notes[0] == sentence.format(rows)
    assert table_of(partly).notes[0] == sentence.format(rows - 1)
    assert not [table for table in tables_of_step(silent, Amount.WHOLE) if table.key == "comms"]


@pytest.mark.parametrize("amount", list(Amount))
def test_times_that_sum_to_more_than_the_step_are_explained(amount: Amount) -> None:
    step = load([SAMPLES / "1f1b_p2"]).report.typical_step
    note = "times are sums over calls, which may go on at the same time and beyond the step"
    for total_ns, has_note in ((1, False), (2 * step.span_ns, True)):
        ranks = (
            replace(rank, comms=tuple(replace(comm, total_ns=total_ns) for comm in rank.comms)) for rank in step.ranks
        )
        tables = tables_of_step(replace(step, ranks=tuple(ranks)), amount)
        assert [note in table.notes for table in tables if table.key == "comms"] == [has_note]
