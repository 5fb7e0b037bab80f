"""The analysis that the dashboard shows, made on first use, or the reasons why there is none."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dashboards.live import LiveSteps
from pptrace.analysis.result import StepReport
from pptrace.errors import PptraceError, mistake_of
from pptrace.ingest import JobProgress, OnProgress, open_inputs, read_file
from pptrace.ingest.inputs.resolve import FACTS_OF_RANKS, RUN_FILE, run_of
from pptrace.ingest.job.packing import DAMAGE
from pptrace.live_records.frames import SUFFIX
from pptrace.memory import give_back_freed_memory
from pptrace.model.traces import InputFormat
from pptrace.report.tiles.kept import ENTRY, pack_bars, unpack_bars
from pptrace.report.tiles.timeline import MOST_KEPT_OPS, Timeline, without_tables
from pptrace.workflow.analyse import Analysis
from pptrace.workflow.reopen import RunStore, reopen

_log = logging.getLogger(__name__)
_SUFFIXES_OF_TRACES = (".json", ".gz")
_MOST_FILES = 40
READABLE = "can be read"
"""Problem of a file that has none."""

Fingerprint = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file below the given paths. ``problem`` is why it cannot be analysed, "" where it was not read."""

    name: str
    num_bytes: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Loaded:
    """An analysis, or ``error``: the line that says why there is none. ``run`` is what run.json holds, where there is one."""

    paths: tuple[Path, ...]
    analysis: Analysis | None = None
    error: str = ""
    run: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[InputFile, ...] = ()
    token: str = ""
    """Stands for the state of the files that this was read from."""
    store: RunStore | None = None
    """The entries of the run in the cache, where it is kept."""

    @property
    def title(self) -> str:
        first = self.paths[0].resolve().name or str(self.paths[0])
        return first if len(self.paths) == 1 else f"{first} and {len(self.paths) - 1} more"

    @property
    def steps(self) -> tuple[StepReport, ...]:
        return self.analysis.report.steps if self.analysis else ()

    def step(self, number: int | None) -> StepReport | None:
        return next((step for step in self.steps if step.step == number), None)


@dataclass(frozen=True, slots=True)
class Opening:
    """Progress of opening a run: the part of its files that was read, of ``num_files``; all of them while it is analysed."""

    is_open: bool
    read: float = 0.0
    num_files: int = 0


class Store:
    """Loads once, and again when a file has changed. Usable from any thread."""

    def __init__(self, paths: Sequence[Path], as_recorded: bool = False) -> None:
        """Take the paths; ``as_recorded`` shows the figures of the recording."""
        self._paths = tuple(Path(path) for path in paths)
        self._as_recorded = as_recorded
        self._lock = threading.Lock()
        self._loaded: Loaded | None = None
        self._fingerprint: Fingerprint = ()
        self._timeline: tuple[str, Timeline] | None = None
        self.opening = Opening(is_open=False)
        """Shown by pages that wait."""
        self.live = LiveSteps(self._paths)
        """The steps of a run that goes on."""

    def get(self) -> Loaded:
        """The analysis of the files as they are now."""
        with self._lock:
            fingerprint = _fingerprint(self._paths)
            if self._loaded is None or fingerprint != self._fingerprint:
                self._timeline = None
                token = blake2b(repr(fingerprint).encode(), digest_size=8).hexdigest()
                loaded = replace(_load(self._paths, self._note, self._as_recorded), token=token)
                if loaded.analysis is not None and loaded.analysis.num_ops > MOST_KEPT_OPS:
                    timeline = _timeline_of(loaded.analysis, loaded.store)
                    self._timeline = loaded.token, timeline
                    loaded = replace(loaded, analysis=without_tables(loaded.analysis, timeline.report))
                    give_back_freed_memory()
                self._loaded, self._fingerprint = loaded, fingerprint
                self.opening = Opening(is_open=True)
            return self._loaded

    def _note(self, progress: JobProgress) -> None:
        part = progress.bytes_read / progress.num_bytes if progress.num_bytes else 1.0
        self.opening = Opening(is_open=False, read=part, num_files=progress.num_files)

    def timeline(self, token: str) -> Timeline | None:
        """The timeline of what was loaded last, made when it is first asked for; None where its token is another one.

        A server that was started again loads what a page asks for that was opened before.
        """
        if self._loaded is None:
            self.get()
        with self._lock:
            loaded = self._loaded
            if loaded is None or loaded.analysis is None or loaded.token != token:
                return None
            if self._timeline is None or self._timeline[0] != token:
                self._timeline = token, _timeline_of(loaded.analysis, loaded.store)
            return self._timeline[1]


def _timeline_of(analysis: Analysis, store: RunStore | None) -> Timeline:
    """The timeline, from the cache where it is there; else it is made and kept."""
    packed = None if store is None else store.read(ENTRY)
    if packed is not None:
        with suppress(*DAMAGE):
            return Timeline(analysis, unpack_bars(packed))
    timeline = Timeline(analysis)
    if store is not None:
        store.write(ENTRY, pack_bars(timeline.bars))
    return timeline


def _load(paths: tuple[Path, ...], on_progress: OnProgress, as_recorded: bool) -> Loaded:
    run: Mapping[str, Any] = next(filter(None, map(run_of, paths)), {})
    try:
        opened = reopen(paths, on_progress=on_progress, as_recorded=as_recorded)
        return Loaded(paths, analysis=opened.analysis, run=run, store=opened.store)
    except PptraceError as err:
        return Loaded(paths, error=" ".join(str(err).split()), run=run, files=_describe_files(paths))
    except Exception as err:  # a page that says so serves its reader better than an empty one
        _log.exception("analysing %s failed", ", ".join(map(str, paths)))
        return Loaded(paths, error=mistake_of(err), run=run, files=_describe_files(paths))


def _describe_files(paths: Sequence[Path]) -> tuple[InputFile, ...]:
    """List every file, with the reason why it has no trace."""
    try:
        formats = {file.path.resolve(): file.format for file in open_inputs(paths).files}
    except PptraceError:
        formats = {}
    files = []
    for path in _files(paths)[:_MOST_FILES]:
        resolved = path.resolve()
        if resolved in formats:
            problem = _problem(path, formats[resolved])
        elif path.name == RUN_FILE:
            problem = "" if run_of(path) else "no JSON object"
        elif path.match(FACTS_OF_RANKS):
            problem = ""
        else:
            problem = _problem(path, None) if path.suffix in _SUFFIXES_OF_TRACES else ""
        files.append(InputFile(path.name, _num_bytes(path), problem))
    return tuple(files)


def _problem(path: Path, name: InputFormat | None) -> str:
    try:
        read_file(path, name)
    except PptraceError as err:
        return str(err).removeprefix(f"{path}: ")
    return READABLE


def _files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        try:
            files += sorted(item for item in path.iterdir() if item.is_file()) if path.is_dir() else [path]
        except OSError:
            continue
    return [path for path in files if path.exists()]


def _num_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _fingerprint(paths: Sequence[Path]) -> Fingerprint:
    """Names, times and sizes of the files, to notice new and changed ones; but for live files, which no analysis reads."""
    entries = []
    for path in _files(paths):
        if path.suffix == SUFFIX:
            continue
        try:
            status = path.stat()
        except OSError:
            continue
        entries.append((str(path), status.st_mtime_ns, status.st_size))
    return tuple(entries)
