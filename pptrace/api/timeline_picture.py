"""A timeline as a notebook shows it."""

from __future__ import annotations

from html import escape

from pptrace.api.files import ExportsPage

_HEIGHT_PX = 620


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
