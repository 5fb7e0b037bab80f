"""Decode the events of a Chrome trace of any tool, damaged ones as far as possible.

file  = { …, "traceEvents": [ event, … ], … } | [ event, … ]
event = { "ph", "ts" (µs), ["dur"], "pid", "tid", ["name"], ["cat"], ["args"] }
"""

from __future__ import annotations

from typing import Any

import msgspec

from pptrace.ingest.common.byte_source import ByteSource
from pptrace.ingest.kineto.event_stream import EventStream
from pptrace.ingest.kineto.event_types import Decoders

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
        warnings.append(f"left out {num_lost} events that could not be read (damaged JSON)")
    return events, warnings


def on_timeline(events: list[RawEvent]) -> list[RawEvent]:
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
