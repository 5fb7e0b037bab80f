"""Resolve the PATHs that a user gives → the files to read, with the ranks they should have.

    PATH = a trace file
         | a directory with one trace per rank, in it or in its subdirectories
         | a TensorBoard log directory: *.pt.trace.json or *.pt.trace.json.gz lie one level down
         | a run directory: run.json says which file is whose

A file of Nsight Systems can hold several ranks. Flight-recorder dumps next to traces are no traces of their own: they say more of
the calls in these (:mod:`pptrace.recognise.calls.from_flight_recorder`).

No trace is read here: formats are recognised by the first bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from pptrace.errors import TraceError, UsageError
from pptrace.ingest.common.byte_source import first_bytes
from pptrace.ingest.common.json_texts import object_in
from pptrace.ingest.common.rank_names import rank_of_value
from pptrace.ingest.formats import (
    PROFILE_SUFFIXES,
    SUFFIXES,
    Priority,
    detect,
    format_by_suffix,
    format_of,
    named_format,
    readers_of,
    without_companions,
    without_other_forms,
)
from pptrace.ingest.inputs.directories import copies_of, directories_below, entries_of, readable_entries
from pptrace.ingest.sniff import archive_of
from pptrace.model.traces import InputFormat
from pptrace.model.wording import as_ranges, listed

RUN_FILE = "run.json"
RUN_SCHEMA = "pptrace.run/1"
_TENSORBOARD_SUFFIXES = (".pt.trace.json", ".pt.trace.json.gz")
_OF_OPS = (Priority.TABLE, Priority.EXTRACT)
_MOST_SKIPPED = 20
_FEW, _FEW_BELOW = 6, 3
"""Numbers of files that a warning names, of those below with their folders."""
_SHOWN_BYTES = 24
_THEIR_TRACES = (
    "pptrace recorded none: these are traces that the script's own torch.profiler wrote, which know less than pptrace's "
    "marks; for a report of those run the script without its profiler"
)
FACTS_OF_RANKS = "rank*.facts.json"
"""Files of a run that goes on: its launcher merges them into run.json at the end."""
_MOST_SNIFFED = 200
"""Number of files below a directory that are looked at for traces."""


class InputFile(Struct, frozen=True):
    """One file to read. ``rank`` is what the run says it should be; None where nothing says so."""

    path: Path
    format: InputFormat | None
    rank: int | None
    num_bytes: int


class OpenedInputs(Struct, frozen=True):
    """The files behind the PATHs, in order. ``run`` is the whole of run.json where one was given (the first of several).

    ``dumps`` are flight-recorder dumps that complete the traces in ``files``.
    """

    files: tuple[InputFile, ...]
    warnings: tuple[str, ...] = ()
    run: Mapping[str, Any] | None = None
    run_dir: Path | None = None
    dumps: tuple[Path, ...] = ()


def open_inputs(paths: Sequence[Path]) -> OpenedInputs:
    """Resolve PATHs to trace files.

    Raises:
        UsageError: no path is given.
        TraceError: a path does not exist, or a directory holds no trace.
    """
    if not paths:
        raise UsageError("no path is given; expected trace files, a directory with one per rank, or a run directory")
    parts = [_open_one(Path(path)) for path in paths]
    warnings = [line for part in parts for line in part.warnings]
    files: dict[Path, InputFile] = {}
    for file in (file for part in parts for file in part.files):
        if file.path.resolve() in files:
            warnings.append(f"{file.path}: given more than once; read once")
        files.setdefault(file.path.resolve(), file)
    runs = [(part.run, part.run_dir) for part in parts if part.run is not None]
    if len(runs) > 1:
        warnings.append(f"{runs[1][1]}: a second run directory; facts about the run are taken from {runs[0][1]}")
    run, run_dir = runs[0] if runs else (None, None)
    chosen = set(without_companions([file.path for file in files.values()]))
    alike = [file for file in files.values() if file.path in chosen and file.rank is None and not _is_dump(file)]
    copied = copies_of([file.path for file in alike])
    warnings += [f"{path}: is a copy of {other}; read once" for path, other in copied.items()]
    left = [file for file in files.values() if file.path in chosen and file.path not in copied]
    dumps = _dumps_with_traces(left)
    traces = tuple(file for file in left if file.path not in dumps)
    return OpenedInputs(traces, tuple(warnings), run, run_dir, dumps)


def require_path(path: Path) -> None:
    """Refuse a PATH where nothing is.

    Raises:
        TraceError: it does not exist.
    """
    try:
        exists = path.exists()
    except (OSError, ValueError):
        exists = False
    if not exists:
        raise TraceError(
            f"{path}: not found; expected a trace file, a directory of traces or a run directory; check the path"
        )


def _open_one(path: Path) -> OpenedInputs:
    require_path(path)
    if path.is_dir():
        return _open_directory(path)
    if not path.is_file():
        raise TraceError(
            f"{path}: a pipe or a device, which can be read once only; expected a file; save the trace and give that"
        )
    if path.name == RUN_FILE and (run := _read_run(path)) is not None:
        return _open_run(path.parent, run)
    return OpenedInputs((_input_file(path, None),))


def _input_file(path: Path, rank: int | None) -> InputFile:
    return InputFile(path, detect(first_bytes(path)) or named_format(path), rank, path.stat().st_size)


def _open_directory(directory: Path) -> OpenedInputs:
    warnings: list[str] = []
    run_file = directory / RUN_FILE
    if run_file.exists():
        run = _read_run(run_file)
        if run is not None and run["ranks"]:
            nodes = [_read_run(path) for path in sorted(directory.glob("run.node*.json"))]  # of each node but the first
            ranks = [entry for node in (run, *nodes) if node is not None for entry in node["ranks"]]
            return _open_run(directory, {**run, "ranks": ranks})
        reason = (
            f'unreadable; expected a regular file of JSON with "schema": "{RUN_SCHEMA}"'
            if run is None
            else f"names no rank (status {run.get('status')!r}: it goes on, or its launcher was killed)"
        )
        warnings.append(f"{run_file}: {reason}; took the traces in its folder")
    entries = entries_of(directory)
    below = [
        entry for folder in directories_below(directory, RUN_FILE) for entry in readable_entries(folder, Path.is_file)
    ]
    found = [entry for entry in entries if entry.is_file()]
    files, skipped = _taken(found)
    if not files:
        tensorboard = [
            entry for entry in below if entry.parent.parent == directory and entry.name.endswith(_TENSORBOARD_SUFFIXES)
        ]
        found += tensorboard or below
        files, skipped_below = _taken(tensorboard or below)
        skipped += skipped_below
        by_rank = all(known.has_folder_per_rank for file in files for known in readers_of(file.format))
        if len({file.path.parent for file in files}) > 1 and not by_rank:
            warnings.append(f"{directory}: traces in more than one subdirectory; all taken as one job")
    if not files and not (files := _empty_files(found)):
        raise TraceError(_no_traces(directory, entries, skipped))
    skipped += _no_files(entries)
    skipped += [f"{run.name} (a run directory; give it to read it)" for run in runs_in(entries)]
    skipped += _left_below(directory, below, files)
    if skipped:
        warnings.append(f"{directory}: skipped {listed(skipped, _MOST_SKIPPED)}")
    return OpenedInputs(tuple(files), tuple(warnings))


def _taken(paths: Sequence[Path]) -> tuple[list[InputFile], list[str]]:
    """Select the traces to read of files that lie together, and describe what each of the others is.

    Of several forms of a run's ops the most detailed is read: profiles before tables of ops, tables before other programs'
    pictures of them, and what pptrace itself wrote last.
    """
    of_run = (RUN_FILE, "run.node*.json", FACTS_OF_RANKS)
    files, skipped = _trace_files([path for path in paths if not any(map(path.match, of_run))])
    if not any(known.priority in _OF_OPS for file in files for known in readers_of(file.format)):
        return files, skipped
    priorities = {file.path: format_of(file.path, file.format).priority for file in files if file.format is not None}
    most = max(priorities.values())
    chosen = {*(path for path, priority in priorities.items() if priority == most), *_dumps_with_traces(files)}
    left = [f"{file.path.name} (the run is read from other files)" for file in files if file.path not in chosen]
    return [file for file in files if file.path in chosen], [*skipped, *left]


def _empty_files(paths: Sequence[Path]) -> list[InputFile]:
    """Empty files whose names tell their format: what is expected of them their reader says best."""
    empty = [path for path in paths if path.name.endswith(PROFILE_SUFFIXES) and path.stat().st_size == 0]
    files = [_input_file(path, None) for path in empty]
    named = ((file, file.format or format_by_suffix(file.path)) for file in files)
    return [replace(file, format=name) for file, name in named if name is not None]


def _left_below(directory: Path, below: Sequence[Path], files: Sequence[InputFile]) -> list[str]:
    """Traces in subdirectories, in addition to those that are read; no partner of a table is one."""
    read = {file.path for file in files}
    folders = {path.parent for path in read}
    others = [path for path in below if path not in read and path.name.endswith(SUFFIXES)]
    left: dict[str, list[str]] = {}
    for file in _trace_files(others[:_MOST_SNIFFED])[0]:
        if file.format is None or format_of(file.path, file.format).is_own_output:
            continue
        why = "in a subdirectory"
        if file.path.parent in folders:
            why = f"not named *{_TENSORBOARD_SUFFIXES[0]} as the other traces in its folder are"
        left.setdefault(why, []).append(str(file.path.relative_to(directory)))
    return [
        f"{listed(names, _FEW_BELOW)} ({why}; give {'it' if len(names) == 1 else 'one'} to read it)"
        for why, names in left.items()
    ]


def _trace_files(paths: Sequence[Path]) -> tuple[list[InputFile], list[str]]:
    """Select the traces, without what is read together with another file, and describe what each of the others is."""
    files: list[InputFile] = []
    skipped: list[str] = []
    for path in without_companions(without_other_forms(paths)):
        try:
            file = _input_file(path, None)
        except TraceError as err:
            skipped.append(f"{path.name} ({str(err).removeprefix(f'{path}: ').partition(';')[0]})")
            continue
        if file.format is not None:
            files.append(file)
            continue
        start = first_bytes(path)
        if archive := archive_of(start):
            skipped.append(f"{path.name} (a {archive} archive; unpack it)")
        elif path.name.endswith(PROFILE_SUFFIXES):
            nothing = "damaged gzip" if file.num_bytes else "empty"
            begins = f"no trace: begins with {start[:_SHOWN_BYTES].decode('utf-8', 'replace')!r}"
            skipped.append(f"{path.name} ({begins if start else nothing})")
    return files, skipped


def _no_files(entries: Sequence[Path]) -> list[str]:
    """Describe what has the name of a trace and is no file."""
    named = [entry for entry in entries if entry.name.endswith(PROFILE_SUFFIXES)]
    return [
        f"{entry.name} ({'a pipe or a device' if entry.exists() else 'a link to nothing'})"
        for entry in named
        if not (entry.is_file() or entry.is_dir())
    ]


def _dumps_with_traces(files: Sequence[InputFile]) -> tuple[Path, ...]:
    """The flight-recorder dumps among files that hold a profiler's traces as well."""
    if not any(known.takes_dumps for file in files for known in readers_of(file.format)):
        return ()
    return tuple(file.path for file in files if _is_dump(file))


def _is_dump(file: InputFile) -> bool:
    """Return whether it is a rank's flight-recorder dump, of which those of two ranks may be empty: no copies."""
    if file.format is None or not any(known.is_dump for known in readers_of(file.format)):
        return False
    return format_of(file.path, file.format).is_dump


def runs_in(entries: Sequence[Path]) -> list[Path]:
    """The run directories among the entries of a directory."""
    return [entry for entry in entries if (entry / RUN_FILE).is_file()]


def _no_traces(directory: Path, entries: Sequence[Path], skipped: Sequence[str]) -> str:
    if runs := [run.name for run in runs_in(entries)]:
        return f"{directory}: holds run directories ({listed(runs, _FEW)}) and no traces; expected one run; give one of them"
    content = f"no trace among {listed(skipped, _FEW)}" if skipped else ("no trace files" if entries else "empty")
    return (
        f"{directory}: {content}; expected one Kineto trace (.json, .json.gz) per rank, what Nsight Systems (.sqlite, "
        ".nsys-rep, .qdstrm), rocprofv3 (.db), RPD (.rpd) or JAX (.xplane.pb) recorded, or tables of ops (.csv, .parquet); check "
        "the path or record a run"
    )


def run_of(path: Path) -> Mapping[str, Any]:
    """The run.json of a run directory, or of the file itself; {} where there is none, or no object in it."""
    file = path / RUN_FILE if path.is_dir() else path
    return object_in(file) if file.name == RUN_FILE else {}


def ranks_of_run(run: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The entries of the ranks in run.json; [] where there are none."""
    ranks = run.get("ranks")
    return [entry for entry in ranks if isinstance(entry, Mapping)] if isinstance(ranks, list) else []


def _read_run(path: Path) -> Mapping[str, Any] | None:
    """run.json, None where it is not one."""
    run = object_in(path)
    return run if isinstance(run.get("ranks"), list) else None


def _open_run(directory: Path, run: Mapping[str, Any]) -> OpenedInputs:
    """The files that run.json names; a rank without one is a warning."""
    warnings: list[str] = []
    if run.get("schema") != RUN_SCHEMA:
        warnings.append(
            f"{directory / RUN_FILE}: schema {run.get('schema')!r}; this pptrace knows {RUN_SCHEMA!r}; read as that"
        )
    files: dict[Path, InputFile] = {}
    missing: list[tuple[int, str]] = []
    ended_badly: list[tuple[int, str]] = []
    entries = [entry for entry in run["ranks"] if isinstance(entry, dict)]
    named = "trace"
    if not any(_trace_path(directory, entry.get("trace")) for entry in entries):
        scripts = [entry for entry in entries if _trace_path(directory, entry.get("script_trace"))]
        if scripts:
            named = "script_trace"
            warnings.append(_THEIR_TRACES)
    for entry in entries:
        rank = rank_of_value(entry.get("rank"))
        if rank is None:
            warnings.append(f"{directory / RUN_FILE}: rank {entry.get('rank')!r} is no number; skipped its trace")
            continue
        error = str(entry.get("error") or "").strip().split("\n")[-1]
        failed = entry.get("status") not in (None, "ok")
        state = f"{entry.get('status')}: {error}" if failed and error else str(entry.get("status"))
        path = _trace_path(directory, entry.get(named))
        if path is None:
            note, script_trace = entry.get("note"), entry.get("script_trace")  # as the rank wrote down
            why = note if isinstance(note, str) and note else "no trace written"
            if why == note and isinstance(script_trace, str) and script_trace:
                why += f"; its trace is {script_trace}"
            missing.append((rank, state if failed else why))
            continue
        if failed:
            ended_badly.append((rank, state))
        shared = path in files  # Nsight Systems records all ranks of a node into one file, which says who is who
        files[path] = _input_file(path, None if shared else rank)
    if ended_badly:
        warnings.append(_ended_badly(ended_badly))
    if not files:
        hang = run.get("hang")
        detail = hang.get("detail") if isinstance(hang, dict) else None
        hung = f"; the run hung: {detail} (pptrace hang {directory})" if isinstance(detail, str) else ""
        raise TraceError(
            f"{directory}: {RUN_FILE} names no trace that exists; expected one per rank; "
            f"{'; '.join([*_same(missing), *warnings]) or 'run again'}{hung}"
        )
    if missing:
        warnings.insert(
            0,
            f"{directory}: {len(missing)} of {len(entries)} ranks have no trace: {listed(_same(missing), _FEW)}",
        )
    return OpenedInputs(tuple(files.values()), tuple(warnings), run, directory)


def _same(missing: Sequence[tuple[int, str]]) -> list[str]:
    """Each reason once, with the ranks that it is of."""
    reasons: dict[str, list[int]] = {}
    for rank, reason in missing:
        reasons.setdefault(reason, []).append(rank)
    return [
        f"{'rank' if len(ranks) == 1 else 'ranks'} {as_ranges(ranks)} ({reason})" for reason, ranks in reasons.items()
    ]


def _ended_badly(ranks: Sequence[tuple[int, str]]) -> str:
    """The warning that names the ranks which have a trace and ended badly, however many, with the reason of each."""
    reasons = _same(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0][0]} ended badly ({ranks[0][1]}); its trace may be incomplete"
    if len(reasons) == 1:
        return (
            f"ranks {as_ranges(rank for rank, _ in ranks)} ended badly ({ranks[0][1]}); their traces may be incomplete"
        )
    return f"{len(ranks)} ranks ended badly: {listed(reasons, _FEW)}; their traces may be incomplete"


def _trace_path(directory: Path, name: object) -> Path | None:
    """The file that run.json names for a rank, if it is in the directory, packed or unpacked since."""
    if not isinstance(name, str) or not name or "\0" in name:
        return None
    paths = [directory / one for one in (name, name.removesuffix(".gz"), f"{name}.gz")]
    inside = (path for path in paths if path.is_file() and path.resolve().is_relative_to(directory.resolve()))
    return next(inside, None)
