"""Lowered plans: the order of messages, their pairs, and that no order of blocking calls can stop them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from torch.distributed.pipelining.schedules import Schedule1F1B

from pptrace.errors import ScheduleError
from pptrace.schedule.actions import Action, Kind, Phase, iter_halves
from pptrace.schedule.lower import lower
from pptrace.schedule.messages import peer_of
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build
from pptrace.schedule.text import from_rows, to_rows
from tests.schedule import megatron, rendezvous, torch_tables
from tests.schedule.shapes import one_chunk_shapes, plans

SOME_SHAPES = [
    *(("gpipe", p, m, 1, None) for p in (1, 2, 3, 8) for m in (1, 4, 9)),
    *(("1f1b", p, m, 1, None) for p in (1, 2, 5, 8) for m in (1, 3, 8, 17)),
    *(("interleaved-1f1b", p, m, v, n) for p, m, n in [(1, 3, 2), (2, 5, 3), (4, 8, 4), (8, 24, 8)] for v in (2, 4)),
    *(
        (name, p, m, 1, None)
        for name in ("eager-1f1b", "zb-h1", "zb-h2", "zb-auto")
        for p, m in [(1, 3), (4, 3), (5, 12)]
    ),
    *(
        (name, p, m, 2, None)
        for name in ("looped-bfs", "interleaved-zb", "zbv", "v-half", "v-min")
        for p, m in [(1, 3), (4, 3), (8, 24)]
    ),
    *(("dualpipe", p, m, 2, None) for p, m in [(2, 4), (4, 8), (4, 14), (8, 20)]),
    *(("dualpipe-v", p, m, 2, None) for p, m in [(1, 2), (2, 4), (3, 7), (8, 20)]),
]


def is_p2p(cell: str) -> bool:
    return "SEND" in cell or "RECV" in cell


def between_computes(cells: list[str]) -> list[tuple[str, frozenset[str]]]:
    """Each compute action with the set of transfers before it; the last entry has those at the end."""
    steps: list[tuple[str, frozenset[str]]] = []
    waiting: list[str] = []
    for cell in [*cells, "end"]:
        if is_p2p(cell):
            waiting.append(cell)
        else:
            assert len(waiting) == len(set(waiting))
            steps.append((cell, frozenset(waiting)))
            waiting = []
    return steps


def test_1f1b_makes_the_p2p_calls_of_megatron_between_the_same_computes() -> None:
    """Within a group the order differs, because Megatron's fused pairs post both at once (see the next tests)."""
    for p, m in one_chunk_shapes():
        rows = to_rows(lower(build("1f1b", p, m)))
        for rank, row in enumerate(rows):
            theirs = [cell for call in megatron.one_f_one_b_calls(p, rank, m) for cell in call]
            assert between_computes(row) == between_computes(theirs), (p, m, rank)


def test_every_fused_call_of_megatron_is_within_one_group() -> None:
    for p, m in [(2, 4), (4, 2), (4, 8), (8, 16), (3, 7)]:
        plan = lower(build("1f1b", p, m))
        for rank in range(p):
            groups = [{str(action) for action in group} for group in plan.instructions(rank)]
            for call in megatron.one_f_one_b_calls(p, rank, m):
                assert any(set(call) <= group for group in groups), (p, m, rank, call)


def test_torch_fuses_the_same_pairs_as_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two sources of the order above agree call by call, wherever torch takes the shape."""
    for p, m in [(2, 2), (2, 5), (4, 4), (4, 9), (8, 16)]:
        for rank in range(p):
            with monkeypatch.context() as patch:
                assert torch_tables.executed(Schedule1F1B, rank, p, m, patch) == megatron.one_f_one_b_calls(p, rank, m)


def test_a_group_holds_all_neighbouring_transfers_and_computes_stand_alone() -> None:
    plan = from_rows([["0F0", "0SEND_F0", "0RECV_B0", "0B0"], ["1RECV_F0", "1F0", "1B0", "1SEND_B0"]], "x")
    assert [tuple(map(str, group)) for group in plan.instructions(0)] == [("0F0",), ("0SEND_F0", "0RECV_B0"), ("0B0",)]
    assert [tuple(map(str, group)) for group in plan.instructions(1)][-1] == ("1SEND_B0",)


@given(plans())
def test_every_message_is_sent_once_and_received_once(plan: Plan) -> None:
    cells = Counter(cell for row in to_rows(lower(plan)) for cell in row if is_p2p(cell))
    expected: Counter[str] = Counter()
    for stage in range(plan.num_stages):
        following = plan.next_stage(stage)
        if following is not None and plan.placement[stage] != plan.placement[following]:
            for mb in plan.microbatches_of(stage):
                expected.update((f"{stage}SEND_F{mb}", f"{following}RECV_F{mb}"))
                expected.update((f"{following}SEND_B{mb}", f"{stage}RECV_B{mb}"))
    assert cells == expected


@given(plans())
def test_lowering_changes_no_compute_action_and_lowers_once(plan: Plan) -> None:
    lowered = lower(plan)
    assert lowered.compute_only() == plan
    assert lower(lowered) == lowered


@given(plans())
def test_a_transfer_has_the_phase_and_the_chunk_of_the_action_it_serves(plan: Plan) -> None:
    for row in lower(plan).ranks:
        by_key = {half.key: half for half in iter_halves(row)}
        for action in row:
            if action.kind.is_p2p:
                kinds = (Kind.F,) if action.kind in (Kind.SEND_F, Kind.RECV_F) else (Kind.B, Kind.I)
                (served,) = (by_key[key] for kind in kinds if (key := (kind, *action.key[1:])) in by_key)
                assert (action.phase, action.chunk) == (served.phase, served.chunk)


@pytest.mark.parametrize("shape", SOME_SHAPES, ids=str)
def test_no_lowered_plan_deadlocks_when_messages_block_one_at_a_time(
    shape: tuple[str, int, int, int, int | None],
) -> None:
    plan = build(*shape)
    crossing = sum(a != b for a, b in zip(plan.placement, plan.placement[1:], strict=False))
    expected = 2 * crossing * plan.num_microbatches // plan.num_chains
    assert rendezvous.run(to_rows(lower(plan)), one_at_a_time=True) == expected


@given(plans(max_pp=6))
def test_no_random_plan_deadlocks_in_groups_or_one_blocking_call_at_a_time(plan: Plan) -> None:
    lowered = lower(plan)
    num_messages = sum(action.kind.is_send for row in lowered.ranks for action in row)
    assert [rendezvous.run(to_rows(lowered), one_at_a_time) for one_at_a_time in (False, True)] == [num_messages] * 2


def test_the_order_of_megatron_would_deadlock_without_its_fused_calls() -> None:
    """So the machine that the tests above run on does find deadlocks."""
    rows = [[cell for call in megatron.one_f_one_b_calls(4, rank, 8) for cell in call] for rank in range(4)]
    assert rendezvous.run(rows, one_at_a_time=False) == 2 * 3 * 8
    with pytest.raises(rendezvous.StuckError):
        rendezvous.run(rows, one_at_a_time=True)


def test_messages_between_two_ranks_are_received_in_the_order_of_sending() -> None:
    for shape in SOME_SHAPES:
        plan = lower(build(*shape))
        for source in range(plan.pp):
            for target in range(plan.pp):
                sent = [(a.kind.value[-1], a.microbatch) for a in plan.ranks[source]
                        if a.kind.is_send and peer_of(plan, a) == target]  # fmt: skip
                received = [(a.kind.value[-1], a.microbatch) for a in plan.ranks[target]
                            if a.kind.is_recv and peer_of(plan, a) == source]  # fmt: skip
                assert sent == received, (shape, source, target)


def test_a_split_backward_sends_its_gradient_after_the_input_half() -> None:
    plan = lower(from_rows([["0F0", "0I0", "0W0"], ["1F0", "1I0", "1W0"]], "split"))
    assert to_rows(plan) == [
        ["0F0", "0SEND_F0", "0RECV_B0", "0I0", "0W0"],
        ["1RECV_F0", "1F0", "1I0", "1SEND_B0", "1W0"],
    ]


def test_an_overlapped_pair_sends_both_of_its_outputs() -> None:
    rows = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "(1F1;1B0)OVERLAP_F_B", "1B1"]]
    lowered = to_rows(lower(from_rows(rows, "overlapped")))
    assert lowered[1] == ["1RECV_F0", "1F0", "1RECV_F1", "(1F1;1B0)OVERLAP_F_B", "1SEND_B0", "1B1", "1SEND_B1"]
    assert rendezvous.run(lowered, one_at_a_time=True) == 4


def test_a_plan_that_cannot_run_is_not_lowered() -> None:
    with pytest.raises(ScheduleError, match="cannot add sends and receives: rank 0 never gets past its action 0B0"):
        lower(from_rows([["0B0", "0F0"], ["1F0", "1B0"]], "backwards"))


def test_output_that_nobody_reads_is_an_error() -> None:
    with pytest.raises(ScheduleError, match="nobody reads the output of 0F0: stage 1 has no such microbatch"):
        lower(from_rows([["0F0", "0F1", "0B1"], ["1F1", "1B1"]], "unread"))


def test_the_peers_of_the_ends_of_the_pipeline_do_not_exist() -> None:
    plan = build("1f1b", 2, 2)
    assert peer_of(plan, Action(Kind.SEND_F, 0, 0, phase=Phase.WARMUP)) == 1
    for action in (
        *(Action(Kind.SEND_F, 1, 0), Action(Kind.RECV_F, 0, 0), Action(Kind.SEND_B, 0, 0), Action(Kind.F, 0, 0)),
    ):
        with pytest.raises(ScheduleError, match="has no peer in a pipeline of 2 stages"):
            peer_of(plan, action)


def test_a_rank_without_actions_has_no_messages() -> None:
    plan = from_rows([["0F0", "0B0"], ["1F0", "1B0"], [""]], "custom")
    assert to_rows(lower(plan))[2:] == [[]]
