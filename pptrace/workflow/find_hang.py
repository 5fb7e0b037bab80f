"""Diagnose a hang: from the PATHs of ``pptrace hang``, or the verdict that a run recorded, to the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from pptrace.analysis.hang import diagnose_dumps, dump_paths, read_dumped_ranks
from pptrace.errors import TraceError
from pptrace.hang_diagnosis.calls import hang_of_run, rank_text
from pptrace.hang_diagnosis.verdict import as_json
from pptrace.ingest.common.byte_source import first_bytes
from pptrace.ingest.formats import entry_of
from pptrace.ingest.inputs.resolve import RUN_FILE, ranks_of_run, run_of
from pptrace.ingest.sniff import sniff_flight


class HangResult(Struct, frozen=True):
    """A verdict. ``hang`` is the JSON field of that name; None with the ``reason``. ``ranks`` have a dump or are in run.json;
    the dumps of ``unreadable`` cannot be read.
    """

    hang: Mapping[str, Any] | None
    reason: str
    ranks: tuple[int, ...]
    warnings: tuple[str, ...] = ()
    unreadable: tuple[int, ...] = ()


def find_hang(paths: Sequence[Path]) -> HangResult:
    """Diagnose the run of these dumps, or read the verdict that a run directory has recorded.

    Raises:
        TraceError: there is no dump, and no run directory.
    """
    for path in paths:
        if (run := run_of(path)) and not _dumps_in(path):
            hang = hang_of_run(run)
            ranks = sorted(rank for entry in ranks_of_run(run) if isinstance(rank := entry.get("rank"), int))
            reason = f"{path}: the run ended as {run.get('status')!r}, and no rank was seen to hang"
            return HangResult(hang, "" if hang else reason, tuple(ranks))
    dumps = [dump for path in paths for dump in _dumps_of(path)]
    dumped = read_dumped_ranks(dumps)
    if not dumped.dumps:
        raise TraceError("; ".join(dumped.warnings) or _no_dumps_message(paths))
    diagnosis = diagnose_dumps(dumped)
    ranks = sorted({*(dump.rank for dump in dumped.dumps), *dumped.unreadable})
    absent = diagnosis.ranks.keys() - set(ranks)
    of_absent = [f"no dump of {rank_text(absent)}: not copied, or the process had died"] if absent else []
    warnings = (*dumped.warnings, *of_absent)
    return HangResult(as_json(diagnosis), diagnosis.reason, tuple(ranks), warnings, tuple(dumped.unreadable))


def hang_of_dumps(dumps: Sequence[Path], is_all: bool) -> Mapping[str, Any] | None:
    """The verdict on a run with these dumps; where they are all that it left, damaged ones with them count too."""
    folders = {path.parent for path in dumps} if is_all else ()
    dumped = [path for folder in folders for path in dump_paths(folder, dumps)]
    return as_json(diagnose_dumps(read_dumped_ranks(dumped or dumps)))


def _dumps_of(path: Path) -> list[Path]:
    if path.is_dir():
        return dump_paths(path, _dumps_in(path))
    if not path.is_file():
        raise TraceError(f"{path}: not found; expected a flight-recorder dump, or a directory with one per rank")
    if (known := entry_of(first_bytes(path))) is not None and not known.is_dump:
        raise TraceError(
            f"{path}: no flight-recorder dump, but what `pptrace analyze` reads; expected files such as nccl_trace_rank_0"
        )
    return [path]


def _dumps_in(path: Path) -> list[Path]:
    """The dumps in a directory, or one level down where it has none itself."""
    if not path.is_dir():
        return []
    for pattern in ("*", "*/*"):
        if dumps := [file for file in sorted(path.glob(pattern)) if file.is_file() and is_dump(file)]:
            return dumps
    return []


def is_dump(path: Path) -> bool:
    """Return whether a file begins as a flight-recorder dump does."""
    try:
        return sniff_flight(first_bytes(path))
    except (TraceError, OSError):
        return False


def _no_dumps_message(paths: Sequence[Path]) -> str:
    for path in paths:
        file = path / RUN_FILE if path.is_dir() else path
        if file.name == RUN_FILE and file.is_file() and not run_of(path):
            return f"{file}: no JSON object: the launcher's verdict is not known, and there is no flight-recorder dump"
    return (
        f"{paths[0]}: no flight-recorder dump in it; expected files such as nccl_trace_rank_0, one per rank, "
        "or a run directory of pptrace run; set TORCH_FR_BUFFER_SIZE and TORCH_NCCL_DUMP_ON_TIMEOUT to get some"
    )
