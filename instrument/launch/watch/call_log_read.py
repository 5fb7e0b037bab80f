"""Reads the calls that a rank left in its file (:mod:`instrument.launch.watch.call_log`), from another process, without torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instrument.launch.watch.call_log import (
    CALL,
    CALLS_AT,
    CLASSES,
    COMPLETED,
    FAILED,
    FILE_BYTES,
    HEADER,
    KINDS,
    MAGIC,
    NUM_CALLS,
    POSTED,
    RETURNED,
    STREAM,
    STREAMS_AT,
    TEXTS_AT,
    VERSION,
    WAITING,
)
from pptrace.hang_diagnosis.calls import Call, CallState, Group, Stream

_COLLECTIVE, _SEND, _ = CLASSES


@dataclass(frozen=True, slots=True)
class LoggedCalls:
    """Contents of a rank's file at one moment. ``durations_ns`` are those of the calls that are complete."""

    last_event_ns: int
    calls: tuple[Call, ...]
    num_made: dict[Stream, int]
    durations_ns: tuple[int, ...]


def read_last_event(path: Path) -> int:
    """Time at which the rank's calls last went on, monotonic ns; 0 before the first."""
    try:
        with path.open("rb") as file:
            magic, version, _, _, last_event_ns, _, num_streams, _ = HEADER.unpack(file.read(HEADER.size))
    except (OSError, struct.error):
        return 0
    return last_event_ns if magic == MAGIC and version == VERSION and num_streams else 0


def read_motion(path: Path) -> int:
    """Time at which the rank's script last went from function to function, monotonic ns; 0 where it was not."""
    try:
        with path.open("rb") as file:
            magic, version, _, _, _, _, _, moved_ns = HEADER.unpack(file.read(HEADER.size))
    except (OSError, struct.error):
        return 0
    return int(moved_ns) if magic == MAGIC and version == VERSION else 0


def read_call_log(path: Path, rank: int) -> LoggedCalls | None:
    """The calls of a rank; None where it has not begun to write any."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if len(content) != FILE_BYTES or not content.startswith(MAGIC):
        return None
    _, version, _, _, last_event_ns, texts_end, num_streams, _ = HEADER.unpack_from(content)
    if version != VERSION:
        return None
    groups = _read_groups(content[TEXTS_AT : TEXTS_AT + texts_end])
    rows = [CALL.unpack_from(content, CALLS_AT + index * CALL.size) for index in range(NUM_CALLS)]
    ordered = sorted((row for row in rows if row[0] and row[7] < len(groups)), key=lambda row: row[0])
    calls = tuple(_call(row, groups) for row in ordered)
    durations = tuple(row[6] - row[3] for row in ordered if row[9] == COMPLETED)
    return LoggedCalls(last_event_ns, calls, _read_streams(content, num_streams, groups, rank), durations)


def _read_groups(texts: bytes) -> list[tuple[Group, bool]]:
    """The groups in their order, and whether a device runs their calls."""
    groups: list[tuple[Group, bool]] = []
    for line in texts.splitlines():
        try:
            fields: dict[str, Any] = json.loads(line)
        except ValueError:
            break  # being written
        ranks = tuple(rank for first, count in fields["ranks"] for rank in range(first, first + count))
        named = fields["description"] if fields["description"] != "undefined" else ""
        label = named or fields["axis"] or fields["name"]
        groups.append((Group(fields["name"], ranks, label), bool(fields["on_device"])))
    return groups


def _call(row: Sequence[int], groups: Sequence[tuple[Group, bool]]) -> Call:
    number, num_bytes, sequence, posted_ns, peer, tag, changed_ns, group_index, kind, state, batch = row
    group, on_device = groups[group_index]
    return Call(
        kind=KINDS[kind] if kind < len(KINDS) and kind else "collective",
        group=group,
        seq=sequence,
        state=_state(state, on_device),
        peer=peer,
        num_bytes=num_bytes,
        tag=tag,
        launch=batch if batch >= 0 else NUM_CALLS + number,
        since_ns=changed_ns if state == WAITING else posted_ns,
    )


def _state(state: int, on_device: bool) -> CallState:
    if state in (POSTED, WAITING):
        return CallState.BLOCKING
    if on_device and state in (RETURNED, COMPLETED):
        return CallState.LAUNCHED
    if state == RETURNED:
        return CallState.OFFERED
    return CallState.FAILED if state == FAILED else CallState.DONE


def _read_streams(
    content: bytes, num_streams: int, groups: Sequence[tuple[Group, bool]], rank: int
) -> dict[Stream, int]:
    made: dict[Stream, int] = {}
    for index in range(num_streams):
        group_index, kind, peer, tag, count = STREAM.unpack_from(content, STREAMS_AT + index * STREAM.size)
        if group_index >= len(groups):
            continue
        group = groups[group_index][0]
        ends = {_SEND: (rank, peer), _COLLECTIVE: (-1, -1)}.get(CLASSES[kind], (peer, rank))
        stream = Stream(group, ends[0], ends[1], tag)
        made[stream] = max(made.get(stream, 0), count)
    return made
