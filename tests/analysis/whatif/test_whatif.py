"""Predictions from op tables of simulated runs, of which the answer is another simulation."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from msgspec import structs

from pptrace.analysis.result import Finding, Severity
from pptrace.analysis.whatif import change
from pptrace.analysis.whatif.answer import answer
from pptrace.analysis.whatif.candidates import all_changes
from pptrace.analysis.whatif.change import Change, group_of
from pptrace.analysis.whatif.ideals import parse_ideal
from pptrace.analysis.whatif.memory import RankUse, predicted_peak, rank_uses
from pptrace.analysis.whatif.result import Scenario, Standing, WhatIf
from pptrace.analysis.whatif.study import Study, study_run
from pptrace.analysis.whole_run import Doubt, InDoubt
from pptrace.api.whatif import predict_changes
from pptrace.api.wishes import Wishes
from pptrace.errors import PptraceError, ShapeError, UsageError
from pptrace.report.to_json import dump, simulation_object
from pptrace.report.whatif import replay_line, whatif_tables
from pptrace.schedule.actions import Kind
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import SCHEDULES, build
from pptrace.schedule.shape import OpCosts
from pptrace.schedule.text import to_csv
from pptrace.simulator import Costs, Simulation, peak_inflight, simulate, uniform
from pptrace.workflow.analyse import Analysis
from pptrace.workflow.load import load
from tests.support.extent import ALL

MS = 1_000_000
COSTS = uniform(forward_ns=10 * MS, backward_ns=20 * MS)


def analysed(plan: Plan, costs: Costs, folder: Path, steps: int = 6) -> Analysis:
    """The analysis of a table of the ops of a simulated run, whose steps are all the same."""
    ops = simulate(plan, costs).ops().drop(columns=["phase", "clock", "source"])
    times = ops[["start_ns", "end_ns"]]
    period = 2 * int(ops["end_ns"].max())
    path = folder / "ops.csv"
    pd.concat([ops.assign(step=step, **times + step * period) for step in range(steps)]).to_csv(path, index=False)
    return load([path], cache=False)


def study_of(analysis: Analysis, layers: tuple[int, ...] | None = None) -> Study:
    return study_run(analysis.report, analysis.costs, analysis.schedule, layers)


@pytest.fixture(scope="module")
def one_f_one_b(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    return analysed(build("1f1b", 4, 8), COSTS, tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("name", [name for name, entry in SCHEDULES.items() if not entry.bidirectional])
def test_a_run_of_equal_ops_predicts_every_schedule_as_the_simulator_has_it(one_f_one_b: Analysis, name: str) -> None:
    plan = build(name, 4, 8)
    of_chunk = uniform(10 * MS // plan.num_chunks, 20 * MS // plan.num_chunks)
    result = predict_changes(one_f_one_b, Wishes(schedules=(name,))).result
    scenario = result.scenarios[0]
    assert result.replay_error == 0
    assert scenario.span_ns == simulate(plan, of_chunk).makespan_ns
    assert (scenario.schedule, scenario.num_chunks, scenario.num_microbatches) == (name, plan.num_chunks, 8)
    assert scenario.gain_ns == result.measured_span_ns - scenario.span_ns
    assert scenario.bubble_ratio == pytest.approx(simulate(plan, of_chunk).bubble_ratio)
    assert scenario.low_ns <= scenario.span_ns <= scenario.high_ns


def test_dualpipe_shares_the_microbatches_out_over_both_ends(one_f_one_b: Analysis) -> None:
    plan = build("dualpipe", 4, 8)
    scenario = predict_changes(one_f_one_b, Wishes(schedules=("dualpipe",))).result.scenarios[0]
    assert scenario.span_ns == simulate(plan, COSTS).makespan_ns
    assert "every stage is on two ranks, and the sum of its gradients over both is not counted" in scenario.note
    assert (scenario.standing, scenario.is_shorter) == (Standing.UNSURE, True), "what is not counted may take it"


@pytest.mark.parametrize("source", ["zb-h1", "zbv", "dualpipe"])
def test_1f1b_is_predicted_from_any_schedule(source: str, tmp_path: Path) -> None:
    plan = build(source, 4, 8)
    chunks = plan.num_chunks // plan.num_chains
    analysis = analysed(plan, uniform(10 * MS // chunks, 20 * MS // chunks), tmp_path)
    scenario = predict_changes(analysis, Wishes(schedules=("1f1b",))).result.scenarios[0]
    assert scenario.span_ns == simulate(build("1f1b", 4, 8), COSTS).makespan_ns


@pytest.mark.parametrize(("source", "target"), [("1f1b", "gpipe"), ("zb-h1", "zb-h2"), ("zb-h2", "1f1b")])
def test_costs_of_single_ops_go_with_them(source: str, target: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    plan, wanted = build(source, 3, 6), build(target, 3, 6)
    split = {
        (kind, stage, mb): int(rng.integers(5, 40)) * MS
        for kind in (Kind.F, Kind.I, Kind.W)
        for stage in range(3)
        for mb in range(6)
    }
    whole = {
        (Kind.B, stage, mb): split[Kind.I, stage, mb] + split[Kind.W, stage, mb]
        for stage in range(3)
        for mb in range(6)
    }
    costs = Costs(ops=split | whole)
    scenario = predict_changes(analysed(plan, costs, tmp_path), Wishes(schedules=(target,))).result.scenarios[0]
    assert scenario.span_ns == simulate(wanted, costs).makespan_ns


def test_the_search_knows_what_each_stage_costs(tmp_path: Path) -> None:
    """A first stage that costs most: an order searched for even stages is 7 % longer."""
    each = [(34, 23, 23), (12, 11, 11), (13, 12, 12), (16, 15, 15)]
    of_stages = {
        (kind, stage): cost * MS
        for stage, costs in enumerate(each)
        for kind, cost in zip((Kind.F, Kind.I, Kind.W), costs, strict=True)
    }
    costs = Costs(stages=of_stages)
    analysis = analysed(build("zb-h1", 4, 4), costs, tmp_path)
    (scenario,) = predict_changes(analysis, Wishes(schedules=("zb-auto",))).result.scenarios
    searched = OpCosts(of_ranks=tuple((f * MS, i * MS, w * MS) for f, i, w in each))
    assert scenario.span_ns == simulate(build("zb-auto", 4, 4, costs=searched), costs).makespan_ns
    assert scenario.span_ns <= simulate(build("zb-h1", 4, 4), costs).makespan_ns
    assert scenario.span_ns < simulate(build("zb-auto", 4, 4), costs).makespan_ns


def test_the_plan_of_the_advised_change_is_written_as_torchs_csv(one_f_one_b: Analysis) -> None:
    predictions = predict_changes(one_f_one_b, Wishes(schedules=("gpipe", "zb-auto", "zb-h1")))
    advised = predictions.result.advice
    searched = build("zb-auto", 4, 8, costs=OpCosts(p2p=0, of_ranks=((10 * MS, 10 * MS, 10 * MS),) * 4))
    assert advised.schedule == "zb-auto"
    assert predictions.to_csv() == to_csv(searched.compute_only())
    slower = predict_changes(one_f_one_b, Wishes(schedules=("gpipe",), microbatches=4))
    assert slower.result.advice is None
    assert slower.to_csv() == to_csv(build("gpipe", 4, 4).compute_only())


def test_messages_keep_what_their_links_take(tmp_path: Path) -> None:
    costs = structs.replace(COSTS, p2p_latency_ns=3 * MS)
    analysis = analysed(build("1f1b", 4, 8), costs, tmp_path)
    # A table of ops has no messages: what they took is time before ops, which stays with them.
    result = predict_changes(analysis, Wishes()).result
    assert result.replay_error < 0.05
    assert "messages between stages were not recorded" in result.warnings[0]


def test_short_messages_that_no_trace_tells_are_warned_of_and_no_faster_links_tried(tmp_path: Path) -> None:
    analysis = analysed(
        build("1f1b", 4, 8), structs.replace(COSTS, p2p_latency_ns=MS // 2), tmp_path
    )  # 1.6 % of what ops take
    result = predict_changes(analysis, Wishes()).result
    assert "messages between stages were not recorded" in result.warnings[0]
    assert "links twice as fast" not in {one.name for one in result.scenarios}
    assert not any("whole time of a message" in one.note for one in result.scenarios)


def test_a_run_whose_ops_are_not_late_needs_no_messages(one_f_one_b: Analysis) -> None:
    assert predict_changes(one_f_one_b, Wishes(schedules=("gpipe",))).result.warnings == ()


def test_a_schedule_that_is_named_twice_is_predicted_once(one_f_one_b: Analysis) -> None:
    names = [one.name for one in predict_changes(one_f_one_b, Wishes(schedules=("gpipe", "gpipe"))).result.scenarios]
    assert names == ["gpipe"]


def test_more_microbatches_of_the_same_size_are_more_work(one_f_one_b: Analysis) -> None:
    result = predict_changes(one_f_one_b, Wishes(microbatches=16)).result
    scenario = result.scenarios[0]
    assert scenario.span_ns == (16 + 3) * 30 * MS
    assert result.measured_span_ns == (8 + 3) * 30 * MS
    assert scenario.gain_ns == 2 * result.measured_ns - scenario.length_ns
    assert "2 times the work" in scenario.note
    assert "what is outside the pipeline is taken to stay as it is" in scenario.note


@pytest.mark.parametrize(
    ("microbatches", "group", "wanted", "groups"),
    [(6, 6, 10, 5), (12, 6, 24, 6), (8, 4, 16, 4)],
)
def test_an_interleaved_run_keeps_its_groups_of_microbatches(
    microbatches: int, group: int, wanted: int, groups: int, tmp_path: Path
) -> None:
    """Of equal groups, as torch has them, those of another number are equal too; else their size stays."""
    name = "interleaved-1f1b"
    run = analysed(build(name, 4, microbatches, 2, group), COSTS, tmp_path)
    (same,) = predict_changes(run, Wishes(schedules=(name,))).result.scenarios
    assert same.span_ns == simulate(build(name, 4, microbatches, 2, group), COSTS).makespan_ns
    assert group_of(build(name, 4, microbatches, 2, group), name, wanted) == (None if group == 4 else groups)
    (other,) = predict_changes(run, Wishes(microbatches=wanted)).result.scenarios
    assert other.span_ns == simulate(build(name, 4, wanted, 2, groups), COSTS).makespan_ns


def test_without_options_all_sensible_changes_come_best_first(one_f_one_b: Analysis) -> None:
    study = study_of(one_f_one_b)
    result = answer(study, all_changes(study))
    order = [(list(Standing).index(one.standing), -one.gain_ns) for one in result.scenarios]
    assert order == sorted(order)
    assert len({one.standing for one in result.scenarios}) > 1
    names = {one.name for one in result.scenarios}
    assert {"zb-h1", "zbv", "interleaved-1f1b, 4 chunks", "16 microbatches of half the size"} <= names
    assert "1f1b" not in names
    assert not any(one.ideal for one in result.scenarios)  # nothing is uneven here
    held = {one.name: one.peak_inflight / one.num_chunks * one.microbatch_size for one in result.scenarios}
    for one in result.scenarios:
        beaten = any(
            other.gain_ns >= one.gain_ns
            and held[other.name] <= held[one.name]
            and (other.gain_ns, held[other.name]) != (one.gain_ns, held[one.name])
            for other in result.scenarios
        )
        assert one.on_pareto_front is not beaten


def test_what_all_costs_hang_on_comes_first_and_leaves_nothing_sure(one_f_one_b: Analysis) -> None:
    doubts = (Doubt(InDoubt.CLOCK, "the clocks"), Doubt(InDoubt.DEVICE, "one GPU"))
    clock = structs.replace(one_f_one_b.report.clock, uncertainty_ns=70 * MS)

    def with_doubts(*known: Doubt) -> WhatIf:
        report = structs.replace(one_f_one_b.report, doubts=known, clock=clock)
        return predict_changes(replace(one_f_one_b, report=report), Wishes(schedules=("zb-h1", "zbv"))).result

    both = with_doubts(*doubts)
    assert both.doubts == both.warnings[:2] == ("the clocks", "one GPU")
    assert {one.doubt for one in both.scenarios} == {
        "ranks share a GPU, and what ops take there depends on what the other ranks run"
    }
    gains = {one.name: (one.gain_ns, one.standing) for one in with_doubts(doubts[0]).scenarios}
    assert gains == {"zbv": (75 * MS, Standing.SURE), "zb-h1": (60 * MS, Standing.UNSURE)}
    assert {one.standing for one in with_doubts().scenarios} == {Standing.SURE}


def test_a_run_that_its_replay_does_not_give_is_not_predicted_from(one_f_one_b: Analysis) -> None:
    steps = tuple(structs.replace(step, span_ns=round((step.span_ns or 0) * 1.06)) for step in one_f_one_b.report.steps)
    analysis = replace(one_f_one_b, report=structs.replace(one_f_one_b.report, steps=steps))
    result = predict_changes(analysis, Wishes(schedules=("gpipe",))).result
    assert result.scenarios == ()
    assert result.replay_error == pytest.approx(1 - 1 / 1.06)
    assert re.search(r" 5\.[67]\d% off \(limit 5%\)", result.warnings[-1])
    errors = {
        error for line in (replay_line(result), result.warnings[-1]) for error in re.findall(r"[\d.]+% off", line)
    }
    assert len(errors) == 1  # though the step, which has more than the pipeline, is missed by another part of it
    assert result.measured_ns != result.measured_span_ns
    with pytest.raises(PptraceError, match="no plan to write"):
        predict_changes(analysis, Wishes(schedules=("gpipe",))).to_csv()


def test_few_steps_are_said_and_have_an_interval(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    ops = {
        (kind, stage, mb): int(rng.integers(9, 12)) * MS
        for kind in (Kind.F, Kind.B)
        for stage in range(4)
        for mb in range(8)
    }
    result = predict_changes(
        analysed(build("1f1b", 4, 8), Costs(ops=ops), tmp_path, steps=1), Wishes(schedules=("gpipe",))
    ).result
    assert "1 whole step:" in result.warnings[0]
    assert result.scenarios[0].low_ns < result.scenarios[0].high_ns


@pytest.mark.parametrize(
    ("wishes", "expected"),
    [
        (Wishes(schedules=("nonsense",)), "schedule 'nonsense' is not known"),
        (Wishes(ideals=("rank=9",)), "--ideal rank=9: the run has ranks 0, 1, 2, 3"),
        (Wishes(ideals=("stage=4",)), "--ideal stage=4: the run has stages 0 to 3"),
        (Wishes(ideals=("speed",)), "--ideal speed: expected stage=N"),
        (Wishes(split=(1, 2)), "--split 1,2: 2 numbers; expected 4"),
        (Wishes(split=(1, 0, 3, 2)), "every stage but the first and the last has at least one layer"),
        (Wishes(placement=(0, 1, 2, 2)), "expected each of 0 to 3 once"),
        (Wishes(microbatches=0), "--microbatches is 0; expected at least 1"),
        (Wishes(link_speed=0.0), "--link-speed is 0; expected more than 0"),
        (Wishes(link_speed=1e-308), "--link-speed is 1e-308; expected at least 1e-06"),
        (Wishes(microbatch_size=1e-7), "--microbatch-size is 1e-07; expected at least 1e-06"),
        (Wishes(schedules=("zbv",), chunks=3), "zbv: 3 chunks per rank"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(one_f_one_b: Analysis, wishes: Wishes, expected: str) -> None:
    with pytest.raises(PptraceError) as caught:
        predict_changes(one_f_one_b, wishes)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_of_all_schedules_a_split_goes_with_those_that_have_as_many_stages(one_f_one_b: Analysis) -> None:
    for split in ((3, 1, 2, 2), (1, 1, 1, 1, 2, 1, 1, 1)):
        result = predict_changes(one_f_one_b, Wishes(schedules=("all",), split=split)).result
        stages = {4 * one.num_chunks for one in result.scenarios if one.schedule != "dualpipe"}
        assert stages == {len(split)}
    with pytest.raises(UsageError, match="no schedule of the catalogue has such a plan \\(split 1,2\\)"):
        predict_changes(one_f_one_b, Wishes(schedules=("all",), split=(1, 2)))


def test_a_trace_without_whole_steps_says_what_is_expected(one_f_one_b: Analysis) -> None:
    with pytest.raises(PptraceError, match="no whole step whose plan is known"):
        predict_changes(replace(one_f_one_b, costs=()), Wishes())


def test_a_long_run_is_predicted_from_evenly_spaced_steps(
    one_f_one_b: Analysis, monkeypatch: pytest.MonkeyPatch
) -> None:
    (costs,) = one_f_one_b.costs
    for most, steps in ((costs.durations.size // 3, [0, 3]), (costs.durations.size, [0, 1, 2, 3, 4, 5])):
        monkeypatch.setattr("pptrace.analysis.whatif.study._MOST_CELLS", most)
        study = study_of(one_f_one_b)
        assert study.costs.step.tolist() == steps
        assert [line.partition(":")[0] for line in study.warnings] == (["2 whole steps"] if len(steps) == 2 else [])


def test_words_of_ideals_are_read() -> None:
    assert parse_ideal("kind=B").place is Kind.B
    assert parse_ideal("rank=5").place == 5
    for text in ("kind=X", "rank=", "rank=-1", "stage=١", ""):
        with pytest.raises(UsageError, match="expected stage=N"):
            parse_ideal(text)


def test_a_peak_is_the_start_and_the_activations_in_flight() -> None:
    now, chunks, twice = build("1f1b", 2, 4), build("interleaved-1f1b", 2, 4), build("dualpipe", 2, 4)
    uses = {0: RankUse(1000, 100.0), 1: RankUse(900, 100.0)}
    assert predicted_peak(uses, now, now, Change()) == 1000 + 2 * 100
    assert predicted_peak(uses, now, build("gpipe", 2, 4), Change()) == 1000 + 4 * 100
    held = max(start + count / 2 * 100 for start, count in zip((1000, 900), peak_inflight(chunks), strict=True))
    assert predicted_peak(uses, now, chunks, Change()) == round(held)
    held = max(2 * start + count * 100 for start, count in zip((1000, 900), peak_inflight(twice), strict=True))
    assert predicted_peak(uses, now, twice, Change()) is None  # what of it is the stages'?
    for base in (0, 800):  # which is there once on a rank
        with_base = {rank: structs.replace(use, base=float(base)) for rank, use in uses.items()}
        assert predicted_peak(with_base, now, twice, Change()) == round(held) - base
    assert predicted_peak(uses, now, now, Change(split=(3, 5))) is None
    assert predicted_peak({}, now, now, Change()) is None


def test_what_a_peak_has_beyond_the_start_of_its_step_is_shared_out_over_the_activations_in_flight() -> None:
    plan = build("interleaved-1f1b", 2, 4)
    first, second = peak_inflight(plan)
    ranks = [
        SimpleNamespace(pp_rank=rank, start_bytes=500, peak_bytes=500 + 30 * held, kind="device_allocated")
        for rank, held in enumerate((first, second))
    ]
    uses = rank_uses(SimpleNamespace(ranks=ranks), plan)
    assert uses == {rank: RankUse(500, 60.0, 0.0) for rank in (0, 1)}  # 30 for each of two chunks
    assert predicted_peak(uses, plan, plan, Change()) == 500 + 30 * first
    unknown = SimpleNamespace(ranks=[*ranks, SimpleNamespace(pp_rank=0, start_bytes=None, peak_bytes=9)])
    kept = SimpleNamespace(ranks=[SimpleNamespace(**{**vars(rank), "kind": "device_reserved"}) for rank in ranks])
    assert rank_uses(kept, plan) == {}
    assert rank_uses(unknown, plan) == rank_uses(None, plan) == {}


@pytest.mark.parametrize(
    ("stages", "words"), [(2, "of two stages embedding and head cannot be"), (4, "is taken to stay there")]
)
def test_a_split_says_what_it_takes_for_granted(stages: int, words: str, tmp_path: Path) -> None:
    run = analysed(build("1f1b", stages, 4), COSTS, tmp_path)
    layers, split = (4,) * stages, (3, *(4,) * (stages - 2), 5)
    note = study_of(run, layers).scenario(Change(split=split), "split").note
    assert "layers of a stage are taken to cost alike" in note
    assert words in note
    assert "taken to cost alike" not in study_of(run, layers).scenario(Change(microbatches=8), "more").note


def test_a_rank_that_is_slower_than_its_replicas_is_warned_of(one_f_one_b: Analysis) -> None:
    slow = Finding(Severity.WARNING, "", "", 1, {"cause": "straggler", "where": {"rank": 6}})
    others = [structs.replace(slow, evidence={"cause": cause, "where": {"rank": 5}}) for cause in ("jitter", "host")]
    report = structs.replace(one_f_one_b.report, findings=(slow, *others))
    warnings = study_run(report, one_f_one_b.costs, one_f_one_b.schedule, None).warnings
    (line,) = [line for line in warnings if "slower than its replicas" in line]
    assert line.startswith("rank 6 ")
    assert line.endswith("predict with --ideal rank=6 first")
    assert not [line for line in study_of(one_f_one_b).warnings if "slower than" in line]


@pytest.mark.parametrize(("verified", "is_outside"), [(None, False), (-1, True), (0, False), (1, True)])
def test_a_verified_step_outside_its_interval_is_said_to_be(
    one_f_one_b: Analysis, verified: int | None, is_outside: bool
) -> None:
    result = predict_changes(one_f_one_b, Wishes(schedules=("zb-h1",))).result
    (one,) = result.scenarios
    span = None if verified is None else {-1: one.low_ns - 1, 0: one.low_ns, 1: one.high_ns + 1}[verified]
    (table,) = whatif_tables(structs.replace(result, scenarios=(structs.replace(one, verified_span_ns=span),)))
    assert any(note.startswith("zb-h1: verified outside its interval") for note in table.notes) is is_outside


def test_what_does_not_fit_has_nothing_to_paste(one_f_one_b: Analysis) -> None:
    result = predict_changes(one_f_one_b, Wishes(schedules=("zb-h1",))).result
    for over, has_lines in ((None, True), (0, True), (1, False)):
        scenarios = (structs.replace(result.scenarios[0], over_limit_bytes=over),)
        (table,) = whatif_tables(structs.replace(result, scenarios=scenarios))
        assert any(note.startswith("to paste, ") for note in table.notes) is has_lines


def test_receives_are_posted_less_far_ahead_than_a_rank_has_ops(one_f_one_b: Analysis) -> None:
    with pytest.raises(ShapeError, match="--prefetch 16: a rank of 1f1b runs 16 ops; expected less than that"):
        predict_changes(one_f_one_b, Wishes(prefetch=16))
    assert predict_changes(one_f_one_b, Wishes(prefetch=15)).result.scenarios
    of_all = predict_changes(one_f_one_b, Wishes(schedules=("all",), prefetch=16)).result.scenarios
    assert {"zb-h1", "zbv"} <= {one.schedule for one in of_all}
    assert "gpipe" not in {one.schedule for one in of_all}


def test_a_plan_that_takes_minutes_is_refused_before_it_is_built(
    one_f_one_b: Analysis, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ShapeError, match="1f1b: 50001 microbatches on 4 ranks are 200,004 forwards; expected at most"):
        predict_changes(one_f_one_b, Wishes(microbatches=50_001))
    monkeypatch.setattr(change, "_MOST_FORWARDS", 4)
    with pytest.raises(ShapeError, match="9 microbatches on 4 ranks"):
        predict_changes(one_f_one_b, Wishes(microbatches=9))
    assert predict_changes(one_f_one_b, Wishes(schedules=("gpipe",))).result.scenarios  # as large as the run


def test_the_part_of_w_and_what_stays_of_an_op_are_those_that_a_user_gives(one_f_one_b: Analysis) -> None:
    def predicted(plan: Plan, **given: Any) -> Scenario:
        return predict_changes(one_f_one_b, Wishes((plan.name,), **given)).result.scenarios[0]

    plan = build("zb-h1", 4, 8)
    usual, short = predicted(plan), predicted(plan, wgrad_share=0.25)
    assert short.span_ns == simulate(plan, uniform(10 * MS, 20 * MS, 5 * MS)).makespan_ns
    assert (short.high_ns - short.low_ns) / short.span_ns < (usual.high_ns - usual.low_ns) / usual.span_ns
    assert "W is taken to be 0.25 of a B (--wgrad-share)" in short.note
    assert "0.50 of a B (0.40 to 0.60 in the interval), which is not measured here" in usual.note

    both = predicted(plan, wgrad_share=0.5, fixed_share=0.2)
    assert both.span_ns == simulate(plan, uniform(10 * MS, 24 * MS)).makespan_ns
    assert "0.2 of what a usual op takes is taken to stay however much it does (--fixed-share)" in both.note
    halves = predicted(build("1f1b", 4, 16), microbatches=16, microbatch_size=0.5, fixed_share=0.2)
    assert halves.span_ns == simulate(build("1f1b", 4, 16), uniform(6 * MS, 12 * MS)).makespan_ns
    assert "--fixed-share" not in predicted(build("gpipe", 4, 8), fixed_share=0.2).note
    assumed = predicted(plan, wgrad_share=0.5, fixed_share=0.0)
    assert assumed.span_ns == usual.span_ns
    assert assumed.high_ns - assumed.low_ns < usual.high_ns - usual.low_ns


def test_assumptions_are_no_changes_of_the_run_and_not_for_one_that_measured_w(tmp_path: Path) -> None:
    assert not Wishes(wgrad_share=0.3, fixed_share=0.1)
    analysis = analysed(build("zb-h1", 2, 4), uniform(10 * MS, 20 * MS), tmp_path)
    with pytest.raises(UsageError, match=r"--wgrad-share 0\.3: the run measured W by itself"):
        predict_changes(analysis, Wishes(wgrad_share=0.3))
    assert predict_changes(analysis, Wishes(fixed_share=0.1)).result.scenarios


@pytest.mark.parametrize("split", [(5, 3), (3, 5)])
def test_of_two_stages_the_interval_holds_what_comes_out_if_the_head_or_the_layers_cost_more(
    split: tuple[int, int], tmp_path: Path
) -> None:
    def spans_of(*of_stages: float) -> int:
        costs = {(Kind.F, stage): round(ns * MS) for stage, ns in enumerate(of_stages)}
        costs |= {(Kind.B, stage): 2 * ns for (_, stage), ns in costs.items()}
        return simulate(plan, Costs(stages=costs)).makespan_ns

    plan = build("1f1b", 2, 8)
    stages = {(kind, stage): size * MS for kind, size in ((Kind.F, 1), (Kind.B, 2)) for stage in (0, 1)}
    stages = {(kind, stage): ns * (40, 60)[stage] for (kind, stage), ns in stages.items()}
    analysis = analysed(plan, Costs(stages=stages), tmp_path)
    wishes = Wishes(split=split, layers=(4, 4))
    (scenario,) = predict_changes(analysis, wishes).result.scenarios
    first, last = split
    in_layers = 10 * min(first, 4) + 15 * max(first - 4, 0), 15 * min(last, 4) + 10 * max(last - 4, 0)
    assert scenario.span_ns == spans_of(*in_layers)
    for part in (0.0, 0.3, 0.5, 1.0):
        head = 20 * part
        layer = (60 - head) / 4
        stage = 10 * min(first, 4) + layer * max(first - 4, 0), layer * min(last, 4) + 10 * max(last - 4, 0) + head
        assert scenario.low_ns <= spans_of(*stage) <= scenario.high_ns
    assert "(in the interval, what one takes beyond the other stays with it)" in scenario.note


def test_what_two_stages_take_beyond_each_other_is_varied_where_they_are_divided_alone(tmp_path: Path) -> None:
    plan = build("1f1b", 2, 8)
    stages = {(kind, stage): (2 + stage) * size * MS for kind, size in ((Kind.F, 1), (Kind.B, 2)) for stage in (0, 1)}
    analysis = analysed(plan, Costs(stages=stages), tmp_path)

    def width(**given: Any) -> float:
        one = predict_changes(analysis, Wishes(layers=(4, 4), **given)).result.scenarios[0]
        return (one.high_ns - one.low_ns) / one.span_ns

    assert width(schedules=("gpipe",)) == pytest.approx(0.03, abs=0.001)
    assert width(split=(5, 3)) > 0.06


@pytest.mark.parametrize("name", ["zbv", "interleaved-1f1b", "dualpipe-v"] if ALL else ["zbv"])
def test_messages_that_vary_do_so_on_other_ranks_as_well(name: str, tmp_path: Path) -> None:
    """Messages of 3 ms on average, most of them shorter: predictions from six steps against the median of forty others."""

    def simulated(plan: Plan, seed: int) -> Simulation:
        rng = np.random.default_rng(seed)
        cells = product((Kind.F, Kind.B, Kind.I), range(plan.num_stages), range(plan.num_microbatches))
        transfers = {cell: int(rng.exponential(3 * MS)) for cell in cells}
        ops = {Kind.F: 10 * MS, Kind.B: 20 * MS, Kind.I: 10 * MS, Kind.W: 10 * MS}
        return simulate(plan, Costs({kind: ns // plan.num_chunks for kind, ns in ops.items()}, transfers=transfers))

    really = np.median([simulated(build(name, 4, 8), seed).makespan_ns for seed in range(100, 140)])
    predicted = []
    for seed in range(6):
        path = tmp_path / f"{seed}.json"
        path.write_text(dump(simulation_object(simulated(build("1f1b", 4, 8), seed), with_ops=True)))
        analysis = load([path], cache=False)
        predicted.append(predict_changes(analysis, Wishes((name,))).result.scenarios[0].span_ns)
    assert np.mean(predicted) == pytest.approx(really, rel=0.04)
