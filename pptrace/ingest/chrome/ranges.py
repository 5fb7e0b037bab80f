"""Join Chrome-trace events of any tool to ranges: begin/end pairs (``ph`` B and E) and complete events (X).

B and E nest within a (pid, tid). An E ends the innermost open range of its name, or, without a name, the innermost one; what was
opened inside it and never closed ends with it. The ``args`` of both are joined, those of E win. (Trace Event Format, Google.)

A range belongs to a process, which is a rank. Files with a process for each pipeline or replica tell the ranks by the names of
their threads, or by the arguments of their ranges: their processes are split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from msgspec import Struct
from msgspec.structs import replace

from pptrace.errors import TraceError
from pptrace.ingest.chrome.events import RANK, EventColumns, Id, first_number, read_events
from pptrace.ingest.common.byte_source import ByteSource
from pptrace.ingest.common.json_texts import LIMIT_NS
from pptrace.ingest.common.rank_names import coordinates_of_label
from pptrace.model.tables import Int64
from pptrace.model.wording import counted

Rows = npt.NDArray[np.intp]
_EXPECTED = "expected begin/end or complete events of a Chrome trace"
_BEGIN, _END, _COMPLETE = b"BEX"


class ChromeRanges(Struct, frozen=True):
    """All ranges of a file in order of start, longer ones first; its processes with their names; and warnings of damage.

    ``table`` has the columns ``name`` and ``category`` (texts as categories), ``thread`` (a number), ``process`` (its index in
    ``processes``), ``start_ns`` and ``end_ns``, ``declared_rank`` and the arguments that any range has (−1: none).
    ``arguments`` are the names of these, also without a number.
    """

    table: pd.DataFrame
    processes: tuple[Id, ...]
    process_names: Mapping[Id, str]
    arguments: frozenset[str]
    warnings: tuple[str, ...]

    def numbers(self, *names: str) -> Int64:
        """The first of some arguments that each range has; −1 without one."""
        return first_number(_columns(self.table), names, len(self.table))


def read_ranges(path: Path) -> ChromeRanges:
    """Read the ranges of a file, plain or gzip. Damaged events are left out and counted in ``warnings``.

    Raises:
        TraceError: the file cannot be read, or holds no range.
    """
    with ByteSource(path) as source:
        events, count = read_events(source)
    if not count:
        raise TraceError(
            f"{path}: {'; '.join(events.warnings) or 'an empty list of events'}; {_EXPECTED}; check the file"
        )
    ranges = _joined(events) if events.columns else None
    if ranges is None or ranges.table.empty:
        raise TraceError(
            f"{path}: {counted(count, 'event')} and no range among them; {_EXPECTED}; was the recording stopped early?"
        )
    return _split_by_rank(_split_by_pipeline_rank(ranges, events))


def _joined(events: EventColumns) -> ChromeRanges:
    """Join begins with their ends, thread by thread in order of time, and add the complete events."""
    phase, thread, start, length = (events.columns[name] for name in ("phase", "thread", "start", "length"))
    has_time = (
        (start >= -LIMIT_NS) & (start <= LIMIT_NS) & ((phase != _COMPLETE) | ((length >= 0) & (length <= LIMIT_NS)))
    )
    ends = np.where(phase == _COMPLETE, start + np.maximum(length, 0), start)
    rows = np.flatnonzero(has_time)
    order = sorted(range(len(events.threads)), key=lambda number: tuple(map(str, events.threads[number])))
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    rows = rows[np.lexsort((start[rows], place[thread[rows]]))]
    name = np.where(np.array([not text for text in events.names], dtype=bool), -1, np.arange(len(events.names)))[
        events.columns["name"]
    ]
    pairs, unclosed, orphans = [np.zeros((3, 0), dtype=np.int64)], 0, 0
    for of_thread in np.split(rows, np.flatnonzero(np.diff(thread[rows])) + 1):
        nested = of_thread[phase[of_thread] != _COMPLETE]
        last = int(ends[of_thread].max(initial=0))
        found, num_unclosed, num_orphans = _pair(nested, phase[nested] == _BEGIN, name[nested], start[nested], last)
        complete = of_thread[phase[of_thread] == _COMPLETE]
        pairs += [found, np.stack((complete, np.full(len(complete), -1), ends[complete]))]
        unclosed, orphans = unclosed + num_unclosed, orphans + num_orphans
    begin, end, end_ns = np.concatenate(pairs, axis=1)
    by_start = np.lexsort((-end_ns, start[begin]))
    begin, end, end_ns = begin[by_start], end[by_start], end_ns[by_start]
    processes = tuple(dict.fromkeys(process for process, _ in events.threads))
    number_of = {process: number for number, process in enumerate(processes)}
    process_of = np.array([number_of[process] for process, _ in events.threads], dtype=np.int64)
    columns: dict[str, Any] = {
        "name": _texts(events.columns["name"][begin], events.names),
        "category": _texts(events.columns["category"][begin], events.categories),
        "thread": thread[begin],
        "process": process_of[thread[begin]],
        "start_ns": start[begin],
        "end_ns": end_ns,
    }
    for argument, values in events.numbers.items():
        columns[argument] = _first(np.where(end >= 0, values[end], -1), values[begin])
    columns["declared_rank"] = first_number(columns, RANK, len(begin))
    warnings = _warnings(int((~has_time).sum()), unclosed, orphans)
    table = pd.DataFrame(columns, copy=False)
    return ChromeRanges(table, processes, events.process_names, events.arguments, (*events.warnings, *warnings))


def _pair(rows: Rows, is_begin: npt.NDArray[np.bool_], name: Int64, time: Int64, last: int) -> tuple[Int64, int, int]:
    """Pair the begins and ends of one thread, in order of time: the rows of both (−1: no end) and the ends in ns, shape (3, n);
    the number of begins without an end, and of ends without a begin. Names are −1 where an event has none.
    """
    stack: list[tuple[int, int]] = []
    begins, ends, times = [], [], []
    orphans = unclosed = 0

    def close(row: int, end: int, at: int) -> None:
        begins.append(row)
        ends.append(end)
        times.append(at)

    for row, begin, of_event, at in zip(rows.tolist(), is_begin.tolist(), name.tolist(), time.tolist(), strict=True):
        if begin:
            stack.append((row, of_event))
            continue
        depth = len(stack) - 1
        while depth >= 0 and of_event >= 0 and stack[depth][1] not in (-1, of_event):
            depth -= 1
        if depth < 0:
            orphans += 1
            continue
        for opened, _ in stack[depth + 1 :]:
            close(opened, -1, at)
        unclosed += len(stack) - depth - 1
        close(stack[depth][0], row, at)
        del stack[depth:]
    for opened, _ in stack:
        close(opened, -1, last)
    return np.array([begins, ends, times], dtype=np.int64).reshape(3, -1), unclosed + len(stack), orphans


def _texts(codes: npt.NDArray[np.int32], texts: Sequence[str]) -> pd.Categorical[Any]:
    return pd.Categorical.from_codes(codes, categories=pd.Index(list(texts)))


def _warnings(untimed: int, unclosed: int, orphans: int) -> list[str]:
    lines = []
    if untimed:
        lines.append(f'left out {counted(untimed, "event")} whose "ts" or "dur" is no time in µs')
    if unclosed:
        lines.append(
            f"{counted(unclosed, 'range')} without an end (B without E): read as ending with the enclosing range or the "
            "thread, so that an op may be too long"
        )
    if orphans:
        lines.append(f"left out {counted(orphans, 'end')} of ranges without a begin (E without B)")
    return lines


def _columns(table: pd.DataFrame) -> dict[str, Int64]:
    return {str(name): table[name].to_numpy() for name in table if name not in ("name", "category")}


def _split_by_pipeline_rank(ranges: ChromeRanges, events: EventColumns) -> ChromeRanges:
    """Make a process of each pipeline rank in files with a process for each pipeline: names of threads have its coordinates."""
    processes, thread = dict.fromkeys(ranges.processes), ranges.table["thread"].to_numpy()
    moved: dict[int, Id] = {}
    coordinates: dict[int, Mapping[str, int]] = {}
    for number, (process, of_process) in enumerate(events.threads):
        own = coordinates_of_label(events.thread_names.get((process, of_process), ""))
        if "pp" in own:
            coordinates[number] = {**coordinates_of_label(ranges.process_names.get(process, "")), **own}
            moved[number] = f"{process} PP {own['pp']} TP {coordinates[number].get('tp', 0)}"
            processes[moved[number]] = None
    if not moved:
        return ranges
    number_of = {process: number for number, process in enumerate(processes)}
    new = np.full(len(events.threads), -1, dtype=np.int64)
    new[list(moved)] = [number_of[process] for process in moved.values()]
    of_ranges = _first(new[thread], ranges.table["process"].to_numpy())
    facts = _facts_by_number(coordinates, len(events.threads))
    columns = {name: _first(values[thread], ranges.numbers(name)) for name, values in facts.items()}
    return replace(ranges, table=ranges.table.assign(process=of_ranges, **columns), processes=tuple(processes))


def _split_by_rank(ranges: ChromeRanges) -> ChromeRanges:
    """Split a process whose ranges name several ranks (a replica, in veScale's traces) into one process per rank.

    A range without a rank gets that of its thread, else stays with the process. The process's name may contain coordinates
    ("dp rank[1]").
    """
    table, processes = ranges.table, list(ranges.processes)
    process, thread, declared = (table[name].to_numpy() for name in ("process", "thread", "declared_rank"))
    declaring = table[declared >= 0]
    is_shared = np.zeros(len(processes), dtype=bool)
    num_ranks = declaring.groupby("process")["declared_rank"].nunique()
    is_shared[num_ranks.index[num_ranks > 1]] = True
    if not is_shared.any():
        return ranges
    of_thread = np.full(int(thread.max()) + 1, -1, dtype=np.int64)
    first = declaring.drop_duplicates("thread")
    of_thread[first["thread"]] = first["declared_rank"]
    rank = _first(declared, of_thread[thread])
    moved = np.flatnonzero(is_shared[process] & (rank >= 0))
    pairs, index = np.unique(np.stack((process[moved], rank[moved])), axis=1, return_inverse=True)
    new = process.copy()
    new[moved] = len(processes) + index.reshape(-1)
    of_process = {
        number: coordinates_of_label(ranges.process_names.get(processes[number], ""))
        for number in np.flatnonzero(is_shared).tolist()
    }
    facts = _facts_by_number(of_process, len(processes))
    columns = {name: _first(ranges.numbers(name), values[process]) for name, values in facts.items()}
    processes += [f"{processes[number]} rank {of_rank}" for number, of_rank in pairs.T.tolist()]
    return replace(ranges, table=table.assign(process=new, **columns), processes=tuple(processes))


def _facts_by_number(coordinates: Mapping[int, Mapping[str, int]], size: int) -> dict[str, Int64]:
    """Coordinates by axis, by their names in the facts of a trace, each of shape (size,); −1 where there is none."""
    axes = dict.fromkeys(axis for each in coordinates.values() for axis in each)
    facts = {f"{axis}_rank": np.full(size, -1, dtype=np.int64) for axis in axes}
    for number, each in coordinates.items():
        for axis, coordinate in each.items():
            facts[f"{axis}_rank"][number] = coordinate
    return facts


def _first(values: Int64, others: Int64) -> Int64:
    return np.where(values >= 0, values, others)
