"""Ranks that are recorded within a budget."""

from __future__ import annotations

import pytest

from instrument.launch.recording.chosen_ranks import DISK_BYTES, MEMORY_BYTES, RankChoice, choose, ranks_in_order

MESH = {"tp": 2, "cp": 1, "dp": 2, "pp": 4, "order": "tp-cp-dp-pp", "vpp": 1}
"""Rank = tp + 2 · (dp + 2 · pp)."""


def test_the_ends_of_the_pipeline_come_first_then_positions_then_replicas() -> None:
    order = [rank for rank, _ in ranks_in_order(16, MESH)]
    assert order[:4] == [0, 12, 4, 8]
    assert order[4:8] == [1, 13, 5, 9]
    assert order[8:12] == [2, 14, 6, 10]
    assert sorted(order) == list(range(16))
    assert [rank for rank, is_first in ranks_in_order(16, MESH) if is_first] == [0, 12, 4, 8]


@pytest.mark.parametrize("mesh", [None, {**MESH, "pp": 3}, {**MESH, "order": "tp-tp"}])
def test_without_a_mesh_that_fits_ranks_are_evenly_spread(mesh: dict[str, object] | None) -> None:
    order = [rank for rank, _ in ranks_in_order(16, mesh)]
    assert order[:4] == [0, 15, 8, 4]
    assert sorted(order) == list(range(16))
    assert [rank for rank, _ in ranks_in_order(1, mesh)] == [0]
    assert sorted(rank for rank, _ in ranks_in_order(2, mesh)) == [0, 1]


def test_no_more_ranks_are_recorded_than_fit_on_the_disk_and_into_a_host() -> None:
    events, steps = 1000, 10
    on_disk, in_memory = events * steps * DISK_BYTES, events * steps * MEMORY_BYTES
    assert len(choose(16, MESH, 6 * in_memory, 4, steps, events).ranks) == 16
    of_hosts = choose(16, MESH, in_memory, 4, steps, events)
    assert of_hosts.ranks == (0, 4, 8, 12)  # one on each host of four
    few = choose(16, MESH, 2 * on_disk, 16, steps, events)
    assert few.ranks == (0, 4, 8, 12)
    assert "4 beyond the budget" in few.why
    assert choose(16, MESH, 6 * in_memory, 4, steps, None).ranks == (0, 4, 8, 12)


def test_ranks_read_what_the_first_one_chose(tmp_path: object) -> None:
    first, second = (RankChoice(tmp_path, rank, 16, 16, 10**6) for rank in (0, 1))
    made = first.make(MESH, 3, 200)
    assert second.read(MESH, 3) == made
    assert (first.is_first, second.is_first) == (True, False)
