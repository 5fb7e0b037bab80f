"""Steps explained in parts or all at once: the same."""

from __future__ import annotations

import pytest

from pptrace.analysis.aligned import AlignedRun
from pptrace.analysis.explain import explain
from pptrace.analysis.explain.step_times import IndexedWindows, RankTimes, step_times
from pptrace.model.tables import COMMS
from pptrace.schedule.actions import Action
from pptrace.schedule.plan_table import PlanTable
from pptrace.schedule.registry import build
from pptrace.slices import slice_of
from pptrace.workflow.analyse import Analysis
from tests.support.analysed import analyse
from tests.support.synthetic import record, without
from tests.support.tables import table_of


def analysed(lacking: int | None = None) -> Analysis:
    def cost(action: Action) -> int:
        return 100 + 37 * (action.stage == 1) + 11 * ((action.microbatch or 0) % 3)

    traces = record(build("interleaved-1f1b", 2, 6, 2), cost, latency=9, dp=2, steps=5).traces()
    return analyse(traces if lacking is None else without(traces, lacking))


def explained(table: PlanTable, steps: explain.Steps, data: AlignedRun) -> list[explain.Explanation]:
    return [explanation for task in explain.explanation_tasks(table, steps, data) for explanation in task()]


def test_parts_explain_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    analysis = analysed()
    plan = analysis.schedule.plan
    table = plan.table
    steps = [[window for window in analysis.windows if window.step == step] for step in range(5)]
    assert [len(windows) for windows in steps] == [2] * 5
    together = explained(table, steps, analysis.data)
    assert all(explanation.blame is not None and explanation.causes for explanation in together)
    monkeypatch.setattr(explain, "_CELLS", 4 * len(table))
    assert list(explain._parts(table, steps, explain._CELLS)) == [(0, 2), (2, 4), (4, 5)]
    assert explained(table, steps, analysis.data) == together


def test_compact_times_of_many_windows_are_those_of_all_bytes() -> None:
    traces = record(build("1f1b", 2, 4), latency=9, steps=150).traces()
    analysis = analyse(traces)
    plan = analysis.schedule.plan
    indexed = IndexedWindows.of(analysis.windows)
    ranks = [RankTimes.of(plan.table, indexed, rank, analysis.data) for rank in indexed.of_rank]
    ranks[1] = ranks[1].of_windows(0, 100)  # a rank that ended: its windows take a byte, those of the other one two
    compact = [rank.compact() for rank in ranks]
    assert [of_one.ops["window"].dtype.itemsize for of_one in compact] == [2, 1]
    for first, last in ((0, 150), (140, 150)):
        windows = analysis.windows[first:last]
        of_all, of_compact = (
            step_times(plan.table, windows, [rank.of_windows(first, last) for rank in of_run])
            for of_run in (ranks, compact)
        )
        for name in ("start", "end", "before", "gap_bubble", "arrival", "transfer", "is_whole"):
            expected, found = getattr(of_all, name), getattr(of_compact, name)
            assert found.dtype == expected.dtype
            assert (found == expected).all(), name
        assert of_compact.is_whole.any() == (first == 0)


def test_where_a_rank_has_no_trace_nobody_is_blamed_and_the_other_pipeline_is_explained() -> None:
    for step in analysed(lacking=1).report.steps:
        assert step.blame is None
        assert sum(step.critical_path.parts.values()) == step.critical_path.span_ns == step.span_ns


def test_communication_inside_ops_is_told_by_its_axis() -> None:
    """Not that of the pipeline, of a microbatch (as a message is) or of no step."""
    own = {"axis": "tp", "kind": "all_reduce", "step": 0, "microbatch": -1, "start_ns": 5, "end_ns": 15}
    others = ({"axis": "pp"}, {"axis": "pp", "kind": "send"}, {"microbatch": 0}, {"step": -1})
    comms = table_of(COMMS, [own, own, own | {"axis": "cp"}, *(own | other for other in others)])
    assert explain.inner_time_by_axis(slice_of(comms)) == {"tp": 20, "cp": 10}
    assert explain.inner_time_by_axis(slice_of(comms[3:])) == {}
