"""Transports: connections over NCCL, which in groups of calls that differ at both ends fail or wait for each other."""

from __future__ import annotations

import pytest

from instrument.pipeline.transport import Mode
from pptrace.schedule.lower import lower
from pptrace.schedule.messages import peer_of
from pptrace.schedule.registry import build
from tests.instrument.pipeline.cases.connections import connections
from tests.support.pool import Pool


@pytest.mark.parametrize(("schedule", "pp"), [("gpipe", 2), ("gpipe", 4), ("interleaved-1f1b", 4), ("dualpipe", 4)])
def test_pairs_of_ranks_open_both_directions_in_equal_batches_and_in_one_order(
    pool: Pool, schedule: str, pp: int
) -> None:
    plan = lower(build(schedule, pp, 2 * pp))
    pairs = [
        {tuple(sorted((rank, peer_of(plan, action)))) for action in row if action.kind.is_send or action.kind.is_recv}
        for rank, row in enumerate(plan.ranks)
    ]
    for rank, batches in enumerate(pool.run(connections, schedule, Mode.BATCHED, "nccl", world=pp, timeout_s=60)):
        peers = [peer for (_, peer), _ in batches]
        assert [sorted(batch) for batch in batches] == [[("irecv", peer), ("isend", peer)] for peer in peers]
        assert [tuple(sorted((rank, peer))) for peer in peers] == sorted(pairs[rank])


@pytest.mark.parametrize(
    ("mode", "backend"), [(Mode.BATCHED, "gloo"), (Mode.EVEN_ODD, "nccl"), (Mode.BLOCKING, "nccl")]
)
def test_other_transports_open_no_connections(pool: Pool, mode: Mode, backend: str) -> None:
    assert pool.run(connections, "1f1b", mode, backend, world=2, timeout_s=60) == [[], []]
