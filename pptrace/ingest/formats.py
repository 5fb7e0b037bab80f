"""The formats that can be told apart by content, each with its reader. A new format is one entry here."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pptrace.errors import TraceError
from pptrace.ingest.chrome.reader import has_pairs, read_chrome, sniff_chrome
from pptrace.ingest.common.byte_source import first_bytes
from pptrace.ingest.kineto.reader import Told, read_kineto
from pptrace.ingest.nccl_inspector.reader import read_nccl_inspector, sniff_nccl_inspector
from pptrace.ingest.nsight.report_export import RECORDED_MAGIC, RECORDED_SUFFIXES, SQLITE_MAGIC
from pptrace.ingest.op_tables.reader import OPLOG_SUFFIXES, read_oplog, sniff_oplog
from pptrace.ingest.otlp.reader import read_otlp, sniff_otlp
from pptrace.model.tables import InputFormat, Trace

_NSIGHT_SUFFIXES = (*RECORDED_SUFFIXES, ".sqlite")
_ARCHIVES = {
    b"PK\x03\x04": "zip",
    b"7z\xbc\xaf\x27\x1c": "7z",
    b"Rar!\x1a\x07": "rar",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ\x00": "xz",
    b"BZh": "bzip2",
}
_TAR_PLACE, _TAR_MAGIC = 257, b"ustar"
_TRACE_KEY = re.compile(rb'"(?:traceEvents|schemaVersion|deviceProperties|baseTimeNanoseconds)"\s*:|"ph"\s*:\s*"')


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How a file may be read: on how many cores, and who is told what part of it has been (:func:`read_kineto`)."""

    cores: int = 1
    told: Told | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """How a format is recognised and read. ``sniff`` sees the first decompressed bytes of a file.

    ``read`` gives a trace for each rank that the file holds, at least one.
    """

    name: InputFormat
    sniff: Callable[[bytes], bool]
    read: Callable[[Path, ReadOptions], tuple[Trace, ...]]


def _sniff_nsight(start: bytes) -> bool:
    return start.startswith((SQLITE_MAGIC, *RECORDED_MAGIC))


def _read_nsight(path: Path, _effort: ReadOptions) -> tuple[Trace, ...]:
    """The reader, and SQLite with it, is imported for such a file only."""
    from pptrace.ingest.nsight.reader import read_nsight

    return read_nsight(path)


def _read_oplog(path: Path, _effort: ReadOptions) -> tuple[Trace, ...]:
    return read_oplog(path)


def _read_chrome(path: Path, _effort: ReadOptions) -> tuple[Trace, ...]:
    return read_chrome(path)


def _read_otlp(path: Path, _effort: ReadOptions) -> tuple[Trace, ...]:
    return read_otlp(path)


def _read_nccl_inspector(path: Path, _effort: ReadOptions) -> tuple[Trace, ...]:
    return read_nccl_inspector(path)


def _sniff_kineto(start: bytes) -> bool:
    return start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"[") and _TRACE_KEY.search(start) is not None


def _read_kineto(path: Path, effort: ReadOptions) -> tuple[Trace, ...]:
    """Kineto's, or another tool's whose begin/end events come after the first bytes."""
    try:
        trace = read_kineto(path, effort.cores, effort.told)
    except TraceError:
        if has_pairs(path):
            return read_chrome(path)
        raise
    return read_chrome(path) if trace.producer == "chrome trace" and has_pairs(path) else (trace,)


FORMATS: tuple[Format, ...] = (
    Format(InputFormat.NSYS_SQLITE, _sniff_nsight, _read_nsight),
    Format(InputFormat.OPLOG, sniff_oplog, _read_oplog),
    Format(InputFormat.CHROME, sniff_chrome, _read_chrome),
    Format(InputFormat.OTLP, sniff_otlp, _read_otlp),
    Format(InputFormat.NCCL_INSPECTOR, sniff_nccl_inspector, _read_nccl_inspector),
    Format(InputFormat.KINETO, _sniff_kineto, _read_kineto),
)
_READERS = {known.name: known.read for known in FORMATS}


def detect(start: bytes) -> InputFormat | None:
    """The format of a file that begins with these (decompressed) bytes; None where no reader knows it."""
    return next((known.name for known in FORMATS if known.sniff(start)), None)


def archive_of(start: bytes) -> str | None:
    """The kind of archive, or of compression that is not read, that these (gunzipped) bytes begin; None for any other file."""
    if start[_TAR_PLACE : _TAR_PLACE + len(_TAR_MAGIC)] == _TAR_MAGIC:
        return "tar"
    return next((kind for magic, kind in _ARCHIVES.items() if start.startswith(magic)), None)


def read_file(path: Path, name: InputFormat | None, effort: ReadOptions | None = None) -> tuple[Trace, ...]:
    """Read one file: a trace for each rank in it.

    Without a format it is read as what its name says, else as Kineto's, whose reader says what it found instead.

    Raises:
        TraceError: the file gives nothing to analyse.
    """
    if name is None and (archive := archive_of(first_bytes(path))):
        raise TraceError(f"{path}: a {archive} archive; expected a trace; unpack it and give what it holds")
    return _READERS[name or _named(path)](path, effort or ReadOptions())


def _named(path: Path) -> InputFormat:
    if path.name.endswith(_NSIGHT_SUFFIXES):
        return InputFormat.NSYS_SQLITE
    return InputFormat.OPLOG if path.name.endswith(OPLOG_SUFFIXES) else InputFormat.KINETO


def read_trace(path: Path, name: InputFormat | None) -> Trace:
    """The first of :func:`read_file`: the only one, but for files that hold several ranks."""
    return read_file(path, name)[0]
