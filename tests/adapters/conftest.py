"""Four live processes in which hooks are installed and taken out again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.instrument.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    with Pool(size=4) as started:
        yield started
