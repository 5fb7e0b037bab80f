"""Cache the results of reading large trace files on disk, so that unchanged files are not read again.

    folder = .pptrace_cache/ in the directory of a run; else, and where that cannot be written, the user's cache directory;
             $PPTRACE_CACHE_DIR, if set, instead of both
    folder/KEY.npz        a text, the columns and their index as arrays of bytes, written by numpy without pickle
    folder/files/KEY      the SHA-256 of a file; KEY is made of its path, size, inode and times

An entry's key is made of the file's content, its name (which may contain the rank) and the version of pptrace. The content is
hashed in full once; as long as path, size, inode, mtime and ctime stay the same it is not hashed again. Entries are written to
a temporary file and renamed, so that no reader sees a partial one. An unreadable entry is a miss; failing to write is no error.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pptrace.ingest.inputs.resolve import RUN_FILE
from pptrace.version import __version__

SCHEMA = 2
FOLDER = ".pptrace_cache"
FOLDER_VARIABLE = "PPTRACE_CACHE_DIR"
MAX_BYTES = 2 * 1024**3
MIN_TEXT_BYTES = 12 * 1024 * 1024  # of text in a file; smaller files are read as fast without a cache
_STALE_S = 24 * 3600
_HASH_BYTES = 1024 * 1024
_FACTS, _COLUMNS, _INDEX = "facts", "columns", "index"
_ALIGNMENT = 8
_DAMAGE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    EOFError,
    MemoryError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)
_CODE = ("ingest", "recognise", "model", "intervals.py", "marks.py", "schedule", "workflow/rank_store.py")
ANY_CODE = (".", "../dashboards")
"""All sources that an analysis, its timeline and its pages may be made by."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A cache entry: a text, and arrays by name."""

    facts: str
    arrays: Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Cache:
    """Cache folders in order of lookup; new entries go into the first writable one, up to ``max_bytes`` per folder."""

    folders: tuple[Path, ...]
    max_bytes: int = MAX_BYTES

    def key(self, path: Path, hash_now: bool) -> str | None:
        """The key of a file; None if it cannot be read, or if its content hash is not stored and not ``hash_now``."""
        try:
            state = stat_key(path)
            content = self._content_hash_of(state)
            if content is None:
                if not hash_now:
                    return None
                content = _hash_of(path)
                if stat_key(path) != state:  # it is being written
                    return None
                self._store_content_hash(state, content)
        except OSError:
            return None
        return key_of(content, path.name, code_version())

    def read(self, key: str) -> Packed | None:
        """The entry of a key; None where there is none, or it is damaged."""
        for folder in self.folders:
            path = folder / f"{key}.npz"
            if not path.is_file():
                continue
            try:
                with path.open("rb") as file, np.load(file, allow_pickle=False) as entry:
                    packed = Packed(entry[_FACTS].tobytes().decode(), _columns(entry))
            except _DAMAGE:
                continue
            with suppress(OSError):
                os.utime(path)  # the entries used longest ago are evicted first
            return packed
        return None

    def write(self, key: str, packed: Packed) -> None:
        """Write the entry into the first folder where that works; no error if there is none."""
        entry = {_FACTS: _bytes(packed.facts.encode()), **_joined(packed.arrays)}
        if sum(values.nbytes for values in entry.values()) > self.max_bytes:
            return
        for folder in self.folders:
            try:
                _make_folder(folder)
                with _AtomicFile(folder / f"{key}.npz") as part, part.open("wb") as file:
                    np.savez(file, allow_pickle=False, **entry)
            except OSError:
                continue
            _evict(folder, self.max_bytes)
            return

    def _content_hash_of(self, stat_key: str) -> str | None:
        for folder in self.folders:
            with suppress(OSError, ValueError):
                content = (folder / "files" / stat_key).read_text("ascii")
                if len(content) == hashlib.sha256().digest_size * 2:
                    return content
        return None

    def _store_content_hash(self, stat_key: str, content: str) -> None:
        for folder in self.folders:
            try:
                _make_folder(folder)
                (folder / "files").mkdir(exist_ok=True)
                with _AtomicFile(folder / "files" / stat_key) as part:
                    part.write_text(content, "ascii")
            except OSError:
                continue
            return


def _joined(columns: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[np.uint8]]:
    """The columns as one array, each from a multiple of 8 bytes on, and their index: reading hundreds of arrays takes longer."""
    index = {name: (values.dtype.str, values.nbytes) for name, values in columns.items()}
    pieces = (np.ascontiguousarray(values).ravel().view(np.uint8) for values in columns.values())
    padded = [np.pad(piece, (0, -len(piece) % _ALIGNMENT)) for piece in pieces]
    return {_COLUMNS: np.concatenate([_bytes(b""), *padded]), _INDEX: _bytes(json.dumps(index).encode())}


def _columns(entry: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """The columns of an entry, as views of one array."""
    content, begin, columns = entry[_COLUMNS], 0, {}
    for name, (dtype, num_bytes) in json.loads(entry[_INDEX].tobytes()).items():
        column = content[begin : begin + num_bytes]
        if len(column) != num_bytes or np.dtype(dtype).kind not in "biuf":
            raise ValueError(f"{name}: {len(column)} bytes of {dtype}, not {num_bytes} of numbers")
        columns[name] = column.view(dtype)
        begin += num_bytes + -num_bytes % _ALIGNMENT
    return columns


def _bytes(content: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(content, dtype=np.uint8)


def cache_for(path: Path) -> Cache:
    """The cache for a trace file: in its run's directory, else the user's."""
    folder_variable = os.environ.get(FOLDER_VARIABLE)
    if folder_variable:
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
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:40]


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
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_HASH_BYTES):
            state.update(piece)
    return state.hexdigest()


def _make_folder(folder: Path) -> None:
    """Create the folder, ignored by git."""
    if folder.is_dir():
        return
    if folder.name == FOLDER and not folder.parent.is_dir():
        raise FileNotFoundError(str(folder.parent))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")


class _AtomicFile:
    """Context of a temporary file that replaces ``path`` at the end, or is removed after an exception."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Path:
        handle, name = tempfile.mkstemp(prefix=".part-", dir=self._path.parent)
        os.close(handle)
        self._part = Path(name)
        return self._part

    def __exit__(self, kind: type[BaseException] | None, err: object, trace: object) -> None:
        if kind is None:
            with suppress(FileNotFoundError):
                self._part.replace(self._path)
                return
        with suppress(OSError):
            self._part.unlink()


def _evict(folder: Path, max_bytes: int) -> None:
    """Delete the least recently used entries, temporary files of dead processes, and the oldest stored hashes."""
    entries = sorted(_files(folder, "*.npz"), key=lambda item: item[1].st_mtime_ns, reverse=True)
    total = 0
    for path, stat in entries:
        total += stat.st_size
        if total > max_bytes:
            with suppress(OSError):
                path.unlink()
    now = time.time()
    for path, stat in [*_files(folder, ".part-*"), *_files(folder / "files", ".part-*")]:
        if now - stat.st_mtime > _STALE_S:
            with suppress(OSError):
                path.unlink()
    hash_files = sorted(_files(folder / "files", "*"), key=lambda item: item[1].st_mtime_ns, reverse=True)
    for path, _ in hash_files[_MAX_HASH_FILES:]:
        with suppress(OSError):
            path.unlink()


_MAX_HASH_FILES = 10_000


def _files(folder: Path, pattern: str) -> Iterator[tuple[Path, os.stat_result]]:
    for path in folder.glob(pattern):
        with suppress(OSError):
            yield path, path.stat()
