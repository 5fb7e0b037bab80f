"""Exchanges with experts on paper: two replicas whose experts take a stated time for each row, and the report of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from msgspec import structs

from pptrace.analysis.experts.types import ExpertsReport
from pptrace.analysis.report import Report
from pptrace.analysis.result import Finding, Severity
from pptrace.api.whatif import predict_changes
from pptrace.api.wishes import Wishes
from pptrace.marks import Axis, Collective, CollectiveMark, Mark, OpMark, SpanKind, SpanMark, Uneven
from pptrace.model.report_table import Amount
from pptrace.model.traces import Trace
from pptrace.report.tables.waterfall import waterfall_table
from pptrace.schedule.actions import Action
from pptrace.schedule.registry import build
from pptrace.schedule.text import from_rows
from pptrace.workflow import analyse as workflow
from pptrace.workflow.analyse import Analysis
from tests.support.analysed import analyse
from tests.support.synthetic import START, Event, Job, make_trace, marked

ROW_NS = {"F": 2_000, "B": 4_000}
"""Time of the experts for each row."""
BEFORE, DISPATCH, COMBINE = 1_000, 500, 700
ROW_BYTES = 64


@dataclass(frozen=True)
class Experts:
    """A run with two layers of experts on two ranks, of which rank 0 has ``rows`` of 120 routes in each layer of each microbatch.

    ``slow`` is how many times as long rank 1 takes, ``late`` how much later it comes to each layer; with ``again`` layers are
    recomputed in the backward. ``sharing`` ranks share each expert, of which these are one each, and count the rows of all.
    With ``gathered`` tokens go by all-gathers and come back by reduce-scatters, which no recomputation reaches. ``plan`` are the
    ops of a rank, in place of gpipe's; a W exchanges nothing.
    """

    rows: Sequence[tuple[int, int]] = ((60, 60),) * 3
    slow: float = 1.0
    late: int = 0
    again: bool = False
    steps: int = 3
    dropped: int = 0
    sharing: int = 1
    gathered: bool = False
    plan: str = ""

    def passes(self, kind: str) -> list[tuple[str, int]]:
        """(direction, layer) of the exchanges of an op."""
        if kind == "F":
            return [("F", 0), ("F", 1)]
        if kind == "W":
            return []
        return [(way, layer) for layer in (1, 0) for way in (("F", "B") if self.again else ("B",))]

    def traces(self) -> list[Trace]:
        plan = from_rows([self.plan.split()], "split") if self.plan else build("gpipe", 1, len(self.rows))
        job = Job(plan, dp=2, steps=self.steps)
        events: tuple[list[Event], list[Event]] = ([], [])
        at = START
        for step in range(self.steps):
            begin = at
            for action in plan.compute_actions(0):
                at = self._add_op(events, action, step, at)
            for of_rank in events:
                of_rank.append(marked(SpanMark(SpanKind.STEP, step), begin - 5, at + 5))
            at += 100
        return [make_trace(events[rank], rank, self._facts(job, rank)) for rank in (0, 1)]

    def _facts(self, job: Job, rank: int) -> dict[str, Any]:
        facts = job.metadata(rank)
        forwards = [(step, layer, of) for step in range(self.steps) for of in self.rows for layer in (0, 1)]
        rows = [[self.sharing * (of[layer] if rank == 0 else 120 - of[layer])] for _, layer, of in forwards]
        chosen = [[of[layer] // 2, 60 - of[layer] // 2] for _, layer, of in forwards]
        counts = {
            "num": 2,
            "top_k": 1,
            "first": rank,
            "forwards": [[step, 4 + layer, held] for (step, layer, _), held in zip(forwards, rows, strict=True)],
            "chosen": [[first + self.dropped, second] for first, second in chosen],
            "kept": chosen if self.dropped else [],
            "tokens": [[60 + self.dropped, self.dropped]] * len(forwards),
        }
        return facts | {"mesh": {**facts["mesh"], "ep": 2, "etp": 1}, "experts": counts}

    def _add_op(self, events: tuple[list[Event], list[Event]], action: Action, step: int, begin: int) -> int:
        """Add an op of both ranks, which end it together. Returns its end."""
        at = [begin, begin]
        for way, layer in self.passes(str(action.kind)):
            assert action.microbatch is not None
            held = (self.rows[action.microbatch][layer], 120 - self.rows[action.microbatch][layer])
            took = (ROW_NS[way] * held[0], int(ROW_NS[way] * held[1] * self.slow))
            enters = (at[0] + BEFORE, at[1] + BEFORE + self.late)
            counts = CollectiveMark(Collective.ALL_TO_ALL, Axis.EP, 2, 16, step)
            for rank in (0, 1):
                events[rank].append(marked(counts, enters[rank] - 200, enters[rank] - 100))
            arrived = max(enters) + DISPATCH
            leaves = [arrived + ns for ns in took]
            back = max(leaves) + COMBINE
            for rank in (0, 1):
                sent = tuple(rows // 2 for rows in held)
                got = (held[rank] // 2, held[rank] // 2)
                there, again = _rows(step, sent, got), _rows(step, got, sent)
                if self.gathered:
                    there, again = (_whole(step, kind) for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER))
                events[rank].append(marked(there, enters[rank], arrived))
                if not self._ends_early(action, way):
                    events[rank].append(marked(again, leaves[rank], back))
            at = leaves if self._ends_early(action, way) else [back, back]
        for rank in (0, 1):
            events[rank].append(marked(OpMark(action, step), begin, at[0] + 300))
        return at[0] + 300

    def _ends_early(self, action: Action, way: str) -> bool:
        return self.gathered and str(action.kind) != "F" and way == "F"


def _whole(step: int, kind: Collective) -> Mark:
    return CollectiveMark(kind, Axis.EP, 2, ROW_BYTES * 120, step)


def _rows(step: int, sent: tuple[int, ...], got: tuple[int, ...]) -> Mark:
    uneven = Uneven(ROW_BYTES * sum(got), sent, got)
    return CollectiveMark(Collective.ALL_TO_ALL, Axis.EP, 2, ROW_BYTES * sum(sent), step, None, uneven)


HOT = Experts(rows=((90, 80), (100, 70), (60, 60)))
"""Rank 0 has most rows, in two of three microbatches."""


def analysed(run: Experts) -> Analysis:
    return analyse(run.traces())


def experts_of(run: Experts) -> ExpertsReport:
    return analysed(run).report.experts


def findings_of(report: Report, reason: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.evidence.get("reason") == reason]


def equal_gain(run: Experts) -> int:
    """Time by which a step would be shorter if both ranks had 60 rows, by the times of the run on paper, ns."""
    beyond = [max(rows, 120 - rows) - 60 for of in run.rows for rows in of]
    return sum(beyond) * sum(ROW_NS[way] for kind in "FB" for way, layer in run.passes(kind) if layer == 0)


def test_a_recomputation_that_brings_nothing_back_is_no_exchange() -> None:
    gathered = replace(HOT, gathered=True)
    once, again = (
        {(call.layer, call.direction, call.role): call.count for call in experts_of(run).calls}
        for run in (gathered, replace(gathered, again=True))
    )
    assert again == once
    assert set(once.values()) == {2 * 3 * 3}  # ranks, steps, microbatches
    assert {layer for layer, _, _ in once} == {4, 5}


def test_routes_are_known_where_the_times_of_the_ranks_do_not_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    estimated, related = workflow.estimate_clock, experts_of(HOT)
    monkeypatch.setattr(
        workflow, "estimate_clock", lambda *given: structs.replace(estimated(*given), uncertainty_ns=10**12)
    )
    experts = experts_of(HOT)
    assert [layer.routes for layer in experts.layers] == [layer.routes for layer in related.layers]
    assert (experts.ranks, experts.calls) == ((), ())
    assert experts.reasons == ("the times of the ranks do not compare: who waits for whom is null, and loads of ranks",)


def test_rows_are_in_flight_until_the_weight_gradients_have_read_them() -> None:
    """Microbatches 0 and 1 together, while W of 0 waits; the two last ones have fewer rows."""
    split = experts_of(replace(HOT, plan="0F0 0I0 0F1 0W0 0I1 0W1 0F2 0I2 0W2"))
    assert [rank.in_flight_rows for rank in split.ranks] == [340, 140]
    at_once = experts_of(replace(HOT, plan="0F0 0B0 0F1 0B1 0F2 0B2"))
    assert [rank.in_flight_rows for rank in at_once.ranks] == [170, 120]


@pytest.mark.parametrize("again", [False, True])
def test_what_unequal_routes_cost_is_what_equal_ones_save(again: bool) -> None:
    run = replace(HOT, again=again)
    analysis = analysed(run)
    experts, (finding,) = analysis.report.experts, findings_of(analysis.report, "unequal routes")
    expected = equal_gain(run)
    assert experts.routing.gain_ns == pytest.approx(expected, rel=0.01)
    assert finding.gain_ns == experts.routing.gain_ns
    assert (finding.evidence["cause"], finding.evidence["where"]) == ("imbalance", {"axis": "ep", "rank": 0})
    of_steps = [step.causes or () for step in analysis.report.steps]  # which call it the same
    assert all(("imbalance", {"axis": "ep"}) in [(cause.cause, cause.where) for cause in causes] for causes in of_steps)
    assert finding.evidence["expert"] == 0
    assert not findings_of(analysis.report, "late member")  # it is no slow rank
    (scenario,) = predict_changes(analysis, Wishes(ideals=("routing",))).result.scenarios
    assert scenario.gain_ns == pytest.approx(expected, rel=0.01)


def test_loads_are_those_of_the_routes() -> None:
    experts = experts_of(HOT)
    assert (experts.source, experts.num_experts, experts.top_k) == ("counts", 2, 1)
    assert [(layer.layer, layer.stage, layer.nth) for layer in experts.layers] == [(4, 0, 0), (5, 0, 1)]
    for layer, rows in zip(experts.layers, ((90, 100, 60), (80, 70, 60)), strict=True):
        hot = 3 * sum(rows)
        assert layer.routes == (hot, 3 * 360 - hot)
        assert (layer.hottest, layer.idle_experts, layer.dropped) == (0, 0, 0)
        assert layer.expert_ratio == pytest.approx(hot / 540)
        assert layer.rank_ratio == pytest.approx(sum(rows) / 180)
        assert layer.worst_rank_ratio == pytest.approx(max(rows) / 60)
    rows_of_ranks = [3 * 460, 3 * 260]
    assert [rank.rows for rank in experts.ranks] == rows_of_ranks
    assert [(rank.first_expert, rank.num_experts) for rank in experts.ranks] == [(0, 1), (1, 1)]
    assert [rank.slowness for rank in experts.ranks] == pytest.approx([1.0, 1.0], rel=0.01)
    assert [rank.in_flight_rows for rank in experts.ranks] == [460, 260]  # gpipe: all microbatches, both layers
    assert [rank.in_flight_ratio for rank in experts.ranks] == pytest.approx([460 / 360, 260 / 360])
    calls = 2 * 2 * 3 * 3  # layers, directions, microbatches, steps
    assert sum(call.count for call in experts.calls) == 2 * 2 * calls
    assert sum(call.bytes or 0 for call in experts.calls) == 2 * calls * 120 * ROW_BYTES
    assert sum(call.received_bytes or 0 for call in experts.calls) == 2 * calls * 120 * ROW_BYTES


def test_ranks_that_share_experts_compute_the_rows_of_all_of_them() -> None:
    one, both = experts_of(HOT), experts_of(replace(HOT, sharing=2))
    assert [rank.rows for rank in both.ranks] == [2 * (rank.rows or 0) for rank in one.ranks]
    assert [rank.ratio for rank in both.ranks] == [rank.ratio for rank in one.ranks]
    assert both.routing.gain_ns == pytest.approx(one.routing.gain_ns, rel=0.01)


@pytest.mark.parametrize("again", [False, True])
def test_waits_are_those_of_each_layer_and_direction(again: bool) -> None:
    experts = experts_of(replace(HOT, again=again))
    for call in experts.calls:
        beyond = sum(abs(2 * of[call.nth or 0] - 120) for of in HOT.rows)
        passes = 2 if again and call.direction == "F" else 1
        waits = 0 if call.role == "dispatch" else 3 * passes * ROW_NS[call.direction or ""] * beyond
        assert (call.layer, call.wait_ns) == (4 + (call.nth or 0), waits)
        assert call.transfer_ns == call.count * (DISPATCH if call.role == "dispatch" else COMBINE)
    assert len(experts.calls) == 8


def reasons_of(experts: ExpertsReport, role: str) -> set[tuple[int | None, str | None]]:
    return {(call.last_rank, call.last_reason) for call in experts.calls if call.role == role}


def test_the_rank_with_most_rows_is_last_for_its_rows() -> None:
    experts = experts_of(replace(HOT, rows=((90, 80),) * 3))
    assert reasons_of(experts, "combine") == {(0, "rows")}
    waits = 3 * 3 * (ROW_NS["F"] + ROW_NS["B"]) * ((90 - 30) + (80 - 40))
    assert [(rank.caused_before_ns, rank.caused_after_ns) for rank in experts.ranks] == [(0, waits), (0, 0)]


def test_a_slow_rank_with_as_many_rows_is_slow_and_routes_are_neither_finding_nor_cost() -> None:
    analysis = analysed(Experts(slow=2.0))
    experts = analysis.report.experts
    assert reasons_of(experts, "combine") == {(1, "slow")}
    assert [rank.slowness for rank in experts.ranks] == pytest.approx([0.5, 2.0])
    assert experts.routing.gain_ns == 0
    assert not findings_of(analysis.report, "unequal routes")
    (finding,) = findings_of(analysis.report, "late member")
    assert finding.evidence["where"] == {"rank": 1}
    assert routing_of(analysis.report) == [0] * 3
    assert {cause.cause for step in analysis.report.steps for cause in step.causes or ()} & {"straggler", "jitter"}


def test_a_rank_that_comes_late_to_a_layer_is_late_before_it() -> None:
    experts = experts_of(Experts(late=5_000))
    assert reasons_of(experts, "dispatch") == {(1, "before")}
    waits = 5_000 * 2 * 2 * 3 * 3
    assert [(rank.caused_before_ns, rank.caused_after_ns) for rank in experts.ranks] == [(0, 0), (waits, 0)]


def test_equal_routes_are_no_finding() -> None:
    report = analysed(Experts()).report
    assert not findings_of(report, "unequal routes")
    assert not findings_of(report, "dropped routes")
    assert not findings_of(report, "late member")


def test_a_capacity_that_drops_too_much_is_a_finding() -> None:
    report = analysed(Experts(dropped=20)).report
    assert [layer.dropped for layer in report.experts.layers] == [2 * 3 * 3 * 20] * 2
    assert [layer.dropped_share for layer in report.experts.layers] == pytest.approx([20 / 80] * 2)
    assert [layer.dropped_tokens for layer in report.experts.layers] == [2 * 3 * 3 * 20] * 2  # of one route each
    assert [layer.dropped_tokens_share for layer in report.experts.layers] == pytest.approx([20 / 80] * 2)
    (finding,) = findings_of(report, "dropped routes")
    assert finding.evidence["dropped_share"] == pytest.approx(20 / 80)
    assert "25.0% of its tokens have no other one" in finding.detail
    gains = [each.gain_ns for each in report.findings if each.severity is Severity.WARNING]
    assert gains[0] is None  # it stands before those that have a gain
    assert not findings_of(analysed(Experts(dropped=2)).report, "dropped routes")


@pytest.mark.parametrize(
    "damage",
    [
        lambda counts: counts.update(chosen="?"),
        lambda counts: counts.update(num=-1),
        lambda counts: counts["forwards"].append([1]),
        lambda counts: counts["chosen"][0].append(-3),
        lambda counts: counts.update(kept=[[1]]),
    ],
)
def test_damaged_counts_are_left_out(damage: Callable[[dict[str, Any]], None]) -> None:
    traces = HOT.traces()
    for trace in traces:
        damage(trace.metadata["experts"])
    experts = analyse(traces).report.experts
    assert experts.source == "splits"
    assert [layer.routes for layer in experts.layers] == [None, None]
    assert [rank.rows for rank in experts.ranks] == [3 * 460, 3 * 260]


def routing_of(report: Report) -> list[int]:
    """Cost of unequal routes of each step by its causes, ns."""
    return [
        sum(cause.ns for cause in step.causes or () if (cause.cause, cause.where) == ("imbalance", {"axis": "ep"}))
        for step in report.steps
    ]


def test_unequal_routes_are_a_cause_of_each_step_and_causes_still_sum_to_its_span() -> None:
    report = analysed(HOT).report
    assert routing_of(report) == pytest.approx([equal_gain(HOT)] * 3, rel=0.01)
    for step in report.steps:
        assert step.causes is not None
        assert sum(cause.ns for cause in step.causes) == (step.span_ns or 0) - (step.ideal_ns or 0)
        others = sum(abs(cause.ns) for cause in step.causes if cause.cause in ("straggler", "jitter", "imbalance"))
        assert others - routing_of(report)[0] < 0.05 * equal_gain(
            HOT
        )  # nothing of it is left in what it was taken from
    assert report.step_series is not None


def test_the_table_of_causes_says_that_experts_have_more_rows() -> None:
    hot, slow = (waterfall_table(analysed(run).report.steps[0], Amount.WHOLE) for run in (HOT, Experts(slow=2.0)))
    meanings = [{str(row[0]): str(row[4]) for row in table.rows} for table in (hot, slow)]
    assert meanings[0]["unequal routes"] == "experts with more rows than others: axis ep 0.60"
    assert "unequal routes" not in meanings[1]
    assert [of_step["imbalance"] for of_step in meanings] == ["stages of unequal cost"] * 2
