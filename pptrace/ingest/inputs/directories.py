"""Directories of traces: what lies in them, what lies below, and which files are copies of others."""

from __future__ import annotations

import filecmp
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from pptrace.errors import TraceError
from pptrace.ingest.common.rank_names import rank_of_file_name

MAX_DEPTH = 3
_MOST_DIRECTORIES = 1000
_DIGITS = re.compile(r"(\d+)")


def entries_of(directory: Path) -> list[Path]:
    """What lies in a directory, hidden entries apart, in the order of a person: rank2 before rank10.

    Raises:
        TraceError: it cannot be listed.
    """
    try:
        entries = [entry for entry in directory.iterdir() if not entry.name.startswith(".")]
    except OSError as err:
        raise TraceError(f"{directory}: cannot be listed ({err.strerror}); check its permissions") from err
    return sorted(
        entries,
        key=lambda entry: [(int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS.split(entry.name)],
    )


def directories_below(directory: Path, run_file: str) -> Iterator[Path]:
    """The subdirectories down to MAX_DEPTH, those above first; not hidden ones, nor runs, which hold a ``run_file``."""
    level, seen = [directory], 0
    for _ in range(MAX_DEPTH):
        below = []
        for parent in level:
            try:
                found = [entry for entry in entries_of(parent) if entry.is_dir() and not (entry / run_file).is_file()]
            except (TraceError, OSError):
                continue
            below += found
        yield from below[: _MOST_DIRECTORIES - seen]
        seen += len(below)
        level = below[:_MOST_DIRECTORIES]
        if seen >= _MOST_DIRECTORIES:
            return


def copies(paths: Sequence[Path]) -> dict[Path, Path]:
    """The files whose content is that of another, each with the one to read in its place.

    Files whose names tell different ranks are not taken for copies. Of the others the one whose name tells its rank is read, then
    the one with the shortest name.
    """
    by_size: dict[int, list[Path]] = {}
    for path in paths:
        if (size := path.stat().st_size) > 0:
            by_size.setdefault(size, []).append(path)
    copied: dict[Path, Path] = {}
    for same_size in by_size.values():
        kept: list[Path] = []
        for path in sorted(same_size, key=lambda path: (rank_of_file_name(path.name) is None, len(path.name))):
            twin = next((other for other in kept if _is_copy(path, other)), None)
            if twin is None:
                kept.append(path)
            else:
                copied[path] = twin
    return copied


def _is_copy(path: Path, other: Path) -> bool:
    ranks = {rank_of_file_name(path.name), rank_of_file_name(other.name)} - {None}
    try:
        return len(ranks) < 2 and filecmp.cmp(path, other, shallow=False)
    except OSError:
        return False
