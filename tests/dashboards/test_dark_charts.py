"""Heat maps on dark pages, in a real headless Chromium: dark where there is little; their files stay as they are on white."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pptrace.report.colours import DARK_SCALE, SCALE
from tests.dashboards.accessibility import settle, violations
from tests.dashboards.conftest import Serve, Visiting
from tests.support.programs import SAMPLES

pytestmark = pytest.mark.browser

TEXTS = "selector => [...document.querySelectorAll(selector)].map(text => text.textContent)"
SCALE_OF = (
    """id => document.querySelector(`#${id} .js-plotly-plot`)?._fullData?.[0].colorscale.map(([, colour]) => colour)"""
)
MAPS = {
    "experts": ["expert-routes"],
    "communication": ["matrix-bytes", "matrix-transfer"],
    "schedules": ["plan-bubbles"],
}
"""Heat maps by their pages."""


def channels(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))


EXTREMES = """id => {
    const plot = document.querySelector(`#${id} .js-plotly-plot`);
    const { xaxis, yaxis } = plot._fullLayout;
    const frame = plot.getBoundingClientRect();
    const all = plot._fullData[0].z.flatMap((row, at) => [...row].map((value, column) => ({ value, column, at })));
    const cells = all.filter(({ value }) => typeof value === 'number').sort((one, other) => one.value - other.value);
    const corner = ({ column, at }) => [
        frame.x + xaxis._offset + xaxis.r2p(column - 0.5) + 5,
        frame.y + yaxis._offset + Math.min(yaxis.r2p(at - 0.5), yaxis.r2p(at + 0.5)) + 5,
    ];
    return [corner(cells[0]), corner(cells[cells.length - 1])];
}"""
"""Places within the cells with the least and the most, away from their texts."""


def shades(page: Any, id: str) -> list[float]:
    """The means of the channels of the cells with the least and the most."""
    from PIL import Image

    page.wait_for_timeout(150)
    pixels = np.asarray(Image.open(io.BytesIO(page.screenshot())).convert("RGB"))
    return [float(pixels[round(y), round(x)].mean()) for x, y in page.evaluate(EXTREMES, id)]


def check_experts(page: Any) -> None:
    """Steps and pairs of ranks are drawn with their names."""
    page.wait_for_selector("#expert-matrix .hm")
    page.wait_for_selector("#expert-late-steps .scatterlayer .point")
    names = [f"rank {number}" for number in range(4)]
    assert sorted(page.evaluate(TEXTS, "#expert-matrix .ytick text")) == names
    assert page.evaluate(TEXTS, "#expert-matrix .xtick text") == names
    assert page.locator("#expert-late-steps .scatterlayer .point").count() == 3
    assert page.evaluate(TEXTS, "#expert-late-steps .legendtext") == ["rank 2", "rank 0"]
    assert page.locator("#expert-steps tbody tr").count() == 3
    assert page.locator("#expert-traffic tbody tr").count() == 4
    assert violations(settle(page)) == []


def test_heat_maps_of_a_dark_page_are_dark_where_there_is_little(serve: Serve, visit: Visiting) -> None:
    """One visit for all of them: most of what a test costs is the first drawing of a page."""
    page = visit(serve([SAMPLES / "experts_pp2_ep2"]) + "experts").page
    check_experts(page)
    colours = {dark: [colour for _, colour in scale] for dark, scale in ((True, DARK_SCALE), (False, SCALE))}
    for name, ids in MAPS.items():
        page.emulate_media(color_scheme="dark")
        page.click(f"#to-{name}")
        for is_dark in (True, False):
            page.emulate_media(color_scheme="dark" if is_dark else "light")
            for id in ids:
                page.wait_for_selector(f"#{id} .heatmaplayer .hm")
                page.wait_for_function(f"id => ({SCALE_OF})(id)?.length === {len(colours[is_dark])}", arg=id)
                assert page.evaluate(SCALE_OF, id) == colours[is_dark]
                settle(page).locator(f"#{id}").scroll_into_view_if_needed()
                least, most = shades(page, id)
                if is_dark:
                    assert least <= most == pytest.approx(226, abs=15), "the most is light"
                else:
                    assert most == pytest.approx(50, abs=12), "dark on a light page"
        page.emulate_media(color_scheme="dark")
        page.wait_for_function(f"id => ({SCALE_OF})(id)?.length === {len(DARK_SCALE)}", arg=ids[0])
        with page.expect_download() as saved:
            page.click(f"button[data-picture={ids[0]}][data-format=svg]")
        content = Path(saved.value.path()).read_text()
        first, last = (f"rgb{channels(colour)}" for colour in (SCALE[0][1], DARK_SCALE[-1][1]))
        assert first in content
        assert last not in content, "a file is on white ground"
