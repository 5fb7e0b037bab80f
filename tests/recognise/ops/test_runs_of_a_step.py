"""Steps in which a schedule runs several times: labels count microbatches from 0 in each run, the report on through the step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pptrace.model.tables import COMPUTE_KINDS
from pptrace.model.traces import Category, Trace
from pptrace.recognise.rank import recognise_rank
from pptrace.recognise.run import RecognisedRun
from pptrace.recognise.schedule.measured_steps import match_runs
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build
from tests.schedule.shapes import in_a_row
from tests.support.analysed import recognise
from tests.support.synthetic import MAIN_THREAD, START, Event, make_trace, run_on_paper

COST = 10_000


def labelled(plan: Plan, runs: Sequence[int], lost: str = "", num_late: int = 0) -> list[Trace]:
    """Traces with torch's labels: ``runs`` of a plan in each step, all but the last of the label ``lost`` and the first
    ``num_late`` on rank 0.
    """
    paper = run_on_paper(plan, lambda _: COST, latency=100)
    traces = []
    for rank in range(plan.pp):
        events, at = [], START
        for step, num_runs in enumerate(runs):
            begin = at
            for _ in range(num_runs):
                for done in paper.ranks[rank]:
                    action = done.action
                    name = f"PP:{action}"
                    events.append(
                        Event(Category.ANNOTATION, name, at + done.start, at + done.end - 10, thread=MAIN_THREAD)
                    )
                at += paper.end + COST
            events.append(Event(Category.ANNOTATION, f"ProfilerStep#{step}", begin - 50, at - 50, thread=MAIN_THREAD))
        same = [event for event in events if event.name == lost and not rank]
        events = events if rank else events[num_late:]
        traces.append(make_trace([event for event in events if event not in same[:1]], rank))
    return traces


def numbers(run: RecognisedRun, step: int) -> set[int]:
    ops = run.ops[run.ops["kind"].isin(COMPUTE_KINDS) & (run.ops["step"] == step)]
    return set(ops["microbatch"].tolist())


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved-1f1b", 2), ("zb-h1", 1), ("zbv", 2)])
def test_microbatches_are_numbered_on_through_the_runs_of_a_step(name: str, chunks: int) -> None:
    run = recognise(labelled(build(name, 2, 4, chunks), [2, 3, 2]))
    assert [numbers(run, step) for step in range(3)] == [set(range(8)), set(range(12)), set(range(8))]
    assert run.schedule.plan is not None
    assert (run.schedule.name, run.schedule.plan.num_microbatches) == ("custom", 12)
    assert run.schedule.runs == (name, name), "as most steps do"
    plans = [run.schedule.plan_of(step) for step in range(3)]
    assert [plan and plan.num_microbatches for plan in plans] == [8, 12, 8]
    assert run.schedule.mismatches == ()
    assert "step 1 has another number of microbatches: compared with more or fewer runs of its schedule" in run.warnings
    messages = run.comms[run.comms["axis"] == "pp"]
    assert set(messages.loc[messages["step"] == 0, "microbatch"]) == set(range(8))
    assert (messages["match"] >= 0).all()
    assert any(
        f"the longest steps run {name} 3 times, one after the other, with 4 microbatches each" in line
        for line in run.warnings
    )


@pytest.mark.parametrize(("runs", "usual"), [([3, 3, 2], 3), ([1, 1, 2], 1)])
def test_the_runs_of_a_schedule_are_those_of_most_steps(runs: list[int], usual: int) -> None:
    run = recognise(labelled(build("1f1b", 2, 4), runs))
    assert (run.schedule.name, run.schedule.runs) == ("custom", ("1f1b",) * usual)


def test_a_step_with_one_run_keeps_its_numbers_and_its_schedule() -> None:
    run = recognise(labelled(build("1f1b", 2, 4), [1, 1]))
    assert (run.schedule.name, run.schedule.runs) == ("1f1b", ())
    assert not any("runs of the same microbatches" in line for line in run.warnings)


def test_runs_of_which_one_lacks_an_op_are_not_numbered() -> None:
    run = recognise(labelled(build("1f1b", 2, 4), [2], lost="PP:0B2"))
    assert set(run.ops.loc[(run.ops["rank"] == 0) & (run.ops["microbatch"] >= 0), "microbatch"]) == set(range(4))
    assert run.schedule.plan is None
    assert any("no schedule recognised: an op of one microbatch runs twice in a step" in line for line in run.warnings)


def test_the_runs_of_a_plan_are_those_of_schedules_or_none() -> None:
    found = match_runs(in_a_row(build("1f1b", 3, 6), build("gpipe", 3, 4)))
    assert [(run.name, run.num_microbatches) for run in found] == [("1f1b", 6), ("gpipe", 4)]
    assert match_runs(in_a_row(build("1f1b", 3, 6))) == ()
    assert match_runs(in_a_row(build("1f1b", 3, 1), build("1f1b", 3, 1))) == (), "one microbatch at a time is no run"
    pairs = build("dualpipe-v", 2, 4, 2)
    assert match_runs(pairs) == ()
    assert [run.name for run in match_runs(in_a_row(pairs, pairs))] == ["dualpipe-v"] * 2


def test_a_step_of_one_run_beside_steps_of_several_follows_the_schedule_itself() -> None:
    run = recognise(labelled(build("1f1b", 2, 4), [2, 1, 2]))
    assert [getattr(run.schedule.plan_of(step), "name", None) for step in range(3)] == ["custom", "1f1b", "custom"]


def test_an_op_that_runs_nothing_ends_within_its_run() -> None:
    """The input gradient of a first stage begins once its message is there: that of its run, not the later one of that number."""
    plan = build("zb-h1", 2, 3)
    ops = recognise_rank(labelled(plan, [2])[0]).ops
    of_inputs = ops[ops["kind"] == "I"].sort_values("start_ns")
    assert of_inputs["microbatch"].tolist() == list(range(6))
    lengths = (of_inputs["end_ns"] - of_inputs["start_ns"]).tolist()
    assert lengths[:3] == lengths[3:]


@pytest.mark.parametrize("num_late", [1, 8])
def test_runs_that_a_rank_lacks_are_not_taken_for_later_ones(num_late: int) -> None:
    """A profiler that began within the first run of a step, or behind it, on one of the ranks."""
    run = recognise(labelled(build("1f1b", 2, 4), [2, 2], num_late=num_late))
    assert [numbers(run, step) for step in range(2)] == [set(range(4)), set(range(8))]
    starts = run.comms[run.comms["match"] >= 0].groupby("match")["start_ns"]
    assert (starts.max() - starts.min()).max() <= COST
    assert (run.schedule.name, run.schedule.mismatches) == ("custom", ())
    assert "step 0 has an op of one microbatch twice: not compared" in run.schedule.warnings
