"""Megatron's operations bring the neighbour's tensor, in every mode."""

from __future__ import annotations

import pytest

from instrument.pipeline.transport import Mode
from tests.instrument.cases import megatron_operations
from tests.instrument.pool import Pool


@pytest.mark.parametrize("negotiated", [False, True])
@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("world", [2, 4])
def test_every_operation_brings_the_neighbours_tensor(pool: Pool, world: int, mode: Mode, negotiated: bool) -> None:
    seen = pool.run(megatron_operations, mode, negotiated, world=world, timeout_s=60)
    for stage, received in enumerate(seen):
        before = None if stage == 0 else stage - 1
        after = None if stage == world - 1 else stage + 1
        from_before = dict.fromkeys(("recv_forward", "send_forward_recv_forward", "all four: forward"), before)
        from_after = dict.fromkeys(("recv_backward", "send_backward_recv_backward", "all four: backward"), after)
        numbers = {
            "recv_forward": 0,
            "recv_backward": 1,
            "send_forward_recv_forward": 2,
            "send_backward_recv_backward": 3,
            "all four: forward": 4,
            "all four: backward": 5,
        }
        for name, peer in (from_before | from_after).items():
            assert received[name] == (None if peer is None else 10 * numbers[name] + peer), (stage, name)
        assert received["send_forward_recv_backward"] == (None if after is None else 70 + after), stage
        assert received["send_backward_recv_forward"] == (None if before is None else 60 + before), stage
