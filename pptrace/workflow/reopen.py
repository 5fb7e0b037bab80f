"""Open runs that were analysed before: the report is read from the cache, and the rest made when it is asked for.

An entry is what :mod:`pptrace.ingest.job.disk_cache` keeps: the report, plan, mesh and windows as JSON, read into their types
again, and the ops that the report lists as columns. Its key is made of the names, sizes and times of all files that are read or
stand there too, the options, and the code of pptrace. What does not fit is no entry, and the run is analysed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import force_setattr, replace

from pptrace.analysis.aligned import AlignedRun
from pptrace.analysis.early_receives.repair import RepairedOrder
from pptrace.analysis.experts.types import TrafficMatrix
from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.report import Report
from pptrace.analysis.steps.op_rows import OpRows
from pptrace.errors import PptraceError
from pptrace.garbage import paused_gc
from pptrace.ingest import OnProgress, open_inputs
from pptrace.ingest.job.disk_cache import ANY_CODE, FOLDER, Cache, Packed, cache_for, code_version, key_of, stat_key
from pptrace.ingest.job.packing import DAMAGE, pack, unpack
from pptrace.live_records.frames import SUFFIX
from pptrace.memory import give_back_freed_memory
from pptrace.model.mesh import MeshInfo
from pptrace.model.schedule_info import ScheduleInfo
from pptrace.recognise.recording.replay import Corrections
from pptrace.slices import Slice, Texts, compact
from pptrace.timeline.windows import StepWindow
from pptrace.workflow.analyse import Analysis
from pptrace.workflow.load import load

FEWEST_OPS = 10_000
"""Runs of fewer are analysed in less than half a second."""
_MOST_FILES = 20_000
_NUMBERS, _TEXTS = ("stage", "chunk", "microbatch", "start_ns", "end_ns"), ("kind", "phase", "pair")


class RunStore(Struct, frozen=True):
    """The entries of a run in the cache, each by its name."""

    cache: Cache
    key: str

    def read(self, name: str) -> Packed | None:
        """The entry; None where there is none, or it is damaged."""
        return self.cache.read(key_of(self.key, name))

    def write(self, name: str, packed: Packed) -> None:
        """Keep an entry, where that can be written."""
        self.cache.write(key_of(self.key, name), packed)


class Opened(Struct, frozen=True):
    """An analysed run; ``store`` has its entries in the cache, None where it is not kept."""

    analysis: Analysis
    store: RunStore | None = None


class ReopenedAnalysis(Analysis):
    """An analysis whose report was read: its tables are made by analysing the run, when they are first asked for."""

    def __init__(self, kept: _Kept, run: Mapping[str, Any], analyse: Callable[[], Analysis]) -> None:
        """Take what was kept, and how to make the rest."""
        parts = {"report": kept.report, "schedule": kept.schedule, "mesh": kept.mesh, "windows": kept.windows}
        vars(self).update(parts, expert_traffic=kept.traffic, run=run)
        vars(self).update(_kept=kept, _lock=threading.Lock(), _analyse=analyse)

    @property
    def num_ops(self) -> int:
        """Rows of the table of ops, which is not made for it."""
        return int(vars(self)["_kept"].num_ops)

    @property
    def data(self) -> AlignedRun:
        return self._whole.data

    @property
    def costs(self) -> tuple[StepMatrix, ...]:
        return self._whole.costs

    @property
    def facts(self) -> Mapping[int, Mapping[str, Any]]:
        return self._whole.facts

    @property
    def corrections(self) -> Corrections | None:
        return self._whole.corrections

    @property
    def order(self) -> RepairedOrder | None:
        return self._whole.order

    @property
    def _whole(self) -> Analysis:
        members = vars(self)
        with members["_lock"]:
            if "whole" not in members:
                members["whole"] = members["_analyse"]()
            whole: Analysis = members["whole"]
        return whole

    def with_report(self, report: Report) -> Analysis:
        """The same with another report."""
        members = vars(self)
        return ReopenedAnalysis(replace(members["_kept"], report=report), self.run, members["_analyse"])


def reopen(
    paths: Sequence[Path],
    schedule: str | None = None,
    step: int | None = None,
    jobs: int | None = 1,
    on_progress: OnProgress | None = None,
    as_recorded: bool = False,
) -> Opened:
    """Load a run as :func:`pptrace.workflow.load.load` does; where it was analysed before and has not changed, read its report.

    Raises:
        PptraceError: nothing can be read, or ``schedule`` or ``step`` do not fit; the message is one line.
    """

    def analyse() -> Analysis:
        return load(paths, schedule, step, jobs, on_progress, as_recorded=as_recorded)

    before = run_store(paths, schedule, step, as_recorded)
    packed = None if before is None else before.read(_REPORT)
    if packed is not None:
        try:
            with paused_gc():
                kept = _with_ops(unpack(packed, _Kept, paths))
        except DAMAGE:  # damaged, or from another version
            pass
        else:
            return Opened(ReopenedAnalysis(kept, open_inputs(paths).run or {}, analyse), before)
    analysis = analyse()
    if before is None or analysis.num_ops < FEWEST_OPS or run_store(paths, schedule, step, as_recorded) != before:
        return Opened(analysis)  # the last: files changed meanwhile
    give_back_freed_memory()  # what is kept is copied first
    with suppress(UnicodeEncodeError):  # a path that is no UTF-8
        before.write(_REPORT, pack(_parts_of(analysis), paths))
    return Opened(analysis, before)


_REPORT = "report"


def run_store(
    paths: Sequence[Path], schedule: str | None = None, step: int | None = None, as_recorded: bool = False
) -> RunStore | None:
    """The store of a run as its files are now; None where there are too many, or one cannot be looked at."""
    try:
        inputs = open_inputs(paths)
        given = [*(file.path for file in inputs.files), *inputs.dumps]
        cache = cache_for(given[0]) if given else Cache(())
        files = sorted({*given, *_present(paths, cache.folders)})
        if not given or len(files) > _MOST_FILES:
            return None
        states = [f"{path} {stat_key(path)}" for path in files]
    except (OSError, PptraceError):
        return None
    arguments = [*map(str, paths), str(schedule), str(step), str(as_recorded)]
    return RunStore(cache, key_of(code_version(ANY_CODE), *arguments, "", *states))


def _present(paths: Iterable[Path], caches: Sequence[Path]) -> Iterator[Path]:
    """The files below directories, and in those of files: a table has partners, and a run tells of itself."""
    for path in map(Path, paths):
        folder = path if path.is_dir() else path.parent
        for num_folders, (at, folders, names) in enumerate(os.walk(folder)):
            below = [name for name in folders if name != FOLDER and Path(at, name) not in caches]
            folders[:] = sorted(below) if path.is_dir() and num_folders < _MOST_FILES else []
            yield from (Path(at, name) for name in names[: _MOST_FILES + 1] if not name.endswith(SUFFIX))


class _Kept(Struct, frozen=True):
    """Parts of an analysis that are kept. The report is without its ops.

    ``ops``: for each rank of each step, in order, the table of its ops and which of its rows they are.
    """

    report: Report
    schedule: ScheduleInfo
    mesh: MeshInfo
    windows: tuple[StepWindow, ...]
    num_ops: int
    traffic: TrafficMatrix | None = None
    ops: tuple[tuple[int, int, int] | None, ...] = ()
    tables: tuple[Slice, ...] = ()


def _parts_of(analysis: Analysis) -> _Kept:
    numbers: dict[int, int] = {}
    tables: list[Slice] = []
    places: list[tuple[int, int, int] | None] = []
    for rank in (rank for step in analysis.report.steps for rank in step.ranks):
        rows = rank.ops
        if not isinstance(rows, OpRows):
            places.append(None)
            continue
        number = numbers.setdefault(id(rows.rows), len(tables))
        if number == len(tables):
            texts = {name: rows.rows.codes(name) for name in _TEXTS}
            columns: dict[str, Any] = {name: compact(rows.rows[name]) for name in _NUMBERS}
            tables.append(
                Slice(columns | {name: Texts(compact(codes), values) for name, (codes, values) in texts.items()})
            )
        places.append((number, *rows.place))
    report = analysis.report
    steps = (replace(step, ranks=tuple(replace(rank, ops=()) for rank in step.ranks)) for step in report.steps)
    return _Kept(
        replace(report, steps=tuple(steps)),
        *(analysis.schedule, analysis.mesh, analysis.windows, analysis.num_ops, analysis.expert_traffic),
        *(tuple(places), tuple(tables)),
    )


def _with_ops(kept: _Kept) -> _Kept:
    """Give the ops back to the ranks of the report.

    Raises:
        ValueError, IndexError: the entry is damaged.
    """
    ranks = (rank for step in kept.report.steps for rank in step.ranks)
    for rank, place in zip(ranks, kept.ops, strict=True):
        if place is not None:  # nobody else has this rank yet, and copies of all would take longer than reading them
            force_setattr(rank, "ops", OpRows(kept.tables[place[0]], *place[1:]))
    return replace(kept, ops=(), tables=())
