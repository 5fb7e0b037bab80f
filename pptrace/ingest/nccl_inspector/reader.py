"""Read the output of NCCL's Inspector plugin (NCCL 2.28 on, ``plugins/profiler/inspector``): a collective or message per line.

    line = {"header": {"id", "comm_name", "rank", "n_ranks", "nnodes"}, "metadata": {"dump_timestamp_us", "hostname", "pid", …},
            "coll_perf": {"coll", "coll_sn", "coll_msg_size_bytes", "coll_exec_time_us", "coll_timing_source", …}
            | "p2p_perf": {"p2p", "p2p_sn", "p2p_peer", "p2p_msg_size_bytes", "p2p_exec_time_us", "p2p_timing_source", …}}

With ``NCCL_INSPECTOR_DUMP_VERBOSE=1`` there is ``event_trace_ts`` as well: start and end of each channel's kernel on the host's
clock. Without it the time of a call is unknown: ``dump_timestamp_us`` is when the line was written, some time later, and only the
duration is known (clock "none"). Each process writes a file; a header's rank is the rank in the communicator, and the global
rank of a process is its rank in a communicator of all processes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd
from msgspec import Struct

from pptrace.errors import TraceError
from pptrace.ingest.common.byte_source import ByteSource
from pptrace.ingest.common.json_texts import LIMIT_NS, close_brackets, split_values
from pptrace.model.tables import CALLS, MESSAGE_CALLS, make_table
from pptrace.model.traces import COMMUNICATORS, InputFormat, Trace
from pptrace.model.wording import counted

_FILE = re.compile(r".*-pid\d+\.log(?:\.gz)?")
_KINDS = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "AllGatherV": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
    "All2All": "all_to_all",
    "AlltoAll": "all_to_all",
    "Send": "send",
    "Recv": "recv",
    "SendRecv": "send_recv",
}
_OF_ONE_RANK = ("all_gather", "reduce_scatter", "all_to_all")
"""Collectives whose size in the file is one rank's part; the larger of input and output has those of all ranks."""
_UNNAMED = ("unknown", "default_pg")
"""Communicator names without an axis; torch's default group, whose ranks are global ranks, is recognised by its size."""
_LAUNCH = "collective_cpu"
"""Timing source of a duration on the host, which is that of the launch."""
_NO_TIMES = (
    "NCCL Inspector wrote no event timestamps: the duration of each call is known, but not "
    "when it ran, so that union, overlap and waiting are null; record with NCCL_INSPECTOR_DUMP_VERBOSE=1"
)


class _Header(msgspec.Struct, gc=False):
    id: str
    rank: int
    n_ranks: int
    comm_name: str = ""


class _Metadata(msgspec.Struct, gc=False, frozen=True):
    dump_timestamp_us: int = -1
    inspector_output_format_version: str = ""


class _Kernel(msgspec.Struct, gc=False):
    kernel_start_ts: int = 0
    kernel_stop_ts: int = 0


class _Times(msgspec.Struct, gc=False):
    kernel_events: list[_Kernel] = []


class _Collective(msgspec.Struct, gc=False):
    name: str = msgspec.field(name="coll")
    duration_us: int = msgspec.field(name="coll_exec_time_us")
    sn: int = msgspec.field(name="coll_sn", default=-1)
    size: int = msgspec.field(name="coll_msg_size_bytes", default=-1)
    source: str = msgspec.field(name="coll_timing_source", default="")
    times: _Times | None = msgspec.field(name="event_trace_ts", default=None)
    peer: int = -1


class _Message(msgspec.Struct, gc=False):
    name: str = msgspec.field(name="p2p")
    duration_us: int = msgspec.field(name="p2p_exec_time_us")
    sn: int = msgspec.field(name="p2p_sn", default=-1)
    size: int = msgspec.field(name="p2p_msg_size_bytes", default=-1)
    source: str = msgspec.field(name="p2p_timing_source", default="")
    times: _Times | None = msgspec.field(name="event_trace_ts", default=None)
    peer: int = msgspec.field(name="p2p_peer", default=-1)


class _Line(msgspec.Struct, gc=False):
    header: _Header
    metadata: _Metadata = _Metadata()
    coll_perf: _Collective | None = None
    p2p_perf: _Message | None = None


_LINE = msgspec.json.Decoder(_Line)


class _ReadCalls(Struct):
    """The calls read from a file; ``version`` is the last one in it."""

    calls: list[tuple[Any, ...]]
    num_damaged: int = 0
    num_launches: int = 0
    version: str = ""


_COLUMNS = (
    *("group_id", "description", "place", "group_size", "kind", "local_peer", "bytes", "seq"),
    *("start_ns", "end_ns", "clock"),
)


def read_nccl_inspector(path: Path) -> tuple[Trace, ...]:
    """Read the communication of a process, a trace for each of its ranks.

    Raises:
        TraceError: the file cannot be read or holds no call.
    """
    read = _ReadCalls([])
    with ByteSource(path) as source:
        for text, _ in split_values(source):
            line = _decoded(text) or _decoded(close_brackets(text) or b"")
            if line is None:
                read.num_damaged += 1
            else:
                _add(read, line)
        damage = source.damage
    if not read.calls:
        raise TraceError(
            f"{path}: no call of NCCL that can be read; expected the Inspector's lines with coll_perf or p2p_perf; "
            "record them again"
        )
    calls = pd.DataFrame(dict(zip(_COLUMNS, zip(*read.calls, strict=True), strict=True)))
    parts, dropped_warnings = _by_rank(calls)
    num_processes = 1  # with a file in this directory, including this one
    if _FILE.fullmatch(path.name):
        num_processes = max(1, sum(_FILE.fullmatch(other.name) is not None for other in path.parent.iterdir()))
    world = num_processes * len(parts)
    warnings = [f"{damage}: the data before that was read, so that the last calls may be missing"] if damage else []
    if read.num_damaged:
        count = counted(read.num_damaged, "line that is", "lines that are")
        warnings.append(f"left out {count} truncated, damaged or impossible")
    if read.num_launches:
        warnings.append(
            f"left out {counted(read.num_launches, 'call')} timed on the host ({_LAUNCH}): that is the duration of the launch, "
            "not of the call"
        )
    warnings += dropped_warnings
    return tuple(
        _trace(path, rank_calls, world, read.version, warnings if number == 0 else ())
        for number, rank_calls in enumerate(parts)
    )


def _decoded(text: bytes) -> _Line | None:
    try:
        return _LINE.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _add(read: _ReadCalls, line: _Line) -> None:
    """Add the call of a line, unless its duration is that of its launch or is impossible."""
    header, call = line.header, line.coll_perf or line.p2p_perf
    read.version = line.metadata.inspector_output_format_version or read.version
    if call is not None and call.source == _LAUNCH:
        read.num_launches += 1
        return
    span = None if call is None else _span(call.times, line.metadata.dump_timestamp_us, call.duration_us)
    if call is None or span is None or not 0 <= header.rank < header.n_ranks < 2**31:
        read.num_damaged += 1
        return
    kind = _KINDS.get(call.name, re.sub(r"\W+", "_", call.name).lower() or "unknown")
    total_bytes = call.size * (header.n_ranks if kind in _OF_ONE_RANK else 1)
    description = "" if header.comm_name in _UNNAMED else header.comm_name
    numbers = (_bounded(call.peer), _bounded(total_bytes), _bounded(call.sn))
    read.calls.append((header.id, description, header.rank, header.n_ranks, kind, *numbers, *span))


def _bounded(number: int) -> int:
    return number if 0 <= number < 2**62 else -1


def _span(times: _Times | None, written_us: int, duration_us: int) -> tuple[int, int, str] | None:
    """(start, end, clock) of a call, ns; without timestamps the end is when the line was written. None if impossible."""
    kernels = times.kernel_events if times is not None else []
    starts = [kernel.kernel_start_ts for kernel in kernels if kernel.kernel_start_ts > 0]
    ends = [kernel.kernel_stop_ts for kernel in kernels if kernel.kernel_stop_ts > 0]
    if starts and ends and min(starts) <= max(ends) <= LIMIT_NS // 1000:
        return min(starts) * 1000, max(ends) * 1000, "device"
    if not 0 <= duration_us <= written_us <= LIMIT_NS // 1000:
        return None
    return (written_us - duration_us) * 1000, written_us * 1000, "none"


def _by_rank(calls: pd.DataFrame) -> tuple[list[pd.DataFrame], tuple[str, ...]]:
    """Split the calls by rank: a process has one rank, unless it has several ranks in a communicator.

    In that case only calls of communicators with the same ranks can be assigned to them.
    """
    group_ranks = {group: tuple(sorted(set(ranks))) for group, ranks in calls.groupby("group_id")["place"]}
    largest_group = max(group_ranks.values(), key=len)
    if len(largest_group) == 1:
        return [calls], ()
    is_kept = calls["group_id"].isin([group for group, ranks in group_ranks.items() if ranks == largest_group])
    parts = [ranks.reset_index(drop=True) for _, ranks in calls[is_kept].groupby("place", sort=True)]
    num_dropped = int((~is_kept).sum())
    warning = (
        f"left out {num_dropped} calls of communicators that have other ranks than the {len(largest_group)} of this process: "
        "whose they are is unknown"
    )
    return parts, (warning,) if num_dropped else ()


def _trace(path: Path, calls: pd.DataFrame, world: int, version: str, warnings: Sequence[str]) -> Trace:
    largest = calls["group_size"] == calls["group_size"].max()
    world_ranks = calls.loc[largest & (calls["group_size"] == world), "place"].unique()
    rank = int(world_ranks[0]) if len(world_ranks) == 1 else None
    first = calls.drop_duplicates("group_id")[["group_id", "place", "group_size"]]
    communicators = {str(group): [int(place), int(size)] for group, place, size in first.itertuples(index=False)}
    notes = {"notes": [_NO_TIMES]} if (calls["clock"] == "none").any() else {}
    return Trace(
        path=str(path),
        format=InputFormat.NCCL_INSPECTOR,
        rank=rank,
        producer=f"NCCL Inspector {version}".rstrip(),
        metadata={COMMUNICATORS: communicators, **notes},
        distributed={} if rank is None else {"rank": rank, "world_size": world, "backend": "nccl"},
        warnings=tuple(warnings),
        calls=_table(calls),
    )


def _table(calls: pd.DataFrame) -> pd.DataFrame:
    """Make a table of schema CALLS. Messages have no common number on both ends; where some are missing, peers are dropped."""
    is_p2p = calls["kind"].isin(MESSAGE_CALLS)
    seq = calls[is_p2p].groupby("group_id")["seq"]
    first, last, distinct = (seq.transform(aggregate) for aggregate in ("min", "max", "nunique"))
    is_gapless = (last - first + 1 == distinct).reindex(calls.index, fill_value=False)
    columns = {
        "local_peer": calls["local_peer"].where(is_gapless, -1),
        "seq": calls["seq"].where(~is_p2p, -1),
        **dict.fromkeys(("host_ns", "posted_ns", "asked_ns"), calls["start_ns"]),
    }
    texts = dict.fromkeys(("group_ranks", "hint", "splits", "algorithm"), "")
    numbers = dict.fromkeys(("peer", "stream", "backward", "worker"), -1)
    table = calls.assign(**columns, **texts, **numbers, functional=0)
    return make_table(CALLS, {name: table[name].to_numpy() for name in CALLS})
