"""Read Chrome traces with begin/end events; one file can hold several ranks.

Each process is a rank: by its ranges' arguments (g_rk, rank), else its name ("rank 3"), else its pid where the pids count from 0,
else the file's name. Ranges whose arguments carry the ids of pipeline ops become ops
(:mod:`pptrace.ingest.chrome.pipeline_ops`); in other files the ranges become annotations, whose labels are recognised like
those of any trace. Files that MegaScan writes per rank (``rel_ts`` in ns within each iteration) are read as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pptrace.ingest.chrome.pipeline_ops import ChromeOps, mesh_of, ops_of
from pptrace.ingest.chrome.ranges import ChromeRanges, Id, Range, declared_rank, read_ranges
from pptrace.ingest.common.codes import CategoryCodes
from pptrace.ingest.common.rank_names import natural_order, rank_of_file_name, rank_of_labels
from pptrace.ingest.ops.steps import Facts
from pptrace.model.tables import COMM_ARGS, MEMORY, empty_table
from pptrace.model.traces import ONE_CLOCK, Category, Events, InputFormat, Trace, no_events

_MEGASCAN_FILE = re.compile(r"benchmark-data-\d+-pipeline-(\d+)-tensor-\d+\.json")
_MAX_RANKS = 100_000
VESCALE = "vescale"
_NO_GLOBAL_RANKS = (
    "the trace has no global ranks: they are numbered replica by replica and may differ from those of the job"
)


def read_chrome(path: Path) -> tuple[Trace, ...]:
    """Read a trace for each process in the file.

    Raises:
        TraceError: the file cannot be read or holds no range.
    """
    content = read_ranges(path)
    ranks = _ranks(path, content)
    ranks_of_ranges = [ranks[entry.pid] for entry in content.ranges]
    pp = None  # known of MegaScan's files of single ranks
    if _MEGASCAN_FILE.fullmatch(path.name):
        matches = (_MEGASCAN_FILE.fullmatch(other.name) for other in path.parent.iterdir())
        pp = max(int(match[1]) for match in matches if match) + 1
    pipeline_ops = ops_of(content.ranges, ranks_of_ranges, pp)
    facts = mesh_of(content.ranges, ranks_of_ranges) if pipeline_ops is None else pipeline_ops.facts
    clock: Mapping[str, Any] = {ONE_CLOCK: str(path)} if len(set(ranks_of_ranges)) > 1 else {}
    order = sorted(set(ranks_of_ranges))
    has_rank = set(range(len(order))) != set(order) or len(order) > 1 or rank_of_file_name(path.name) is not None
    return tuple(
        _trace(
            path,
            rank if has_rank or _declares_rank(content) else None,
            [entry for entry, number in zip(content.ranges, ranks_of_ranges, strict=True) if number == rank],
            None if pipeline_ops is None else pipeline_ops.of_rank(rank),
            {**clock, **_facts(content, facts, rank)},
            tuple(content.warnings) if rank == order[0] else (),
        )
        for rank in order
    )


def _trace(
    path: Path,
    claimed_rank: int | None,
    ranges: Sequence[Range],
    pipeline_ops: ChromeOps | None,
    metadata: Mapping[str, Any],
    warnings: tuple[str, ...],
) -> Trace:
    """The trace of one rank, from its ranges and ops."""
    # legacy/vescale/ndtimeline/handlers/local_timeline_handler.py; its timeline uses Megatron-LM's labels
    is_vescale = any(
        entry.category == entry.name and {"rank", "step", "tp", "pp"} <= entry.args.keys() for entry in ranges[:100]
    )
    framework = pipeline_ops.framework if pipeline_ops else VESCALE if is_vescale else ""
    return Trace(
        path=str(path),
        format=InputFormat.CHROME,
        rank=claimed_rank,
        producer="chrome trace" if pipeline_ops is None or framework == "chrome" else framework,
        events=_events([*ranges, *_steps(ranges)]) if pipeline_ops is None else no_events(),
        memory=empty_table(MEMORY),
        metadata=metadata,
        warnings=warnings,
        ops=None if pipeline_ops is None else pipeline_ops.ops,
        comms=None if pipeline_ops is None else pipeline_ops.comms,
        framework=framework,
    )


def _facts(content: ChromeRanges, facts: Facts, rank: int) -> Mapping[str, Any]:
    """Facts of the mesh, with a note where pptrace numbered the ranks."""
    of_all, of_rank = facts
    if not of_all:
        return {}
    assigns_ranks = " PP " in str(content.ranges[0].pid) and not _declares_rank(content)
    notes = {"notes": [_NO_GLOBAL_RANKS]} if assigns_ranks else {}
    return {**of_all, **of_rank.get(rank, {}), **notes}


def _declares_rank(content: ChromeRanges) -> bool:
    return any(declared_rank(entry) is not None for entry in content.ranges[:100])


def _ranks(path: Path, content: ChromeRanges) -> dict[Id, int]:
    """Assign a distinct rank to each process with ranges."""
    pids = list(dict.fromkeys(entry.pid for entry in content.ranges))
    declared: dict[Id, int | None] = dict.fromkeys(pids)
    for entry in content.ranges:
        if declared[entry.pid] is None:
            declared[entry.pid] = declared_rank(entry)
    labelled_ranks = {pid: rank_of_labels([content.process_names.get(pid, "")]) for pid in pids}
    pids_as_ranks = {
        pid: rank_of_labels([pid]) if isinstance(pid, str) and not pid.isdecimal() else int(pid) for pid in pids
    }
    for candidate in (declared, labelled_ranks, pids_as_ranks):
        ranks = {pid: rank for pid, rank in candidate.items() if rank is not None and 0 <= rank < _MAX_RANKS}
        if len(set(ranks.values())) == len(pids) and (
            candidate is not pids_as_ranks or max(ranks.values()) < 8 * len(pids)
        ):
            return ranks
    from_name = rank_of_file_name(path.name)
    if len(pids) == 1 and from_name is not None:
        return {pids[0]: from_name}
    return {
        pid: index
        for index, pid in enumerate(sorted(pids, key=lambda pid: (isinstance(pid, str), natural_order(str(pid)))))
    }


def _steps(ranges: Sequence[Range]) -> list[Range]:
    """Make a ProfilerStep# range around the ranges of each step in their arguments; [] if steps overlap."""
    spans: dict[int, list[int]] = {}
    for entry in ranges:
        number = entry.args.get("step", entry.args.get("iteration"))
        if isinstance(number, int) and number >= 0:
            start, end = spans.get(number, (entry.start_ns, entry.end_ns))
            spans[number] = [min(start, entry.start_ns), max(end, entry.end_ns)]
    ordered = sorted((start, end, number) for number, (start, end) in spans.items())
    if not ordered or any(before[1] > after[0] for before, after in pairwise(ordered)):
        return []
    first = ranges[0]
    return [Range(f"ProfilerStep#{number}", "", first.pid, first.tid, start, end, {}) for start, end, number in ordered]


def _events(ranges: Sequence[Range]) -> Events:
    """Convert ranges to events; a category of Kineto keeps its meaning, any other is an annotation of the program."""
    codes = CategoryCodes()
    category = np.array([codes[entry.category] for entry in ranges], dtype=np.int8)
    category[category == Category.OTHER] = Category.ANNOTATION
    correlations = (entry.args.get("correlation") for entry in ranges)
    names = sorted({entry.name for entry in ranges})
    code_by_name = {name: code for code, name in enumerate(names)}
    on_device = category > Category.HOST_LIMIT
    threads = {tid: number for number, tid in enumerate(dict.fromkeys(entry.tid for entry in ranges))}
    thread = np.array([threads[entry.tid] for entry in ranges], dtype=np.int64)
    start = np.array([entry.start_ns for entry in ranges], dtype=np.int64)
    return Events(
        category=category,
        name_id=np.array([code_by_name[entry.name] for entry in ranges], dtype=np.int32),
        start_ns=start,
        dur_ns=np.array([entry.end_ns for entry in ranges], dtype=np.int64) - start,
        device=np.where(on_device, 0, -1).astype(np.int32),
        stream=np.where(on_device, thread, -1),
        thread=np.where(on_device, -1, thread),
        correlation=np.array(
            [number if isinstance(number, int) and 0 < number < 2**32 - 1 else -1 for number in correlations],
            dtype=np.int64,
        ),
        names=tuple(names),
        comm_args=empty_table(COMM_ARGS),
    )
