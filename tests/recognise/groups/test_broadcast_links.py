"""Broadcasts in groups of two that form a pipeline are its messages, or named in a line; those of replicas are neither."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import pytest

from pptrace.model.tables import CALLS, HOST_ORDER, What
from pptrace.recognise.groups.broadcast_links import line_of_broadcast_links, two_way_broadcasts, with_messages_of_links
from tests.support.groups import facts_of_groups, group_columns
from tests.support.tables import table_of

CHAIN = [[0, 1], [1, 2]]


def job(groups: Sequence[Sequence[int]], world: int) -> dict[int, dict[str, object]]:
    return facts_of_groups(world, [range(world), *groups])


def made(groups: Sequence[Sequence[int]], world: int, named: bool) -> dict[int, pd.DataFrame]:
    """By rank its broadcasts, with or without their groups."""
    rows: dict[int, list[dict[str, object]]] = {rank: [] for rank in range(world)}
    for number, ranks in enumerate(groups, 1):
        group = group_columns(number, ranks) if named else {}
        for rank in ranks:
            rows[rank].append({"kind": "broadcast", "clock": "host", "peer": -1, "local_peer": -1, **group})
    return {rank: table_of(CALLS, of_rank) for rank, of_rank in rows.items()}


@pytest.mark.parametrize("named", [True, False])
def test_broadcasts_along_a_chain_are_told(named: bool) -> None:
    (line,) = line_of_broadcast_links(made(CHAIN, 3, named), job(CHAIN, 3))
    assert line.startswith("ranks 0 to 2 broadcast in groups of two along a chain and send no messages")
    assert "no call tells its group and its root: record with pptrace run" in line


def test_broadcasts_that_explain_nothing_though_their_roots_are_known_are_told() -> None:
    calls = {rank: table.assign(peer=1) for rank, table in made(CHAIN, 3, True).items()}
    (line,) = line_of_broadcast_links(calls, job(CHAIN, 3))
    assert "no schedule explains these broadcasts as its messages" in line


@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[0, 1], [2, 3], [0, 2], [1, 3]], [[0, 1, 2, 3]], [[0, 1]]])
@pytest.mark.parametrize("named", [True, False])
def test_groups_that_form_no_chain_are_not_told(groups: list[list[int]], named: bool) -> None:
    assert line_of_broadcast_links(made(groups, 4, named), job(groups, 4)) == ()


def test_a_run_with_messages_is_not_told() -> None:
    calls = made(CHAIN, 3, True)
    message = table_of(CALLS, [{"kind": "send", "peer": 1}])
    assert line_of_broadcast_links(calls | {0: pd.concat([calls[0], message])}, job(CHAIN, 3)) == ()


Program = Sequence[str | tuple[int, int]]
"""The turns of a rank: "compute", or a broadcast with another rank, as (other, root)."""


def ran(programs: Mapping[int, Program]) -> tuple[dict[int, pd.DataFrame], dict[int, pd.DataFrame]]:
    """By rank its calls, of which a backend knows the root's place in the group, and what its host did."""
    calls, hosts = {}, {}
    for rank, program in programs.items():
        made_calls, host = [], []
        for at, each in enumerate(program):
            row = {"start_ns": 10 * at + 1, "end_ns": 10 * at + 9}
            if isinstance(each, str):
                host.append({"what": What.OPERATOR.value, **row})
                continue
            other, root = each
            members = sorted((rank, other))
            place = {"peer": -1, "local_peer": members.index(root), "group_ranks": json.dumps(members), "group_size": 2}
            made_calls.append({"kind": "broadcast", "clock": "host", "host_ns": 10 * at, **row, **place})
            host.append({"what": What.MESSAGE.value, **row})
        calls[rank], hosts[rank] = table_of(CALLS, made_calls), table_of(HOST_ORDER, host)
    return calls, hosts


def sent(calls: Mapping[int, pd.DataFrame]) -> dict[int, list[tuple[str, int]]]:
    return {rank: list(zip(of_rank["kind"], of_rank["peer"], strict=True)) for rank, of_rank in calls.items()}


STEP = "compute"
PIPELINE: Mapping[int, Program] = {
    0: [STEP, (1, 0), STEP, (1, 1), (1, 0), STEP, (1, 1), STEP],  # gets a gradient before it sends its next output
    1: [(0, 0), STEP, (2, 1), (2, 2), STEP, (0, 1), (0, 0), STEP, (2, 1), (2, 2), STEP, (0, 1)],
    2: [(1, 1), STEP, STEP, (1, 2), (1, 1), STEP, STEP, (1, 2)],
}


def test_the_root_sends_and_the_other_receives_over_the_links_of_a_pipeline() -> None:
    messages = sent(with_messages_of_links(*ran(PIPELINE)))
    assert messages[0] == [("send", 1), ("recv", 1)] * 2
    assert messages[1] == [("recv", 0), ("send", 2), ("recv", 2), ("send", 0)] * 2
    assert messages[2] == [("recv", 1), ("send", 1)] * 2


def test_roots_that_are_global_ranks_tell_the_same() -> None:
    calls, hosts = ran(PIPELINE)
    by_place = with_messages_of_links(calls, hosts)
    for rank, table in calls.items():
        roots = [json.loads(text)[place] for text, place in zip(table["group_ranks"], table["local_peer"], strict=True)]
        calls[rank] = table.assign(peer=roots, local_peer=-1)
    assert sent(with_messages_of_links(calls, hosts)) == sent(by_place)


@pytest.mark.parametrize(
    "programs",
    [
        {0: [(1, 0), (1, 0), STEP, (1, 0), STEP], 1: [(0, 0), (0, 0), STEP, (0, 0), STEP]},  # buffers, from one alone
        {0: [STEP, *[(1, 0), (1, 1)] * 4] * 2, 1: [STEP, *[(0, 0), (0, 1)] * 4] * 2},  # parameters, each from its owner
        {
            rank: [STEP, *((other, root) for other in {0, 1, 2, 3} - {rank} for root in (rank, other))]
            for rank in range(4)
        },
    ],
)
def test_broadcasts_of_replicas_and_of_ranks_that_form_no_chain_stay(programs: Mapping[int, Program]) -> None:
    calls, hosts = ran(programs)
    assert with_messages_of_links(calls, hosts) is calls


def test_broadcasts_of_other_sizes_each_way_stay() -> None:
    """Such as a teacher's logits and its student's loss."""
    calls, hosts = ran(PIPELINE)
    forward = {rank: table["local_peer"] == 0 for rank, table in calls.items()}
    other = {rank: table.assign(bytes=np.where(forward[rank], 4_096, 4)) for rank, table in calls.items()}
    assert with_messages_of_links(other, hosts) is other
    is_shape = {rank: forward[rank] & (forward[rank].cumsum() == 1) for rank in calls}
    same = {rank: table.assign(bytes=np.where(is_shape[rank], 16, 4_096)) for rank, table in calls.items()}
    assert with_messages_of_links(same, hosts) is not same


def test_a_broadcast_that_the_host_posted_elsewhere_stays() -> None:
    """Such as in an optimizer: copies of parameters, next to the messages of a pipeline."""
    calls, hosts = ran(
        {rank: [*program, *([(5, 5), (5, 0)] if rank == 0 else [])] for rank, program in PIPELINE.items()}
    )
    messages = hosts[0]["what"] == What.MESSAGE.value
    hosts[0] = hosts[0].drop(hosts[0].index[messages][-2:])
    assert sent(with_messages_of_links(calls, hosts))[0][-2:] == [("broadcast", -1)] * 2
    assert sent(with_messages_of_links(calls, hosts))[0][0] == ("send", 1)


def test_broadcasts_both_ways_in_a_group_of_two_may_be_messages() -> None:
    calls, _ = ran({0: [(1, 0), (2, 0), (1, 1), (2, 0)]})
    assert two_way_broadcasts(calls[0]).tolist() == [0, 2]
    assert two_way_broadcasts(calls[0].assign(local_peer=-1)).tolist() == []
    assert two_way_broadcasts(calls[0].assign(group_ranks="[0, 1, 2]")).tolist() == []
