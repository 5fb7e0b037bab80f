"""Traces that tests of what is made of an analysis read and analyse once: each time would take half a second or more.

:func:`pptrace.workflow.load.load` gives what it gave before where it is asked the same and no file there has changed. Tests of
reading, of recognition and of the ways of work have it as it is, and so have all that want to hear of progress or have workers.
"""

from __future__ import annotations

import inspect
from functools import lru_cache, wraps
from itertools import islice
from pathlib import Path
from typing import Any

import pptrace.workflow.load

TESTS = Path(__file__).resolve().parents[1]
ROOMS = ("analysis", "api", "cli", "dashboards", "docs", "report")
"""Folders of tests for which analyses are kept."""
State = tuple[tuple[Path, int, int], ...]
"""Files with their sizes in bytes and times of change in ns."""
MOST_FILES = 200
_load = pptrace.workflow.load.load
_parameters = inspect.signature(_load)
_in_room = False


def keep_for(path: Path) -> None:
    """Keep analyses, or not, for the tests of a file."""
    global _in_room
    _in_room = path.is_relative_to(TESTS) and path.relative_to(TESTS).parts[0] in ROOMS


def install() -> None:
    """Let all that import :func:`pptrace.workflow.load.load` from now on have the one that keeps."""
    pptrace.workflow.load.load = load


@wraps(_load)
def load(*arguments: Any, **options: Any) -> Any:
    bound = _parameters.bind(*arguments, **options)
    bound.apply_defaults()
    given = bound.arguments
    paths = tuple(given.pop("paths"))
    is_plain = given["on_progress"] is given["engine"] is None and all(isinstance(path, Path) for path in paths)
    state = _state_of(paths) if _in_room and is_plain else None
    return _load(*arguments, **options) if state is None else _kept(paths, Path.cwd(), state, *given.items())


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


@lru_cache(maxsize=32)
def _kept(paths: tuple[Path, ...], _cwd: Path, _state: State, *options: tuple[str, Any]) -> Any:
    return _load(paths, **dict(options))
