"""Groups, peers and sizes of calls from the flight-recorder dumps of the same ranks.

A dump has the group, the peer and the size of each call of NCCL, in the order in which the host made them, with its time by the
wall clock; a trace has the times of the same calls, by the same clock or by one of its own. The calls of one kind are held
against each other in their order, anchored in time. Where a trace shows messages only as kernels, each launch of them is one, and
may be several messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd
from msgspec.structs import replace

from pptrace.ingest.flight_recorder.dump import Dump, DumpCall
from pptrace.marks import P2P
from pptrace.model.tables import CALLS, make_table
from pptrace.recognise.recognised_rank import RecognisedRank

_FUSED = "send_recv"
_FAR_NS = 5_000_000
"""A call is recorded within this of its beginning on the host: tracebacks are gathered first."""
_DISTINCT = 2
"""Any other pairing has to be this many times as far off in time."""
_LEAST_PAIRS = 3
_WALL_CLOCK_NS = 10**18  # before 2001 no profiler ran: such times count from a beginning of their own

_Launch = Sequence[DumpCall]
"""The calls that the host launched together; one, but for batches of messages."""
_Side = tuple[str, pd.DataFrame, Sequence[_Launch]]
"""(kind, its calls in a trace as rows in the order of the host, what the dump has of it launch by launch)."""


def with_dumps(
    ranks: Sequence[RecognisedRank], dumps: Sequence[Dump]
) -> tuple[tuple[RecognisedRank, ...], tuple[str, ...]]:
    """Add the groups, peers and sizes in the dumps to the ranks' calls; with warnings.

    What a trace itself says is never changed, and a dump whose calls are not those of the trace changes nothing.
    """
    numbers = {recognised.number for recognised in ranks}
    dump_by_rank: dict[int, Dump] = {}
    unused: dict[str, list[str]] = {}
    for dump in dumps:
        if dump.rank in dump_by_rank:
            unused.setdefault("a second one of its rank: not used", []).append(dump.path.name)
        elif dump.rank not in numbers:
            unused.setdefault("no trace is of its rank: not used", []).append(dump.path.name)
        else:
            dump_by_rank[dump.rank] = dump
    named = list(ranks)
    counts: dict[int, tuple[int, int]] = {}
    for index, recognised in enumerate(ranks):
        if (used := dump_by_rank.get(recognised.number)) is not None:
            named[index], count, total, why = _name_calls(recognised, used)
            if count:
                counts[recognised.number] = (count, total)
            if why:
                unused.setdefault(why, []).append(used.path.name)
    return tuple(named), tuple(_lines(counts, unused))


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


def _name_calls(recognised: RecognisedRank, dump: Dump) -> tuple[RecognisedRank, int, int, str]:
    """(the rank with what its dump tells, of how many of all calls of the kinds that both have, why not of others)."""
    calls = recognised.calls.sort_values("host_ns", kind="stable")
    sides = list(_sides(calls, dump))
    if not sides:
        return recognised, 0, 0, "the trace has no calls of the kinds in it: not used"
    times = [call.created_ns for call in dump.calls if call.created_ns >= 0]
    # Those that were made while the dump's were; all of them on a clock of their own.
    num_during_dump = sum(
        int(rows["host_ns"].between(min(times), max(times)).sum()) if _is_wall_clock(rows) else len(rows)
        for _, rows, _ in sides
    )
    if not num_during_dump:
        return recognised, 0, 0, "its calls were made at another time than the trace's, or in another run: not used"
    is_anchored = _is_wall_clock(calls)
    pairs = {kind: _pairs(kind, rows, launches, is_anchored) for kind, rows, launches in sides}
    launches = {index: launch for pairs_of_kind in pairs.values() for index, launch in pairs_of_kind.items()}
    if 2 * len(launches) < num_during_dump:
        return recognised, 0, 0, "its calls cannot be matched with the trace's, or in several ways: not used"
    undecided = [kind for kind, pairs_of_kind in pairs.items() if not pairs_of_kind]
    why = f"which of its {', '.join(undecided)} calls are which of the trace's cannot be decided" if undecided else ""
    rows = list(_rows(calls, launches))
    table = make_table(CALLS, {name: [row[name] for row in rows] for name in CALLS})
    # The groups of the rank and the world size, where the trace lacks them.
    groups = [group for group in dump.groups if group.ranks]
    config = [
        {"pg_name": group.id, "pg_desc": group.description, "pg_size": len(group.ranks), "ranks": list(group.ranks)}
        for group in groups
    ]
    sizes = [len(group.ranks) for group in groups if group.is_world]
    world = {"world_size": sizes[0]} if sizes else {}
    distributed = {"pg_config": config, **world, **recognised.info.distributed}
    info = replace(recognised.info, distributed=distributed)
    return replace(recognised, calls=table, info=info), len(launches), sum(len(rows) for _, rows, _ in sides), why


def _is_wall_clock(calls: pd.DataFrame) -> bool:
    return bool((calls["host_ns"] > _WALL_CLOCK_NS).all())


def _sides(calls: pd.DataFrame, dump: Dump) -> Iterator[_Side]:
    """The kinds of calls that both the trace and the dump have.

    Args:
        calls: those of the rank (schema ``CALLS``), in the order of the host. Where none of them is known to be sent or received,
            kernels that may be either are held against the launches of messages.
    """
    recorded = [call for call in dump.calls if call.created_ns >= 0]
    kinds = set(calls["kind"].tolist())
    for kind in sorted(kinds):
        rows = calls[calls["kind"] == kind]
        launches: list[_Launch] = [[call] for call in recorded if call.kind == kind]
        if kind == _FUSED and not kinds & set(P2P):
            rows = rows[rows["hint"] != "tp"]
            possible = [
                call for call in recorded if call.kind in P2P or (call.kind == "all_to_all" and call.kind not in kinds)
            ]
            launches = [list(launch_calls) for _, launch_calls in groupby(possible, key=lambda call: call.launch)]
        if len(rows) and launches:
            yield kind, rows, launches


def _pairs(kind: str, rows: pd.DataFrame, launches: Sequence[_Launch], is_anchored: bool) -> dict[int, _Launch]:
    """The launch that each row is, by its index; none where there is not just one way to pair them.

    Args:
        is_anchored: both have their times by the wall clock.
    """
    called = rows["host_ns"].to_numpy()
    recorded = np.array([launch[-1].created_ns for launch in launches], dtype=np.int64)
    least = min(_LEAST_PAIRS, len(called), len(recorded))
    # Launches that the dump has before the trace's first.
    shifts = range(least - len(called), len(recorded) - least + 1)
    if not is_anchored:
        if len(called) != len(recorded) or len(called) < _LEAST_PAIRS:
            return {}
        called, shifts = called + int(np.median(recorded - called)), range(1)
    plausible = []
    for shift in shifts:
        first, last = max(0, -shift), min(len(called), len(recorded) - shift)
        distance = int(np.abs(recorded[first + shift : last + shift] - called[first:last]).max())
        if distance <= _DISTINCT * _FAR_NS and _agree(kind, rows.iloc[first:], launches[first + shift :]):
            plausible.append((distance, shift))
    plausible.sort()
    if not plausible or plausible[0][0] > _FAR_NS:
        return {}
    if len(plausible) > 1 and plausible[1][0] <= _DISTINCT * plausible[0][0]:
        return {}
    first = max(0, -plausible[0][1])
    return dict(zip(rows.index.tolist()[first:], launches[first + plausible[0][1] :], strict=False))


def _agree(kind: str, rows: pd.DataFrame, launches: Sequence[_Launch]) -> bool:
    """Return whether nothing in the trace contradicts the dump."""
    if kind == _FUSED:
        return True
    for row, (call, *_) in zip(rows.to_dict("records"), launches, strict=False):
        size = len(call.group.ranks)
        agrees = (not row["group_id"] or not call.group.id or row["group_id"] == call.group.id) and (
            row["group_size"] < 0 or not size or row["group_size"] == size
        )
        if agrees and call.kind in P2P:
            agrees = (
                (row["local_peer"] < 0 or row["local_peer"] == call.local_peer)
                and (row["peer"] < 0 or not size or row["peer"] == call.peer)
                and (-1 in (row["bytes"], call.bytes) or row["bytes"] == call.bytes)
            )
        if not agrees:
            return False
    return True


def _rows(calls: pd.DataFrame, launches: Mapping[int, _Launch]) -> Iterator[Mapping[Any, Any]]:
    """The calls, a launch of several messages as one row for each, with what the dump tells of what a row lacks."""
    has_sequence_numbers = bool((calls["seq"] >= 0).any())
    for index, row in zip(calls.index.tolist(), calls.to_dict("records"), strict=True):
        for call in launches.get(index, ()):
            group, ranks = call.group, list(call.group.ranks)
            yield {
                **row,
                "kind": call.kind,
                "group_id": row["group_id"] or group.id,
                "description": row["description"] or group.description,
                "group_ranks": row["group_ranks"] or (json.dumps(ranks) if ranks else ""),
                "group_size": row["group_size"] if row["group_size"] > 0 else len(ranks) or -1,
                "local_peer": row["local_peer"] if row["local_peer"] >= 0 else call.local_peer,
                "bytes": row["bytes"] if row["bytes"] >= 0 else call.bytes,
                "seq": row["seq"] if has_sequence_numbers or call.kind in P2P else call.seq,
            }
        if index not in launches:
            yield row
