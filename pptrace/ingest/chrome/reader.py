"""Reader of Chrome traces with begin/end events, of which one file can hold several ranks.

Each process is a rank: by what its ranges say (g_rk, rank), else its name ("rank 3"), else its pid where the pids count from 0,
else the file's name. Ranges whose arguments carry the ids of pipeline ops become ready ops
(:mod:`pptrace.ingest.chrome.pipeline_ops`);
in other files the ranges become annotations, whose labels are recognised like those of any trace. Files that MegaScan writes
per rank (``rel_ts`` in ns within each iteration) are read as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pptrace.ingest.chrome.pipeline_ops import ChromeOps, mesh_of, ops_of
from pptrace.ingest.chrome.ranges import ChromeRanges, Id, Range, read_ranges, said_rank
from pptrace.ingest.common.byte_source import ByteSource
from pptrace.ingest.common.categories import CategoryCodes
from pptrace.ingest.common.rank_names import rank_of_file_name, rank_of_labels
from pptrace.ingest.ops.mesh import Facts
from pptrace.model.tables import (
    COMM_ARGS,
    MEMORY,
    ONE_CLOCK,
    Category,
    Events,
    InputFormat,
    Trace,
    empty_table,
    no_events,
)

_PAIR = re.compile(rb'"ph"\s*:\s*"[BE]"')
_KINETO = re.compile(rb'"(?:schemaVersion|deviceProperties|baseTimeNanoseconds|distributedInfo)"\s*:')
_DIGITS = re.compile(r"(\d+)")
_MEGASCAN_FILE = re.compile(r"benchmark-data-\d+-pipeline-(\d+)-tensor-\d+\.json")
_MOST_RANKS = 100_000
VESCALE = "vescale"


_IDS = re.compile(
    rb'"(?:rel_ts|mb_id|microbatch|micro_batch_index|microbatch_id|seq_id)"\s*:|"rank"\s*:\s*\d+\s*,\s*"step"\s*:'
)


def sniff_chrome(start: bytes) -> bool:
    """Whether a file that begins so has what Kineto's never have: begin/end events, ids of microbatches or of steps."""
    opens = start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"[") and b'"ph"' in start
    return opens and (_PAIR.search(start) or _IDS.search(start)) is not None and not has_kineto_members(start)


def has_kineto_members(start: bytes) -> bool:
    """Whether a trace says that it is Kineto's."""
    return _KINETO.search(start) is not None


def has_pairs(path: Path) -> bool:
    """Whether there is a begin or end event anywhere in a file that is not Kineto's own."""
    kept = b""
    with ByteSource(path) as source:
        while piece := source.read():
            text = kept + piece
            if has_kineto_members(text):
                return False
            if _PAIR.search(text):
                return True
            kept = text[-64:]
    return False


def read_chrome(path: Path) -> tuple[Trace, ...]:
    """A trace for each process in the file.

    Raises:
        TraceError: the file cannot be read or holds no range.
    """
    found = read_ranges(path)
    ranks = _ranks(path, found)
    numbers = [ranks[entry.pid] for entry in found.ranges]
    ready = ops_of(found.ranges, numbers, _pipeline_ranks(path))
    facts = mesh_of(found.ranges, numbers) if ready is None else ready.facts
    clock: Mapping[str, Any] = {ONE_CLOCK: str(path)} if len(set(numbers)) > 1 else {}
    order = sorted(set(numbers))
    named = set(range(len(order))) != set(order) or len(order) > 1 or rank_of_file_name(path.name) is not None
    return tuple(
        _trace(
            path,
            rank if named or _says_rank(found) else None,
            rank,
            found,
            numbers,
            ready,
            {**clock, **_facts(found, facts, rank)},
            rank == order[0],
        )
        for rank in order
    )


def _trace(
    path: Path,
    claimed: int | None,
    rank: int,
    found: ChromeRanges,
    numbers: Sequence[int],
    ready: ChromeOps | None,
    metadata: Mapping[str, Any],
    is_first: bool,
) -> Trace:
    own = [entry for entry, number in zip(found.ranges, numbers, strict=True) if number == rank]
    return Trace(
        path=str(path),
        format=InputFormat.CHROME,
        rank=claimed,
        producer="chrome trace" if ready is None or ready.framework == "chrome" else ready.framework,
        events=_events([*own, *_steps(own)]) if ready is None else no_events(),
        memory=empty_table(MEMORY),
        metadata=metadata,
        warnings=tuple(found.warnings) if is_first else (),
        ops=None if ready is None else ready.ops[ready.ops["rank"] == rank].reset_index(drop=True),
        comms=None if ready is None else ready.comms[ready.comms["rank"] == rank].reset_index(drop=True),
        framework=_framework(own) if ready is None else ready.framework,
    )


def _framework(ranges: Sequence[Range]) -> str:
    """veScale's timeline (legacy/vescale/ndtimeline/handlers/local_timeline_handler.py) has Megatron's names; "" for others."""
    own = any(
        entry.category == entry.name and {"rank", "step", "tp", "pp"} <= entry.args.keys() for entry in ranges[:100]
    )
    return VESCALE if own else ""


def _facts(found: ChromeRanges, facts: Facts, rank: int) -> Mapping[str, Any]:
    """What the arguments tell of the mesh; and whether the ranks' numbers are ours."""
    of_all, of_rank = facts
    if not of_all:
        return {}
    counted = " PP " in str(found.ranges[0].pid) and not _says_rank(found)
    notes = {"notes": ["the trace does not tell global ranks: they are counted replica by replica"]} if counted else {}
    return {**of_all, **of_rank.get(rank, {}), **notes}


def _pipeline_ranks(path: Path) -> int | None:
    """How many pipeline ranks MegaScan's files of single ranks have, where this is one of them."""
    if _MEGASCAN_FILE.fullmatch(path.name) is None:
        return None
    names = (_MEGASCAN_FILE.fullmatch(other.name) for other in path.parent.iterdir())
    return max(int(match[1]) for match in names if match) + 1


def _says_rank(found: ChromeRanges) -> bool:
    return any(said_rank(entry) is not None for entry in found.ranges[:100])


def _ranks(path: Path, found: ChromeRanges) -> dict[Id, int]:
    """The rank of each process that has ranges; every one its own."""
    pids = list(dict.fromkeys(entry.pid for entry in found.ranges))
    said: dict[Id, int | None] = dict.fromkeys(pids)
    for entry in found.ranges:
        if said[entry.pid] is None:
            said[entry.pid] = said_rank(entry)
    names = {pid: rank_of_labels([found.process_names.get(pid, "")]) for pid in pids}
    numbers = {pid: rank_of_labels([pid]) if isinstance(pid, str) and not pid.isdecimal() else int(pid) for pid in pids}
    for candidate in (said, names, numbers):
        ranks = {pid: rank for pid, rank in candidate.items() if rank is not None and 0 <= rank < _MOST_RANKS}
        if len(set(ranks.values())) == len(pids) and (candidate is not numbers or max(ranks.values()) < 8 * len(pids)):
            return ranks
    from_name = rank_of_file_name(path.name)
    if len(pids) == 1 and from_name is not None:
        return {pids[0]: from_name}
    return {pid: place for place, pid in enumerate(sorted(pids, key=_in_order))}


def _in_order(pid: Id) -> tuple[bool, list[tuple[int, str]]]:
    """By the numbers in it: "0 PP 2" before "0 PP 10"."""
    parts = [(int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS.split(str(pid))]
    return isinstance(pid, str), parts


def _steps(ranges: Sequence[Range]) -> list[Range]:
    """A range around the ranges of each step that their arguments number, named as a profiler's; () where these share time."""
    spans: dict[int, list[int]] = {}
    for entry in ranges:
        number = entry.args.get("step", entry.args.get("iteration"))
        if isinstance(number, int) and number >= 0:
            start, end = spans.get(number, (entry.start_ns, entry.end_ns))
            spans[number] = [min(start, entry.start_ns), max(end, entry.end_ns)]
    ordered = sorted((start, end, number) for number, (start, end) in spans.items())
    if not ordered or any(before[1] > after[0] for before, after in pairwise(ordered)):
        return []
    own = ranges[0]
    return [Range(f"ProfilerStep#{number}", "", own.pid, own.tid, start, end, {}) for start, end, number in ordered]


def _events(ranges: Sequence[Range]) -> Events:
    """Ranges as events; a category that Kineto knows keeps its meaning, every other is a range that a program put there."""
    codes = CategoryCodes()
    category = np.array([_category(codes, entry.category) for entry in ranges], dtype=np.int8)
    names = sorted({entry.name for entry in ranges})
    place = {name: code for code, name in enumerate(names)}
    on_device = category > Category.HOST_LIMIT
    threads = {tid: number for number, tid in enumerate(dict.fromkeys(entry.tid for entry in ranges))}
    thread = np.array([threads[entry.tid] for entry in ranges], dtype=np.int64)
    start = np.array([entry.start_ns for entry in ranges], dtype=np.int64)
    return Events(
        category=category,
        name_id=np.array([place[entry.name] for entry in ranges], dtype=np.int32),
        start_ns=start,
        dur_ns=np.array([entry.end_ns for entry in ranges], dtype=np.int64) - start,
        device=np.where(on_device, 0, -1).astype(np.int32),
        stream=np.where(on_device, thread, -1),
        thread=np.where(on_device, -1, thread),
        correlation=np.array([_correlation(entry) for entry in ranges], dtype=np.int64),
        names=tuple(names),
        comm_args=empty_table(COMM_ARGS),
    )


def _category(codes: CategoryCodes, name: str) -> int:
    code = codes[name]
    return int(Category.ANNOTATION) if code == Category.OTHER else code


def _correlation(entry: Range) -> int:
    value = entry.args.get("correlation")
    return value if isinstance(value, int) and 0 < value < 2**32 - 1 else -1
