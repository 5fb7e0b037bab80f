"""Pictures of the timeline's canvas in a browser, and where two of them differ."""

from __future__ import annotations

import base64
import io
import time
from typing import Any
from xml.etree import ElementTree

DRAWN = "#timeline[data-complete=true]"
STATE = "document.querySelector('#timeline').timeline"


def drawn(page: Any) -> Any:
    """The page when all its tiles have come. It is brought to the front: those behind it hardly draw."""
    page.bring_to_front()
    page.wait_for_selector(DRAWN)
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    page.wait_for_selector(DRAWN)
    return page


def opened_anew(page: Any, link: str) -> Any:
    """The page of a link that is opened while nothing of its application is loaded."""
    page.goto("about:blank")
    page.goto(link)
    return drawn(page)


def texts_of(drawing: str) -> list[str]:
    """The texts of a drawing in SVG."""
    return [text.text or "" for text in ElementTree.fromstring(drawing).iter("{http://www.w3.org/2000/svg}text")]


def picture(page: Any) -> str:
    """The pixels of the canvas when they no longer change, as a data URL. A page gets its height late."""
    page.bring_to_front()  # those behind it are drawn once a second
    page.wait_for_load_state("networkidle")  # what gives it its height may come last
    before = ""
    while True:
        pixels: str = drawn(page).evaluate(f"{STATE}.canvas.toDataURL()")
        if pixels == before:
            return pixels
        before = pixels
        page.wait_for_timeout(100)


def difference(page: Any, expected: str, seconds: float = 15) -> str:
    """The part of the canvas that differs from a picture, in px; empty as soon as none does."""
    end = time.monotonic() + seconds
    while (pixels := picture(page)) != expected and time.monotonic() < end:
        page.wait_for_timeout(50)
    return "" if pixels == expected else _difference(pixels, expected)


def _difference(pixels: str, expected: str) -> str:
    from PIL import Image, ImageChops

    one, other = (
        Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB") for url in (pixels, expected)
    )
    if one.size != other.size:
        return f"it has {one.size} pixels; expected {other.size}"
    return f"other colours within {ImageChops.difference(one, other).getbbox()}, of {one.size}"
