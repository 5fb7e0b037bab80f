"""The table of memory: what it shows of few and of many ranks, and that it says which bytes it counts."""

from __future__ import annotations

from types import SimpleNamespace

from msgspec.structs import replace

from pptrace.analysis.memory.show import memory_table, tables
from pptrace.analysis.memory.types import InFlight, MemoryReport, PredictedMemory, RankMemory
from pptrace.model.report_table import MAX_ROWS, Amount

PREDICTED = PredictedMemory(1_000, 2_000, 3_000, 4_000, 10_000, ())


def rank(number: int, stage: int, peak: int | None = None, predicted: PredictedMemory | None = None) -> RankMemory:
    kind = None if peak is None else "process_resident"
    return RankMemory(number, stage, (stage,), 2, peak, kind, None, None, InFlight(None, 3), predicted)


def report(*ranks: RankMemory) -> MemoryReport:
    return MemoryReport(ranks, ())


def test_there_is_a_table_only_of_something() -> None:
    def has_table(memory: MemoryReport | None) -> bool:
        return bool(tables(SimpleNamespace(memory=memory), Amount.BRIEF))

    assert not has_table(None)
    assert not has_table(report(rank(0, 0)))
    assert has_table(report(rank(0, 0), rank(1, 1, peak=5)))
    assert has_table(report(rank(0, 0, predicted=PREDICTED)))


def test_columns_without_a_figure_are_left_out() -> None:
    table = memory_table(report(rank(0, 0, peak=5_000_000), rank(1, 1)), Amount.BRIEF)
    assert table.columns == ("rank", "stage", "peak", "in flight")
    assert table.rows == (("0", "0", "5.0 MB", "3"), ("1", "1", "–", "3"))
    assert table.notes == ("peak: resident memory of the process, interpreter and libraries too",)


def test_predicted_parts_are_beside_the_measured_peak() -> None:
    planned = replace(rank(0, 0, 5_000, PREDICTED), in_flight=InFlight(4, 3), start_bytes=10)
    table = memory_table(report(planned), Amount.WHOLE)
    assert dict(zip(table.columns, table.rows[0], strict=True)) == {
        "rank": "0",
        "stage": "0",
        "peak": "5.0 KB",
        "at start": "10 B",
        "in flight": "3",
        "planned": "4",
        "predicted": "10.0 KB",
        "weights": "1.0 KB",
        "gradients": "2.0 KB",
        "optimizer": "3.0 KB",
        "activations": "4.0 KB",
    }
    assert all(0 <= column < len(table.columns) for column in table.leave_out)


def test_of_many_ranks_the_fullest_of_each_stage_is_shown() -> None:
    many = [rank(number, number % 4, peak=1_000 + number) for number in range(64)]
    brief, whole = (memory_table(report(*many), amount) for amount in (Amount.BRIEF, Amount.WHOLE))
    assert [row[0] for row in brief.rows] == ["60", "61", "62", "63"]
    assert len(whole.rows) == 64
    deep = memory_table(report(*(rank(number, number, peak=number) for number in range(40))), Amount.BRIEF)
    assert [row[0] for row in deep.rows] == [str(number) for number in range(40 - MAX_ROWS, 40)]
    assert "28 more" in deep.notes[-1]
