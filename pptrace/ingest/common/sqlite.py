"""Read the tables of an SQLite database, as nsys and ROCm's profilers write them, as numpy arrays.

    file = SQLite 3 database; which tables exist, not the version, decides what is read

Opened read-only, without locks, and untrusted: only ordinary tables are read, never views. Damage ends a table early; the rows
before it are kept and counted in :attr:`Database.damage`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from pptrace.errors import TraceError
from pptrace.ingest.common.byte_source import GZIP_MAGIC, SQLITE_MAGIC, unreadable
from pptrace.ingest.common.codes import Codes
from pptrace.ingest.common.sqlite_pages import PageReader
from pptrace.model.tables import Int32, Int64
from pptrace.regular import open_regular

NONE = int(np.iinfo(np.int64).min)
"""Stands for NULL and all other non-integers in a column of integers."""
UNNAMED = "unnamed"
"""Name of events whose own name is missing."""


_CHUNK_ROWS = 1 << 16
_MIN_ROW_BYTES = 4
_MANY_STRINGS = 1000
_HEAD_BYTES = 100  # https://www.sqlite.org/fileformat.html#the_database_header

_DENSE_IDS = 1 << 24

DATABASE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""Raised by reading a damaged database; the second where sqlite3 puts a damaged name into its message."""


class Database:
    """A read-only connection; ``expected_input`` is what errors say of the file that a user should give.

    ``tables`` has the columns of each table. ``damage`` has a warning for every table that could only be read in part.

    Raises:
        TraceError: the file is empty, no database, encrypted, or damaged beyond reading its list of tables.
    """

    def __init__(self, path: Path, expected_input: str) -> None:
        self.path = path
        self.damage: list[str] = []
        size, declared_size = _checked_size(path, expected_input)
        self._max_rows = size // _MIN_ROW_BYTES + 1
        if size < declared_size:
            self.damage.append(f"the file is truncated: it has {size:,} of {declared_size:,} bytes")
        uri = f"file:{quote(str(path.absolute()))}?mode=ro"
        if not path.with_name(f"{path.name}-wal").exists():
            uri += "&immutable=1"
        try:
            self._connection = sqlite3.connect(uri, uri=True, check_same_thread=False)
            try:
                self._connection.text_factory = partial(str, encoding="utf-8", errors="replace")
                self._connection.execute("PRAGMA trusted_schema = OFF")
                self._connection.execute("PRAGMA writable_schema = ON")  # or SQLite refuses a truncated file
                master = self._connection.execute(
                    "SELECT name, rootpage FROM sqlite_master WHERE type = 'table' AND sql LIKE 'CREATE TABLE%'"
                ).fetchall()
                self._roots: dict[str, int] = {
                    name: root
                    for name, root in master
                    if isinstance(name, str) and isinstance(root, int) and '"' not in name
                }
                self.tables: dict[str, tuple[str, ...]] = {
                    name: tuple(row[1] for row in self._connection.execute(f'PRAGMA table_info("{name}")').fetchall())
                    for name in self._roots
                }
            except DATABASE_ERRORS:
                self._connection.close()
                raise
        except DATABASE_ERRORS as err:
            raise TraceError(
                f"{path}: a damaged or encrypted SQLite database ({_reason(err)}); {expected_input}"
            ) from err
        self._pages = PageReader(path)

    def __enter__(self) -> Database:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self._pages.close()
        self._connection.close()

    def has(self, table: str, *columns: str) -> bool:
        return table in self.tables and set(columns) <= set(self.tables[table])

    def integers(self, table: str, columns: Sequence[str | None]) -> tuple[Int64, ...]:
        """Read columns of a table, shape (rows,) each, in the order of its rows; NONE for NULL, and for a column that is None."""
        return self.integers_and_texts(table, columns, None)[0]

    def integers_and_texts(
        self, table: str, columns: Sequence[str | None], text: str | None
    ) -> tuple[tuple[Int64, ...], Iterator[bytes | None]]:
        """Read columns as :meth:`integers` does, and a column of texts in UTF-8, None for NULL."""
        present = list(dict.fromkeys(column for column in columns if column is not None))
        index = self.tables[table].index
        text_index = None if text is None else index(text)
        arrays = self._pages.integers(self._roots[table], list(map(index, present)), text_index)
        texts: Iterator[bytes | None] = repeat(None)
        if arrays is None:
            chunks = list(self.rows(table, present if text is None else [*present, text]))
            none = np.zeros(0, dtype=np.int64)
            arrays = tuple(
                np.concatenate([none, *(as_integers(chunk[number]) for chunk in chunks)])
                for number in range(len(present))
            )
            if text is not None:
                values = (value for chunk in chunks for value in chunk[-1])
                texts = (None if value is None else str(value).encode("utf-8", "replace") for value in values)
        elif text is not None:
            texts = self._texts(*arrays[len(present) :])
        by_column = dict(zip(present, arrays[: len(present)], strict=True))
        missing = np.full(len(arrays[0]), NONE, dtype=np.int64) if None in columns else arrays[0]
        return tuple(missing if column is None else by_column[column] for column in columns), texts

    def _texts(self, begins: Int64, ends: Int64) -> Iterator[bytes | None]:
        """Yield texts from the pages of the file."""
        for first in range(0, len(begins), _CHUNK_ROWS):
            chunk = slice(first, first + _CHUNK_ROWS)
            for begin, end in zip(begins[chunk].tolist(), ends[chunk].tolist(), strict=True):
                yield None if begin < 0 else self._pages.text(begin, end)

    def rows(self, table: str, columns: Sequence[str], where: str = "") -> Iterator[tuple[Sequence[Any], ...]]:
        """Yield columns of a table in chunks of rows, as Python values; ends early where the table is damaged."""
        column_list = ", ".join(f'"{column}"' for column in columns)
        query = f'SELECT {column_list} FROM "{table}" {where}'
        num_rows = 0
        try:
            cursor = self._connection.execute(query)
            while chunk := cursor.fetchmany(_CHUNK_ROWS):
                num_rows += len(chunk)
                yield tuple(zip(*chunk, strict=True))
                if num_rows > self._max_rows:  # the pages form a circle
                    raise sqlite3.DatabaseError("more rows than the file has room for")
        except DATABASE_ERRORS as err:
            last: list[tuple[Any, ...]] = []
            with suppress(*DATABASE_ERRORS):  # the rows up to the damage, one by one
                last.extend(islice(self._connection.execute(query), num_rows, num_rows + _CHUNK_ROWS))
            if last:
                yield tuple(zip(*last, strict=True))
            message = f"table {table} is damaged"
            if not any(line.startswith(message) for line in self.damage):
                self.damage.append(f"{message} ({_reason(err)}); kept the {num_rows + len(last)} rows before that")

    def all_rows(self, table: str, columns: Sequence[str], where: str = "") -> list[tuple[Any, ...]]:
        """Read all rows of a small table; [] if it or one of the columns is absent."""
        if not self.has(table, *columns):
            return []
        return [row for chunk in self.rows(table, columns, where) for row in zip(*chunk, strict=True)]

    def texts(self, table: str, column: str, ids: Sequence[int]) -> Mapping[int, str]:
        """Read the texts of the rows with these ids, as far as they exist."""
        if not ids or not self.has(table, "id", column):
            return {}
        if len(ids) <= _MANY_STRINGS:
            rows = self.all_rows(table, ("id", column), f"WHERE id IN ({','.join(map(str, ids))})")
            return {key: str(text) for key, text in rows if text is not None}
        chosen = set(ids)
        chunks = self.rows(table, ("id", column))
        pairs = ((key, text) for keys, texts in chunks for key, text in zip(keys, texts, strict=True))
        return {key: str(text) for key, text in pairs if key in chosen and text is not None}

    def text_codes(
        self, table: str, column: str, ids: Int64, names: Codes, change: Callable[[str], str] = str
    ) -> Int32:
        """The code in ``names`` of each row's text, which its id finds in a table, changed; UNNAMED where there is none."""
        if not len(ids):
            return np.zeros(0, dtype=np.int32)
        used, inverse = _distinct(ids)
        texts = self.texts(table, column, [number for number in used.tolist() if number != NONE])
        codes: Int32 = names.of(change(texts.get(number) or UNNAMED) for number in used.tolist())[inverse]
        return codes


def _distinct(values: Int64) -> tuple[Int64, npt.NDArray[Any]]:
    """(distinct values, sorted; index of each row's value in them)."""
    if values.min() < 0 or values.max() >= _DENSE_IDS:
        used, inverse = np.unique(values, return_inverse=True)
        return used, inverse
    used = np.flatnonzero(np.bincount(values))
    index = np.zeros(int(used[-1]) + 1, dtype=np.int32)
    index[used] = np.arange(len(used))
    return used, index[values]


def as_integers(values: Sequence[Any]) -> Int64:
    """Convert values from sqlite3 to int64, not through floats; NONE for non-integers."""
    if set(map(type, values)) == {int}:
        return np.array(values, dtype=np.int64)
    return np.array([value if type(value) is int else NONE for value in values], dtype=np.int64)


def _checked_size(path: Path, expected_input: str) -> tuple[int, int]:
    """(size of the file, size in its database header or 0 if there is none), bytes; checks the header's magic."""
    try:
        with open_regular(path) as file:
            head = file.read(_HEAD_BYTES)
        start = head[: len(SQLITE_MAGIC)]
        size = path.stat().st_size
    except (OSError, ValueError) as err:
        raise unreadable(path, err) from err
    if not start:
        raise TraceError(f"{path}: an empty file; {expected_input}")
    if start != SQLITE_MAGIC:
        if start.startswith(GZIP_MAGIC):
            raise TraceError(f"{path}: an SQLite database packed by gzip; expected it unpacked; run gunzip -k on it")
        shown = start.decode("latin-1")
        raise TraceError(f"{path}: no SQLite database, or an encrypted one (begins with {shown!r}); {expected_input}")
    page_bytes = int.from_bytes(head[16:18])
    page_bytes = 65536 if page_bytes == 1 else page_bytes
    return size, page_bytes * int.from_bytes(head[28:32]) if head[24:28] == head[92:96] else 0


def _reason(err: Exception) -> str:
    return str(err).replace("\n", " ")[:80] or type(err).__name__
