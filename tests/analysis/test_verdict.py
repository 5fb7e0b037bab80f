"""The sentence of a report, on figures worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import asdict, replace

from pptrace.analysis.findings.verdict import VerdictLines, doubt_of_gain, verdict_lines, with_verdict
from pptrace.analysis.part_words import OUTSIDE_WORDS, WORDS
from pptrace.analysis.report import Report
from pptrace.analysis.result import (
    ClockSummary,
    Finding,
    HostWindow,
    OpSummary,
    RankDevice,
    RankStep,
    ScheduleSummary,
    Severity,
    StepReport,
)
from pptrace.analysis.whole_run import Bubble, Cause, RootCause, Waterfall
from pptrace.model.device import DeviceBreakdown, HostIdle
from pptrace.model.mesh import MeshSizes
from pptrace.recognise.device.work import NO_DEVICE
from tests.support.parts import parts_ns, rank_step

FALL = parts_ns(1_200_000, 400_000, 300_000, 20_000, 40_000, None, 40_000)
AN_OP = OpSummary("F", 0, 0, 0, "steady", 0, 9)


def step_of(span: int | None, fall: Waterfall | None = None, *ranks: RankStep, ratio: float | None = 0.1) -> StepReport:
    causes = () if fall is None else [Cause(name, {}, ns) for name, ns in asdict(fall).items() if name != "compute"]
    return StepReport(
        **{"step": 0, "start_ns": 0, "end_ns": 9, "span_ns": span},
        bubble=Bubble(ratio, ratio, None, None, fall),
        ranks=ranks,
        ideal_ns=None if fall is None else fall.compute,
        causes=None if fall is None else tuple(cause for cause in causes if cause.ns is not None),
    )


def rank_of(compute: int | None, exposed: int | None, bubble: int | None, *ops: OpSummary) -> RankStep:
    return rank_step(0, compute, exposed, bubble, ops=ops)


def report_of(
    *steps: StepReport,
    findings: tuple[Finding, ...] = (),
    device: tuple[RankDevice, ...] = (),
    num_ranks: int = 2,
) -> Report:
    return Report(
        **{"pptrace_version": "0", "framework": "other", "inputs": (), "marked_steps": (), "warnings": ()},
        mesh=MeshSizes(num_ranks, 2, 1, 1, 1, 1, 1),
        schedule=ScheduleSummary("1f1b", 4, 2, 1, "marks", ()),
        clock=ClockSummary("none", {}, 0),
        steps=steps,
        device=device,
        findings=findings,
    )


def verdict_of(*steps: StepReport, **others: Any) -> str:
    return with_verdict(report_of(*steps, **others)).verdict


def finding(name: str, gain_ns: int | None, severity: Severity = Severity.WARNING) -> Finding:
    return Finding(severity, name.title(), "", gain_ns, {"cause": name})


def test_a_detail_that_is_advice_alone_is_what_to_do_first() -> None:
    """As of ranks that come last to the collectives in turn."""
    found = Finding(Severity.WARNING, "Jitter", "look for input of uneven length", 500_000, {"reason": "in turn"})
    assert lines_of(found).first.startswith("Look for input of uneven length: saves 0.50 ms a step")


def test_parts_of_two_percent_and_more_are_named_compute_first_and_then_the_largest() -> None:
    assert verdict_of(step_of(2_000_000, FALL)) == (
        "The step takes 2.0 ms: 60% compute, 20% the fill and drain of 1f1b, 15% stages of unequal cost, "
        "2% exposed communication, 2% unexplained."
    )
    mostly_bubble = parts_ns(400_000, 1_500_000, 0, 100_000, 0, 0, 0)
    assert verdict_of(step_of(2_000_000, mostly_bubble)).startswith("The step takes 2.0 ms: 20% compute, 75% the fill")


def test_what_made_the_step_shorter_is_named_last_so_that_the_shares_add_up() -> None:
    shorter = parts_ns(1_700_000, 480_000, communication=-20_000, interaction=-160_000)
    assert verdict_of(step_of(2_000_000, shorter)) == (
        "The step takes 2.0 ms: 85% compute, 24% the fill and drain of 1f1b, less 8% counted in several causes."
    )
    unexplained = parts_ns(1_700_000, 400_000, 0, 0, 0, 0, -100_000)
    assert verdict_of(step_of(2_000_000, unexplained)).endswith(
        "the fill and drain of 1f1b, less 5% by which its replay is too long."
    )


def test_what_has_a_reason_is_a_part_of_its_own_with_its_place() -> None:
    step = step_of(2_000_000, parts_ns(1_200_000, 400_000, unexplained=100_000))
    step = replace(step, causes=(*step.causes, Cause("host", {"rank": 3}, 300_000, "late start")))
    late = Finding(Severity.WARNING, "", "", 290_000, {"cause": "host", "reason": "late start", "where": {"rank": 3}})
    assert verdict_of(step, findings=(late,)) == (
        "The step takes 2.0 ms: 60% compute, 20% the fill and drain of 1f1b, 15% steps that begin late (rank 3), 5% unexplained; "
        "the most to win back is 0.29 ms a step of steps that begin late (rank 3)."
    )


def lines_of(*findings: Finding, roots: tuple[RootCause, ...] = (), fall: Waterfall = FALL) -> VerdictLines:
    report = report_of(step_of(2_000_000, fall, rank_of(1, 1, 1)), findings=findings)
    return verdict_lines(with_verdict(replace(report, root_causes=roots)))


@pytest.mark.parametrize("unexplained", [300_000, -300_000])
def test_a_replay_that_misses_the_step_promises_no_gain(unexplained: int) -> None:
    missed = parts_ns(1_200_000, 400_000, 400_000 - unexplained, unexplained=unexplained)
    heavy = finding("imbalance", 900_000)
    assert "the most to win back" not in verdict_of(step_of(2_000_000, missed), findings=(heavy,))
    assert lines_of(heavy, fall=missed).first.endswith(
        ": what that saves is not known, as the replay that tells it misses the step by 15%."
    )
    outside = Finding(Severity.WARNING, "", "", 90_000, {"cause": "data", "where": {}, "is_outside": True})
    assert "the most to win back is 0.090 ms a step of data" in verdict_of(
        step_of(2_000_000, missed), findings=(heavy, outside)
    ), "measured, not replayed"
    missing, schedule = finding("unexplained", 300_000), finding("structural", 90_000)
    report = report_of(step_of(2_000_000, missed), findings=(heavy, outside, missing, schedule))
    doubt = "by a replay that misses the step by 15%"
    assert [doubt_of_gain(one, report) for one in report.findings] == [doubt, "", "", doubt]
    near = parts_ns(1_200_000, 400_000, 220_000, unexplained=180_000)
    assert doubt_of_gain(heavy, report_of(step_of(2_000_000, near))) == ""
    assert "the most to win back is 0.90 ms" in verdict_of(step_of(2_000_000, near), findings=(heavy,))


def test_work_that_is_moved_saves_what_is_left_when_it_is_spread() -> None:
    heavy = {"cause": "imbalance", "where": {"stage": 1}, "gain_if_spread_ns": 300_000}
    verdict = lines_of(Finding(Severity.WARNING, "Imbalance: stage 1", "", 900_000, heavy))
    assert verdict.made_of.endswith("2% unexplained.")
    assert verdict.cause == "Imbalance: stage 1."
    assert verdict.first == (
        "Move layers away from the slowest stage: saves 0.30 ms a step if the work is spread evenly."
    )
    assert verdict.finding == 0


@pytest.mark.parametrize("part", [part for part, (_, advice) in OUTSIDE_WORDS.items() if advice])
def test_what_to_do_about_a_part_outside_the_pipeline_is_said_whole(part: str) -> None:
    evidence = {"cause": part, "where": {}, "share": 0.3, "reason": part, "is_outside": True}
    detail = f"0.9 ms from the pipeline's last op to the next step's first one, a step takes 3.0 ms: {OUTSIDE_WORDS[part][1]}"
    first = lines_of(Finding(Severity.WARNING, "Outside the pipeline", detail, 900_000, evidence)).first
    advice = OUTSIDE_WORDS[part][1]
    assert first.startswith(f"{advice[:1].upper()}{advice[1:]}: saves 0.90 ms a step"), first


def test_an_interval_says_whether_a_gain_is_sure() -> None:
    sure = replace(finding("jitter", 900_000), gain_low_ns=500_000, gain_high_ns=1_300_000)
    assert lines_of(sure).first.endswith(": saves 0.90 ms a step (90 % interval 0.50 to 1.3).")
    unsure = replace(sure, gain_low_ns=-1)
    assert "may save 0.90 ms a step, which is not sure (90 % interval 0.000 to 1.3)" in lines_of(unsure).first
    assert lines_of(finding("jitter", 900_000)).first.endswith("if it recurs, as only one step tells.")


@pytest.mark.parametrize(("share", "asks"), [(0.2, True), (0.05, False)])
def test_where_the_schedule_alone_costs_whatif_is_asked(share: float, asks: bool) -> None:
    fill = Finding(Severity.INFO, "Structural", "", 400_000, {"cause": "structural", "where": {}, "share": share})
    assert lines_of(fill).first.startswith("Ask pptrace whatif" if asks else "Nothing stands out")


@pytest.mark.parametrize(
    ("traced", "first"),
    [(1, "Record all ranks (the profiler on each; pptrace run: --profile-ranks all): "), (2, "Nothing stands out.")],
)
def test_steps_without_a_plan_are_not_sent_to_whatif_which_refuses_them(traced: int, first: str) -> None:
    rank = rank_of(900, None, None, AN_OP)
    devices = tuple(RankDevice(rank, NO_DEVICE) for rank in range(traced))
    report = report_of(step_of(1_000, None, rank), device=devices)
    assert report.typical_step.has_pipeline
    assert verdict_lines(with_verdict(report)).first.startswith(first)


def test_clocks_in_doubt_come_first_where_nothing_else_can_be_acted_on() -> None:
    unexplained = finding("unexplained", 900_000)
    follows = replace(unexplained, evidence={**unexplained.evidence, "follows_from": "clocks"})
    clocks = RootCause(
        "clocks", (), "the clocks may be off by 1 ms", "waits are not exact", "keep clocks together", "-"
    )
    verdict = lines_of(follows, roots=(clocks,))
    assert verdict.cause == "The clocks may be off by 1 ms: waits are not exact."
    assert (verdict.first, verdict.finding) == ("Keep clocks together.", None)


def test_a_root_cause_comes_first_with_its_advice_and_its_own_word_on_the_gain() -> None:
    host = finding("host", 900_000)
    follows = replace(host, evidence={**host.evidence, "where": {}, "follows_from": "cores"})
    cores = RootCause("cores", (1,), "rank 1 was short of cores", "it waited", "look for other work")
    verdict = lines_of(follows, roots=(cores,))
    assert (verdict.cause, verdict.first) == (
        "Rank 1 was short of cores: it waited.",
        "Look for other work: the largest finding that follows from it costs 0.90 ms a step if it recurs, as only one step "
        "tells.",
    )
    heavier = finding(
        "imbalance", 1_500_000
    )  # which has nothing to do with it: what one does about the root comes first
    assert lines_of(heavier, follows, roots=(cores,)) == replace(verdict, finding=1)
    far_heavier = replace(heavier, gain_ns=1_900_000)  # of which it is less than half
    assert lines_of(far_heavier, follows, roots=(cores,)).finding == 0
    assert lines_of(follows, roots=(replace(cores, gain="not known"),)).first == "Look for other work: not known."


def test_the_largest_gain_is_that_of_a_warning() -> None:
    """The fill and drain of the schedule is what was chosen; a finding without a gain has none to compare."""
    findings = (
        finding("structural", 400_000, Severity.INFO),
        finding("communication", 40_000),
        finding("imbalance", 300_000),
        finding("jitter", None),
    )
    verdict = verdict_of(step_of(2_000_000, FALL), findings=findings)
    assert verdict.endswith("; the most to win back is 0.30 ms a step of stages of unequal cost.")
    assert "win back" not in verdict_of(step_of(2_000_000, FALL), findings=(finding("unexplained", 40_000),))
    other = Finding(Severity.WARNING, "Rank 3 is slow", "", 700_000)
    assert verdict_of(step_of(2_000_000, FALL), findings=(other,)).endswith(" 0.70 ms a step of Rank 3 is slow.")


def test_what_single_steps_lose_is_no_part_of_the_typical_step() -> None:
    slower = Finding(Severity.WARNING, "Slower", "", 90_000, {"cause": "compute", "where": {}, "step": 12})
    outliers = Finding(
        Severity.WARNING, "Outliers", "", 80_000, {"cause": "jitter", "where": {"rank": 1}, "steps": [3]}
    )
    step = step_of(2_000_000, FALL)
    assert verdict_of(step, step, findings=(slower, outliers)).endswith(
        "; the most to win back is 0.090 ms a step on average of the slowdown since step 12."
    )
    assert verdict_of(step, step, findings=(outliers,)).endswith(" 0.080 ms a step on average of outliers (rank 1).")


def test_of_several_steps_the_median_of_those_with_a_bubble_is_the_typical_one() -> None:
    steps = [step_of(span, replace(FALL, compute=span)) for span in (9_000_000, 3_000_000, 5_000_000)]
    assert verdict_of(*steps).startswith("The typical step takes 5.0 ms, 5.7 on average: 100% compute")
    unknown = [step_of(1_000_000, ratio=None), step_of(2_000_000, ratio=None)]
    assert verdict_of(*steps, *unknown).startswith("The typical step takes 5.0 ms")
    assert verdict_of(*unknown).startswith("The typical step takes 1.0 ms"), "of two the faster"


@pytest.mark.parametrize(
    ("span", "text"), [(999_900_000, "999.9 ms"), (1_000_000_000, "1,000 ms"), (1_234_567_000_000, "1,234,567 ms")]
)
def test_a_second_and_more_is_without_tenths(span: int, text: str) -> None:
    assert verdict_of(step_of(span, FALL)).startswith(f"The step takes {text}")


def test_without_a_waterfall_the_ranks_are_summed() -> None:
    """Two ranks of 1,000 ns each: 1,200 of 2,000 compute, 300 exposed, 500 bubble."""
    ranks = rank_of(700, 100, 200, AN_OP), rank_of(500, 200, 300, AN_OP)
    assert verdict_of(step_of(1_000_000, None, *ranks)) == (
        "The step takes 1.0 ms: 60% compute, 25% bubble, 15% exposed communication."
    )
    without_ops = [replace(rank, ops=()) for rank in ranks]
    assert "25% waiting for other ranks, input and Python" in verdict_of(step_of(1_000_000, None, *without_ops))


@pytest.mark.parametrize(
    ("compute", "ranks"),
    [
        (60, (rank_of(700, 100, 200), rank_of(500, None, 300))),
        (60, (rank_of(700, 100, 200), rank_of(500, 200, None))),
        *((0, (rank_of(compute, None, None),)) for compute in (0, 3)),
    ],
)
def test_what_one_rank_does_not_know_is_not_summed_and_compute_is_named_were_it_none(
    compute: int, ranks: tuple[RankStep, ...]
) -> None:
    assert verdict_of(step_of(1_000_000, None, *ranks)) == (
        f"The step takes 1.0 ms: {compute}% compute; the rest is waiting and exposed communication, which these traces do not "
        "separate."
    )


def test_communication_that_may_be_waiting_is_named_where_devices_computed_what_their_ranks_did() -> None:
    """Of a window of 1,000 ns 600 are compute, 250 communication alone, 50 copies and 100 idle, 40 for and 60 after launches."""
    device = DeviceBreakdown(0, 1_000, 900, 600, 250, 50, 100, 0.5)
    known = replace(rank_of(600, None, None), device=device, host=HostIdle(40, 0, 60))
    assert verdict_of(step_of(1_000_000, None, known)) == (
        "The step takes 1.0 ms: 60% compute, 25% communication that no compute hides, with the waiting in it, 6% devices idle "
        "though work was launched, 5% copies and gaps between kernels, 4% devices waiting for launches."
    )
    of_ops = replace(known, device=replace(device, compute_ns=580, communication_ns=270))
    assert "these traces do not separate" in verdict_of(step_of(1_000_000, None, known, of_ops))


def test_a_step_without_compute_or_a_common_clock_says_what_is_not_known() -> None:
    nothing = rank_of(None, 200, 300)
    assert verdict_of(step_of(1_000_000, None, nothing)) == "The step takes 1.0 ms; what it was spent on is not known."
    assert verdict_of(step_of(1_000_000, None, nothing, rank_of(600, 100, 300), rank_of(800, 0, 200))) == (
        "The step takes 1.0 ms (shares of 2 of 3 ranks): 70% compute, 25% waiting for other ranks, input and Python, "
        "5% exposed communication."
    )
    clocks = "recognised; how long is not known, because the ranks' clocks cannot be compared."
    assert verdict_of(step_of(None)) == f"1 step was {clocks}"
    assert verdict_of(step_of(None), step_of(None)) == f"2 steps were {clocks}"


def test_without_steps_the_devices_are_summed() -> None:
    """200 ns of devices: 100 of computing, 60 of communicating, 3 of moving memory (1.5 %), 37 idle."""
    one = RankDevice(0, DeviceBreakdown(0, 100, 83, 60, 20, 3, 17, 0.5))
    other = RankDevice(1, DeviceBreakdown(0, 100, 80, 40, 40, 0, 20, 0.5))
    none = "No training step was recognised in these traces."
    assert verdict_of(device=(one, other, RankDevice(2, NO_DEVICE))) == (
        f"{none} The 2 devices were 50% computing, 30% communicating, 18% idle."
    )
    assert verdict_of(device=(other,)) == f"{none} The device was 40% computing, 40% communicating, 20% idle."
    assert verdict_of(device=(RankDevice(2, NO_DEVICE),)) == none


def test_a_device_that_only_moved_memory_ran_no_kernel() -> None:
    moved = RankDevice(0, DeviceBreakdown(0, 1_000, 1_000, 0, 0, 1_000, 0, None))
    none = "No training step was recognised in these traces."
    assert verdict_of(device=(moved,)) == f"{none} The device ran no kernel; it moved memory for 0.001 ms."


def test_what_stands_out_in_other_steps_alone_is_not_denied() -> None:
    evidence = {"cause": "unexplained", "where": {}, "steps": [3]}
    some = Finding(Severity.WARNING, "Outliers: 1 of 9 steps", "", 100, evidence, 0, 200)
    assert lines_of(some).first.startswith(
        "Nothing stands out in the typical step; some steps differ from it: see the findings"
    )


def test_the_gain_is_that_of_the_first_finding_to_act_on() -> None:
    """The sentence and the list below it say one thing, though shares are of the typical step and findings of the mean one."""
    steps = [step_of(2_000_000, FALL), step_of(1_000_000, FALL), step_of(9_000_000, FALL)]
    findings = (finding("jitter", 4_000_000), finding("imbalance", 2_000_000))
    assert verdict_of(*steps, findings=findings).endswith("; the most to win back is 4.0 ms a step of ops that vary.")


def test_what_a_place_gives_back_in_a_replay_is_the_findings_gain_and_decides_whether_it_rules() -> None:
    """Of 0.3 ms of unequal stages, stage 1 at the cost of its like gives back 0.5 ms, or 0.1 where another is about as slow."""
    step = replace(step_of(2_000_000, FALL), causes=(Cause("imbalance", {"stage": 1}, 300_000),))
    step = replace(step, bubble=replace(step.bubble, waterfall_ns=replace(FALL, structural=200_000)))

    def verdict_with(gain_ns: int) -> str:
        evidence = {"cause": "imbalance", "where": {"stage": 1}, "gain_if_spread_ns": 300_000}
        found = Finding(Severity.WARNING, "Imbalance", "", gain_ns, evidence)
        return verdict_of(step, findings=(found, finding("jitter", 90_000)))

    assert verdict_with(500_000).endswith(
        "; the most to win back is 0.50 ms a step of stages of unequal cost (stage 1)."
    )
    assert verdict_with(500_000).startswith("The bubble is not your problem: stage 1 computes longer")
    assert verdict_with(100_000).endswith(
        "; the most to win back is 0.10 ms a step of stages of unequal cost (stage 1)."
    )
    assert verdict_with(100_000).startswith("The step takes 2.0 ms")


def test_an_unexplained_part_does_not_silence_a_smaller_one_that_can_be_acted_on() -> None:
    findings = (finding("unexplained", 900_000), finding("communication", 40_000))
    verdict = verdict_of(step_of(2_000_000, FALL), findings=findings)
    assert verdict.endswith("; the most to win back is 0.040 ms a step of exposed communication.")


def test_of_some_of_the_ranks_the_length_is_that_of_their_window() -> None:
    one, other = RankDevice(1, NO_DEVICE), RankDevice(0, NO_DEVICE)
    step = step_of(2_000_000, FALL)
    assert verdict_of(step, device=(one,)).startswith(
        "In the window of rank 1, the only one of 2 with a trace, the step takes 2.0 ms "
        "(in that of all ranks, as much or more): 60% compute"
    )
    assert " takes 3.0 ms (2.0 ms of it the pipeline's span; in that of all ranks, as much or more): " in verdict_of(
        replace(step, period_ns=3_000_000, outside=()), device=(one,)
    )
    assert verdict_of(step, device=(one, other)).startswith("The step takes 2.0 ms: 60% compute")


def ruled(span: int, *causes: Cause) -> StepReport:
    return replace(step_of(span, FALL), ideal_ns=span - sum(cause.ns for cause in causes), causes=causes)


@pytest.mark.parametrize(
    ("first", "second", "structural", "expected"),
    [
        (150, 150, 100, "stage 1 computes longer than the others"),
        (100, 200, 100, "stage 2 computes longer than the others"),
        (50, 50, 99, "stage 1 computes longer than the others"),
        (50, 49, 10, ""),
        (100, 200, 301, ""),
    ],
)
def test_a_stage_with_half_of_the_largest_part_rules_from_a_tenth_of_the_step_on(
    first: int, second: int, structural: int, expected: str
) -> None:
    imbalance = [Cause("imbalance", {"stage": stage}, ns) for stage, ns in ((1, first), (2, second))]
    verdict = verdict_of(ruled(1000, *imbalance, Cause("structural", {}, structural)))
    assert verdict.startswith(
        f"The bubble is not your problem: {expected}. The step takes" if expected else "The step takes"
    )


def test_three_stages_alike_are_none_that_rules() -> None:
    causes = [Cause("imbalance", {"stage": stage}, 100) for stage in range(3)]
    assert verdict_of(ruled(1000, *causes)).startswith("The step takes")
    assert verdict_of(ruled(1000, Cause("imbalance", {}, 300))).startswith("The step takes")


@pytest.mark.parametrize(("host", "rules"), [(100, True), (99, False)])
def test_hosts_rule_from_a_tenth_of_the_step_on(host: int, rules: bool) -> None:
    step = ruled(1000, Cause("host", {"rank": 0}, host), Cause("structural", {}, 50))
    device = replace(rank_of(None, None, None), host=HostIdle(host, 0, 0))
    verdict = verdict_of(replace(step, ranks=(device,)))
    assert verdict.startswith("The bubble is not your problem: the devices wait for the host to launch. ") is rules
    assert verdict_of(step).startswith("The step takes")


def test_hosts_do_not_rule_where_a_finding_says_what_else_they_did() -> None:
    step = ruled(1000, Cause("host", {"rank": 0}, 300, "late start"), Cause("structural", {}, 50))
    step = replace(step, ranks=(replace(rank_of(None, None, None), host=HostIdle(300, 0, 0)),))
    late = Finding(Severity.WARNING, "", "", 250, {"cause": "host", "reason": "late start", "where": {"rank": 0}})
    assert verdict_of(step, findings=(late,)).startswith("The step takes")


def test_without_a_device_what_hosts_cost_are_ops_that_begin_late() -> None:
    step = ruled(2_000_000, Cause("host", {"rank": 1}, 500_000), Cause("unexplained", {}, 200_000))
    assert verdict_of(step, findings=(finding("host", 600_000),)) == (
        "The step takes 2.0 ms: 65% compute, 25% ops that begin late, 10% unexplained; "
        "the most to win back is 0.60 ms a step of ops that begin late."
    )


@pytest.mark.parametrize(
    ("exposed", "bubble", "starved", "rules"),
    [(100, 300, 150, True), (100, 300, 149, False), (151, 300, 150, False), (50, 200, 100, True), (50, 198, 99, False)],
)
def test_without_a_pipeline_launching_rules_where_nothing_else_costs_more(
    exposed: int, bubble: int, starved: int, rules: bool
) -> None:
    rank = replace(rank_of(500, exposed, bubble), host=HostIdle(starved, 0, 0))
    verdict = verdict_of(step_of(1_000_000, None, rank))
    assert verdict.startswith("The devices wait for the host to launch. The step takes") is rules
    waiting, launching = round((bubble - starved) / 10), round(starved / 10)
    assert f"{waiting}% waiting for other ranks, input and Python" in verdict
    assert f"{launching}% " in verdict


def test_time_between_operators_is_a_part_of_the_step_apart_from_waiting_for_others() -> None:
    ranks = [replace(rank_of(600, 100, 300), between_operators_ns=ns) for ns in (300, 100)]
    assert verdict_of(step_of(1_000_000, None, *ranks)) == (
        "The step takes 1.0 ms: 60% compute, 20% between operators (Python, input), 10% exposed communication, 10% waiting for "
        "other ranks."
    )


def test_what_ranges_say_of_hosts_is_no_launching() -> None:
    """Of 300 a device waited 250 for launches: 200 while its host loaded data; 50 are copies."""
    rank = replace(rank_of(700, 0, 300), host=HostIdle(250, 0, 0), idle_spans={"DATA": 200})
    text = verdict_of(step_of(1_000_000, None, rank), num_ranks=1)
    assert text.startswith("The devices wait while hosts load data. ")
    assert (
        "70% compute, 20% loading of data, 5% devices waiting for launches, 5% copies and gaps between kernels." in text
    )


def test_a_rank_alone_waits_for_no_other_one() -> None:
    assert "waiting for input and Python" in verdict_of(step_of(1_000_000, None, rank_of(600, 0, 400)), num_ranks=1)
    on_device = replace(rank_of(600, 0, 400), host=HostIdle(300, 0, 0))
    verdict = verdict_of(step_of(1_000_000, None, on_device), num_ranks=1)
    assert verdict.endswith("60% compute, 30% devices waiting for launches, 10% copies and gaps between kernels.")


def test_without_steps_hosts_say_how_long_their_traces_are() -> None:
    device = (
        RankDevice(0, NO_DEVICE, on_host=HostWindow(0, 4_000_000, 3_000_000, 400_000, 600_000)),
        RankDevice(1, NO_DEVICE),
    )
    assert verdict_of(device=device) == (
        "No training step was recognised in these traces. The trace lasts 4.0 ms: 75% compute, 15% between operators (Python, "
        "input), 10% communication and waiting for it."
    )


@pytest.mark.parametrize(("starved", "first"), [(300, "The devices wait for the host to launch. "), (100, "")])
def test_of_one_rank_alone_what_its_device_waits_for_launches_is_named(starved: int, first: str) -> None:
    step = step_of(1_000_000, None, replace(rank_of(600, None, None), host=HostIdle(starved, 0, 50)))
    assert verdict_of(step) == (
        f"{first}The step takes 1.0 ms: 60% compute, {starved / 1000:.0%} devices waiting for launches; the rest is waiting and "
        "exposed communication, which these traces do not separate."
    )


def test_idle_devices_wait_for_launches_or_for_other_reasons() -> None:
    one = RankDevice(0, DeviceBreakdown(0, 100, 60, 60, 0, 0, 40, 0.5), host=HostIdle(30, 5, 5))
    none = "No training step was recognised in these traces."
    assert verdict_of(device=(one,)) == (
        f"{none} The device was 60% computing, 30% idle because nothing was launched, 10% idle for other reasons."
    )


def test_advice_can_be_followed_by_what_it_saves() -> None:
    """The verdict joins them with a colon."""
    assert not [words for words in WORDS.values() if set(words.advice) & set(":;")]
