"""The aligned run as a Chrome trace, for ui.perfetto.dev: a process per rank, with its ops, its communication and its memory.

Ranges of the host, as those of steps, have a thread of their own where ops have the times of a device, which runs behind.
"""

from __future__ import annotations

from collections import defaultdict
from heapq import heappop, heappush
from typing import Any

import pandas as pd

from pptrace.marks import P2P
from pptrace.workflow.analyse import Analysis

_OPS, _HOST, _COMMS = 0, 1, 2


def perfetto_object(analysis: Analysis) -> dict[str, Any]:
    """A Chrome-trace object; times are in µs from the first event, matched sends and receives are joined by arrows."""
    ops, comms = analysis.data.ops, analysis.data.comms
    starts = [int(table["start_ns"].min()) for table in (ops, comms) if len(table)]
    origin = min(starts, default=0)
    threads = _threads(comms)
    most: dict[int, int] = defaultdict(int)
    for rank, thread in zip(comms["rank"].tolist(), threads, strict=True):
        most[rank] = max(most[rank], thread)
    ranks = sorted({int(rank) for table in (ops, comms) for rank in table["rank"]})
    with_device = set(ops.loc[ops["clock"] == "device", "rank"])
    events = [event for rank in ranks for event in _names(rank, most[rank], rank in with_device)]
    op: Any
    comm: Any
    for rank, lane in analysis.data.lanes.items():
        for start, end in lane.recompute.tolist():  # a range inside a backward
            times = {"ts": (start - origin) / 1e3, "dur": (end - start) / 1e3}
            events.append({"ph": "X", "name": "recompute", "cat": "op", "pid": rank, "tid": _OPS, **times})
    for op in ops.itertuples():
        name = op.pair or (f"{op.stage}{op.kind}{op.microbatch}" if op.stage >= 0 else f"{op.kind} {op.step}")
        args = {"step": op.step, "chunk": op.chunk, "phase": op.phase, "source": op.source}
        thread = _HOST if op.clock == "host" and op.rank in with_device else _OPS
        events.append(_slice(name, "op", op, thread, origin) | {"args": args})
    for comm, thread in zip(comms.itertuples(), threads, strict=True):
        wait_us = (comm.transfer_start_ns - comm.start_ns) / 1e3
        transfer_us = (comm.transfer_end_ns - comm.transfer_start_ns) / 1e3
        args = {"axis": comm.axis, "peer": comm.peer, "bytes": comm.bytes, "step": comm.step}
        args |= {"wait_us": wait_us, "transfer_us": transfer_us}
        events.append(_slice(f"{comm.kind} {comm.axis}", "comm", comm, thread, origin) | {"args": args})
        if comm.match >= 0 and comm.kind in P2P:
            is_send = comm.kind == "send"
            times_us = {"ts": ((comm.start_ns if is_send else comm.end_ns) - origin) / 1e3}
            ends = {"ph": "s" if is_send else "f", "name": "p2p", "cat": "p2p", "id": int(comm.match)}
            events.append(
                {**ends, "pid": int(comm.rank), "tid": thread, **times_us, **({} if is_send else {"bp": "e"})}
            )
    level: Any
    for level in analysis.data.memory.itertuples():
        sizes = {"allocated": level.allocated_bytes, "reserved": level.reserved_bytes}
        known = {name: num_bytes for name, num_bytes in sizes.items() if num_bytes >= 0}
        time_us = (level.t_ns - origin) / 1e3
        events.append({"ph": "C", "name": "memory", "pid": level.rank, "ts": time_us, "args": known})
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _threads(comms: pd.DataFrame) -> list[int]:
    """The thread of each row: slices of a thread may not overlap, so that calls that go on at the same time have several."""
    threads = [_COMMS] * len(comms)
    rows = enumerate(zip(comms["rank"].tolist(), comms["start_ns"].tolist(), comms["end_ns"].tolist(), strict=True))
    before: int | None = None
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    for row, (rank, start, end) in sorted(rows, key=lambda entry: entry[1]):
        if rank != before:
            before, busy, free = rank, [], []
        while busy and busy[0][0] <= start:
            heappush(free, heappop(busy)[1])
        threads[row] = heappop(free) if free else _COMMS + len(busy)
        heappush(busy, (end, threads[row]))
    return threads


def _names(rank: int, last_thread: int, has_host: bool) -> list[dict[str, Any]]:
    threads = {_OPS: "ops", **({_HOST: "host"} if has_host else {}), _COMMS: "communication"}
    threads |= {thread: f"communication {thread - _COMMS + 1}" for thread in range(_COMMS + 1, last_thread + 1)}
    return [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}},
        *(
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}}
            for thread, name in threads.items()
        ),
    ]


def _slice(name: str, category: str, row: Any, thread: int, origin: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": int(row.rank),
        "tid": thread,
        "ts": (row.start_ns - origin) / 1e3,
        "dur": (row.end_ns - row.start_ns) / 1e3,
    }
