"""Plans after a change, the changes of a study, their notes, intervals and order, from costs made to order."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from msgspec.structs import replace

from pptrace.analysis.whatif.answer import _with_front, answer, pictures
from pptrace.analysis.whatif.candidates import all_changes, all_schedules
from pptrace.analysis.whatif.change import Change, plan_of, stage_map_of
from pptrace.analysis.whatif.frameworks import FRAMEWORKS
from pptrace.analysis.whatif.ideals import parse_ideal
from pptrace.analysis.whatif.memory import RankUse
from pptrace.analysis.whatif.predict import Baseline, identity_map, predict
from pptrace.analysis.whatif.replay import Target, replay
from pptrace.analysis.whatif.result import Scenario, Standing
from pptrace.analysis.whatif.stage_costs import StageCosts, stage_costs
from pptrace.analysis.whatif.study import Study
from pptrace.errors import ShapeError, UsageError
from pptrace.report.whatif import headline, span_words, whatif_tables
from pptrace.schedule.actions import Kind
from pptrace.schedule.message_graph import Messaging
from pptrace.schedule.registry import build
from tests.schedule.shapes import in_a_row
from tests.support.measured import measured_costs

STEPS = 5
LAYERS = (2, 2, 2, 2)


def costs_of(
    name: str = "1f1b",
    pp: int = 4,
    microbatches: int = 8,
    *,
    scales: tuple[int, ...] = (1,) * STEPS,
    heavy: int | None = None,
    chunks: int | None = None,
    layers: tuple[int, ...] | None = None,
    transfers: int = 0,
    unit: int = 1000,
) -> StageCosts:
    """Steps of forwards of a unit and backwards of two, each step so many times that; a stage may take twice as long."""
    plan = build(name, pp, microbatches, chunks).compute_only()
    durations = unit * np.where(plan.table.kind == Kind.F.code, 1, 2) * np.where(plan.table.stage == heavy, 2, 1)
    steps = np.array(scales)[:, np.newaxis, np.newaxis] * durations
    return stage_costs(plan, measured_costs(plan.table, steps, transfers), layers)


def study_of(costs: StageCosts, name: str = "1f1b", messaging: Messaging = Messaging.AHEAD) -> Study:
    """The study of a run that was as long as its replay with a way of sending and receiving."""
    measured = replay(costs, Target(costs.plan, identity_map(costs), messaging)).spans
    return Study(Baseline(costs, measured), name, {}, ())


def names_of(study: Study) -> set[str]:
    return {name for name, _ in all_changes(study)}


def test_a_run_without_a_schedule_of_the_catalogue_keeps_its_plan_or_takes_another_schedule() -> None:
    costs = costs_of()
    assert plan_of(Change(link_speed=2.0), "custom", costs) is costs.plan
    assert plan_of(Change(schedule="gpipe"), "custom", costs).name == "gpipe"
    for change in (Change(microbatches=16), Change(chunks=2)):
        with pytest.raises(UsageError, match="not in the catalogue; name another with --schedule"):
            plan_of(change, "custom", costs)
    assert not [name for name in names_of(study_of(costs, "custom")) if "microbatches of" in name]


def test_other_plans_of_a_step_in_parts_say_what_they_take_for_granted() -> None:
    """Two calls of a schedule may stand on each other, as where an update is between them."""
    plan = in_a_row(build("1f1b", 4, 4), build("1f1b", 4, 4))
    durations = np.full((STEPS, 1, len(plan.table.kind)), 1000)
    costs = stage_costs(plan, measured_costs(plan.table, durations, 0), None)
    words = "the run takes its microbatches in 2 parts"
    study = study_of(costs, "custom")
    assert words in study.scenario(Change(schedule="1f1b"), "1f1b").note
    assert words not in study.scenario(Change(link_speed=2.0), "links").note
    assert words not in study_of(costs_of()).scenario(Change(schedule="gpipe"), "gpipe").note


def test_chunks_stay_as_many_where_the_schedule_takes_any_number() -> None:
    costs = costs_of("interleaved-1f1b", 2, 4, chunks=4)
    for change, num_chunks in (
        (Change(microbatches=8), 4),
        (Change(schedule="interleaved-zb"), 4),
        (Change(schedule="zbv"), 2),
        (Change(schedule="1f1b"), 1),
        (Change(chunks=3), 3),
    ):
        assert plan_of(change, "interleaved-1f1b", costs).num_chunks == num_chunks
    assert plan_of(Change(schedule="interleaved-1f1b"), "1f1b", costs_of()).num_chunks == 2


def test_a_split_has_the_layers_that_the_model_has_where_these_are_known() -> None:
    costs = costs_of(layers=LAYERS)
    with pytest.raises(UsageError, match="--split 2,2,2,3: 9 layers; expected 8, as the model has"):
        stage_map_of(costs, Change(split=(2, 2, 2, 3)), 4, "1f1b")
    shares = stage_map_of(costs, Change(split=(1, 3, 2, 2)), 4, "1f1b").shares
    assert shares[0].sum(axis=1).tolist() == [0.5, 1.5, 1, 1]
    unknown = stage_map_of(replace(costs, layers=None), Change(split=(2, 2, 2, 4)), 4, "1f1b").shares
    assert unknown[0].sum(axis=1).tolist() == pytest.approx([0.8, 0.8, 0.8, 1.6])


def test_receives_posted_ahead_are_a_change_only_where_they_are_not() -> None:
    costs = costs_of(transfers=500)
    posted = {"receives posted 1 op ahead", "receives posted 2 ops ahead"}
    assert study_of(costs).baseline.messaging is Messaging.AHEAD
    assert not names_of(study_of(costs)) & posted
    study = study_of(costs, messaging=Messaging.BLOCKING_RECEIVES)
    assert study.baseline.messaging is Messaging.BLOCKING_RECEIVES
    assert posted <= names_of(study)
    assert not names_of(replace(study, tells_shapes=True)) & posted, "a receive needs the shape that its message tells"


@pytest.mark.parametrize(("transfers", "found"), [(33, Messaging.AHEAD), (34, Messaging.BLOCKING_RECEIVES)])
def test_receives_are_posted_ahead_where_that_explains_the_steps_within_a_bit_more_than_a_hundredth(
    transfers: int, found: Messaging
) -> None:
    """11 forwards and backwards and 16 transfers, or 19 where receives block: 33·197 and 33·200 are apart by 1.5 %."""
    study = study_of(costs_of(unit=181, transfers=transfers), messaging=Messaging.BLOCKING_RECEIVES)
    assert study.baseline.measured[0] == 33 * 181 + 19 * transfers
    assert study.baseline.messaging is found


@pytest.mark.parametrize(
    ("microbatches", "sizes"),
    [
        (8, {"16 microbatches of half the size", "4 microbatches of twice the size"}),
        (2, {"4 microbatches of half the size", "1 microbatch of twice the size"}),
        (3, {"6 microbatches of half the size"}),
        (1, {"2 microbatches of half the size"}),
    ],
)
def test_the_same_work_is_tried_in_twice_and_in_half_as_many_microbatches(microbatches: int, sizes: set[str]) -> None:
    names = names_of(study_of(costs_of(pp=2, microbatches=microbatches)))
    assert {name for name in names if name.endswith("the size")} == sizes


def test_the_slowest_of_several_stages_is_tried_as_the_others_and_links_twice_as_fast() -> None:
    of_stages = {"links twice as fast", "ideal stage=1"}
    for pp, tried in ((1, set()), (2, of_stages), (4, of_stages)):
        names = names_of(study_of(costs_of(pp=pp, heavy=1, transfers=1)))
        assert {name for name in names if "stage=" in name or "links" in name} == tried


def test_there_are_no_more_stages_than_the_model_has_layers() -> None:
    """Eight layers fill eight stages of four ranks, not sixteen."""
    costs = costs_of(layers=LAYERS)
    names = [name for name, _ in all_schedules(study_of(costs), Change())]
    assert [name for name in names if name.startswith("interleaved-1f1b")] == ["interleaved-1f1b, 2 chunks"]
    with pytest.raises(ShapeError, match="16 stages, 4 on each rank, and the model has 8 layers"):
        plan_of(Change(schedule="interleaved-1f1b", chunks=4), "1f1b", costs)


def test_a_split_over_a_v_has_no_layout_of_megatron() -> None:
    study = study_of(costs_of(layers=LAYERS))
    looped, on_v = (
        study.scenario(Change(schedule=name, split=(1,) * 8), name).note for name in ("interleaved-1f1b", "zbv")
    )
    assert "Megatron-LM" in looped
    assert "Megatron-LM" not in on_v
    assert "torchtitan" in on_v


@pytest.mark.parametrize(("sequences", "halved"), [(None, True), (1, False), (2, True), (3, False)])
def test_microbatches_are_halved_where_that_leaves_whole_sequences(sequences: int | None, halved: bool) -> None:
    study = replace(study_of(costs_of()), sequences=sequences)
    assert ("16 microbatches of half the size" in names_of(study)) is halved


def test_another_run_may_differ_more_where_ranks_waited_for_cores() -> None:
    """0.2 of a wait beyond 3 % in each of two runs, of which nine in ten are within 1.645 standard deviations."""
    usual, busy = (Baseline(costs_of(), np.full(STEPS, 33_000), wait) for wait in (0.03, 0.23))
    assert usual.between_runs == 0.015
    assert busy.between_runs == pytest.approx(np.hypot(0.015, 1.645 * np.sqrt(2) * 0.2 * 0.2))
    calm, wide = (predict(of, Change(), of.costs.plan) for of in (usual, busy))
    assert calm.span == wide.span
    assert wide.high - wide.low > 5 * (calm.high - calm.low)


def test_what_is_sure_to_help_leads_and_what_may_not_comes_after_it_though_it_gains_more() -> None:
    study = study_of(costs_of("gpipe", scales=(40, 41, 40, 41, 40)), "gpipe")
    sure = study.scenario(Change(schedule="zb-h1"), "sure")
    unsure = replace(sure, name="unsure", gain_ns=2 * sure.gain_ns, standing=Standing.UNSURE)
    assert sure.standing is Standing.SURE
    doubtful = replace(study, clocks_ns=sure.gain_ns).scenario(Change(schedule="zb-h1"), "zb-h1")
    assert (doubtful.standing, "the clocks may be off" in doubtful.doubt) == (Standing.UNSURE, True)
    shared = replace(study, shares_device=True).scenario(Change(schedule="zb-h1"), "zb-h1")
    assert (shared.standing, "share a GPU" in shared.doubt) == (Standing.UNSURE, True)
    lost = study.scenario(Change(microbatches=4, microbatch_size=2.0), "lost")
    assert lost.standing is Standing.NO_GAIN
    result = answer(study, [("zb-h1", Change(schedule="zb-h1"))])
    many = replace(result, scenarios=(sure, unsure, lost))
    assert headline(many).startswith("sure would take ")
    none = replace(many, scenarios=many.scenarios[1:])
    assert headline(none) == "Nothing here is sure to help: the interval of each change includes no gain"
    assert headline(replace(many, scenarios=(lost,))).startswith(
        "Nothing here is sure to help: no change that was tried"
    )
    assert headline(replace(many, scenarios=(doubtful,))).startswith(
        "Nothing here is sure to help: the clocks may be off by "
    )


@pytest.mark.parametrize("framework", ["megatron-lm", "deepspeed", "torch.distributed.pipelining"])
def test_a_plan_that_the_framework_lacks_comes_after_those_that_it_has(framework: str) -> None:
    study = replace(study_of(costs_of(scales=(10, 11, 10, 11, 10))), framework=FRAMEWORKS[framework])
    result = answer(study, all_changes(study))
    lacking = {one.name.partition(",")[0] for one in result.scenarios if one.standing is Standing.LACKING}
    assert "dualpipe" in lacking
    assert lacking.isdisjoint(FRAMEWORKS[framework].schedules)
    standings = [one.standing for one in result.scenarios]
    assert Standing.LACKING not in standings[: sum(one.is_choice for one in result.scenarios)]
    (table,) = (table for table in whatif_tables(result) if table.key == "whatif")
    names = [row[0] for row in table.rows]
    assert names.index(f"not in {result.framework}:") < names.index("dualpipe")
    assert not any(one.on_pareto_front for one in result.scenarios if one.standing is Standing.LACKING)
    asked = answer(study, [("dualpipe", Change(schedule="dualpipe"))])
    assert f"not in {result.framework}" in asked.scenarios[0].note
    assert asked.advice is None


def test_of_a_run_of_an_unknown_framework_every_plan_is_shown_and_that_is_said() -> None:
    study = study_of(costs_of(scales=(10, 11, 10, 11, 10)))
    result = answer(study, all_changes(study))
    assert Standing.LACKING not in {one.standing for one in result.scenarios}
    assert (
        "which framework ran is not known: plans are shown whether it has them or not" in whatif_tables(result)[0].notes
    )


def test_no_change_is_the_plan_of_the_run_and_none_puts_the_whole_model_on_every_rank() -> None:
    two = study_of(costs_of(pp=2, microbatches=4))
    assert "dualpipe" not in names_of(two)
    assert "dualpipe" in names_of(study_of(costs_of()))
    assert "dualpipe" in {name for name, _ in all_schedules(two, Change())}, "asked for it is predicted"
    plan = two.costs.plan
    assert not [
        name for name, change in all_changes(two) if change.schedule and plan_of(change, "1f1b", two.costs) == plan
    ]
    split = study_of(costs_of("zb-h1"), "zb-h1")
    assert names_of(split).isdisjoint({"zb-h2", "zb-auto", "zbv", "v-half", "v-min", "interleaved-zb, 2 chunks"})
    assert {"1f1b", "gpipe", "dualpipe-v"} <= names_of(split)
    combined = {"combined-1f1b, 2 chunks", "combined-1f1b, 4 chunks"}
    assert names_of(study_of(costs_of())).isdisjoint(combined), "it hides exchanges with experts"
    assert names_of(replace(study_of(costs_of()), has_experts=True)) & combined


def test_faster_links_and_ideals_have_a_table_of_their_own_with_words_for_what_they_mean() -> None:
    study = study_of(costs_of(heavy=3, transfers=500))
    result = answer(study, all_changes(study))
    changes, ideals = whatif_tables(result)
    names = [row[0] for row in ideals.rows]
    assert {"ideal stage=3", "links twice as fast"} <= set(names)
    assert not set(names) & {row[0] for row in changes.rows}
    means = {row[0]: row[1] for row in ideals.rows}
    assert means["ideal stage=3"] == "the stage takes what the others do"
    assert means["links twice as fast"] == "messages take 1/2 of the time"
    assert all(means.values())
    slower = answer(study, [("slower links", Change(link_speed=0.25))])
    (table,) = whatif_tables(slower)
    assert (table.title, table.rows[0][1]) == ("If it cost more", "messages take 4 times as long")
    (none,) = whatif_tables(replace(slower, scenarios=(replace(slower.scenarios[0], gain_ns=0),)))
    assert none.title == "If it cost more", "though it costs the step nothing"
    assert headline(slower).startswith("slower links would make the step ")
    assert "% longer: " in headline(slower)
    alone = answer(study, [("ideal jitter", Change(ideals=(parse_ideal("jitter"),)))])
    assert [table.key for table in whatif_tables(alone)] == ["whatif-ideals"]


def test_what_does_not_fit_into_memory_is_named_where_nothing_else_was_asked_for() -> None:
    asked = [("zb-h1", Change(schedule="zb-h1")), ("eager-1f1b", Change(schedule="eager-1f1b"))]
    result = answer(study_of(costs_of()), asked)
    standings = ((2_000_000, Standing.OVER_LIMIT), (0, Standing.NO_GAIN))
    needs = [
        replace(one, over_limit_bytes=over, standing=standing)
        for one, (over, standing) in zip(result.scenarios, standings, strict=True)
    ]
    assert headline(replace(result, scenarios=tuple(needs))) == headline(replace(result, scenarios=tuple(needs[1:])))
    alone = headline(replace(result, scenarios=tuple(needs[:1])))
    assert alone.startswith("zb-h1 would take")
    assert alone.endswith("; it needs 2.0 MB more than --memory-limit")
    needs[1] = replace(needs[1], over_limit_bytes=1)
    assert headline(replace(result, scenarios=tuple(needs))) == "Nothing that was tried fits into --memory-limit"


def test_the_picture_is_of_the_best_change_that_can_be_had() -> None:
    study = study_of(costs_of(heavy=3))
    changes = all_changes(study)
    result = answer(study, changes)
    assert result.scenarios[-1].ideal
    best = next(one for one in result.scenarios if not one.ideal)
    (today, now), (name, then) = pictures(study, changes, result)
    assert (today, name) == ("step 2 as it was, replayed", f"predicted step of {best.name}")
    assert (now.makespan_ns, then.makespan_ns) == (result.measured_span_ns, best.span_ns)


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (Change(schedule="gpipe"), None),
        (Change(link_speed=2.0), "the whole time of a message is scaled"),
        (
            Change(microbatches=16, microbatch_size=0.5),
            "ops are taken to cost in proportion to the size of a microbatch",
        ),
        (Change(schedule="dualpipe"), "an overlapped pair is taken to cost what its halves cost one after the other"),
        (Change(schedule="zb-h1"), "W is taken to be 0.50 of a B"),
        (Change(schedule="interleaved-1f1b"), "layers of a stage are taken to cost alike"),
        (Change(microbatches=16), "a step does 2 times the work"),
        (Change(placement=(3, 2, 1, 0)), None),
        (Change(placement=(0, 2, 1, 3)), "messages on links that the run did not use"),
        (Change(schedule="looped-bfs"), "messages on links that the run did not use"),
    ],
)
def test_what_a_prediction_assumes_is_noted(change: Change, note: str | None) -> None:
    found = study_of(costs_of(layers=LAYERS, transfers=1)).scenario(change, "").note
    assert (note or "") in found
    assert note or not found
    assert ("overlapped pair" in found) == (change.schedule == "dualpipe")
    assert ("message is scaled" in found) == (change.link_speed != change.microbatch_size)


def test_overlapped_pairs_of_the_run_itself_need_no_assumption() -> None:
    study = study_of(costs_of("dualpipe", 4, 8), "dualpipe")
    assert "overlapped pair" not in study.scenario(Change(microbatches=16), "").note


def test_what_is_assumed_of_the_halves_of_measured_pairs_is_noted() -> None:
    study = study_of(costs_of("dualpipe-v", 2, 4), "dualpipe-v")
    assert "each half of an overlapped pair" in study.scenario(Change(schedule="zbv"), "").note
    assert "each half of an overlapped pair" not in study.scenario(Change(link_speed=2.0), "").note


@pytest.mark.parametrize(("scales", "typical"), [((14, 10, 12, 11, 13), 12), ((10, 14), 10)])
def test_the_interval_of_up_to_five_steps_is_from_the_shortest_to_the_longest(
    scales: tuple[int, ...], typical: int
) -> None:
    """The median of five draws from five is the least of them in 5.8 % of cases: P(3 or more of 5 draws) at 1 in 5."""
    costs, each = costs_of(scales=scales), 11 * 3000
    change = Change(schedule="gpipe")
    found = predict(study_of(costs).baseline, change, plan_of(change, "1f1b", costs))
    assert found.span == typical * each
    assert (found.low, found.high) == (pytest.approx(10 * each * 0.985, abs=1), pytest.approx(14 * each * 1.015, abs=1))


def test_another_run_of_one_step_may_be_longer_or_shorter_though_its_microbatches_came_in_the_best_order() -> None:
    plan = build("1f1b", 4, 16).compute_only()
    durations = 1000 * (1 + (plan.table.microbatch + plan.table.stage) % 8)[np.newaxis, np.newaxis]
    costs = stage_costs(plan, measured_costs(plan.table, durations), None)
    found = predict(study_of(costs).baseline, Change(), plan)
    assert found.high > 1.02 * found.span, "other orders take longer"
    assert found.low == pytest.approx(0.985 * found.span, abs=1)


def scenario(name: str, gain: int, held: int, peak: int | None = None, standing: Standing = Standing.SURE) -> Scenario:
    return Scenario(name, "1f1b", 1, 8, None, (), 0, 0, 0, gain, 0.0, held, peak, None, "", standing=standing)


@pytest.mark.parametrize(
    ("scenarios", "front"),
    [
        ([scenario("a", 9, 4), scenario("b", 9, 4)], "ab"),
        ([scenario("a", 9, 4), scenario("b", 9, 3)], "b"),
        ([scenario("a", 9, 4), scenario("b", 8, 4)], "a"),
        ([scenario("a", 9, 4), scenario("b", 8, 3)], "ab"),
        ([scenario("a", 9, 4), scenario("i", 10, 1, standing=Standing.IDEAL)], "a"),
        ([scenario("a", 9, 4, 100), scenario("b", 8, 5, 90)], "ab"),
        ([scenario("a", 9, 4, 100), scenario("b", 8, 3, 110)], "a"),
        ([scenario("a", 9, 4, 100), scenario("b", 8, 3)], "ab"),
        ([scenario("a", 9, 4), scenario("o", 10, 3, standing=Standing.OVER_LIMIT)], "a"),
    ],
)
def test_nothing_beats_what_is_on_the_front_in_both_time_and_memory(scenarios: list[Scenario], front: str) -> None:
    assert "".join(one.name for one in _with_front(scenarios) if one.on_pareto_front) == front


@pytest.mark.parametrize(("scales", "step"), [((14, 10, 12, 11, 13), 2), ((14, 10, 12, 11), 3), ((9,), 0)])
def test_the_typical_step_is_the_one_of_lower_median_length(scales: tuple[int, ...], step: int) -> None:
    study = study_of(costs_of(scales=scales))
    assert study.typical_step == step
    assert study.picture(Change()).makespan_ns == study.baseline.measured_span == scales[step] * 11 * 3000


def test_ideals_that_gain_nothing_are_left_out_where_several_changes_are_asked_for() -> None:
    study = study_of(costs_of())
    nothing, gpipe = ("ideal jitter", Change(ideals=(parse_ideal("jitter"),))), ("gpipe", Change(schedule="gpipe"))
    assert [one.name for one in answer(study, [nothing]).scenarios] == ["ideal jitter"]
    assert [one.name for one in answer(study, [nothing, gpipe]).scenarios] == ["gpipe"]
    heavy = study_of(costs_of(heavy=3))
    stage = ("ideal stage=3", Change(ideals=(parse_ideal("stage=3"),)))
    assert [one.name for one in answer(heavy, [gpipe, stage]).scenarios] == ["gpipe", "ideal stage=3"]


def test_a_gain_is_a_part_of_what_the_same_work_takes_now() -> None:
    """16 microbatches take two steps of 11·3,000 ns now and one of 19·3,000 then: 3 of 22 are gained."""
    study = study_of(costs_of())
    result = answer(study, [("twice as many", Change(microbatches=16))])
    assert result.scenarios[0].gain_share == pytest.approx(3 / 22)
    words = "would take 13.6% off what the same work takes: 0.057 ms instead of 0.066"
    assert words in headline(result)
    assert span_words(result.scenarios[0], result).endswith("instead of 0.066 for the same work")
    assert "13.6%" in whatif_tables(result)[0].rows[1]


def test_other_changes_with_an_ideal_stay_however_little_they_gain() -> None:
    ideals = (parse_ideal("jitter"),)
    wanted = [(name, Change(schedule=name, ideals=ideals)) for name in ("1f1b", "gpipe")]
    assert len(answer(study_of(costs_of()), wanted).scenarios) == 2


def test_a_scenario_has_the_gain_of_the_same_work_and_the_memory_beyond_the_limit() -> None:
    """16 microbatches take two steps of 11·3,000 ns today and one of 19·3,000 then; rank 0 holds four activations."""
    uses = {rank: RankUse(1000, 100.0) for rank in range(4)}
    for limit, over in ((None, None), (1350, 50), (1400, 0), (1500, 0)):
        found = replace(study_of(costs_of()), uses=uses, memory_limit=limit).scenario(Change(microbatches=16), "")
        assert (found.schedule, found.span_ns, found.gain_ns) == ("1f1b", 19 * 3000, 2 * 11 * 3000 - 19 * 3000)
        assert (found.peak_inflight, found.peak_memory_bytes, found.over_limit_bytes) == (4, 1400, over)
    limited = replace(study_of(costs_of()), memory_limit=1350).scenario(Change(), "")
    assert (limited.peak_memory_bytes, limited.over_limit_bytes) == (None, None)


def test_of_splits_that_are_as_good_the_one_with_the_shortest_step_is_advised() -> None:
    """Ten layers on four stages: which two of them have three is decided by the step."""
    plan = build("1f1b", 4, 4).compute_only()
    layers = np.array([1, 7, 1, 1])
    durations = 1000 * np.where(plan.table.kind == Kind.F.code, 1, 2) * layers[plan.table.stage]
    study = study_of(stage_costs(plan, measured_costs(plan.table, np.tile(durations, (5, 1, 1))), (1, 7, 1, 1)))
    spans = {split: study.scenario(Change(split=split), "split").span_ns for split in permutations((3, 3, 2, 2))}
    assert len(set(spans.values())) > 1
    assert spans[study.best_split] == min(spans.values())
