"""Traces at URLs, as of object stores: files that may be traces are copied into the cache, and read there.

    s3://bucket/runs/7                    any protocol that fsspec knows, with the driver that it asks for
    CACHE/urls/KEY/7/rank0.json.gz        the copy; KEY is made of the URL
    CACHE/urls/KEY/copied.json            what the store says of each copied file: what has not changed is not copied again

Copies that were not asked for in 14 days are deleted. Credentials and endpoints are those of fsspec and its drivers: their
environment variables, or ~/.config/fsspec.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from pptrace.errors import PptraceError, TraceError, UsageError
from pptrace.ingest.formats import SUFFIXES
from pptrace.ingest.inputs.directories import MAX_DEPTH
from pptrace.ingest.job.disk_cache import cache_for, key_of
from pptrace.model.wording import counted

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
    folder = _folder_for(url.rstrip("/"))
    shown = f"{parts.scheme}://{parts.netloc}{parts.path}"  # without the signature of a presigned URL
    try:
        import fsspec
    except ImportError:
        raise PptraceError(
            f"{shown}: reading a URL needs fsspec; install it with pip install 'pptrace[urls]', and its driver of the store: "
            "s3fs for s3://, gcsfs for gs://, adlfs for abfs://, aiohttp for https://"
        ) from None
    try:
        store, root = fsspec.core.url_to_fs(url)
        if parts.scheme in _WEB:
            name = PurePosixPath(unquote(parts.path)).name or "trace"
            found, top = {root: name}, folder / name
        else:
            found, top = _files_at(store, root, folder, shown)
        _copy(store, found, folder, on_copy)
    except PptraceError:
        raise
    except FileNotFoundError:
        raise TraceError(f"{shown}: not found; expected a trace file or a directory of traces; check the URL") from None
    except Exception as err:  # drivers raise errors of their own: of credentials, endpoints, networks
        reason = (str(err).splitlines() or [""])[0].strip() or type(err).__name__
        raise PptraceError(
            f"{shown}: cannot be read ({type(err).__name__}: {reason.rstrip('.')}); check the URL, its driver and credentials, "
            "or copy the traces here and give that path"
        ) from err
    _delete_old(folder.parent)
    return top


def _folder_for(url: str) -> Path:
    folders = cache_for(Path()).folders
    if not folders:
        raise UsageError("there is no cache to copy what is at a URL into; set PPTRACE_CACHE_DIR to a directory")
    return folders[-1].absolute() / "urls" / key_of(url)[:_KEY_CHARS]


def _files_at(store: Any, root: str, folder: Path, shown: str) -> tuple[dict[str, str], Path]:
    """The files at a place of a store that may be traces, with their names in the folder; and what is to be read there."""
    name = PurePosixPath(root.rstrip("/")).name or "traces"
    if store.isfile(root):
        return {root: name}, folder / name
    store.invalidate_cache()
    below = store.find(root, maxdepth=MAX_DEPTH + 1)
    start = len(root.rstrip("/")) + 1 if root.rstrip("/") else 0
    inside = {path: path[start:] for path in below}
    found = {path: f"{name}/{inner}" for path, inner in inside.items() if _may_be_trace(inner)}
    if not found:
        what = f"{counted(len(inside), 'file')}, none named as a trace" if inside else "nothing there"
        raise TraceError(f"{shown}: {what}; expected a trace file or a directory of traces; check the URL")
    return found, folder / name


def _may_be_trace(inner: str) -> bool:
    """Return whether a file has a name that traces have: an ending of theirs, or none, as dumps of flight recorders."""
    parts = PurePosixPath(inner).parts
    is_plain = bool(parts) and not any(part.startswith(".") for part in parts)
    return is_plain and ("." not in parts[-1] or parts[-1].endswith(SUFFIXES))


def _copy(store: Any, found: Mapping[str, str], folder: Path, on_copy: OnCopy | None) -> None:
    """Bring the folder to what the store has: new and changed files are copied, those that are gone deleted."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    before = _copied_before(folder / _COPIED)
    states = {inner: _state_of(store, path) for path, inner in found.items()}
    for inner in before.keys() - states.keys():
        (folder / inner).unlink(missing_ok=True)
    wanted = {
        path: inner
        for path, inner in found.items()
        if states[inner] is None or before.get(inner) != states[inner] or not (folder / inner).is_file()
    }
    if wanted and on_copy is not None:
        on_copy(len(wanted), sum(_size_of(store, path) for path in wanted))
    if wanted:
        parts = {path: (folder / inner).with_name(f".part-{Path(inner).name}") for path, inner in wanted.items()}
        for part in parts.values():
            part.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        store.get(list(parts), [str(part) for part in parts.values()])
        for path, part in parts.items():
            part.replace(folder / wanted[path])
    (folder / _COPIED).write_text(json.dumps(states), encoding="utf-8")


def _state_of(store: Any, path: str) -> str | None:
    """A mark of a file's content, as the store tells it; None where it does not."""
    with suppress(Exception):  # of drivers, as where a presigned URL may be got and not asked about
        return str(store.ukey(path))
    return None


def _size_of(store: Any, path: str) -> int:
    with suppress(Exception):
        return int(store.size(path) or 0)
    return 0


def _copied_before(file: Path) -> Mapping[str, Any]:
    with suppress(OSError, ValueError):
        states = json.loads(file.read_text(encoding="utf-8"))
        return states if isinstance(states, dict) else {}
    return {}


def _delete_old(urls: Path) -> None:
    """Delete copies that nobody asked for in two weeks."""
    for folder in urls.iterdir():
        with suppress(OSError):
            copied = folder / _COPIED
            if time.time() - (copied if copied.exists() else folder).stat().st_mtime > _KEPT_S:
                shutil.rmtree(folder, ignore_errors=True)
