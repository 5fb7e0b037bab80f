"""Communication calls without pptrace's marks: host calls, and the device work that each launched.

One communication shows in up to five events, which count once:

    host      c10d::allreduce_ ⊃ record_param_comms ⊃ nccl:all_reduce, or NVTX ncclAllReduce
    worker    gloo:all_reduce, on another thread, until it is done: see :mod:`pptrace.recognise.calls.works`
    device    ncclDevKernel_AllReduce…, launched inside any of them: see :mod:`pptrace.recognise.calls.kernels`

The range ``nccl:coalesced`` names no peer and may never end: it is not read, its kernel is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.model.categories import as_category, category_of_codes
from pptrace.model.tables import CALLS, Int64, empty_table, make_table
from pptrace.model.traces import Category, Events
from pptrace.recognise.calls.call_columns import CODE_OF_KIND, HINTS, CommArgs, with_columns
from pptrace.recognise.calls.host_calls import host_calls
from pptrace.recognise.calls.kernels import with_kernels
from pptrace.recognise.calls.named_layers import axes_of_ranges
from pptrace.recognise.calls.thread_activity import are_backward, busy_until, copies_of_buckets
from pptrace.recognise.calls.works import with_works
from pptrace.recognise.device.communication_names import KINDS
from pptrace.slices import Slice


def find_calls(events: Events) -> pd.DataFrame:
    """The communication of a rank (schema :data:`CALLS`), in order of the host's calls."""
    args = CommArgs(events.comm_args)
    calls = with_kernels(events, host_calls(events, args), args)
    calls = with_works(calls.where(calls["kind"] > 0))
    if (events.category == Category.KERNEL).any():
        calls = _without_waiting_alone(calls, args)
    if not len(calls):
        return empty_table(CALLS)
    return _table(calls.in_order_of("start_ns"), events, args)


def _without_waiting_alone(calls: Slice, args: CommArgs) -> Slice:
    """The calls of groups of one rank, of which no kernel is seen, without a duration: nothing had to move."""
    alone = (calls["kernel"] < 0) & (args.numbers("group_size", calls["args"]) == 1)
    times = {name: np.where(alone, calls["start_ns"], calls[name]) for name in ("until_ns", "end_ns")}
    return with_columns(calls, times)


def _table(calls: Slice, events: Events, args: CommArgs) -> pd.DataFrame:
    rows, kind = calls["args"], calls["kind"]
    is_send, is_recv = (kind == CODE_OF_KIND[name] for name in ("send", "recv"))
    num_bytes = args.message_bytes(rows)
    shapes = np.where(args.texts("splits", rows) == "", calls["shapes"], rows)
    on_device = calls["kernel"] >= 0
    hint = np.array(HINTS, dtype=object)[calls["hint"]]
    stream = events.stream[calls["kernel"]] if len(events) else calls["kernel"]
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
        "backward": are_backward(events, calls["thread"], calls["start_ns"]),
        "hint": as_category(np.where(hint == "", axes_of_ranges(events, calls["thread"], calls["start_ns"]), hint)),
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
    asked = posted.copy()
    first, last = (np.maximum(copy, until) for copy in copies_of_buckets(events, calls["thread"], start))
    latest = np.where(may_be_bucket & is_ahead, last, end)
    end, asks = np.minimum(end, latest), np.where(may_be_bucket, np.minimum(end, first), end)
    waits = np.flatnonzero(is_ahead & (calls["kernel"] < 0))
    asked[waits] = busy_until(events, calls["thread"][waits], until[waits], asks[waits])
    ends = np.where(is_unknown, until, np.where(is_ahead, end, np.maximum(start, end)))
    return {"start_ns": start, "posted_ns": posted, "asked_ns": asked, "end_ns": ends}
