"""Lines as NCCL's Inspector writes them, one file per process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_US = 1_752_867_229_000_000


@dataclass(frozen=True)
class Comm:
    """A communicator: its id, name, and the global ranks at its places."""

    id: str
    ranks: tuple[int, ...]
    name: str = "unknown"


@dataclass(frozen=True)
class Call:
    """A collective on every rank of a communicator, or a message between two of its places (then ``peer`` is set)."""

    comm: Comm
    name: str
    number: int
    size: int
    start_us: int
    end_us: int
    peer: int = -1
    source: str = "kernel_gpu"


def line(call: Call, rank: int, dumped_us: int, *, verbose: bool) -> dict[str, Any]:
    word = "p2p" if call.peer >= 0 else "coll"
    took = call.end_us - call.start_us
    perf: dict[str, Any] = {word: call.name, f"{word}_sn": call.number}
    if call.peer >= 0:
        perf["p2p_peer"] = call.peer
    measured = {"exec_time_us": took, "timing_source": call.source, "algobw_gbs": 1.5, "busbw_gbs": 2.5}
    perf |= {f"{word}_{name}": value for name, value in {"msg_size_bytes": call.size, **measured}.items()}
    if verbose:
        start, end = START_US + call.start_us, START_US + call.end_us
        kernels = [
            {"channel_id": channel, "kernel_start_ts": start + channel, "kernel_stop_ts": end - 1 + channel}
            for channel in (0, 1)
        ]
        perf["event_trace_ts"] = {f"{word}_start_ts": START_US, f"{word}_stop_ts": START_US, "kernel_events": kernels}
    ranks = call.comm.ranks
    head = {
        "id": call.comm.id,
        "comm_name": call.comm.name,
        "rank": ranks.index(rank),
        "n_ranks": len(ranks),
        "nnodes": 1,
    }
    metadata = {
        **{"inspector_output_format_version": "v4.0", "git_rev": "abc", "rec_mechanism": "nccl_profiler_interface"},
        **{"dump_timestamp_us": START_US + dumped_us, "hostname": "worker-7", "pid": 100 + rank},
    }
    return {"header": head, "metadata": metadata, f"{word}_perf": perf}


def write_process(folder: Path, rank: int, calls: Sequence[Call], *, verbose: bool = True) -> Path:
    """The file of a rank: all calls in one dump, at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    dumped = max(call.end_us for call in calls) + 5000
    lines = [json.dumps(line(call, rank, dumped, verbose=verbose), separators=(",", ":")) for call in calls]
    path = folder / f"worker-7-pid{100 + rank}.log"
    path.write_text("\n".join(lines) + "\n")
    return path


def write_run(folder: Path, calls: Mapping[int, Sequence[Call]], *, verbose: bool = True) -> Path:
    for rank, own in calls.items():
        write_process(folder, rank, own, verbose=verbose)
    return folder
