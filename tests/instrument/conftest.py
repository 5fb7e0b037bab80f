"""One pool of live processes for all tests of this folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:  # so that tests and worker processes import the same modules by the same names
    sys.path.insert(0, str(ROOT))

from tests.instrument.pool import Pool  # noqa: E402


@pytest.fixture(scope="session")
def large_pool() -> Iterator[Pool]:
    """Eight processes."""
    with Pool(size=8) as started:
        yield started


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four processes that run a case each at a time; see :class:`tests.instrument.pool.Pool`."""
    with Pool(size=4) as started:
        yield started
