"""Steps of a plain training loop from its optimizers: a step ends where its last optimizer has updated the parameters.

From one such end to the next is the period of the loop, whatever comes first in it: data, a pause, zero_grad. Several forwards
and backwards before an update are one step, and so are several optimizers: those without a backward between them (one per model
chunk), and those that come again in turn (a generator and a discriminator). What runs between two steps without a backward, such
as an evaluation, belongs to the one before it.

A wrong step is worse than none: where the backwards between updates differ, there are none. Neither are there before the first
update and after the last one, as no one knows where these began and end.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.intervals import Int64
from pptrace.model.device import DeviceWork
from pptrace.model.traces import Category, Events
from pptrace.model.wording import counted
from pptrace.recognise.device.idle import named
from pptrace.recognise.repeats.calls_to_device import outermost_ranges
from pptrace.recognise.repeats.repeated_calls import RepeatedSteps, rows_of_ranges

Bool = npt.NDArray[np.bool_]

_UPDATE = re.compile(r"^Optimizer\.step#")
_ZERO_GRAD = re.compile(r"^Optimizer\.zero_grad#")
_NODE = re.compile(r"^autograd::engine::evaluate_function")
_CLOSE = 0.01
"""Share of a step within which zero_grad follows the optimizer if it is a part of the same step."""
_ALIKE = 0.25
"""Share by which the numbers of autograd's nodes of all steps may differ from the usual one, where they are not the same."""
_REASON = "the backwards between optimizer steps differ"


def steps_of_optimizers(events: Events, work: DeviceWork) -> RepeatedSteps:
    """The steps of a rank by its optimizers, else by its calls of zero_grad: of a host with the times of its optimizers, of a
    device on its clock.
    """
    nodes = backward_nodes(events)
    found = RepeatedSteps()
    for pattern, name in ((_UPDATE, "Optimizer.step"), (_ZERO_GRAD, "Optimizer.zero_grad")):
        marks = _marks(events, pattern)
        if len(marks):
            found = _steps_of(events, marks, nodes, name)
        if len(found):
            return _on_device(found, work) if len(work) else replace(found, spans=_spans(events, found))
    return found


def _spans(events: Events, steps: RepeatedSteps) -> pd.DataFrame:
    marks = _marks(events, _UPDATE)
    step = np.searchsorted(steps.start_ns, events.start_ns[marks], side="right") - 1
    is_inside = (step >= 0) & (events.start_ns[marks] < steps.end_ns[step])
    marks, step = marks[is_inside], step[is_inside]
    return rows_of_ranges("OPTIMIZER", step, events.start_ns[marks], events.ends_of(marks))


def backward_nodes(events: Events) -> Int64:
    """Rows of the nodes of autograd's engine, on any thread."""
    return np.flatnonzero((events.category == Category.CPU_OP) & named(events, _NODE)[events.name_id])


def _marks(events: Events, pattern: re.Pattern[str]) -> Int64:
    """Outermost ranges of a name, of the thread that has most of them."""
    rows = np.flatnonzero((events.category == Category.ANNOTATION) & named(events, pattern)[events.name_id])
    of_threads = [of[~events.intervals_of(of).are_inside_another()] for of in events.rows_by_thread(rows).values()]
    return max(of_threads, key=len, default=rows)


def _steps_of(events: Events, marks: Int64, nodes: Int64, name: str) -> RepeatedSteps:
    outermost = outermost_ranges(events, int(events.thread[marks[0]]))
    between = nodes if len(nodes) else np.setdiff1d(outermost, _updates_and_zero_grads(events), assume_unique=True)
    before = np.searchsorted(events.start_ns[between], events.ends_of(marks))
    is_last = np.append(np.diff(before) > 0, True)
    marks, before = marks[is_last], before[is_last]
    first_nodes = np.searchsorted(events.start_ns[nodes], events.ends_of(marks))
    length = _num_in_turn(*_tokens(events, marks, nodes, first_nodes))
    if length is None:
        return RepeatedSteps(reason=_REASON)
    last = np.arange(length - 1, len(marks), length)
    if len(last) < 2:
        return RepeatedSteps(reason="the optimizer is called in one step only")
    marks, first_nodes = marks[last], first_nodes[last]
    cuts = _with_zero_grad(events, events.ends_of(marks))
    cuts = _behind_evaluation(events, cuts, outermost, _starts_of(events, nodes, first_nodes))
    what = f"{counted(length, 'call')} of {name}"
    return RepeatedSteps(cuts[:-1], cuts[1:], what=what, boundary=f"the end of one {name} to the end of the next")


def _updates_and_zero_grads(events: Events) -> Int64:
    either = named(events, _UPDATE) | named(events, _ZERO_GRAD)
    return np.flatnonzero((events.category == Category.ANNOTATION) & either[events.name_id])


def _tokens(events: Events, marks: Int64, nodes: Int64, first_nodes: Int64) -> tuple[Int64, Int64]:
    """For each update a number that is the same where its name and those of the nodes of the backwards before it are, and how
    many nodes these are.
    """
    number_of_name = np.random.default_rng(0).integers(np.iinfo(np.int64).max >> 1, size=len(events.names))
    sums = np.concatenate(([0], np.cumsum(number_of_name[events.name_id[nodes]])))  # they may overflow, alike
    bounds = np.concatenate(([0], first_nodes))
    return np.diff(sums[bounds]) ^ number_of_name[events.name_id[marks]], np.diff(bounds)


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
    is_alike = len(tokens) > 2 and bool((np.abs(num_nodes[1:] - usual) <= _ALIKE * usual).all())
    return 1 if is_alike else None


def _with_zero_grad(events: Events, ends: Int64) -> Int64:
    """The ends of updates, each behind the zero_grad that follows at once, if one follows every update."""
    rows = _marks(events, _ZERO_GRAD)
    if not len(rows):
        return ends
    index = np.searchsorted(events.start_ns[rows], ends)
    found = rows[np.minimum(index, len(rows) - 1)]
    gap = events.start_ns[found] - ends
    follows = (index < len(rows)) & (gap <= _CLOSE * np.median(np.diff(ends)))
    return events.ends_of(found) if follows.all() else ends


def _starts_of(events: Events, rows: Int64, index: Int64) -> Int64:
    """The starts of rows at these places, the largest number beyond the last one."""
    return np.append(events.start_ns[rows], np.iinfo(np.int64).max)[index]


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
    launched = np.flatnonzero(work.launch_ns >= 0)
    if not len(launched):
        return steps
    launched = launched[np.argsort(work.launch_ns[launched], kind="stable")]
    cuts = np.append(steps.start_ns, steps.end_ns[-1:])
    begins = np.minimum.accumulate(work.start_ns[launched][::-1])[::-1]
    behind = max(int(work.end_ns[launched].max()), int(cuts[-1]))
    bounds = np.append(begins, behind)[np.searchsorted(work.launch_ns[launched], cuts)]
    if (np.diff(bounds) <= 0).any():
        return RepeatedSteps(reason="the optimizer's steps launch nothing")
    return RepeatedSteps(
        bounds[:-1], bounds[1:], True, steps.what, boundary="the first work of one to the first work of the next"
    )
