"""Decode columns of integers directly from the pages of an SQLite file, many rows at a time.

Stepping through rows costs about a microsecond each in Python; here numpy decodes many pages at once. Layout (description of the
file format, sqlite.org/fileformat2.html, sections 1.6 and 2.1):

    interior page = 05 … num_cells:u16 … right_child:u32 { cell_offset:u16 }       cell = child:u32 rowid:varint
    leaf page     = 0d … num_cells:u16 …                 { cell_offset:u16 }       cell = size:varint rowid:varint record
    record        = header_size:varint { serial_type:varint } { value }
    serial type   = 0 NULL | 1 … 6 integers of 1, 2, 3, 4, 6, 8 bytes | 7 float | 8, 9 the integers 0 and 1 | ≥ 12 blob, text

Unusual tables (small ones, rows that overflow their page, headers with longer varints, inconsistent pages) are left to SQLite:
the result is then None.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pptrace.model.tables import Int64
from pptrace.regular import open_regular

_INTERIOR, _LEAF = 0x05, 0x0D
_MIN_ROWS = 50_000
_BLOCK_ROWS = 1 << 18
_MAX_DEPTH = 20
_LITTLE = sys.byteorder == "little"
_NONE = int(np.iinfo(np.int64).min)

_TEXT = 13
_VALUE_BYTES = np.concatenate([[0, 1, 2, 3, 4, 6, 8, 8, 0, 0, 0, 0], np.arange((1 << 14) - 12) // 2]).astype(np.int64)
_UNUSED_BITS = np.where(_VALUE_BYTES[:10] > 0, 64 - 8 * _VALUE_BYTES[:10], 0)


class PageReader:
    """Reader of columns of the tables of one file with at least ``min_rows`` rows."""

    def __init__(self, path: Path, min_rows: int = _MIN_ROWS) -> None:
        self._min_rows = min_rows
        self._map: mmap.mmap | None = None
        self._bytes: npt.NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)
        try:
            with open_regular(path) as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):
            return
        if path.with_name(f"{path.name}-wal").exists():  # it has newer pages
            self.close()
            return
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        head = self._bytes[:100].tolist()
        declared_bytes = head[16] << 8 | head[17] if len(head) == 100 else 0
        self._page_bytes = 65536 if declared_bytes == 1 else declared_bytes
        self._usable_bytes = self._page_bytes - (head[20] if len(head) == 100 else 0)
        self._halves = _overlapping(self._bytes, np.dtype(">u2"))
        self._words = _overlapping(self._bytes, np.dtype("=i8"))
        self._is_utf8 = head[56:60] in ([0, 0, 0, 1], [0, 0, 0, 0])

    def close(self) -> None:
        self._bytes = self._bytes[:0].copy()
        self._halves = self._words = self._bytes.view(np.uint8)
        if self._map is not None:
            self._map.close()
            self._map = None

    def text(self, begin: int, end: int) -> bytes:
        """The text in bytes [begin, end) of the file."""
        assert self._map is not None
        return self._map[begin:end]

    def integers(self, root: int, column_indices: Sequence[int], text: int | None = None) -> tuple[Int64, ...] | None:
        """Decode columns by index, shape (rows,) each, in the order of rowids; None where SQLite has to read them.

        NULL, floats, texts and blobs become the minimum of int64. With the index ``text`` of a column of texts, two more arrays
        follow: begin and end of each text in the file, for :meth:`text`; -1 where there is none.
        """
        if (
            self._map is None
            or not column_indices
            or self._page_bytes < 512
            or (text is not None and not self._is_utf8)
        ):
            return None
        try:
            pages = self._leaf_offsets(root)
            if pages is None:
                return None
            counts = self._halves[pages + 3].astype(np.int64)
            total = int(counts.sum())
            if total < self._min_rows:
                return None
            columns = tuple(
                np.empty(total, dtype=np.int64) for _ in range(len(column_indices) + 2 * (text is not None))
            )
            return columns if self._fill(columns, column_indices, text, pages, counts) else None
        except IndexError:  # an offset beyond the end of the file
            return None

    def _leaf_offsets(self, root: int) -> Int64 | None:
        """Offsets of the leaf pages of the tree in the file, in order."""
        num_pages = len(self._bytes) // self._page_bytes
        level = np.array([root], dtype=np.int64)
        for _ in range(_MAX_DEPTH):
            if not len(level) or level.min() < 2 or level.max() > num_pages or len(level) > num_pages:
                return None
            offsets = (level - 1) * self._page_bytes
            kinds = self._bytes[offsets]
            if (kinds == _LEAF).all():
                return offsets
            if not (kinds == _INTERIOR).all():
                return None
            cells = [
                offset + self._halves[offset + 12 + 2 * np.arange(int(self._halves[offset + 3]))].astype(np.int64)
                for offset in offsets.tolist()
            ]
            at = np.concatenate(
                [np.append(of_page, offset + 8) for of_page, offset in zip(cells, offsets, strict=True)]
            )
            level = self._halves[at].astype(np.int64) << 16 | self._halves[at + 2]
        return None

    def _fill(
        self, columns: Sequence[Int64], column_indices: Sequence[int], text: int | None, pages: Int64, counts: Int64
    ) -> bool:
        """Decode all leaf pages into the columns; False if a row is unusual."""
        ends = np.cumsum(counts)
        begin, done = 0, 0
        while begin < len(pages):
            end = max(begin + 1, int(np.searchsorted(ends, done + _BLOCK_ROWS, side="right")))
            block = counts[begin:end]
            first = np.repeat(pages[begin:end], block)
            number = np.arange(len(first)) - np.repeat(np.cumsum(block) - block, block)
            cells = first + self._halves[first + 8 + 2 * number]
            if not self._decode([column[done : done + len(cells)] for column in columns], column_indices, text, cells):
                return False
            begin, done = end, done + len(cells)
        return True

    def _decode(self, columns: Sequence[Int64], column_indices: Sequence[int], text: int | None, cells: Int64) -> bool:
        """Decode the records of cells into the columns; False if one is unusual."""
        size, at = self._varint2(cells)
        if size is None or (size > self._usable_bytes - 35).any():
            return False
        is_continued = np.ones(len(at), dtype=np.int64)
        for _ in range(8):  # a varint has at most nine bytes
            is_continued = is_continued & (self._bytes[at] > 127)
            if not is_continued.any():
                break
            at = at + is_continued
        at = at + 1
        header = self._bytes[at]
        last_column = max(*column_indices, -1 if text is None else text)
        if len(header) and header.max() > 127:
            return False
        value = at + header
        first_value, at = value, at + 1
        for column_index in range(last_column + 1):
            first = self._bytes[at]  # serial types have one byte, or two
            serial, at = self._varint2(at) if len(first) and first.max() > 127 else (first, at + 1)
            if serial is None:
                return False
            uniform = len(serial) > 0 and serial.min() == serial.max()
            value = value + _VALUE_BYTES[serial[0] if uniform else serial]  # its end
            for column, requested in zip(columns, column_indices, strict=False):
                if requested == column_index:
                    column[:] = self._values(serial, value)
            if column_index == text:
                is_text = (serial >= _TEXT) & (serial % 2 == 1)
                columns[-2][:] = np.where(is_text, value - _VALUE_BYTES[serial], -1)
                columns[-1][:] = np.where(is_text, value, -1)
        return not (at > first_value).any()  # no header ends before the last requested column

    def _values(self, serial: npt.NDArray[Any], ends: Int64) -> Int64:
        """Decode integers by serial type, from the eight bytes before their ends."""
        kind = np.minimum(serial, 7)
        words = self._words[ends - 8]
        if _LITTLE:
            words.byteswap(inplace=True)
        bits = _UNUSED_BITS[kind]
        values: Int64 = words << bits >> bits
        is_no_integer = (serial < 1) | (serial > 6)
        if is_no_integer.any():
            values[is_no_integer] = _NONE
            values[serial == 8] = 0
            values[serial == 9] = 1
        return values

    def _varint2(self, at: Int64) -> tuple[Int64 | None, Int64]:
        """(varints of at most two bytes or None if one is longer, position after them)."""
        following = np.minimum(at + 1, len(self._bytes) - 1)  # a record of one NULL may end with the file
        first, second = self._bytes[at].astype(np.int64), self._bytes[following].astype(np.int64)
        long = first > 127
        if (second[long] > 127).any():
            return None, at
        return np.where(long, (first & 127) << 7 | second, first), at + 1 + long


def _overlapping(data: npt.NDArray[np.uint8], dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
    """View numbers of a type at every byte: element i is the one that begins at byte i."""
    length = max(0, len(data) - dtype.itemsize + 1)
    return np.ndarray((length,), dtype, data, 0, (1,)) if length else np.zeros(0, dtype)
