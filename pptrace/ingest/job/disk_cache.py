"""Cache the results of reading large trace files on disk, so that unchanged files are not read again.

    folder = .pptrace_cache/ in the directory of a run; else, and where that cannot be written, the user's cache directory;
             $PPTRACE_CACHE_DIR, if set, instead of both
    folder/KEY.npz        a text, the columns and their index as arrays of bytes, in numpy's format without pickle
    folder/files/KEY      the SHA-256 of a file; KEY is made of its path, size, inode and times

An entry's key is made of the file's content, its name (which may contain the rank) and the version of pptrace. The content is
hashed in full once; as long as path, size, inode, mtime and ctime stay the same it is not hashed again. Entries are written to
a temporary file and renamed, so that no reader sees a partial one. An unreadable entry is a miss; failing to write is no error.
The columns of large entries are mapped into memory, so that of a run of ten million ops only what is looked at is read from disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from pptrace.ingest.inputs.resolve import RUN_FILE
from pptrace.regular import open_regular, read_regular
from pptrace.version import __version__

SCHEMA = 2
FOLDER = ".pptrace_cache"
FOLDER_VARIABLE = "PPTRACE_CACHE_DIR"
MAX_BYTES = 4 * 1024**3
MAPPED_BYTES = 64 * 1024**2
"""Files of more are mapped, and the sums over their bytes are not checked; smaller ones are read as a whole."""
MIN_TEXT_BYTES = 12 * 1024 * 1024  # of text in a file; smaller files are read as fast without a cache
_STALE_S = 24 * 3600
_HASH_BYTES = 1024 * 1024
_FACTS, _COLUMNS, _INDEX = "facts", "columns", "index"
_ALIGNMENT, _MEMBER_ALIGNMENT = 8, 64
_LOCAL_HEADER, _EXTRA_HEADER = struct.Struct("<4s5H3L2H"), struct.Struct("<2H")
_ZIP64_BYTES, _FILLING = 20, 0xD935  # as Android's zipalign marks what it fills in
_DAMAGE = (
    *(OSError, ValueError, LookupError, TypeError, EOFError, MemoryError, RuntimeError),
    *(struct.error, zipfile.BadZipFile, zlib.error),
)
_CODE = ("ingest", "recognise", "model", "intervals.py", "marks.py", "schedule", "slices.py", "workflow/rank_store.py")
ANY_CODE = (".", "../dashboards")
"""All sources that an analysis, its timeline and its pages may be made by."""


class Packed(Struct, frozen=True):
    """A cache entry: a text, and arrays by name."""

    facts: str
    arrays: Mapping[str, npt.NDArray[Any]]


class Cache(Struct, frozen=True):
    """Cache folders in order of lookup; new entries go into the first writable one, up to ``max_bytes`` per folder."""

    folders: tuple[Path, ...]
    max_bytes: int = MAX_BYTES

    def key(self, path: Path, hash_now: bool) -> str | None:
        """The key of a file; None if it cannot be read, or if its content hash is not stored and not ``hash_now``."""
        try:
            state = stat_key(path)
            for folder in self.folders:
                with suppress(OSError, ValueError):
                    content = read_regular(folder / "files" / state).decode("ascii")
                    if len(content) == hashlib.sha256().digest_size * 2:
                        return key_of(content, path.name, code_version())
            if not hash_now:
                return None
            content = _hash_of(path)
            if stat_key(path) != state:  # it is being written
                return None
        except OSError:
            return None
        self._write_first(f"files/{state}", lambda part: part.write_text(content, "ascii"))
        return key_of(content, path.name, code_version())

    def read(self, key: str) -> Packed | None:
        """The entry of a key; None where there is none, or it is damaged."""
        for folder in self.folders:
            path = folder / f"{key}.npz"
            try:
                packed = _read(path)
            except _DAMAGE:  # or there is none
                continue
            with suppress(OSError):
                os.utime(path)  # the entries used longest ago are evicted first
            return packed
        return None

    def write(self, key: str, packed: Packed) -> None:
        """Write the entry into the first folder where that works; no error if there is none."""
        facts = packed.facts.encode()
        if len(facts) + sum(values.nbytes for values in packed.arrays.values()) > self.max_bytes:
            return
        if folder := self._write_first(f"{key}.npz", lambda part: _write(part, facts, packed.arrays)):
            _evict(folder, self.max_bytes)

    def _write_first(self, name: str, write: Callable[[Path], object]) -> Path | None:
        """Write a file into the first folder where that works; None if there is none."""
        for folder in self.folders:
            with suppress(OSError):
                if not folder.is_dir():  # a new one is ignored by git
                    if folder.name == FOLDER and not folder.parent.is_dir():
                        continue
                    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                    (folder / ".gitignore").write_text("*\n")
                path = folder / name
                path.parent.mkdir(exist_ok=True)
                with _replacing(path) as part:
                    write(part)
                return folder
        return None


def _write(path: Path, facts: bytes, columns: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write a file as ``numpy.savez`` does, column by column: all columns as one array, since hundreds take longer to read.

    Each column begins at a multiple of 8 bytes, of the file too.
    """
    flat = {name: np.ascontiguousarray(values).reshape(-1).view(np.uint8) for name, values in columns.items()}
    index = {name: (values.dtype.str, values.nbytes) for name, values in columns.items()}
    padded = ((piece, bytes(-len(piece) % _ALIGNMENT)) for piece in flat.values())
    with path.open("wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        _write_member(archive, file.tell(), _FACTS, [facts])
        _write_member(archive, file.tell(), _INDEX, [json.dumps(index).encode()])
        _write_member(archive, file.tell(), _COLUMNS, [piece for pair in padded for piece in pair])


def _write_member(
    archive: zipfile.ZipFile, at: int, name: str, pieces: Sequence[bytes | npt.NDArray[np.uint8]]
) -> None:
    """Write the pieces at a place of the file as one array of bytes, which begins at a multiple of 64 bytes of the file."""
    member = zipfile.ZipInfo(f"{name}.npy")
    before = at + _LOCAL_HEADER.size + len(member.filename) + _ZIP64_BYTES + _EXTRA_HEADER.size
    filling = -before % _MEMBER_ALIGNMENT
    member.extra = _EXTRA_HEADER.pack(_FILLING, filling) + bytes(filling)
    header = {"descr": "|u1", "fortran_order": False, "shape": (sum(map(len, pieces)),)}
    with archive.open(member, "w", force_zip64=True) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for piece in pieces:
            file.write(piece if isinstance(piece, bytes) else piece.data)


def _read(path: Path) -> Packed:
    """Read an entry.

    Raises:
        OSError, ValueError, ... (those of ``_DAMAGE``): it is damaged.
    """
    with open_regular(path) as file, np.load(file, allow_pickle=False) as entry:
        is_large = path.stat().st_size > MAPPED_BYTES
        content = _mapped(path, entry.zip.getinfo(f"{_COLUMNS}.npy")) if is_large else entry[_COLUMNS]
        return Packed(entry[_FACTS].tobytes().decode(), _columns(content, json.loads(entry[_INDEX].tobytes())))


def _mapped(path: Path, member: zipfile.ZipInfo) -> npt.NDArray[np.uint8]:
    """The array of bytes of a member that is not compressed; what is written into it stays in memory."""
    with open_regular(path) as file:
        file.seek(member.header_offset)
        *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
        begin = file.seek(name_bytes + extra_bytes, os.SEEK_CUR)
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("not an array of version 1.0")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        at = file.tell()
    if member.compress_type != zipfile.ZIP_STORED or at - begin + shape[0] * dtype.itemsize != member.file_size:
        raise ValueError(f"{member.filename}: not {member.file_size} bytes of an array")
    return np.asarray(np.memmap(path, dtype, "c", at, shape))


def _columns(content: npt.NDArray[np.uint8], index: Mapping[str, tuple[str, int]]) -> dict[str, npt.NDArray[Any]]:
    """The columns of an entry, as views of one array."""
    begin, columns = 0, {}
    for name, (dtype, num_bytes) in index.items():
        column = content[begin : begin + num_bytes]
        if len(column) != num_bytes or np.dtype(dtype).kind not in "biuf":
            raise ValueError(f"{name}: {len(column)} bytes of {dtype}, not {num_bytes} of numbers")
        columns[name] = column.view(dtype)
        begin += num_bytes + -num_bytes % _ALIGNMENT
    return columns


def cache_for(path: Path) -> Cache:
    """The cache for a trace file: in its run's directory, else the user's."""
    folder_variable = os.environ.get(FOLDER_VARIABLE)
    if folder_variable:
        with suppress(RuntimeError):  # no such home directory
            return Cache((Path(folder_variable).expanduser(),))
        return Cache((Path(folder_variable),))
    folders = [path.parent / FOLDER] if (path.parent / RUN_FILE).is_file() else []
    with suppress(RuntimeError):  # no home directory
        base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
        folders.append((Path(base) if base else Path.home() / ".cache") / "pptrace")
    return Cache(tuple(folders))


@cache
def code_version(names: tuple[str, ...] = _CODE) -> str:
    """Version of the code that makes cached results: pptrace's version, and the sizes and times of its sources ``names``."""
    package = Path(__file__).resolve().parents[2]
    sources: list[str] = []
    for name in names:
        source = (package / name).resolve()
        for file in sorted(source.rglob("*.py")) if source.is_dir() else [source]:
            with suppress(OSError):
                stat = file.stat()
                sources.append(f"{file.relative_to(package.parent)} {stat.st_size} {stat.st_mtime_ns}")
    return key_of(__version__, str(SCHEMA), np.__version__, *sources)


def key_of(*parts: str) -> str:
    """A key that only these parts have, in this order."""
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:_KEY_CHARS]


def stat_key(path: Path) -> str:
    """The key of a file's state, which changes with its content.

    Raises:
        OSError: it cannot be looked at.
    """
    stat = path.stat()
    numbers = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
    return key_of(str(path.resolve()), *map(str, numbers))


def _hash_of(path: Path) -> str:
    """SHA-256: the fastest of hashlib's where the processor supports it (1.5 GB/s measured, BLAKE2b 0.6)."""
    state = hashlib.sha256()
    with open_regular(path, 0) as file:
        while piece := file.read(_HASH_BYTES):
            state.update(piece)
    return state.hexdigest()


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Context of a temporary file that replaces ``path`` at the end, or is removed after an exception."""
    handle, name = tempfile.mkstemp(prefix=".part-", dir=path.parent)
    os.close(handle)
    part = Path(name)
    try:
        yield part
        with suppress(FileNotFoundError):
            part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink()


def _evict(folder: Path, max_bytes: int) -> None:
    """Delete the least recently used entries, temporary files of dead processes, and the oldest stored hashes.

    Files with other names stay: ``$PPTRACE_CACHE_DIR`` may be a folder of somebody's own arrays.
    """

    def latest_first(pattern: str, within: Path) -> list[tuple[Path, os.stat_result]]:
        found = []
        for path in within.glob(pattern):
            with suppress(OSError):
                found.append((path, path.stat()))
        return sorted(found, key=lambda item: item[1].st_mtime_ns, reverse=True)

    entries = latest_first(f"{_KEY}.npz", folder)
    totals = accumulate(stat.st_size for _, stat in entries)
    doomed = [path for (path, _), total in zip(entries, totals, strict=True) if total > max_bytes]
    parts = [*latest_first(".part-*", folder), *latest_first(".part-*", folder / "files")]
    doomed += [path for path, stat in parts if time.time() - stat.st_mtime > _STALE_S]
    doomed += [path for path, _ in latest_first(_KEY, folder / "files")[_MAX_HASH_FILES:]]
    for path in doomed:
        with suppress(OSError):
            path.unlink()


_MAX_HASH_FILES = 10_000
_KEY_CHARS = 40
_KEY = "[0-9a-f]" * _KEY_CHARS
"""Pattern of the names that :func:`key_of` gives."""
