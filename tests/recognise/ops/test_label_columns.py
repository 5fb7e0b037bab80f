"""Labelled ranges by columns, against loops over one range after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from pptrace.model.device import DeviceWork
from pptrace.model.traces import Category
from pptrace.recognise.labels import read_label
from pptrace.recognise.ops.host_compute import computing_spans
from pptrace.recognise.ops.label_actions import steps_of_ranges, with_microbatches
from pptrace.recognise.ops.label_columns import LabelledPhases, Range, Ranges, outermost
from pptrace.recognise.ops.label_steps import LaunchIndex, counted_steps
from pptrace.schedule.actions import Kind, Phase
from tests.support.synthetic import START, Event, make_trace

MEGATRON = "megatron.core.pipeline_parallel"
NAMES = (
    *("PP:0F0", "PP:0F1", "PP:0B0", "PP:0B1", "PP:0SEND_F0", "PP:0RECV_B0", "F0.0.0", "B0.0.0", "SEND_FORWARD.0.0.0"),
    *("forward_step", "backward_step", f"{MEGATRON}.p2p_communication.send_forward_recv_backward", "1F1B"),
    *("Optimizer.step#AdamW.step", f"{MEGATRON}.schedules.forward_backward_pipelining_with_interleaving.warmup"),
    *("all-grads-sync", "weight chunk", "W_clear.0.0", "forward chunk 0 (phase0) backward chunk 1 (phase1)"),
)
moments = st.integers(0, 60)
stretches = st.lists(st.tuples(moments, st.integers(1, 30)), max_size=20)


def ranges(names: Sequence[str]) -> list[Range]:
    labels = [read_label(name) for name in names]
    return [Range(label, 10 * at, 10 * at + 9, 1) for at, label in enumerate(labels) if label is not None]


def steps_one_by_one(listed: Sequence[Range]) -> list[int]:
    """The step of each range: a new one where an op comes again, at a warmup, or after an optimizer without microbatches."""
    done: dict[object, int] = {}
    count, num_ops, optimized, steps = 0, 0, False, []
    for entry in listed:
        actions = entry.label.actions
        num_ops += bool(actions) and actions[0].kind.is_compute
        keys = [(action.kind, action.stage, action.chunk, action.microbatch) for action in actions]
        again = any(key[-1] is not None and done.get(key, num_ops) < num_ops for key in keys)
        warms_up = entry.label.phase is Phase.WARMUP and bool(done)
        if again or warms_up or (optimized and any(action.microbatch is None for action in actions)):
            count, done, optimized = count + 1, {}, False
        optimized = entry.label.span == "OPTIMIZER" or (optimized and not actions)
        done |= dict.fromkeys(keys, num_ops)
        steps.append(count)
    return steps


@given(st.lists(st.sampled_from(NAMES), max_size=25))
def test_steps_are_counted_as_by_going_through_the_ranges(names: list[str]) -> None:
    listed = ranges(names)
    assert counted_steps(Ranges.of(listed)).tolist() == steps_one_by_one(listed)


@given(st.lists(st.tuples(moments, st.integers(0, 30), st.sampled_from(NAMES[:4]), st.integers(1, 2)), max_size=15))
def test_a_range_is_outermost_if_the_last_such_one_of_its_kind_and_thread_has_ended(
    rows: list[tuple[int, int, str, int]],
) -> None:
    listed = [
        Range(label, start, start + length, thread)
        for start, length, name, thread in rows
        if (label := read_label(name)) is not None
    ]
    kept: list[Range] = []
    ends: dict[tuple[Kind | None, int], int] = {}
    for entry in sorted(listed, key=lambda entry: (entry.start_ns, -entry.end_ns)):
        if entry.start_ns >= ends.get((entry.kind, entry.thread), -1):
            kept.append(entry)
            ends[entry.kind, entry.thread] = entry.end_ns
    assert outermost(Ranges.of(listed)).objects() == kept


def test_a_stretch_is_of_the_phase_in_which_its_middle_lies() -> None:
    """Of a warmup from 10 to 19 ns, behind an op."""
    phases = LabelledPhases(Ranges.of(ranges(["PP:0F0", NAMES[-5]])))
    start, end = np.array([[5, 15, 9], [17, 25, 10]])
    assert phases.of(start, end).tolist() == [Phase.WARMUP.code, -1, -1]


def weights_one_by_one(names: Sequence[str]) -> list[int]:
    """The microbatches of the weight gradients of a step whose forwards and backwards are numbered in order."""
    last_forward = max((at for at, name in enumerate(names) if name == "F"), default=-1)
    num_backwards = names.count("B")
    num_trailing = sum(name == "weight chunk" and at > last_forward for at, name in enumerate(names))
    trailing = list(range(num_backwards))[num_backwards - num_trailing :] if num_trailing else []
    named = {int(name[1]) for name in names if name.endswith(".0.0") and name[1].isdigit()}
    weights, seen = [], 0
    for at, name in enumerate(names):
        if name == "B":
            seen += 1
        elif name == "W_clear.0.0":
            due = [backward for backward in range(seen) if backward not in named]
            named |= set(due)
            weights += due
        elif name == "weight chunk":
            if at > last_forward and trailing:
                weights.append(trailing.pop(0))
            elif seen:
                weights.append(seen - 1)
        elif name.startswith("W"):
            weights.append(int(name[1]))
    return weights


@given(
    st.lists(st.sampled_from(["F", "B", "weight chunk", "W_clear.0.0"]), max_size=20),
    st.lists(
        st.tuples(st.integers(0, 20), st.sampled_from(["W0.0.0", "W1.0.0", "W4.0.0"])), unique_by=lambda row: row[1]
    ),
)
@example(["B"] * 3 + ["weight chunk"] * 4, [])
def test_weight_gradients_without_microbatch_are_those_of_backwards(
    names: list[str], more: list[tuple[int, str]]
) -> None:
    for at, name in more:
        names.insert(at, name)
    labelled = with_microbatches(steps_of_ranges(Ranges.of(ranges(names))))
    rows = labelled.in_time_order()
    weights = rows.where(rows["kind"] == Kind.W.code)
    assert weights["microbatch"].tolist() == weights_one_by_one(names)
    split = {
        half
        for half, kind in zip(rows["microbatch"].tolist(), rows["kind"].tolist(), strict=True)
        if kind == Kind.I.code
    }
    assert split == set(weights["microbatch"].tolist()) & set(range(names.count("B")))


@given(stretches, stretches, st.lists(st.booleans(), min_size=20, max_size=20), st.booleans())
def test_work_launched_in_ranges_is_that_of_each_range(
    launches: list[tuple[int, int]], asked: list[tuple[int, int]], which: list[bool], communication: bool
) -> None:
    count = len(launches)
    launch, length = np.array(launches, dtype=np.int64).reshape(-1, 2).T
    is_communication = np.array(which[:count], dtype=np.bool_)
    start = launch + length
    end, launch_ns = start + length[::-1], launch - (launch % 7 == 0) * 99
    work = DeviceWork(start, end, np.arange(count), launch_ns, ~is_communication, is_communication)
    begin, extent = np.array(asked, dtype=np.int64).reshape(-1, 2).T
    result = LaunchIndex(work).spans(begin, begin + extent, communication)
    for at, (first, last) in enumerate(zip(begin.tolist(), (begin + extent).tolist(), strict=True)):
        launched = np.flatnonzero((work.launch_ns >= max(first, 0)) & (work.launch_ns < last)).tolist()
        chosen = [row for row in launched if is_communication[row] == communication]
        assert bool(result.launched[at]) == bool(chosen)
        if chosen:
            of_first = min(chosen, key=lambda row: (work.launch_ns[row], row))
            expected = (work.start_ns[chosen].min(), work.end_ns[chosen].max(), work.stream[of_first])
            assert (result.start_ns[at], result.end_ns[at], result.stream[at]) == expected


@given(st.lists(st.tuples(moments, st.integers(1, 30), st.integers(1, 2)), max_size=20), stretches)
def test_operators_in_ranges_are_those_of_each_range(
    operators: list[tuple[int, int, int]], asked: list[tuple[int, int]]
) -> None:
    events = [
        Event(Category.CPU_OP, "aten::mm", START + start, START + start + length, thread=thread)
        for start, length, thread in operators
    ]
    begin, extent = np.array(asked, dtype=np.int64).reshape(-1, 2).T
    threads = np.array([1 + at % 3 for at in range(len(asked))], dtype=np.int64)
    ran, first, last = computing_spans(make_trace(events).events, threads, START + begin, START + begin + extent)
    for at, thread in enumerate(threads.tolist()):
        low, high = int(begin[at]), int(begin[at] + extent[at])
        inside = [(start, start + length) for start, length, own in operators if own == thread and low <= start < high]
        assert bool(ran[at]) == bool(inside)
        starts, ends = zip(*inside, strict=True) if inside else ([low], [high])
        expected = (min(starts), min(max(ends), high))
        assert (first[at] - START, last[at] - START) == expected
