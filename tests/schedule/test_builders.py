"""The builders against torch's schedules, against Megatron's rules, and against what is legal."""

from __future__ import annotations

import pytest
from hypothesis import given
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from pptrace.errors import ScheduleError, UsageError
from pptrace.recognise.schedule import identify
from pptrace.schedule import interleaved, one_f_one_b
from pptrace.schedule.actions import Action, Kind, Phase
from pptrace.schedule.lower import lower
from pptrace.schedule.phases import tag_phases
from pptrace.schedule.plan import Plan, make_plan
from pptrace.schedule.registry import SCHEDULES, build, get
from pptrace.schedule.shape import Shape
from pptrace.schedule.text import from_rows, to_rows
from pptrace.schedule.validate import validate
from tests.schedule import megatron, torch_tables
from tests.schedule.shapes import MAX_CHUNKS, interleaved_shapes, one_chunk_shapes, plans


def single_stage_table(schedule_class: type, p: int, m: int) -> list[list[str]]:
    schedule = schedule_class(torch_tables.StubStage(0, p, p), m)
    return torch_tables.compute_rows(schedule._get_pipeline_order())


def test_gpipe_has_the_table_of_torch_for_every_shape() -> None:
    for p, m in one_chunk_shapes():
        assert to_rows(build("gpipe", p, m)) == single_stage_table(ScheduleGPipe, p, m), (p, m)


def test_gpipe_runs_what_torch_executes(monkeypatch: pytest.MonkeyPatch) -> None:
    for p, m in [(1, 3), (2, 1), (3, 4), (4, 16), (8, 5)]:
        for rank, row in enumerate(to_rows(build("gpipe", p, m))):
            calls = torch_tables.executed(ScheduleGPipe, rank, p, m, monkeypatch)
            assert row == [call[0] for call in calls if "_" not in call[0]]


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


def test_interleaved_tables_are_those_of_the_complete_schedule_of_torch() -> None:
    """The table alone, as the test above takes it, is what torch's own constructor ends up with."""
    for p, m, v in [(2, 6, 3), (4, 8, 2), (3, 4, 2)]:
        schedule = torch_tables.multi(ScheduleInterleaved1F1B, p, m, v)
        assert torch_tables.compute_rows(schedule.pipeline_order) == torch_tables.interleaved_rows(p, m, v)


def test_1f1b_runs_what_torch_executes(monkeypatch: pytest.MonkeyPatch) -> None:
    for p, m in one_chunk_shapes():
        if m < p:
            continue  # torch refuses fewer microbatches than stages
        for rank, row in enumerate(to_rows(build("1f1b", p, m))):
            with monkeypatch.context() as patch:
                calls = torch_tables.executed(Schedule1F1B, rank, p, m, patch)
            assert row == [call[0] for call in calls if "_" not in call[0]], (p, m, rank)


def test_1f1b_has_the_table_of_torch_but_for_its_misnumbered_last_rank() -> None:
    """``Schedule1F1B._get_pipeline_order`` numbers the last rank's forwards from 1: its counter starts as if one had run.

    The table is for drawing only; what the schedule executes (the test above) numbers them from 0. Every other rank is
    compared as it stands, the last one with its forwards counted down by one.
    """
    for p, m in one_chunk_shapes():
        if m < p:
            continue
        theirs, ours = single_stage_table(Schedule1F1B, p, m), to_rows(build("1f1b", p, m))
        assert ours[:-1] == theirs[:-1], (p, m)
        assert theirs[-1][0] == f"{p - 1}F1"
        renumbered = [f"{p - 1}F{int(cell.split('F')[1]) - 1}" if "F" in cell else cell for cell in theirs[-1]]
        assert ours[-1] == renumbered, (p, m)


def test_interleaved_is_the_order_of_megatron_for_every_group_size() -> None:
    num_shapes = 0
    for p, m, v, n in interleaved_shapes():
        plan = build("interleaved-1f1b", p, m, v, n)
        assert to_rows(plan) == [megatron.interleaved_row(p, rank, m, v, n) for rank in range(p)], (p, m, v, n)
        num_shapes += 1
    assert num_shapes == 1344


def test_the_virtual_microbatches_follow_the_published_example() -> None:
    table = interleaved.schedule_table(num_microbatches=5, num_chunks=3, group_size=3)
    assert [mb for mb, _ in table] == [0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 4, 3, 4, 3, 4]
    assert [chunk for _, chunk in table] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 1, 1, 2, 2]
    assert table == megatron.get_schedule_table(5, 3, 3)


def forwards_before_the_pairs(plan: Plan, rank: int) -> int:
    """Forwards before the one that the first backward follows directly; all of them where no pair exists."""
    kinds = [action.kind for action in plan.ranks[rank]]
    leading = kinds.index(Kind.B)
    return leading if leading == kinds.count(Kind.F) and plan_tags(plan, rank, Phase.STEADY) == 0 else leading - 1


def plan_tags(plan: Plan, rank: int, phase: Phase, kind: Kind | None = None) -> int:
    return sum(action.phase is phase and kind in (None, action.kind) for action in plan.ranks[rank])


def test_1f1b_has_the_warmup_of_megatron() -> None:
    for p, m in one_chunk_shapes():
        plan = build("1f1b", p, m)
        for rank in range(p):
            expected = min(p - rank - 1, m)
            assert forwards_before_the_pairs(plan, rank) == expected, (p, m, rank)
            assert one_f_one_b.num_warmup_forwards(p, rank, m) == expected


def test_interleaved_has_the_warmup_of_megatron() -> None:
    for p, m, v, n in interleaved_shapes():
        plan = build("interleaved-1f1b", p, m, v, n)
        for rank in range(p):
            expected = min(m * v, 2 * (p - rank - 1) + (v - 1) * n)
            assert forwards_before_the_pairs(plan, rank) == expected, (p, m, v, n, rank)


def test_the_lean_warmup_is_shorter_and_still_legal() -> None:
    for p, m, v in [(2, 4, 2), (4, 8, 2), (4, 12, 3), (8, 16, 4)]:
        lean = build("interleaved-1f1b", p, m, v, lean=True)
        validate(lean)
        for rank in range(p):
            assert forwards_before_the_pairs(lean, rank) == min(m * v, (p - rank - 1) + (v - 1) * p)


@given(plans())
def test_every_plan_is_whole(plan: Plan) -> None:
    m, expected = plan.num_microbatches, set()
    for stage in range(plan.num_stages):
        expected |= {(kind, stage, mb) for kind in (Kind.F, Kind.B) for mb in range(m)}
    found = [action.key for row in plan.ranks for action in row]
    assert len(found) == len(expected)
    assert set(found) == expected
    assert plan.placement == tuple(stage % plan.pp for stage in range(plan.num_stages))
    for row in plan.ranks:
        assert all(action.chunk == action.stage // plan.pp for action in row)


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


def test_identify_finds_the_name_and_the_phases_of_every_plan() -> None:
    shapes: list[tuple[str, int, int, int, int | None, bool]] = []
    for p, m in [(1, 1), (1, 4), (2, 1), (2, 3), (4, 4), (4, 9), (8, 3)]:
        shapes += [(name, p, m, 1, None, False) for name in ("gpipe", "1f1b")]
    for p, m, v, n in [
        (1, 3, 2, 2),
        (2, 2, 2, 2),
        (2, 5, 3, 3),
        (4, 8, 2, 4),
        (4, 8, 2, 8),
        (4, 9, 2, 5),
        (3, 8, 4, 5),
    ]:
        shapes.append(("interleaved-1f1b", p, m, v, n, False))
    shapes += [("interleaved-1f1b", 4, 8, 2, None, True), ("interleaved-1f1b", 3, 6, 3, None, True)]
    for shape in shapes:
        plan = build(*shape)
        for read in (from_rows(to_rows(plan), plan.name), from_rows(to_rows(lower(plan)), plan.name)):
            assert identify(read) == plan, shape


def test_identify_needs_no_name_where_there_are_two_microbatches() -> None:
    for name, chunks in [("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2)]:
        assert identify(from_rows(to_rows(build(name, 2, 4, chunks)), "custom")).name == name


def test_identify_leaves_a_plan_of_ones_own_alone() -> None:
    own = from_rows([["0F0", "0F1", "0B1", "0B0"]], "mine")
    assert identify(own) is own


def test_identify_is_quick_for_a_long_unknown_plan() -> None:
    rows = to_rows(build("interleaved-1f1b", 4, 64, 2))
    rows[3][-1], rows[3][-2] = rows[3][-2], rows[3][-1]
    own = from_rows(rows, "mine")
    assert identify(own) is own


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (("1f1b", 0, 4), "pp is 0; expected at least 1"),
        (("gpipe", 2, 0), "num_microbatches is 0; expected at least 1"),
        (("1f1b", 2, 4, 2), "2 chunks per rank; this schedule has 1 (try interleaved-1f1b)"),
        (("gpipe", 2, 4, 1, 2), "microbatch groups and the lean warmup belong to interleaved schedules"),
        (("interleaved-1f1b", 2, 4, 1), "expected at least 2 (or use 1f1b)"),
        (("interleaved-1f1b", 4, 3, 2), "group size 4 with p=4, m=3; expected p ≤ group size ≤ m"),
        (("interleaved-1f1b", 4, 8, 2, 3), "group size 3 with p=4, m=8; expected p ≤ group size ≤ m"),
        (("interleaved-1f1b", 4, 8, 2, 0), "group_size is 0; expected at least 1"),
        (("interleaved-1f1b", 4, 10, 2), "leave a last group of 2; expected 0 or at least p=4: try m=8 or 12"),
        (("interleaved-1f1b", 4, 10, 2, 5, True), "the lean warmup is defined for group size p=4, found 5"),
    ],
)
def test_an_illegal_shape_is_refused_in_one_line_that_says_what_is_legal(shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        build(*shape)  # type: ignore[arg-type]
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_shape_that_megatron_refuses_is_refused() -> None:
    for p, m in one_chunk_shapes():
        for n in range(1, m + 3):
            legal = p <= n <= m and (m % n == 0 or m % n >= p)
            if not legal:
                with pytest.raises(ScheduleError):
                    build("interleaved-1f1b", p, m, 2, n)


def test_a_suggested_number_of_microbatches_is_legal() -> None:
    for p, m, n in [(4, 10, 4), (4, 9, 6), (3, 7, 3), (8, 17, 8), (2, 5, 4)]:
        with pytest.raises(ScheduleError) as caught:
            build("interleaved-1f1b", p, m, 2, n)
        fewer, more = str(caught.value).split("try m=")[1].split(" or ")
        for suggestion in (int(fewer), int(more)):
            assert build("interleaved-1f1b", p, suggestion, 2, n).num_microbatches == suggestion


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        get("2f2b")
    assert "'2f2b' is not known; expected one of gpipe, 1f1b, interleaved-1f1b" in str(caught.value)
    assert caught.value.exit_code == 2


def test_the_catalogue_builds_each_schedule_under_its_name() -> None:
    for name, entry in SCHEDULES.items():
        plan = build(name, 2, 4)
        assert (plan.name, plan.num_chunks) == (name, entry.default_chunks)
        assert plan == entry.build(Shape(2, 4, entry.default_chunks))
