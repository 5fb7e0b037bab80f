"""A plan run on paper → a trace as a framework writes it → the same plan, microbatch by microbatch, at the same times."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pptrace.ingest import open_inputs, read_each
from pptrace.model.tables import COMPUTE_KINDS
from pptrace.recognise.rank import recognise_rank
from pptrace.recognise.run import RecognisedRun, recognise_ranks
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build, get
from pptrace.workflow.load import load
from tests.roundtrip.files import WRITERS, step_begins
from tests.roundtrip.styles import STYLES, Marks, Style, TorchLabels, Unlabelled, ZeroBubble
from tests.schedule.shapes import legal_shapes
from tests.support.extent import ALL
from tests.support.found_ops import message_names, planned
from tests.support.synthetic import PaperRun, run_on_paper


def schedules_of(style: type[Style]) -> tuple[str, ...]:
    """All with PPTRACE_ALL; else every other one of a style that has many."""
    return style.schedules[:: 1 if ALL or len(style.schedules) < 4 else 2]


CASES = [(style, schedule) for style in STYLES for schedule in schedules_of(style)]
SMALL = {"dualpipe-v": (2, 5, 2), "zbv": (3, 6, 2), "v-half": (3, 6, 2), "v-min": (3, 6, 2)}
TWO_CHUNKS = ("interleaved-1f1b", "looped-bfs", "interleaved-zb", "interleaved-afab")


def cost(action: Action) -> int:
    """Unequal stages; weight gradients alike, so that a flush of several can be told apart."""
    each = {Kind.F: 500, Kind.B: 1000, Kind.I: 520, Kind.W: 480}
    return sum(each[half.kind] + (0 if half.kind is Kind.W else 10 * half.stage) for half in action.halves)


def paper(schedule: str, shape: tuple[int, int, int] | None = None) -> PaperRun:
    small = SMALL.get(schedule) or ((2, 4, 2) if schedule in TWO_CHUNKS else (3, 5, 1))
    return run_on_paper(build(schedule, *(shape or small)), cost, latency=130)


def forms(style: type[Style]) -> tuple[str, ...]:
    return ("kineto",) if style.has_operators else ("kineto", "nsight")


def recognised(style: Style, run: PaperRun, steps: int, form: str) -> RecognisedRun:
    """Recognise what is in the files, without the analysis behind it."""
    with TemporaryDirectory(prefix="pptrace-roundtrip-") as folder:
        inputs = open_inputs([WRITERS[form](style, run, steps, Path(folder))])
        return recognise_ranks(read_each(inputs, recognise_rank, 1).traces)


def found_ops(ops: pd.DataFrame, rank: int, step: int, offset: int = 0) -> list[tuple[str, int, int]]:
    """(action, start, end) of each op of a rank in a step; ``offset`` is what its clock was moved by."""
    rows = ops[(ops["rank"] == rank) & (ops["step"] == step) & ops["kind"].isin(COMPUTE_KINDS)].sort_values("start_ns")
    columns = (rows[name].tolist() for name in ("pair", "stage", "kind", "microbatch", "start_ns", "end_ns"))
    return [
        (pair or f"{stage}{kind}{microbatch}", start - offset, end - offset)
        for pair, stage, kind, microbatch, start, end in zip(*columns, strict=True)
    ]


def done_ops(run: PaperRun, rank: int, step: int) -> list[tuple[str, int, int]]:
    begin = step_begins(run, step)
    return [(str(done.action), begin + done.start, begin + done.end) for done in run.computes(rank)]


def keys(plan: Plan) -> list[list[str]]:
    return [planned(plan, rank) for rank in range(plan.pp)]


def check(style: Style, run: PaperRun, steps: int, result: RecognisedRun) -> None:
    plan = run.plan
    for step in range(steps):
        for rank in range(plan.pp):
            assert found_ops(result.ops, rank, step) == done_ops(run, rank, step)
    assert set(result.ops.loc[result.ops["kind"].isin(COMPUTE_KINDS), "clock"]) == {"device"}
    assert result.framework == style.framework
    assert (result.mesh.pp, result.mesh.vpp) == (plan.pp, plan.num_chunks)
    assert result.schedule.mismatches == ()
    assert keys(result.schedule.plan) == keys(plan)
    assert set(result.comms.loc[result.comms["axis"] == "pp", "clock"]) <= {"device"}
    if style.messages_named:
        check_messages(run, steps, result)


def check_messages(run: PaperRun, steps: int, result: RecognisedRun) -> None:
    """Each message of the plan is there with both its ends, and they have met."""
    p2p = result.comms[result.comms["axis"] == "pp"]
    for rank in range(run.plan.pp):
        wanted = sorted(str(done.action) for done in run.transfers(rank)) * steps
        assert sorted(message_names(p2p[p2p["rank"] == rank])) == sorted(wanted)
    assert (p2p["match"] >= 0).all()
    assert (p2p.groupby("match")["rank"].agg(["size", "nunique"]) == 2).all().all()


@pytest.mark.parametrize(("style", "schedule"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_a_plan_comes_back_from_a_trace_of_each_framework(style: type[Style], schedule: str) -> None:
    """The formats take turns over the schedules of a style."""
    run = paper(schedule)
    possible = forms(style)
    turn = schedules_of(style).index(schedule)
    for form in possible if len(style.schedules) == 1 else possible[turn % len(possible) :][:1]:
        check(style(), run, 2, recognised(style(), run, 2, form))


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.__name__)
def test_the_report_has_the_plan_and_the_times(style: type[Style], tmp_path: Path) -> None:
    """The whole way, as the command goes it. Clocks may be moved within their uncertainty."""
    run = paper(style.schedules[-1])
    analysis = load([WRITERS[forms(style)[-1]](style(), run, 2, tmp_path)])
    report = analysis.report
    assert report.framework == style.framework
    schedule, plan = report.schedule, run.plan
    assert (schedule.name, schedule.num_stages) == (plan.name, plan.num_stages)
    assert schedule.num_microbatches == plan.num_microbatches
    assert len(report.steps) == 2
    for rank in range(run.plan.pp):
        offset = analysis.data.clock.offsets_ns.get(rank, 0)
        assert found_ops(analysis.data.ops, rank, 1, offset) == done_ops(run, rank, 1)
        computed = sum(done.end - done.start for done in run.computes(rank))
        assert {r.compute_ns for step in report.steps for r in step.ranks if r.rank == rank} == {computed}


@pytest.mark.parametrize("style", [Marks, TorchLabels, ZeroBubble, Unlabelled], ids=lambda style: style.__name__)
@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_plans_of_any_size_come_back(style: type[Style], data: st.DataObject) -> None:
    """Any schedule where labels tell the stages, or chunks; without any, of those that no other one looks like."""
    schedule = data.draw(st.sampled_from(style.schedules))
    shapes = [(p, m, v) for p, m, v in legal_shapes(schedule, 4, rounds=2) if p > 1 and m >= 2 * p]
    if style is Unlabelled:
        shapes = [(p, m, v) for p, m, v in shapes if get(schedule).runs_without_labels(p, m, None)]
    run = paper(schedule, data.draw(st.sampled_from(shapes)))
    form = data.draw(st.sampled_from(forms(style)))
    check(style(), run, 1, recognised(style(), run, 1, form))
