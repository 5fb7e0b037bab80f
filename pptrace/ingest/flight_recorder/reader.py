"""Read flight-recorder dumps (:mod:`pptrace.ingest.flight_recorder.dump`) of a run without traces.

A dump has communication and no ops. It shows what a hung run waits for: each incomplete call is compared with the dumps of the
other ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from pptrace.axes import MESH_ORDER, SHARING
from pptrace.errors import TraceError
from pptrace.ingest.flight_recorder.dump import DumpCall, read_dump
from pptrace.ingest.ops.build import Tables
from pptrace.marks import P2P
from pptrace.model.tables import OPS, comms_table, empty_table

_WORDS = {"pp": "pipeline|", "tp": "tensor|", "cp": "context|", "ep": "expert|", "dp": "data_parallel|fsdp|"}
_AXES = {
    axis: re.compile(rf"{_WORDS.get(axis, '')}\b{axis}\b|mesh_{axis}", re.IGNORECASE)
    for axis in dict.fromkeys([*_WORDS, *map(str, MESH_ORDER), *map(str, SHARING)])
}
_MAX_SHOWN = 5
DUMP_PRODUCER = "torch flight recorder"
NO_CALLS = (
    "a flight-recorder dump without entries: no call of this rank was recorded; "
    "was TORCH_FR_BUFFER_SIZE 0, or had it ended?"
)


def read_flight(path: Path) -> Tables:
    """Read the communication in a dump, with a warning for each incomplete call.

    Raises:
        TraceError: the file is damaged, or holds more than plain values.
    """
    dump = read_dump(path)

    def axis_of(group: str) -> str:
        return next((axis for axis, pattern in _AXES.items() if pattern.search(group)), "unknown")

    timed = [call for call in dump.calls if call.start_ns >= 0 and call.end_ns >= call.start_ns]
    comms = comms_table(
        {
            "kind": [call.kind for call in timed],
            "rank": dump.rank,
            "step": 0,
            "axis": [axis_of(call.group.name) for call in timed],
            "peer": [call.peer for call in timed],
            "group_size": [2 if call.kind in P2P else len(call.group.ranks) or -1 for call in timed],
            "bytes": [call.bytes for call in timed],
            "start_ns": [call.start_ns for call in timed],
            "end_ns": [call.end_ns for call in timed],
        }
    )
    ops = empty_table(OPS)
    warnings = tuple(_stuck(path, dump.rank, dump.calls)) if dump.calls else (NO_CALLS,)
    return Tables("", f"{DUMP_PRODUCER} {dump.version}", ops, comms, warnings=warnings, only_rank=dump.rank)


def _stuck(path: Path, rank: int, calls: Sequence[DumpCall]) -> Iterator[str]:
    """Yield a warning for each incomplete call, the oldest first."""
    open_calls = [call for call in calls if not call.done]
    others = _calls_of_other_ranks(path) if open_calls else {}
    who = "this rank" if rank < 0 else f"rank {rank}"
    for call in open_calls[:_MAX_SHOWN]:
        peer = f" with rank {call.peer}" if call.peer >= 0 else ""
        group = f"of group {call.group.name}" if call.group.name else "of a group without a name"
        verb = "waits in" if call.started else "has not begun"
        yield f"{who} {verb} {call.kind}{peer}, seq {call.seq} {group}{_state_on_others(call, rank, others)}"
    if len(open_calls) > _MAX_SHOWN:
        yield f"{who}: {len(open_calls) - _MAX_SHOWN} more calls are not complete"


def _state_on_others(call: DumpCall, rank: int, others: Mapping[int, Mapping[tuple[str, str, int], bool]]) -> str:
    """The state of the same call in the dumps of the group's other members, as text."""
    if call.kind in P2P:
        return ""  # messages are numbered per pair of ranks
    members = [other for other in others if other != rank and (not call.group.ranks or other in call.group.ranks)]
    finished = [other for other in members if others[other].get(call.key) is True]
    waiting = [other for other in members if others[other].get(call.key) is False]
    absent = [other for other in members if call.key not in others[other]]
    states = [("finished", finished), ("not complete either", waiting), ("never called", absent)]
    parts = [f"{state} on rank {', '.join(map(str, ranks))}" for state, ranks in states if ranks]
    return f": {'; '.join(parts)}" if parts else ""


def _calls_of_other_ranks(path: Path) -> Mapping[int, Mapping[tuple[str, str, int], bool]]:
    """Calls, and whether each is complete, of each rank with a dump in the same directory."""
    number = re.search(r"\d+(?!.*\d)", path.name)
    if number is None:
        return {}
    same_name = re.compile(rf"{re.escape(path.name[: number.start()])}\d+{re.escape(path.name[number.end() :])}")
    files = [other for other in sorted(path.parent.iterdir()) if same_name.fullmatch(other.name) and other.is_file()]
    return _states(tuple((str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files))


@lru_cache(maxsize=2)
def _states(stamps: tuple[tuple[str, int, int], ...]) -> Mapping[int, Mapping[tuple[str, str, int], bool]]:
    states: dict[int, Mapping[tuple[str, str, int], bool]] = {}
    for name, _, _ in stamps:
        try:
            dump = read_dump(Path(name))
        except TraceError:
            continue  # reported when that file itself is read
        states[dump.rank] = {call.key: call.done for call in dump.calls}
    return states
