"""Hooks of functional collectives: each call seen once, with its facts, and nothing changed or broken."""

from __future__ import annotations

import pytest

from tests.adapters.functional_cases import compile_functional, wait_unseen, watch_functional
from tests.support.pool import Pool

ORDER = ("posted", "returned", "waiting", "completed")
ONE_CALL = {
    "all_reduce": ("all_reduce", 32),
    "taken by name": ("all_reduce", 32),
    "operator": ("all_reduce", 32),
    "in place": ("all_reduce", 32),
    "all_gather": ("all_gather", 32),
    "reduce_scatter": ("reduce_scatter", 32),
    "broadcast": ("broadcast", 32),
    "coalesced": ("all_reduce", 40),
    "mesh": ("all_reduce", 32),
    "redistributed": ("all_gather", 48),
    "of the world": ("all_reduce", 8),
}
"""By way of calling the kind, and the bytes of the larger side."""


def test_every_way_of_calling_is_seen_once_with_its_group_and_bytes(pool: Pool) -> None:
    for rank, result in enumerate(pool.run(watch_functional, world=4)):
        assert result["lines"] == []
        assert result["same hashes"], "tables of torch are keyed by operators"
        first = rank // 2 * 2
        for name, (kind, size) in ONE_CALL.items():
            ranks = (0, 1, 2, 3) if name == "of the world" else (first, first + 1)
            peer = first + 1 if name == "broadcast" else -1
            heard, same = result[name]
            assert same, name
            assert heard == [(event, kind, peer, size, ranks) for event in ORDER], name
        pair = (first, first + 1)
        once = [(event, "all_reduce", -1, 32, pair) for event in ORDER]
        assert result["fed to another"] == (once + once, True)
        forward = [(event, "all_gather", -1, 32, pair) for event in ORDER]
        assert result["backward"] == (forward + [(event, "reduce_scatter", -1, 32, pair) for event in ORDER], True)
        rows = max(3, 2 * (rank % 2 + 1))  # sent and received
        assert result["uneven"] == ([(event, "all_to_all", -1, 8 * rows, pair) for event in ORDER], True)
        at_once = [(event, "all_to_all", -1, 32, pair) for event in ("posted", "returned", "completed")]
        assert result["sharded anew"] == (at_once, True)
        assert result["error"] == ["posted", "failed"]
        assert result["after the error"] == ["posted", "returned"]
        written, heard = result["silent"]
        assert written[:2] == ["_c10d_functional.all_reduce.default", "_c10d_functional.wait_tensor.default"]
        assert heard == []


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_stays_one_graph_and_its_collective_is_seen_when_it_runs(pool: Pool, backend: str) -> None:
    for values, breaks, heard, lines in pool.run(compile_functional, backend, world=2):
        assert values == [2 * (2 * (2 * number + 1) + 1) for number in range(3)]
        assert breaks == 0
        assert lines == []
        assert heard == [(event, "all_reduce", -1, 8, (0, 1)) for event in ORDER]


def test_results_that_were_waited_for_unseen_are_not_kept_for_ever(pool: Pool) -> None:
    for posted, completed in pool.run(wait_unseen, world=2):
        assert posted == 600
        assert posted - 300 < completed <= posted
