"""Reader of what NCCL's Inspector plugin writes (NCCL 2.28 on, ``plugins/profiler/inspector``): a collective or message per line.

    line = {"header": {"id", "comm_name", "rank", "n_ranks", "nnodes"}, "metadata": {"dump_timestamp_us", "hostname", "pid", …},
            "coll_perf": {"coll", "coll_sn", "coll_msg_size_bytes", "coll_exec_time_us", "coll_timing_source", …}
            | "p2p_perf": {"p2p", "p2p_sn", "p2p_peer", "p2p_msg_size_bytes", "p2p_exec_time_us", "p2p_timing_source", …}}

With ``NCCL_INSPECTOR_DUMP_VERBOSE=1`` there is ``event_trace_ts`` as well, the host's readings of when each channel's kernel
began and ended. Without, nothing says when a call ran: ``dump_timestamp_us`` is when the line was written, some time after it,
and the duration alone is known (clock "none"). A process writes a file; a header's rank is a place in the communicator, and the
global rank of a process is its place in a communicator of all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd

from pptrace.errors import TraceError
from pptrace.ingest.common.byte_source import ByteSource
from pptrace.ingest.common.exact_numbers import LIMIT_NS
from pptrace.ingest.common.json_texts import closed, json_texts
from pptrace.model.tables import CALLS, MEMORY, InputFormat, Trace, empty_table, make_table, no_events

COMMUNICATORS = "communicators"
"""The fact of a process's places: by communicator its rank there and the number of ranks."""

_MARK = re.compile(rb'"(?:coll_perf|p2p_perf|inspector_output_format_version)"\s*:')
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
"""Collectives whose size is told for one rank's part: the larger of input and output holds all of them."""
_UNNAMED = ("unknown", "default_pg")
"""Names that tell no axis; of torch's default group, whose places are global ranks, the ranks are told by its size."""
_LAUNCH = "collective_cpu"
"""The source of a duration that is the host's alone: how long it took to launch."""
_NO_TIMES = (
    "NCCL Inspector wrote no event timestamps (NCCL_INSPECTOR_DUMP_VERBOSE=1 does): how long each call took is known, when it "
    "ran is not; what needs that (union, overlap, waiting) is null"
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
    took_us: int = msgspec.field(name="coll_exec_time_us")
    sn: int = msgspec.field(name="coll_sn", default=-1)
    size: int = msgspec.field(name="coll_msg_size_bytes", default=-1)
    source: str = msgspec.field(name="coll_timing_source", default="")
    times: _Times | None = msgspec.field(name="event_trace_ts", default=None)

    @property
    def peer(self) -> int:
        return -1


class _Message(msgspec.Struct, gc=False):
    name: str = msgspec.field(name="p2p")
    took_us: int = msgspec.field(name="p2p_exec_time_us")
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


@dataclass(slots=True)
class _Read:
    """What is read of a file, one entry per call; ``version`` is the last one that a line names."""

    calls: list[tuple[Any, ...]]
    num_damaged: int = 0
    num_launches: int = 0
    version: str = ""


_COLUMNS = (
    "group_id",
    "description",
    "place",
    "group_size",
    "kind",
    "local_peer",
    "bytes",
    "seq",
    "start_ns",
    "end_ns",
    "clock",
)


def sniff_nccl_inspector(start: bytes) -> bool:
    """Whether a file that begins with these (decompressed) bytes is the Inspector's."""
    return _MARK.search(start) is not None and b'"header"' in start


def read_nccl_inspector(path: Path) -> tuple[Trace, ...]:
    """The communication of a process, or of each rank where a process has several.

    Raises:
        TraceError: the file cannot be read or holds no call.
    """
    read = _Read([])
    with ByteSource(path) as source:
        for text in json_texts(source):
            line = _decoded(text.data) or _decoded(closed(text.data) or b"")
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
    parts, left_out = _by_rank(calls)
    world = _num_processes(path) * len(parts)
    lines = [*_damage(read, damage), *left_out]
    return tuple(
        _trace(path, own, world, read.version, lines if number == 0 else ()) for number, own in enumerate(parts)
    )


def _decoded(text: bytes) -> _Line | None:
    try:
        return _LINE.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _add(read: _Read, line: _Line) -> None:
    """The call of a line, unless its duration is that of its launch or cannot be true."""
    head, call = line.header, line.coll_perf or line.p2p_perf
    read.version = line.metadata.inspector_output_format_version or read.version
    if call is not None and call.source == _LAUNCH:
        read.num_launches += 1
        return
    span = None if call is None else _span(call.times, line.metadata.dump_timestamp_us, call.took_us)
    if call is None or span is None or not 0 <= head.rank < head.n_ranks < 2**31:
        read.num_damaged += 1
        return
    kind = _KINDS.get(call.name, re.sub(r"\W+", "_", call.name).lower() or "unknown")
    whole = call.size * (head.n_ranks if kind in _OF_ONE_RANK else 1)
    description = "" if head.comm_name in _UNNAMED else head.comm_name
    numbers = (_bounded(call.peer), _bounded(whole), _bounded(call.sn))
    read.calls.append((head.id, description, head.rank, head.n_ranks, kind, *numbers, *span))


def _bounded(number: int) -> int:
    return number if 0 <= number < 2**62 else -1


def _span(times: _Times | None, dumped_us: int, took_us: int) -> tuple[int, int, str] | None:
    """(start, end, clock) of a call; without readings it ends, at the latest, when it was written down. None if impossible."""
    kernels = times.kernel_events if times is not None else []
    starts = [kernel.kernel_start_ts for kernel in kernels if kernel.kernel_start_ts > 0]
    ends = [kernel.kernel_stop_ts for kernel in kernels if kernel.kernel_stop_ts > 0]
    if starts and ends and min(starts) <= max(ends) <= LIMIT_NS // 1000:
        return min(starts) * 1000, max(ends) * 1000, "device"
    if not 0 <= took_us <= dumped_us <= LIMIT_NS // 1000:
        return None
    return (dumped_us - took_us) * 1000, dumped_us * 1000, "none"


def _by_rank(calls: pd.DataFrame) -> tuple[list[pd.DataFrame], tuple[str, ...]]:
    """The calls of each rank of the process: one, unless a communicator has several places here.

    Where it has, only calls of communicators with the same places can be given to these ranks.
    """
    places = {group: tuple(sorted(set(own))) for group, own in calls.groupby("group_id")["place"]}
    most = max(places.values(), key=len)
    if len(most) == 1:
        return [calls], ()
    kept = calls["group_id"].isin([group for group, own in places.items() if own == most])
    parts = [own.reset_index(drop=True) for _, own in calls[kept].groupby("place", sort=True)]
    lost = int((~kept).sum())
    line = (
        f"left out {lost} calls of communicators of which a process with {len(most)} ranks does not tell whose they are"
    )
    return parts, (line,) if lost else ()


def _num_processes(path: Path) -> int:
    """How many processes wrote a file beside this one, itself included."""
    if not _FILE.fullmatch(path.name):
        return 1
    return max(1, sum(_FILE.fullmatch(other.name) is not None for other in path.parent.iterdir()))


def _trace(path: Path, calls: pd.DataFrame, world: int, version: str, warnings: Sequence[str]) -> Trace:
    largest = calls.loc[calls["group_size"] == calls["group_size"].max()]
    whole = largest.loc[largest["group_size"] == world, "place"].unique()
    rank = int(whole[0]) if len(whole) == 1 else None
    seen = calls.drop_duplicates("group_id")
    communicators = {
        str(group): [int(place), int(size)]
        for group, place, size in zip(seen["group_id"], seen["place"], seen["group_size"], strict=True)
    }
    notes = {"notes": [_NO_TIMES]} if (calls["clock"] == "none").any() else {}
    return Trace(
        path=str(path),
        format=InputFormat.NCCL_INSPECTOR,
        rank=rank,
        producer=f"NCCL Inspector {version}".rstrip(),
        events=no_events(),
        memory=empty_table(MEMORY),
        metadata={COMMUNICATORS: communicators, **notes},
        distributed=_distributed(rank, world),
        warnings=tuple(warnings),
        calls=_table(calls),
    )


def _distributed(rank: int | None, world: int) -> Mapping[str, Any]:
    return {} if rank is None else {"rank": rank, "world_size": world, "backend": "nccl"}


def _table(calls: pd.DataFrame) -> pd.DataFrame:
    """Schema CALLS. Messages carry no number that both ends share; where some were not written, their order tells nothing."""
    is_p2p = calls["kind"].isin(("send", "recv", "send_recv"))
    numbers = calls[is_p2p].groupby("group_id")["seq"]
    first, last, different = (numbers.transform(what) for what in ("min", "max", "nunique"))
    whole = (last - first + 1 == different).reindex(calls.index, fill_value=False)
    peers = calls["local_peer"].where(whole, -1)
    ordered = {
        "kind": calls["kind"],
        "group_id": calls["group_id"],
        "description": calls["description"],
        "group_size": calls["group_size"],
        "local_peer": peers,
        "bytes": calls["bytes"],
        "seq": calls["seq"].where(~is_p2p, -1),
        "host_ns": calls["start_ns"],
        "start_ns": calls["start_ns"],
        "posted_ns": calls["start_ns"],
        "asked_ns": calls["start_ns"],
        "end_ns": calls["end_ns"],
        "clock": calls["clock"],
    }
    none = {"group_ranks": "", "hint": "", "peer": -1, "stream": -1, "backward": -1, "worker": -1, "functional": 0}
    size = len(calls)
    columns = {name: ordered[name].to_numpy() if name in ordered else [none[name]] * size for name in CALLS}
    return make_table(CALLS, columns)


def _damage(read: _Read, damage: str) -> list[str]:
    lines = [f"{damage}: read what comes before"] if damage else []
    if read.num_damaged:
        count = "1 line that is" if read.num_damaged == 1 else f"{read.num_damaged} lines that are"
        lines.append(f"left out {count} cut off, damaged or cannot be true")
    if read.num_launches:
        count = "1 call" if read.num_launches == 1 else f"{read.num_launches} calls"
        lines.append(f"left out {count} that the host alone timed ({_LAUNCH}): that is how long launching took")
    return lines
