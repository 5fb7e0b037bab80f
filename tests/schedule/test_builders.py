"""The builders against torch's schedules, against Megatron's rules, and against what is legal."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from pptrace.errors import ScheduleError, UsageError
from pptrace.recognise.schedule.measured_steps import match_registry
from pptrace.schedule.actions import Action, Kind, Phase, iter_halves, parse_action
from pptrace.schedule.lower import lower
from pptrace.schedule.plan import Plan, make_plan, tag_phases
from pptrace.schedule.registry import SCHEDULES, build, get
from pptrace.schedule.replay import replay
from pptrace.schedule.text import from_rows, to_rows
from pptrace.schedule.validate import validate
from pptrace.simulator import peak_inflight, simulate, uniform
from tests.schedule import deepseek, megatron, torch_tables
from tests.schedule.shapes import (
    MAX_CHUNKS,
    MAX_PP,
    ONE_CHUNK,
    V_SHAPED,
    interleaved_shapes,
    legal_shapes,
    one_chunk_shapes,
    plans,
    whole_rounds,
)
from tests.support.extent import ALL


def test_gpipe_runs_what_torch_executes(monkeypatch: pytest.MonkeyPatch) -> None:
    for p, m in [(1, 3), (2, 1), (3, 4), (4, 16), (8, 5)]:
        for rank, row in enumerate(to_rows(build("gpipe", p, m))):
            calls = torch_tables.executed(ScheduleGPipe, rank, p, m, monkeypatch)
            assert row == [call[0] for call in calls if "_" not in call[0]]


def test_combined_has_the_order_of_megatron_with_the_pairs_of_its_steady_phase_as_one() -> None:
    for p, m, v, n in (shape for shape in interleaved_shapes() if ALL or shape[0] <= 5):
        plan = build("combined-1f1b", p, m, v, n)
        for rank, row in enumerate(to_rows(plan)):
            pairs = [cell for cell in row if "OVERLAP" in cell]
            apart = [half for cell in row for half in cell.replace("OVERLAP_F_B", "").strip("()").split(";")]
            assert apart == megatron.interleaved_row(p, rank, m, v, n, combined=True), (p, m, v, n, rank)
            assert len(pairs) == m * v - megatron.num_warmup(p, rank, m, v, n, combined=True)
        assert not replay(plan).blocked


def test_interleaved_has_the_table_of_torch_for_every_shape_that_both_take() -> None:
    """torch groups microbatches by m / (m // p) where that is whole; Megatron calls it N."""
    compared = 0
    for p, m, v, n in interleaved_shapes():
        rounds = max(1, m // p)
        if rounds * n == m:
            assert to_rows(build("interleaved-1f1b", p, m, v, n)) == torch_tables.interleaved_rows(p, m, v), (p, m, v)
            compared += 1
    torch_takes = [(p, m) for p, m in one_chunk_shapes() if m >= p and m % (m // p) == 0]
    assert compared == len(torch_takes) * (MAX_CHUNKS - 1)


MULTI = {
    "looped-bfs": ScheduleLoopedBFS,
    "interleaved-zb": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipe-v": ScheduleDualPipeV,
}


@pytest.mark.parametrize(("name", "theirs"), MULTI.items(), ids=list(MULTI))
def test_a_schedule_has_the_table_of_torch_for_every_shape_that_both_take(name: str, theirs: type) -> None:
    """And torch refuses what we refuse, but for one chunk per rank, where ours are called gpipe and zb-h1."""
    compared = 0
    for p, m in one_chunk_shapes():
        for v in (2,) if name in V_SHAPED else (2, 3, 4):
            try:
                expected = torch_tables.multi_rows(theirs, p, m, v)
            except ValueError:
                with pytest.raises(ScheduleError):
                    build(name, p, m, v)
                continue
            assert to_rows(build(name, p, m, v)) == expected, (p, m, v)
            compared += 1
    shapes = [*one_chunk_shapes()]
    whole, twice = sum(whole_rounds(p, m) for p, m in shapes), sum(m >= 2 * p for p, m in shapes)
    taken = {"looped-bfs": 3 * len(shapes), "interleaved-zb": 3 * whole, "zbv": len(shapes), "dualpipe-v": twice}
    assert compared == taken[name]


@pytest.mark.parametrize(("name", "theirs"), MULTI.items(), ids=list(MULTI))
def test_the_table_of_torch_is_that_of_its_complete_schedule(name: str, theirs: type) -> None:
    for p, m in [(2, 6), (4, 8), (3, 6)]:
        rows = torch_tables.compute_rows(torch_tables.multi(theirs, p, m, 2).pipeline_order)
        assert rows == torch_tables.multi_rows(theirs, p, m, 2)


def test_one_chunk_of_interleaved_zero_bubble_is_zb_h1() -> None:
    for p, m in one_chunk_shapes():
        if whole_rounds(p, m):
            assert to_rows(build("zb-h1", p, m)) == torch_tables.multi_rows(ScheduleInterleavedZeroBubble, p, m, 1)


def test_eager_1f1b_has_twice_the_warmup() -> None:
    for p, m in one_chunk_shapes():
        plan = build("eager-1f1b", p, m)
        for rank in range(p):
            assert forwards_before_the_pairs(plan, rank) == min(2 * (p - rank - 1), m), (p, m, rank)


def test_dualpipe_runs_the_calls_of_its_authors() -> None:
    for p in (2, 4, 6, 8):
        for m in range(2 * p, 4 * p + 1, 2):
            assert to_rows(build("dualpipe", p, m)) == [deepseek.dualpipe_row(p, rank, m) for rank in range(p)], (p, m)


def test_dualpipe_feeds_half_of_the_microbatches_from_each_end() -> None:
    plan = build("dualpipe", 4, 8)
    assert plan.placement == (0, 1, 2, 3, 3, 2, 1, 0)
    assert (plan.num_chains, plan.chain_length) == (2, 4)
    assert [plan.microbatches_of(stage) for stage in (0, 3, 4, 7)] == [range(4), range(4), range(4, 8), range(4, 8)]
    assert [plan.previous_stage(stage) for stage in (0, 1, 4, 5)] == [None, 0, None, 4]
    assert [plan.next_stage(stage) for stage in (2, 3, 6, 7)] == [3, None, 7, None]


def test_a_plan_has_two_chains_only_where_halves_of_the_microbatches_stay_apart() -> None:
    apart = [["0F0", "3F1", "0B0", "3B1"], ["1F0", "2F1", "1B0", "2B1"]]
    assert make_plan("x", [[parse_action(cell) for cell in row] for row in apart]).num_chains == 2
    assert build("zbv", 2, 2).num_chains == 1
    looped = [["0F0", "2F1", "0B0", "2B1"], ["1F0", "3F1", "1B0", "3B1"]]
    with pytest.raises(ScheduleError, match="stage 0, microbatch 1 has nothing"):
        validate(make_plan("x", [[parse_action(cell) for cell in row] for row in looped]))


def test_zb_h2_starts_with_2_p_minus_r_minus_1_forwards() -> None:
    for p, m in one_chunk_shapes():
        for rank, row in enumerate(build("zb-h2", p, m).ranks):
            assert [action.kind for action in row].index(Kind.I) == min(2 * (p - rank) - 1, m)


def test_1f1b_runs_what_torch_executes(monkeypatch: pytest.MonkeyPatch) -> None:
    for p, m in one_chunk_shapes():
        if m < p:
            continue  # torch refuses fewer microbatches than stages
        for rank, row in enumerate(to_rows(build("1f1b", p, m))):
            with monkeypatch.context() as patch:
                calls = torch_tables.executed(Schedule1F1B, rank, p, m, patch)
            assert row == [call[0] for call in calls if "_" not in call[0]], (p, m, rank)


def test_interleaved_is_the_order_of_megatron_for_every_group_size() -> None:
    for p, m, v, n in interleaved_shapes():
        plan = build("interleaved-1f1b", p, m, v, n)
        assert to_rows(plan) == [megatron.interleaved_row(p, rank, m, v, n) for rank in range(p)], (p, m, v, n)


def forwards_before_the_pairs(plan: Plan, rank: int) -> int:
    """Forwards before the one that the first backward follows directly; all of them where no pair exists."""
    kinds = [action.kind for action in plan.ranks[rank]]
    leading = kinds.index(Kind.B)
    return leading if leading == kinds.count(Kind.F) and plan_tags(plan, rank, Phase.STEADY) == 0 else leading - 1


def plan_tags(plan: Plan, rank: int, phase: Phase, kind: Kind | None = None) -> int:
    return sum(action.phase is phase and kind in (None, action.kind) for action in plan.ranks[rank])


def test_the_lean_warmup_is_shorter_and_still_legal() -> None:
    for p, m, v in [(2, 4, 2), (4, 8, 2), (4, 12, 3), (8, 16, 4)]:
        lean = build("interleaved-1f1b", p, m, v, lean=True)
        validate(lean)
        assert simulate(lean, uniform(2, 4)).makespan_ns == (m * v + p - 1) * 6
        for rank in range(p):
            assert forwards_before_the_pairs(lean, rank) == min(m * v, (p - rank - 1) + (v - 1) * p)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_legal_shape_makes_a_valid_plan_of_that_shape(name: str) -> None:
    for p, m, v in legal_shapes(name, max_pp=4, rounds=2):
        plan = build(name, p, m, v)
        validate(plan)
        assert (plan.name, plan.pp, plan.num_microbatches, plan.num_chunks) == (name, p, m, v)


@given(plans())
def test_every_plan_is_whole(plan: Plan) -> None:
    expected, result = set(), [half.key for row in plan.ranks for half in iter_halves(row)]
    for stage in range(plan.num_stages):
        for mb in plan.microbatches_of(stage):
            split = (Kind.W, stage, mb) in plan.by_key
            kinds = (Kind.F, Kind.I, Kind.W) if split else (Kind.F, Kind.B)
            expected |= {(kind, stage, mb) for kind in kinds}
    assert len(result) == len(expected)
    assert set(result) == expected


@given(plans())
def test_chunks_are_placed_on_a_loop_or_on_a_v(plan: Plan) -> None:
    p = plan.pp
    if plan.name in V_SHAPED:
        assert plan.placement == (*range(p), *reversed(range(p)))
    else:
        assert plan.placement == tuple(stage % p for stage in range(plan.num_stages))
    for row in plan.ranks:
        for action in row:
            for half in (action, *action.parts):
                assert half.chunk == half.stage // p


@given(plans())
def test_phases_follow_one_another(plan: Plan) -> None:
    order = [Phase.WARMUP, Phase.STEADY, Phase.COOLDOWN]
    for row in plan.ranks:
        indices = [order.index(action.phase) for action in row]
        assert indices == sorted(indices)
        assert all(part.phase is action.phase for action in row for part in action.parts)


def test_phases_are_those_of_the_builder_rule() -> None:
    gpipe = build("gpipe", 3, 4)
    for rank in range(3):
        assert plan_tags(gpipe, rank, Phase.WARMUP, Kind.F) == plan_tags(gpipe, rank, Phase.COOLDOWN, Kind.B) == 4
        assert plan_tags(gpipe, rank, Phase.STEADY) == 0
    for p, m, v, n in [(4, 8, 2, 4), (3, 5, 3, 5), (2, 2, 2, 2), (4, 4, 2, 4)]:
        plan = build("interleaved-1f1b", p, m, v, n)
        for rank in range(p):
            warmup = megatron.num_warmup(p, rank, m, v, n)
            phases = [action.phase for action in plan.ranks[rank]]
            steady = 2 * (m * v - warmup)
            assert phases == [Phase.WARMUP] * warmup + [Phase.STEADY] * steady + [Phase.COOLDOWN] * warmup


def test_phases_found_by_order_are_those_of_the_builders() -> None:
    """A plan read from CSV has no tags. A rank of 1F1B with all forwards first cannot be told from GPipe, so it is left out."""
    for p, m in one_chunk_shapes():
        for name in ("gpipe", "1f1b"):
            plan = build(name, p, m)
            tagged = tag_phases(make_plan(name, [[Action(*action.key) for action in row] for row in plan.ranks]))
            for rank in range(p):
                all_forwards_first = plan.ranks[rank][m - 1].kind is Kind.F
                if m > 1 and (name == "gpipe" or not all_forwards_first):
                    assert tagged.ranks[rank] == plan.ranks[rank], (name, p, m, rank)


@pytest.mark.parametrize("name", SCHEDULES)
def test_identify_finds_the_name_and_the_phases_of_every_plan(name: str) -> None:
    """From two ranks on: on a single one a V is a loop, and the plan is that of interleaved-zb as well."""
    shapes = [(p, m, v, None, False) for p, m, v in legal_shapes(name, max_pp=4, rounds=2) if p > 1]
    if name == "interleaved-1f1b":
        groups = [(2, 5, 3, 3), (4, 8, 2, 8), (4, 9, 2, 5), (3, 8, 4, 5)]
        shapes = [*((*shape, False) for shape in groups), (4, 8, 2, None, True), (3, 6, 3, None, True)]
    for shape in shapes:
        plan = build(name, *shape)
        for read in (from_rows(to_rows(plan), name), from_rows(to_rows(lower(plan)), name)):
            assert match_registry(read) == plan, shape


def test_identify_needs_no_name_where_there_are_two_microbatches() -> None:
    fixed = ["gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2", "interleaved-1f1b", "looped-bfs", "interleaved-zb"]
    for name in fixed:
        assert match_registry(from_rows(to_rows(build(name, 2, 4)), "custom")).name == name
        assert match_registry(from_rows(to_rows(build(name, 4, 9 if name in ONE_CHUNK else 8)), "custom")).name == name


def test_a_searched_plan_that_is_also_a_fixed_one_keeps_its_own_name() -> None:
    plan = build("zb-auto", 2, 1)
    assert to_rows(plan) == to_rows(build("zb-h1", 2, 1))
    assert match_registry(from_rows(to_rows(plan), "zb-auto")) == plan
    assert match_registry(from_rows(to_rows(plan), "custom")).name == "zb-h1"


def test_identify_leaves_a_plan_of_ones_own_alone() -> None:
    """An order that no schedule could mean, and one that differs from a schedule's in the last two of very many ops."""
    rows = to_rows(build("interleaved-1f1b", 4, 64, 2))
    rows[3][-1], rows[3][-2] = rows[3][-2], rows[3][-1]
    for own in (from_rows([["0F0", "0B0", "0F1", "0F2", "0B2", "0B1"]], "handwritten"), from_rows(rows, "handwritten")):
        assert match_registry(own) is own


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (("1f1b", 0, 4), "pp is 0; expected at least 1"),
        (("gpipe", 2, 0), "microbatches is 0; expected at least 1"),
        (("1f1b", 2, 4, 2), "2 chunks per rank; this schedule has 1 (try interleaved-1f1b)"),
        (("gpipe", 2, 4, 1, 2), "microbatch groups and the lean warmup belong to interleaved schedules"),
        (("interleaved-1f1b", 2, 4, 1), "expected at least 2 (or use 1f1b)"),
        (("interleaved-1f1b", 4, 3, 2), "group size 4 with p=4, m=3; expected p ≤ group size ≤ m"),
        (("interleaved-1f1b", 4, 8, 2, 3), "group size 3 with p=4, m=8; expected p ≤ group size ≤ m"),
        (("interleaved-1f1b", 4, 8, 2, 0), "group_size is 0; expected at least 1"),
        (
            ("interleaved-1f1b", 6, 8, 2),
            "a last group of 2, in which ranks would wait for each other; expected 0 or at least",
        ),
        (("interleaved-1f1b", 6, 8, 2), "2(p−1) − 6 = 4: try m=6 or 10"),
        (("interleaved-afab", 4, 8, 1), "1 chunk per rank; expected at least 2 (or use gpipe)"),
        (("interleaved-afab", 4, 3, 2), "group size 4 with p=4, m=3; expected p ≤ group size ≤ m"),
        (("interleaved-afab", 4, 8, 2, None, True), "the lean warmup belongs to interleaved-1f1b"),
        (("looped-bfs", 4, 8, 1), "1 chunk per rank; expected at least 2 (or use gpipe)"),
        (("looped-bfs", 4, 8, 2, 4), "group size 4 with m=8; breadth-first has one group of all m=8"),
        (("looped-bfs", 4, 8, 2, None, True), "the lean warmup belongs to interleaved-1f1b"),
        (("eager-1f1b", 4, 8, 2), "2 chunks per rank; this schedule has 1"),
        (("interleaved-zb", 4, 8, 1), "expected at least 2 (or use zb-h1)"),
        (("interleaved-zb", 4, 13, 2), "do not divide into m // p = 3 equal groups; try m=12 or 16"),
        (("interleaved-zb", 4, 8, 2, 8), "group size 8 with p=4, m=8; expected 4, which is m / max(1, m // p)"),
        (("interleaved-zb", 4, 8, 2, None, True), "the lean warmup belongs to interleaved-1f1b"),
        (("zbv", 4, 8, 3), "3 chunks per rank; this schedule has 2, stage r and stage 2p−1−r"),
        (("zbv", 4, 8, 2, 4), "microbatch groups and the lean warmup belong to interleaved schedules"),
        (("dualpipe-v", 4, 7), "7 microbatches over p=4; expected at least 2p = 8"),
        (("dualpipe", 3, 8), "p=3; expected an even number of ranks: try p=4 (or dualpipe-v)"),
        (("dualpipe", 4, 9), "9 microbatches over p=4; expected an even number, at least 2p=8: try m=10"),
        (("dualpipe", 4, 6), "expected an even number, at least 2p=8: try m=8"),
        (("v-half", 4, 8, 1), "1 chunks per rank; this schedule has 2, stage r and stage 2p−1−r"),
        (("v-min", 4, 8, 2, None, True), "microbatch groups and the lean warmup belong to interleaved schedules"),
        (("zb-auto", 4, 8, 2), "2 chunks per rank; this schedule has 1"),
        (("zb-auto", 4, 8, 1, None, False, 0), "memory_limit is 0; expected at least 1"),
        (("zb-h1", 4, 8, 1, None, False, 4), "zb-h1: its memory is fixed; a memory limit belongs to zb-auto"),
        (("interleaved-1f1b", 4, 10, 2, 5, True), "the lean warmup is defined for group size p=4, found 5"),
    ],
)
def test_an_illegal_shape_is_refused_in_one_line_that_says_what_is_legal(shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        build(*shape)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_groups_that_megatron_refuses_are_refused() -> None:
    for p, m in one_chunk_shapes():
        for n in (n for n in range(1, m + 3) if not p <= n <= m):
            for name in ("interleaved-1f1b", "interleaved-afab"):
                with pytest.raises(ScheduleError):
                    build(name, p, m, 2, n)


def test_a_last_group_smaller_than_p_is_taken_where_its_order_runs_to_the_end_and_nowhere_else() -> None:
    """Megatron's table and warmup, which it does not let run with such a group, replayed."""
    taken = refused = 0
    for p, m in islice(one_chunk_shapes(), 0, None, 1 if ALL else 6):
        for v, n in ((v, n) for v in range(2, MAX_CHUNKS + 1) for n in range(p, m + 1) if 0 < m % n < p):
            rows = [megatron.interleaved_row(p, rank, m, v, n) for rank in range(p)]
            if replay(from_rows(rows, "megatron")).blocked:
                with pytest.raises(ScheduleError, match="ranks would wait for each other"):
                    build("interleaved-1f1b", p, m, v, n)
                refused += 1
            else:
                plan = build("interleaved-1f1b", p, m, v, n)
                assert to_rows(plan) == rows, (p, m, v, n)
                held = [megatron.num_warmup(p, rank, m, v, n) + 1 for rank in range(p)]
                assert all(most <= least for most, least in zip(peak_inflight(plan), held, strict=True)), (p, m, v, n)
                taken += 1
    assert (taken, refused) == ((1667, 253) if ALL else (83, 4))


def test_the_lean_warmup_takes_any_last_group() -> None:
    for p, m in [(p, m) for p, m in one_chunk_shapes() if m % p > 0 and m > p][:: 1 if ALL else 8]:
        for v in range(2, MAX_CHUNKS + 1):
            validate(build("interleaved-1f1b", p, m, v, lean=True))


def test_the_published_example_with_a_last_group_of_two_runs() -> None:
    """p = 3, N = 3, m = 5 and three chunks; Megatron's own check refuses it."""
    plan = build("interleaved-1f1b", 3, 5, 3)
    forwards = [str(action) for action in plan.ranks[0] if action.kind is Kind.F]
    assert forwards == [
        *("0F0", "0F1", "0F2", "3F0", "3F1", "3F2", "6F0", "6F1", "6F2", "0F3", "0F4", "3F3", "3F4", "6F3"),
        "6F4",
    ]
    assert [plan_tags(plan, rank, Phase.WARMUP) for rank in range(3)] == [10, 8, 6]


def test_all_forwards_first_is_the_order_of_older_megatron() -> None:
    """``all_warmup_microbatches``: with as many microbatches as ranks, the whole table forward, then the whole table backward."""
    plan = build("interleaved-afab", 2, 2, 2)
    assert to_rows(plan) == [
        ["0F0", "0F1", "2F0", "2F1", "2B0", "2B1", "0B0", "0B1"],
        ["1F0", "1F1", "3F0", "3F1", "3B0", "3B1", "1B0", "1B1"],
    ]
    for p, v in ((p, v) for p in range(1, MAX_PP + 1) for v in range(2, MAX_CHUNKS + 1)):
        table = megatron.get_schedule_table(p, v, p)
        for rank, row in enumerate(to_rows(build("interleaved-afab", p, p, v))):
            forwards = [f"{chunk * p + rank}F{mb}" for mb, chunk in table]
            assert row == [*forwards, *(f"{(v - 1 - chunk) * p + rank}B{mb}" for mb, chunk in table)]


def test_a_suggested_number_of_microbatches_is_legal() -> None:
    for m in (5, 7, 13, 17, 30):
        with pytest.raises(ScheduleError) as caught:
            build("interleaved-zb", 2 if m < 13 else 4, m)
        for suggestion in map(int, str(caught.value).split("try m=")[1].split(" or ")):
            assert build("interleaved-zb", 2 if m < 13 else 4, suggestion).num_microbatches == suggestion
    for p, m, n in [(6, 8, 6), (5, 7, 5), (8, 18, 8), (8, 20, 9)]:
        with pytest.raises(ScheduleError) as caught:
            build("interleaved-1f1b", p, m, 3, n)
        fewer, more = str(caught.value).split("try m=")[1].split(" or ")
        for suggestion in (int(fewer), int(more)):
            assert build("interleaved-1f1b", p, suggestion, 3, n).num_microbatches == suggestion


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        get("2f2b")
    assert f"'2f2b' is not known; expected one of {', '.join(SCHEDULES)}" in str(caught.value)
    assert caught.value.exit_code == 2
