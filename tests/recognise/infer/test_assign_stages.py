"""Stages where labels tell chunks, or nothing: loops, Vs, and which ranks form a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from pptrace.model.tables import OPS, empty_table
from pptrace.recognise.groups.axes import Groups
from pptrace.recognise.groups.mesh import mesh_from_stages, mesh_with_groups
from pptrace.recognise.infer.candidates import match_by_kinds
from pptrace.recognise.labels import Label, LabelledAction, read_label
from pptrace.recognise.ops.label_actions import LabelledActions, steps_of_ranges, with_microbatches
from pptrace.recognise.ops.label_columns import ACTION_COLUMNS, NONE, Range, Ranges
from pptrace.schedule.actions import KINDS, Kind
from pptrace.schedule.registry import build
from tests.roundtrip.files import recognise_run
from tests.roundtrip.styles import Nanotron, Style, Timers, TorchBatched, Unlabelled, ZeroBubble
from tests.support.found_ops import cells, planned
from tests.support.synthetic import Event, PaperRun, run_on_paper


def paper(name: str, pp: int, microbatches: int, chunks: int | None = None) -> PaperRun:
    return run_on_paper(build(name, pp, microbatches, chunks), lambda action: 500, latency=130)


class Silent(ZeroBubble):
    """Without labels on messages."""

    def messages_name(self, *_: object) -> str:
        return ""


@pytest.mark.parametrize(("schedule", "shape"), [("zbv", "V"), ("interleaved-zb", "loop")])
@pytest.mark.parametrize("style", [ZeroBubble, Silent], ids=lambda style: style.__name__)
def test_a_v_is_told_from_a_loop(style: type[Style], schedule: str, shape: str) -> None:
    run = paper(schedule, 2, 4, 2)
    recognised = recognise_run(style(), run, 1)
    assert [cells(recognised, rank) for rank in range(2)] == [planned(run.plan, rank) for rank in range(2)]
    assert any(
        f"the labels name chunks, not stages: {shape} placement assumed, since" in line for line in recognised.warnings
    )


class Shuffled(ZeroBubble):
    """An order of weight gradients that no schedule of the registry has: the first two ops of that kind change places."""

    def step(self, run: PaperRun, rank: int, number: int, at: int) -> list[Event]:
        events = super().step(run, rank, number, at)
        names = [event.name for event in events if event.name.startswith("W") and event.name[1].isdigit()]
        if len(names) < 2:
            return events
        swap = {names[0]: names[1], names[1]: names[0]}
        return [Event(**{**vars(event), "name": swap.get(event.name, event.name)}) for event in events]


def test_an_unknown_order_on_a_v_is_told_by_its_messages() -> None:
    run = paper("zbv", 3, 6)
    recognised = recognise_run(Shuffled(), run, 1)
    assert any("V placement assumed, since the messages" in line for line in recognised.warnings)
    assert set(recognised.ops.loc[recognised.ops["rank"] == 0, "stage"]) - {-1} == {0, 5}


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_the_first_rank_alone_tells_how_long_its_pipeline_is(pp: int) -> None:
    """As with nanotron, which profiles rank 0 only."""
    run = paper("1f1b", pp, 2 * pp)
    recognised = recognise_run(Nanotron(), run, 1, [0], num_ranks=pp)
    assert recognised.mesh.pipelines == (tuple(range(pp)),)
    assert cells(recognised, 0) == planned(run.plan, 0)
    assert recognised.schedule.name == "1f1b"
    assert recognised.schedule.plan.pp == pp


def test_gpipe_of_one_rank_tells_no_length() -> None:
    """Every rank of GPipe has the same order."""
    run = recognise_run(Nanotron(), paper("gpipe", 4, 4), 1, [0], num_ranks=4)
    assert (run.mesh.pp, run.mesh.pipelines) == (None, ((0,),))
    assert {candidate.name for candidate in run.schedule.candidates} == {"gpipe", "1f1b"}


def test_interleaved_timers_get_their_chunks_and_messages() -> None:
    """Every message meets its other end although no label says a microbatch."""
    run = paper("interleaved-1f1b", 3, 6, 2)
    recognised = recognise_run(Timers(), run, 1)
    assert recognised.mesh.vpp == 2
    assert [cells(recognised, rank) for rank in range(3)] == [planned(run.plan, rank) for rank in range(3)]
    assert len(recognised.comms) == sum(len(run.transfers(rank)) for rank in range(3))
    assert (recognised.comms["match"] >= 0).all()


def kinds_of(name: str, pp: int, microbatches: int, chunks: int, group: int | None = None) -> dict[int, list[str]]:
    plan = build(name, pp, microbatches, chunks, group)
    return {rank: [str(action.kind) for action in plan.compute_actions(rank)] for rank in range(pp)}


def test_a_fit_prefers_groups_of_p_and_finds_others() -> None:
    plain = match_by_kinds(3, kinds_of("interleaved-1f1b", 3, 12, 2))
    grouped = match_by_kinds(3, kinds_of("interleaved-1f1b", 3, 12, 2, 4))
    for found, group in ((plain, None), (grouped, 4)):
        expected = build("interleaved-1f1b", 3, 12, 2, group)
        assert [[a.key for a in row] for row in found.ranks] == [[a.key for a in row] for row in expected.ranks]


def test_what_the_first_rank_receives_tells_the_chunks() -> None:
    """In both, a rank runs the same kinds of ops in the same order; with three chunks the first one receives 8 of 12."""
    orders = kinds_of("interleaved-1f1b", 2, 4, 3)
    unknown, ranges_of_step = match_by_kinds(2, orders), match_by_kinds(2, orders, received=6)
    assert (unknown.num_chunks, ranges_of_step.num_chunks) == (3, 2)


@pytest.mark.parametrize(("schedule", "shape"), [("interleaved-1f1b", (3, 3, 2)), ("gpipe", (3, 6, 1))])
def test_forwards_that_all_come_first_are_interleaved_where_the_first_rank_receives_activations(
    schedule: str, shape: tuple[int, int, int]
) -> None:
    """With m = p an interleaved schedule has no steady phase: the kinds of its ops are those of GPipe with twice the m."""
    run = paper(schedule, *shape)
    recognised = recognise_run(TorchBatched(), run, 1)
    assert recognised.schedule.name == schedule
    for rank in range(3):
        assert cells(recognised, rank) == planned(run.plan, rank)


def test_interleaved_with_all_forwards_first_is_that_and_no_breadth_first_schedule() -> None:
    """Of as many microbatches as ranks: Megatron-LM ran that, and nobody breadth-first without labels."""
    run = paper("interleaved-afab", 4, 4, 2)
    recognised = recognise_run(TorchBatched(), run, 1)
    for rank in range(4):
        assert cells(recognised, rank) == planned(run.plan, rank)
    assert (recognised.schedule.name, recognised.mesh.vpp) == ("interleaved-afab", 2)
    assert recognised.schedule.mismatches == ()


@pytest.mark.parametrize(
    ("schedule", "given", "pp"),
    [
        (("1f1b", 4, 8), [0, 1, 2, 3], 4),
        (("1f1b", 4, 8), [0, 1, 3], 4),
        (("1f1b", 4, 8), [1, 2, 3], 4),
        (("1f1b", 4, 8), [0, 3], 4),
        (("1f1b", 4, 8), [0, 1, 2], None),
        (("1f1b", 4, 8), [1], None),
        (("interleaved-1f1b", 4, 8, 2), [0, 1, 2], None),
        (("interleaved-1f1b", 4, 8, 2), [1], None),
        (("gpipe", 4, 8), [0, 1, 2, 3], 4),
    ],
)
def test_a_pipeline_is_no_longer_than_its_ranks_show_and_null_where_it_goes_on(
    schedule: tuple[str, int, int], given: list[int], pp: int | None
) -> None:
    """Nothing tells how many ranks there were, as with Nsight reports of some of them."""
    run = paper(*schedule)
    recognised = recognise_run(Unlabelled(), run, 1, given)
    assert recognised.mesh.pp == pp
    if pp is None:
        assert recognised.mesh.pipelines == (((given[0],),) if len(given) == 1 else ())
        assert any("its length and the stages are null" in line for line in recognised.warnings)
    else:
        assert recognised.schedule.name == schedule[0]
        for rank in given:
            assert cells(recognised, rank) == planned(run.plan, rank)


def test_an_order_of_no_schedule_fits_nothing() -> None:
    assert match_by_kinds(2, {0: ["F", "B", "F", "F", "B", "B"], 1: ["F", "F", "B", "B", "F", "B"]}) is None
    assert match_by_kinds(2, {0: ["F", "B"], 1: ["F", "F", "B", "B"]}) is None
    assert match_by_kinds(2, {0: [], 1: []}) is None


def named(*names: str) -> list[Range]:
    """Ranges of these names, one after the other."""
    labels = [(index, read_label(name)) for index, name in enumerate(names)]
    return [Range(label, 10 * index, 10 * index + 9, 1) for index, label in labels if isinstance(label, Label)]


def resolved(ranges: Sequence[Range]) -> LabelledActions:
    return with_microbatches(steps_of_ranges(Ranges.of(ranges)))


def actions(labelled: LabelledActions) -> list[str]:
    rows = labelled.in_time_order()
    table = zip(*(rows[name].tolist() for name in ACTION_COLUMNS), strict=True)
    return [str(action_of(row[:4], row[4:])) for row in table]


def action_of(first: Sequence[int], second: Sequence[int] = (NONE,)) -> LabelledAction:
    kind, stage, chunk, microbatch = first
    if second[0] != NONE:
        return LabelledAction.pair(action_of((Kind.F.code, *first[1:])), action_of(second))
    known = (None if value == NONE else value for value in (stage, microbatch))
    return LabelledAction(KINDS[kind], *known, chunk=chunk)


def test_a_flush_is_every_weight_gradient_that_has_not_run() -> None:
    ranges_of_step = resolved(
        named("F0.0.0", "F1.0.0", "B0.0.0", "W0.0.0", "B1.0.0", "F2.0.0", "B2.0.0", "W_clear.0.0")
    )
    assert actions(ranges_of_step) == ["?0F0", "?0F1", "?0I0", "?0W0", "?0I1", "?0F2", "?0I2", "?0W1", "?0W2"]
    rows = ranges_of_step.in_time_order()
    assert [rows[name][-2:].tolist() for name in ("part", "parts")] == [[0, 1], [2, 2]]


def test_a_backward_without_weight_gradients_is_whole() -> None:
    assert actions(resolved(named("F0.0.0", "B0.0.0"))) == ["?0F0", "?0B0"]


def test_parts_of_a_sequence_are_microbatches() -> None:
    ranges_of_step = resolved(named("F0.0.0", "F0.0.1", "F1.0.0", "F1.0.1", "B0.0.1", "B0.0.0"))
    assert actions(ranges_of_step) == ["?0F0", "?0F1", "?0F2", "?0F3", "?0B1", "?0B0"]


def test_ops_before_a_step_that_leads_belong_to_it() -> None:
    """Zero bubble runs the first forwards before its range of the step, while the last optimizer step is validated."""
    ranges = named("F0.0.0", "iter_0_7", "F1.0.0", "B0.0.0", "B1.0.0", "F0.0.0")
    step = Range(ranges[1].label, 10, 45, 1)
    ranges_of_step = resolved([ranges[0], step, *ranges[2:]])
    assert set(ranges_of_step.actions["step"].tolist()) == {7}
    assert actions(ranges_of_step) == ["?0F0", "?0F1", "?0B0", "?0B1"]


def test_pairs_that_name_nothing_are_numbered_by_their_halves() -> None:
    assert actions(resolved(named("1F1B", "1F1B"))) == ["(?0F0;?0B0)OVERLAP_F_B", "(?0F1;?0B1)OVERLAP_F_B"]


def test_of_ops_that_were_taken_back_the_last_runs_count() -> None:
    ranges = named("F0.0.0", "F1.0.0", "iter_0_7", "F0.0.0", "F1.0.0", "B0.0.0", "B1.0.0")
    step = Range(ranges[2].label, 20, 69, 1)
    ranges_of_step = resolved([*ranges[:2], step, *ranges[3:]])
    assert actions(ranges_of_step) == ["?0F0", "?0F1", "?0B0", "?0B1"]
    rows = ranges_of_step.in_time_order()["range"]
    assert ranges_of_step.ranges.start_ns[rows].tolist() == [30, 40, 50, 60]


@pytest.mark.parametrize(("name", "pp"), [("gpipe", None), ("1f1b", 4)])
def test_some_ranks_of_an_unlabelled_pipeline_tell_its_length_only_where_their_order_does(
    name: str, pp: int | None
) -> None:
    run = recognise_run(Unlabelled(), paper(name, 4, 8), 1, (0, 1), num_ranks=4)
    assert (run.mesh.pp, run.schedule.name) == (pp, "unknown" if pp is None else name)
    if pp is None:
        assert (run.mesh.pipelines, run.mesh.dp) == ((), None)
        assert any("2 of 4 ranks show messages, but not the pipeline" in line for line in run.warnings)
        assert not any("of ranks assumed" in line for line in run.warnings)


def test_groups_that_do_not_multiply_up_with_the_stages_that_labels_tell_give_no_size() -> None:
    stages = mesh_from_stages({rank: frozenset({rank}) for rank in range(3)}, 3)
    groups = Groups({}, {}, 8, {"tp": 2, "dp": 2}, ())
    ops = empty_table(OPS)
    assert mesh_with_groups(stages, ops, groups).tp is None
    assert mesh_with_groups(stages, ops, replace(groups, world_size=12)).tp == 2
