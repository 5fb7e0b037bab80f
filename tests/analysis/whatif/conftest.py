"""Runs on paper, of whose full backwards half is W: the tests of this folder take that for what nothing tells."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pptrace.analysis.whatif import recompute


@pytest.fixture(autouse=True, scope="module")
def half_of_a_backward() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recompute, "WEIGHT_SHARE", 0.5)
        patch.setattr(recompute, "WEIGHT_SHARES", (0.4, 0.6))
        patch.setattr(recompute, "_MOST_RECOMPUTE", 0.0)
        yield
