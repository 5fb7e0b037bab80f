"""Resolve a PATH → the runs at it: one, as all other commands read it, or each of the runs that a directory holds.

A directory holds several runs where it has no traces of its own, and its subdirectories are run directories, or have traces of
the same ranks each; or where it has tables of ops that hold the same steps of a rank. Subdirectories with different ranks are one
job, as those of several hosts are, and tables of different steps are one run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

from pptrace.errors import PptraceError, TraceError
from pptrace.ingest.common.rank_names import rank_of_file_name
from pptrace.ingest.formats import read_file
from pptrace.ingest.inputs.directories import entries_of, readable_entries
from pptrace.ingest.inputs.resolve import RUN_FILE, InputFile, open_inputs, runs_in
from pptrace.model.traces import InputFormat
from pptrace.model.wording import listed

_FEW = 6
"""Number of directories that a message names."""


def runs_at(path: Path) -> tuple[Path, ...]:
    """The runs at a path, in natural order of their names; the path itself where it is one.

    Raises:
        TraceError: it is not clear which traces are of one run; the message is one line.
    """
    if not path.is_dir() or (path / RUN_FILE).is_file():
        return (path,)
    try:
        files = open_inputs([path]).files
    except TraceError:
        files = ()  # run directories alone, or nothing, which reading it says
    if any(file.path.parent == path for file in files):
        return tuple(file.path for file in files) if _are_tables_of_runs(files) else (path,)
    runs = runs_in(entries_of(path))
    folders: dict[Path, list[InputFile]] = {}
    for file in files:
        folders.setdefault(path / file.path.relative_to(path).parts[0], []).append(file)
    if runs and folders:
        raise TraceError(
            f"{path}: holds run directories ({_names(runs)}) and other traces (in {_names(folders)}); expected one run, or a "
            "directory of runs alone; give that"
        )
    if runs:
        return tuple(runs)
    if len(folders) == 1:
        (folder,) = folders
        inside = runs_at(folder)
        return inside if len(inside) > 1 else (path,)
    if files and not _are_runs(path, folders):
        return (path,)
    if files:
        sides = [folder for folder in folders if runs_at(folder) != (folder,)]
    else:
        sides = [entry for entry in entries_of(path) if runs_in(readable_entries(entry, Path.is_dir))]
    if sides:
        raise TraceError(
            f"{path}: holds directories of several runs ({_names(sides)}); expected one run, or the runs of one program; give "
            "one of them as A and another as B"
        )
    return tuple(folders) or (path,)


def _names(folders: Sequence[Path] | Mapping[Path, object]) -> str:
    return listed((folder.name for folder in folders), _FEW)


def _are_runs(path: Path, folders: Mapping[Path, Sequence[InputFile]]) -> bool:
    """Return whether the traces in each folder are a run of their own rather than ranks, or steps, of one run."""
    if len(folders) < 2:
        return False
    named = [{rank_of_file_name(file.path.name) for file in files} for files in folders.values()]
    if None in set().union(*named):
        return _have_same_ranks(*list(folders.values())[:2])
    if not any(one & other for one, other in combinations(named, 2)):
        return False
    if any(ranks != named[0] for ranks in named):
        raise TraceError(
            f"{path}: the traces in {_names(folders)} are of some ranks alike and of others not, by their names; expected "
            "one run, or a directory of runs with all their ranks each; give one of them"
        )
    return _have_same_ranks(*([files[0]] for files in list(folders.values())[:2]))


def _are_tables_of_runs(files: Sequence[InputFile]) -> bool:
    """Return whether files are tables of ops, of which each has a run: the first two have a step of a rank in common."""
    if len(files) < 2 or any(file.format is not InputFormat.OPLOG for file in files):
        return False
    try:
        steps, others = (_steps_of_ranks([file]) for file in files[:2])
    except PptraceError:
        return False
    return any(steps[rank] & others[rank] for rank in steps.keys() & others.keys())


def _have_same_ranks(first: Sequence[InputFile], second: Sequence[InputFile]) -> bool:
    """Return whether files of two folders are of the same ranks, and of the same steps where they are tables, by what is in them.

    The name of a file may have the rank on its host alone.
    """
    try:
        steps, others = _steps_of_ranks(first), _steps_of_ranks(second)
    except PptraceError:
        return False  # reading them says what is wrong
    common = steps.keys() & others.keys()
    if not common or None in common:
        return False
    return not all(steps[rank] and others[rank] and not steps[rank] & others[rank] for rank in common)


def _steps_of_ranks(files: Sequence[InputFile]) -> dict[int | None, set[int]]:
    """The steps that tables of ops have of each rank; none of other traces' ranks."""
    steps: dict[int | None, set[int]] = {}
    for trace in (trace for file in files for trace in read_file(file.path, file.format)):
        of_rank = steps.setdefault(trace.info.rank, set())
        if trace.ops is not None:
            of_rank.update(trace.ops["step"].unique().tolist())
    return steps
