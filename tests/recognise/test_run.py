"""Marked traces → ops, mesh and schedule."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from pptrace.errors import PptraceError, ScheduleError, UsageError
from pptrace.marks import (
    AwaitMark,
    Axis,
    Collective,
    CollectiveMark,
    ExchangeMark,
    Link,
    OpMark,
    P2PMark,
    SpanKind,
    SpanMark,
    Transfer,
    WaitMark,
)
from pptrace.model.mesh import MeshInfo
from pptrace.model.schedule_info import PlanSource
from pptrace.model.tables import COMMS, OPS
from pptrace.model.traces import Category, Trace
from pptrace.recognise.groups.mesh import mesh_from_stages
from pptrace.recognise.run import RecognisedRun
from pptrace.schedule.actions import Action, Kind, Phase
from pptrace.schedule.registry import build
from pptrace.schedule.text import from_rows
from tests.support.analysed import recognise
from tests.support.extent import ALL
from tests.support.synthetic import LEAD, START, Event, make_trace, marked, record, renamed, without

SPLIT_BACKWARD = [["0F0", "0F1", "0I0", "0I1", "0W1", "0W0"], ["1F0", "1F1", "1I0", "1I1", "1W0", "1W1"]]
RECORDINGS = {
    "gpipe": record(build("gpipe", 3, 4), latency=70),
    "1f1b": record(build("1f1b", 4, 6), latency=70, steps=2),
    "one rank": record(build("gpipe", 1, 2)),
    "interleaved": record(build("interleaved-1f1b", 2, 4, 2), latency=70),
    "replicas": record(build("1f1b", 2, 3), latency=70, dp=2),
    "split backward": record(from_rows(SPLIT_BACKWARD, "custom"), latency=70),
    "devices": record(build("1f1b", 4, 6), latency=70, device=True),
    "devices, interleaved, replicas": record(build("interleaved-1f1b", 2, 4, 2), latency=70, device=True, dp=2),
}


@cache
def recognised(name: str, with_metadata: bool) -> RecognisedRun:
    return recognise(RECORDINGS[name].traces(with_metadata))


@pytest.mark.parametrize("name", RECORDINGS)
@pytest.mark.parametrize("with_metadata", [True, False], ids=["with facts", "marks only"])
def test_the_ops_found_are_those_of_the_plan_when_they_ran(name: str, with_metadata: bool) -> None:
    run, recording = recognised(name, with_metadata), RECORDINGS[name]
    job, ops = recording.job, run.ops
    assert run.framework == "pptrace"
    custom = "the order of ops matches no known schedule; the closest, zb-h1, has 58% of the ops in this order"
    assert run.warnings == ((custom,) if job.plan.name == "custom" and not with_metadata else ())
    assert list(ops.columns) == list(OPS)
    assert list(run.comms.columns) == list(COMMS)
    compute = ops[ops["stage"] >= 0]
    for rank in range(job.dp * job.plan.pp):
        for step in range(job.steps):
            rank_ops = compute[(compute["rank"] == rank) & (compute["step"] == step)].sort_values("start_ns")
            done = recording.run.computes(rank // job.dp)
            columns = ["kind", "stage", "chunk", "microbatch", "phase", "start_ns", "end_ns"]
            at = recording.begin(step)
            names = [(str(a.kind), a.stage, a.chunk, a.microbatch, str(a.phase)) for a in (d.action for d in done)]
            expected = [(*name, at + d.start, at + d.end) for name, d in zip(names, done, strict=True)]
            assert list(rank_ops[columns].itertuples(index=False, name=None)) == expected
    assert set(compute["clock"]) == {"device" if recording.events.__name__ == "device_events" else "host"}
    spans = ops[ops["stage"] < 0]
    assert set(spans["kind"]) == {"STEP", "OPTIMIZER"} | ({"GRAD_SYNC"} if job.dp > 1 else set())
    assert (spans["kind"] == "STEP").sum() == job.dp * job.plan.pp * job.steps


@pytest.mark.parametrize("name", RECORDINGS)
@pytest.mark.parametrize("source", [PlanSource.METADATA, PlanSource.RECOGNISED])
def test_the_plan_and_the_mesh_are_those_of_the_facts_or_those_the_ops_follow(name: str, source: PlanSource) -> None:
    result, job = recognised(name, source is PlanSource.METADATA), RECORDINGS[name].job
    assert (result.schedule.source, result.schedule.name, result.schedule.plan) == (source, job.plan.name, job.plan)
    assert result.schedule.mismatches == ()
    assert result.mesh.pipelines == tuple(map(tuple, job.pipelines))
    assert (result.mesh.pp, result.mesh.vpp) == (job.plan.pp, job.plan.num_chunks)
    assert result.mesh.num_ranks == job.dp * job.plan.pp
    assert result.mesh.dp == job.dp, "the gradients' collectives name the one axis in which replicas differ"


def test_a_mesh_without_pipelines_in_its_facts_takes_them_from_the_ops() -> None:
    traces = RECORDINGS["replicas"].traces()
    facts = [{key: value for key, value in trace.metadata.items() if key != "pp_ranks"} for trace in traces]
    run = recognise([structs.replace(t, metadata=of) for t, of in zip(traces, facts, strict=True)])
    assert run.mesh.pipelines == ((0, 2), (1, 3))
    assert run.mesh.dp == 2


def test_backward_kernels_of_another_thread_belong_to_their_op() -> None:
    """Launched by autograd's thread inside the range of the main thread; what is launched outside belongs to nobody."""
    op = Action(Kind.B, 0, 0, phase=Phase.STEADY)
    events = [
        marked(OpMark(op, 0), 100, 200),
        *(Event(Category.RUNTIME, "cudaLaunchKernel", t, t + 1, thread=thread, correlation=t) for t, thread in
          [(90, 1), (100, 2), (150, 2), (160, 3), (199, 2), (200, 2)]),
        *(Event(Category.KERNEL, "k", start, start + 10, 0, 7, correlation=t) for t, start in
          [(90, 300), (100, 320), (150, 400), (199, 500), (200, 600)]),
        Event(Category.KERNEL, "ncclDevKernel_AllReduce", 700, 900, 0, 8, correlation=160),
    ]  # fmt: skip
    (row,) = recognise([make_trace(events)]).ops.itertuples()
    assert (row.start_ns, row.end_ns, row.clock) == (320, 510, "device")


def test_all_kernels_of_a_graph_belong_to_the_op_that_replayed_it() -> None:
    """A stage's forward is one launch, and its backward another, by autograd's thread; copies around them are eager."""
    launches = [
        (110, 1, "cudaGraphLaunch", [(300, 310), (320, 330), (335, 390)]),
        (210, 2, "cudaGraphLaunch", [(400, 410), (415, 470)]),
        (215, 2, "cudaLaunchKernel", [(480, 490)]),
    ]
    events = [marked(OpMark(Action(kind, 0, 0), 0), at, at + 20) for kind, at in ((Kind.F, 100), (Kind.B, 200))]
    for at, thread, name, kernels in launches:
        events.append(Event(Category.RUNTIME, name, at, at + 2, thread=thread, correlation=at))
        events += [Event(Category.KERNEL, "gemm", *times, 0, 7, correlation=at) for times in kernels]
    rows = recognise([make_trace(events)]).ops.itertuples()
    found = [(row.kind, row.start_ns, row.end_ns, row.clock) for row in rows]
    assert found == [("F", 300, 390, "device"), ("B", 400, 490, "device")]


def test_an_op_without_device_work_keeps_its_host_range() -> None:
    events = [marked(OpMark(Action(Kind.F, 0, 0), 0), 100, 200), Event(Category.KERNEL, "k", 120, 130, 0, 7)]
    (row,) = recognise([make_trace(events)]).ops.itertuples()
    assert (row.start_ns, row.end_ns, row.clock) == (100, 200, "host")


def test_a_step_range_is_the_host_range_even_with_device_work() -> None:
    recording = RECORDINGS["devices"]
    ops = recognise(recording.traces()).ops
    steps = ops[ops["kind"] == "STEP"]
    assert set(steps["start_ns"]) == {START - LEAD - 5}
    assert set(steps["clock"]) == {"host"}


def test_device_projections_of_marks_are_not_read_twice() -> None:
    trace = RECORDINGS["1f1b"].traces()[0]
    events = RECORDINGS["1f1b"].events_of(0)
    projected = [replace(e, category=Category.DEVICE_ANNOTATION) for e in events if e.category is Category.ANNOTATION]
    both = make_trace(events + projected, 0, trace.metadata)
    assert recognise([both]).ops.equals(recognise([trace]).ops)


def test_a_received_size_that_was_negotiated_is_read_from_its_wait() -> None:
    send, recv = Action(Kind.SEND_F, 0, 3), Action(Kind.RECV_B, 0, 1)
    events = [
        marked(P2PMark((Transfer(send, 1, 64), Transfer(recv, 1, 0)), Axis.PP, 0), 10, 90),
        marked(WaitMark(Transfer(send, 1, 64), 0), 10, 40),
        marked(WaitMark(Transfer(recv, 1, 96), 0), 40, 90),
    ]
    rows = recognise([make_trace(events)]).comms.itertuples()
    found = [(row.kind, row.bytes, row.start_ns, row.end_ns) for row in rows]
    assert found == [("send", 64, 10, 40), ("recv", 96, 10, 90)]


def test_each_tensor_of_a_message_has_a_wait_even_where_all_are_as_large() -> None:
    tensors = [Transfer(Action(Kind.RECV_F, 1, 3), 0, 64, index) for index in range(2)]
    waits = [marked(WaitMark(tensor, 0), begin, begin + 20) for tensor, begin in zip(tensors, (30, 50), strict=True)]
    rows = recognise([make_trace([marked(P2PMark(tuple(tensors), Axis.PP, 0), 10, 20), *waits])]).comms.itertuples()
    expected = [(1, 3, 64, 10, 30, 50), (1, 3, 64, 10, 50, 70)]
    assert [(row.stage, row.microbatch, row.bytes, row.start_ns, row.asked_ns, row.end_ns) for row in rows] == expected


def test_transfers_without_waits_last_as_long_as_their_call() -> None:
    mark = P2PMark((Transfer(Action(Kind.SEND_F, 0, 0), 1, 64),), Axis.PP, 0)
    (row,) = recognise([make_trace([marked(mark, 10, 90)])]).comms.itertuples()
    assert (row.start_ns, row.end_ns, row.stage, row.microbatch, row.direction, row.peer) == (10, 90, 0, 0, "F", 1)


def test_a_transfer_posted_ahead_says_when_it_was_posted_and_when_it_was_asked_for() -> None:
    """One that its own call awaits keeps its rank throughout: it was posted and asked for when it began."""
    ahead, at_once = Transfer(Action(Kind.RECV_F, 1, 3), 0, 64), Transfer(Action(Kind.RECV_F, 1, 4), 0, 64)
    events = [
        marked(P2PMark((ahead,), Axis.PP, 0), 10, 14),
        marked(WaitMark(ahead, 0), 60, 75),
        marked(P2PMark((at_once,), Axis.PP, 0), 80, 99),
        marked(WaitMark(at_once, 0), 82, 98),
    ]
    rows = recognise([make_trace(events)]).comms.itertuples()
    found = [(row.start_ns, row.posted_ns, row.asked_ns, row.end_ns) for row in rows]
    assert found == [(10, 14, 60, 75), (80, 80, 80, 98)]


def test_a_call_with_a_handle_lasts_until_it_was_awaited() -> None:
    events = [
        marked(CollectiveMark(Collective.ALL_REDUCE, Axis.DP, 4, 64, 0, handle=1), 10, 20),
        marked(ExchangeMark((Link(True, 1, 32), Link(False, 3, 48)), Axis.CP, 0, handle=2), 20, 30),
        marked(ExchangeMark((Link(True, 1, 16),), Axis.CP, 0), 30, 40),
        marked(AwaitMark(Axis.CP, 0, 2), 50, 70),
        marked(AwaitMark(Axis.DP, 0, 1), 80, 90),
    ]
    rows = recognise([make_trace(events)]).comms.itertuples()
    assert [(row.kind, row.axis, row.peer, row.group_size, row.bytes, row.start_ns, row.end_ns) for row in rows] == [
        ("all_reduce", "dp", -1, 4, 64, 10, 90),
        ("send", "cp", 1, 2, 32, 20, 70),
        ("recv", "cp", 3, 2, 48, 20, 70),
        ("send", "cp", 1, 2, 16, 30, 40),
    ]


def test_a_collective_that_the_recording_ends_before_is_left_out() -> None:
    """As gathers of parameters are that the next step awaits."""
    events = [
        marked(OpMark(Action(Kind.F, 0, 0, 0, Phase.WARMUP), 4), 10, 20),
        marked(CollectiveMark(Collective.ALL_REDUCE, Axis.DP, 2, 64, 4, handle=1), 20, 30),
        marked(AwaitMark(Axis.DP, 4, 1), 40, 50),
        marked(CollectiveMark(Collective.ALL_GATHER, Axis.DP, 2, 64, 4, handle=2), 60, 61),
    ]
    run = recognise([make_trace(events)])
    assert list(run.comms["kind"]) == ["all_reduce"]
    left_out = "left out, as their end is not known: 1 collective of step 4 for which nothing in the trace waits"
    assert any(left_out in line for line in run.warnings)


def test_ops_and_transfers_that_a_rank_began_anew_count_once() -> None:
    """Both ranks run microbatch 0 forward, give it up and run it again."""
    out, back = Transfer(Action(Kind.SEND_F, 0, 0), 1, 8), Transfer(Action(Kind.RECV_F, 1, 0), 0, 8)
    traces = []
    for rank, transfer in enumerate((out, back)):
        forward = OpMark(Action(Kind.F, rank, 0, 0, Phase.WARMUP), 2)
        once = [marked(P2PMark((transfer,), Axis.PP, 2), 40, 50), marked(WaitMark(transfer, 2), 41, 50)]
        again = [marked(P2PMark((transfer,), Axis.PP, 2), 140, 170), marked(WaitMark(transfer, 2), 141, 170)]
        runs = [marked(forward, 10 + 50 * rank, 30 + 50 * rank), marked(forward, 110 + 70 * rank, 130 + 70 * rank)]
        backward = OpMark(Action(Kind.B, rank, 0, 0, Phase.COOLDOWN), 2)
        traces.append(make_trace([*runs, *once, *again, marked(backward, 300, 310)], rank=rank))
    run = recognise(traces)
    forwards = run.ops[run.ops["kind"] == "F"]
    assert forwards["start_ns"].tolist() == [110, 180]
    assert run.comms["start_ns"].tolist() == [140, 140]
    assert run.comms["match"].nunique() == 1
    assert run.comms["match"].min() >= 0
    assert run.warnings[0] == (
        "rank 0: 1 ops of step 2 (0.00 ms) ran again in the same step, as after an optimizer step that was rolled back; "
        "only the last runs count"
    )


def test_ops_and_messages_of_an_evaluation_are_no_part_of_the_step_before_it() -> None:
    out, back = Transfer(Action(Kind.SEND_F, 0, 0), 1, 8), Transfer(Action(Kind.RECV_F, 1, 0), 0, 8)
    traces = []
    for rank, transfer in enumerate((out, back)):
        forward = OpMark(Action(Kind.F, rank, 0, 0, Phase.WARMUP), 2)
        events = [marked(SpanMark(SpanKind.EVAL, 2), 400, 500), marked(SpanMark(SpanKind.EVAL, 2), 500, 600)]
        for start in (0, 400, 500):
            events += [marked(forward, start + 10 + 30 * rank, start + 20 + 30 * rank)]
            events += [marked(P2PMark((transfer,), Axis.PP, 2), start + 25, start + 35)]
            events += [marked(WaitMark(transfer, 2), start + 26, start + 35)]
            events += [marked(CollectiveMark(Collective.ALL_REDUCE, Axis.DP, 2, 8, 2), start + 80, start + 90)]
        events.append(marked(OpMark(Action(Kind.B, rank, 0, 0, Phase.COOLDOWN), 2), 300, 310))
        traces.append(make_trace(sorted(events, key=lambda event: event.start), rank=rank))
    run = recognise(traces)
    assert run.ops[run.ops["kind"] == "F"]["start_ns"].tolist() == [10, 40]
    assert run.ops[run.ops["kind"] == "EVAL"]["start_ns"].tolist() == [400, 500] * 2
    assert run.comms["start_ns"].tolist() == [25, 80] * 2
    assert not run.warnings


def test_a_trace_without_marks_gives_no_ops() -> None:
    named = ((Category.CPU_OP, "aten::mm"), (Category.ANNOTATION, "Forward 0"))
    run = recognise([make_trace([Event(category, name, 0, 9, thread=1) for category, name in named])])
    assert run.framework == "unlabelled"
    assert run.ops.empty
    assert run.comms.empty
    assert list(run.ops.columns) == list(OPS)
    assert run.schedule.source is PlanSource.NONE
    assert run.warnings == ()


def test_marks_of_another_version_are_counted_once_per_reason() -> None:
    traces = [renamed(trace, lambda name: name.replace("pp1:", "pp9:")) for trace in RECORDINGS["1f1b"].traces()]
    run = recognise(traces)
    assert run.ops.empty
    assert len(run.warnings) == 2
    assert run.warnings[1] == "and 3 more ranks like rank 0"
    ranges = len(RECORDINGS["1f1b"].events_of(0))
    assert run.warnings[0].startswith(f"rank 0: {ranges} ranges named like 'pp9:")
    assert run.warnings[0].endswith("are left out: grammar version 9; this pptrace reads version 1")


def test_a_schedule_asked_for_is_compared_with_what_ran() -> None:
    traces = RECORDINGS["1f1b"].traces()
    schedule = recognise(traces, schedule="gpipe").schedule
    assert (schedule.name, schedule.source) == ("gpipe", PlanSource.OPTION)
    assert schedule.plan == build("gpipe", 4, 6)
    assert schedule.mismatches == (
        "rank 0: op 5 is 0B0 where gpipe has 0F4",
        "rank 1: op 4 is 1B0 where gpipe has 1F3",
        "rank 2: op 3 is 2B0 where gpipe has 2F2",
        "rank 3: op 2 is 3B0 where gpipe has 3F1",
    )
    assert recognise(traces, schedule="1f1b").schedule.mismatches == ()


def test_a_schedule_that_does_not_fit_is_refused() -> None:
    traces = RECORDINGS["1f1b"].traces()
    with pytest.raises(UsageError, match="'2f2b' is not known"):
        recognise(traces, schedule="2f2b")
    with pytest.raises(ScheduleError, match="expected at least 2"):
        recognise(traces, schedule="interleaved-1f1b")
    with pytest.raises(ScheduleError, match="the trace shows no forward or backward of any microbatch"):
        recognise([make_trace([])], schedule="1f1b")


def test_missing_ops_and_ranks_are_told() -> None:
    recording = RECORDINGS["gpipe"]
    traces = recording.traces()
    gone = [event for event in recording.events_of(1) if not event.name.startswith("pp1:1B3")]
    traces[1] = make_trace(gone, 1, traces[1].metadata)
    assert recognise(traces).schedule.mismatches == ()  # nor does a trace that was cut off
    assert recognise(without(traces, 1)).schedule.mismatches == ()  # what is not there differs from nothing


def with_plan(plan: object) -> list[Trace]:
    return [structs.replace(t, metadata={**t.metadata, "plan": plan}) for t in RECORDINGS["gpipe"].traces()]


def test_a_damaged_plan_in_the_facts_is_said() -> None:
    damaged, *_ = with_plan({"name": "gpipe", "rows": [["0F0", "zero"]]})
    schedule = recognise([damaged, *RECORDINGS["gpipe"].traces()[1:]]).schedule
    assert schedule.plan is None
    line = "the plan in the metadata: the trace's metadata: row 1, cell 2: 'zero' is not an action"
    assert schedule.warnings[0].startswith(line)


@pytest.mark.parametrize(
    "plan", [{"rows": [1]}, {"rows": None}, {"rows": ["0F0"]}, [], {"name": "gpipe"}, {"rows": {}}]
)
def test_facts_without_rows_have_no_plan(plan: object) -> None:
    assert recognise(with_plan(plan)).schedule.source is PlanSource.RECOGNISED


@pytest.mark.parametrize("rows", [[[1]], [[None, "0F0"]], [[]], [], [["0F0", ["0B0"]]]])
def test_rows_that_are_no_plan_are_said(rows: object) -> None:
    schedule = recognise(with_plan({"rows": rows})).schedule
    assert schedule.plan is None
    assert schedule.warnings[0].startswith("the plan in the metadata: ")


leaves = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.floats(), st.sampled_from(["0F0", "1f1b", "x", ""]))
keys = st.sampled_from(["pp", "rows", "name", "dp", "start", "time_ns"])
facts = st.sampled_from(["mesh", "plan", "pp_ranks", "world_size", "host", "clock", "rank"])
junk = st.recursive(
    leaves, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3)), max_leaves=6
)


@settings(max_examples=60 if ALL else 30)
@given(st.dictionaries(facts, junk, max_size=7))
def test_damaged_facts_raise_nothing_but_errors_with_a_message(facts: dict[str, Any]) -> None:
    traces = RECORDINGS["one rank"].traces()
    damaged = [structs.replace(trace, metadata={**trace.metadata, **facts}) for trace in traces]
    try:
        run = recognise(damaged)
    except PptraceError:
        return
    assert len(run.ops) == len(recognised("one rank", True).ops)


def test_groups_of_an_axis_are_megatrons() -> None:
    """rank = tp + t·(cp + c·(dp + d·pp)) with t=2, c=1, d=2, p=2."""
    mesh = MeshInfo(8, pp=2, vpp=1, tp=2, cp=1, dp=2, ep=1, pipelines=((0, 4), (1, 5), (2, 6), (3, 7)))
    assert [mesh.group_of(5, axis) for axis in ("tp", "dp", "pp", "cp")] == [(4, 5), (5, 7), (1, 5), (5,)]
    assert mesh.group_of(5, "world") == tuple(range(8))
    assert mesh.group_of(5, "embd") == (1, 5)
    assert mesh.group_of(5, "ep") is None
    assert mesh.group_of(9, "pp") is None
    assert (mesh.pp_rank(6), mesh.pipeline_of(6), mesh.pp_rank(9), mesh.pipeline_of(9)) == (1, (2, 6), None, ())


def test_a_call_of_fewer_ranks_than_its_axis_has_is_one_of_neighbours() -> None:
    mesh = MeshInfo(8, 1, 1, 2, 4, 1, 1)
    assert mesh.group_of(5, "cp") == (1, 3, 5, 7)
    assert mesh.group_of(5, "cp", 2) == (5, 7)
    assert mesh.group_of(1, "cp", 2) == (1, 3)
    assert mesh.group_of(5, "cp", 4) == mesh.group_of(5, "cp", 3) == mesh.group_of(5, "cp")


def test_tied_embeddings_join_the_ends_of_a_pipeline_only() -> None:
    mesh = MeshInfo(4, pp=4, vpp=1, tp=1, cp=1, dp=1, ep=1, pipelines=((0, 1, 2, 3),))
    assert [mesh.group_of(rank, "embd") for rank in range(4)] == [(0, 3), None, None, (0, 3)]


def test_mirrored_ranks_are_as_far_from_the_two_ends_of_their_pipeline() -> None:
    mesh = MeshInfo(8, pp=4, vpp=2, tp=1, cp=1, dp=2, ep=1, pipelines=((0, 2, 4, 6), (1, 3, 5, 7)))
    assert [mesh.group_of(rank, "mirror") for rank in (0, 3, 5, 6)] == [(0, 6), (3, 5), (3, 5), (0, 6)]


def test_ranks_with_the_same_stages_are_replicas() -> None:
    mesh = mesh_from_stages({0: frozenset({0, 2}), 1: frozenset({1, 3}), 2: frozenset({0, 2}), 3: frozenset({1, 3})}, 4)
    assert mesh.pipelines == ((0, 1), (2, 3))
    assert (mesh.pp, mesh.vpp, mesh.dp, mesh.tp) == (2, 2, None, None)
    assert mesh_from_stages({}, 2).pipelines == ()


def test_a_step_that_leaves_the_plan_is_told_from_those_that_follow_it() -> None:
    traces = RECORDINGS["1f1b"].traces()
    traces[1] = renamed(traces[1], lambda name: name.replace("pp1:1B0", "pp1:1B9") if "step=1" in name else name)
    assert recognise(traces).schedule.mismatches == ("rank 1: op 4 is 1B9 where 1f1b has 1B0 (in step 1)",)
