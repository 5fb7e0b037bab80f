"""Communication that C++ posts on gloo, under hooks: its axis, kind, count and bytes against what the parameters' shapes say."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from pptrace.workflow.load import load
from tests.frameworks.parallel_cases import BATCH, HIDDEN, LAYERS, STEPS, WIDTH, train_parallel
from tests.support.pool import Pool

FLOAT = 4
ACTIVATIONS = BATCH * WIDTH * FLOAT
SHARD = (WIDTH * HIDDEN // 2 + HIDDEN // 2 + HIDDEN // 2 * WIDTH + WIDTH) * FLOAT
"""Parameters of a tensor-parallel rank: halves of both layers, the second's bias whole."""
BUCKETS = LAYERS * (WIDTH * WIDTH + WIDTH + 2 * WIDTH) * FLOAT
BUFFERS = LAYERS * (2 * WIDTH * FLOAT + 8)
RECORDED = STEPS - 2


def calls_of(folder: Path) -> list[Counter[tuple[str, str, int]]]:
    """By rank how many calls of each axis, kind and size its trace holds, each matched with the other members'."""
    comms = load([folder]).data.comms
    assert (comms["match"] >= 0).all()
    return [Counter(zip(own["axis"], own["kind"], own["bytes"], strict=True)) for _, own in comms.groupby("rank")]


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_tensor_and_data_parallel_calls_have_their_axes_and_bytes(pool: Pool, tmp_path: Path, how: str) -> None:
    losses = [pool.run(train_parallel, how, str(tmp_path), hooked, world=4) for hooked in (False, True)]
    assert losses[0] == losses[1]
    forwards = 2 if how == "ddp" else 1  # one of them without a reduction
    wanted = Counter({("tp", "all_reduce", ACTIVATIONS): forwards, ("world", "all_reduce", FLOAT): 1})
    if how == "ddp":
        wanted["dp", "all_reduce", SHARD] = 1
    else:
        wanted |= Counter({("dp", "all_gather", SHARD): 1, ("dp", "reduce_scatter", SHARD): 1})
    every = Counter({key: RECORDED * count for key, count in wanted.items()})
    assert calls_of(tmp_path) == [every] * 4


def test_buckets_and_broadcast_buffers_are_of_the_groups_axis_and_sum_to_the_gradients(
    pool: Pool, tmp_path: Path
) -> None:
    losses = [pool.run(train_parallel, "buckets", str(tmp_path), hooked, world=2) for hooked in (False, True)]
    assert losses[0] == losses[1]
    for calls in calls_of(tmp_path):
        assert {axis for axis, _, _ in calls} == {"dp"}
        reduced = [size for (_, kind, size), count in calls.items() if kind == "all_reduce" for _ in range(count)]
        assert reduced.count(FLOAT) == RECORDED  # the loss, over the same ranks
        assert sum(reduced) == RECORDED * (BUCKETS + FLOAT)
        assert len(reduced) > 2 * RECORDED
        assert calls["dp", "broadcast", BUFFERS] == RECORDED


def test_an_axis_stays_that_of_its_group_whatever_other_meshes_call_the_same_ranks(pool: Pool, tmp_path: Path) -> None:
    losses = [pool.run(train_parallel, "renamed", str(tmp_path), hooked, world=2) for hooked in (False, True)]
    assert losses[0] == losses[1]
    kinds = {(axis, kind) for calls in calls_of(tmp_path) for axis, kind, _ in calls}
    assert kinds == {("dp", "all_gather"), ("dp", "reduce_scatter"), ("dp", "all_reduce")}
