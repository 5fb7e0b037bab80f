"""Read PyTorch profiler (Kineto) traces: Chrome-trace JSON, plain or gzip, of all versions since 2021.

    file  = { member "," } "traceEvents": [ event, … ] { "," member } | [ event, … ]
    event = complete | instant | metadata | others, which are skipped

The text is cut by :mod:`pptrace.ingest.kineto.event_stream` and its events are typed in :mod:`pptrace.ingest.kineto.event_types`.

Members used: ``baseTimeNanoseconds`` (added to every time, wherever it is in the file), ``pptrace``, ``distributedInfo``,
``host_name``, ``schemaVersion`` and version numbers. The file is read as a stream; memory grows with the events' columns, not
with the text.

A file that the traces of several ranks were merged into, as scripts for viewers do, is divided by the processes of its events::

process = name of the process, or its id, that names a rank or its coordinates: "RANK 3 - GPU", "PP rank 1, TP rank 0"
        | id that begins as those of one rank and no other do: "[TP00-PP01] 1234"
        | id of a process that ran operators, with the device of which it alone can have launched all work
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from pptrace.errors import TraceError
from pptrace.garbage import paused_gc
from pptrace.ingest.common.byte_source import ByteSource, num_text_bytes
from pptrace.ingest.common.json_texts import LIMIT_NS, Scalar, object_of
from pptrace.ingest.common.rank_names import (
    coordinates_of_label,
    natural_order,
    producer_of,
    rank_of_file_name,
    rank_of_labels,
    rank_of_value,
)
from pptrace.ingest.common.sort_events import EventColumns, sorted_events
from pptrace.ingest.kineto.comm_args import comm_table, rank_of_comms
from pptrace.ingest.kineto.decode_pool import MIN_TEXT_BYTES, DecodePool, WorkerError
from pptrace.ingest.kineto.event_columns import Collected
from pptrace.ingest.kineto.event_stream import EXPECTED_INPUTS, EventStream
from pptrace.ingest.kineto.event_types import Event, Skipped, memory_table
from pptrace.ingest.kineto.salvage import repaired_text
from pptrace.marks import METADATA_KEY
from pptrace.model.traces import DEVICE_NAMES, HOST_NAME, Category, InputFormat, Trace
from pptrace.model.wording import counted, listed

_NUMBERED = re.compile(r"(.*?)\W*\d+")
_LONGEST = 64  # id of a process
_STRAY = 0.1
"""Part of the operators of the process with most up to which another's are no rank's: their process is damaged."""


def is_merged(collected: Collected) -> bool:
    """Return whether several ranks are among the processes: by their names, or since several of them ran operators."""
    named = {_name_in([label]) for label in collected.labels} - {""}
    few = _STRAY * max(collected.hosts.values(), default=0)
    hosts = {
        pid: _NUMBERED.fullmatch(str(pid)[:_LONGEST])
        for pid, count in collected.hosts.items()
        if count > few and pid != -1
    }
    return len(named) > 1 or len({match[1] or match[0] for match in hosts.values() if match}) > 1


def ranks_in(path: Path, batches: Iterable[list[Event]]) -> list[Collected]:
    """The events of each rank, its number among the labels where it is known, in order of what names it.

    Raises:
        TraceError: nothing tells of which rank the events of a process are, or none are what a profiler records.
    """
    parts: dict[Scalar, Collected] = {}
    for events in batches:
        by_process: dict[Scalar, list[Event]] = {}
        for event in events:
            if not isinstance(event, Skipped):
                by_process.setdefault(getattr(event, "pid", None), []).append(event)
        for pid, own in by_process.items():
            parts.setdefault(pid, Collected()).add(own)
    parts = {pid: part for pid, part in parts.items() if part.has_work}
    if not parts:
        raise TraceError(
            f"{path}: several ranks in one file, without operators or device work, as in a picture for a viewer; expected the "
            "file of each rank, from which this one was made"
        )
    names = {pid: _name_of(pid, part) for pid, part in parts.items()}
    of_devices = _hosts_of({pid: part for pid, part in parts.items() if part.hosts or not names[pid]})
    ranks: dict[str, Collected] = {}
    for pid, part in parts.items():
        if not (name := names[pid] or names.get(of_devices.get(pid), "")):
            raise TraceError(
                f"{path}: several ranks in one file, and nothing tells of which of them the events of process {str(pid)[:40]!r} "
                "are; expected the file of each rank, from which this one was made"
            )
        whole = ranks.setdefault(name, Collected())
        whole.extend(part)
        whole.labels = {name}
    return [ranks[name] for name in sorted(ranks, key=natural_order)]


def _name_of(pid: Scalar, part: Collected) -> str:
    """The name of the rank of a process; "" of a device that has none."""
    match = _NUMBERED.fullmatch(str(pid)[:_LONGEST])
    return _name_in([*part.labels, str(pid)]) or (match[1] or (match[0] if part.hosts else "") if match else "")


def _hosts_of(parts: Mapping[Scalar, Collected]) -> dict[Scalar, Scalar]:
    """The process that launched the work of each device, where no other can have: each launched that of one."""
    hosts = [pid for pid, part in parts.items() if part.hosts]
    possible = {
        pid: {host for host in hosts if _launched(parts[host].columns, part.columns)}
        for pid, part in parts.items()
        if not part.hosts
    }
    found: dict[Scalar, Scalar] = {}
    while certain := [(pid, *of) for pid, of in possible.items() if len(of) == 1]:
        device, host = certain[0]
        found[device] = host
        possible = {pid: of - {host} for pid, of in possible.items() if pid != device}
    return found


def _launched(calls: EventColumns, work: EventColumns) -> bool:
    """Return whether a process made a call for each piece of work, before that began."""
    call = np.flatnonzero((calls.category == Category.RUNTIME) & (calls.correlation >= 0))
    piece = np.flatnonzero(np.isin(work.category, (Category.KERNEL, Category.MEMCPY, Category.MEMSET)))
    call = call[np.argsort(calls.correlation[call], kind="stable")]
    if not len(call):
        return False
    at = call[np.minimum(np.searchsorted(calls.correlation[call], work.correlation[piece]), len(call) - 1)]
    is_launched = (calls.correlation[at] == work.correlation[piece]) & (calls.start_ns[at] <= work.start_ns[piece])
    return bool(is_launched.all())


def _name_in(labels: Sequence[str]) -> str:
    """The name that the labels of one process give its rank; "" where they give none."""
    if coordinates := coordinates_of_label(", ".join(labels)):
        return " ".join(f"{axis} {coordinate}" for axis, coordinate in sorted(coordinates.items()))
    number = rank_of_labels(labels)
    return "" if number is None else f"rank {number}"


_SETTINGS = ("record_shapes", "with_stack", "profile_memory", "with_modules", "with_flops")
"""Members by which torch's profiler says what it was told to record."""
_EXACT_FLOAT = 2.0**53
_MEMBER = re.compile(r'[{,]\s*"((?:[^"\\]|\\.)*)"\s*:\s*(?=["{\[\d\-tfn])')

ReadProgress = Callable[[float], None]


def read_ranks(path: Path, cores: int = 1, on_progress: ReadProgress | None = None) -> tuple[Trace, ...]:
    """Read the trace of each rank in a file: of one, but for files into which several were merged.

    A large file is decoded on several ``cores``, in worker processes.

    ``on_progress`` is called repeatedly with the fraction of the file that has been read, 0 to 1.

    Only complete events (``ph`` X) become rows of ``Trace.events``, sorted by start, longer ones first among equals. Memory
    instants become ``Trace.memory`` (rank -1 where the rank is unknown). ``Trace.metadata`` is the whole ``pptrace`` object
    and the host's name.
    Damaged events are left out and counted in ``Trace.warnings``.

    Raises:
        TraceError: the file cannot be read, is empty, is no JSON, or has no complete event.
    """
    with paused_gc():  # collection takes half of the time of decoding
        num_workers = cores - 1 if num_text_bytes(path) >= MIN_TEXT_BYTES else 0
        with suppress(WorkerError):
            return _read(path, num_workers, on_progress)
        return _read(path, 0, on_progress)


def _read(path: Path, num_workers: int, on_progress: ReadProgress | None) -> tuple[Trace, ...]:
    """Read the file; with workers only an undamaged one.

    Raises:
        WorkerError: a worker refused a damaged block, or died.
    """
    collected = Collected()
    with ByteSource(path) as source, DecodePool(num_workers) as pool:
        stream = EventStream(source, pool.offer)
        for events in stream.batches():
            collected.add(events)
            if on_progress is not None:
                on_progress(source.part_read)
        for part, num_lost, num_repaired in pool.results():
            collected.extend(part)
            stream.lost_events += num_lost
            stream.repaired += num_repaired
        if not collected.num_rows:
            raise TraceError(f"{path}: {_no_rows(collected, stream)}; {EXPECTED_INPUTS}")
        if not is_merged(collected):
            return (_trace(path, source, stream, collected),)
    with ByteSource(path) as source:
        stream = EventStream(source)
        ranks = ranks_in(path, stream.batches())
        first, *others = (_trace(path, source, stream, collected, of_merged=True) for collected in ranks)
        names = listed((name.strip("[( ") for rank in ranks for name in rank.labels), 8)
        how = f"several ranks in one file, divided by what its processes are called: {names}"
    return (replace(first, warnings=(how, *first.warnings)), *(replace(trace, warnings=()) for trace in others))


def _trace(
    path: Path, source: ByteSource, stream: EventStream, collected: Collected, *, of_merged: bool = False
) -> Trace:
    """The trace of what was collected; of the members of a merged file those that are of one of its ranks are left out."""
    members, trailing, is_complete = _read_members(stream)
    metadata = {} if of_merged else _facts(members)
    distributed = _mapping(members.get("distributedInfo"))
    if of_merged:
        distributed = {name: value for name, value in distributed.items() if name not in ("rank", "pg_config")}
    base_ns, base_warning = _base_ns(members.get("baseTimeNanoseconds"))
    ordered = sorted_events([collected.take()], collected.names.texts, base_ns)
    if not len(ordered.without_comm_args):
        raise TraceError(f'{path}: no event has a usable time; expected "ts" and "dur" in µs; {EXPECTED_INPUTS}')
    comm_rows = collected.comm_rows
    ranks = (
        rank_of_value(metadata.get("rank")),
        rank_of_value(distributed.get("rank")),
        rank_of_labels(collected.labels),
        None if of_merged else rank_of_file_name(path.name),
        rank_of_comms(comm_rows),
    )
    rank = next((rank for rank in ranks if rank is not None), None)
    memory = memory_table(collected.memory, base_ns)
    memory["rank"] = -1 if rank is None else rank
    comm_args = comm_table(comm_rows, ordered.sorted_rows([row for row, _, _ in comm_rows]), distributed)
    events = ordered.events(comm_args, np.concatenate([np.zeros((2, 0), dtype=np.int64), *collected.flops], axis=1))
    warnings = [*_damage_warnings(source, stream, trailing, len(events), is_complete=is_complete)]
    warnings += [*base_warning, *ordered.warnings]
    if unknown := sorted(collected.categories.unknown):
        warnings.append(
            "events of unknown categories are read as host events, so that device work among them does not count: "
            f"{listed((repr(name[:40]) for name in unknown), 5)}"
        )
    is_cut = stream.early_end or bool(source.damage) or not is_complete
    return Trace(
        path=str(path),
        format=InputFormat.KINETO,
        rank=rank,
        producer=producer_of(members, metadata),
        events=events,
        memory=memory,
        metadata=metadata,
        distributed=distributed,
        warnings=tuple(warnings),
        damage=ordered.damage_with(is_cut=is_cut, num_lost=stream.lost_events),
    )


def _mapping(value: object) -> Mapping[str, Any]:
    """A member that should be an object; torch's ``add_metadata`` stores it as text."""
    return value if isinstance(value, dict) else object_of(value)


def _facts(members: Mapping[str, Any]) -> Mapping[str, Any]:
    """Facts that pptrace's recorder wrote, and the names of host and devices that torch's profiler wrote."""
    host, devices = members.get(HOST_NAME), members.get("deviceProperties")
    host_fact = {HOST_NAME: host} if isinstance(host, str) and host else {}
    names = [_mapping(device).get("name") for device in devices] if isinstance(devices, list) else []
    device_fact = {DEVICE_NAMES: list(map(str, names))} if names and None not in names else {}
    settings = {name: True for name in _SETTINGS if members.get(name)}
    own = _mapping(members.get(METADATA_KEY))
    return {**host_fact, **device_fact, **({"recording": settings} if settings else {}), **own}


def _base_ns(value: object) -> tuple[int, list[str]]:
    if value is None:
        return 0, []
    try:
        base_ns = int(value) if isinstance(value, int | str) else None
    except ValueError:
        base_ns = None
    if base_ns is None or abs(base_ns) > LIMIT_NS:
        shown = str(value)[:40]
        return 0, [
            f'"baseTimeNanoseconds" is {shown!r}, which is no time: 0 is used, so that times are relative to an unknown start'
        ]
    return base_ns, []


def _damage_warnings(
    source: ByteSource, stream: EventStream, trailing: str, num_events: int, *, is_complete: bool
) -> Iterator[str]:
    """Yield a warning for each kind of damage."""
    if stream.early_end:
        reason = source.damage or "cut inside the list of events"
        yield f"trace ends early ({reason}); kept the {counted(num_events, 'event')} before it"
    elif source.damage or not is_complete:
        reason = source.damage or "cut or damaged after the list of events"
        yield f"trace ends early ({reason}); kept all {counted(num_events, 'event')}, facts about the run may be missing"
    if stream.lost_events:
        yield f"left out {counted(stream.lost_events, 'event')} that could not be read (damaged JSON)"
    if stream.repaired:
        places = "place that was" if stream.repaired == 1 else "places that were"
        yield f"repaired {stream.repaired} {places} not valid JSON (control characters, quotes, encoding or numbers)"
    if trailing or source.trailing_bytes:
        yield "ignored what follows the end of the trace: " + (
            f"{source.trailing_bytes} bytes after the gzip stream"
            if source.trailing_bytes
            else f"{len(trailing)} characters beginning {trailing[:20]!r}"
        )


def _no_rows(collected: Collected, stream: EventStream) -> str:
    expected = 'expected complete ones ("ph": "X")'
    if collected.num_begin:
        return f"{counted(collected.num_begin, 'begin/end pair')} and no complete event; {expected}"
    if collected.num_events:
        return f"{counted(collected.num_events, 'event')} and no complete one; {expected}"
    if stream.early_end:
        return f"damaged or truncated before the first event; {expected}"
    if lost := stream.lost_events:
        return f"a list of {counted(lost, 'entry', 'entries')} of which none can be read as an event; {expected}"
    behind = stream.tail[:24].decode("utf-8", "replace").strip() if stream.bare else ""
    return f"an empty list of trace events{f', and {behind!r} behind it' if behind else ''}; {expected}"


def _read_members(stream: EventStream) -> tuple[Mapping[str, Any], str, bool]:
    """(the members without the events, the text after the document, whether nothing of it was lost)."""
    after = repaired_text(stream.tail)[0].decode("utf-8", "replace")
    if stream.bare:
        return {}, after.strip(), True
    before = repaired_text(stream.head)[0].decode("utf-8", "replace").rstrip()
    text = before + '"traceEvents":null' + after
    decoder = json.JSONDecoder(parse_float=_number, parse_constant=lambda _: None, strict=False)
    try:
        members, end = decoder.raw_decode(text)
    except (ValueError, RecursionError):
        return _single_members(text, decoder), "", False
    return members, text[end:].strip(), True


def _number(text: str) -> float | int:
    """Parse a float, or an int if it is one beyond float64's precision: ns may be written with an exponent or a point."""
    value = float(text)
    if abs(value) < _EXACT_FLOAT:
        return value
    try:
        exact = Decimal(text)
    except InvalidOperation:
        return value
    return int(exact) if abs(value) < 1e30 and exact == exact.to_integral_value() else value


def _single_members(text: str, decoder: json.JSONDecoder) -> dict[str, Any]:
    """Read the members of a damaged object one by one."""
    members: dict[str, Any] = {}
    position = 0
    while match := _MEMBER.search(text, position):
        try:
            members[match[1]], position = decoder.raw_decode(text, match.end())
        except (ValueError, RecursionError):
            position = match.end()
    return members
