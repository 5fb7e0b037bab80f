"""What a user names as files: paths to read, and files to write."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pptrace.errors import PptraceError

FilePath = str | os.PathLike[str]
FilePaths = FilePath | Sequence[FilePath]
"""One path or several."""


def as_paths(paths: FilePaths) -> list[Path]:
    """One path or several as a list."""
    return [Path(paths)] if isinstance(paths, str | os.PathLike) else [Path(path) for path in paths]


def write_text(path: FilePath, text: str) -> None:
    """Write a text file, UTF-8.

    Raises:
        PptraceError: it cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as err:
        raise PptraceError(f"{path}: cannot be written ({err.strerror}); give another file") from None


def text_or_file(text: str, path: FilePath | None) -> str | None:
    """Write a text where a path is given; else return it.

    Raises:
        PptraceError: the file cannot be written.
    """
    if path is None:
        return text
    write_text(path, text)
    return None
