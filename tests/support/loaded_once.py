"""Traces that tests of what is made of an analysis read and analyse once: each time would take half a second or more.

:func:`pptrace.workflow.load.load` gives what it gave before where it is asked the same and no file there has changed; and a file
of the same name and bytes as one that was read before is not read and recognised again, whatever is made of it. Tests of
reading, of recognition and of the ways of work have it all as it is, and so have those that hear of progress or have workers.
"""

from __future__ import annotations

import hashlib
import inspect
from functools import lru_cache, wraps
from itertools import islice
from pathlib import Path
from typing import Any

from msgspec.structs import replace

import pptrace.ingest.job.read_job
import pptrace.workflow.load
from pptrace.model.traces import Events, InputFormat, Trace
from pptrace.recognise.recognised_rank import RecognisedRank

TESTS = Path(__file__).resolve().parents[1]
SAMPLES = TESTS.parent / "sample_traces"
ROOMS = ("analysis", "api", "cli", "dashboards", "docs", "recognise/damage", "report", "test_samples.py")
"""Folders and files of tests for which analyses are kept."""
State = tuple[tuple[Path, int, int], ...]
"""Files with their sizes in bytes and times of change in ns."""
MOST_FILES = 200
MOST_BYTES = 8 << 20
"""Size of a trace that is kept."""
MOST_TRACES = 80
_load = pptrace.workflow.load.load
_read_file = pptrace.ingest.job.read_job.read_file
_parameters = inspect.signature(_load)
_in_room = False
_traces: dict[tuple[str, str, InputFormat | None], tuple[Trace, ...]] = {}
"""By the name, the digest and the format of their file; the last one that was asked for is last."""
_ranks: dict[int, tuple[Events, RecognisedRank]] = {}
"""Ranks as they were recognised in the events of traces that are kept, by the identity of these."""


def keep_for(path: Path) -> None:
    """Keep analyses, or not, for the tests of a file."""
    global _in_room
    _in_room = any(path.is_relative_to(TESTS / room) for room in ROOMS)


def install() -> None:
    """Let all that import :func:`pptrace.workflow.load.load` from now on have the one that keeps."""
    pptrace.workflow.load.load = load
    pptrace.ingest.job.read_job.read_file = read_file
    pptrace.workflow.load._SmallTraces.recognise = _recognise_kept


@wraps(_load)
def load(*arguments: Any, **options: Any) -> Any:
    bound = _parameters.bind(*arguments, **options)
    bound.apply_defaults()
    given = bound.arguments
    paths = tuple(given.pop("paths"))
    is_plain = given["on_progress"] is given["engine"] is None and all(isinstance(path, Path) for path in paths)
    state = _state_of(paths) if _in_room and is_plain else None
    if state is None:
        return _load(*arguments, **options)
    kept = _kept_samples if all(path.is_relative_to(SAMPLES) for path in paths) else _kept
    return kept(paths, Path.cwd(), state, *given.items())


def _state_of(paths: tuple[Path, ...]) -> State | None:
    """Files that could be read at the paths and in their folders; None where that is not known."""
    try:
        folders = {path if path.is_dir() else path.parent for path in paths}
        found = [*islice((path for folder in folders for path in folder.rglob("*")), MOST_FILES)]
        if len(found) == MOST_FILES:
            return None
        files = sorted(path for path in found if path.is_file())
        return tuple((path, (stat := path.stat()).st_size, stat.st_mtime_ns) for path in files)
    except (OSError, ValueError):
        return None


def _load_kept(paths: tuple[Path, ...], _cwd: Path, _state: State, *options: tuple[str, Any]) -> Any:
    return _load(paths, **dict(options))


_kept = lru_cache(maxsize=16)(_load_kept)
_kept_samples = lru_cache(maxsize=48)(_load_kept)
"""Analyses that most tests ask for, and that those of other files would push out."""


@wraps(_read_file)
def read_file(path: Path, name: InputFormat | None, *arguments: Any) -> tuple[Trace, ...]:
    is_alone = name in (None, InputFormat.KINETO)  # others may depend on files beside it
    if not (_in_room and is_alone and isinstance(path, Path) and path.stat().st_size <= MOST_BYTES):
        return _read_file(path, name, *arguments)
    key = (path.name, hashlib.sha256(path.read_bytes()).hexdigest(), name)
    traces = _traces.pop(key, None) or _read_file(path, name, *arguments)
    if any(trace.format != InputFormat.KINETO or trace.path in text for trace in traces for text in trace.warnings):
        return _read_file(path, name, *arguments)
    _traces[key] = traces
    if len(_traces) > MOST_TRACES:
        for trace in _traces.pop(next(iter(_traces))):
            _ranks.pop(id(trace.events), None)
    return tuple(replace(trace, path=str(path)) for trace in traces)


def _recognise_kept(small: Any, trace: Trace) -> RecognisedRank:
    small.by_path.setdefault(trace.path, []).append(trace)
    if not any(trace.events is kept.events for traces in _traces.values() for kept in traces):
        return pptrace.workflow.load.recognise_trace(trace)
    events, rank = _ranks.get(id(trace.events)) or (trace.events, pptrace.workflow.load.recognise_trace(trace))
    if any(rank.info.path in text for text in rank.warnings):
        return pptrace.workflow.load.recognise_trace(trace)
    _ranks[id(events)] = (events, rank)
    recording = replace(rank.recording, file=trace.path if rank.recording.file else "")
    return replace(rank.with_info(replace(rank.info, path=trace.path)), recording=recording)
