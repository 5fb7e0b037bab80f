"""What was found in large trace files, kept on disk so that a second look does not read them again.

    folder = .pptrace_cache/ in the directory of a run; else, and where that cannot be written, the user's cache directory;
             $PPTRACE_CACHE_DIR, if set, instead of both
    folder/KEY.npz        arrays and one JSON text, written by numpy without pickle
    folder/files/KEY      the SHA-256 of a file whose place, size, inode and times are those that make up this KEY

Entries are found by the file's content (and its name, which may tell the rank) and by this version of pptrace. The content is
hashed in full once; as long as path, size, inode, mtime and ctime stay the same it is not hashed again. Entries are written
aside and renamed, so that readers see them whole; what cannot be read is a miss; what cannot be written is not kept.
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

SCHEMA = 1
FOLDER = ".pptrace_cache"
FOLDER_VARIABLE = "PPTRACE_CACHE_DIR"
MAX_BYTES = 2 * 1024**3
MIN_TEXT_BYTES = 12 * 1024 * 1024  # of text in a file; below, reading again is as fast
_STALE_S = 24 * 3600
_HASH_BYTES = 1024 * 1024
_FACTS = "facts"
_DAMAGE = (OSError, ValueError, KeyError, TypeError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error)
_CODE = ("ingest", "recognise", "model", "intervals.py", "marks.py", "schedule")


@dataclass(frozen=True, slots=True)
class Packed:
    """Something as a JSON value and arrays by name."""

    facts: Any
    arrays: Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Cache:
    """Folders to look into, the first of which that can be written takes new entries, up to ``max_bytes`` each."""

    folders: tuple[Path, ...]
    max_bytes: int = MAX_BYTES

    def key(self, path: Path, hash_now: bool) -> str | None:
        """What the entry of a file is called; None if it cannot be read, or would have to be hashed and shall not be."""
        try:
            seen = _stat_key(path)
            content = self._remembered(seen)
            if content is None:
                if not hash_now:
                    return None
                content = _hash_of(path)
                if _stat_key(path) != seen:  # it is being written
                    return None
                self._remember(seen, content)
        except OSError:
            return None
        return _digest(content, path.name, code_version())

    def read(self, key: str) -> Packed | None:
        """The entry; None where there is none that is whole."""
        for folder in self.folders:
            path = folder / f"{key}.npz"
            if not path.is_file():
                continue
            try:
                with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                    packed = Packed(json.loads(arrays[_FACTS].tobytes()), {name: arrays[name] for name in arrays.files})
            except (*_DAMAGE, RecursionError):
                continue
            with suppress(OSError):
                os.utime(path)  # used now: the last to go
            return packed
        return None

    def write(self, key: str, packed: Packed) -> None:
        """Keep the entry in the first folder that can be written; nowhere, silently, if there is none."""
        facts = np.frombuffer(json.dumps(packed.facts).encode(), dtype=np.uint8)
        arrays = {name: values for name, values in packed.arrays.items() if name != _FACTS}
        if facts.nbytes + sum(values.nbytes for values in arrays.values()) > self.max_bytes:
            return
        for folder in self.folders:
            try:
                _make(folder)
                with _written(folder / f"{key}.npz") as part, part.open("wb") as file:
                    np.savez(file, allow_pickle=False, **{_FACTS: facts}, **arrays)
            except OSError:
                continue
            _shrink(folder, self.max_bytes)
            return

    def _remembered(self, seen: str) -> str | None:
        for folder in self.folders:
            with suppress(OSError, ValueError):
                content = (folder / "files" / seen).read_text("ascii")
                if len(content) == hashlib.sha256().digest_size * 2:
                    return content
        return None

    def _remember(self, seen: str, content: str) -> None:
        for folder in self.folders:
            try:
                _make(folder)
                (folder / "files").mkdir(exist_ok=True)
                with _written(folder / "files" / seen) as part:
                    part.write_text(content, "ascii")
            except OSError:
                continue
            return


def cache_beside(path: Path) -> Cache:
    """The cache for a trace file: in its run's directory, else the user's."""
    given = os.environ.get(FOLDER_VARIABLE)
    if given:
        return Cache((Path(given),))
    folders = [path.parent / FOLDER] if (path.parent / RUN_FILE).is_file() else []
    with suppress(RuntimeError):  # no home
        base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
        folders.append((Path(base) if base else Path.home() / ".cache") / "pptrace")
    return Cache(tuple(folders))


@cache
def code_version() -> str:
    """Changes with the code that makes what is cached: by version and, where sources change under one, by their times."""
    package = Path(__file__).parents[2]
    sources: list[str] = []
    for name in _CODE:
        place = package / name
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            with suppress(OSError):
                found = file.stat()
                sources.append(f"{file.relative_to(package)} {found.st_size} {found.st_mtime_ns}")
    return _digest(__version__, str(SCHEMA), np.__version__, *sources)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:40]


def _stat_key(path: Path) -> str:
    found = path.stat()
    numbers = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return _digest(str(path.resolve()), *map(str, numbers))


def _hash_of(path: Path) -> str:
    """SHA-256: the fastest of hashlib's where the processor helps (1.5 GB/s measured, BLAKE2b 0.6)."""
    state = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_HASH_BYTES):
            state.update(piece)
    return state.hexdigest()


def _make(folder: Path) -> None:
    """The folder, hidden from git."""
    if folder.is_dir():
        return
    if folder.name == FOLDER and not folder.parent.is_dir():
        raise FileNotFoundError(str(folder.parent))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")


class _written:  # noqa: N801 (reads as a verb)
    """A file to write in place of ``path``: put there when all went well, removed otherwise."""

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


def _shrink(folder: Path, max_bytes: int) -> None:
    """Let go of the entries that were not used for longest, of what ended processes left behind, and of old notes."""
    entries = sorted(_files(folder, "*.npz"), key=lambda item: item[1].st_mtime_ns, reverse=True)
    total = 0
    for path, found in entries:
        total += found.st_size
        if total > max_bytes:
            with suppress(OSError):
                path.unlink()
    now = time.time()
    for path, found in [*_files(folder, ".part-*"), *_files(folder / "files", ".part-*")]:
        if now - found.st_mtime > _STALE_S:
            with suppress(OSError):
                path.unlink()
    notes = sorted(_files(folder / "files", "*"), key=lambda item: item[1].st_mtime_ns, reverse=True)
    for path, _ in notes[_MAX_NOTES:]:
        with suppress(OSError):
            path.unlink()


_MAX_NOTES = 10_000


def _files(folder: Path, pattern: str) -> Iterator[tuple[Path, os.stat_result]]:
    for path in folder.glob(pattern):
        with suppress(OSError):
            yield path, path.stat()
