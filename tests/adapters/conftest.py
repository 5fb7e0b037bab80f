"""Hooks of one test, with the lines that they print."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from instrument.adapters.hooks import Hooks


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def hooks(lines: list[str]) -> Iterator[Hooks]:
    hooks = Hooks(lines.append)
    yield hooks
    hooks.remove()
