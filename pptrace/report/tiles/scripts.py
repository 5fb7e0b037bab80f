"""Scripts and styles of the timeline, for the dashboard and for pages that hold their tiles themselves."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent / "browser"


@cache
def script() -> str:
    """The timeline's scripts as one; that of the class which others add to comes first."""
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(_FOLDER.glob("*.js")))


@cache
def style() -> str:
    """The colours of pages, light and dark, and the look of timelines."""
    return "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in ("colours.css", "timeline.css"))
