"""JSON and HTML of what the API gives: as text, or written to a file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, overload

from pptrace.api.files import FilePath, text_or_file


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


def _parts_of(json_object: dict[str, Any]) -> Iterator[str]:
    from pptrace.report.to_json import parts_of

    return parts_of(json_object)
