"""The text of a Chrome trace of any tool → its events, those of a damaged one too.

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
    """One event; its times are their digits in the file."""

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


class _Whole(msgspec.Struct):
    traceEvents: list[RawEvent]  # noqa: N815 — the format's own name


def decode(text: bytes) -> tuple[list[RawEvent], list[str]]:
    """The events of a document, and lines about what of it could not be read."""
    start = text.lstrip()[:1]
    try:
        if start == b"[":
            return msgspec.json.decode(text, type=list[RawEvent]), []
        return msgspec.json.decode(text, type=_Whole).traceEvents, []
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _salvage(text.decode("utf-8", "replace"))


def _salvage(text: str) -> tuple[list[RawEvent], list[str]]:
    """The events that can be read one at a time."""
    place = text.find("[") if text.lstrip()[:1] == "[" else text.find("[", max(text.find('"traceEvents"'), 0))
    decoder = json.JSONDecoder(parse_float=str, parse_int=str, strict=False)
    events: list[RawEvent] = []
    lost, ended = 0, False
    while place >= 0 and (begin := _next_object(text, place + 1)) >= 0:
        try:
            value, end = decoder.raw_decode(text, begin)
        except (ValueError, RecursionError):
            lost += 1
            place = text.find("{", begin + 1) - 1
            if place < 0:
                break
            continue
        place = end - 1
        if (event := _event_of(value)) is not None:
            events.append(event)
        elif isinstance(value, dict):
            lost += "ph" in value
    else:
        ended = place >= 0 and "]" in text[place:]
    warnings = [] if ended else [f"trace ends early (cut inside the list of events); kept {len(events)} before it"]
    return events, [*warnings, *([f"left out {lost} events that could not be read (damaged JSON)"] if lost else [])]


def _next_object(text: str, place: int) -> int:
    """Where the next event of the list begins, -1 where the list ends."""
    while place < len(text) and text[place] in " \t\r\n,":
        place += 1
    if place < len(text) and text[place] == "]":
        return -1
    return text.find("{", place)


def _event_of(value: object) -> RawEvent | None:
    if not isinstance(value, dict) or not isinstance(value.get("ph"), str):
        return None
    raw = {name: msgspec.Raw(str(value.get(name, "")).encode()) for name in ("ts", "dur")}
    rest = {name: _plain(value.get(name)) for name in ("name", "cat", "args", *_MEGASCAN)}
    return RawEvent(ph=value["ph"], pid=_plain(value.get("pid", 0)), tid=_plain(value.get("tid", 0)), **raw, **rest)


def _plain(value: Any) -> Any:
    """A salvaged value with its whole numbers as numbers again."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, str) and value.removeprefix("-").isdecimal() and len(value) < 19:
        return int(value)
    return value


def on_timeline(events: list[RawEvent]) -> list[RawEvent]:
    """Events of MegaScan's file of one rank, whose ``rel_ts`` counts ns from its iteration's begin, on one clock.

    ``pad_before`` of an iteration's begin and ``duration_wall`` of its end (ns) say where the iterations lie. Other fields of an
    event stand beside ``ph`` there, not in ``args``. Events of other files stay as they are.
    """
    if not any(isinstance(event.rel_ts, int) for event in events):
        return events
    begin, step, timed = 0, -1, []
    for event in events:
        is_iteration = event.name == "iteration"
        if is_iteration and event.ph == "B":
            begin += event.pad_before if isinstance(event.pad_before, int) else 0
            step += 1
        at = begin + (event.rel_ts if isinstance(event.rel_ts, int) else 0)
        ids = {name: value for name in _MEGASCAN_IDS if (value := getattr(event, name)) is not None}
        raw = msgspec.Raw(f"{at // 1000}.{at % 1000:03d}".encode())
        timed.append(RawEvent(event.ph, event.name, event.cat, raw, args={**ids, "iteration": max(step, 0)}))
        if is_iteration and event.ph == "E":
            begin += event.duration_wall if isinstance(event.duration_wall, int) else 0
    return timed
