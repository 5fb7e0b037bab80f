"""Traces at URLs, as of object stores: files that may be traces are copied into the cache, and read there.

    s3://bucket/runs/7                    any protocol that fsspec knows, with the driver that it asks for
    CACHE/urls/KEY/7/rank0.json.gz        the copy; KEY is made of the URL
    CACHE/urls/KEY/copied.json            what the store says of each copied file: what has not changed is not copied again

Copies that were not asked for in 14 days are deleted. Credentials and endpoints are those of fsspec and its drivers: their
environment variables, or ~/.config/fsspec.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from pptrace.errors import PptraceError, TraceError, UsageError
from pptrace.ingest.formats import SUFFIXES
from pptrace.ingest.inputs.directories import MAX_DEPTH
from pptrace.ingest.job.disk_cache import cache_for, key_of
from pptrace.model.wording import counted

_QUERY = re.compile(r"\?[^\s'\")]+")
_COPIED = "copied.json"
_KEPT_S = 14 * 24 * 3600
_KEY_CHARS = 12
_WEB = ("http", "https")

OnCopy = Callable[[int, int], None]
"""Called before files are copied with how many, and their bytes (0 where the store does not say)."""


def local_copy(url: str, on_copy: OnCopy | None = None) -> Path:
    """The path of what is at a URL: a file or directory of this machine, which has the files that may be traces.

    Raises:
        PptraceError: fsspec or its driver is not installed, or the URL cannot be read.
        TraceError: nothing is there that could be a trace.
    """
    parts = urlsplit(url)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    folders = cache_for(Path()).folders
    if not folders:
        raise UsageError("there is no cache to copy what is at a URL into; set PPTRACE_CACHE_DIR to a directory")
    folder = folders[-1].absolute() / "urls" / key_of(url.rstrip("/"))[:_KEY_CHARS]
    host = parts.netloc.rpartition("@")[2]
    shown = f"{parts.scheme}://{host}{parts.path}"  # without a password, or the signature of a presigned URL
    try:
        import fsspec
    except ImportError:
        raise PptraceError(
            f"{shown}: reading a URL needs fsspec; install it with pip install 'pptrace[urls]', and its driver of the store: "
            "s3fs for s3://, gcsfs for gs://, adlfs for abfs://, aiohttp for https://"
        ) from None
    try:
        store, root = fsspec.core.url_to_fs(url)
        name = PurePosixPath(unquote(parts.path).rstrip("/")).name.lstrip(".") or host or "traces"
        files = [_File(root, name)] if parts.scheme in _WEB else _files_at(store, root, name, shown)
        _copy(store, files, folder, on_copy)
    except PptraceError:
        raise
    except FileNotFoundError:
        raise TraceError(f"{shown}: not found; expected a trace file or a directory of traces; check the URL") from None
    except Exception as err:  # drivers raise errors of their own: of credentials, endpoints, networks
        reason = _QUERY.sub("?…", (str(err).splitlines() or [""])[0].strip()) or type(err).__name__
        raise PptraceError(
            f"{shown}: cannot be read ({type(err).__name__}: {reason.rstrip('.')}); check the URL, its driver and credentials, "
            "or copy the traces here and give that path"
        ) from err
    _delete_old(folder.parent)
    return folder / name


@dataclass(frozen=True, slots=True)
class _File:
    """A file of a store and its name in the folder. ``state`` is what the store says of it, which changes with its content; ""
    where it says nothing, as of a presigned URL, which may be got and not asked about.
    """

    path: str
    name: str
    state: str = ""
    num_bytes: int = 0

    @classmethod
    def of(cls, path: str, name: str, info: Mapping[str, Any]) -> _File:
        return cls(path, name, str(info), int(info.get("size") or 0))


def _files_at(store: Any, root: str, name: str, shown: str) -> list[_File]:
    """The files at a place of a store that may be traces: the place itself, or what is below it."""
    store.invalidate_cache()
    if store.isfile(root):
        return [_File.of(root, name, store.info(root))]
    start = len(root.rstrip("/")) + 1 if root.rstrip("/") else 0
    below = store.find(root, maxdepth=MAX_DEPTH + 1, detail=True)
    files = [
        _File.of(path, f"{name}/{path[start:]}", info) for path, info in below.items() if _may_be_trace(path[start:])
    ]
    if not files:
        what = f"{counted(len(below), 'file')}, none named as a trace" if below else "nothing there"
        raise TraceError(f"{shown}: {what}; expected a trace file or a directory of traces; check the URL")
    return files


def _may_be_trace(inner: str) -> bool:
    """Return whether a file has a name that traces have: an ending of theirs, or none, as dumps of flight recorders."""
    parts = PurePosixPath(inner).parts
    is_plain = bool(parts) and not any(part.startswith(".") for part in parts)
    return is_plain and ("." not in parts[-1] or parts[-1].endswith(SUFFIXES))


def _copy(store: Any, files: Sequence[_File], folder: Path, on_copy: OnCopy | None) -> None:
    """Bring the folder to what the store has: new and changed files are copied, those that are gone deleted."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    before: Mapping[str, Any] = {}
    with suppress(OSError, ValueError):
        states = json.loads((folder / _COPIED).read_text(encoding="utf-8"))
        before = states if isinstance(states, dict) else {}
    for name in before.keys() - {file.name for file in files}:
        (folder / name).unlink(missing_ok=True)
    wanted = [
        file
        for file in files
        if not file.state or before.get(file.name) != file.state or not (folder / file.name).is_file()
    ]
    if wanted and on_copy is not None:
        on_copy(len(wanted), sum(file.num_bytes for file in wanted))
    if wanted:
        targets = [folder / file.name for file in wanted]
        parts = [target.with_name(f".part-{target.name}") for target in targets]
        for part in parts:
            part.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        store.get([file.path for file in wanted], list(map(str, parts)))
        for part, target in zip(parts, targets, strict=True):
            part.replace(target)
    (folder / _COPIED).write_text(json.dumps({file.name: file.state for file in files}), encoding="utf-8")


def _delete_old(urls: Path) -> None:
    """Delete copies that nobody asked for in two weeks."""
    for folder in urls.iterdir():
        with suppress(OSError):
            copied = folder / _COPIED
            if time.time() - (copied if copied.exists() else folder).stat().st_mtime > _KEPT_S:
                shutil.rmtree(folder, ignore_errors=True)
