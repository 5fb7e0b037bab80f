"""Reader of Nsight Systems: the SQLite that nsys exports, of every schema, and reports through an nsys on the PATH.

    report = session_start:utc { process { device work | CUDA call | NVTX range | … } }

One report holds any number of processes, and each of them that did device work is a rank with a trace of its own. Times become
UTC by the start of the session. What tells of the machine and its users stays in the report: see
:mod:`pptrace.ingest.nsight.ranks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pptrace.errors import TraceError
from pptrace.ingest.common.byte_source import unreadable
from pptrace.ingest.common.rank_names import rank_of_file_name, rank_of_value
from pptrace.ingest.common.sort_events import sorted_events
from pptrace.ingest.nsight.event_names import WHOLE_GRAPH, Names
from pptrace.ingest.nsight.event_tables import CUDA_CALLS, GRAPHS, NVTX, Block, chosen_rows, read_blocks
from pptrace.ingest.nsight.ranks import Session, base_ns, own_facts, producer_of, ranks_of, session_of
from pptrace.ingest.nsight.report_export import exported, is_recorded
from pptrace.ingest.nsight.sqlite import WHAT_TO_GIVE, Database
from pptrace.marks import is_mark
from pptrace.model.tables import COMM_ARGS, MEMORY, ONE_CLOCK, SESSION, Category, InputFormat, Int32, Trace, empty_table

_KNOWN_TABLES = ("StringIds", "EXPORT_META_DATA", "META_DATA_EXPORT", "ANALYSIS_DETAILS", GRAPHS, NVTX, *CUDA_CALLS)
_KNOWN_PREFIXES = ("CUPTI_ACTIVITY_KIND_", "TARGET_INFO_")
_HEAD_BYTES = 64


def read_nsight(path: Path) -> tuple[Trace, ...]:
    """Read an export or a report: a trace for each rank in it, in order of rank where they are known, else of pid.

    ``Trace.rank`` is None where nothing tells. ``Trace.metadata`` is what ``pptrace run`` put there; for others' recordings it
    has the session's clock, which its processes share.

    Raises:
        TraceError: the file cannot be read, is no export, or holds no events.
    """
    try:
        with path.open("rb") as file:
            start = file.read(_HEAD_BYTES)
    except (OSError, ValueError) as err:
        raise unreadable(path, err) from err
    if not is_recorded(path, start):
        return _read_export(path, path)
    if not start:
        raise TraceError(f"{path}: an empty file; expected a report of Nsight Systems")
    with exported(path) as export:
        return tuple(replace(trace, path=str(path)) for trace in _read_export(export, path))


_FIELDS = (("category",), ("name_id",), ("start_ns",), ("dur_ns",), ("device",), ("stream", "thread"), ("correlation",))
"""Of blocks, by column; of stream and thread one is -1."""


@dataclass(slots=True)
class _Rows:
    """The rows of one process, still in blocks; a column at a time leaves them, so that none is held twice for long."""

    blocks: list[Block]
    _names: Sequence[str]

    def take(self, column: int) -> npt.NDArray[Any]:
        """A whole column (:class:`pptrace.ingest.common.sort_events.Columns`); it is empty afterwards."""
        fields = _FIELDS[column]
        values = np.concatenate([np.maximum.reduce([getattr(block, name) for name in fields]) for block in self.blocks])
        for block in self.blocks:
            for name in fields:
                setattr(block, name, getattr(block, name)[:0])
        return values.astype(np.int64) if len(fields) > 1 else values

    def names(self) -> Sequence[str]:
        return self._names


def _read_export(export: Path, shown: Path) -> tuple[Trace, ...]:
    with Database(export) as db:
        if not any(table in _KNOWN_TABLES or table.startswith(_KNOWN_PREFIXES) for table in db.tables):
            raise TraceError(f"{shown}: an SQLite database without any table of Nsight Systems; {WHAT_TO_GIVE}")
        names = Names()
        blocks, warnings = read_blocks(db, names)
        facts = own_facts(db)
        _require_content(shown, db, blocks, names, facts, warnings)
        _settle_owners(blocks, warnings)
        pids = _rank_pids(blocks, names, facts, warnings)
        session = session_of(db)
        base, base_warnings = base_ns(db, session, int(blocks[0].start_ns[0]))
        told = {} if set(pids) <= set(facts) else ranks_of(db, pids)
        if len(pids) == 1 and pids[0] not in told and (number := rank_of_file_name(shown.name)) is not None:
            told = {pids[0]: number}
        producer = producer_of(db)
        if WHOLE_GRAPH in names:
            warnings.append(
                "CUDA graphs were recorded as wholes: communication inside them counts as compute; "
                "record with --cuda-graph-trace=node to tell"
            )
        if {int(block.category[0]) for block in blocks} <= {*_RANGES, Category.OVERHEAD} and _has_gpu(db):
            warnings.append(
                "the machine has GPUs of which nothing was recorded: times are the host's, of launches where ops ran on a GPU; "
                "record with --trace=cuda,nvtx"
            )
        common = [*warnings, *db.damage, *base_warnings]
    listed = list(names)
    traces = []
    for place, pid in enumerate(pids):
        rows = _Rows(_of_process(blocks, pid, last=place == len(pids) - 1), listed)
        ordered = sorted_events(rows, base)
        metadata = facts.get(pid) or _session_facts(session)
        if len(pids) > 1:
            metadata = {ONE_CLOCK: f"{SESSION}{shown if session.start_ns is None else session.start_ns}", **metadata}
        rank = rank_of_value(metadata.get("rank"))
        traces.append(
            Trace(
                path=str(shown),
                format=InputFormat.NSYS_SQLITE,
                rank=told.get(pid) if rank is None else rank,
                producer=producer,
                events=ordered.events(empty_table(COMM_ARGS)),
                memory=empty_table(MEMORY),
                metadata=metadata,
                warnings=(*(common if place == 0 else ()), *ordered.warnings),
            )
        )
    if not any(trace.num_events for trace in traces):
        raise TraceError(f"{shown}: no event has a usable time; {WHAT_TO_GIVE}")
    return tuple(sorted(traces, key=lambda trace: (trace.rank is None, trace.rank or 0)))


def _session_facts(session: Session) -> Mapping[str, Any]:
    """That the processes of a report share a clock: what :mod:`pptrace.clock` asks of ranks of one host."""
    if session.start_ns is None:
        return {}
    reading = {"time_ns": session.start_ns, "monotonic_ns": session.monotonic_ns or 0}
    return {"host": f"session {session.start_ns}", "clock": {"start": reading}}


def _of_process(blocks: Sequence[Block], pid: int, *, last: bool) -> list[Block]:
    """The rows of a process; the last one may take the blocks themselves."""
    chosen = []
    for block in blocks:
        mine = block.process == pid
        if mine.any():
            chosen.append(block if last and mine.all() else chosen_rows(block, np.flatnonzero(mine)))
    return chosen


_DEVICE_WORK = (Category.KERNEL, Category.MEMCPY, Category.MEMSET)
_RANGES = (Category.ANNOTATION, Category.CPU_OP)
_REMEDY = (
    "an nsys that is older than the Python package nvtx 0.2.12 records no range of its later versions: use a newer nsys or "
    "'nvtx<0.2.12' ('pptrace doctor' tries a range through nsys)"
)


def _require_content(
    shown: Path, db: Database, blocks: Sequence[Block], names: Names, facts: Mapping[int, Any], warnings: list[str]
) -> None:
    """Refuse a recording that holds nothing to analyse, with what to do, and warn of one without the marks of its run.

    Raises:
        TraceError: nothing in it tells of any work, or the ranks of ``pptrace run`` left no mark and no kernel in it.
    """
    present = {int(block.category[0]) for block in blocks}
    lost = f" ({'; '.join(db.damage)})" if db.damage else ""
    if not present - {Category.OVERHEAD}:
        raise TraceError(
            f"{shown}: an Nsight Systems export without device work, CUDA calls or NVTX ranges{lost}; "
            f"expected a recording of 'nsys profile --trace=cuda,nvtx'; {_REMEDY}"
        )
    if facts and not any(map(is_mark, names)):
        if Category.KERNEL not in present:
            raise TraceError(f"{shown}: a run of pptrace of which nsys recorded no range{lost}; {_REMEDY}")
        warnings.append(f"a run of pptrace of which nsys recorded no range, only what its devices did; {_REMEDY}")


def _has_gpu(db: Database) -> bool:
    return bool(db.all_rows("TARGET_INFO_GPU", ("id",)) or db.all_rows("TARGET_INFO_CUDA_GPU", ("id",)))


def _rank_pids(blocks: Sequence[Block], names: Names, facts: Mapping[int, Any], warnings: list[str]) -> list[int]:
    """The processes that are ranks: those with kernels or marks of pptrace, else with other device work, else with ranges; if
    there are none, all. A launcher has nothing of these.

    In the order of their devices where each has one of its own, as a launcher gives them out; else of their pids.
    """
    marks = np.array([is_mark(name) for name in names], dtype=np.bool_)
    ranging: set[int] = set()
    working: set[int] = set(facts)
    copying: set[int] = set()
    devices: dict[int, set[int]] = {}
    present: set[int] = set()
    for block in blocks:
        pids = set(np.unique(block.process).tolist())
        present |= pids
        if block.category[0] in _DEVICE_WORK:
            (working if block.category[0] == Category.KERNEL else copying).update(pids)
            for pid in pids:
                devices.setdefault(pid, set()).update(np.unique(block.device[block.process == pid]).tolist())
        elif block.category[0] in _RANGES:
            ranging |= pids
            if marks.any():
                working |= set(np.unique(block.process[marks[block.name_id]]).tolist())
    ranks = sorted(working & present or copying or ranging or present)
    own = [min(devices[pid]) for pid in ranks if len(devices.get(pid, ())) == 1]
    if len(set(own)) == len(ranks):
        ranks = [pid for _, pid in sorted(zip(own, ranks, strict=True))]
    if others := len(present) - len(ranks):
        processes = "1 process" if others == 1 else f"{others} processes"
        lacking = "kernels" if copying - set(ranks) else "device work" if working or copying else "ranges"
        warnings.append(f"left out {processes} without {lacking}")
    return ranks


def _settle_owners(blocks: Sequence[Block], warnings: list[str]) -> None:
    """A pid for device work whose table has none: that of the call that launched it, else the only or the first one."""
    lost = [block for block in blocks if (block.process < 0).any()]
    if not lost:
        return
    known = sorted({pid for block in blocks for pid in np.unique(block.process).tolist() if pid >= 0}) or [0]
    calls = [block for block in blocks if block.category[0] == Category.RUNTIME]
    num_guessed = 0
    for block in lost:
        rows = np.flatnonzero(block.process < 0)
        owners = np.full(len(rows), -1, dtype=np.int32)
        if len(known) > 1 and calls:
            owners = _launching_process(calls, block.correlation[rows])
        num_guessed += int(np.count_nonzero(owners < 0)) if len(known) > 1 else 0
        block.process[rows] = np.where(owners < 0, known[0], owners)
    if num_guessed:
        warnings.append(
            f"{num_guessed} events do not say which of {len(known)} processes they are of; taken as the first's"
        )


def _launching_process(calls: Sequence[Block], wanted: npt.NDArray[np.int64]) -> Int32:
    """The process whose call has the correlation id; -1 where none has, or several processes have."""
    correlation = np.concatenate([block.correlation for block in calls])
    process = np.concatenate([block.process for block in calls])
    order = np.lexsort((process, correlation))
    correlation, process = correlation[order], process[order]
    low = np.minimum(np.searchsorted(correlation, wanted, side="left"), len(correlation) - 1)
    high = np.maximum(np.searchsorted(correlation, wanted, side="right") - 1, 0)
    found = (correlation[low] == wanted) & (wanted >= 0) & (process[low] == process[high])
    return np.where(found, process[low], -1).astype(np.int32)
