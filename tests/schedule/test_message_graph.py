"""Replays under each way of sending and receiving, against the simulator's engine and a machine that runs blocking calls."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.message_graph import Messaging, end_of, make_graph
from pptrace.schedule.needs import OUTPUT_OF, Output
from pptrace.schedule.registry import SCHEDULES, build
from pptrace.schedule.replay_table import makespans, replay_table
from tests.schedule.torch_tables import with_torch_messages
from tests.support.synthetic import Message, message_of, run_on_paper, run_on_streams

SHAPES = [(name, pp, 2 * pp) for name in SCHEDULES for pp in (2, 4)] + [("interleaved-1f1b", 4, 12), ("1f1b", 1, 3)]


@pytest.mark.parametrize(("name", "pp", "microbatches"), SHAPES)
def test_receives_posted_ahead_are_the_simulators_replay(name: str, pp: int, microbatches: int) -> None:
    plan = build(name, pp, microbatches)
    rng = np.random.default_rng(3)
    durations = rng.integers(1, 100, (5, len(plan.table)))
    transfers = rng.integers(0, 50, (5, plan.table.num_messages))
    graph, times = make_graph(plan, Messaging.AHEAD), (durations.astype(float), transfers.astype(float))
    assert graph.ends(*times).max(axis=1).tolist() == makespans(plan.table, durations, transfers).tolist()
    assert graph.ends(*times).tolist() == replay_table(plan.table, durations, transfers).end.tolist()


@pytest.mark.parametrize(
    ("name", "pp", "microbatches", "messaging", "is_late"),
    [
        *((*shape, way, True) for shape in SHAPES for way in (Messaging.RENDEZVOUS, Messaging.ONE_CALL_AT_A_TIME)),
        *(
            (*shape, way, False)
            for shape in SHAPES[::5]
            for way in (Messaging.RENDEZVOUS, Messaging.ONE_CALL_AT_A_TIME)
        ),
        # Of what one rank posts together, only what its next op reads keeps it: so it is in these.
        *((name, 4, 8, Messaging.AHEAD, is_late) for name in ("1f1b", "gpipe") for is_late in (False, True)),
    ],
)
def test_replays_are_what_ranks_do_that_call_late(
    name: str, pp: int, microbatches: int, messaging: Messaging, *, is_late: bool
) -> None:
    plan = build(name, pp, microbatches)
    table, rng = plan.table, np.random.default_rng(4)
    graph = make_graph(plan, messaging)
    durations = rng.integers(1, 100, len(table))
    transfers = rng.integers(0, 50, table.num_messages)
    posted = rng.integers(0, 40, len(graph.call_row)) * is_late
    cost = {
        str(action): int(durations[table.rank_ptr[rank] + index])
        for rank in range(plan.pp)
        for index, action in enumerate(plan.compute_actions(rank))
    }

    def number(message: Message) -> int:
        direction, stage, microbatch = message
        output = OUTPUT_OF[Kind.F if direction == "F" else Kind.B]
        slot = (stage * plan.num_microbatches + (microbatch or 0)) * len(Output) + output
        return int(table.slot_to_message[slot])

    def lateness(_: int, action: Action) -> int:
        end = end_of(np.array(number(message_of(action))), np.array(action.kind.is_send))
        return int(posted[graph.call_of_end[end]]) if graph.call_of_end[end] >= 0 else 0

    run = run_on_paper(
        plan,
        lambda action: cost[str(action)],
        lambda message: int(transfers[number(message)]),
        one_by_one=messaging is Messaging.ONE_CALL_AT_A_TIME,
        is_buffered=messaging is Messaging.AHEAD,
        before_calls=lateness,
    )
    late = {"posted": posted[np.newaxis]} if is_late else {}
    ends = graph.ends(durations[np.newaxis], transfers[np.newaxis], **late)[0]
    expected = [done.end for rank in range(plan.pp) for done in run.computes(rank)]
    assert ends.tolist() == expected


@pytest.mark.parametrize(
    ("name", "pp", "microbatches"), [("1f1b", 3, 4), ("zbv", 2, 4), ("interleaved-1f1b", 3, 3), ("zb-h1", 4, 4)]
)
@pytest.mark.parametrize("is_torchs", [False, True])
def test_on_streams_each_call_waits_for_the_one_before_it_and_ops_for_what_they_read(
    name: str, pp: int, microbatches: int, *, is_torchs: bool
) -> None:
    plan = build(name, pp, microbatches)
    plan = with_torch_messages(plan) if is_torchs else plan
    rng = np.random.default_rng(6)
    durations = rng.integers(1, 100, len(plan.table))
    cells = [str(action) for rank in range(plan.pp) for action in plan.compute_actions(rank)]
    cost = dict(zip(cells, durations.tolist(), strict=True))
    transfers = np.full((1, plan.table.num_messages), 7)
    run = run_on_streams(plan, lambda action: cost[str(action)], 7)
    expected = [done.end for rank in range(plan.pp) for done in run.computes(rank)]
    ends = make_graph(plan, Messaging.IN_ORDER).ends(durations[np.newaxis], transfers)[0]
    assert ends.tolist() == expected


@pytest.mark.parametrize(("name", "pp", "microbatches"), SHAPES)
def test_prefetching_lies_between_receives_that_block_and_those_posted_ahead(
    name: str, pp: int, microbatches: int
) -> None:
    plan = build(name, pp, microbatches)
    rng = np.random.default_rng(5)
    durations = rng.integers(1, 100, (5, len(plan.table))).astype(float)
    transfers = rng.integers(0, 50, (5, plan.table.num_messages)).astype(float)
    most = int(plan.table.position.max()) + 1
    ends = [
        make_graph(plan, Messaging.BLOCKING_RECEIVES, depth).ends(durations, transfers) for depth in (0, 1, 2, most)
    ]
    assert all((later <= earlier).all() for earlier, later in pairwise(ends))
    assert (ends[0] == make_graph(plan, Messaging.BLOCKING_RECEIVES).ends(durations, transfers)).all()
    assert (ends[-1] == make_graph(plan, Messaging.AHEAD).ends(durations, transfers)).all()


def test_a_receive_posted_one_op_ahead_hides_behind_that_op() -> None:
    plan = build("gpipe", 2, 3)
    durations, transfers = np.full((1, len(plan.table)), 10.0), np.full((1, plan.table.num_messages), 13.0)
    ends = make_graph(plan, Messaging.BLOCKING_RECEIVES, prefetch=1).ends(durations, transfers)[0]
    forwards = ends[plan.table.rank_ptr[1] :][:3]
    # The second transfer begins when the second F of rank 0 has ended (20), the third when the first F of rank 1 has (33).
    assert forwards.tolist() == [10 + 13 + 10, 20 + 13 + 10, 33 + 13 + 10]


def test_a_receive_that_blocks_costs_its_rank_the_transfer() -> None:
    plan = build("gpipe", 2, 2)
    durations, transfers = np.full((1, len(plan.table)), 10.0), np.full((1, plan.table.num_messages), 3.0)
    spans = {way: make_graph(plan, way).ends(durations, transfers).max() for way in Messaging}
    # Rank 1 runs F, F, B, B behind one transfer when they are posted ahead, and else behind one before each F; rank 0 then
    # fetches what its second B needs behind its first B.
    assert spans[Messaging.AHEAD] == 10 + 3 + 40 + 3 + 10
    assert spans[Messaging.BLOCKING_RECEIVES] == 10 + 3 + 10 + 3 + 20 + 3 + 10 + 3 + 10
