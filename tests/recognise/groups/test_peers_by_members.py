"""A message that names a place in a group, and not the group, as gloo's in plain traces, has its other end in one group alone."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pptrace.model.tables import CALLS
from pptrace.recognise.groups.peers_by_members import with_peers_by_members
from tests.support.groups import facts_of_groups
from tests.support.tables import table_of

Ranks = Sequence[int]
Sent = tuple[int, int, Ranks]
"""Source, target, and the group of a message."""


def made(sent: Sequence[Sent], world: int, times: int = 4) -> dict[int, pd.DataFrame]:
    """The calls of each rank, which name places."""
    rows: dict[int, list[dict[str, object]]] = {rank: [] for rank in range(world)}
    for source, target, group in list(sent) * times:
        for kind, rank, peer in (("send", source, target), ("recv", target, source)):
            place = list(group).index(peer)
            rows[rank].append({"kind": kind, "peer": -1, "local_peer": place, "bytes": 64, "clock": "host"})
    return {rank: table_of(CALLS, of_rank) for rank, of_rank in rows.items()}


def job(groups: Sequence[Ranks], world: int, description: str = "undefined") -> dict[int, dict[str, object]]:
    """Facts about the default group and these groups."""
    described = dict.fromkeys(range(1, len(groups) + 1), description)
    return facts_of_groups(world, [range(world), *groups], described | {0: "default_pg"})


def line_of(pipeline: Ranks) -> list[Sent]:
    """The messages between the neighbours of a pipeline, in its group."""
    return [sent for a, b in pairwise(pipeline) for sent in ((a, b, pipeline), (b, a, pipeline))]


def peers_of(filled: Mapping[int, pd.DataFrame]) -> dict[int, set[tuple[str, int]]]:
    return {rank: set(zip(table["kind"], table["peer"], strict=True)) for rank, table in filled.items()}


def truth_of(sent: Sequence[Sent], world: int) -> dict[int, set[tuple[str, int]]]:
    result: dict[int, set[tuple[str, int]]] = {rank: set() for rank in range(world)}
    for source, target, _ in sent:
        result[source].add(("send", target))
        result[target].add(("recv", source))
    return result


@given(st.integers(2, 5), st.integers(2, 4), st.booleans(), st.integers(0, 9))
def test_peers_in_pipelines_of_a_mesh_are_those_of_their_groups(pp: int, dp: int, fastest: bool, seed: int) -> None:
    world = pp * dp
    pipelines = [[i * pp + j if fastest else j * dp + i for j in range(pp)] for i in range(dp)]
    replicas = [list(ranks) for ranks in zip(*pipelines, strict=True)]
    groups = pipelines + replicas
    random.Random(seed).shuffle(groups)
    sent = [message for pipeline in pipelines for message in line_of(pipeline)]
    filled, lines = with_peers_by_members(made(sent, world), job(groups, world))
    assert peers_of(filled) == truth_of(sent, world)
    assert len(lines) == 1
    assert lines[0].startswith(
        f"peers of messages of rank 0 to {world - 1} are places in process groups that no call names"
    )


def test_places_in_the_default_group_stay_as_they_are() -> None:
    calls = made(line_of(range(4)), 4)
    for groups in ([], [[0, 1], [2, 3], [0, 2], [1, 3]]):
        assert with_peers_by_members(calls, job(groups, 4)) == (calls, ())


def test_places_in_the_described_group_of_the_pipeline_stay_as_they_are() -> None:
    pipelines = [[0, 2], [1, 3]]
    calls = made([message for pipeline in pipelines for message in line_of(pipeline)], 4)
    assert with_peers_by_members(calls, job(pipelines, 4, "mesh_pp"))[0] is calls


@pytest.mark.parametrize(
    "groups", [[[0, 1], [1, 2], [2, 3]], [list(c) for k in (2, 3) for c in combinations(range(4), k)]]
)
def test_a_group_for_each_link_tells_the_chain(groups: list[Ranks]) -> None:
    sent = [(a, b, pair) for pair in ([0, 1], [1, 2], [2, 3]) for a, b in (pair, pair[::-1])]
    filled, _ = with_peers_by_members(made(sent, 4), job(groups, 4))
    assert peers_of(filled) == truth_of(sent, 4)


def test_peers_of_which_several_are_possible_are_unknown() -> None:
    sent = [(a, b, pair) for pair in ([0, 1], [2, 3]) for a, b in (pair, pair[::-1])]
    filled, _ = with_peers_by_members(made(sent, 4), job([[0, 1], [2, 3], [0, 3], [1, 2]], 4))
    assert peers_of(filled)[2] == {
        ("send", 3),
        ("recv", 3),
    }  # rank 1, which is first in no group with it, is impossible
    filled, _ = with_peers_by_members(made(sent, 4), job([[0, 1], [2, 3], [0, 3], [2, 1]], 4))
    assert peers_of(filled) == {rank: {("send", -1), ("recv", -1)} for rank in range(4)}


def test_ranks_without_a_trace_contradict_nothing() -> None:
    pipelines = [[0, 1], [2, 3]]
    calls = made([message for pipeline in pipelines for message in line_of(pipeline)], 4)
    one = {0: calls[0]}
    assert with_peers_by_members(one, job(pipelines, 4))[0] is one
    filled, _ = with_peers_by_members({rank: calls[rank] for rank in (1, 2, 3)}, job(pipelines, 4))
    assert peers_of(filled) == {rank: {("send", peer), ("recv", peer)} for rank, peer in ((1, 0), (2, 3), (3, 2))}


def test_groups_of_ranks_beyond_64_bits_tell_no_peer() -> None:
    entries = [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": 2, "ranks": [rank, 2**63]} for rank in range(2)]
    facts = {rank: {"world_size": 2, "pg_config": [entry]} for rank, entry in enumerate(entries)}
    filled, _ = with_peers_by_members(made([(0, 1, (0, 1)), (1, 0, (0, 1))], 2), facts)
    assert all(set(table["peer"]) == {-1} for table in filled.values())
