"""Communication calls without pptrace's marks: host calls, and the device work that each launched.

One communication shows in up to five events, which count once:

    host      c10d::allreduce_ ⊃ record_param_comms ⊃ nccl:all_reduce, or NVTX ncclAllReduce
    worker    gloo:all_reduce, on another thread, until it is done: see :mod:`pptrace.recognise.calls.works`
    device    ncclDevKernel_AllReduce…, launched inside any of them: see :mod:`pptrace.recognise.calls.kernels`

The range ``nccl:coalesced`` names no peer and may never end: it is not read, its kernel is.

Ranges around calls name the axis that these serve, as those of layers that exchange tokens or heads:

    ep   FusedDispatch, FusedCombine, HybridEPDispatch, …        Megatron-LM ``fused_a2a.py``
         moe_dispatch forward, moe_combine backward, …           its overlapped schedule
         dispatch(F), combine(B), …                              DeepSeek's profiles
    cp   _SeqAllToAll, SeqAllToAll4D, …                          DeepSpeed-Ulysses ``sequence/layer.py``, USP ``all_to_all.py``

Autograd names a function's backward after its class, with ``Backward`` behind it. ``_AllToAll`` is left out: it is a layer of
experts in DeepSpeed, of sequences in others.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.model.categories import as_category, category_of_codes
from pptrace.model.tables import CALLS, Int64, empty_table, make_table
from pptrace.model.traces import Category, Events
from pptrace.recognise.calls.call_columns import CODE_OF_KIND, HINTS, CommArgs
from pptrace.recognise.calls.host_calls import host_calls
from pptrace.recognise.calls.kernels import with_kernels
from pptrace.recognise.calls.works import with_works
from pptrace.recognise.device.work import KINDS
from pptrace.slices import Slice

_LAYERS = {
    "ep": re.compile(
        r"^(?:(?:Fused|HybridEP)(?:Dispatch|Combine)(?:Backward)?|moe_(?:dispatch|combine) (?:forward|backward)"
        r"|(?:dispatch|combine)\([FB]\))\Z"
    ),
    "cp": re.compile(r"^_?SeqAllToAll\w*\Z"),
}
_ENGINE = re.compile(r"^autograd::engine::evaluate_function")
_COPY_BACK = re.compile(r"^torch\.distributed\.ddp\.reducer::copy_bucket_to_grad\Z")
_NO_WORK = re.compile(r"::(?:wait_tensor|as_strided)\Z")
"""Operators that compute nothing: DDP makes some views between its wait and the copies that follow."""


def find_calls(events: Events) -> pd.DataFrame:
    """The communication of a rank (schema :data:`CALLS`), in order of the host's calls."""
    args = CommArgs(events.comm_args)
    calls = with_kernels(events, host_calls(events, args), args)
    calls = with_works(calls.where(calls["kind"] > 0))
    if (events.category == Category.KERNEL).any():
        # Of groups of one rank no kernel is seen: nothing had to move, and their calls have no duration.
        alone = (calls["kernel"] < 0) & (args.numbers("group_size", calls["args"]) == 1)
        times = {name: np.where(alone, calls["start_ns"], calls[name]) for name in ("until_ns", "end_ns")}
        calls = calls.with_columns(times)
    if not len(calls):
        return empty_table(CALLS)
    return _table(calls.in_order_of("start_ns"), events, args)


def _table(calls: Slice, events: Events, args: CommArgs) -> pd.DataFrame:
    rows, kind = calls["args"], calls["kind"]
    is_send, is_recv = (kind == CODE_OF_KIND[name] for name in ("send", "recv"))
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
        "peer": np.where(is_send, args.numbers("dst", rows), np.where(is_recv, args.numbers("src", rows), -1)),
        "local_peer": calls["local_peer"],
        "bytes": np.where(num_bytes >= 0, num_bytes, calls["num_bytes"]),
        "seq": args.numbers("seq", rows),
        "host_ns": calls["start_ns"],
        "backward": backward,
        "hint": as_category(hint),
        "functional": calls["is_functional"].astype(np.int64),
        "worker": calls["worker"],
        "splits": args.texts("splits", shapes),
        "stream": np.where(on_device, stream, -1),
        "clock": category_of_codes(on_device.astype(np.int64), ("host", "device")),
    }
    host = _host_times(calls, events, may_be_bucket=(columns["backward"] == 1) & (kind == CODE_OF_KIND["all_reduce"]))
    device = dict.fromkeys(("start_ns", "posted_ns", "asked_ns"), calls["kernel_start_ns"])
    device["end_ns"] = calls["kernel_end_ns"]
    times = {name: np.where(on_device, device[name], column) for name, column in host.items()}
    return make_table(CALLS, columns | times)


def _host_times(calls: Slice, events: Events, may_be_bucket: npt.NDArray[np.bool_]) -> dict[str, Int64]:
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
    most end_ns; start_ns without any.
    """
    until = starts_ns.copy()
    computes = (events.category == Category.CPU_OP) & np.isin(events.thread, np.unique(threads))
    rows = np.flatnonzero(computes & ~events.named(_NO_WORK)[events.name_id]) if len(threads) else threads
    for thread, of_thread in events.rows_by_thread(rows).items():
        on_thread, ran = np.flatnonzero(threads == thread), events.intervals_of(of_thread)
        start, end = starts_ns[on_thread], ends_ns[on_thread]
        low, high = np.searchsorted(ran.starts, start), np.searchsorted(ran.starts, end)
        latest = np.clip(ran.latest_ends[high - 1], start, end)
        until[on_thread] = np.where(low < high, latest, start)
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
