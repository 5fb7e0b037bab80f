"""What all tests share."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

_POOLS = {"pool", "large_pool", "torch_pool"}

# A busy machine is no failure. In continuous integration the same examples are drawn each time, so that a change is judged by
# what it changed; everywhere else they are new ones each time.
settings.register_profile("unhurried", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("unhurried")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that keep many processes busy are marked, so that they can run one after the other and all others side by side."""
    for item in items:
        if isinstance(item, pytest.Function) and not _POOLS.isdisjoint(item.fixturenames):
            item.add_marker(pytest.mark.processes)
