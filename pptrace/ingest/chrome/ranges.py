"""Join Chrome-trace events of any tool to ranges: begin/end pairs (``ph`` B and E) and complete events (X).

file  = { …, "traceEvents": [ event, … ], … } | [ event, … ]
event = { "ph", "ts" (µs), ["dur"], "pid", "tid", ["name"], ["cat"], ["args"] }

B and E nest within a (pid, tid). An E ends the innermost open range of its name, or, without a name, the innermost one; what was
opened inside it and never closed ends with it. The ``args`` of both are joined, those of E win. (Trace Event Format, Google.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from pptrace.errors import TraceError
from pptrace.ingest.common.byte_source import ByteSource
from pptrace.ingest.common.json_texts import LIMIT_NS, exact_nanoseconds
from pptrace.ingest.common.rank_names import coordinates_of_label, rank_of_value
from pptrace.ingest.kineto.event_stream import EventStream
from pptrace.ingest.kineto.event_types import Decoders
from pptrace.model.wording import counted

Id = str | int
_EXPECTED = "expected begin/end or complete events of a Chrome trace"


_MEGASCAN_IDS = (
    *("microbatch", "micro_batch_index", "model_chunk"),
    *("pp_rk", "dp_rk", "tp_rk", "g_rk", "group", "data"),
)


class RawEvent(msgspec.Struct):
    """An event; its times are the digits in the file."""

    ph: str = ""
    name: Any = None
    cat: Any = None
    ts: msgspec.Raw = msgspec.Raw(b"")
    dur: msgspec.Raw = msgspec.Raw(b"")
    rel_ts: Any = None
    pad_before: Any = None
    duration_wall: Any = None
    microbatch: Any = None
    micro_batch_index: Any = None
    model_chunk: Any = None
    pp_rk: Any = None
    dp_rk: Any = None
    tp_rk: Any = None
    g_rk: Any = None
    group: Any = None
    data: Any = None
    pid: Any = 0
    tid: Any = 0
    args: Any = None


_DECODERS = Decoders(msgspec.json.Decoder(RawEvent), msgspec.json.Decoder(list[RawEvent]), is_lax=True)


@dataclass(frozen=True, slots=True)
class Range:
    """A range; times in ns, ``pid`` and ``tid`` as in the file."""

    name: str
    category: str
    pid: Id
    tid: Id
    start_ns: int
    end_ns: int
    args: Mapping[str, Any]


@dataclass(slots=True)
class ChromeRanges:
    """All ranges of a file in order of start, longer ones first; names of its processes; and warnings of damage."""

    ranges: list[Range] = field(default_factory=list)
    process_names: dict[Id, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def read_ranges(path: Path) -> ChromeRanges:
    """Read the ranges of a file, plain or gzip. Damaged events are left out and counted in ``warnings``.

    Raises:
        TraceError: the file cannot be read, or holds no range.
    """
    with ByteSource(path) as source:
        events, damage = read_events(source)
    if not events:
        raise TraceError(f"{path}: {'; '.join(damage) or 'an empty list of events'}; {_EXPECTED}; check the file")
    result = pair(_on_timeline(events))
    if not result.ranges:
        raise TraceError(
            f"{path}: {len(events)} events and no range among them; {_EXPECTED}; was the recording stopped early?"
        )
    result.warnings[:0] = damage
    return result


def pair(events: Sequence[RawEvent]) -> ChromeRanges:
    """Join begins with their ends, thread by thread in order of time, and add the complete events."""
    result = ChromeRanges()
    named_threads: dict[tuple[Id, Id], str] = {}
    timed: list[tuple[Id, Id, int, RawEvent]] = []
    untimed = 0
    for event in events:
        if event.ph == "M" and isinstance(event.args, dict):
            if event.name == "process_name":
                result.process_names[_id(event.pid)] = str(event.args.get("name", ""))
            elif event.name == "thread_name":
                named_threads[_id(event.pid), _id(event.tid)] = str(event.args.get("name", ""))
        if event.ph not in ("B", "E", "X"):
            continue
        time_ns = _time(event.ts)
        if time_ns is None or (event.ph == "X" and ((length := _time(event.dur)) is None or length < 0)):
            untimed += 1
        else:
            timed.append((_id(event.pid), _id(event.tid), time_ns, event))
    timed.sort(key=lambda entry: (str(entry[0]), str(entry[1]), entry[2]))
    unclosed = orphans = 0
    for (pid, tid), thread in groupby(timed, key=lambda entry: entry[:2]):
        ranges, num_unclosed, num_orphans = _pair_thread(
            pid, tid, [(time_ns, event) for _, _, time_ns, event in thread]
        )
        unclosed, orphans = unclosed + num_unclosed, orphans + num_orphans
        own = coordinates_of_label(named_threads.get((pid, tid), ""))
        if "pp" in own:  # a rank, as in files with a process per pipeline
            coordinates = {**coordinates_of_label(result.process_names.get(pid, "")), **own}
            new_pid = f"{pid} PP {coordinates['pp']} TP {coordinates.get('tp', 0)}"
            args = {f"{axis}_rank": coordinate for axis, coordinate in coordinates.items()}
            ranges = [replace(entry, pid=new_pid, args={**entry.args, **args}) for entry in ranges]
        result.ranges += ranges
    result.ranges = _split_by_rank(result.ranges, result.process_names)
    result.ranges.sort(key=lambda entry: (entry.start_ns, -entry.end_ns))
    if untimed:
        result.warnings.append(f'left out {counted(untimed, "event")} whose "ts" or "dur" is no time in µs')
    if unclosed:
        result.warnings.append(
            f"{counted(unclosed, 'range')} without an end (B without E): read as ending with the enclosing range or the "
            "thread, so that an op may be too long"
        )
    if orphans:
        result.warnings.append(f"left out {counted(orphans, 'end')} of ranges without a begin (E without B)")
    return result


def declared_rank(entry: Range) -> int | None:
    """The rank in a range's arguments; None if there is none."""
    return rank_of_value(entry.args.get("g_rk", entry.args.get("rank")))


def _split_by_rank(ranges: list[Range], process_names: Mapping[Id, str]) -> list[Range]:
    """Split a process whose ranges name several ranks (a replica, in veScale's traces) into one process per rank.

    A range without a rank gets that of its thread, else stays with the process. The process's name may contain coordinates
    ("dp rank[1]").
    """
    rank_of_thread: dict[tuple[Id, Id], int] = {}
    ranks_of_process: dict[Id, set[int]] = {}
    for entry in ranges:
        if (rank := declared_rank(entry)) is not None:
            rank_of_thread.setdefault((entry.pid, entry.tid), rank)
            ranks_of_process.setdefault(entry.pid, set()).add(rank)
    shared = {pid for pid, ranks in ranks_of_process.items() if len(ranks) > 1}
    if not shared:
        return ranges
    split = []
    for entry in ranges:
        rank = declared_rank(entry)
        rank = rank_of_thread.get((entry.pid, entry.tid)) if rank is None else rank
        if entry.pid in shared and rank is not None:
            coordinates = coordinates_of_label(process_names.get(entry.pid, ""))
            rank_args = {f"{axis}_rank": coordinate for axis, coordinate in coordinates.items()}
            entry = replace(entry, pid=f"{entry.pid} rank {rank}", args={**rank_args, **entry.args})
        split.append(entry)
    return split


def _pair_thread(pid: Id, tid: Id, events: Sequence[tuple[int, RawEvent]]) -> tuple[list[Range], int, int]:
    """Pair the events of one thread: (ranges, number of begins without end, number of ends without begin)."""
    stack: list[tuple[RawEvent, int]] = []
    ranges: list[Range] = []
    unclosed = orphans = 0
    last = events[-1][0]

    def close(opened: RawEvent, start_ns: int, end_ns: int, args: object) -> None:
        joined = {**_args(opened.args), **_args(args)}
        ranges.append(Range(_text(opened.name), _text(opened.cat), pid, tid, start_ns, end_ns, joined))

    for time_ns, event in events:
        if event.ph == "B":
            stack.append((event, time_ns))
        elif event.ph == "X":
            end_ns = time_ns + (_time(event.dur) or 0)
            last = max(last, end_ns)
            close(event, time_ns, end_ns, None)
        else:
            names = ("", name) if (name := _text(event.name)) else None
            depth = len(stack) - 1
            while depth >= 0 and names and _text(stack[depth][0].name) not in names:
                depth -= 1
            if depth < 0:
                orphans += 1
                continue
            for opened, start_ns in stack[depth + 1 :]:
                close(opened, start_ns, time_ns, None)
                unclosed += 1
            close(*stack[depth], time_ns, event.args)
            del stack[depth:]
    for opened, start_ns in stack:
        close(opened, start_ns, max(last, start_ns), None)
    return ranges, unclosed + len(stack), orphans


def _time(raw: msgspec.Raw) -> int | None:
    """Convert a number in µs to ns; None if it is no time."""
    text = bytes(raw)
    value = exact_nanoseconds(text) if text else None
    return value if value is not None and abs(value) <= LIMIT_NS else None


def _id(value: object) -> Id:
    return value if isinstance(value, int) else str(value)


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _args(value: object) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}


def read_events(source: ByteSource) -> tuple[list[RawEvent], list[str]]:
    """Decode a document: (events, warnings of damage).

    Raises:
        TraceError: it is empty, no JSON, or has no list of events.
    """
    stream = EventStream(source, decoders=_DECODERS)
    events = [event for batch in stream.batches() for event in batch if event.ph]
    warnings = [source.damage] if source.damage else []
    if stream.damage.early_end:
        warnings.append(f"trace ends early (cut inside the list of events); kept {len(events)} before it")
    if num_lost := stream.damage.lost_events:
        warnings.append(f"left out {counted(num_lost, 'event')} that could not be read (damaged JSON)")
    return events, warnings


def _on_timeline(events: list[RawEvent]) -> list[RawEvent]:
    """Put the events of a MegaScan file of one rank on one clock: their ``rel_ts`` counts ns from the start of the iteration.

    ``pad_before`` of an iteration's begin and ``duration_wall`` of its end (ns) place the iterations. Ids are members of
    the event there and are moved into ``args``. Events of other files are returned unchanged.
    """
    if not any(isinstance(event.rel_ts, int) for event in events):
        return events
    begin, step, on_one_clock = 0, -1, []
    for event in events:
        is_iteration = event.name == "iteration"
        if is_iteration and event.ph == "B":
            begin += event.pad_before if isinstance(event.pad_before, int) else 0
            step += 1
        time_ns = begin + (event.rel_ts if isinstance(event.rel_ts, int) else 0)
        ids = {name: value for name in _MEGASCAN_IDS if (value := getattr(event, name)) is not None}
        raw = msgspec.Raw(f"{time_ns // 1000}.{time_ns % 1000:03d}".encode())
        on_one_clock.append(RawEvent(event.ph, event.name, event.cat, raw, args={**ids, "iteration": max(step, 0)}))
        if is_iteration and event.ph == "E":
            begin += event.duration_wall if isinstance(event.duration_wall, int) else 0
    return on_one_clock
