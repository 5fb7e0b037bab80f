"""Findings about reasons, hosts and single steps, on steps worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from pptrace.analysis.findings.find import find
from pptrace.analysis.findings.plain import with_synchronisations
from pptrace.analysis.findings.root_causes import STRAGGLER
from pptrace.analysis.findings.steps import findings_of_series
from pptrace.analysis.result import Finding, MissingEvidence, PhaseSummary, RankStep, Severity, StepReport
from pptrace.analysis.stragglers.detectors import Noise, Study
from pptrace.analysis.stragglers.hosts import LATE_LAUNCHES
from pptrace.analysis.stragglers.reason import Reason
from pptrace.analysis.whole_run import BlamedOp, Cause, StepChange, StepOutlier, StepSeries
from pptrace.model.device import HostIdle, SyncSummary
from tests.support.parts import SCHEDULE, findings_with, rank_step, reason_with, step_with, steps_with

STEPS = 12


def gains_of(findings: tuple[Finding, ...]) -> dict[str, int | None]:
    return {finding.evidence.get("reason", finding.evidence["cause"]): finding.gain_ns for finding in findings}


@pytest.mark.parametrize(("gain", "left"), [(60, 200), (59, 200), (61, 199)])
def test_a_reason_takes_of_its_second_cause_what_the_first_did_not_have(gain: int, left: int) -> None:
    steps = steps_with(Cause("jitter", {"rank": 1}, 60), Cause("straggler", {"rank": 3}, 200))
    found = findings_with(steps, reason_with(gain, ("jitter", "straggler"), "pauses"))
    assert gains_of(found) == {"straggler": left, "pauses": gain}


def test_what_a_reason_takes_is_no_part_of_its_place_any_more() -> None:
    steps = steps_with(Cause("jitter", {"rank": 1}, 100), Cause("jitter", {"rank": 3}, 90))

    def rest(reason: Reason) -> Finding:
        return next(one for one in findings_with(steps, reason) if "reason" not in one.evidence)

    jitter = rest(reason_with(60, ("jitter",), "pauses", rank=1))
    assert (jitter.gain_ns, jitter.evidence["where"]) == (130, {"rank": 3})
    jitter = rest(reason_with(95, ("jitter",), "pauses"))
    assert (jitter.gain_ns, jitter.evidence["where"]) == (95, {"rank": 1})
    steps = steps_with(*(Cause("jitter", {"rank": rank}, ns) for rank, ns in ((1, 60), (2, 50), (3, 90))))
    jitter = rest(reason_with(100, ("jitter",), "pauses"))
    assert (jitter.gain_ns, jitter.evidence["where"]) == (100, {})  # rank 3 has 45 of them


def on_devices(steps: list[StepReport]) -> list[StepReport]:
    """The steps with a rank of which it is known why its device was idle."""
    return [replace(step, ranks=(rank_step(0, host=HostIdle(0, 0, 0)),)) for step in steps]


def test_devices_that_wait_for_launches_are_not_all_on_the_rank_that_is_named() -> None:
    steps = steps_with(Cause("host", {"rank": 0}, 300), Cause("host", {"rank": 1}, 200))
    (host,) = find(on_devices(steps), SCHEDULE)
    assert host.title.endswith("because hosts launch too late, most of it on rank 0")
    (late,) = find(steps, SCHEDULE)
    assert late.title.endswith(" ops that begin late though their inputs are there")
    assert late.evidence == {"cause": "host", "where": {}, "share": 0.5}


@pytest.mark.parametrize(("late", "num_findings"), [(50, 1), (49, 0)])
def test_without_a_device_ops_that_begin_late_are_a_finding_from_a_twentieth_of_the_step_on(
    late: int, num_findings: int
) -> None:
    steps = steps_with(Cause("host", {"rank": 0}, late))
    assert len(find(steps, SCHEDULE)) == num_findings
    assert len(find(on_devices(steps), SCHEDULE)) == 1


def test_of_five_steps_what_one_of_them_lost_is_no_finding() -> None:
    for num_steps, num_findings in ((4, 1), (5, 0)):
        steps = steps_with(num_steps=num_steps)
        steps = [replace(step, causes=(Cause("host", {}, 500 * (step.step == 2)),)) for step in steps]
        assert len(find(steps, SCHEDULE)) == num_findings


def test_a_pipeline_of_one_rank_has_no_fill_and_drain() -> None:
    assert find(steps_with(Cause("structural", {}, 0)), SCHEDULE) == ()


def test_late_launches_are_no_reason_where_devices_tell_what_their_hosts_were_late_with() -> None:
    late = reason_with(100, ("host", "unexplained"), LATE_LAUNCHES, rank=1)
    steps = steps_with(Cause("host", {}, 30), Cause("unexplained", {}, 200))
    assert gains_of(findings_with(on_devices(steps), late)) == {"unexplained": 200, "host": 30}
    assert gains_of(findings_with(steps, late)) == {LATE_LAUNCHES: 100, "unexplained": 130}
    everywhere = reason_with(100, ("host", "unexplained"), LATE_LAUNCHES)
    assert gains_of(findings_with(steps, everywhere)) == {"unexplained": 200}, (
        "the cause says so, here too little of it"
    )
    of_devices = on_devices(steps_with(Cause("unexplained", {}, 200)))
    assert gains_of(findings_with(of_devices, late)) == {"unexplained": 200}


def test_the_gain_of_a_place_is_that_of_its_replay_and_what_its_share_is_stands_besides() -> None:
    steps = steps_with(Cause("imbalance", {"stage": 1}, 100), Cause("jitter", {"rank": 2}, 90))
    gains = {("stage", 1): np.array([30, 30, 40, 40]), ("rank", 2): np.full(4, 1)}
    imbalance, jitter = sorted(find(steps, SCHEDULE, Study(gains=gains)), key=lambda one: one.evidence["cause"])
    assert imbalance.evidence == {
        "cause": "imbalance",
        "where": {"stage": 1},
        "share": 0.1,
        "gain_if_spread_ns": 100,
    }
    assert (imbalance.gain_ns, jitter.gain_ns) == (35, 90)
    assert "gain_if_spread_ns" not in jitter.evidence
    small = {("stage", 1): np.full(4, 19)}
    assert gains_of(find(steps, SCHEDULE, Study(gains=small))) == {"jitter": 90}


def test_a_stage_of_long_ops_that_compute_as_much_as_others_is_no_heavier() -> None:
    gains = {("stage", 1): np.full(4, 300)}
    for part, expected in ((29, {"host": 400}), (30, {"host": 400, "imbalance": 300})):
        steps = on_devices(steps_with(Cause("imbalance", {"stage": 1}, part), Cause("host", {}, 400)))
        assert gains_of(find(steps, SCHEDULE, Study(gains=gains))) == expected


@pytest.mark.parametrize(
    ("shared", "gain", "slow", "imbalance", "is_found"),
    [
        (200, 60, ("stage", 1), 2, True),
        (40, 60, ("stage", 1), 2, False),
        (200, 40, ("stage", 1), 2, False),
        (200, 60, ("stage", 2), 2, False),
        (200, 60, ("stage", 1), 60, False),
    ],
)
def test_a_heavy_stage_whose_cost_others_hide_is_a_finding_on_what_is_shared(
    shared: int, gain: int, slow: tuple[str, int], imbalance: int, is_found: bool
) -> None:
    """Spreading its work would gain nothing, as other ranks are late anyway; without its excess a step is shorter."""
    steps = steps_with(Cause("imbalance", {"stage": 1}, imbalance), Cause("interaction", {}, shared))
    noise = Noise(frozenset({slow}))
    found = find(steps, SCHEDULE, Study(gains={("stage", 1): np.full(4, gain)}, noise=noise))
    of_shared = [finding for finding in found if finding.evidence["cause"] == "interaction"]
    assert [(one.gain_ns, one.evidence["where"], one.evidence["share"]) for one in of_shared] == [
        (60, {"stage": 1}, 0.2)
    ] * is_found


@pytest.mark.parametrize(
    ("rank", "waited_for", "kept"),
    [
        (2, 99, {"straggler": 100}),
        (2, 100, {"late member": 100}),
        (3, 101, {"late member": 101, "straggler": 100}),
    ],
)
def test_a_rank_is_one_finding_whether_others_wait_in_its_ops_or_replicas_are_faster(
    rank: int, waited_for: int, kept: dict[str, int]
) -> None:
    late = replace(reason_with(waited_for, ("straggler",), "late member", rank=rank), is_cause=True)
    steps = steps_with(Cause("straggler", {"rank": 2}, 300))
    assert gains_of(findings_with(steps, late, gains={("rank", 2): np.full(4, 100)})) == kept


@pytest.mark.parametrize(
    ("cause", "kinds", "doubt"),
    [
        (Cause("imbalance", {"stage": 1}, 100), (STRAGGLER,), True),
        (Cause("imbalance", {}, 100), (STRAGGLER,), False),
        (Cause("jitter", {"rank": 1}, 100), (STRAGGLER,), False),
        (Cause("imbalance", {"stage": 1}, 100), ("slow link",), False),
    ],
)
def test_of_one_pipeline_a_heavy_stage_may_be_a_slow_rank(cause: Cause, kinds: tuple[str, ...], doubt: bool) -> None:
    missing = MissingEvidence(("outliers",), ""), MissingEvidence(kinds, "")
    (finding,) = find(steps_with(cause, Cause("communication", {}, 1)), SCHEDULE, missing=missing)
    assert finding.detail.endswith("a slow rank would look the same: there is one pipeline") == doubt


def starved(ns: int, window: int) -> RankStep:
    return rank_step(window_ns=window, host=HostIdle(ns, 0, 0))


def test_without_a_pipeline_the_mean_rank_says_what_launching_costs() -> None:
    step = replace(step_with(None), ranks=(starved(100, 1000), starved(501, 3000)))
    (host,) = find([step, step], SCHEDULE)
    assert (host.gain_ns, host.evidence["share"], host.evidence["launch_starved_ns"]) == (300, 0.3, 601)
    assert host.title.startswith("Host: 30.0% of the step is device idle time because hosts launch too late")
    unknown = replace(step, ranks=(*step.ranks, rank_step(), rank_step()))
    assert find([unknown], SCHEDULE) == (), "of half of the ranks it is not known"
    assert find([unknown, step], SCHEDULE)[0].gain_ns == 300
    in_pipeline = replace(step, ranks=tuple(replace(rank, phases=PHASES) for rank in step.ranks))
    assert find([in_pipeline], SCHEDULE) == ()


PHASES = {"steady": PhaseSummary(0, 9, 1, 1, None)}
HOST = Finding(Severity.WARNING, "Host", "launch less", 9, {"cause": "host", "where": {}})


def sync(call: str, drained: int, longest: int, operator: str = "", op: str | None = None) -> SyncSummary:
    return SyncSummary(call, operator, 2, 999, drained, longest, 10 * longest, op)


def run_of_hosts(idle: int | None, *of_steps: dict[int, list[SyncSummary]]) -> list[StepReport]:
    """Steps whose ranks each lacked launches for ``idle`` ns, with their synchronisations."""
    host = None if idle is None else HostIdle(idle, 0, 0)
    return [
        replace(
            step_with(None),
            ranks=tuple(rank_step(rank, host=host, synchronisations=tuple(syncs)) for rank, syncs in of_ranks.items()),
        )
        for of_ranks in of_steps
    ]


def test_calls_that_wait_for_the_device_are_named_by_what_they_cost_with_the_longest_of_each() -> None:
    item = "aten::item"
    steps = run_of_hosts(
        1000,
        {
            4: [sync("Memcpy", 300, 50, item), sync("StreamSynchronize", 350, 2_000_000)],
            5: [sync("Memcpy", 0, 999, item)],
        },
        {
            4: [sync("StreamSynchronize", 250, 30), sync("EventSynchronize", 40, 7), sync("DeviceSynchronize", 6, 8)],
            5: [sync("Memcpy", 100, 60, item, "0F3")],
        },
    )
    found = with_synchronisations(HOST, steps)
    totals = found.evidence["synchronisations"]
    assert [(one["call"], one["operator"], one["count"], one["drained_ns"]) for one in totals] == [
        ("StreamSynchronize", "", 4, 300),
        ("Memcpy", item, 4, 200),
        ("EventSynchronize", "", 2, 20),
    ]
    assert [(one["longest_ns"], one["longest_start_ns"], one["longest_rank"]) for one in totals] == [
        (2_000_000, 20_000_000, 4),
        (60, 600, 5),
        (7, 70, 4),
    ]
    assert found.evidence["launch_starved_ns"] == 2000
    begin = "26% of it follows calls that wait for the device: StreamSynchronize (4 in all, the longest 2.000 ms on rank 4), "
    assert found.detail.startswith(
        begin + "Memcpy in aten::item (4 in all, the longest 0.000 ms on rank 5 before 0F3), EventSynchronize"
    )
    assert found.detail.endswith("avoid them; launch less")
    other = replace(HOST, evidence={"cause": "jitter"})
    assert with_synchronisations(other, steps) is other
    assert with_synchronisations(HOST, run_of_hosts(None, {0: [sync("StreamSynchronize", 100, 5)]})) is HOST


@pytest.mark.parametrize(
    ("idle", "drained", "share"),
    [(1000, 0, None), (1000, 100, None), (1000, 110, "11%"), (50, 100, "100%")],
)
def test_calls_are_named_from_a_tenth_of_the_time_without_launches_on(
    idle: int, drained: int, share: str | None
) -> None:
    found = with_synchronisations(HOST, run_of_hosts(idle, {0: [sync("StreamSynchronize", drained, 5)]}))
    assert found.detail.partition(" of it")[0] == (share or "launch less")
    assert len(found.evidence["synchronisations"]) == (drained > 0)


def outlier(step: int, excess: int, *differences: Cause, ops: tuple[BlamedOp, ...] = ()) -> StepOutlier:
    return StepOutlier(step, 1000 + excess, 2, 1000, differences or None, ops)


def series_of(*outliers: StepOutlier, changes: tuple[StepChange, ...] = ()) -> StepSeries:
    return StepSeries(STEPS, *[1000] * 5, outliers, changes)


def of_series(*outliers: StepOutlier, changes: tuple[StepChange, ...] = ()) -> list[Finding]:
    steps = [replace(step_with(None), step=number) for number in range(STEPS)]
    return list(findings_of_series(series_of(*outliers, changes=changes), steps))


@pytest.mark.parametrize(("ns", "is_named"), [(300, True), (299, False)])
def test_a_cause_is_named_that_makes_half_of_what_a_step_is_longer(ns: int, is_named: bool) -> None:
    causes = (Cause("jitter", {"rank": 3}, ns), Cause("host", {"rank": 1}, 200))
    (finding,) = of_series(outlier(5, 600, *causes))
    assert finding.evidence["steps"] == [5]
    assert finding.evidence["cause"] == ("jitter" if is_named else "unexplained")
    assert finding.evidence["where"] == ({"rank": 3} if is_named else {})
    place = ", by compute of rank 3" if is_named else ""
    assert (
        finding.title == f"Outliers: 1 of 12 steps is far longer than the others{place} (step 5: 1.6 times the usual)"
    )
    assert (finding.gain_ns, finding.severity) == (50, Severity.INFO)


def test_outliers_are_mentioned_from_two_percent_of_all_steps_on_and_warned_of_if_they_come_again() -> None:
    assert of_series(outlier(5, 239)) == []
    assert [finding.gain_ns for finding in of_series(outlier(5, 240))] == [20]
    often = [outlier(step, 600) for step in range(1, 12, 2)]
    (finding,) = of_series(*often)
    assert finding.title == "Outliers: 6 of 12 steps are far longer than the others (step 1: 1.6 times the usual)"
    assert (finding.gain_ns, finding.severity, finding.evidence["steps"]) == (
        300,
        Severity.WARNING,
        [1, 3, 5, 7, 9, 11],
    )
    assert 0 < finding.gain_low_ns < 300 < finding.gain_high_ns < 600


def test_the_op_to_blame_for_an_outlier_is_given() -> None:
    (finding,) = of_series(outlier(5, 600, ops=(BlamedOp(3, "F", 1, 7, 500),)))
    assert finding.detail.startswith(
        "step 5 takes 0.0 ms more than step 2; most of the bubble that it has more is due to F of microbatch 7 on rank 3 "
        "(stage 1); look at"
    )


@pytest.mark.parametrize(
    ("step", "after", "gain"), [(6, 1200, 100), (9, 1200, 50), (6, 1040, 20), (6, 1038, None), (6, 900, None)]
)
def test_steps_that_got_longer_are_a_finding_by_the_share_of_the_run_since_then(
    step: int, after: int, gain: int | None
) -> None:
    change = StepChange(step, 2, 1000, step + 1, after, (Cause("host", {"rank": 1}, (after - 1000) // 2),))
    found = of_series(changes=(change,))
    assert [finding.gain_ns for finding in found] == ([] if gain is None else [gain])
    for finding in found:
        longer = after - 1000
        assert (
            finding.title
            == f"Slower since step {step}: steps take {longer / 10:.0f}% longer than before, by host of rank 1"
        )
        assert finding.evidence == {"cause": "host", "where": {"rank": 1}, "step": step}
        assert (finding.gain_low_ns, finding.gain_high_ns, finding.severity) == (0, longer, Severity.WARNING)


def test_steps_that_got_faster_again_were_slower_until_then() -> None:
    """Twelve steps, 0 to 11: from 6 to 8 they take 1,200, then 1,050; 200 for three of twelve."""
    changes = (StepChange(6, 2, 1000, 7, 1200, None), StepChange(9, 7, 1200, 10, 1050, None))
    (found,) = of_series(changes=changes)
    assert found.title == "Slower from step 6 to 8: steps take 20% longer than before"
    assert found.gain_ns == 50


@pytest.mark.parametrize(("before", "after", "is_slower"), [(4, 4, True), (4, 8, False), (8, 4, True)])
def test_steps_with_more_microbatches_are_neither_slower_nor_outliers(
    before: int, after: int, *, is_slower: bool
) -> None:
    steps = [
        replace(step_with(None), step=number, ranks=(rank_step(phases={"steady": PhaseSummary(0, 9, m, m, None)}),))
        for number, m in ((2, before), (5, after), (8, after))
    ]
    change = StepChange(5, 2, 1000, 8, 2000, None)
    found = findings_of_series(series_of(outlier(8, 600), changes=(change,)), steps)
    assert [finding.title.split()[0] for finding in found] == (["Outliers:", "Slower"] if is_slower else [])


@pytest.mark.parametrize(("ns", "is_explained"), [(300, True), (298, False)])
def test_an_outlier_of_which_a_reason_explains_half_is_none(ns: int, is_explained: bool) -> None:
    steps = steps_with(Cause("host", {"rank": 1}, 300), num_steps=STEPS)
    gains = [ns if number % 2 else 0 for number in range(STEPS)]
    study = Study(reasons=(reason_with(gains, ("host",)),), steps=tuple(range(STEPS)))
    found = find(steps, SCHEDULE, study, series_of(outlier(5, 600), outlier(7, 610)))
    outliers = [finding.evidence["steps"] for finding in found if "steps" in finding.evidence]
    assert outliers == ([[7]] if is_explained else [[5, 7]])
    elsewhere = replace(study, steps=tuple(range(50, 50 + STEPS)))
    found = find(steps, SCHEDULE, elsewhere, series_of(outlier(5, 600)))
    assert [5] in [finding.evidence.get("steps") for finding in found]
    little = replace(study, reasons=(reason_with([228 * (number == 5) for number in range(STEPS)], ("host",)),))
    found = find(steps, SCHEDULE, little, series_of(outlier(5, 400)))
    assert [5] in [finding.evidence.get("steps") for finding in found]


@pytest.mark.parametrize(
    ("name", "chunks", "kinds"),
    [("1f1b", 1, " (interleaved, zero-bubble)"), ("interleaved-1f1b", 2, " (zero-bubble)"), ("zbv", 2, "")],
)
def test_schedules_that_have_what_the_run_has_already_are_not_advised(name: str, chunks: int, kinds: str) -> None:
    schedule = replace(SCHEDULE, name=name, num_chunks=chunks)
    (structural,) = find(steps_with(Cause("structural", {}, 300)), schedule)
    assert f"a schedule with a smaller bubble{kinds}, would shrink it" in structural.detail
