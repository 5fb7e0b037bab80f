"""Read a trace file, plain or gzip, piece by piece; damage of the compression is recorded, not raised."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from pptrace.errors import TraceError
from pptrace.regular import open_regular

PIECE_BYTES = 256 * 1024
GZIP_MAGIC = b"\x1f\x8b"
SQLITE_MAGIC = b"SQLite format 3\0"
_COMPRESSED_BYTES = 64 * 1024
_GZIP_WINDOW = 31
_GZIP_RATIO = 12
_MOST_RATIO = 500
"""Most bytes of text from one of gzip. Traces have 10 to 50, nothing but spaces 1,030."""
_FREE_BYTES = 64 * 1024 * 1024
"""Text that may be packed however densely, bytes."""


class ByteSource:
    """Reads a file in pieces of at most ``PIECE_BYTES`` decompressed bytes; gzip is recognised by its content.

    ``damage`` is the reason why the data ended early ("" if none), ``trailing_bytes`` the number of bytes after the last gzip
    member.

    Raises:
        TraceError: the file cannot be opened or read, or unpacks to far more than a trace does.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage = ""
        self.trailing_bytes = 0
        try:
            self._file: BinaryIO = open_regular(path, 0)
        except (OSError, ValueError) as err:
            raise unreadable(path, err) from err
        self._num_bytes = os.fstat(self._file.fileno()).st_size
        self._pieces = self._read_pieces()

    def __enter__(self) -> ByteSource:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()

    @property
    def part_read(self) -> float:
        """Fraction of the file that has been read, 0 to 1."""
        return min(1.0, self._file.tell() / self._num_bytes) if self._num_bytes else 1.0

    def read(self) -> bytes:
        """The next piece, b"" at the end."""
        return next(self._pieces, b"")

    def _read_file(self, size: int) -> bytes:
        try:
            return self._file.read(size)
        except OSError as err:
            raise unreadable(self.path, err) from err

    def _read_pieces(self) -> Iterator[bytes]:
        first = self._read_file(_COMPRESSED_BYTES)
        if first.startswith(GZIP_MAGIC):
            yield from self._inflate(first)
            return
        while first:
            yield first
            first = self._read_file(PIECE_BYTES)

    def _inflate(self, data: bytes) -> Iterator[bytes]:
        num_text_bytes = 0
        stream = zlib.decompressobj(_GZIP_WINDOW)
        while data:
            before = stream.copy()
            try:
                piece = stream.decompress(data, PIECE_BYTES)
            except zlib.error as err:
                self.damage = f"gzip stream damaged: {err}"
                if rescued := _inflate_until_error(before, data):
                    yield rescued
                return
            if piece:
                num_text_bytes += len(piece)
                if num_text_bytes > max(_FREE_BYTES, _MOST_RATIO * self._file.tell()):
                    raise TraceError(
                        f"{self.path}: {self._file.tell():,} bytes of gzip unpack to more than {num_text_bytes:,}; expected at "
                        f"most {_MOST_RATIO} times as many; if it is a trace, unpack it and give that"
                    )
                yield piece
            if not stream.eof:
                data = stream.unconsumed_tail or self._read_file(_COMPRESSED_BYTES)
                continue
            data = (stream.unused_data or self._read_file(_COMPRESSED_BYTES)).lstrip(b"\0")
            if data and not data.startswith(GZIP_MAGIC):
                self.trailing_bytes = len(data)
                return
            if data:
                stream = zlib.decompressobj(_GZIP_WINDOW)
        if not stream.eof:
            self.damage = "gzip stream cut"


def _inflate_until_error(stream: zlib._Decompress, data: bytes) -> bytes:
    """Decompress a damaged piece up to the byte at which zlib fails."""
    rescued = bytearray()
    with suppress(zlib.error):
        for index in range(len(data)):
            rescued += stream.decompress(data[index : index + 1])
    return bytes(rescued)


def num_text_bytes(path: Path) -> int:
    """Estimate the length of a file's text from its size, bytes; 0 if it cannot be read."""
    try:
        with open_regular(path) as file:
            packed = file.read(2) == GZIP_MAGIC
            return os.fstat(file.fileno()).st_size * (_GZIP_RATIO if packed else 1)
    except (OSError, ValueError):
        return 0


def unreadable(path: Path, err: OSError | ValueError) -> TraceError:
    reason = (err.strerror if isinstance(err, OSError) else None) or str(err)
    return TraceError(f"{path}: cannot be read ({reason}); expected a trace file; check the path and its permissions")


SNIFF_BYTES = 64 * 1024


def first_bytes(path: Path) -> bytes:
    """The first decompressed bytes of a file, enough to recognise its format.

    Raises:
        TraceError: the file cannot be read.
    """
    try:
        with open_regular(path) as file:
            start = file.read(SNIFF_BYTES)
    except (OSError, ValueError) as err:
        raise unreadable(path, err) from err
    if not start.startswith(GZIP_MAGIC):
        return start
    try:
        return zlib.decompressobj(31).decompress(start, SNIFF_BYTES)
    except zlib.error:
        return b""
