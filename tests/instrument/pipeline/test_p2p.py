"""An exchange brings the neighbours' tensors, whatever is posted together, in every mode."""

from __future__ import annotations

import pytest

from instrument.pipeline.transport import Mode
from tests.instrument.pipeline.cases.training import exchanges
from tests.support.pool import Pool


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("world", [2, 4])
def test_every_exchange_brings_the_neighbours_tensors(pool: Pool, world: int, mode: Mode) -> None:
    """Of shapes that both ends know, and of ones that travel first."""
    for stage, by_negotiation in enumerate(pool.run(exchanges, mode, world=world, timeout_s=60)):
        forward = {} if stage == 0 else {"RECV_F": stage - 1}
        backward = {} if stage == world - 1 else {"RECV_B": stage + 1}
        both = [backward, forward] if stage % 2 == 0 else [forward, backward]
        expected = [forward, {}, backward, {}, forward, backward, forward | backward, *both]
        numbers = [0, 0, 1, 1, 2, 3, 4, 5, 6]
        received = [
            {kind: 10.0 * number + peer for kind, peer in received.items()}
            for number, received in zip(numbers, expected, strict=True)
        ]
        assert by_negotiation == [received, received], stage
