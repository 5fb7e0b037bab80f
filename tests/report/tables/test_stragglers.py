"""The table of stragglers: what is slow, the slowest first, and the shares in words."""

from __future__ import annotations

from pptrace.analysis.stragglers.show import stragglers_table
from pptrace.analysis.whole_run import KindSlowdown, StageSlowdown, Stragglers, WorkerSlowdown
from pptrace.model.report_table import Amount


def stragglers_of(num_slow: int, m_w: float | None = 0.25) -> Stragglers:
    return Stragglers(
        1.25,
        m_w,
        None if m_w is None else -0.5,
        tuple(WorkerSlowdown(rank, 1.1 + rank / 100 if rank < num_slow else 1.0) for rank in range(12)),
        (StageSlowdown(0, 1.2), StageSlowdown(1, 0.9)),
        (KindSlowdown("F", 1.02), KindSlowdown("B", 1.03)),
        7,
        "step",
    )


def test_what_is_slow_is_listed_by_what_it_is_the_slowest_first() -> None:
    table = stragglers_table(stragglers_of(2), Amount.WHOLE)
    assert table.rows == (
        ("stage", "0", "1.200"),
        ("worker", "rank 1", "1.110"),
        ("worker", "rank 0", "1.100"),
        ("kind", "B", "1.030"),
    )
    note, meaning = table.notes
    assert note.startswith("7 steps replayed take 1.250 times as long as with every op")
    assert note.endswith("; the slowest worker explains 25.0% of it; the last stage explains none of it")
    assert "slowdowns overlap" in meaning


def test_a_brief_table_has_the_slowest_of_each_and_counts_the_others() -> None:
    table = stragglers_table(stragglers_of(10), Amount.BRIEF)
    assert [row[:2] for row in table.rows] == [("stage", "0"), ("worker", "rank 9"), ("kind", "B")]
    assert "9 more" in table.notes[0]
    whole = stragglers_table(stragglers_of(10), Amount.WHOLE)
    assert sum(row[0] == "worker" for row in whole.rows) == 10
    assert not any("more" in note for note in whole.notes)


def test_what_goes_with_the_slowest_is_all_at_most() -> None:
    note, _ = stragglers_table(stragglers_of(2, m_w=2.399), Amount.WHOLE).notes
    assert "; the slowest worker explains all of it" in note


def test_shares_that_are_not_known_are_not_mentioned() -> None:
    note, _ = stragglers_table(stragglers_of(0, m_w=None), Amount.WHOLE).notes
    assert "explains" not in note
