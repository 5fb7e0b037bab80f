"""Read Nsight Systems files: SQLite exports of any schema version, and reports through an nsys on the PATH.

    report = session_start:utc { process { device work | CUDA call | NVTX range | … } }

A report can hold several processes; each of them with device work is a rank with a separate trace. Times are converted to UTC by
the start of the session. Facts about the machine and its users are not passed on: see
:mod:`pptrace.ingest.nsight.ranks`.

Recordings (``.nsys-rep``, ``.qdrep``, ``.qdstrm``) are exported to SQLite with nsys.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from msgspec.structs import replace

from pptrace.errors import TraceError
from pptrace.ingest.common.byte_source import unreadable
from pptrace.ingest.common.codes import Codes
from pptrace.ingest.common.rank_names import rank_of_file_name, rank_of_value
from pptrace.ingest.common.sort_events import EventColumns, sorted_events
from pptrace.ingest.common.sqlite import Database
from pptrace.ingest.nsight.event_tables import CUDA_CALLS, GRAPH_NAME, GRAPHS, NVTX, read_memory, read_tables
from pptrace.ingest.nsight.nccl_payloads import read_payloads
from pptrace.ingest.nsight.ranks import base_ns, producer_of, ranks_of, recorded_facts, session_of
from pptrace.marks import is_mark
from pptrace.model.tables import MEMORY, empty_table
from pptrace.model.traces import COMMUNICATORS, DEVICE_NAMES, ONE_CLOCK, SESSION, Category, InputFormat, Trace
from pptrace.model.wording import counted
from pptrace.nsys import (
    RECORDED_MAGIC,
    RECORDED_SUFFIXES,
    REPORT_MAGIC,
    STREAM_MAGIC,
    STREAM_SUFFIX,
    export_report,
    import_stream,
)
from pptrace.regular import open_regular


def is_recorded(path: Path, start: bytes) -> bool:
    """Return whether a file that begins with these bytes is a report or its stream, which only nsys can read."""
    return start.startswith(RECORDED_MAGIC) or path.name.endswith(RECORDED_SUFFIXES)


@contextmanager
def exported(report: Path) -> Iterator[Path]:
    """Context of the SQLite export of a report or a stream; it is deleted at the end.

    Raises:
        TraceError: there is no nsys, or it cannot import or export the file.
    """
    nsys = shutil.which("nsys")
    with open_regular(report) as file:
        start = file.read(len(STREAM_MAGIC))
    is_stream = start == STREAM_MAGIC or (report.name.endswith(STREAM_SUFFIX) and not start.startswith(REPORT_MAGIC))
    if nsys is None and not is_stream:
        raise TraceError(
            f"{report}: a report of Nsight Systems, which only its own nsys can read, and there is no 'nsys' on PATH; run "
            f"'nsys export --type sqlite {report.name}' where Nsight Systems is installed, and give the .sqlite file"
        )
    if nsys is None:
        raise TraceError(
            f"{report}: a recording of Nsight Systems that its nsys did not import, and there is no 'nsys' on PATH; run "
            f"'QdstrmImporter -i {report.name}' and then 'nsys export --type sqlite' where Nsight Systems is installed, and "
            "give the .sqlite file"
        )
    with tempfile.TemporaryDirectory(prefix="pptrace-") as folder:
        source = report
        if is_stream:
            source = Path(folder) / "report.nsys-rep"
            import_stream(nsys, report, source)
        target = Path(folder) / "report.sqlite"
        try:
            export_report(nsys, source, target)
        except TraceError as err:
            raise TraceError(str(err).replace(str(source), str(report))) from err
        yield target


_NSYS_TABLES = ("StringIds", "EXPORT_META_DATA", "META_DATA_EXPORT", "ANALYSIS_DETAILS", GRAPHS, NVTX, *CUDA_CALLS)
_NSYS_PREFIXES = ("CUPTI_ACTIVITY_KIND_", "TARGET_INFO_")
_HEAD_BYTES = 64
EXPECTED_INPUT = "expected the SQLite file that 'nsys export --type sqlite' writes"


def read_nsight(path: Path) -> tuple[Trace, ...]:
    """Read an export or a report: a trace for each rank in it, in order of rank if known, else of pid.

    ``Trace.rank`` is None if unknown. ``Trace.metadata`` is what ``pptrace run`` wrote; in other recordings it has the clock
    of the session, which its processes share.

    Raises:
        TraceError: the file cannot be read, is no export, or holds no events.
    """
    try:
        with open_regular(path) as file:
            start = file.read(_HEAD_BYTES)
    except (OSError, ValueError) as err:
        raise unreadable(path, err) from err
    if not is_recorded(path, start):
        return _read_export(path, path)
    if not start:
        raise TraceError(f"{path}: an empty file; expected a report of Nsight Systems")
    with exported(path) as export:
        return tuple(replace(trace, path=str(path)) for trace in _read_export(export, path))


def _read_export(export: Path, shown_path: Path) -> tuple[Trace, ...]:
    with Database(export, EXPECTED_INPUT) as db:
        if not any(table in _NSYS_TABLES or table.startswith(_NSYS_PREFIXES) for table in db.tables):
            raise TraceError(
                f"{shown_path}: an SQLite database without any table of Nsight Systems, rocprofv3 or RPD; {EXPECTED_INPUT}"
            )
        names = Codes()
        blocks, warnings = read_tables(db, names)
        facts = recorded_facts(db)
        gpus = [str(name) for (name,) in db.all_rows("TARGET_INFO_GPU", ("name",)) if name]
        _require_content(shown_path, db, blocks, names, facts, warnings)
        _assign_pids(blocks, warnings)
        pids = _rank_pids(blocks, names, facts, warnings)
        session_ns, session_facts = session_of(db)
        base, base_warnings = base_ns(db, session_ns, int(blocks[0].start_ns[0]))
        payloads = read_payloads(db, names.texts)
        rank_by_pid = {} if set(pids) <= set(facts) else ranks_of(db, pids) or payloads.rank_by_pid(pids)
        if len(pids) == 1 and (file_rank := rank_of_file_name(shown_path.name)) is not None:
            rank_by_pid = {pids[0]: file_rank, **rank_by_pid}
        producer = producer_of(db)
        warnings += _doubts(db, blocks, names)
        memory = read_memory(db, base)
        shared_warnings = [*warnings, *db.damage, *base_warnings]
    traces = []
    for index, pid in enumerate(pids):
        is_last = index == len(pids) - 1  # the rows of others are copied
        masks = ((block, block.process == pid) for block in blocks)
        parts = [
            block if is_last and mask.all() else block.select(np.flatnonzero(mask))
            for block, mask in masks
            if mask.any()
        ]
        ordered = sorted_events(parts, names.texts, base)
        metadata = {**({DEVICE_NAMES: gpus} if gpus else {}), **(facts.get(pid) or session_facts)}
        if len(pids) > 1:
            metadata = {ONE_CLOCK: f"{SESSION}{session_ns or shown_path}", **metadata}
        rank = rank_of_value(metadata.get("rank"))
        rank = rank_by_pid.get(pid) if rank is None else rank
        if places := payloads.places.get(pid):
            metadata = {COMMUNICATORS: places, **({} if rank is None else {"rank": rank}), **metadata}
        traces.append(
            Trace(
                path=str(shown_path),
                format=InputFormat.NSYS_SQLITE,
                rank=rank,
                producer=producer,
                events=ordered.events(payloads.comm_args(pid, ordered.without_comm_args, base)),
                memory=memory.get(pid, empty_table(MEMORY)),
                metadata=metadata,
                warnings=(*(shared_warnings if index == 0 else ()), *ordered.warnings),
                damage=ordered.damage,
            )
        )
    if not any(len(trace.events) for trace in traces):
        raise TraceError(f"{shown_path}: no event has a usable time; {EXPECTED_INPUT}")
    return tuple(sorted(traces, key=lambda trace: (trace.rank is None, trace.rank or 0)))


def _doubts(db: Database, blocks: Sequence[EventColumns], names: Codes) -> Iterator[str]:
    """Yield a warning for each thing that the recording lacks by its options."""
    if GRAPH_NAME in names:
        yield (
            "each CUDA graph was recorded as one event: communication inside it counts as compute; "
            "record with --cuda-graph-trace=node to separate them"
        )
    if {int(block.category[0]) for block in blocks} <= {*_RANGES, Category.OVERHEAD} and (
        db.all_rows("TARGET_INFO_GPU", ("id",)) or db.all_rows("TARGET_INFO_CUDA_GPU", ("id",))
    ):
        yield (
            "the machine has GPUs, but no device event was recorded: times are those of the host, that is of "
            "launches where ops ran on a GPU; record with --trace=cuda,nvtx"
        )


_DEVICE_WORK = (Category.KERNEL, Category.MEMCPY, Category.MEMSET)
_RANGES = (Category.ANNOTATION, Category.CPU_OP)
_REMEDY = (
    "an nsys older than the Python package nvtx 0.2.12 records none of the ranges of later versions of nvtx: use a newer nsys or "
    "'nvtx<0.2.12' ('pptrace doctor' tries a range through nsys)"
)


def _require_content(
    shown_path: Path,
    db: Database,
    blocks: Sequence[EventColumns],
    names: Codes,
    facts: Mapping[int, Any],
    warnings: list[str],
) -> None:
    """Refuse a recording with nothing to analyse, and warn of one of ``pptrace run`` without marks.

    Raises:
        TraceError: it contains no work, or is of ``pptrace run`` and has neither marks nor kernels.
    """
    categories = {int(block.category[0]) for block in blocks}
    damage = f" ({'; '.join(db.damage)})" if db.damage else ""
    if not categories - {Category.OVERHEAD}:
        raise TraceError(
            f"{shown_path}: an Nsight Systems export without device work, CUDA calls or NVTX ranges{damage}; "
            f"expected a recording of 'nsys profile --trace=cuda,nvtx'; {_REMEDY}"
        )
    if facts and not any(map(is_mark, names.texts)):
        if Category.KERNEL not in categories:
            raise TraceError(f"{shown_path}: a run of pptrace of which nsys recorded no range{damage}; {_REMEDY}")
        warnings.append(f"a run of pptrace of which nsys recorded no range, only what its devices did; {_REMEDY}")


def _rank_pids(
    blocks: Sequence[EventColumns], names: Codes, facts: Mapping[int, Any], warnings: list[str]
) -> list[int]:
    """The pids of ranks: those with kernels or marks of pptrace, else with other device work, else with ranges, else with calls.

    A launcher has none of these. In order of device if each has a different one, as launchers assign them; else of pid.
    """
    marks = np.array([is_mark(name) for name in names.texts], dtype=np.bool_)
    present: set[int] = set()
    devices: dict[int, set[int]] = {}
    having: dict[str, set[int]] = {"kernels": set(), "device work": set(), "ranges": set(), "CUDA calls": set()}
    for block in blocks:
        pids, category = set(np.unique(block.process).tolist()), block.category[0]
        present |= pids
        having["CUDA calls"] |= pids if category != Category.OVERHEAD else set()
        if category in _DEVICE_WORK:
            having["kernels" if category == Category.KERNEL else "device work"] |= pids
            for pid in pids:
                devices.setdefault(pid, set()).update(np.unique(block.device[block.process == pid]).tolist())
        elif category in _RANGES:
            having["ranges"] |= pids
            having["kernels"] |= set(np.unique(block.process[marks[block.name]]).tolist())
    having["kernels"] |= present & set(facts)
    most = next(what for what, pids in having.items() if pids)
    ranks = sorted(having[most])
    device_of_rank = [min(devices[pid]) for pid in ranks if len(devices.get(pid, ())) == 1]
    if len(set(device_of_rank)) == len(ranks):
        ranks = [pid for _, pid in sorted(zip(device_of_rank, ranks, strict=True))]
    if others := len(present) - len(ranks):
        missing = "kernels" if having["device work"] - set(ranks) else "device work" if most == "kernels" else most
        warnings.append(f"left out {counted(others, 'process', 'processes')} without {missing}")
    return ranks


def _assign_pids(blocks: Sequence[EventColumns], warnings: list[str]) -> None:
    """Assign pids to device work whose table lacks them: that of the launching call, else the only or the first pid."""
    damage = [block for block in blocks if (block.process < 0).any()]
    if not damage:
        return
    pids = sorted({pid for block in blocks for pid in np.unique(block.process).tolist() if pid >= 0}) or [0]
    calls = [block for block in blocks if block.category[0] == Category.RUNTIME]
    num_unknown = 0
    for block in damage:
        rows = np.flatnonzero(block.process < 0)
        launching_pids = np.full(len(rows), -1, dtype=np.int32)
        if len(pids) > 1 and calls:
            # The pid of the call with each correlation id; -1 if none has it, or several processes do
            pairs = pd.concat([pd.DataFrame({"id": part.correlation, "pid": part.process}) for part in calls])
            pairs = pairs[pairs["id"] >= 0].drop_duplicates()
            of_id = pairs[~pairs["id"].duplicated(keep=False)].set_index("id")["pid"]
            launching_pids = of_id.reindex(block.correlation[rows], fill_value=-1).to_numpy()
        num_unknown += int(np.count_nonzero(launching_pids < 0)) if len(pids) > 1 else 0
        block.process[rows] = np.where(launching_pids < 0, pids[0], launching_pids)
    if num_unknown:
        warnings.append(
            f"{num_unknown} events lack their process, and {len(pids)} were recorded: they count for the "
            "first, whose compute may be too high"
        )
