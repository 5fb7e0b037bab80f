"""Colours: scales of heat maps."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from pptrace.report.colours import DARK_SCALE
from pptrace.report.tiles.scripts import style


def _oklab(colour: str) -> np.ndarray[Any, Any]:
    """Ottosson's OKLab of "#rrggbb"."""
    srgb = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    to_lms = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566]]
    to_lab = [[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099]]
    lms = np.cbrt([*to_lms, [0.0883024619, 0.2817188376, 0.6299787005]] @ linear)
    return np.array([*to_lab, [0.0259040371, 0.7827717662, -0.8086757660]]) @ lms


def test_the_scale_of_dark_pages_begins_near_their_ground_and_goes_up_in_equal_steps() -> None:
    parts, colours = zip(*DARK_SCALE, strict=True)
    assert np.diff(parts) == pytest.approx(1 / (len(parts) - 1))
    places = np.array([_oklab(str(colour)) for colour in colours])
    steps = np.linalg.norm(np.diff(places, axis=0), axis=1)
    assert steps.max() < 1.06 * steps.min(), "they look equal"
    assert (np.diff(places[:, 0]) > 0.06).all(), "each is lighter, whatever colours one sees"
    panel = re.search(r"prefers-color-scheme: dark.*?--panel: (#\w{6})", style(), re.DOTALL)
    assert np.linalg.norm(places[0] - _oklab(panel[1])) < 0.05, "near the ground"
