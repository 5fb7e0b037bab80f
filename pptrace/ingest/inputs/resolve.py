"""Resolve the PATHs of a user to the files to read, with the ranks that run.json declares for them.

    PATH = a trace file
         | a directory with one trace per rank, in it or in its subdirectories
         | a TensorBoard log directory: *.pt.trace.json or *.pt.trace.json.gz lie one level down
         | a run directory: run.json lists the file of each rank

A file of Nsight Systems can hold several ranks. Flight-recorder dumps in a directory with traces are not read as traces: they
add facts to the communication calls in these (:mod:`pptrace.recognise.calls.from_flight_recorder`).

No trace is read here: formats are recognised by the first bytes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pptrace.errors import TraceError, UsageError
from pptrace.ingest.chrome.reader import has_kineto_members
from pptrace.ingest.common.byte_source import first_bytes
from pptrace.ingest.common.rank_names import rank_of_value
from pptrace.ingest.flight_recorder.dump import sniff_flight
from pptrace.ingest.formats import archive_of, detect
from pptrace.ingest.inputs.directories import copies_of, directories_below, entries_of
from pptrace.ingest.nsight.report_export import RECORDED_SUFFIXES
from pptrace.ingest.op_tables.pptrace_json import sniff_pptrace_json
from pptrace.ingest.op_tables.reader import OPLOG_SUFFIXES, without_companions
from pptrace.model.tables import InputFormat

RUN_FILE = "run.json"
RUN_SCHEMA = "pptrace.run/1"
_TENSORBOARD_SUFFIXES = (".pt.trace.json", ".pt.trace.json.gz")
_TRACE_SUFFIXES = (".json", ".json.gz", ".gz", ".sqlite", ".db", *RECORDED_SUFFIXES)
_MAX_SKIPPED_SHOWN = 20
"""Number of files that a warning lists."""
_SCRIPT_TRACES_WARNING = (
    "pptrace recorded no trace, since the script's torch.profiler was active: read its last traces instead, without pptrace's "
    "marks, so that ops and steps come from labels or are inferred; for marks run the script without its profiler"
)
_MAX_SNIFFED = 200
"""Number of files in subdirectories that are sniffed where the directory itself holds traces."""


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file to read. ``rank`` is the one that run.json declares, else None."""

    path: Path
    format: InputFormat | None
    rank: int | None
    num_bytes: int


@dataclass(frozen=True, slots=True)
class OpenedInputs:
    """The files behind the PATHs, in order. ``run`` is the content of run.json, if a run directory was given (the first one).

    ``dumps`` are flight-recorder dumps in the same directories as the traces in ``files``.
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
    runs = [part for part in parts if part.run is not None]
    if len(runs) > 1:
        warnings.append(f"{runs[1].run_dir}: a second run directory; facts about the run come from {runs[0].run_dir}")
    run, run_dir = (runs[0].run, runs[0].run_dir) if runs else (None, None)
    main_files = set(without_companions([file.path for file in files.values()]))
    comparable = [
        file for file in files.values() if file.path in main_files and file.rank is None and not _is_dump(file)
    ]
    copied = copies_of([file.path for file in comparable])
    warnings += [f"{path}: is a copy of {other}; read once" for path, other in copied.items()]
    remaining = [file for file in files.values() if file.path in main_files and file.path not in copied]
    dumps = _dumps_among(remaining)
    traces = tuple(file for file in remaining if file.path not in dumps)
    return OpenedInputs(traces, tuple(warnings), run, run_dir, dumps)


def _open_one(path: Path) -> OpenedInputs:
    try:
        if path.is_dir():
            return _open_directory(path)
        exists = path.exists()
    except (OSError, ValueError):
        exists = False
    if not exists:
        raise TraceError(
            f"{path}: not found; expected a trace file, a directory of traces or a run directory; check the path"
        )
    if not path.is_file():
        raise TraceError(
            f"{path}: a pipe or a device, which can be read once only; expected a file; save the trace and give that"
        )
    if path.name == RUN_FILE and (run := _read_run(path)) is not None:
        return _open_run(path.parent, run)
    return OpenedInputs((_input_file(path, None),))


def _input_file(path: Path, rank: int | None) -> InputFile:
    by_name = InputFormat.NSYS_SQLITE if path.suffix in RECORDED_SUFFIXES else None
    return InputFile(path, detect(first_bytes(path)) or by_name, rank, path.stat().st_size)


def _open_directory(directory: Path) -> OpenedInputs:
    warnings: list[str] = []
    run_file = directory / RUN_FILE
    if run_file.is_file():
        run = _read_run(run_file)
        if run is not None and run["ranks"]:
            return _open_run(directory, _with_other_nodes(directory, run))
        reason = (
            f'unreadable; expected JSON with "schema": "{RUN_SCHEMA}"'
            if run is None
            else f"names no rank (status {run.get('status')!r}: the launcher ended before it wrote them)"
        )
        warnings.append(f"{run_file}: {reason}; read the traces in the same directory instead")
    entries = entries_of(directory)
    files, skipped = _select_traces([entry for entry in entries if entry.is_file()])
    below = [
        (subdirectory, entry)
        for subdirectory in directories_below(directory, RUN_FILE)
        for entry in _files_of(subdirectory)
    ]
    if not files:
        tensorboard = [
            entry
            for subdirectory, entry in below
            if subdirectory.parent == directory and entry.name.endswith(_TENSORBOARD_SUFFIXES)
        ]
        files, skipped_below = (
            _select_traces(tensorboard) if tensorboard else _select_traces([entry for _, entry in below])
        )
        skipped += skipped_below
        if len({file.path.parent for file in files}) > 1:
            warnings.append(
                f"{directory}: traces in more than one subdirectory; read as those of one job; "
                "if they are of several, give one directory"
            )
    if not files:
        raise TraceError(_no_traces(directory, entries, skipped))
    skipped += [f"{name} (a run directory; give its path to read it)" for name in _run_directories(entries)]
    skipped += _traces_not_read(directory, [entry for _, entry in below], files)
    if skipped:
        warnings.append(f"{directory}: skipped {_join_listed(skipped, _MAX_SKIPPED_SHOWN)}")
    return OpenedInputs(tuple(files), tuple(warnings))


def _select_traces(paths: Sequence[Path]) -> tuple[list[InputFile], list[str]]:
    """Select the traces to read among the files of a directory; with a reason for each other file that looks like one."""
    candidates = [path for path in paths if not _is_run_file(path)]
    return _highest_priority(*_trace_files(without_companions(_without_exported(candidates))))


def _files_of(directory: Path) -> list[Path]:
    try:
        return [entry for entry in entries_of(directory) if entry.is_file()]
    except (TraceError, OSError):
        return []


def _traces_not_read(directory: Path, below: Sequence[Path], files: Sequence[InputFile]) -> list[str]:
    """Traces in subdirectories that are not read, each with the reason; partners of op tables do not count."""
    read = {file.path for file in files}
    candidates = [path for path in below if path not in read and path.name.endswith(_TRACE_SUFFIXES + OPLOG_SUFFIXES)]
    traces_below, _ = _trace_files(without_companions(_without_exported(candidates[:_MAX_SNIFFED])))
    return [
        f"{file.path.relative_to(directory)} ({_reason_not_read(file.path, read)}; give its path to read it)"
        for file in traces_below
        if not sniff_pptrace_json(first_bytes(file.path))
    ]


def _reason_not_read(path: Path, read: Collection[Path]) -> str:
    """Why a trace is not read: another name than TensorBoard's in a directory of those, or in a subdirectory."""
    if any(other.parent == path.parent for other in read):
        return f"not named *{_TENSORBOARD_SUFFIXES[0]} as the other traces in its directory are"
    return "in a subdirectory"


def _without_exported(paths: Sequence[Path]) -> list[Path]:
    """Drop files of Nsight Systems of which an export, or a report, is in the same directory."""
    steps = (".sqlite", *RECORDED_SUFFIXES)
    latest: dict[Path, int] = {}
    for path in paths:
        if path.suffix in steps:
            stem = path.with_suffix("")
            latest[stem] = min(latest.get(stem, len(steps)), steps.index(path.suffix))
    return [
        path for path in paths if path.suffix not in steps or steps.index(path.suffix) == latest[path.with_suffix("")]
    ]


def _is_run_file(path: Path) -> bool:
    return path.name == RUN_FILE or path.match("run.node*.json")


def _with_other_nodes(directory: Path, run: Mapping[str, Any]) -> Mapping[str, Any]:
    """Merge the ranks of all nodes into the run: each node but the first writes its own run.node*.json."""
    others = [_read_run(path) for path in sorted(directory.glob("run.node*.json"))]
    return {
        **run,
        "ranks": [*run["ranks"], *(entry for other in others if other is not None for entry in other["ranks"])],
    }


def _trace_files(paths: Sequence[Path]) -> tuple[list[InputFile], list[str]]:
    """(the traces, a description of each other file that looks like one)."""
    files: list[InputFile] = []
    skipped: list[str] = []
    for path in paths:
        try:
            file = _input_file(path, None)
        except TraceError:
            skipped.append(f"{path.name} (unreadable)")
            continue
        if file.format is not None:
            files.append(file)
        elif archive := archive_of(first_bytes(path)):
            skipped.append(f"{path.name} (a {archive} archive; unpack it)")
        elif path.name.endswith(_TRACE_SUFFIXES):
            skipped.append(f"{path.name} ({'empty' if file.num_bytes == 0 else 'no trace'})")
    return files, skipped


def _highest_priority(files: list[InputFile], skipped: list[str]) -> tuple[list[InputFile], list[str]]:
    """Keep the most informative format of a directory that has the same run in several.

    In this order: profiles, op tables, Chrome traces drawn by other programs, reports of pptrace.
    """
    if not any(file.format is InputFormat.OPLOG for file in files):
        return files, skipped
    priorities = {file.path: _format_priority(file) for file in files}
    highest = max(priorities.values())
    selected = {*(path for path, priority in priorities.items() if priority == highest), *_dumps_among(files)}
    not_selected = [
        f"{file.path.name} (the same run is read from other files)" for file in files if file.path not in selected
    ]
    return [file for file in files if file.path in selected], [*skipped, *not_selected]


def _dumps_among(files: Sequence[InputFile]) -> tuple[Path, ...]:
    """The flight-recorder dumps among the files, if a profiler's traces are among them too."""
    if not any(file.format in (InputFormat.KINETO, InputFormat.NSYS_SQLITE) for file in files):
        return ()
    tables = (file.path for file in files if file.format is InputFormat.OPLOG)
    return tuple(path for path in tables if sniff_flight(first_bytes(path)))


def _is_dump(file: InputFile) -> bool:
    """Whether it is a flight-recorder dump: equal ones are no copies, since those of two ranks may both be empty."""
    return file.format is InputFormat.OPLOG and sniff_flight(first_bytes(file.path))


def _format_priority(file: InputFile) -> int:
    start = first_bytes(file.path)
    if file.format is InputFormat.OPLOG:
        return 0 if sniff_pptrace_json(start) or sniff_flight(start) else 2
    return 1 if file.format in (InputFormat.KINETO, InputFormat.CHROME) and not has_kineto_members(start) else 3


def _run_directories(entries: Sequence[Path]) -> list[str]:
    return [entry.name for entry in entries if entry.is_dir() and (entry / RUN_FILE).is_file()]


def _no_traces(directory: Path, entries: Sequence[Path], skipped: Sequence[str]) -> str:
    if runs := _run_directories(entries):
        return f"{directory}: holds run directories ({_join_listed(runs)}) and no traces; expected one run; give one of them"
    finding = f"no trace among {_join_listed(skipped)}" if skipped else ("no trace files" if entries else "empty")
    return (
        f"{directory}: {finding}; expected one Kineto trace (.json, .json.gz) per rank, what Nsight Systems recorded "
        "(.sqlite, .nsys-rep, .qdstrm), or tables of ops (.csv, .parquet); check the path or record a run"
    )


def _read_run(path: Path) -> Mapping[str, Any] | None:
    """The content of run.json, None where it is malformed."""
    try:
        run = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(run, dict) or not isinstance(run.get("ranks"), list):
        return None
    return run


def _open_run(directory: Path, run: Mapping[str, Any]) -> OpenedInputs:
    """Open the files that run.json names, with a warning for the ranks without one."""
    warnings: list[str] = []
    if run.get("schema") != RUN_SCHEMA:
        warnings.append(
            f"{directory / RUN_FILE}: schema {run.get('schema')!r}; this version of pptrace knows {RUN_SCHEMA!r} "
            "and reads it as that; facts may be missing"
        )
    files: dict[Path, InputFile] = {}
    missing: list[tuple[int, str]] = []
    entries = [entry for entry in run["ranks"] if isinstance(entry, dict)]
    trace_key = "trace"
    if not any(_trace_path(directory, entry.get("trace")) for entry in entries):
        scripts = [entry for entry in entries if _trace_path(directory, entry.get("script_trace"))]
        if scripts:
            trace_key = "script_trace"
            warnings.append(_SCRIPT_TRACES_WARNING)
    for entry in entries:
        rank = rank_of_value(entry.get("rank"))
        if rank is None:
            warnings.append(f"{directory / RUN_FILE}: rank {entry.get('rank')!r} is no number; skipped its trace")
            continue
        error = str(entry.get("error") or "").strip().split("\n")[-1]
        failed = entry.get("status") not in (None, "ok")
        state = f"{entry.get('status')}: {error}" if failed and error else str(entry.get("status"))
        path = _trace_path(directory, entry.get(trace_key))
        if path is None:
            missing.append((rank, state if failed else _missing_reason(entry)))
            continue
        if failed:
            warnings.append(f"rank {rank} failed ({state}); its trace may end early, so that its last steps lack ops")
        is_shared = (
            path in files
        )  # Nsight Systems records all ranks of a node into one file, which contains their ranks
        files[path] = _input_file(path, None if is_shared else rank)
    if not files:
        raise TraceError(
            f"{directory}: {RUN_FILE} names no trace that exists; expected one per rank; "
            f"{'; '.join([*_by_reason(missing), *warnings]) or 'run again'}{_hang_hint(directory, run)}"
        )
    if missing:
        warnings.insert(
            0, f"{directory}: {len(missing)} of {len(entries)} ranks have no trace: {_join_listed(_by_reason(missing))}"
        )
    return OpenedInputs(tuple(files.values()), tuple(warnings), run, directory)


def _hang_hint(directory: Path, run: Mapping[str, Any]) -> str:
    """The verdict on a run that hung before it recorded anything, and the command that explains it; "" if it did not hang."""
    hang = run.get("hang")
    detail = hang.get("detail") if isinstance(hang, dict) else None
    return f"; the run hung: {detail} (pptrace hang {directory})" if isinstance(detail, str) else ""


def _by_reason(missing: Sequence[tuple[int, str]]) -> list[str]:
    """Group ranks without a trace by reason, a text for each reason."""
    reasons: dict[str, list[int]] = {}
    for rank, reason in missing:
        reasons.setdefault(reason, []).append(rank)
    return [
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} ({reason})"
        for reason, ranks in reasons.items()
    ]


def _missing_reason(entry: Mapping[str, Any]) -> str:
    """Why a rank has no trace: its note in run.json, if there is one."""
    note = entry.get("note")
    script_trace = entry.get("script_trace")
    where = f"; its trace is {script_trace}" if isinstance(script_trace, str) and script_trace else ""
    return f"{note}{where}" if isinstance(note, str) and note else "no trace written"


def _trace_path(directory: Path, name: object) -> Path | None:
    """The file that run.json names for a rank, if it exists. Paths that lead out of the directory are refused."""
    if not isinstance(name, str) or not name or "\0" in name:
        return None
    path = directory / name
    return path if path.is_file() and path.resolve().is_relative_to(directory.resolve()) else None


def _join_listed(items: Sequence[str], limit: int = 6) -> str:
    shown = ", ".join(items[:limit])
    return f"{shown} and {len(items) - limit} more" if len(items) > limit else shown
