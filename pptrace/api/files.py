"""Files that a user names: paths to read, and files to write."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from pptrace.api.arguments import is_url, require_type
from pptrace.errors import PptraceError, UsageError

FilePath = str | os.PathLike[str]
FilePaths = FilePath | Sequence[FilePath]
"""One path or several."""


def as_inputs(paths: FilePaths) -> list[Path]:
    """One path or URL to read, or several, as a list.

    Raises:
        UsageError: something is no path.
        PptraceError: a URL cannot be read.
    """
    if isinstance(paths, str | os.PathLike):
        return [as_input(paths)]
    require_type("paths", paths, Iterable, "a path or several")
    return [as_input(path) for path in paths]


def as_input(path: FilePath) -> Path:
    """One path to read; what is at a URL is copied into the cache.

    Raises:
        UsageError: it is none, or empty.
        PptraceError: the URL cannot be read.
    """
    if is_url(path):
        from pptrace.api.urls import (
            local_copy,  # most paths are of this machine, and reading is not imported to write a file
        )

        return local_copy(str(path))
    return as_path(path)


def as_path(path: FilePath) -> Path:
    """One path of this machine.

    Raises:
        UsageError: it is none, a URL, or empty, which would be the current directory.
    """
    require_type("path", path, (str, os.PathLike), "a path")
    if path == "":
        raise UsageError("path is empty; expected the name of a file or directory ('.' is the current one)")
    if is_url(path):
        raise UsageError(f"{path} is a URL; expected the name of a file or directory of this machine")
    return Path(path)


def write_text(path: FilePath, parts: str | Iterable[str]) -> None:
    """Write a text file, UTF-8, whole or from its parts.

    Raises:
        PptraceError: it cannot be written.
    """
    file = as_path(path)
    try:
        with file.open("w", encoding="utf-8") as stream:
            stream.writelines([parts] if isinstance(parts, str) else parts)
    except (OSError, ValueError) as err:  # ValueError: a null character in its name
        raise PptraceError(f"{path}: cannot be written ({reason(err)}); give another file") from None


def reason(err: OSError | ValueError) -> str:
    """Reason for which something cannot be written, in the words of the operating system."""
    return str((err.strerror or err) if isinstance(err, OSError) else err)


def text_or_file(parts: str | Iterable[str], path: FilePath | None) -> str | None:
    """Write a text, whole or from its parts, where a path is given; else return it.

    Raises:
        PptraceError: the file cannot be written.
    """
    if path is None:
        return parts if isinstance(parts, str) else "".join(parts)
    write_text(path, parts)
    return None
