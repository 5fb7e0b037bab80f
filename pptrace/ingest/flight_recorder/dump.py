"""Read torch's flight-recorder dumps: the last collectives and messages of a rank, complete or not, as pickle or JSON.

    dump  = { "version", "pg_config": { id: { "name", "desc", "ranks": "[0, 1]" } }, "entries": [ entry, … ],
              "pg_status": { number: { "last_enqueued_collective", "last_completed_collective" } }, … }
    entry = { "profiling_name": "nccl:send 0->1" | "nccl:all_reduce" | …, "process_group": (name, desc), "state",
              "collective_seq_id", "p2p_seq_id", "time_created_ns", "time_discovered_started_ns",
              "time_discovered_completed_ns", "duration_ms", "input_sizes", "output_sizes", "input_dtypes", "is_p2p" }

Of gloo (torch 2.13 and later) no message is recorded, ``state`` stays "scheduled", ``retired`` is the end of a call, and
``pg_config`` names no group.

(Versions 2.0 to 2.10: torch 2.4 to 2.13, torch/csrc/distributed/c10d/FlightRecorder.hpp, TraceUtils.h before; files
nccl_trace_rank_R.) Ranks in a name are ranks within the group. Before version 2, groups are numbers ("pg_id") without members.
The entries of a batch share the sequence numbers of the ``nccl:coalesced`` that follows them: they are launched
together, and only that entry has the state and times of the launch.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from pptrace.errors import TraceError
from pptrace.ingest.common.byte_source import unreadable
from pptrace.ingest.common.rank_names import DTYPE_BYTES, rank_of_dump_name, rank_of_value
from pptrace.marks import P2P
from pptrace.regular import read_regular

_NAME = re.compile(r"(?P<backend>.+):_?(?P<kind>[a-z_]+)(?: \d+(?:->|<-)(?P<peer>\d+))?", re.IGNORECASE)
"""Any backend: who else has a recorder of torch's is as good as those that are known."""
_KINDS = {
    "allreducebarrier": "barrier",
    **{kind.replace("_", ""): kind for kind in ("barrier", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")},
    **{kind: kind for kind in (*P2P, "broadcast", "gather", "scatter", "reduce")},
}
"""Kind by the beginning of a name without underscores, the first that fits."""
_COALESCED = "coalesced"
_WORLD = "default_pg"
_UNNAMED = ("", "undefined")


class DumpGroup(Struct, frozen=True):
    """A process group: ``ranks`` are its global ranks in order, () if the dump lacks them."""

    id: str = ""
    description: str = ""
    ranks: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """A name that is equal on all members, unlike the id."""
        return self.description or self.id

    @property
    def is_world(self) -> bool:
        return self.description == _WORLD

    def member(self, index: int) -> int:
        """The global rank of a rank within the group; the latter itself if the members are unknown."""
        return self.ranks[index] if 0 <= index < len(self.ranks) else index


class DumpCall(Struct, frozen=True):
    """A call. Times are ns of the wall clock, -1 where unknown; ``end_ns`` may be long after the call was over.

    ``launch`` is the index of the launch, which the calls of a batch share. ``local_peer`` is the peer's rank within the group.
    """

    kind: str
    group: DumpGroup
    seq: int
    local_peer: int
    done: bool
    started: bool
    created_ns: int
    start_ns: int
    end_ns: int
    bytes: int
    launch: int = -1
    dtype: str = ""
    backend: str = ""
    raw_group: int = -1  # the number of the group on this rank
    counts: tuple[int, int] = (-1, -1)  # of collectives and of messages in the group

    @property
    def peer(self) -> int:
        return self.group.member(self.local_peer) if self.local_peer >= 0 else -1

    @property
    def key(self) -> tuple[str, str, int]:
        """Identifies a call: equal on all members of the group."""
        return (self.group.name, "p2p" if self.kind in P2P else "collective", self.seq)


class Dump(Struct, frozen=True):
    """The dump of a rank (-1: unknown): its groups, and its last calls in order."""

    path: Path
    rank: int
    version: str
    groups: tuple[DumpGroup, ...]
    calls: tuple[DumpCall, ...]
    is_whole: bool = True
    """True if the first call is the rank's first; the recorder keeps only the last ones."""
    last_enqueued: Mapping[int, int] = field(default_factory=dict)
    """The number of the last call enqueued in a group, by the group's number on this rank."""
    last_completed: Mapping[int, int] = field(default_factory=dict)
    """The number of the last call that is complete, in the same way."""

    @property
    def numbered_groups(self) -> dict[int, DumpGroup]:
        """The groups with a status by their number on this rank.

        A dump of open calls alone has none of some groups. Their numbers rise as names of groups do, in the order in which they
        were made.
        """
        known = {call.raw_group: call.group for call in self.calls if call.raw_group in self.last_enqueued}
        by_name = {name: group for group in self.groups if (name := rank_of_value(group.id)) is not None}
        if not len(by_name) == len(self.groups) == len(self.last_enqueued):
            return known
        in_order = {
            number: by_name[name] for number, name in zip(sorted(self.last_enqueued), sorted(by_name), strict=True)
        }
        agrees = all(in_order[number].id == group.id for number, group in known.items())
        return in_order | known if agrees else known


def read_dump(path: Path) -> Dump:
    """Read a dump.

    Raises:
        TraceError: the file is damaged, or holds more than plain values.
    """
    try:
        content = read_regular(path)
    except OSError as err:
        raise unreadable(path, err) from err
    try:
        document = _PlainUnpickler(io.BytesIO(content)).load() if content[:1] == b"\x80" else json.loads(content)
    except _UNPICKLING_ERRORS as err:
        reason = str(err).split("\n", 1)[0][:100]
        raise TraceError(f"{path}: damaged dump ({reason}); expected plain values of torch's flight recorder") from err
    except (MemoryError, RecursionError, ImportError) as err:
        raise TraceError(f"{path}: damaged dump; expected plain values of torch's flight recorder") from err
    if not isinstance(document, dict) or not isinstance(document.get("entries"), list):
        raise TraceError(f"{path}: no list of entries in it; expected a dump of torch's flight recorder; dump it again")
    groups = _groups(document.get("pg_config"))
    entries = document["entries"]
    calls = tuple(_calls(entries, groups))
    declared_rank = rank_of_value(document.get("rank"))
    file_rank = rank_of_dump_name(path.name)
    rank = declared_rank if declared_rank is not None else file_rank if file_rank is not None else -1
    first = entries[0].get("record_id") if entries and isinstance(entries[0], dict) else None
    status = document.get("pg_status")
    return Dump(
        path,
        rank,
        str(document.get("version")),
        tuple(dict.fromkeys(groups.values())),
        calls,
        is_whole=first in (None, 0),
        last_enqueued=_last(status, "enqueued"),
        last_completed=_last(status, "completed"),
    )


def _last(status: object, what: str) -> dict[int, int]:
    """The number of the last call of each group that is enqueued, or completed."""
    return {
        int(key): last
        for key, group in (status.items() if isinstance(status, dict) else ())
        if isinstance(group, dict)
        and str(key).isdecimal()
        and (last := rank_of_value(group.get(f"last_{what}_collective"))) is not None
    }


def read_dumps(paths: Sequence[Path]) -> tuple[tuple[Dump, ...], tuple[str, ...]]:
    """Read dumps: (readable ones, a warning for each other one)."""
    dumps: list[Dump] = []
    warnings: list[str] = []
    for path in paths:
        try:
            dumps.append(read_dump(path))
        except TraceError as err:
            warnings.append(f"{err} (left out; the traces are read without it)")
    return tuple(dumps), tuple(warnings)


class _PlainUnpickler(pickle.Unpickler):
    """Unpickle containers, texts and numbers only: a class or function in the pickle is refused before it is imported."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError(f"it refers to {str(pid)[:40]}, which is outside of the file")


_UNPICKLING_ERRORS = (
    *(pickle.UnpicklingError, EOFError, ArithmeticError, LookupError, ValueError, TypeError, AttributeError),
)


def _groups(config: object) -> dict[str, DumpGroup]:
    """The groups, by name and by id."""
    groups: dict[str, DumpGroup] = {}
    for key, entry in config.items() if isinstance(config, dict) else []:
        if not isinstance(entry, dict):
            continue
        ranks = entry.get("ranks")
        if isinstance(ranks, str):
            ranks = [int(part) for part in re.findall(r"\d{1,9}", ranks)]
        has_ranks = isinstance(ranks, list | tuple) and all(_number(rank) in range(2**31) for rank in ranks)
        name, description = str(entry.get("name", key)), str(entry.get("desc", ""))
        group = DumpGroup(
            name, "" if description in _UNNAMED else description, tuple(ranks) if has_ranks and ranks else ()
        )
        groups[str(key)] = groups[name] = group
    return groups


def _calls(entries: list[Any], groups: Mapping[str, DumpGroup]) -> Iterator[DumpCall]:
    """Yield the calls in order; those of a batch get the state and times of the batch's final entry."""
    pending: list[DumpCall] = []
    for launch, entry in enumerate(entries):
        call = _call(entry, groups, launch) if isinstance(entry, dict) else None
        if call is None:
            continue
        if call.kind == _COALESCED:
            pending = [
                replace(
                    member,
                    launch=call.launch,
                    done=call.done or member.done,
                    started=call.started or member.started,
                    start_ns=call.start_ns,
                    end_ns=call.end_ns,
                )
                if (member.group, member.counts) == (call.group, call.counts)
                else member
                for member in pending
            ]
            continue
        if pending and (pending[-1].group, pending[-1].counts) != (call.group, call.counts):
            yield from pending
            pending = []
        pending.append(call)
    yield from pending


def _call(entry: Mapping[str, Any], groups: Mapping[str, DumpGroup], launch: int) -> DumpCall | None:
    match = _NAME.match(str(entry.get("profiling_name", "")))
    if match is None:
        return None
    name_in_torch = match["kind"].lower()
    plain = name_in_torch.replace("_", "")
    kind = next((kind for prefix, kind in _KINDS.items() if plain.startswith(prefix)), name_in_torch)
    created = _number(entry.get("time_created_ns"))
    start = _number(entry.get("time_discovered_started_ns"))
    start = start if start > 0 else created
    duration, end = entry.get("duration_ms"), _number(entry.get("time_discovered_completed_ns"))
    if isinstance(duration, int | float) and math.isfinite(duration) and 0 <= duration < 1e12:
        end = start + round(duration * 1e6)
    shared_count = entry.get("seq_id")  # early versions count messages and collectives together
    counts = _number(entry.get("collective_seq_id", shared_count)), _number(entry.get("p2p_seq_id", shared_count))
    backend = match["backend"].lower()
    sides = (entry.get(f"{side}_dtypes") for side in ("input", "output"))
    dtypes = {str(dtype) for side in sides if isinstance(side, list | tuple) for dtype in side}
    is_done = entry.get("state") == "completed" or (backend == "gloo" and entry.get("retired") is True)
    return DumpCall(
        kind=kind,
        group=_group_of(entry, groups),
        seq=counts[kind in P2P],
        local_peer=int(match["peer"]) if match["peer"] and len(match["peer"]) < 9 else -1,
        done=is_done,
        started=entry.get("state") == "started",
        created_ns=created,
        start_ns=start,
        end_ns=end,
        bytes=max(_bytes(entry.get(f"{side}_sizes"), entry.get(f"{side}_dtypes")) for side in ("input", "output")),
        launch=launch,
        dtype=dtypes.pop() if len(dtypes) == 1 else "",
        backend=backend,
        raw_group=_number(entry.get("pg_id")),
        counts=counts,
    )


def _group_of(entry: Mapping[str, Any], groups: Mapping[str, DumpGroup]) -> DumpGroup:
    name_and_description = entry.get("process_group")
    if not isinstance(name_and_description, list | tuple) or len(name_and_description) < 2:
        return DumpGroup(description=_WORLD if entry.get("pg_id") == 0 else "")
    name, description = str(name_and_description[0]), str(name_and_description[1])
    group = groups.get(name, DumpGroup(name))
    return group if description in _UNNAMED else replace(group, description=description)


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62 else -1


def _bytes(sizes: object, dtypes: object) -> int:
    """Bytes of the tensors of one side; -1 if sizes or types are unknown."""
    if not isinstance(sizes, list | tuple) or not isinstance(dtypes, list | tuple) or len(sizes) != len(dtypes):
        return -1
    total = 0
    for shape, dtype in zip(sizes, dtypes, strict=True):
        width = DTYPE_BYTES.get(str(dtype).lower())
        is_shape = isinstance(shape, list | tuple) and all(
            isinstance(size, int) and 0 <= size < 2**40 for size in shape
        )
        if width is None or not is_shape or len(shape) > 16:
            return -1
        total += math.prod(shape) * width
    return total if total < 2**62 else -1
