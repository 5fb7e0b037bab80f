"""Directories of traces: their entries, their subdirectories, and files that are copies of others."""

from __future__ import annotations

import filecmp
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from pptrace.errors import TraceError
from pptrace.ingest.common.rank_names import natural_order, rank_of_file_name

MAX_DEPTH = 3
_MAX_DIRECTORIES = 1000


def entries_of(directory: Path) -> list[Path]:
    """The entries of a directory except hidden ones, in natural order: rank2 before rank10.

    Raises:
        TraceError: it cannot be listed.
    """
    try:
        entries = [entry for entry in directory.iterdir() if not entry.name.startswith(".")]
    except OSError as err:
        raise TraceError(f"{directory}: cannot be listed ({err.strerror}); check its permissions") from err
    return sorted(entries, key=lambda entry: natural_order(entry.name))


def readable_entries(directory: Path, is_kind: Callable[[Path], bool]) -> list[Path]:
    """The entries of a kind, as files or directories; none where the directory cannot be listed."""
    with suppress(TraceError, OSError):
        return list(filter(is_kind, entries_of(directory)))
    return []


def directories_below(directory: Path, run_file: str) -> Iterator[Path]:
    """The subdirectories down to MAX_DEPTH, breadth first, without hidden ones and run directories, which hold ``run_file``."""
    level, num_listed = [directory], 0
    for _ in range(MAX_DEPTH):
        subdirectories: list[Path] = []
        for parent in level:
            found = readable_entries(parent, Path.is_dir)
            subdirectories += [entry for entry in found if not (entry / run_file).is_file()]
        yield from subdirectories[: _MAX_DIRECTORIES - num_listed]
        num_listed += len(subdirectories)
        level = subdirectories[:_MAX_DIRECTORIES]
        if num_listed >= _MAX_DIRECTORIES:
            return


def copies_of(paths: Sequence[Path]) -> dict[Path, Path]:
    """Map each file that has the content of another to that other file, which is to be read.

    Files whose names contain different ranks are no copies. Of copies the one with a rank in its name is read, then the one with
    the shortest name.
    """
    by_size: dict[int, list[Path]] = {}
    for path in paths:
        if (size := path.stat().st_size) > 0:
            by_size.setdefault(size, []).append(path)
    original_of: dict[Path, Path] = {}
    for same_size in by_size.values():
        originals: list[Path] = []
        for path in sorted(same_size, key=lambda path: (rank_of_file_name(path.name) is None, len(path.name))):
            original = next((other for other in originals if _is_copy(path, other)), None)
            if original is None:
                originals.append(path)
            else:
                original_of[path] = original
    return original_of


def _is_copy(path: Path, other: Path) -> bool:
    ranks = {rank_of_file_name(path.name), rank_of_file_name(other.name)} - {None}
    try:
        return len(ranks) < 2 and filecmp.cmp(path, other, shallow=False)
    except OSError:
        return False
