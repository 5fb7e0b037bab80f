"""Recompute in the report and in predictions, of runs on paper whose answer is a closed form or another simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import pytest
from msgspec.structs import replace

from pptrace.analysis.memory.types import MemoryReport, PredictedMemory, RankMemory, StageActivations
from pptrace.analysis.questions import tables_of_answers
from pptrace.analysis.recompute.types import BackwardOps, RecomputeReport, StepRecompute
from pptrace.analysis.whatif.memory import RankUse, uses_with_recompute
from pptrace.analysis.whatif.recompute import (
    WEIGHT_SHARE,
    WEIGHT_SHARES,
    BackwardShares,
    backward_shares,
    layers_that_recompute,
)
from pptrace.api.whatif import predict_changes
from pptrace.api.wishes import Wishes
from pptrace.errors import UsageError
from pptrace.marks import SpanKind, SpanMark
from pptrace.model.report_table import Amount
from pptrace.report.perfetto import perfetto_object
from pptrace.report.tables import tables_of
from pptrace.report.tiles.timeline import Timeline
from pptrace.report.tiles.unlabelled import ops_with_compute
from pptrace.schedule.actions import Kind
from pptrace.schedule.registry import build
from pptrace.simulator import simulate, uniform
from pptrace.workflow.analyse import Analysis
from tests.support.analysed import analyse
from tests.support.synthetic import START, Event, Job, PaperRun, Recording, host_events, marked, run_on_paper

MS = 1_000_000
FORWARD, BACKWARD, AGAIN, STEPS = 100 * MS, 200 * MS, 50 * MS, 5


def with_recompute(
    again: int, run: PaperRun, rank: int, pipeline: Sequence[int], step: int = 0, at: int = START
) -> list[Event]:
    """The events of a step, with a recompute in the middle of each B."""
    begins = [at + done.start + 7 for done in run.computes(rank) if done.action.kind is Kind.B]
    ranges = [marked(SpanMark(SpanKind.RECOMPUTE, step), begin, begin + again) for begin in begins if again]
    return [*host_events(run, rank, pipeline, step, at), *ranges]


def analysed(again: int = AGAIN, model: Mapping[str, object] | None = None) -> Analysis:
    run = run_on_paper(build("1f1b", 2, 4), lambda action: FORWARD if action.kind is Kind.F else BACKWARD, 0)
    traces = Recording(Job(build("1f1b", 2, 4), 1, STEPS), run, partial(with_recompute, again)).traces()
    if model is not None:
        traces = [replace(trace, metadata={**trace.metadata, "model": model}) for trace in traces]
    return analyse(traces)


@pytest.fixture(scope="module")
def run() -> Analysis:
    return analysed()


def test_the_report_has_the_time_of_each_stage_and_step_and_says_so(run: Analysis) -> None:
    recompute = run.report.recompute
    count = 4 * STEPS
    assert recompute.ops == tuple(
        BackwardOps(rank, rank, "B", count, count * BACKWARD, count * AGAIN, None) for rank in (0, 1)
    )
    assert recompute.steps == tuple(StepRecompute(step, 2 * 4 * AGAIN) for step in range(STEPS))
    assert (recompute.recompute_reason, recompute.weights_reason) == (None, "its trace has no operators of autograd")
    (table,) = (table for table in tables_of_answers(run.report, Amount.BRIEF) if table.key == "recompute")
    assert table.rows == tuple((f"{rank}", "B", f"{rank}", "20", "200.00", "50.00", "25.0%") for rank in (0, 1))
    assert table.notes[0] == "in the median step 400.00 ms of recompute on all ranks together, 200.00 ms on each"
    step = run.report.typical_step
    assert sum(step.parts.values()) == step.length_ns
    waterfall = next(table for table in tables_of(run.report, step, Amount.BRIEF) if table.key == "waterfall")
    assert str(waterfall.rows[0][-1]).endswith("; of this recompute 200.00 ms")
    drawn = [one for one in perfetto_object(run)["traceEvents"] if one["name"] == "recompute"]
    assert len(drawn) == 2 * count
    assert {one["dur"] for one in drawn} == {AGAIN / 1e3}


def test_marks_of_recompute_are_no_ops_but_ranges_of_the_timelines(run: Analysis) -> None:
    assert set(run.data.ops["kind"]) == {"F", "B", "STEP", "OPTIMIZER"}
    drawn = ops_with_compute(run.data)
    again = drawn[drawn["kind"] == "RECOMPUTE"]
    assert len(again) == len(drawn) - len(run.data.ops) == 2 * 4 * STEPS
    assert (again["end_ns"] - again["start_ns"] == AGAIN).all()
    ops = Timeline(run).measured["ops"]
    assert ops.tracks.lane.tolist().count(1) == 2  # a track of each rank below its ops
    assert "RECOMPUTE" in ops.texts["kind"]


def test_w_is_a_part_of_what_is_no_recompute(run: Analysis) -> None:
    scenario = predict_changes(run, Wishes(("zb-h1",))).result.scenarios[0]
    weights = round(WEIGHT_SHARE * (BACKWARD - AGAIN))
    assert scenario.span_ns == simulate(build("zb-h1", 2, 4), uniform(FORWARD, BACKWARD, weights)).makespan_ns
    share = 0.75 * WEIGHT_SHARE
    assert f"W is taken to be {share:.2f} of a B" in scenario.note
    assert "recompute is 0.25 of it" in scenario.note
    bounds = sorted(
        simulate(build("zb-h1", 2, 4), uniform(FORWARD, BACKWARD, round(0.75 * bound * BACKWARD))).makespan_ns
        for bound in WEIGHT_SHARES
    )
    assert scenario.low_ns <= bounds[0]
    assert bounds[1] <= scenario.high_ns


@pytest.mark.parametrize(("layers", "backward"), [(0, 150 * MS), (1, 200 * MS), (2, 250 * MS)])
def test_other_layers_that_recompute_take_what_their_forward_takes(run: Analysis, layers: int, backward: int) -> None:
    scenario = predict_changes(run, Wishes(recompute_layers=layers, layers=(2, 2))).result.scenarios[0]
    assert scenario.span_ns == simulate(build("1f1b", 2, 4), uniform(FORWARD, backward)).makespan_ns
    assert scenario.peak_memory_bytes is None
    assert "its memory is not known" in scenario.note
    paste = {0: "--recompute none"}.get(
        layers, f"--recompute full --recompute-method block --recompute-num-layers {layers}"
    )
    assert scenario.paste["pptrace"] == paste


def test_more_layers_than_stages_have_are_refused(run: Analysis) -> None:
    with pytest.raises(UsageError, match="--recompute-layers 3: stages have at most 2 layers"):
        predict_changes(run, Wishes(recompute_layers=3, layers=(2, 2)))


def test_a_run_that_recomputes_nothing_is_not_predicted_without_recompute() -> None:
    with pytest.raises(UsageError, match="--recompute-layers 0: backwards of this run recompute nothing"):
        predict_changes(analysed(0, {"recompute": "none"}), Wishes(recompute_layers=0))


def test_a_layer_that_recomputes_today_tells_what_one_takes() -> None:
    model = {"recompute": "full", "recompute_method": "block", "recompute_num_layers": 1}
    run = analysed(model=model)
    recompute = run.report.recompute
    assert (recompute.granularity, recompute.num_layers, recompute.of_every_microbatch) == ("full", 1, True)
    assert layers_that_recompute(recompute, (2, 2)) == (0.5, 0.5)
    scenario = predict_changes(run, Wishes(recompute_layers=2, layers=(2, 2))).result.scenarios[0]
    assert scenario.span_ns == simulate(build("1f1b", 2, 4), uniform(FORWARD, 250 * MS)).makespan_ns
    assert "a layer that recomputes is taken to take what it takes today" in scenario.note
    names = [one.name for one in predict_changes(run, Wishes(layers=(2, 2))).result.scenarios]
    assert "without recompute" in names


@pytest.mark.parametrize(("weights_ms", "share"), [(80, 0.4), (0, 0.0), (200, 1.0), (201, None), (-1, None)])
def test_ops_that_sleep_are_weights_for_the_part_of_a_backward_that_they_say(
    weights_ms: int, share: float | None
) -> None:
    model = {"recompute": "none", "sleep_backward_ms": 200, "sleep_weight_ms": weights_ms}
    ops = analysed(0, model).report.recompute.ops
    assert [one.weights_ns for one in ops] == ([] if share is None else [share * 4 * STEPS * BACKWARD] * 2)


def test_what_a_run_says_of_itself_counts_where_its_trace_does_not_tell() -> None:
    none, full, silent = (
        analysed(0, model).report.recompute for model in ({"recompute": "none"}, {"recompute": "full"}, None)
    )
    assert (none.ops, none.recompute_reason) == ((), None)
    assert full.ops[0].recompute_ns is None
    assert full.recompute_reason.startswith("the run recomputes (full), and its trace has no operators of autograd")
    assert silent is None
    some = analysed(0, {"recompute": "none", "recompute_microbatches_beyond": 1}).report.recompute
    assert (some.granularity, some.of_every_microbatch) == ("full", False), "those beyond recompute fully"
    assert layers_that_recompute(some, (2, 2)) == ()


def test_stages_of_the_ends_alone_recompute_nothing() -> None:
    """Both stages of the model have no layer, and no range says that anything runs again."""
    model = {"recompute": "full", "recompute_method": "block", "recompute_num_layers": 1, "layers_per_stage": [0, 0]}
    recompute = analysed(0, model).report.recompute
    assert (recompute.ops, recompute.recompute_reason) == ((), None)
    assert layers_that_recompute(recompute, (0, 2)) == (1.0, 0.5)


def test_without_knowing_what_is_recomputed_no_other_recompute_is_predicted() -> None:
    with pytest.raises(UsageError, match="what backwards recompute today is not known"):
        predict_changes(analysed(0), Wishes(recompute_layers=0))


def test_shares_of_weights_by_what_is_known() -> None:
    nan = float("nan")
    shares = BackwardShares(np.array([0.0, 0.4, nan, 0.2]), np.array([nan, nan, nan, 0.3]))
    assert shares.of_weights().tolist() == pytest.approx([0.35, 0.21, 0.35, 0.3])
    assert shares.of_weights(0.0).tolist() == pytest.approx([0.25, 0.15, 0.25 * 2 / 3, 0.255])
    assert shares.of_weights(1.0).tolist() == pytest.approx([0.5, 0.3, 0.5, 0.45])
    plan = build("1f1b", 2, 4)
    ops = (BackwardOps(0, 0, "B", 2, 100, 30, 20), BackwardOps(1, 0, "B", 2, 300, 50, None))
    recompute = RecomputeReport(ops, (), "", None, True, None, None)
    found = backward_shares(recompute, plan)
    assert (found.recompute[0], found.weights[0]) == (0.2, 0.2)
    assert backward_shares(replace(recompute, ops=()), plan).recompute.tolist() == [0, 0]


def test_memory_of_other_recompute_is_what_layers_keep_with_and_without() -> None:
    """Two layers a stage, which keep 40 bytes each and 10 recomputed, and 5 of the embedding; one of two recomputes."""
    stages = (StageActivations(0, 55, 85, 25),)
    predicted = PredictedMemory(0, 0, 0, 55, None, stages)
    rank = RankMemory(0, 0, (0,), 1, 1000, None, 500, None, None, predicted)
    memory, plan, uses = MemoryReport((rank,), ()), build("1f1b", 1, 2), {0: RankUse(500, 60.0)}
    after = {part: uses_with_recompute(uses, memory, plan, (2,), np.array([part]))[0] for part in (0.0, 0.5, 1.0)}
    assert [use.per_activation for use in after.values()] == [90.0, 60.0, 30.0]
    assert [use.start for use in after.values()] == [470, 500, 500]
    of_ends = replace(predicted, stages=(StageActivations(0, 5, 5, 5),))
    of_no_layer = MemoryReport((replace(rank, predicted=of_ends),), ())
    assert uses_with_recompute(uses, of_no_layer, plan, (0,), np.array([0.0])) == uses
    unknown = replace(predicted, stages=(StageActivations(0, 55),))
    of_unknown = MemoryReport((replace(rank, predicted=unknown),), ())
    assert uses_with_recompute(uses, of_unknown, plan, (2,), np.array([0.0])) == {}
    of_no_stage = MemoryReport((replace(rank, predicted=replace(predicted, stages=())),), ())
    assert uses_with_recompute(uses, of_no_stage, plan, (2,), np.array([0.0])) == {}
