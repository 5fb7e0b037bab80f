"""Groups, peers and sizes of calls from the flight-recorder dumps of the same ranks.

A dump has the group, the peer and the size of each call of NCCL, in the order in which the host made them, with its time by the
wall clock; a trace has the times of the same calls, by the same clock or by one of its own. The calls of one kind are held
against each other in their order (:mod:`pptrace.recognise.calls.pair_flight_recorder`). Where a trace shows messages only as
kernels, each launch
of them is one, and may be several messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from pptrace.ingest.flight_recorder.dump import Dump, DumpCall, DumpGroup
from pptrace.marks import P2P
from pptrace.model.tables import CALLS, make_table
from pptrace.model.traces import TraceInfo
from pptrace.recognise.calls.pair_flight_recorder import Launch, is_wall_clock, sides_of
from pptrace.recognise.recognised_rank import RecognisedRank


def with_dumps(
    ranks: Sequence[RecognisedRank], dumps: Sequence[Dump]
) -> tuple[tuple[RecognisedRank, ...], tuple[str, ...]]:
    """Add the groups, peers and sizes in the dumps to the ranks' calls; with warnings.

    What a trace itself says is never changed, and a dump whose calls are not those of the trace changes nothing.
    """
    dump_by_rank: dict[int, Dump] = {}
    unused: dict[str, list[str]] = {}
    for dump in dumps:
        if dump.rank in dump_by_rank or dump.rank not in {recognised.number for recognised in ranks}:
            why = (
                "a second one of its rank: not used"
                if dump.rank in dump_by_rank
                else "no trace is of its rank: not used"
            )
            unused.setdefault(why, []).append(dump.path.name)
        else:
            dump_by_rank[dump.rank] = dump
    kept = []
    counts: dict[int, tuple[int, int]] = {}
    for recognised in ranks:
        named = (
            _name_calls(recognised, dump_by_rank[recognised.number])
            if recognised.number in dump_by_rank
            else _NamedCalls(recognised)
        )
        kept.append(named.recognised)
        if named.count:
            counts[recognised.number] = (named.count, named.total)
        if named.why:
            unused.setdefault(named.why, []).append(dump_by_rank[recognised.number].path.name)
    return tuple(kept), tuple(_lines(counts, unused))


def _lines(counts: Mapping[int, tuple[int, int]], unused: Mapping[str, Sequence[str]]) -> Iterator[str]:
    if counts:
        which = f"rank {next(iter(counts))}" if len(counts) == 1 else f"{len(counts)} ranks"
        named, total = map(sum, zip(*counts.values(), strict=True))
        some = f"{named} of {total}" if named < total else f"all {total}"
        yield (
            f"flight-recorder dumps name the groups, peers and sizes of {some} calls of {which}, found by their order and times"
        )
    for why, names in unused.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"flight-recorder dump {names[0]}{more}: {why}"


@dataclass(frozen=True, slots=True)
class _NamedCalls:
    """A rank with what its dump tells, of how many of all calls of the kinds that both have, and why not of others."""

    recognised: RecognisedRank
    count: int = 0
    total: int = 0
    why: str = ""


def _name_calls(recognised: RecognisedRank, dump: Dump) -> _NamedCalls:
    calls = recognised.calls.sort_values("host_ns", kind="stable")
    sides = list(sides_of(calls, dump))
    if not sides:
        return _NamedCalls(recognised, why="the trace has no calls of the kinds in it: not used")
    num_during_dump = sum(_num_during_dump(side.rows, dump) for side in sides)
    if not num_during_dump:
        return _NamedCalls(
            recognised,
            why="its calls were made at another time than the trace's, or in another run: not used",
        )
    pairs = {side.kind: dict(side.pairs()) for side in sides}
    launches = {index: launch for pairs_of_kind in pairs.values() for index, launch in pairs_of_kind.items()}
    if 2 * len(launches) < num_during_dump:
        return _NamedCalls(
            recognised,
            why="its calls cannot be matched with the trace's, or in several ways: not used",
        )
    undecided = [kind for kind, pairs_of_kind in pairs.items() if not pairs_of_kind]
    why = f"which of its {', '.join(undecided)} calls are which of the trace's cannot be decided" if undecided else ""
    rows = list(_rows(calls, launches))
    table = make_table(CALLS, {name: [row[name] for row in rows] for name in CALLS})
    total = sum(len(side.rows) for side in sides)
    return _NamedCalls(
        replace(recognised, calls=table, info=_with_groups(recognised.info, dump.groups)), len(launches), total, why
    )


def _num_during_dump(rows: pd.DataFrame, dump: Dump) -> int:
    """Count the calls that were made while the dump's were; all of them on a clock of their own."""
    if not is_wall_clock(rows):
        return len(rows)
    times = [call.created_ns for call in dump.calls if call.created_ns >= 0]
    return int(rows["host_ns"].between(min(times), max(times)).sum())


def _rows(calls: pd.DataFrame, launches: Mapping[int, Launch]) -> Iterator[Mapping[Any, Any]]:
    """The calls, a launch of several messages as one row for each."""
    has_sequence_numbers = bool((calls["seq"] >= 0).any())
    for index, row in zip(calls.index.tolist(), calls.to_dict("records"), strict=True):
        for call in launches.get(index, ()):
            completed = _with_facts_of_dump(row, call)
            yield completed if has_sequence_numbers or call.kind in P2P else {**completed, "seq": call.seq}
        if index not in launches:
            yield row


def _with_facts_of_dump(row: Mapping[Any, Any], call: DumpCall) -> dict[Any, Any]:
    """Fill in what the row of a call lacks."""
    group, ranks = call.group, list(call.group.ranks)
    size = len(ranks) or -1
    return {
        **row,
        "kind": call.kind,
        "group_id": row["group_id"] or group.id,
        "description": row["description"] or group.description,
        "group_ranks": row["group_ranks"] or (json.dumps(ranks) if ranks else ""),
        "group_size": row["group_size"] if row["group_size"] > 0 else size,
        "local_peer": row["local_peer"] if row["local_peer"] >= 0 else call.local_peer,
        "bytes": row["bytes"] if row["bytes"] >= 0 else call.bytes,
    }


def _with_groups(info: TraceInfo, groups: Sequence[DumpGroup]) -> TraceInfo:
    """Add the groups of the rank and the world size, where the trace lacks them."""
    config = [
        {"pg_name": group.id, "pg_desc": group.description, "pg_size": len(group.ranks), "ranks": list(group.ranks)}
        for group in groups
        if group.ranks
    ]
    sizes = [len(group.ranks) for group in groups if group.is_world and group.ranks]
    world = {"world_size": sizes[0]} if sizes else {}
    return replace(info, distributed={"pg_config": config, **world, **info.distributed})
