"""Some ranks of a pipeline without labels whose others have no trace: their ops are found as they ran, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pptrace.model.tables import COMPUTE_KINDS
from pptrace.model.traces import HOST_NAME, Category, Trace
from pptrace.recognise.run import RecognisedRun
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build
from pptrace.schedule.text import from_rows
from tests.recognise.infer.test_match_chain import NODE, SLOT, Program
from tests.support.analysed import analyse, recognise
from tests.support.extent import ALL
from tests.support.lanes import bubble_ns
from tests.support.synthetic import MAIN_THREAD, START, Event, make_trace


def compute_of(run: RecognisedRun) -> pd.DataFrame:
    return run.ops[run.ops["kind"].isin(COMPUTE_KINDS)]


def check_right_or_null(program: Program, run: RecognisedRun, ranks: Sequence[int]) -> int:
    """Each op that is shown ran, with the kind, step, stage and microbatch that are said of it; how many are shown."""
    truth = {key: text for key, text in program.truth.items() if key[0] in ranks}
    ops = compute_of(run)
    for op in ops.itertuples():
        (text,) = [text for (rank, at), text in truth.items() if rank == op.rank and op.start_ns <= at < op.end_ns]
        stage, kind, microbatch = text.split()[0].partition("F" if "F" in text else "B")
        assert op.kind == kind
        assert op.stage in (-1, int(stage))
        assert op.microbatch in (-1, int(microbatch))
        assert op.step == int(text.split()[1])
    return len(ops)


PLANS = st.builds(
    lambda name, pp, extra: build(name, pp, pp + extra),
    st.sampled_from(["1f1b", "gpipe"]),
    st.integers(2, 4),
    st.integers(0, 4),
)


@settings(max_examples=12 if ALL else 8, deadline=None)
@given(PLANS, st.data(), st.sampled_from([0.0, 0.3, 1.0]), st.booleans(), st.booleans(), st.integers(1, 2))
def test_one_rank_alone_shows_each_of_its_ops_whatever_runs_between_them(
    plan: Plan, data: st.DataObject, noise: float, optimizer: bool, peers: bool, tensors: int
) -> None:
    program = Program(plan, 2, data.draw(st.integers(0, 1000)), noise, optimizer, peers, tensors)
    index = data.draw(st.integers(0, plan.pp - 1), label="place")
    trace = program.traces()[index]
    run = recognise([trace], num_ranks=plan.pp)
    count = check_right_or_null(program, run, [index])
    is_open = index == plan.pp - 1 and plan.name == "1f1b" and not optimizer
    assert count == (0 if is_open else sum(rank == index for rank, _ in program.truth))
    assert run.schedule.name in (plan.name, "unknown")
    assert run.mesh.pp in (plan.pp, None)
    if not is_open:
        names = {candidate.name for candidate in run.schedule.candidates}
        assert plan.name in names
        assert (plan.pp, {index: index}) in [(own.pp, dict(own.pp_ranks)) for own in run.schedule.candidates]
    else:
        assert any("the ends of the steps of rank" in line for line in run.warnings)


@pytest.mark.parametrize(
    "ranks", [*combinations(range(4), 2), *combinations(range(4), 3)] if ALL else [(0, 3), (1, 2), (0, 1, 3)]
)
def test_some_ranks_show_what_all_of_them_do_and_bound_their_bubble(ranks: tuple[int, ...]) -> None:
    program = Program(build("1f1b", 4, 6), 2, noise=0.5, peers=False, optimizer=False)
    traces = program.traces()
    whole, part = analyse(traces), analyse([traces[rank] for rank in ranks], num_ranks=4)
    columns = ["rank", "step", "kind", "stage", "microbatch", "phase"]
    tables = []
    for analysis in (whole, part):
        ops = analysis.data.ops
        ops = ops[ops["rank"].isin(ranks) & ops["kind"].isin(COMPUTE_KINDS)].sort_values(["rank", "start_ns"])
        tables.append(ops.reset_index(drop=True))
    assert len(tables[1]) == 24 * len(ranks)
    pd.testing.assert_frame_equal(tables[0][columns], tables[1][columns])
    shift = (tables[0]["start_ns"] - tables[1]["start_ns"]).groupby(tables[0]["rank"]).unique()  # of the ranks' clocks
    assert shift.map(len).eq(1).all()
    for window in part.windows:
        (step,) = [step for step in part.report.steps if step.step == window.step]
        for rank in step.ranks:
            start, end = window.start_ns, window.end_ns
            if rank.window_ns != end - start:  # its clock is not related to the others': the window is its own
                own = part.data.part(rank.rank, step.step).ops
                start, end = int(own["start_ns"].min()), int(own["end_ns"].max())
            away = int(shift[rank.rank][0])
            bubble = bubble_ns(whole.data.lanes[rank.rank], start + away, end + away)
            assert rank.bubble_low_ns <= bubble <= rank.bubble_high_ns
            assert rank.bubble_ns in (None, bubble)


@pytest.mark.parametrize(("late", "host"), [(0, "node-a"), (2, "node-a"), (2, "")])
def test_steps_of_ranks_that_began_to_record_at_different_ones_are_those_run_at_one_time(late: int, host: str) -> None:
    program = Program(build("1f1b", 4, 6), 4, peers=False)
    run = program.traces()
    second = min(at for (_, at), text in program.truth.items() if text.endswith(" 1")) - 2 * SLOT
    traces = []
    for rank in (0, 2):
        events = run[rank].events
        begin = second if rank == late else 0
        shown = events.take(np.flatnonzero(events.start_ns >= begin))
        traces.append(replace(run[rank], events=shown, metadata={HOST_NAME: host}))
    ops = compute_of(recognise(traces, num_ranks=4))
    true_steps: dict[int, set[str]] = {}
    for op in ops.itertuples():
        ran = [
            text.split()[1]
            for (rank, at), text in program.truth.items()
            if rank == op.rank and op.start_ns <= at < op.end_ns
        ]
        true_steps.setdefault(op.step, set()).update(ran)
    assert len(true_steps) >= 2
    # Clocks of two hosts do not compare: there they are taken in order.
    assert {len(steps) for steps in true_steps.values()} == ({1} if host else {2})


def test_the_forward_of_each_backward_is_the_one_whose_nodes_it_runs() -> None:
    """All forwards, then all backwards from the last one to the first: of no schedule that has a name."""
    rows = [[f"{stage}F{m}" for m in range(4)] + [f"{stage}B{m}" for m in (3, 2, 1, 0)] for stage in range(3)]
    program = Program(from_rows(rows, "custom"), 2, peers=False)
    for index, trace in enumerate(program.traces()):
        run = recognise([trace], num_ranks=3)
        assert check_right_or_null(program, run, [index]) == 16
        assert (run.schedule.name, run.schedule.candidates) == ("unknown", ())


def test_the_rank_whose_trace_tells_the_rest_is_named() -> None:
    traces = Program(build("1f1b", 4, 8), 2, peers=False).traces()
    run = recognise([traces[3]], num_ranks=4)
    assert {own.name for own in run.schedule.candidates} == {"1f1b", "eager-1f1b"}
    assert any("is null until the trace of rank 0 is given" in line for line in run.warnings)
    recognised = recognise([traces[0], traces[3]], num_ranks=4)
    assert (recognised.schedule.name, recognised.mesh.pp) == ("1f1b", 4)


def program_of(kinds: str, before: str = "") -> Trace:
    """Sends (S), receives (R), operators that make nodes (C) or none (N), backwards of the nodes of the oldest such operator (B)
    or of all of them (E) and an optimizer (O), again and again, numbered as torch does it; ``before``
    comes once, ahead of them.
    """
    rows: list[Event] = []
    at, number = START, 100
    made: list[int] = []
    for kind in before + kinds * 6:
        name = {"S": "c10d::send", "R": "c10d::recv_", "O": "Optimizer.step#SGD.step"}.get(kind, "aten::mm")
        category = Category.ANNOTATION if kind == "O" else Category.CPU_OP
        if kind in "BE":
            count = len(made) if kind == "E" else 2
            run, made = made[:count], made[count:]
            for index, node in enumerate(run[::-1]):
                begin = at + 10 * index
                rows.append(Event(category, NODE.format("Mm"), begin, begin + 8, thread=MAIN_THREAD, correlation=node))
        else:
            own = number if kind in "SR" else -1
            rows.append(Event(category, name, at, at + 50, thread=MAIN_THREAD, correlation=own))
        if kind == "R":
            rows.append(Event(Category.ANNOTATION, "gloo:recv", at + 20, at + 90, thread=MAIN_THREAD))
        if kind == "C":
            made += [number, number + 1]
            number += 2
        at += 100
    return make_trace(rows, 0)


@pytest.mark.parametrize(
    "kinds",
    [
        "CSRCEO",  # an exchange in the forward
        "CSRCSRCEO",  # a ring in two layers
        "NSRCEO",  # an exchange before the forward
        "CESRO",  # gradients exchanged before the optimizer
        "CEOSR",  # weights exchanged behind it
        "RCEOS",  # an actor's samples come, weights go back
        "RCEOSRCEOS",
        "SRCEO",
        "RNS",  # inference in a pipeline
    ],
)
def test_messages_of_what_is_no_pipeline_make_no_op_of_one_rank(kinds: str) -> None:
    run = recognise([program_of(kinds)], num_ranks=4)
    assert compute_of(run).empty
    assert run.schedule.plan is None
    assert run.schedule.candidates == ()


def test_programs_of_pipelines_in_the_same_form_are_found() -> None:
    """The first rank, one in the middle, and the last, of two microbatches a step."""
    for kinds in ("CSCSRBRB", "RCSRCSRBSRBS", "RCBSRCBS"):
        assert not compute_of(recognise([program_of(f"{kinds}O")], num_ranks=4)).empty, kinds


def test_what_the_last_rank_runs_to_learn_shapes_is_no_op() -> None:
    """As torch's schedules do before their first step: shapes come in messages, and go back behind a backward."""
    ops = compute_of(recognise([program_of("RCBSRCBSRCBSRCBSO", before="RNSRNRCBSS")], num_ranks=4))
    assert [*ops["step"].value_counts(sort=False)] == [8] * 5  # without the first step
