"""An independent reading of host-only traces with pptrace's marks: slow, plain, and sharing no code with pptrace.

It follows the definitions: window (of each pipeline), compute, exposed communication, bubble. Nothing but json, re and decimal is
used. Ranks stand in the mesh in the order that run.json names: of ``tp-cp-dp-pp`` tp varies fastest, and pp where it names none.
"""

from __future__ import annotations

import gc
import gzip
import json
import re
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

_OP = re.compile(r"pp1:(\d+)(F|B|I|W)(\d+) chunk=(\d+) phase=(\w+) step=(\d+)")
_PAIR = re.compile(r"pp1:\((\d+)F(\d+);\d+B\d+\)OVERLAP_F_B chunk=\d+ phase=\w+ step=(\d+)")
_COLLECTIVE = re.compile(
    r"pp1:(all_reduce|broadcast|all_to_all) step=(\d+) axis=([\w-]+) size=(\d+) bytes=\d+(?: got=\d+)?(?: rows=[\d,>]+)?"
    r"(?: handle=(\d+))?"
)
_EXCHANGE = re.compile(r"pp1:exchange step=(\d+) axis=([\w-]+) ops=(\S+) handle=(\d+)")
_AWAIT = re.compile(r"pp1:await step=\d+ axis=[\w-]+ handle=(\d+)")
_LINK = re.compile(r"([<>])(\d+)@\d+")
_P2P = re.compile(r"pp1:p2p step=(\d+) axis=pp ops=(\S+)")
_WAIT = re.compile(r"pp1:wait step=(\d+) op=(\S+)")
_TRANSFER = re.compile(r"(\d+)(SEND|RECV)_(F|B)(\d+)[<>](\d+)@(\d+)")

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Side:
    """Part of one rank in a message or a collective: when it was posted, and when the rank waited for it (or the same)."""

    rank: int
    posted: Interval
    waited: Interval


@dataclass(slots=True)
class Found:
    """The marks of all ranks; of ``messages`` the first two parts of the key are sender and receiver."""

    ops: dict[tuple[int, int], list[tuple[str, int, int]]] = field(default_factory=dict)
    messages: dict[tuple[Any, ...], list[Side]] = field(default_factory=dict)
    collectives: dict[tuple[Any, ...], list[Side]] = field(default_factory=dict)


def read_ranges(path: Path) -> list[tuple[str, int, int]]:
    """(name, start, end) of every host range with a mark; absolute ns."""
    gc.disable()  # it would look at every event again and again
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            trace = json.load(file, parse_float=Decimal)
    finally:
        gc.enable()
    base = int(trace.get("baseTimeNanoseconds", 0))
    ranges = []
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") == "user_annotation" and event["name"].startswith("pp1:"):
            start = base + int(Decimal(event["ts"]) * 1000)
            ranges.append((event["name"], start, start + int(Decimal(event["dur"]) * 1000)))
    return sorted(ranges, key=lambda entry: entry[1])


def partition(directory: Path) -> dict[str, Any]:
    """Per step the span, and per rank compute, exposed communication and bubble, ns; and each rank's order of ops."""
    ranks = {int(path.name[4:].split(".")[0]): read_ranges(path) for path in directory.glob("rank*.json.gz")}
    mesh = json.loads((directory / "run.json").read_bytes())["mesh"]
    places = {rank: _place(rank, mesh) for rank in ranks}
    _fold_experts(places, mesh)
    found = Found()
    for rank, ranges in ranks.items():
        _read_rank(rank, ranges, places, found)
    transfers: dict[int, list[Interval]] = {}
    inside: dict[int, list[Interval]] = {}
    for sides in (*found.messages.values(), *found.collectives.values()):
        for side in sides:
            if _is_nested(side, [op for (_, rank), ops in found.ops.items() if rank == side.rank for op in ops]):
                inside.setdefault(side.rank, []).extend((side.posted, side.waited))
    for key, sides in found.messages.items():
        _add_message(key, sides, transfers)
    for sides in found.collectives.values():
        for side in sides:
            _add(transfers, side, max(other.posted[0] for other in sides), side.waited[1])
    steps = sorted({step for step, _ in found.ops})
    pipelines: dict[tuple[Any, ...], list[int]] = {}
    for rank in sorted(ranks):
        pipelines.setdefault(_without(places[rank], "pp-ep-etp-edp"), []).append(rank)
    return {"steps": [_step(step, list(pipelines.values()), found.ops, transfers, inside) for step in steps]}


def _read_rank(rank: int, ranges: list[tuple[str, int, int]], places: dict[int, dict[str, int]], found: Found) -> None:
    awaits = {match[1]: (start, end) for name, start, end in ranges if (match := _AWAIT.fullmatch(name))}
    waits = {(match[1], match[2]): (start, end) for name, start, end in ranges if (match := _WAIT.fullmatch(name))}
    count: dict[tuple[Any, ...], int] = {}

    def numbered(*key: Any) -> tuple[Any, ...]:
        count[key] = count.get(key, 0) + 1
        return *key, count[key]

    for name, start, end in ranges:
        posted = (start, end)
        if match := _OP.fullmatch(name):
            found.ops.setdefault((int(match[6]), rank), []).append((f"{match[1]}{match[2]}{match[3]}", start, end))
        elif match := _PAIR.fullmatch(name):  # named for its forward half
            found.ops.setdefault((int(match[3]), rank), []).append((f"{match[1]}OVERLAP_F_B{match[2]}", start, end))
        elif match := _P2P.fullmatch(name):
            for text in match[2].split(","):
                side = Side(rank, posted, waits.get((match[1], text), posted))
                found.messages.setdefault(_message(rank, match[1], text), []).append(side)
        elif match := _EXCHANGE.fullmatch(name):
            side = Side(rank, posted, awaits[match[4]])
            for link in _LINK.finditer(match[3]):
                peer = int(link[2])
                ends = (rank, peer) if link[1] == ">" else (peer, rank)
                number = numbered(*ends, match[1], match[2], link[1])[-1]
                found.messages.setdefault((*ends, match[1], match[2], number), []).append(side)
        elif match := _COLLECTIVE.fullmatch(name):
            members = _members(rank, match[3], places)
            assert len(members) == int(match[4]), name
            side = Side(rank, posted, awaits[match[5]] if match[5] else posted)
            found.collectives.setdefault(numbered(members, match[1], match[2], match[3]), []).append(side)


def _place(rank: int, mesh: dict[str, Any]) -> dict[str, int]:
    """Place of a rank on each axis."""
    place = {}
    for axis in str(mesh.get("order", "tp-cp-dp-pp")).split("-"):
        rank, place[axis] = divmod(rank, int(mesh[axis]))
    return place


def _fold_experts(places: dict[int, dict[str, int]], mesh: dict[str, Any]) -> None:
    """Add the places on ep: the ranks of a stage, in ascending order, hold tp of an expert, then ep, then copies of all."""
    if "ep" not in mesh:
        return
    stages: dict[int, list[int]] = {}
    for rank in sorted(places):
        stages.setdefault(places[rank]["pp"], []).append(rank)
    for ranks in stages.values():
        for index, rank in enumerate(ranks):
            block, part = divmod(index, int(mesh["etp"]))
            copy, place = divmod(block, int(mesh["ep"]))
            places[rank] |= {"ep": place, "etp": part, "edp": copy}


def _without(place: dict[str, int], axes: str) -> tuple[Any, ...]:
    return tuple((axis, number) for axis, number in sorted(place.items()) if axis not in axes.split("-"))


def _members(rank: int, axes: str, places: dict[int, dict[str, int]]) -> tuple[int, ...]:
    """The ranks that differ from this one along these axes alone; of the axis mirror the two that have the same stages."""
    if axes == "mirror":
        return tuple(sorted((rank, len(places) - 1 - rank)))
    folded = {"ep", "etp", "edp"}
    kept = ({"pp"} | folded if axes in folded else {*places[rank]} - folded) - {*axes.split("-")}
    own = [places[rank][axis] for axis in sorted(kept)]
    return tuple(other for other in sorted(places) if [places[other][axis] for axis in sorted(kept)] == own)


def _message(rank: int, step: str, text: str) -> tuple[Any, ...]:
    """Sender, receiver, and what both ends call the message alike: its step, direction, stage that made it, microbatch."""
    match = _TRANSFER.fullmatch(text)
    assert match, text
    stage, verb, direction, microbatch, peer = int(match[1]), match[2], match[3], int(match[4]), int(match[5])
    if verb == "SEND":
        return rank, peer, step, direction, stage, microbatch
    return peer, rank, step, direction, stage - 1 if direction == "F" else stage + 1, microbatch


def _add_message(key: tuple[Any, ...], sides: list[Side], transfers: dict[int, list[Interval]]) -> None:
    """Add the transfer of a message on both ends, each from the moment when both sides are ready."""
    ready = max(side.posted[0] for side in sides)
    over = {side.rank: side.waited[1] for side in sides}
    for side in sides:
        begin, end = ready, over[side.rank]
        if side.rank == key[0] and len(sides) == 2:
            if min(end, over[key[1]]) >= ready:
                end = min(end, over[key[1]])  # what has been received has been sent, whenever the sender looked
            if end < ready:
                begin = side.posted[0]  # a small message lay in a buffer before its receiver came: nobody waited for it
        _add(transfers, side, begin, end)


def _add(transfers: dict[int, list[Interval]], side: Side, begin: int, end: int) -> None:
    """Add a transfer as far as the rank posts it or waits for it.

    It may reach into the next step's window. What was posted ahead and moves while the rank waits for something else is not what
    it waits for.
    """
    transfers.setdefault(side.rank, []).extend(
        (max(begin, low), min(end, high))
        for low, high in (side.posted, side.waited)
        if max(begin, low) < min(end, high)
    )


def _step(
    step: int,
    pipelines: list[list[int]],
    ops: dict[tuple[int, int], list[tuple[str, int, int]]],
    transfers: dict[int, list[Interval]],
    inside: dict[int, list[Interval]],
) -> dict[str, Any]:
    of_all_steps: dict[int, list[Interval]] = {}  # a rank that is done goes on with the next step in this one's window
    for (_, rank), rows in ops.items():
        of_all_steps.setdefault(rank, []).extend((start, end) for _, start, end in rows)
    spans, ranks = [], []
    for pipeline in pipelines:
        first = min(start for rank in pipeline for _, start, _ in ops[step, rank])
        last = max(end for rank in pipeline for _, _, end in ops[step, rank])
        spans.append(last - first)
        for rank in pipeline:
            within = (of_all_steps[rank], inside.get(rank, []), transfers.get(rank, []))
            compute, exposed = _split(*within, first, last)
            ranks.append(
                {
                    "rank": rank,
                    "compute_ns": compute,
                    "exposed_comm_ns": exposed,
                    "bubble_ns": last - first - compute - exposed,
                    "ops": [name for name, _, _ in ops[step, rank]],
                }
            )
    return {"step": step, "span_ns": max(spans), "ranks": sorted(ranks, key=lambda row: row["rank"])}


def _split(
    computing: list[Interval], inside: list[Interval], moving: list[Interval], first: int, last: int
) -> tuple[int, int]:
    """Compute (ops without communication inside them) and transfer without compute, in [first, last): between all edges."""
    kinds = [
        [(start, end) for start, end in intervals if start < last and end > first]
        for intervals in (computing, inside, moving)
    ]
    edges = sorted({first, last, *(edge for kind in kinds for pair in kind for edge in pair if first <= edge <= last)})
    compute = exposed = 0
    for low, high in pairwise(edges):
        in_op, in_call, moves = (any(start <= low and high <= end for start, end in kind) for kind in kinds)
        if in_op and not in_call:
            compute += high - low
        elif moves:
            exposed += high - low
    return compute, exposed


def _is_nested(side: Side, ops: list[tuple[str, int, int]]) -> bool:
    """Return whether a call begins and ends in one op: what goes on after the op runs at the same time as it."""
    return any(start <= side.posted[0] and side.waited[1] <= end for _, start, end in ops)
