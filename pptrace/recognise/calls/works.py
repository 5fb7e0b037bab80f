"""Works of process groups joined to the calls that posted them.

gloo and MPI run a collective on threads of the process group's own, which take what was posted in its order: the range there ends
when the communication is done, the call when it is posted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.model.tables import Int64
from pptrace.recognise.calls.call_columns import CODE_OF_KIND
from pptrace.slices import Slice, group_codes

_ALL_REDUCE, _REDUCE_SCATTER = CODE_OF_KIND["all_reduce"], CODE_OF_KIND["reduce_scatter"]


def with_works(calls: Slice) -> Slice:
    """The calls, each once: one that posts a work has the work's end, and the range of the work is no call of its own.

    Works begin in the order in which they were posted. A list's reduce-scatter may be done by several all-reduces: what may be a
    further one of them as well as the next call's lengthens both, so that neither seems to end before it is done.
    """
    works = np.flatnonzero(calls["on_worker"])
    if not len(works):
        return calls
    works = works[np.argsort(calls["start_ns"][works], kind="stable")]
    may_post = ~(calls["on_worker"] | calls["is_enqueued"] | (calls["kernel"] >= 0)) & (calls["end_ns"] < 0)
    posted = np.flatnonzero(may_post)[::-1]
    posted = posted[np.argsort(calls["start_ns"][posted], kind="stable")]
    owned = list(_owned(calls, works, posted))
    work, call, is_new, is_unsure = (np.concatenate(column) for column in zip(*owned, strict=True))
    end_ns, worker, num_bytes = (calls[name].copy() for name in ("end_ns", "worker", "num_bytes"))
    np.maximum.at(end_ns, call, calls["end_ns"][work])
    sure = is_new & ~is_unsure
    worker[call[sure]] = calls["thread"][work[sure]]
    gives = is_new & _tells_bytes(calls, work, call, is_unsure, works)
    num_bytes[call[gives]] = calls["num_bytes"][work[gives]]
    is_work = np.zeros(len(calls), dtype=np.bool_)
    is_work[work] = True
    return calls.with_columns({"end_ns": end_ns, "worker": worker, "num_bytes": num_bytes}).where(~is_work)


def _tells_bytes(
    calls: Slice, work: Int64, call: Int64, is_unsure: npt.NDArray[np.bool_], works: Int64
) -> npt.NDArray[np.bool_]:
    """Types that the work alone has, of a list of tensors; whose work it is, is unsure where groups have calls at once."""
    kind, elements, num_bytes = (calls[name] for name in ("kind", "elements", "num_bytes"))
    is_same = (kind[work] == kind[call]) & (elements[work] == elements[call]) & (elements[call] >= 0)
    size_code = group_codes([kind[works], elements[works]])
    sizes = pd.Series(num_bytes[works]).groupby(size_code).nunique()
    has_one_size = np.zeros(len(calls), dtype=np.bool_)
    has_one_size[works] = (sizes.reindex(size_code) == 1).to_numpy()
    tells: npt.NDArray[np.bool_] = (num_bytes[call] < 0) & is_same & (~is_unsure | has_one_size[work])
    return tells


_Owned = tuple[Int64, Int64, npt.NDArray[np.bool_], npt.NDArray[np.bool_]]
"""(work, call that it may be of, whether the work is the call's first, whether another's work may be taken for that one's)."""


def _owned(calls: Slice, works: Int64, posted: Int64) -> Iterator[_Owned]:
    """The calls of each work; both are given in order of their starts."""
    none = np.empty(0, dtype=np.int64)
    yield none, none, none.astype(np.bool_), none.astype(np.bool_)
    if calls["in_parts"][posted].any():
        yield one_by_one(calls, works, posted)
        return
    kind, elements = calls["kind"], calls["elements"]
    queue = np.where((kind == _REDUCE_SCATTER) & bool((kind[posted] == _REDUCE_SCATTER).any()), _ALL_REDUCE, kind)
    for each in np.unique(queue[works]).tolist():
        of_queue, of_calls = works[queue[works] == each], posted[queue[posted] == each]
        if not len(of_calls):
            continue
        sized = [elements[rows] >= 0 for rows in (of_queue, of_calls)]
        are_sized, has_several_kinds = (
            all(rows.all() for rows in sized),
            len(np.unique(kind[np.append(of_queue, of_calls)])) > 1,
        )
        if has_several_kinds or (not are_sized and all(rows.any() for rows in sized)):
            yield one_by_one(calls, of_queue, of_calls)
        else:
            yield in_turn(calls, of_queue, of_calls, elements if are_sized else np.zeros_like(elements))


def in_turn(calls: Slice, works: Int64, posted: Int64, queue: Int64) -> _Owned:
    """The calls of each work where each queue's works are of the calls posted to it, in their order.

    Args:
        queue: by call and work the number of its queue.
    """
    both = np.append(posted, works)
    is_work = np.arange(len(both)) >= len(posted)
    order = np.lexsort((is_work, calls["start_ns"][both], queue[both]))  # stable: equal ones as they are
    both, is_work = both[order], is_work[order]
    is_first = np.append(True, np.diff(queue[both]) != 0)
    number = np.cumsum(is_first) - 1
    waiting = _lengths(np.where(is_work, -1, 1), number)
    before = np.where(is_first, 0, np.append(0, waiting[:-1]))
    is_taking = is_work & (before > 0)
    taking, callers = np.flatnonzero(is_taking), np.flatnonzero(~is_work)
    taken_before: Int64 = np.cumsum(is_taking) - is_taking
    first_taken: Int64 = taken_before[np.flatnonzero(is_first)][number]
    first_posted: Int64 = (np.cumsum(~is_work) - ~is_work)[np.flatnonzero(is_first)][number]
    caller = callers[first_posted[taking] + taken_before[taking] - first_taken[taking]]
    is_unsure = (before[taking] > 1) | (taken_before[taking] > taken_before[caller])
    return both[taking], both[caller], np.ones(len(taking), dtype=np.bool_), is_unsure


def _lengths(changes: Int64, queue: Int64) -> Int64:
    """The lengths of queues after each change by one, which never fall below 0; the queues' changes one behind the other."""
    total = np.cumsum(changes)
    begins = np.flatnonzero(np.diff(queue, prepend=-1))
    total -= np.append(0, total)[begins][queue]
    offset = 2 * len(changes) + 2
    lowest = np.minimum.accumulate(np.minimum(total, 0) - queue * offset) + queue * offset
    lengths: Int64 = total - lowest
    return lengths


def one_by_one(calls: Slice, works: Int64, posted: Int64) -> _Owned:
    """The calls of each work where it may be all or part of several."""
    queue = _Queue(*(calls[name].tolist() for name in ("kind", "elements", "in_parts", "start_ns", "end_ns")))
    owned: list[tuple[int, int, bool, bool]] = []
    later = posted.tolist()[::-1]
    for work in works.tolist():
        while later and queue.start_ns[later[-1]] <= queue.start_ns[work]:
            queue.posted.append(later.pop())
        owned += queue.owners_of(work)
    columns = np.array(owned, dtype=np.int64).reshape(-1, 4).T
    return columns[0], columns[1], columns[2] > 0, columns[3] > 0


@dataclass(slots=True)
class _Queue:
    """Calls whose works have not begun, and those of which parts may still come; to be asked in order of the works' starts."""

    kind: list[int]
    elements: list[int]
    in_parts: list[bool]
    start_ns: list[int]
    end_ns: list[int]
    posted: list[int] = field(default_factory=list)
    _open: list[int] = field(default_factory=list)
    _unsure: set[int] = field(default_factory=set)

    def owners_of(self, work: int) -> list[tuple[int, int, bool, bool]]:
        """The calls that a work may be of: one, unless parts are under way."""
        able = [call for call in self.posted if self._does(work, call)]
        new = able[0] if able else -1
        if able:
            self._unsure.update(able if len(able) > 1 else ())  # those left behind may be the one that this work is of
            self.posted.remove(new)
            # The others were done.
            self._open = [call for call in self._open if self.end_ns[call] > self.start_ns[new]]
        owners = [call for call in self._open if self._does(work, call)]
        if able:
            if owners or self.in_parts[new]:
                self._open.append(new)
            owners.append(new)
        for call in owners:
            self.end_ns[call] = max(self.end_ns[call], self.end_ns[work])
        return [(work, call, call == new, call in self._unsure) for call in owners]

    def _does(self, work: int, call: int) -> bool:
        """Return whether a work may be all or part of a call: gloo all-reduces instead of scattering."""
        if self.kind[work] == self.kind[call]:
            return min(self.elements[work], self.elements[call]) < 0 or self.elements[work] == self.elements[call]
        return self.kind[work] == _ALL_REDUCE and self.kind[call] == _REDUCE_SCATTER
