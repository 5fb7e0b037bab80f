"""Decode the events of a Chrome trace of any tool, damaged ones as far as possible.

file  = { …, "traceEvents": [ event, … ], … } | [ event, … ]
event = { "ph", "ts" (µs), ["dur"], "pid", "tid", ["name"], ["cat"], ["args"] }
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

_MEGASCAN_IDS = (
    *("microbatch", "micro_batch_index", "model_chunk"),
    *("pp_rk", "dp_rk", "tp_rk", "g_rk", "group", "data"),
)
_MEGASCAN = ("rel_ts", "pad_before", "duration_wall", *_MEGASCAN_IDS)


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


class _Document(msgspec.Struct):
    traceEvents: list[RawEvent]  # noqa: N815 — the format's own name


def decode(text: bytes) -> tuple[list[RawEvent], list[str]]:
    """Decode a document: (events, warnings of events that could not be read)."""
    start = text.lstrip()[:1]
    try:
        if start == b"[":
            return msgspec.json.decode(text, type=list[RawEvent]), []
        return msgspec.json.decode(text, type=_Document).traceEvents, []
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _salvage(text.decode("utf-8", "replace"))


def _salvage(text: str) -> tuple[list[RawEvent], list[str]]:
    """Decode event by event, skipping damaged ones."""
    position = text.find("[") if text.lstrip()[:1] == "[" else text.find("[", max(text.find('"traceEvents"'), 0))
    decoder = json.JSONDecoder(parse_float=str, parse_int=str, strict=False)
    events: list[RawEvent] = []
    num_lost, is_list_closed = 0, False
    while position >= 0 and (begin := _next_object(text, position + 1)) >= 0:
        try:
            value, end = decoder.raw_decode(text, begin)
        except (ValueError, RecursionError):
            num_lost += 1
            position = text.find("{", begin + 1) - 1
            if position < 0:
                break
            continue
        position = end - 1
        if (event := _event_of(value)) is not None:
            events.append(event)
        elif isinstance(value, dict):
            num_lost += "ph" in value
    else:
        is_list_closed = position >= 0 and "]" in text[position:]
    warnings = (
        [] if is_list_closed else [f"trace ends early (cut inside the list of events); kept {len(events)} before it"]
    )
    return events, [
        *warnings,
        *([f"left out {num_lost} events that could not be read (damaged JSON)"] if num_lost else []),
    ]


def _next_object(text: str, position: int) -> int:
    """Position of the next event in the list, -1 at its end."""
    while position < len(text) and text[position] in " \t\r\n,":
        position += 1
    if position < len(text) and text[position] == "]":
        return -1
    return text.find("{", position)


def _event_of(value: object) -> RawEvent | None:
    if not isinstance(value, dict) or not isinstance(value.get("ph"), str):
        return None
    raw = {name: msgspec.Raw(str(value.get(name, "")).encode()) for name in ("ts", "dur")}
    others = {name: _plain(value.get(name)) for name in ("name", "cat", "args", *_MEGASCAN)}
    return RawEvent(ph=value["ph"], pid=_plain(value.get("pid", 0)), tid=_plain(value.get("tid", 0)), **raw, **others)


def _plain(value: Any) -> Any:
    """Convert the integers of a salvaged value back from text."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, str) and value.removeprefix("-").isdecimal() and len(value) < 19:
        return int(value)
    return value


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
