"""Verdicts against programs that are executed on paper, whose faults are known because they were put in."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from pptrace.hang_diagnosis.calls import Call, CallState, Group, Presence, RankCalls, Stream, lines, rank_text
from pptrace.hang_diagnosis.verdict import Diagnosis, Verdict, as_json, diagnose, sentence
from tests.hang_diagnosis.programs import Execution, Op, closure, correct_program
from tests.support.extent import ALL

WORLD = Group("0", (0, 1, 2, 3), "default_pg")
PAIR = Group("1", (0, 1), "pp")


def call(kind: str, seq: int, state: CallState = CallState.DONE, group: Group = WORLD, **more: object) -> Call:
    return Call(kind, group, seq, state, **more)


def blocking(kind: str, seq: int, **more: object) -> Call:
    return call(kind, seq, CallState.BLOCKING, **more)


def blocked(rank: int, kind: str, seq: int, **more: object) -> RankCalls:
    """A rank that is in one call."""
    return RankCalls(rank, (blocking(kind, seq, **more),))


def found(diagnosis: Diagnosis) -> tuple[str, tuple[int, ...]] | None:
    hang = diagnosis.hang
    return None if hang is None else (str(hang.verdict), hang.ranks)


def verdict_of(ranks: Sequence[RankCalls]) -> tuple[str, tuple[int, ...]] | None:
    return found(diagnose(ranks))


@pytest.mark.parametrize("seed", range(100 if ALL else 30))
def test_a_rank_that_stops_is_the_only_one_to_blame_and_hops_are_shortest_paths(seed: int) -> None:
    rng = random.Random(seed)
    num_ranks = rng.randint(2, 7)
    programs = correct_program(rng, num_ranks, rng.randint(3, 40))
    guilty = rng.randrange(num_ranks)
    run = Execution(programs, {guilty: rng.randint(0, len(programs[guilty]))})
    run.run(rng)
    is_gone = rng.random() < 0.5
    hang = diagnose(run.known({guilty} if is_gone else ())).hang
    stuck = run.stuck()
    if not stuck:
        assert hang is None
        return
    assert (hang.verdict, hang.ranks) == (Verdict.MISSING if is_gone else Verdict.LATE, (guilty,))
    assert {edge.rank: set(edge.waits_for) for edge in hang.edges} == stuck
    length = closure(stuck, num_ranks)
    assert hang.hops == {rank: length[rank][guilty] for rank in range(num_ranks) if rank in stuck}


@pytest.mark.parametrize("seed", range(100 if ALL else 30))
def test_a_healthy_run_never_has_a_cycle_a_mismatch_or_a_missing_rank_at_any_moment(seed: int) -> None:
    rng = random.Random(seed)
    num_ranks = rng.randint(2, 7)
    run = Execution(correct_program(rng, num_ranks, rng.randint(3, 40)))
    run.run(rng, most=rng.randint(0, 30))
    run.stops = {rank: run.at[rank] for rank in range(num_ranks) if rng.random() < 0.4}  # these compute
    stuck = {rank: others for rank, others in run.stuck().items() if others}
    verdict = verdict_of(run.known())
    if verdict is not None:
        assert verdict[0] == "late"
        length = closure(stuck, num_ranks)
        assert set(verdict[1]) == {
            rank for rank in range(num_ranks) if rank not in stuck and any(length[a][rank] < 99 for a in stuck)
        }
    else:
        assert not stuck


@pytest.mark.parametrize("seed", range(100 if ALL else 30))
def test_ranks_that_do_the_same_ops_in_another_order_are_a_cycle_or_a_mismatch(seed: int) -> None:
    rng = random.Random(seed)
    num_ranks = rng.randint(2, 6)
    programs = correct_program(rng, num_ranks, rng.randint(6, 30))
    wrong = max(range(num_ranks), key=lambda rank: len(programs[rank]))
    own = programs[wrong]
    indices = [index for index in range(len(own) - 1) if not own[index].is_like(own[index + 1])]
    index = rng.choice(indices)
    own[index], own[index + 1] = own[index + 1], own[index]
    run = Execution(programs)
    run.run(rng)
    stuck = run.stuck()
    hang = diagnose(run.known()).hang
    if not stuck:
        assert hang is None or hang.verdict is Verdict.MISMATCH  # kinds that differ where the numbers agree
        return
    assert hang.verdict in (Verdict.CYCLE, Verdict.MISMATCH)
    length = closure(stuck, num_ranks)
    in_ring = {rank for rank in range(num_ranks) if length[rank][rank] < 99}
    if hang.verdict is Verdict.CYCLE:
        assert set(hang.ranks) <= in_ring
        assert all(length[a][b] < 99 for a in hang.ranks for b in hang.ranks)


@pytest.mark.parametrize("seed", range(100 if ALL else 30))
def test_a_device_that_failed_is_to_blame_beside_a_rank_that_stops_and_no_other_is(seed: int) -> None:
    """The last calls of a rank are open in its dump, though others have completed them; its host went on."""
    rng = random.Random(seed)
    num_ranks = rng.randint(3, 7)
    programs = correct_program(rng, num_ranks, rng.randint(8, 40))
    stopped, failed = rng.sample(range(num_ranks), 2)
    run = Execution(programs, {stopped: rng.randint(0, len(programs[stopped]))})
    run.run(rng)
    ranks = run.known()
    calls = list(ranks[failed].calls)
    complete = [index for index, made in enumerate(calls) if made.state is CallState.DONE and not made.is_message]
    if not complete:
        return
    first = rng.choice(complete)
    calls[first:] = [replace(made, state=CallState.QUEUED) for made in calls[first:]]
    ranks[failed] = replace(ranks[failed], calls=tuple(calls))
    dumped = []
    for rank in ranks:
        done = [made for made in rank.calls if made.state is CallState.DONE and not made.is_message]
        dumped.append(replace(rank, num_done={Stream(made.group): made.seq + 1 for made in done}))
    targets = {
        rank: others | ({failed} & set(run.current(rank).ranks))
        for rank, others in run.stuck().items()
        if rank != failed
    }
    blamed = {rank for rank in (stopped, failed) if any(rank in others for others in targets.values())}
    hang = diagnose(dumped).hang
    assert set(hang.ranks if hang else ()) == blamed
    assert hang is None or {edge.rank: set(edge.waits_for) for edge in hang.edges} == targets


def ring_of_sends(first: int, second: int) -> list[RankCalls]:
    return [blocked(first, "send", 0, peer=second, group=PAIR), blocked(second, "send", 0, peer=first, group=PAIR)]


def test_sends_head_to_head_are_a_cycle_and_the_others_only_wait() -> None:
    others = [blocked(rank, "barrier", 5) for rank in (2, 3)]
    diagnosis = diagnose([*ring_of_sends(0, 1), *others])
    assert found(diagnosis) == (Verdict.CYCLE, (0, 1))
    assert sentence(diagnosis) == (
        "cycle: ranks 0 and 1 wait for each other: rank 0 in send #0 to rank 1, rank 1 in send #0 to rank 0; "
        "ranks 2 and 3 only wait, 1 hop away"
    )


def test_a_send_and_its_receive_that_both_are_there_are_no_hang() -> None:
    ranks = [blocked(0, "send", 0, peer=1, group=PAIR), blocked(1, "recv", 0, peer=0, group=PAIR)]
    diagnosis = diagnose(ranks)
    assert diagnosis.hang is None
    assert diagnosis.reason.startswith("every rank has made the calls")
    other_tag = [ranks[0], blocked(1, "recv", 0, peer=0, group=PAIR, tag=7)]
    assert verdict_of(other_tag) == ("cycle", (0, 1))


def test_an_asynchronous_call_blocks_nobody_and_serves_the_other_side() -> None:
    posted = call("recv", 0, CallState.OFFERED, PAIR, peer=0)
    sending = blocked(0, "send", 0, peer=1, group=PAIR)
    hang = diagnose([sending, RankCalls(1, (posted, blocking("send", 0, peer=0, group=PAIR)))]).hang
    assert [(edge.rank, edge.waits_for) for edge in hang.edges] == [(1, (0,))]
    assert diagnose([sending, RankCalls(1, (posted,))]).hang is None


@pytest.mark.parametrize(
    ("odd", "line"),
    [
        ({"kind": "barrier"}, "barrier on rank 2 but all_reduce on ranks 0, 1, 3"),
        ({"num_bytes": 32}, "all_reduce of 32 bytes on rank 2 but all_reduce of 16 bytes on ranks 0, 1, 3"),
        ({"dtype": "Half"}, "all_reduce of Half on rank 2 but all_reduce of Float on ranks 0, 1, 3"),
        (
            {"kind": "broadcast", "peer": 1},
            "broadcast with root 1 on rank 2 but broadcast with root 0 on ranks 0, 1, 3",
        ),
        (
            {"kind": "all_to_all", "num_bytes": 32, "dtype": "Half"},  # parts of different size fit each other
            "all_to_all of Half on rank 2 but all_to_all of Float on ranks 0, 1, 3",
        ),
    ],
)
def test_the_odd_one_out_is_guilty_of_a_mismatch(odd: dict[str, object], line: str) -> None:
    usual = {"kind": "all_reduce", "num_bytes": 16, "dtype": "Float"}
    if odd.get("kind") in ("broadcast", "all_to_all"):
        usual |= {"kind": odd["kind"], "peer": 0}
    ranks = [blocked(rank, seq=4, **({**usual, **odd} if rank == 2 else usual)) for rank in range(4)]
    diagnosis = diagnose(ranks)
    assert found(diagnosis) == (Verdict.MISMATCH, (2,))
    assert line in sentence(diagnosis)


def test_of_two_ranks_that_differ_the_one_that_breaks_its_habit_is_guilty() -> None:
    def loop(last: Call) -> tuple[Call, ...]:
        steps = [call(("all_reduce", "barrier")[seq % 2], seq, group=PAIR) for seq in range(6)]
        return (*steps, last)

    usual = loop(blocking("all_reduce", 6, group=PAIR))
    skipping = loop(blocking("barrier", 6, group=PAIR))
    assert verdict_of([RankCalls(0, usual), RankCalls(1, skipping)]) == ("mismatch", (1,))
    early = [RankCalls(0, usual[-1:]), RankCalls(1, skipping[-1:])]
    assert verdict_of(early) == ("mismatch", (0, 1))


def test_a_rank_that_leaves_a_collective_out_for_a_message_breaks_the_order_that_it_kept() -> None:
    def steps(rank: int, skips: bool) -> tuple[Call, ...]:
        calls = []
        for step in range(4):
            last = step == 3
            if not (skips and last):
                calls.append(call("all_reduce", step, CallState.BLOCKING if last else CallState.DONE))
            if rank < 2 and (not last or skips):
                kind = "send" if rank == 0 else "recv"
                calls.append(call(kind, step, CallState.BLOCKING if last else CallState.DONE, peer=1 - rank))
        return tuple(calls)

    ranks = [RankCalls(rank, steps(rank, rank == 1)) for rank in range(4)]
    diagnosis = diagnose(ranks)
    assert found(diagnosis) == (Verdict.MISMATCH, (1,))
    assert "out of the order that it kept before" in sentence(diagnosis)


def test_of_ranks_in_other_collectives_of_a_group_the_few_are_guilty_though_their_numbers_differ() -> None:
    by_cpp = replace(blocking("collective", 17), group=Group("0 collective", WORLD.ranks, str(WORLD)))
    ranks = [RankCalls(0, (by_cpp,)), *(blocked(rank, "barrier", 1) for rank in WORLD.ranks[1:])]
    assert verdict_of(ranks) == ("mismatch", (0,))


def test_a_call_that_comes_every_few_steps_breaks_no_order() -> None:
    pairs = {kind: Group(kind, (0, 1)) for kind in ("all_gather", "all_reduce", "barrier")}

    def made(kind: str, seq: int, state: CallState = CallState.DONE) -> Call:
        return call(kind, seq, state, pairs[kind])

    steps = [
        [made("all_gather", step), made("all_reduce", step), *([made("barrier", step // 5)] if step % 5 == 0 else [])]
        for step in range(7)
    ]
    before = [made("barrier", 0), *(one for step in steps[1:5] for one in step), *steps[5][:-1]]
    regular = RankCalls(0, (*steps[0][:-1], *before, made("barrier", 1, CallState.BLOCKING)))
    twice = RankCalls(1, (*steps[0][:-1], *before, made("all_reduce", 6, CallState.BLOCKING)))
    assert verdict_of([regular, twice]) == ("mismatch", (1,))
    short = RankCalls(0, (*steps[0][:-1], *before[:-1], made("barrier", 1, CallState.BLOCKING)))
    usual = RankCalls(1, (*steps[0][:-1], *before[:-1], made("all_reduce", 5, CallState.BLOCKING)))
    assert verdict_of([short, usual]) == ("mismatch", (0,))  # it left the all-reduce before the barrier out


def test_messages_of_different_tags_are_told_with_them() -> None:
    ranks = [blocked(0, "send", 0, peer=1, tag=3), blocked(1, "recv", 0, peer=0, tag=4)]
    waits = "rank 0 in send #0 to rank 1 with tag 3, rank 1 in recv #0 from rank 0 with tag 4"
    assert waits in sentence(diagnose(ranks))


def test_calls_queued_on_a_device_wait_for_those_before_them() -> None:
    queued = CallState.QUEUED
    stage = Group("2", (1, 2))
    ranks = [
        RankCalls(0, (call("all_reduce", 3, queued, PAIR),)),
        RankCalls(1, (call("recv", 0, queued, stage, peer=2), call("all_reduce", 3, queued, PAIR))),
        RankCalls(2),
    ]
    diagnosis = diagnose(ranks)
    assert found(diagnosis) == (Verdict.LATE, (2,))
    assert diagnosis.hang.hops == {0: 2, 1: 1}
    batch = [replace(each, launch=9) for each in ranks[1].calls]
    assert verdict_of([ranks[0], RankCalls(1, tuple(batch)), ranks[2]]) == ("late", (2,))
    assert [edge.rank for edge in diagnose([ranks[0], RankCalls(1, tuple(batch)), ranks[2]]).hang.edges] == [1]


def test_launched_calls_are_done_where_everyone_has_made_them() -> None:
    launched = [call("all_reduce", seq, CallState.LAUNCHED) for seq in range(5)]
    ranks = [RankCalls(rank, tuple(launched[: 4 if rank == 3 else 5])) for rank in range(4)]
    assert verdict_of(ranks) == ("late", (3,))
    assert verdict_of([RankCalls(rank, tuple(launched)) for rank in range(4)]) is None


@pytest.mark.parametrize("state", [CallState.BLOCKING, CallState.LAUNCHED])
@pytest.mark.parametrize(("presence", "verdict"), [(Presence.GONE, "missing"), (Presence.ALIVE, "late")])
def test_a_rank_that_a_signal_has_halted_keeps_others_waiting_in_calls_that_it_has_made(
    state: CallState, presence: Presence, verdict: str
) -> None:
    receive = RankCalls(0, (call("barrier", 0, state), call("recv", 0, state, PAIR, peer=1)))
    sent = (call("barrier", 0, state), call("send", 0, group=PAIR, peer=0))
    passed = [RankCalls(rank, (call("barrier", 0),)) for rank in (2, 3)]
    waiting = [replace(rank, calls=(*rank.calls, blocking("all_reduce", 1))) for rank in passed]
    halted = RankCalls(1, sent, presence, is_halted=True)
    hang = diagnose([receive, halted, *waiting]).hang
    assert (hang.verdict, hang.ranks, hang.hops) == (verdict, (1,), {0: 1, 2: 1, 3: 1})
    assert [(edge.waits_for, edge.call.kind) for edge in hang.edges if edge.rank == 0] == [((1,), "recv")]
    running = diagnose([receive, replace(halted, is_halted=False), *passed])
    assert running.hang is None
    assert "in transfer" in running.reason


def test_a_rank_that_was_stopped_waits_for_nobody_that_its_transfers_hold_up() -> None:
    made = (call("send", 0, group=PAIR, peer=0), blocking("recv", 0, group=PAIR, peer=0))
    stopped = RankCalls(1, made, is_halted=True)
    receive = RankCalls(0, (call("recv", 0, CallState.LAUNCHED, PAIR, peer=1),))
    assert verdict_of([receive, stopped]) == ("late", (1,))
    assert verdict_of([RankCalls(0), stopped]) == ("late", (0,))


def test_a_receive_from_any_rank_waits_only_while_nobody_can_send() -> None:
    receive = blocked(0, "recv", 0, peer=-1, group=Group("1", (0, 1, 2)))
    group = receive.calls[0].group
    waiting = [blocked(rank, "recv", 0, peer=0, group=group) for rank in (1, 2)]
    assert verdict_of([receive, *waiting]) == ("cycle", (0, 1, 2))
    assert verdict_of([receive, waiting[0], RankCalls(2)]) == ("late", (2,))
    sent = blocked(2, "send", 0, peer=0, group=group)
    assert verdict_of([receive, RankCalls(1), sent]) is None


def test_ranks_of_another_node_are_not_blamed() -> None:
    missing_device_events = [RankCalls(rank, presence=Presence.UNKNOWN) for rank in (2, 3)]
    here = [blocked(rank, "barrier", 0) for rank in (0, 1)]
    diagnosis = diagnose([*here, *missing_device_events])
    assert diagnosis.hang is None
    assert diagnosis.reason == "ranks 0 and 1 wait for ranks 2 and 3, of which nothing is known here"
    assert verdict_of([here[0], RankCalls(1), *missing_device_events]) == ("late", (1,))


def test_a_call_that_the_log_no_longer_holds_has_still_been_made() -> None:
    waiting = blocked(0, "all_reduce", 7, group=PAIR)
    assert verdict_of([waiting, RankCalls(1)]) == ("late", (1,))
    assert verdict_of([waiting, RankCalls(1, num_made={Stream(PAIR): 8})]) is None


def one_behind(kind: str, *, fourth: RankCalls | None = None) -> list[RankCalls]:
    """Ranks that wait in an all-reduce behind a call that rank 0 has completed, and of which rank 1's device says it is open."""
    queued, last = CallState.QUEUED, call("all_reduce", 6, CallState.QUEUED)
    ahead = [RankCalls(rank, (last,), num_made={Stream(WORLD): 7}) for rank in (2, 3)]
    return [
        RankCalls(0, (last,), num_made={Stream(WORLD): 7}, num_done={Stream(WORLD): 6}),
        RankCalls(1, (call(kind, 5, queued, peer=0 if kind == "broadcast" else -1), last)),
        *ahead[: 1 if fourth else 2],
        *([fourth] if fourth else []),
    ]


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "barrier", "all_to_all"])
def test_a_rank_that_does_not_complete_what_others_have_completed_is_stuck_itself(kind: str) -> None:
    ranks = one_behind(kind)
    diagnosis = diagnose(ranks)
    assert found(diagnosis) == (Verdict.LATE, (1,))
    assert sentence(diagnosis) == (
        f"late: rank 1 is stuck in {kind} #5 of group default_pg, which others have completed; "
        "ranks 0, 2, 3 only wait, 1 hop away"
    )
    assert [(edge.rank, edge.waits_for) for edge in diagnosis.hang.edges] == [(0, (1,)), (2, (1,)), (3, (1,))]
    in_all = replace(ranks[0], num_done={Stream(WORLD): 5})
    assert verdict_of([in_all, *ranks[1:]]) is None, "in transfer"


@pytest.mark.parametrize("kind", ["broadcast", "reduce", "gather", "scatter", "collective"])
def test_the_end_of_a_call_that_does_not_need_all_members_proves_nothing(kind: str) -> None:
    assert verdict_of(one_behind(kind)) is None


def test_each_of_two_devices_that_failed_one_after_the_other_is_to_blame() -> None:
    """Rank 1's device has call 5 behind call 4: it took part in both before it failed, as rank 0 has completed them."""
    queued = [call("all_gather", seq, CallState.QUEUED) for seq in (4, 5, 6)]
    done = {Stream(WORLD): 6}
    ranks = [RankCalls(0, tuple(queued[2:]), num_done=done)]
    ranks += [RankCalls(rank, tuple(queued[first:]), num_done=done) for rank, first in ((1, 0), (2, 1), (3, 2))]
    assert verdict_of([replace(rank, num_made={Stream(WORLD): 7}) for rank in ranks]) == ("late", (1, 2))


def test_a_device_that_failed_is_found_by_any_of_its_calls_that_others_have_completed() -> None:
    """Its first open call is with a rank that left no dump, and nobody else can say whether it is complete."""
    pair, queued = Group("3", (1, 3), "tp"), CallState.QUEUED
    last = call("all_reduce", 6, queued)
    ranks = [RankCalls(rank, (last,), num_made={Stream(WORLD): 7}, num_done={Stream(WORLD): 6}) for rank in (0, 2)]
    ranks.append(RankCalls(1, (call("all_gather", 9, queued, pair), call("all_reduce", 5, queued), last)))
    diagnosis = diagnose([*ranks, RankCalls(3, presence=Presence.EMPTY, note="no dump")])
    assert found(diagnosis) == (Verdict.MISSING, (1, 3))
    assert "late: rank 1 is stuck in all_reduce #5 of group default_pg" in sentence(diagnosis)


def test_what_a_member_has_completed_was_made_by_ranks_without_a_dump_unless_it_is_an_all_to_all() -> None:
    """Ranks that have nothing for each other end an all-to-all without each other."""
    lost = RankCalls(3, presence=Presence.EMPTY, note="no dump")
    diagnosis = diagnose(one_behind("all_gather", fourth=lost))
    assert found(diagnosis) == (Verdict.MISSING, (1, 3))
    assert sentence(diagnosis).startswith(
        "missing: rank 3 is missing (no dump); late: rank 1 is stuck in all_gather #5"
    )
    assert verdict_of(one_behind("all_to_all", fourth=lost)) == ("missing", (3,))


def test_a_rank_waits_for_one_whose_dump_shows_that_it_did_not_make_the_call() -> None:
    absent = RankCalls(3, (call("all_reduce", 4),))
    for kind in ("all_gather", "all_to_all"):
        assert verdict_of(one_behind(kind, fourth=absent)) == ("late", (3,))


def test_a_device_that_is_stuck_offers_none_of_its_later_calls() -> None:
    """Rank 1 has also queued a message that rank 0 has long received: the one that waits there is a later one."""
    queued = CallState.QUEUED
    reduce = call("all_reduce", 5, queued, PAIR)
    ahead = RankCalls(
        0, (call("recv", 0, queued, PAIR, peer=1),), num_made={Stream(PAIR): 6}, num_done={Stream(PAIR): 6}
    )
    behind = RankCalls(1, (reduce, call("send", 0, queued, PAIR, peer=0)))
    diagnosis = diagnose([ahead, behind])
    assert found(diagnosis) == (Verdict.LATE, (1,))
    assert [(edge.rank, edge.waits_for, edge.call.kind) for edge in diagnosis.hang.edges] == [(0, (1,), "recv")]


def test_the_number_of_a_call_is_the_one_in_the_dump() -> None:
    sent = call("send", 0, CallState.QUEUED, PAIR, peer=1, recorded=11981)
    diagnosis = diagnose([RankCalls(0, (sent,)), RankCalls(1, num_made={Stream(PAIR): 8})])
    assert lines(as_json(diagnosis)) == ["rank 0 waits in send #11981 to rank 1"]
    assert "rank 1 is outside of any communication call, with none open" in sentence(diagnosis)
    assert [edge["seq"] for edge in as_json(diagnosis)["edges"]] == [11981]
    assert str(replace(sent, kind="barrier")) == "barrier #11981 of group pp"
    other = blocking("barrier", 0, group=PAIR, recorded=7)
    odd = diagnose([RankCalls(0, (other,)), blocked(1, "all_reduce", 0, group=PAIR, recorded=7)])
    assert "collective #7 of group pp is" in sentence(odd)
    half = blocked(1, "recv", 0, group=PAIR, peer=0, recorded=13694, num_bytes=4)
    differing = diagnose([RankCalls(0, (replace(sent, num_bytes=8),)), half])
    assert "message #11981 from rank 0 to rank 1 is" in sentence(differing)


def test_the_lines_join_ranks_that_wait_alike() -> None:
    group = Group("0", tuple(range(64)), "default_pg")
    ranks = [blocked(rank, "barrier", 1, group=group) for rank in range(64) if rank not in (9, 11)]
    diagnosis = diagnose([*ranks, RankCalls(9), RankCalls(11)])
    hang = as_json(diagnosis)
    assert lines(hang) == ["ranks 0–8, 10, 12–63 wait in barrier #1 of group default_pg for ranks 9 and 11"]
    assert hang["edges"][0] == {"rank": 0, "waits_for": [9, 11], "call": "barrier", "group": "default_pg", "seq": 1}
    assert rank_text([3]) == "rank 3"


GROUPS = [Group(str(number), (2 * number, 2 * number + 1), f"dp{number}") for number in range(8)]
"""Of ranks 12 and 13, and of 14 and 15, among others."""


def waiting(rank: int, kind: str = "all_reduce") -> RankCalls:
    return blocked(rank, kind, 3, group=GROUPS[rank // 2])


def test_of_two_ranks_that_differ_from_their_groups_both_are_guilty() -> None:
    ranks = []
    for rank in range(12, 16):
        before = (call("all_reduce", seq, group=GROUPS[rank // 2]) for seq in range(3))
        last = waiting(rank, "barrier" if rank in (12, 14) else "all_reduce")
        ranks.append(replace(last, calls=(*before, *last.calls)))
    diagnosis = diagnose(ranks)
    assert found(diagnosis) == (Verdict.MISMATCH, (12, 14))
    assert sentence(diagnosis) == (
        "mismatch: collective #3 of group dp6 is barrier on rank 12 but all_reduce on rank 13; "
        "collective #3 of group dp7 is barrier on rank 14 but all_reduce on rank 15; ranks 13 and 15 only wait, 1 hop away"
    )


@pytest.mark.parametrize(
    ("first", "second", "verdict", "words"),
    [
        (Presence.GONE, Presence.GONE, "missing", "ranks 12 and 14 are gone"),
        (Presence.GONE, Presence.ALIVE, "missing", "rank 12 is gone; late: rank 14 is outside"),
        (Presence.ALIVE, Presence.ALIVE, "late", "ranks 12 and 14 are outside"),
    ],
)
def test_guilty_ranks_of_every_kind_are_named(first: Presence, second: Presence, verdict: str, words: str) -> None:
    ranks = [RankCalls(12, presence=first), waiting(13), RankCalls(14, presence=second), waiting(15)]
    diagnosis = diagnose(ranks)
    assert verdict_of(ranks) == (verdict, (12, 14))
    assert f"{verdict}: {words}" in sentence(diagnosis)
    assert sentence(diagnosis).endswith("ranks 13 and 15 only wait, 1 hop away")


def test_every_cycle_is_named_and_none_that_waits_for_a_rank_to_blame() -> None:
    other = [replace(rank, rank=rank.rank + 4) for rank in ring_of_sends(0, 1)]
    other = [replace(rank, calls=(replace(rank.calls[0], peer=9 - rank.rank),)) for rank in other]
    two = diagnose([*ring_of_sends(0, 1), *other])
    assert found(two) == (Verdict.CYCLE, (0, 1, 4, 5))
    assert sentence(two).count("wait for each other") == 2
    assert sentence(two).count("cycle:") == 1
    lost = RankCalls(2, presence=Presence.GONE)
    barrier = blocking("barrier", 1, group=Group("7", (0, 1, 2)))
    also = [replace(rank, calls=(*rank.calls, barrier)) for rank in ring_of_sends(0, 1)]
    assert verdict_of([*also, lost]) == ("missing", (2,))


def test_beside_a_cause_no_rank_is_named_whose_state_may_follow_from_it() -> None:
    lost = [RankCalls(12, presence=Presence.GONE), waiting(13), waiting(15)]
    failed = RankCalls(14, (call("all_reduce", 2, CallState.FAILED, GROUPS[7]),))
    assert verdict_of([*lost, failed]) == ("missing", (12,))
    assert verdict_of([*lost, RankCalls(14, may_wait=True)]) == ("missing", (12,))
    assert diagnose([*lost, RankCalls(14)], is_stuck=False).hang == diagnose([*lost, failed]).hang
    odd = [replace(waiting(12, "barrier"), rank=12), waiting(13)]
    gone = RankCalls(13, odd[1].calls, Presence.GONE)
    third = blocked(11, "recv", 0, peer=13)
    hang = diagnose([odd[0], gone, third]).hang
    assert hang.verdict is Verdict.MISMATCH
    (cause,) = hang.causes
    assert cause.verdict is Verdict.MISMATCH, "13 ended because of the call that does not fit"


def test_no_op_of_the_paper_execution_is_over_before_all_its_ranks_are_at_it() -> None:
    op = Op("barrier", (0, 1), "world", 0)
    run = Execution([[op], [op]], {1: 0})
    run.run(random.Random(0))
    assert (run.at, run.stuck()) == ([0, 0], {0: {1}})
