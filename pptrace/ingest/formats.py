"""The formats that can be told apart by content, each with its reader. A new format is one entry here."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pptrace.errors import TraceError
from pptrace.ingest.kineto import read_kineto
from pptrace.ingest.source import GZIP_MAGIC, unreadable
from pptrace.tables import InputFormat, Trace

SNIFF_BYTES = 64 * 1024
_SQLITE_MAGIC = b"SQLite format 3\0"
_TRACE_KEY = re.compile(rb'"(?:traceEvents|schemaVersion|deviceProperties|baseTimeNanoseconds)"\s*:|"ph"\s*:\s*"')


@dataclass(frozen=True, slots=True)
class Format:
    """How a format is recognised and read. ``sniff`` sees the first decompressed bytes of a file."""

    name: InputFormat
    sniff: Callable[[bytes], bool]
    read: Callable[[Path], Trace]


def _sniff_sqlite(start: bytes) -> bool:
    return start.startswith(_SQLITE_MAGIC)


def _sniff_kineto(start: bytes) -> bool:
    return start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"[") and _TRACE_KEY.search(start) is not None


def _read_sqlite(path: Path) -> NoReturn:
    raise TraceError(
        f"{path}: an SQLite database, as Nsight Systems exports; expected a Kineto trace (JSON, plain or gzip); "
        "this version of pptrace does not read SQLite yet"
    )


FORMATS: tuple[Format, ...] = (
    Format(InputFormat.NSYS_SQLITE, _sniff_sqlite, _read_sqlite),
    Format(InputFormat.KINETO, _sniff_kineto, read_kineto),
)
_READERS = {known.name: known.read for known in FORMATS}


def first_bytes(path: Path) -> bytes:
    """The first decompressed bytes of a file, as many as recognising its format may need.

    Raises:
        TraceError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            start = file.read(SNIFF_BYTES)
    except (OSError, ValueError) as err:
        raise unreadable(path, err) from err
    if not start.startswith(GZIP_MAGIC):
        return start
    try:
        return zlib.decompressobj(31).decompress(start, SNIFF_BYTES)
    except zlib.error:
        return b""


def detect(start: bytes) -> InputFormat | None:
    """The format of a file that begins with these (decompressed) bytes; None where no reader knows it."""
    return next((known.name for known in FORMATS if known.sniff(start)), None)


def read_trace(path: Path, name: InputFormat | None) -> Trace:
    """Read one file. Without a format it is read as Kineto's, whose reader says what it found instead.

    Raises:
        TraceError: the file gives nothing to analyse.
    """
    return _READERS[name or InputFormat.KINETO](path)
