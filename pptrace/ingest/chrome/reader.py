"""Read Chrome traces with begin/end events; one file can hold several ranks.

Each process is a rank: by its ranges' arguments (g_rk, rank), else its name ("rank 3"), else its pid where the pids count from 0,
else the file's name. Ranges whose arguments carry the ids of pipeline ops become ops
(:mod:`pptrace.ingest.chrome.pipeline_ops`); in other files the ranges become annotations, whose labels are recognised like
those of any trace. Files that MegaScan writes per rank (``rel_ts`` in ns within each iteration) are read as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from msgspec.structs import replace

from pptrace.ingest.chrome.events import Id, first_number
from pptrace.ingest.chrome.pipeline_ops import mesh_of, ops_of
from pptrace.ingest.chrome.ranges import ChromeRanges, read_ranges
from pptrace.ingest.common.codes import CategoryCodes
from pptrace.ingest.common.rank_names import natural_order, rank_of_file_name, rank_of_labels
from pptrace.ingest.ops.build import by_rank
from pptrace.ingest.ops.steps import Facts
from pptrace.model.tables import COMMS, OPS, Int64, empty_table
from pptrace.model.traces import ONE_CLOCK, Category, Events, InputFormat, Trace

_MEGASCAN_FILE = re.compile(r"benchmark-data-\d+-pipeline-(\d+)-tensor-\d+\.json")
_MAX_RANKS = 100_000
_STEP = ("step", "iteration")
_NO_CORRELATION = 2**32 - 1
_FIRST = 100
"""Ranges that are looked at for what all of a file have."""
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
    table = content.table.assign(rank=_ranks(path, content)[content.table["process"]])
    content = replace(content, table=table)
    pp = None  # known of MegaScan's files of single ranks
    if _MEGASCAN_FILE.fullmatch(path.name):
        matches = (_MEGASCAN_FILE.fullmatch(other.name) for other in path.parent.iterdir())
        pp = max(int(match[1]) for match in matches if match) + 1
    found = ops_of(content, pp)
    if found is None:
        framework, facts = VESCALE if _is_vescale(content) else "", mesh_of(content)
    else:
        framework, ops, comms, facts = found
    order = np.unique(table["rank"]).tolist()
    declares_rank = bool((table["declared_rank"].iloc[:_FIRST] >= 0).any())
    has_rank = len(order) > 1 or order != [0] or rank_of_file_name(path.name) is not None
    clock = {ONE_CLOCK: str(path)} if len(order) > 1 else {}
    of_ranks = {rank: {**clock, **_facts(content, facts, rank, declares_rank)} for rank in order}
    contents: dict[int, dict[str, Any]]
    if found is None:
        contents = {rank: {"events": _events(ranges)} for rank, ranges in by_rank(table).items()}
    else:
        of_ops, of_comms = by_rank(ops), by_rank(comms)
        contents = {
            rank: {"ops": of_ops.get(rank, empty_table(OPS)), "comms": of_comms.get(rank, empty_table(COMMS))}
            for rank in order
        }
    return tuple(
        Trace(
            path=str(path),
            format=InputFormat.CHROME,
            rank=rank if has_rank or declares_rank else None,
            producer="chrome trace" if found is None or framework == "chrome" else framework,
            metadata=of_ranks[rank],
            warnings=content.warnings if rank == order[0] else (),
            framework=framework,
            **contents[rank],
        )
        for rank in order
    )


def _is_vescale(content: ChromeRanges) -> bool:
    """Return whether veScale wrote the ranges (ndtimeline/handlers/local_timeline_handler.py), whose labels are Megatron-LM's."""
    first = content.table.iloc[:_FIRST]
    names = {"rank", "step", "tp", "pp"}
    if not names <= set(first):
        return False
    is_named = first["category"].astype(object) == first["name"].astype(object)
    return bool((is_named & (first[[*names]] >= 0).all(axis=1)).any())


def _facts(content: ChromeRanges, facts: Facts, rank: int, declares_rank: bool) -> Mapping[str, Any]:
    """Facts of the mesh, with a note where pptrace numbered the ranks."""
    of_all, of_rank = facts
    if not of_all:
        return {}
    first = content.processes[content.table["process"].iloc[0]]
    notes = {"notes": [_NO_GLOBAL_RANKS]} if " PP " in str(first) and not declares_rank else {}
    return {**of_all, **of_rank.get(rank, {}), **notes}


def _ranks(path: Path, content: ChromeRanges) -> Int64:
    """A distinct rank of each process with ranges, shape (processes,)."""
    present = content.table["process"].unique().tolist()
    pids = [content.processes[number] for number in present]
    with_rank = content.table[content.table["declared_rank"] >= 0].drop_duplicates("process")
    declared = dict(zip(with_rank["process"].tolist(), with_rank["declared_rank"].tolist(), strict=True))
    by_label = [rank_of_labels([content.process_names.get(pid, "")]) for pid in pids]
    as_rank = [rank_of_labels([pid]) if isinstance(pid, str) and not pid.isdecimal() else int(pid) for pid in pids]
    ranks = np.full(len(content.processes), -1, dtype=np.int64)
    for candidate in ([declared.get(number) for number in present], by_label, as_rank):
        found = [rank for rank in candidate if rank is not None and 0 <= rank < _MAX_RANKS]
        if len(set(found)) == len(pids) and (candidate is not as_rank or max(found) < 8 * len(pids)):
            ranks[present] = found
            return ranks
    from_name = rank_of_file_name(path.name)
    if len(pids) == 1 and from_name is not None:
        ranks[present] = from_name
    else:
        ranks[sorted(present, key=lambda number: _in_order(content.processes[number]))] = np.arange(len(present))
    return ranks


def _in_order(pid: Id) -> tuple[bool, list[tuple[int, str]]]:
    return isinstance(pid, str), natural_order(str(pid))


def _events(ranges: pd.DataFrame) -> Events:
    """Convert the ranges of a rank to events, with one around the ranges of each step that their arguments name; a category of
    Kineto keeps its meaning, any other is an annotation of the program.
    """
    codes, steps = CategoryCodes(), _steps(ranges)
    categories, names = ranges["category"].cat, ranges["name"].cat
    of_category = np.array([codes[text] for text in categories.categories], dtype=np.int8)
    category = np.append(of_category[categories.codes], np.full(len(steps), Category.OTHER, np.int8))
    category[category == Category.OTHER] = Category.ANNOTATION
    on_device = category > Category.HOST_LIMIT
    threads, _ = pd.factorize(ranges["thread"])
    thread = np.append(threads, np.full(len(steps), threads[0])).astype(np.int64)
    texts = list(names.categories)
    name_id = np.append(names.codes, [len(texts) + number for number in range(len(steps))])
    start, end = (np.append(ranges[name], steps[name]).astype(np.int64) for name in ("start_ns", "end_ns"))
    correlation = np.full(len(start), -1, dtype=np.int64)
    if "correlation" in ranges:
        numbers = ranges["correlation"].to_numpy()
        correlation[: len(ranges)] = np.where((numbers > 0) & (numbers < _NO_CORRELATION), numbers, -1)
    order = np.lexsort((-end, start))
    return Events(
        category=category[order],
        name_id=name_id[order].astype(np.int32),
        start_ns=start[order],
        dur_ns=(end - start)[order],
        device=np.where(on_device, 0, -1).astype(np.int32)[order],
        stream=np.where(on_device, thread, -1)[order],
        thread=np.where(on_device, -1, thread)[order],
        correlation=correlation[order],
        names=(*texts, *(f"ProfilerStep#{number}" for number in steps.index)),
    )


def _steps(ranges: pd.DataFrame) -> pd.DataFrame:
    """Begin and end of the ranges of each step in their arguments, in order; none if steps overlap."""
    number = first_number({name: ranges[name].to_numpy() for name in _STEP if name in ranges}, _STEP, len(ranges))
    numbered = ranges[["start_ns", "end_ns"]][number >= 0]
    steps = numbered.groupby(number[number >= 0]).agg({"start_ns": "min", "end_ns": "max"}).sort_values("start_ns")
    start, end = steps["start_ns"].to_numpy(), steps["end_ns"].to_numpy()
    return steps.iloc[:0] if (end[:-1] > start[1:]).any() else steps
