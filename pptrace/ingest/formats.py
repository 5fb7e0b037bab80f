"""Registry of the trace formats, which are recognised by content. A new format is one entry here."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pptrace.errors import TraceError
from pptrace.ingest.chrome.reader import has_pairs, read_chrome, sniff_chrome
from pptrace.ingest.common.byte_source import first_bytes
from pptrace.ingest.kineto.reader import ReadProgress, read_kineto
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
_TAR_OFFSET, _TAR_MAGIC = 257, b"ustar"
_TRACE_KEY = re.compile(rb'"(?:traceEvents|schemaVersion|deviceProperties|baseTimeNanoseconds)"\s*:|"ph"\s*:\s*"')


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of reading a file: number of cores, and a callback for the fraction read (:func:`read_kineto`)."""

    cores: int = 1
    on_progress: ReadProgress | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """A format and its reader. ``sniff`` gets the first decompressed bytes of a file.

    ``read`` returns a trace for each rank in the file, at least one.
    """

    name: InputFormat
    sniff: Callable[[bytes], bool]
    read: Callable[[Path, ReadOptions], tuple[Trace, ...]]


def _without_options(read: Callable[[Path], tuple[Trace, ...]]) -> Callable[[Path, ReadOptions], tuple[Trace, ...]]:
    """Adapt a reader that has no options."""
    return lambda path, _options: read(path)


def _sniff_nsight(start: bytes) -> bool:
    return start.startswith((SQLITE_MAGIC, *RECORDED_MAGIC))


def _read_nsight(path: Path, _options: ReadOptions) -> tuple[Trace, ...]:
    """Read a file of Nsight Systems; its reader and SQLite are imported only when needed."""
    from pptrace.ingest.nsight.reader import read_nsight

    return read_nsight(path)


def _sniff_kineto(start: bytes) -> bool:
    return start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"[") and _TRACE_KEY.search(start) is not None


def _read_kineto(path: Path, options: ReadOptions) -> tuple[Trace, ...]:
    """Read Kineto's JSON, or a Chrome trace of another tool whose begin/end events come after the first bytes."""
    try:
        trace = read_kineto(path, options.cores, options.on_progress)
    except TraceError:
        if has_pairs(path):
            return read_chrome(path)
        raise
    return read_chrome(path) if trace.producer == "chrome trace" and has_pairs(path) else (trace,)


FORMATS: tuple[Format, ...] = (
    Format(InputFormat.NSYS_SQLITE, _sniff_nsight, _read_nsight),
    Format(InputFormat.OPLOG, sniff_oplog, _without_options(read_oplog)),
    Format(InputFormat.CHROME, sniff_chrome, _without_options(read_chrome)),
    Format(InputFormat.OTLP, sniff_otlp, _without_options(read_otlp)),
    Format(InputFormat.NCCL_INSPECTOR, sniff_nccl_inspector, _without_options(read_nccl_inspector)),
    Format(InputFormat.KINETO, _sniff_kineto, _read_kineto),
)
_READERS = {entry.name: entry.read for entry in FORMATS}


def detect(start: bytes) -> InputFormat | None:
    """The format of a file that begins with these (decompressed) bytes; None if unknown."""
    return next((entry.name for entry in FORMATS if entry.sniff(start)), None)


def archive_of(start: bytes) -> str | None:
    """The kind of archive or unsupported compression of a file that begins with these (gunzipped) bytes; None if neither."""
    if start[_TAR_OFFSET : _TAR_OFFSET + len(_TAR_MAGIC)] == _TAR_MAGIC:
        return "tar"
    return next((kind for magic, kind in _ARCHIVES.items() if start.startswith(magic)), None)


def read_file(path: Path, name: InputFormat | None, options: ReadOptions | None = None) -> tuple[Trace, ...]:
    """Read one file: a trace for each rank in it.

    Without a format it is read as its name suggests, else as Kineto's, whose reader reports what the file is instead.

    Raises:
        TraceError: nothing in the file can be analysed.
    """
    if name is None and (archive := archive_of(first_bytes(path))):
        raise TraceError(f"{path}: a {archive} archive; expected a trace; unpack it and give its contents")
    return _READERS[name or _format_of_name(path)](path, options or ReadOptions())


def _format_of_name(path: Path) -> InputFormat:
    if path.name.endswith(_NSIGHT_SUFFIXES):
        return InputFormat.NSYS_SQLITE
    return InputFormat.OPLOG if path.name.endswith(OPLOG_SUFFIXES) else InputFormat.KINETO


def read_trace(path: Path, name: InputFormat | None) -> Trace:
    """Read one file and return the trace of its first rank; of files with several ranks the others are dropped."""
    return read_file(path, name)[0]
