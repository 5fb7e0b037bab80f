"""Calls of a runtime that hooks watched: marks joined with what the trace shows of the same calls."""

from __future__ import annotations

from typing import Any

import pytest

from pptrace.marks import AwaitMark, Axis, CallMark, Collective, CollectiveMark, ExchangeMark, Link, SpanKind, SpanMark
from pptrace.model.mesh import MeshInfo
from pptrace.model.traces import Category, Trace
from pptrace.recognise.calls.marked_calls import describe_group
from pptrace.recognise.groups.mesh import mesh_with_declared_pipelines
from pptrace.recognise.groups.topology import Group, axis_of_description, sizes_of
from pptrace.recognise.rank import recognise_rank
from tests.support.analysed import recognise
from tests.support.synthetic import MAIN_THREAD, START, Event, make_trace, marked

FACTS: dict[str, Any] = {"world_size": 2, "backend": "gloo", "groups": {"0": {"ranks": [0, 1], "axis": "dp"}}}
SEVERAL = {"0": {"ranks": [0, 1], "axis": ""}, "1": {"ranks": [0, 1], "axis": ""}}
WORKER = MAIN_THREAD + 1


def operator(name: str, start: int, end: int, thread: int = MAIN_THREAD) -> Event:
    return Event(Category.CPU_OP, name, START + start, START + end, thread=thread)


def watched_trace(
    rank: int, facts: dict[str, Any] = FACTS, worker: int = WORKER, name: str = "c10d::allreduce_"
) -> Trace:
    """A posted all-reduce and its wait under a mark, one that C++ posted in the backward, and one under no mark."""
    posted = CallMark("all_reduce", "0", 4, 4096, 3, None, 7)
    events = [
        marked(SpanMark(SpanKind.STEP, 3), START, START + 1000),
        marked(posted, START + 100, START + 120),
        operator("c10d::allreduce_", 105, 115),
        Event(Category.ANNOTATION, "gloo:all_reduce", START + 110, START + 180, thread=WORKER),
        marked(AwaitMark(Axis.UNKNOWN, 3, 7), START + 150, START + 190),
        operator("autograd::engine::evaluate_function: AddBackward0", 300, 340),
        operator(name, 310, 320),
        Event(Category.ANNOTATION, "gloo:all_reduce", START + 315, START + 380, thread=worker),
        marked(SpanMark(SpanKind.STEP, 4), START + 1000, START + 1100),
    ]
    return make_trace(events, rank, {"rank": rank, **facts})


def test_a_mark_and_what_it_covers_are_one_call_with_the_facts_of_both() -> None:
    calls = recognise_rank(watched_trace(0)).calls
    assert calls["kind"].tolist() == ["all_reduce", "all_reduce"]
    by_mark, by_engine = calls.to_dict("records")
    assert (by_mark["bytes"], by_mark["group_id"], by_mark["group_size"], by_mark["seq"]) == (4096, "0", 2, 4)
    times = [by_mark[name] - START for name in ("start_ns", "posted_ns", "asked_ns", "end_ns")]
    assert times == [100, 120, 150, 180]  # the backend was done before the wait ended
    assert (by_engine["group_id"], by_engine["backward"], by_engine["bytes"]) == ("0", 1, -1)


def test_a_work_that_begins_late_is_no_further_call_where_nothing_shows_who_posted_it() -> None:
    """Without operators, as light recordings are, of the runtime's marks and of those of hooks."""
    for posted in (
        CallMark("all_reduce", "0", 4, 4096, 3, None, 7),
        CollectiveMark(Collective.ALL_REDUCE, Axis.DP, 2, 4096, 3, 7),
    ):
        events = [
            marked(SpanMark(SpanKind.STEP, 3), START, START + 1000),
            marked(posted, START + 100, START + 120),
            Event(Category.ANNOTATION, "gloo:all_reduce", START + 125, START + 180, thread=WORKER),
            marked(AwaitMark(Axis.DP, 3, 7), START + 150, START + 190),
            Event(Category.ANNOTATION, "gloo:all_reduce", START + 315, START + 380, thread=WORKER),
        ]
        comms = recognise([make_trace(events, rank, {"rank": rank, **FACTS}) for rank in range(2)]).comms
        assert sorted(comms["start_ns"] - START) == [100, 100, 315, 315], (
            "the second is posted by nothing that has a mark"
        )
        assert sorted(comms["end_ns"] - START) == [190, 190, 380, 380]


def test_works_of_which_each_begins_within_the_next_range_are_no_further_calls() -> None:
    """Of the last one nothing in the trace waits, as for gathers of parameters."""
    last = CollectiveMark(Collective.ALL_GATHER, Axis.DP, 2, 4096, 3, 9)
    events = [
        marked(SpanMark(SpanKind.STEP, 3), START, START + 1000),
        marked(CollectiveMark(Collective.ALL_GATHER, Axis.TP, 2, 4096, 3, 7), START + 100, START + 120),
        marked(CollectiveMark(Collective.REDUCE_SCATTER, Axis.TP, 2, 4096, 3, 8), START + 130, START + 150),
        Event(Category.ANNOTATION, "gloo:all_gather", START + 140, START + 170, thread=WORKER),
        marked(AwaitMark(Axis.TP, 3, 7), START + 160, START + 175),
        marked(AwaitMark(Axis.TP, 3, 8), START + 180, START + 230),
        Event(Category.ANNOTATION, "gloo:all_reduce", START + 190, START + 220, thread=WORKER + 1),
        marked(last, START + 300, START + 320),
        Event(Category.ANNOTATION, "gloo:all_gather", START + 325, START + 380, thread=WORKER),
        Event(Category.ANNOTATION, "gloo:all_gather", START + 415, START + 480, thread=WORKER),
    ]
    calls = recognise_rank(make_trace(events, 0, {"rank": 0, **FACTS})).calls
    assert (calls["start_ns"] - START).tolist() == [415], "all others have marks of the runtime"


def test_a_work_of_a_ring_that_begins_late_is_no_further_call() -> None:
    posted = ExchangeMark((Link(True, 1, 32), Link(False, 1, 32)), Axis.CP, 3, 7)
    events = [
        marked(posted, START + 100, START + 120),
        Event(Category.ANNOTATION, "gloo:all_to_all", START + 125, START + 180, thread=WORKER),
        marked(AwaitMark(Axis.CP, 3, 7), START + 150, START + 190),
    ]
    comms = recognise([make_trace(events, rank, {"rank": rank, **FACTS}) for rank in range(2)]).comms
    assert (comms["kind"].tolist(), set(comms["axis"])) == (["send", "recv"] * 2, {"cp"})


def test_calls_of_an_evaluation_belong_to_no_step() -> None:
    events = [
        marked(SpanMark(SpanKind.STEP, 3), START, START + 1000),
        marked(CollectiveMark(Collective.ALL_REDUCE, Axis.TP, 2, 64, 3), START + 100, START + 150),
        Event(Category.ANNOTATION, "gloo:all_reduce", START + 105, START + 150, thread=WORKER),
        marked(SpanMark(SpanKind.EVAL, 3), START + 500, START + 900),
        marked(CollectiveMark(Collective.ALL_REDUCE, Axis.TP, 2, 64, 3), START + 600, START + 650),
        Event(Category.ANNOTATION, "gloo:all_reduce", START + 605, START + 650, thread=WORKER),
    ]
    comms = recognise([make_trace(events, rank, {"rank": rank, **FACTS}) for rank in range(2)]).comms
    assert (comms["start_ns"] - START).tolist() == [100, 100]
    assert set(comms["axis"]) == {"tp"}


def test_a_call_that_raised_is_no_communication() -> None:
    raised = ["all_reduce", "0", 4, -1]
    calls = recognise_rank(watched_trace(0, {**FACTS, "failed_calls": [raised]})).calls
    assert calls["bytes"].tolist() == [-1]  # what is left is that of the engine
    others = [["all_reduce", "0", 5, -1], ["all_reduce", "0", 4, 1], "all_reduce"]
    assert len(recognise_rank(watched_trace(0, {**FACTS, "failed_calls": others})).calls) == 2


def test_groups_that_hooks_learnt_tell_axes_also_where_the_profiler_wrote_nothing_of_the_job() -> None:
    run = recognise([watched_trace(rank) for rank in range(2)])
    assert run.comms["axis"].tolist() == ["dp"] * 4
    assert set(run.comms["step"]) == {3}
    assert (run.comms["match"] >= 0).all()
    assert (run.mesh.num_ranks, run.mesh.dp) == (2, 2)


@pytest.mark.parametrize(
    ("description", "axis", "dimensions", "named"),
    [
        ("default_pg", "", ["dp_shard", "loss_mesh"], "mesh_dp_shard"),
        ("default_pg", "dp", ["wires", "world"], "mesh_dp"),
        ("default_pg", "dp", ["wires", "dp_shard", "tp"], "mesh_dp_shard"),
        ("default_pg", "dp", ["dp_shard_cp"], "mesh_dp_shard_cp"),
        ("default_pg", "", ["dp", "dp_shard_cp"], "mesh_dp"),
        ("default_pg", "", ["dp", "tp"], "mesh_tp"),
        ("default_pg", "", ["wires", "world"], "mesh_world"),
        ("mesh_dp_replicate", "dp", None, "mesh_dp_replicate"),
        ("default_pg", "dp", None, "mesh_dp"),
        ("default_pg", "", None, "default_pg"),
    ],
)
def test_of_several_names_of_a_group_the_one_of_an_axis_counts(
    description: str, axis: str, dimensions: list[str] | None, named: str
) -> None:
    facts = {"ranks": [0, 1], "axis": axis, "description": description, "dimensions": dimensions}
    assert describe_group(facts) == {"ranks": [0, 1], "pg_desc": named}


def test_calls_without_a_group_are_of_none_where_several_may_be_meant() -> None:
    calls = recognise_rank(watched_trace(0, {**FACTS, "groups": SEVERAL}, worker=WORKER + 1)).calls
    assert calls["group_id"].tolist() == ["0", ""]


def test_a_worker_thread_is_of_one_group() -> None:
    calls = recognise_rank(watched_trace(0, {**FACTS, "groups": SEVERAL})).calls
    assert calls["group_id"].tolist() == ["0", "0"]


def test_what_autograd_calls_without_a_functional_operator_is_of_the_group_whose_gradients_are_reduced() -> None:
    groups = {**SEVERAL, "1": {"ranks": [0, 1], "axis": "", "description": "mesh_dp", "reducer": True}}
    for operator_name, group in (("c10d::allreduce_", "1"), ("_c10d_functional::all_reduce", "")):
        trace = watched_trace(0, {**FACTS, "groups": groups}, worker=WORKER + 1, name=operator_name)
        assert recognise_rank(trace).calls["group_id"].tolist() == ["0", group]


def test_sums_of_cpp_in_light_recordings_are_buckets_where_all_other_groups_are_pipelines() -> None:
    reducing = {"ranks": [0, 1], "axis": "", "description": "mesh_dp", "reducer": True}
    for other, axis in (("mesh_pp", "dp"), ("mesh_tp", "unknown")):
        groups = {"1": {"ranks": [0, 2], "axis": "", "description": other}, "2": reducing}
        facts = {**FACTS, "world_size": 4, "groups": groups}
        events = [
            marked(SpanMark(SpanKind.STEP, 3), START, START + 1000),
            Event(Category.ANNOTATION, "gloo:all_reduce", START + 315, START + 380, thread=WORKER),
        ]
        assert recognise([make_trace(events, 0, {"rank": 0, **facts})]).comms["axis"].tolist() == [axis]


def test_the_end_of_a_script_is_no_step() -> None:
    steps = recognise_rank(watched_trace(0, {**FACTS, "teardown": 4})).ops
    assert steps.loc[steps["kind"] == "STEP", "step"].tolist() == [3]


def test_pipelines_that_a_runtime_named_hold_also_where_ranks_have_no_trace() -> None:
    mesh = MeshInfo(4, 1, 2, 1, 1, 1, 1, pipelines=((1,),), in_order=True)
    known = mesh_with_declared_pipelines(mesh, [{"pp_ranks": [0, 1, 2, 3]}])
    assert (known.pp, known.pipelines, known.in_order) == (4, ((0, 1, 2, 3),), False)
    assert mesh_with_declared_pipelines(mesh, [{}]) == mesh


def test_axes_named_in_words_are_read() -> None:
    named = {"tensor_parallel": "tp", "pipeline_parallel": "pp", "mesh_replica": "dp", "mesh_shard": "dp", "mine": ""}
    assert {name: axis_of_description(name) for name in named} == named


def test_an_axis_that_no_group_describes_is_not_taken_for_one_where_ranks_are_left_over() -> None:
    replica, shard = Group("1", "mesh_replica", (0, 2), 2), Group("2", "mesh_shard", (0, 1), 2)
    assert sizes_of({replica: "dp", shard: "dp"}, (), 4) == {"dp": 4, "tp": 1, "cp": 1, "pp": 1}
    assert sizes_of({Group("1", "mesh_dp", (0,), 1): "dp"}, (), 2) == {"dp": 1}
