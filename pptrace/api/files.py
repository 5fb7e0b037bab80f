"""Files that a user names: paths to read, and files to write; JSON and HTML of what the API gives, as text or to such a file, or
as a notebook shows it.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, overload

from pptrace.api.options import is_url, require_type
from pptrace.errors import PptraceError, UsageError

FilePath = str | os.PathLike[str]
FilePaths = FilePath | Sequence[FilePath]
"""One path or several."""
_HEIGHT_PX = 620


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


class ExportsJson(ABC):
    """A result that gives the JSON which its command writes."""

    @overload
    def to_json(self, path: None = None) -> str: ...
    @overload
    def to_json(self, path: FilePath) -> None: ...
    def to_json(self, path: FilePath | None = None) -> str | None:
        """The JSON that the command line writes with ``--json``, as text, or written to a file.

        Raises:
            PptraceError: the file cannot be written.
        """
        return text_or_file(_parts_of(self._json_object()), path)

    @abstractmethod
    def _json_object(self) -> dict[str, Any]: ...


class ExportsPage(ABC):
    """A result that gives the page which its command writes."""

    @overload
    def to_html(self, path: None = None) -> str: ...
    @overload
    def to_html(self, path: FilePath) -> None: ...
    def to_html(self, path: FilePath | None = None) -> str | None:
        """A page with figures and pictures as text, or written to a file: one file that loads nothing from elsewhere.

        Raises:
            PptraceError: the file cannot be written.
        """
        return text_or_file(self._page(), path)

    @abstractmethod
    def _page(self) -> str: ...


class ExportsOps(ExportsPage):
    """A result with a page, whose JSON may hold every op: :class:`pptrace.Run` and :class:`pptrace.SimulatedStep`."""

    @overload
    def to_json(self, path: None = None, *, ops: bool = False) -> str: ...
    @overload
    def to_json(self, path: FilePath, *, ops: bool = False) -> None: ...
    def to_json(self, path: FilePath | None = None, *, ops: bool = False) -> str | None:
        """The JSON that the command line writes with ``--json``, as text, or written to a file.

        With ``ops``, it has every op of each rank, as with ``--ops``.

        Raises:
            PptraceError: the file cannot be written.
        """
        return text_or_file(self.json_parts(ops), path)

    def json_parts(self, ops: bool = False) -> Iterator[str]:
        """The text of :meth:`to_json` in parts: that of all steps of a long run is large."""
        return _parts_of(self._json_object(ops))

    @abstractmethod
    def _json_object(self, with_ops: bool) -> dict[str, Any]: ...


class TimelinePicture(ExportsPage):
    """A timeline: a notebook shows it, and the wheel zooms; ``to_html`` gives it as a page of its own."""

    def __init__(self, title: str, page: str) -> None:
        """Take the page that draws it."""
        self._title, self._html = title, page

    def _page(self) -> str:
        return self._html

    def __repr__(self) -> str:
        return f"<pptrace.TimelinePicture: {self._title}>"

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{escape(self._html)}" style="width: 100%; height: {_HEIGHT_PX}px; border: 0"></iframe>'


def _parts_of(json_object: dict[str, Any]) -> Iterator[str]:
    from pptrace.report.to_json import parts_of

    return parts_of(json_object)
