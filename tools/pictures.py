"""Makes the pictures of README and docs: pages of the dashboard, in a headless browser, on the recorded samples.

    python tools/pictures.py [NAME]…

``docs/pictures/NAME.png``, and ``timeline.gif``, in which the timeline is used as a person uses it.
"""

from __future__ import annotations

import argparse
import io
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dashboards.app import create_app  # noqa: E402
from dashboards.serve import Server, bind, url_of  # noqa: E402
from tools.get_browser import BROWSER_ARGS, find_browser  # noqa: E402

FOLDER = ROOT / "docs" / "pictures"
SAMPLES = ROOT / "sample_traces"
WIDTH = 1240
DRAWN = "#timeline[data-complete=true]"
STATE = "document.querySelector('#timeline').timeline"
NUM_COLOURS = 64

PAGES: Mapping[str, tuple[str, str, str, int]] = {
    "overview": ("uneven_p4", "", "#overview-body .js-plotly-plot", 900),
    "whatif": (
        "interleaved-1f1b_p4",
        "timeline?step=2&whatif=schedule%3Dzbv&sources=simulated,measured,whatif",
        DRAWN,
        860,
    ),
    "bubbles": ("uneven_p4", "bubbles", "#whatif-headline", 1100),
    "dualpipe": ("dualpipe_p4", "timeline?step=2&critical=1", DRAWN, 720),
}
"""Of each picture the sample, the address, what must be there, and the height, px."""


@contextmanager
def served(sample: str) -> Iterator[str]:
    """Serve the dashboard of a sample; its address."""
    with bind("127.0.0.1", 0) as listener:
        server = Server(create_app([SAMPLES / sample]).server, listener)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        yield url_of(listener)
        server.end()
        thread.join(10)


def settled(page: Any) -> None:
    page.wait_for_selector(DRAWN)
    page.wait_for_timeout(150)


def wheel(page: Any, x: float, y: float, by: float, times: int) -> Iterator[int]:
    page.mouse.move(x, y)
    for _ in range(times):
        page.mouse.wheel(0, by)
        settled(page)
        yield 90


def moves(page: Any) -> Iterator[int]:
    """Use the timeline; after each look how long it is shown, ms."""
    settled(page)
    yield 1200
    canvas = page.locator(".timeline-canvas").bounding_box()
    x, y = canvas["x"] + 0.42 * canvas["width"], canvas["y"] + 0.4 * canvas["height"]
    yield from wheel(page, x, y, -220, 4)
    yield 700
    yield from wheel(page, x, y, 220, 4)
    page.evaluate(f"{STATE}.select(1, 2, 2)")
    page.wait_for_selector("#timeline-journey")
    settled(page)
    yield 2400
    page.keyboard.press("Escape")
    page.keyboard.press("c")
    page.wait_for_function(f"() => {STATE}.critical")
    settled(page)
    yield 1800
    page.keyboard.press("c")
    page.select_option("#timeline-whatif", "zbv")
    page.wait_for_function(f"() => {STATE}.sources.includes('whatif')")
    settled(page)
    yield 2600


def animation(page: Any, looks: Callable[[Any], Iterator[int]], path: Path) -> None:
    """Write a GIF of the page, a frame for each look at it."""
    from PIL import Image

    frames, times = [], []
    for milliseconds in looks(page):
        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        frames.append(picture.quantize(NUM_COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE))
        times.append(milliseconds)
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=times, loop=0, optimize=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="which (all)")
    names = parser.parse_args().names or [*PAGES, "timeline"]
    if unknown := set(names) - {*PAGES, "timeline"}:
        parser.error(f"no picture {sorted(unknown)}; expected some of {[*PAGES, 'timeline']}")
    FOLDER.mkdir(exist_ok=True)
    from playwright.sync_api import sync_playwright

    program = str(find_browser())
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(BROWSER_ARGS))
        for name in names:
            sample, address, awaited, height = PAGES.get(name, ("interleaved-1f1b_p4", "timeline?step=2", DRAWN, 740))
            page = browser.new_page(viewport={"width": WIDTH, "height": height})
            with served(sample) as url:
                page.goto(url + address)
                page.wait_for_selector(awaited)
                page.wait_for_timeout(1500)
                if name in PAGES:
                    page.screenshot(path=FOLDER / f"{name}.png")
                else:
                    animation(page, moves, FOLDER / f"{name}.gif")
                page.close()
        browser.close()
    for file in sorted(FOLDER.iterdir()):
        print(f"{file.relative_to(ROOT)}: {file.stat().st_size / 1e3:,.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
