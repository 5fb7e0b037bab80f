"""The page of experts in a real headless Chromium."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.dashboards.accessibility import settle, violations
from tests.support.programs import SAMPLES

pytestmark = pytest.mark.browser

Serve = Callable[[Sequence[Path]], str]
TEXTS = "selector => [...document.querySelectorAll(selector)].map(text => text.textContent)"


def test_steps_and_pairs_of_ranks_are_drawn_with_their_names(serve: Serve, visit: Callable[[str], Any]) -> None:
    page = visit(serve([SAMPLES / "experts_pp2_ep2"]) + "experts").page
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
