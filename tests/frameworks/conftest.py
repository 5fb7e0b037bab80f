"""Four live processes for the traces of other runtimes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.instrument.pool import Pool


@pytest.fixture(scope="session")
def torch_pool() -> Iterator[Pool]:
    with Pool(size=4) as started:
        yield started
