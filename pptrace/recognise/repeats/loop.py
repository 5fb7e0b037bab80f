"""Steps of a rank whose steps nothing marks, from what tells them best: replays of graphs, optimizers, or repeated operators.

A step of a plain training loop ends where its last optimizer has updated the parameters. From one such end to the
next is the period of the loop, whatever comes first in it: data, a pause, zero_grad. Several forwards
and backwards before an update are one step, and so are several optimizers: those without a backward between them (one per model
chunk), and those that come again in turn (a generator and a discriminator). What runs between two steps without a backward, such
as an evaluation, belongs to the one before it.

A wrong step is worse than none: where the backwards between updates differ, there are none. Neither are there before the first
update and after the last one, as no one knows where these began and end.

CUDA graphs: what the host does in a capture is recorded into a graph and not run, so that it is no step; and steps of a host
that runs ahead of its device last as long as the device takes.

Launching a graph takes a host much less time than running it takes the device. Where nothing in the step waits for the device,
the range of a step tells how long launching took, and later ranges, which wait until a launch can be queued, how long others
took.
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
from msgspec.structs import replace

from pptrace.intervals import EMPTY, Int64, earliest_from, find_interval, reduce_ranges, union
from pptrace.model.device import DeviceWork, Rows
from pptrace.model.tables import COMPUTE_KINDS, as_category
from pptrace.model.traces import Bool, Category, Events
from pptrace.model.wording import counted
from pptrace.recognise.ops.infer_from_operators import engine_nodes
from pptrace.recognise.repeats.repeated_calls import RepeatedSteps, outermost_ranges, repeated_steps, rows_of_ranges
from pptrace.slices import rows_among

_UPDATE = re.compile(r"^Optimizer\.step#")
_UPDATE_KERNEL = re.compile(r"(?i)multi_tensor_apply|addcdiv|adam|lamb(?!da)|\blion_|adafactor|sgd_|optimi[sz]er")
_ZERO_GRAD = re.compile(r"^Optimizer\.zero_grad#")
_CLOSE = 0.01
"""Share of a step within which zero_grad follows the optimizer if it is a part of the same step."""
_ALIKE = 0.25
"""Share by which the numbers of autograd's nodes of all steps may differ from the usual one, where they are not the same."""
_MOST_BEFORE = 0.8
"""Share of the kernels before the first step, where no operators are known, that have names of kernels in it."""
_REASON = "the backwards between optimizer steps differ"
_ONCE = "the optimizer is called in one step only"


def steps_of_loop(events: Events, captures: Int64, work: DeviceWork, has_captured: bool) -> RepeatedSteps:
    """The steps of a rank; none of a loop that trains nothing.

    Operators that repeat are steps where each of them has one backward and no device runs their work: launches of kernels may be
    those of evaluation, or of the layers of one forward, and several backwards may be steps with an evaluation behind some.
    Of a device without operators, launches that repeat are steps where each has kernels of an optimizer.

    Args:
        captures: times in which CUDA graphs were captured.
        has_captured: a graph was captured in a step.
    """
    if len(work) or has_captured:
        repeats = repeated_steps(events, captures)
        if repeats.has_graphs or has_captured:
            return repeats
    of_optimizers = steps_of_optimizers(events, work)
    if len(of_optimizers) or of_optimizers.reason:
        return of_optimizers
    if len(work):
        has_operators = events.is_of(Category.CPU_OP).any()
        return RepeatedSteps() if has_operators else _with_updates(events, repeats)
    repeats = repeated_steps(events, captures)
    # A backward begins with the first of autograd's nodes that no other operator of the loop's thread is between.
    nodes = engine_nodes(events)
    others = events.start_ns[np.setdiff1d(outermost_ranges(events), nodes, assume_unique=True)]
    is_first = np.diff(np.searchsorted(others, events.start_ns[nodes]), prepend=-1) > 0
    backwards = events.start_ns[nodes[is_first]]
    in_step = np.searchsorted(backwards, repeats.end_ns) - np.searchsorted(backwards, repeats.start_ns)
    return repeats if len(repeats) and (in_step == 1).all() else RepeatedSteps()


def _with_updates(events: Events, steps: RepeatedSteps) -> RepeatedSteps:
    """The steps of a device, whose kernels alone are known, if each of them runs an optimizer's.

    Without any of an optimizer nothing is known to train. What repeats in one step, as an optimizer does for each parameter, is
    no loop of steps: what ran before these has mostly kernels that they have too, as warm-ups do.
    """
    updates = events.start_ns[events.rows_named(_UPDATE_KERNEL, Category.KERNEL)]
    if not len(updates):
        return RepeatedSteps()
    if not len(steps):
        return steps
    if (np.searchsorted(updates, steps.start_ns) == np.searchsorted(updates, steps.end_ns)).any():
        return RepeatedSteps(
            reason="what repeats runs no optimizer's kernels, and may be a microbatch or an evaluation"
        )
    kernels = np.flatnonzero(events.category == Category.KERNEL)
    first, stop = np.searchsorted(events.start_ns[kernels], [steps.start_ns[0], steps.end_ns[0]])
    names = events.name_id[kernels]
    if first and np.isin(names[:first], names[first:stop]).mean() < _MOST_BEFORE:
        return RepeatedSteps(reason="other launches come before what repeats, which may be a part of a longer step")
    return steps


def steps_of_optimizers(events: Events, work: DeviceWork) -> RepeatedSteps:
    """The steps of a rank by its optimizers, else by its calls of zero_grad: of a host with the times of its optimizers, of a
    device on its clock.
    """
    found = RepeatedSteps()
    updates, resets = (
        events.outermost(events.rows_named(pattern, Category.ANNOTATION)) for pattern in (_UPDATE, _ZERO_GRAD)
    )
    for marks, name in ((updates, "Optimizer.step"), (resets, "Optimizer.zero_grad")):
        if len(marks):
            found = _steps_of(events, marks, name)
        if len(found):
            break
    if not len(found) or len(work):
        return _on_device(found, work)
    step = find_interval(found.start_ns, found.end_ns, events.start_ns[updates])
    updates, step = updates[step >= 0], step[step >= 0]
    spans = rows_of_ranges("OPTIMIZER", step, events.start_ns[updates], events.ends_of(updates))
    return replace(found, spans=spans)


def _steps_of(events: Events, marks: Rows, name: str) -> RepeatedSteps:
    nodes, outermost = engine_nodes(events), outermost_ranges(events, int(events.thread[marks[0]]))
    marked = [events.rows_named(pattern, Category.ANNOTATION) for pattern in (_UPDATE, _ZERO_GRAD)]
    between = nodes if len(nodes) else np.setdiff1d(outermost, np.union1d(*marked), assume_unique=True)
    before = np.searchsorted(events.start_ns[between], events.ends_of(marks))
    marks = marks[np.append(np.diff(before) > 0, True)]
    num_nodes = np.searchsorted(events.start_ns[nodes], events.ends_of(marks))  # before each mark
    # Marks are the same where their names and those of the nodes of the backwards before them are.
    number_of_name = events.numbers_of_names()
    sums = np.append(0, np.cumsum(number_of_name[events.name_id[nodes]]))[np.append(0, num_nodes)]
    tokens = np.diff(sums) ^ number_of_name[events.name_id[marks]]
    length = _num_in_turn(tokens, np.diff(num_nodes, prepend=0))
    if length is None:
        return RepeatedSteps(reason=_REASON if len(marks) > 1 else _ONCE)
    last = np.arange(length - 1, len(marks), length)
    if len(last) < 2:
        return RepeatedSteps(reason=_ONCE)
    cuts = _with_zero_grad(events, events.ends_of(marks[last]))
    following = np.append(events.start_ns[nodes], np.iinfo(np.int64).max)[num_nodes[last]]
    cuts = _behind_evaluation(events, cuts, outermost, following)
    what = f"{counted(length, 'call')} of {name}"
    boundary = f"the end of one {name} to the end of the next"
    return RepeatedSteps(cuts[:-1], cuts[1:], what=what, boundary=boundary, of_optimizers=True)


def _num_in_turn(tokens: Int64, num_nodes: Int64) -> int | None:
    """Number of updates in a step: the period of the tokens; None where they have none, and differ too much to be alike.

    What comes before the first update may be a part of a step.
    """
    for start in (0, 1):
        known = tokens[start:]
        for length in range(1, len(known) // 2 + 1):
            if (known[length:] == known[:-length]).all():
                return length
    usual = np.median(num_nodes[1:]) if len(num_nodes) > 1 else 0
    is_similar = len(tokens) > 2 and bool((np.abs(num_nodes[1:] - usual) <= _ALIKE * usual).all())
    return 1 if is_similar else None


def _with_zero_grad(events: Events, ends: Int64) -> Int64:
    """The ends of updates, each behind the zero_grad that follows every one, mostly at once."""
    rows = events.outermost(events.rows_named(_ZERO_GRAD, Category.ANNOTATION))
    if not len(rows):
        return ends
    index = np.searchsorted(events.start_ns[rows], ends)
    found = rows[np.minimum(index, len(rows) - 1)]
    gap = events.start_ns[found] - ends
    is_each = (index < len(rows)).all() and (np.diff(found) > 0).all()
    follows = is_each and np.median(gap) <= _CLOSE * np.median(np.diff(ends))
    return events.ends_of(found) if follows else ends


def _behind_evaluation(events: Events, cuts: Int64, outermost: Int64, backwards: Int64) -> Int64:
    """The cuts, each behind what runs before the forward in some steps only: more than what all steps run before their first
    backward, which follows it.

    Args:
        outermost: rows of the thread's operators and ranges that are in no other one.
        backwards: the start of the first backward after each cut.
    """
    first, stop = (np.searchsorted(events.start_ns[outermost], times) for times in (cuts, backwards))
    counts = (stop - first)[:-1]  # after the last cut there may be no whole forward
    shortest = int(np.argmin(counts))
    usual = int(counts[shortest])
    names = events.name_id[outermost]
    forward = names[stop[shortest] - usual : stop[shortest]]
    moved = cuts.copy()
    for at in np.flatnonzero(counts > usual).tolist() if usual else ():
        if (names[stop[at] - usual : stop[at]] == forward).all():
            moved[at] = max(moved[at], int(events.ends_of(outermost[stop[at] - usual - 1 : stop[at] - usual])[0]))
    return moved


def _on_device(steps: RepeatedSteps, work: DeviceWork) -> RepeatedSteps:
    """The steps from the first work that each launched to the first work of the next; a host runs ahead of its device."""
    launched = work.launch_order
    if not len(launched) or not len(steps):
        return steps
    cuts = np.append(steps.start_ns, steps.end_ns[-1:])
    begins = earliest_from(work.start_ns[launched])
    begins[-1] = max(int(work.end_ns[launched].max()), int(cuts[-1]))
    bounds = begins[np.searchsorted(work.launch_ns[launched], cuts)]
    if (np.diff(bounds) <= 0).any():
        return RepeatedSteps(reason="the optimizer's steps launch nothing")
    boundary = "the first work of one to the first work of the next"
    return RepeatedSteps(bounds[:-1], bounds[1:], True, steps.what, boundary=boundary, of_optimizers=True)


_BEGINS = re.compile(r"StreamBeginCapture")
_ENDS = re.compile(r"StreamEndCapture")
_CAPTURES = re.compile(r"Stream(?:Begin|End)Capture|GraphInstantiate")
_AHEAD = 0.1
"""Share of a step by which its work ends after its range, at the median, before the host counts as ahead."""
_FAR_AHEAD = 0.5
"""The same where graphs are not most of the step: a device that lags behind by less still works in its host's ranges."""
_VARIES = 0.1
"""Share of a step by which the lag of the device varies (from the 10th to the 90th percentile), from which on it is ahead too:
the same steps have more or less of their work in their host's ranges.
"""
_MOST_BETWEEN = 0.5
"""Steps of which the next one begins later than this share of a step after the end are not taken as adjacent."""


def capture_times(events: Events) -> Int64:
    """Times in which a stream was captured or a captured graph was made ready, as a set of intervals.

    A capture lasts from its begin to the end that follows it, on whatever thread; one of which only one end was recorded begins
    or ends with the trace.
    """
    rows = events.rows_named(_CAPTURES, Category.RUNTIME)
    if not len(rows):
        return EMPTY
    starts, ends = events.start_ns[rows], events.ends_of(rows)
    begun, ended = (events.named(pattern, rows)[events.name_id[rows]] for pattern in (_BEGINS, _ENDS))
    opened, closed = starts[begun], ends[ended]
    last = max(int(events.start_ns[-1]), int(ends.max()))
    until = np.append(closed, last)[np.searchsorted(closed, opened, side="right")]
    if len(closed) and (not len(opened) or opened[0] > closed[0]):
        opened, until = np.append(opened, events.start_ns[0]), np.append(until, closed[0])
    return union(np.append(starts, opened), np.append(ends, until))


def outside_captures(events: Events, rows: Rows) -> Rows:
    """The events that do not begin in a capture."""
    captures, times = capture_times(events), events.start_ns[rows]
    return rows[find_interval(captures[:, 0], captures[:, 1], times, until=times) < 0]


def capturing_steps(ops: pd.DataFrame, captures: Int64) -> tuple[int, ...]:
    """Numbers of the steps in which a capture lies, wholly or in part.

    A step lasts as long as its own range, and without one from its first op or span to its last.
    """
    if not len(captures):
        return ()
    of_steps = ops[ops["step"] >= 0]
    ranges = of_steps[rows_among(of_steps["kind"], ("STEP",))]
    bounds = (ranges if len(ranges) else of_steps).groupby("step").agg(start=("start_ns", "min"), end=("end_ns", "max"))
    start, end = bounds["start"].to_numpy(), bounds["end"].to_numpy()
    holds = find_interval(captures[:, 0], captures[:, 1], end - 1, until=start + 1) >= 0
    return tuple(int(step) for step in bounds.index[holds])


def without_steps(table: pd.DataFrame, steps: tuple[int, ...]) -> pd.DataFrame:
    """The rows of all other steps."""
    return table[~table["step"].isin(steps)].reset_index(drop=True) if steps else table


def with_steps_on_device(ops: pd.DataFrame, work: DeviceWork) -> pd.DataFrame:
    """The ops with ranges of steps from the first work that each launched to the first work of the next.

    They stay as they are where ops tell the times of steps, where the host waits for the device in each step, and where a step
    launched nothing. Where graphs make up less than half of the device time, works of the busiest stream of compute alone tell:
    copies of the next step's data and communication, on streams of their own, need not wait for this one.
    Of a step alone, how long the device lagged at its start, with work from before it, and at its end tells.
    """
    rows = np.flatnonzero(rows_among(ops["kind"], ("STEP",)))
    if not len(rows) or not len(work) or rows_among(ops["kind"], COMPUTE_KINDS).any():
        return ops
    starts, ends = ops["start_ns"].to_numpy()[rows], ops["end_ns"].to_numpy()[rows]
    order = np.argsort(starts, kind="stable")
    rows, starts, ends = rows[order], starts[order], ends[order]
    launched = work.launch_order
    low, high = (np.searchsorted(work.launch_ns[launched], times) for times in (starts, ends))
    ahead = _AHEAD
    if (low < high).all() and not _mostly_graphs(work, launched, low, high):
        ahead = _FAR_AHEAD
        launched = launched[work.stream[launched] == _busiest_stream(work)]
        low, high = (np.searchsorted(work.launch_ns[launched], times) for times in (starts, ends))
    if (low == high).any():
        return ops
    begins = reduce_ranges(np.minimum, work.start_ns[launched], low, high)
    last = reduce_ranges(np.maximum, work.end_ns[launched], low, high)
    behind, usual = np.maximum(last - ends, 0), np.median(last - begins)
    if len(rows) == 1:
        done = work.done_ns(starts)
        behind = np.append(done - starts, behind)
        if (begins - done > _VARIES * usual).any():  # what the host did before its first work is in no step before it
            return ops
    is_steady = np.ptp(np.percentile(behind, (10, 90))) <= _VARIES * usual
    if (np.median(behind) <= ahead * usual and is_steady) or (np.diff(begins) <= 0).any():
        return ops
    is_next = starts[1:] - ends[:-1] <= _MOST_BETWEEN * usual
    until = np.where(np.append(is_next, False), np.append(begins[1:], 0), np.maximum(last, ends))
    new_starts, new_ends = (ops[name].to_numpy(copy=True) for name in ("start_ns", "end_ns"))
    clock = ops["clock"].astype(object).to_numpy(copy=True)
    new_starts[rows], new_ends[rows], clock[rows] = begins, until, "device"
    return ops.assign(start_ns=new_starts, end_ns=new_ends, clock=as_category(clock))


def _busiest_stream(work: DeviceWork) -> int:
    """The stream with the most time of compute, of work that computes nothing the one with the most time."""
    streams, index = np.unique(work.stream, return_inverse=True)
    counts = work.is_compute if work.is_compute.any() else np.ones(len(work), dtype=np.bool_)
    times = (work.end_ns - work.start_ns) * counts
    return int(streams[np.argmax(np.bincount(index.reshape(-1), weights=times))])


def _mostly_graphs(work: DeviceWork, launched: Int64, low: Int64, high: Int64) -> bool:
    """Return whether most of the device time launched in the steps is that of graphs: of calls that launched several works."""
    of_steps = np.zeros(len(launched) + 1, dtype=np.int64)
    np.add.at(of_steps, low, 1)
    np.add.at(of_steps, high, -1)
    chosen = launched[np.cumsum(of_steps)[:-1] > 0]
    _, call, count = np.unique(work.launch_ns[chosen], return_inverse=True, return_counts=True)
    is_graph: Bool = count[call.reshape(-1)] > 1
    took = work.end_ns[chosen] - work.start_ns[chosen]
    return bool(2 * took[is_graph].sum() > took.sum())
