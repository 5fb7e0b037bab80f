"""Reader of torch's flight-recorder dumps: the last collectives of a rank, finished or not, as pickle or JSON.

    dump  = { "version", "pg_config": { id: { "name", "desc", "ranks": "[0, 1]" } }, "entries": [ entry, … ], … }
    entry = { "profiling_name": "nccl:send 0->1" | "nccl:all_reduce" | …, "process_group": (name, desc), "state",
              "collective_seq_id", "p2p_seq_id", "time_created_ns", "time_discovered_started_ns",
              "time_discovered_completed_ns", "duration_ms", "input_sizes", "output_sizes", "input_dtypes", "is_p2p" }

(torch 2.5 to 2.13, torch/csrc/distributed/c10d/FlightRecorder.hpp; files nccl_trace_rank_R.) A dump has communication and no ops.
Its use is to say what a run that hangs waits for: a call that is not complete is held against the dumps beside this one.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pptrace.errors import TraceError
from pptrace.ingest.identity import rank_of_file_name, rank_of_value
from pptrace.ingest.oplog_trace import Tables, comms_table, ops_table
from pptrace.ingest.source import unreadable

_NAME = re.compile(
    r"(?:nccl|gloo|rccl|xccl|hccl|ucc):_?(?P<kind>[a-z_]+)(?: (?P<own>\d+)(?:->|<-)(?P<peer>\d+))?", re.IGNORECASE
)
_KINDS = {
    "all_reduce": ("all_reduce", "allreduce"),
    "all_gather": ("all_gather", "allgather"),
    "reduce_scatter": ("reduce_scatter",),
    "all_to_all": ("all_to_all", "alltoall"),
    "send": ("send",),
    "recv": ("recv",),
    "broadcast": ("broadcast",),
    "barrier": ("barrier",),
    "gather": ("gather",),
    "scatter": ("scatter",),
    "reduce": ("reduce",),
}
_AXES = {
    "pp": re.compile(r"pipeline|\bpp\b|mesh_pp", re.IGNORECASE),
    "tp": re.compile(r"tensor|\btp\b|mesh_tp", re.IGNORECASE),
    "cp": re.compile(r"context|\bcp\b|mesh_cp", re.IGNORECASE),
    "ep": re.compile(r"expert|\bep\b|mesh_ep", re.IGNORECASE),
    "dp": re.compile(r"data_parallel|\bdp\b|fsdp|mesh_dp", re.IGNORECASE),
}
_ITEM_BYTES = {"double": 8, "long": 8, "float": 4, "int": 4, "half": 2, "bfloat16": 2, "char": 1, "byte": 1, "bool": 1}
_MOST_SHOWN = 5
_NOT_A_NUMBER = -1


@dataclass(frozen=True, slots=True)
class _Call:
    """One entry. ``ranks`` are the group's global ranks, () where unknown; times are ns, -1 where unknown."""

    kind: str
    group: str
    ranks: tuple[int, ...]
    seq: int
    peer: int
    done: bool
    started: bool
    start_ns: int
    end_ns: int
    bytes: int

    @property
    def key(self) -> tuple[str, str, int]:
        """The same on every member of the group."""
        return (self.group, "p2p" if self.kind in ("send", "recv") else "collective", self.seq)


class _Plain(pickle.Unpickler):
    """Containers, texts and numbers alone: a pickle that names any class or function is refused before it is looked up."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError(f"it refers to {str(pid)[:40]}, which lies outside of it")


def sniff_flight(start: bytes) -> bool:
    told = b"pg_config" in start or b"profiling_name" in start
    is_json = start.lstrip()[:1] == b"{" and b'"traceEvents"' not in start and b'"distributedInfo"' not in start
    is_pickle = start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")
    return told and (is_pickle or (is_json and (b'"entries"' in start or b'"pg_status"' in start)))


def read_flight(path: Path) -> Tables:
    """The communication in a dump, and what of it is not complete, as warnings.

    Raises:
        TraceError: the file is damaged, holds more than plain values, or has no entries.
    """
    document = _document(path)
    rank = _rank(path, document)
    calls = _calls(document)
    if not calls:
        raise TraceError(
            f"{path}: a flight-recorder dump without entries; expected collectives; was TORCH_FR_BUFFER_SIZE 0?"
        )
    timed = [call for call in calls if call.start_ns >= 0 and call.end_ns >= call.start_ns]
    comms = comms_table(
        {
            "kind": [call.kind for call in timed],
            "rank": [rank] * len(timed),
            "axis": [_axis(call.group) for call in timed],
            "peer": [call.peer for call in timed],
            "group_size": [2 if call.kind in ("send", "recv") else len(call.ranks) or -1 for call in timed],
            "bytes": [call.bytes for call in timed],
            "start_ns": [call.start_ns for call in timed],
            "end_ns": [call.end_ns for call in timed],
            "clock": ["host"] * len(timed),
        },
        len(timed),
    )
    version = document.get("version")
    ops = ops_table({"kind": [], "start_ns": [], "end_ns": []}, 0)
    return Tables(
        "", f"torch flight recorder {version}", ops, comms, warnings=tuple(_stuck(path, rank, calls)), only_rank=rank
    )


def _document(path: Path) -> Mapping[str, Any]:
    try:
        content = path.read_bytes()
    except OSError as err:
        raise unreadable(path, err) from err
    try:
        document = _Plain(io.BytesIO(content)).load() if content[:1] == b"\x80" else json.loads(content)
    except (
        pickle.UnpicklingError,
        EOFError,
        ArithmeticError,
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
    ) as err:
        raise TraceError(
            f"{path}: damaged dump ({_line(err)}); expected plain values of torch's flight recorder"
        ) from err
    except (MemoryError, RecursionError, ImportError) as err:
        raise TraceError(f"{path}: damaged dump; expected plain values of torch's flight recorder") from err
    if not isinstance(document, dict) or not isinstance(document.get("entries"), list):
        raise TraceError(f"{path}: no list of entries in it; expected a dump of torch's flight recorder; dump it again")
    return document


def _line(err: Exception) -> str:
    return str(err).split("\n", 1)[0][:100]


def _rank(path: Path, document: Mapping[str, Any]) -> int:
    said = rank_of_value(document.get("rank"))
    named = rank_of_file_name(path.name)
    return -1 if said is None and named is None else said if said is not None else named if named is not None else -1


def _calls(document: Mapping[str, Any]) -> list[_Call]:
    groups = _groups(document.get("pg_config"))
    return [
        call for entry in document["entries"] if isinstance(entry, dict) and (call := _call(entry, groups)) is not None
    ]


def _groups(config: object) -> dict[str, tuple[int, ...]]:
    """The global ranks of each group, by its name and by its id."""
    found: dict[str, tuple[int, ...]] = {}
    for key, group in config.items() if isinstance(config, dict) else []:
        if not isinstance(group, dict):
            continue
        ranks = group.get("ranks")
        if isinstance(ranks, str):
            ranks = [int(part) for part in re.findall(r"\d{1,9}", ranks)]
        if isinstance(ranks, list | tuple) and all(isinstance(rank, int) for rank in ranks):
            found[str(key)] = found[str(group.get("name", key))] = tuple(ranks)
    return found


def _call(entry: Mapping[str, Any], groups: Mapping[str, tuple[int, ...]]) -> _Call | None:
    match = _NAME.match(str(entry.get("profiling_name", "")))
    if match is None:
        return None
    kind = next(
        (kind for kind, words in _KINDS.items() if match["kind"].lower().startswith(words)), match["kind"].lower()
    )
    given = entry.get("process_group")
    name, description = (
        (str(given[0]), str(given[1])) if isinstance(given, list | tuple) and len(given) > 1 else ("", "")
    )
    ranks = groups.get(name, ())
    peer = int(match["peer"]) if match["peer"] and len(match["peer"]) < 9 else -1
    seq = _number(entry.get("p2p_seq_id" if kind in ("send", "recv") else "collective_seq_id"))
    start = _number(entry.get("time_discovered_started_ns"))
    start = start if start > 0 else _number(entry.get("time_created_ns"))
    duration, end = entry.get("duration_ms"), _number(entry.get("time_discovered_completed_ns"))
    if isinstance(duration, int | float) and math.isfinite(duration) and 0 <= duration < 1e12:
        end = start + round(duration * 1e6)
    return _Call(
        kind=kind,
        group=description if description not in ("", "undefined") else name,
        ranks=ranks,
        seq=seq,
        peer=ranks[peer] if 0 <= peer < len(ranks) else peer,
        done=entry.get("state") == "completed",
        started=entry.get("state") == "started",
        start_ns=start,
        end_ns=end,
        bytes=_bytes(entry),
    )


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62 else _NOT_A_NUMBER


def _bytes(entry: Mapping[str, Any]) -> int:
    """Of the larger side; -1 where sizes or types are not told."""
    totals = [_side_bytes(entry.get(f"{side}_sizes"), entry.get(f"{side}_dtypes")) for side in ("input", "output")]
    return max(totals)


def _side_bytes(sizes: object, dtypes: object) -> int:
    if not isinstance(sizes, list | tuple) or not isinstance(dtypes, list | tuple) or len(sizes) != len(dtypes):
        return -1
    total = 0
    for shape, dtype in zip(sizes, dtypes, strict=True):
        width = _ITEM_BYTES.get(str(dtype).lower())
        good = isinstance(shape, list | tuple) and all(isinstance(size, int) and 0 <= size < 2**40 for size in shape)
        if width is None or not good or len(shape) > 16:
            return -1
        total += math.prod(shape) * width
    return total if total < 2**62 else -1


def _axis(group: str) -> str:
    return next((axis for axis, pattern in _AXES.items() if pattern.search(group)), "unknown")


def _stuck(path: Path, rank: int, calls: Sequence[_Call]) -> Iterator[str]:
    """A line for each call that is not complete, the oldest first."""
    open_calls = [call for call in calls if not call.done]
    others = _others(path) if open_calls else {}
    who = "this rank" if rank < 0 else f"rank {rank}"
    for call in open_calls[:_MOST_SHOWN]:
        peer = f" with rank {call.peer}" if call.peer >= 0 else ""
        group = f"of group {call.group}" if call.group else "of a group without a name"
        verb = "waits in" if call.started else "has not begun"
        yield f"{who} {verb} {call.kind}{peer}, seq {call.seq} {group}{_elsewhere(call, rank, others)}"
    if len(open_calls) > _MOST_SHOWN:
        yield f"{who}: {len(open_calls) - _MOST_SHOWN} more calls are not complete"


def _elsewhere(call: _Call, rank: int, others: Mapping[int, Mapping[tuple[str, str, int], bool]]) -> str:
    """What the dumps of the other members say of the same call."""
    if call.kind in ("send", "recv"):
        return ""  # their numbers count for each pair of ranks
    members = [other for other in others if other != rank and (not call.ranks or other in call.ranks)]
    finished = [other for other in members if others[other].get(call.key) is True]
    waiting = [other for other in members if others[other].get(call.key) is False]
    absent = [other for other in members if call.key not in others[other]]
    parts = [("finished", finished), ("not complete either", waiting), ("never called", absent)]
    told = [f"{what} on rank {', '.join(map(str, ranks))}" for what, ranks in parts if ranks]
    return f": {'; '.join(told)}" if told else ""


def _others(path: Path) -> Mapping[int, Mapping[tuple[str, str, int], bool]]:
    """For each rank with a dump beside this one: its calls, and which are complete."""
    number = re.compile(r"\d+(?!.*\d)")
    if number.search(path.name) is None:
        return {}
    same = re.compile(re.escape(number.sub("\0", path.name)).replace("\0", r"\d+"))
    files = [other for other in sorted(path.parent.iterdir()) if same.fullmatch(other.name) and other.is_file()]
    return _states(tuple((str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files))


@lru_cache(maxsize=2)
def _states(stamps: tuple[tuple[str, int, int], ...]) -> Mapping[int, Mapping[tuple[str, str, int], bool]]:
    states: dict[int, Mapping[tuple[str, str, int], bool]] = {}
    for name, _, _ in stamps:
        try:
            document = _document(Path(name))
        except TraceError:
            continue  # its own reading says what is wrong with it
        states[_rank(Path(name), document)] = {call.key: call.done for call in _calls(document)}
    return states
