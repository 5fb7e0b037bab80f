"""Communication calls without pptrace's marks: host calls, and the device work that each launched.

One communication shows in up to five events, which count once:

    host      c10d::allreduce_ ⊃ record_param_comms ⊃ nccl:all_reduce, or NVTX ncclAllReduce
    worker    gloo:all_reduce, on another thread, until it is done: see :func:`with_works`
    device    ncclDevKernel_AllReduce…, launched inside any of them: see :mod:`pptrace.recognise.calls.kernels`

The range ``nccl:coalesced`` names no peer and may never end: it is not read, its kernel is.

Ranges around calls name the axis that these serve, as those of layers that exchange tokens or heads:

    ep   FusedDispatch, FusedCombine, HybridEPDispatch, …        Megatron-LM ``fused_a2a.py``
         moe_dispatch forward, moe_combine backward, …           its overlapped schedule
         dispatch(F), combine(B), …                              DeepSeek's profiles
    cp   _SeqAllToAll, SeqAllToAll4D, …                          DeepSpeed-Ulysses ``sequence/layer.py``, USP ``all_to_all.py``

Autograd names a function's backward after its class, with ``Backward`` behind it. ``_AllToAll`` is left out: it is a layer of
experts in DeepSpeed, of sequences in others.

gloo and MPI run a collective on threads of the process group's own, which take what was posted in its order: the range there
ends when the communication is done, the call when it is posted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from msgspec import Struct, field

from pptrace.model.tables import CALLS, Bool, Int64, as_category, category_of_codes, empty_table, make_table
from pptrace.model.traces import Category, Events
from pptrace.recognise.calls.call_columns import CODE_OF_KIND, HINTS, CommArgs
from pptrace.recognise.calls.host_calls import host_calls
from pptrace.recognise.calls.kernels import with_kernels
from pptrace.recognise.device.work import ALGORITHMS, KINDS, algorithms
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


def _tells_bytes(calls: Slice, work: Int64, call: Int64, is_unsure: Bool, works: Int64) -> Bool:
    """Types that the work alone has, of a list of tensors; whose work it is, is unsure where groups have calls at once."""
    kind, elements, num_bytes = (calls[name] for name in ("kind", "elements", "num_bytes"))
    is_same = (kind[work] == kind[call]) & (elements[work] == elements[call]) & (elements[call] >= 0)
    size_code = group_codes([kind[works], elements[works]])
    sizes = pd.Series(num_bytes[works]).groupby(size_code).nunique()
    has_one_size = np.zeros(len(calls), dtype=np.bool_)
    has_one_size[works] = (sizes.reindex(size_code) == 1).to_numpy()
    tells: Bool = (num_bytes[call] < 0) & is_same & (~is_unsure | has_one_size[work])
    return tells


_Owned = tuple[Int64, Int64, Bool, Bool]
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


class _Queue(Struct):
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


_LAYERS = {
    "ep": re.compile(
        r"^(?:(?:Fused|HybridEP)(?:Dispatch|Combine)(?:Backward)?|moe_(?:dispatch|combine) (?:forward|backward)"
        r"|(?:dispatch|combine)\([FB]\))\Z"
    ),
    "cp": re.compile(r"^_?SeqAllToAll\w*\Z"),
    "dp": re.compile(
        r"^(?:FSDP::(?:all_gather|post_backward_reduce)(?: \(|\Z)|FullyShardedDataParallel\._(?:pre|post)_(?:for|back)ward)"
    ),
}
_ENGINE = re.compile(r"^autograd::engine::evaluate_function")
_COPY_BACK = re.compile(r"^torch\.distributed\.ddp\.reducer::copy_bucket_to_grad\Z")
_WAIT = re.compile(r"::wait_tensor\Z")
_NO_WORK = re.compile(r"::as_strided\Z")
"""Operators that compute nothing: DDP makes some views between its wait and the copies that follow."""


def find_calls(events: Events) -> pd.DataFrame:
    """The communication of a rank (schema :data:`CALLS`), in order of the host's calls."""
    args = CommArgs(events.comm_args)
    calls = with_kernels(events, host_calls(events, args), args)
    calls = with_works(calls.where(calls["kind"] > 0))
    if not len(calls):
        return empty_table(CALLS)
    return _table(calls.in_order_of("start_ns"), events, args)


def _table(calls: Slice, events: Events, args: CommArgs) -> pd.DataFrame:
    rows, kind = calls["args"], calls["kind"]
    is_send, is_recv, is_broadcast = (kind == CODE_OF_KIND[name] for name in ("send", "recv", "broadcast"))
    # Arguments without the name of the call have peers within the group.
    by_rank = np.where(args.kinds(rows) > 0, rows, -1)
    source = np.where(is_recv | is_broadcast, args.numbers("src", by_rank), -1)
    num_bytes = args.message_bytes(rows)
    shapes = np.where(args.texts("splits", rows) == "", calls["shapes"], rows)
    on_device = calls["kernel"] >= 0
    hint = np.array(HINTS, dtype=object)[calls["hint"]]
    for axis, pattern in _LAYERS.items():
        ranges = events.rows_named(pattern, Category.CPU_OP, Category.ANNOTATION)
        is_inside = events.are_within(ranges, calls["thread"], calls["start_ns"])
        hint[is_inside & (calls["hint"] == 0)] = axis
    stream = events.stream[calls["kernel"]] if len(events) else calls["kernel"]
    engine = events.rows_named(_ENGINE)
    in_engine = events.are_within(engine, calls["thread"], calls["start_ns"])
    backward = np.where((calls["thread"] < 0) | (len(engine) == 0), -1, in_engine)
    columns: dict[str, Any] = {
        "kind": category_of_codes(kind, KINDS),
        "group_id": args.texts("group_id", rows),
        "description": args.texts("group_description", rows),
        "group_ranks": args.texts("group_ranks", rows),
        "group_size": args.numbers("group_size", rows),
        "peer": np.where(is_send, args.numbers("dst", by_rank), source),
        "local_peer": calls["local_peer"],
        "bytes": np.where(num_bytes >= 0, num_bytes, calls["num_bytes"]),
        "seq": args.numbers("seq", rows),
        "host_ns": calls["start_ns"],
        "backward": backward,
        "hint": as_category(hint),
        "functional": calls["is_functional"].astype(np.int64),
        "worker": calls["worker"],
        "splits": args.texts("splits", shapes),
        "algorithm": category_of_codes(algorithms(events, calls["kernel"]), ALGORITHMS),
        "stream": np.where(on_device, stream, -1),
        "clock": category_of_codes(on_device.astype(np.int64), ("host", "device")),
    }
    host = _host_times(calls, events, may_be_bucket=(columns["backward"] == 1) & (kind == CODE_OF_KIND["all_reduce"]))
    device = dict.fromkeys(("start_ns", "posted_ns", "asked_ns"), calls["kernel_start_ns"])
    device["end_ns"] = calls["kernel_end_ns"]
    times = {name: np.where(on_device, device[name], column) for name, column in host.items()}
    return make_table(CALLS, columns | times)


def _host_times(calls: Slice, events: Events, may_be_bucket: Bool) -> dict[str, Int64]:
    """The times of calls that no kernel shows; one whose end nothing shows ends where it was posted.

    The range of a work ends only when its thread, which has woken up the one that waits, gets a core again: a bucket of DDP's is
    there when DDP copies the last one back.
    """
    start, until, end = (calls[name] for name in ("start_ns", "until_ns", "end_ns"))
    is_unknown = end < 0
    is_ahead = ~is_unknown & (end > until)
    posted = np.where(is_unknown | is_ahead, until, start)
    wait_start = posted.copy()
    first, last = (np.maximum(copy, until) for copy in _copies_of_buckets(events, calls["thread"], start))
    latest = np.where(may_be_bucket & is_ahead, last, end)
    end, asks = np.minimum(end, latest), np.where(may_be_bucket, np.minimum(end, first), end)
    waits = np.flatnonzero(is_ahead & (calls["kernel"] < 0))
    wait_start[waits] = _busy_until(events, calls["thread"][waits], until[waits], asks[waits])
    ends = np.where(is_unknown, until, np.where(is_ahead, end, np.maximum(start, end)))
    return {"start_ns": start, "posted_ns": posted, "asked_ns": wait_start, "end_ns": ends}


def _busy_until(events: Events, threads: Int64, starts_ns: Int64, ends_ns: Int64) -> Int64:
    """Ends of what threads ran in stretches of time: the end of the last one that each began in [start_ns, end_ns), at
    most end_ns; start_ns without any. What waits for a tensor, as an operator on one that is still under way, runs until then.
    """
    until = starts_ns.copy()
    computes = (events.category == Category.CPU_OP) & np.isin(events.thread, np.unique(threads))
    rows = np.flatnonzero(computes & ~events.named(_NO_WORK)[events.name_id]) if len(threads) else threads
    is_wait = events.named(_WAIT)[events.name_id]
    for thread, of_thread in events.rows_by_thread(rows).items():
        on_thread, ran, waits = (
            np.flatnonzero(threads == thread),
            of_thread[~is_wait[of_thread]],
            of_thread[is_wait[of_thread]],
        )
        starts, waited = events.start_ns[ran], np.append(events.start_ns[waits], np.iinfo(np.int64).max)
        latest = np.maximum.accumulate(np.minimum(events.ends_of(ran), waited[np.searchsorted(waited, starts)]))
        start, end = starts_ns[on_thread], ends_ns[on_thread]
        low, high = np.searchsorted(starts, start), np.searchsorted(starts, end)
        until[on_thread] = np.where(low < high, np.clip(np.append(latest, 0)[high - 1], start, end), start)
    return until


def _copies_of_buckets(events: Events, threads: Int64, starts_ns: Int64) -> tuple[Int64, Int64]:
    """Starts of the first and of the last copy out of DDP's buckets after each call, before the next call that follows the
    first one; the latest time of all where there is none.

    DDP waits for its buckets one after the other, and copies each one back when it is there.
    """
    never = np.iinfo(np.int64).max
    first, last = np.full(len(threads), never), np.full(len(threads), never)
    for thread, of_thread in events.rows_by_thread(events.rows_named(_COPY_BACK)).items():
        on_thread = np.flatnonzero(threads == thread)
        copies, calls = events.start_ns[of_thread], np.sort(np.append(starts_ns[on_thread], never))
        starts = np.append(copies, never)
        first[on_thread] = starts[np.searchsorted(copies, starts_ns[on_thread])]
        next_call = calls[np.minimum(np.searchsorted(calls, first[on_thread]), len(calls) - 1)]
        last[on_thread] = np.maximum(first[on_thread], starts[np.searchsorted(starts, next_call) - 1])
    return first, last
