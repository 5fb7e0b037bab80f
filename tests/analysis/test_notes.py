"""Warnings about what is null or uncertain, one rule at a time, of runs made of single rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from pptrace.analysis.notes import doubts_of_times, explain_nulls, explain_unknown_idle
from pptrace.analysis.result import CommSummary, RankStep, StepReport
from pptrace.analysis.shared_devices import SharedDevice
from pptrace.analysis.steps.steps import without_impossible
from pptrace.analysis.whole_run import Bubble, InDoubt, Stragglers, Waterfall
from pptrace.clock import Clock, ClockMethod
from pptrace.model.device import DeviceWork, LostKernels
from pptrace.model.mesh import MeshInfo
from pptrace.model.schedule_info import Candidate, PlanSource, ScheduleInfo
from pptrace.model.tables import COMMS, MEMORY, OPS, empty_table
from pptrace.model.traces import OP_TABLE
from pptrace.recognise.device.work import NO_DEVICE
from pptrace.recognise.run import RecognisedRun
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build
from pptrace.workflow.rank_store import recognise_trace
from tests.support import parts
from tests.support.parts import parts_ns
from tests.support.synthetic import make_trace
from tests.support.tables import table_of as table

TWO = MeshInfo(2, 2, 1, 1, 1, 1, 1, pipelines=((0, 1),))
FOUR = MeshInfo(4, 4, 1, 1, 1, 1, 1, pipelines=((0, 1, 2, 3),))
ONE_CLOCK = Clock(ClockMethod.SAME_HOST, {}, 0)
Row = dict[str, object]


def op(rank: int, kind: str = "F", start: int = 0, end: int = 100, **more: object) -> Row:
    return {"rank": rank, "kind": kind, "start_ns": start, "end_ns": end, "clock": "host", **more}


def device(num_events: int = 0, missing: str = "") -> DeviceWork:
    times, mask = np.arange(num_events, dtype=np.int64), np.ones(num_events, dtype=np.bool_)
    return DeviceWork(times, times + 1, times, times, mask, ~mask, missing)


def run_of(
    ops: Sequence[Row] = (),
    comms: Sequence[Row] = (),
    mesh: MeshInfo = TWO,
    present: Sequence[int] = (0, 1),
    plan: Plan | None = None,
    framework: str = "pptrace",
) -> RecognisedRun:
    """A run whose ranks with a trace are ``present``; with device events, so that these are no subject."""
    schedule = ScheduleInfo(plan, "1f1b", PlanSource.NONE)
    work, facts = {rank: device(1) for rank in present}, {rank: {} for rank in present}
    memory = empty_table(MEMORY)
    return RecognisedRun(framework, table(OPS, ops), table(COMMS, comms), memory, work, mesh, schedule, facts, ())


def rank_step(rank: int, bubble: int | None = 5, *comms: CommSummary, ops: int = 1) -> RankStep:
    return parts.rank_step(rank, 900, 0, bubble, comms=comms, ops=[None] * ops)


FALL = parts_ns(600, 400, 0, 0, 0, None, 0)


def step_of(*ranks: RankStep, step: int = 0, span: int | None = 1_000, fall: Waterfall | None = FALL) -> StepReport:
    ideal = None if fall is None else 0.2
    bubble = Bubble(0.1, 0.1, ideal, ideal, fall)
    return StepReport(step=step, start_ns=0, end_ns=1_000, span_ns=span, bubble=bubble, ranks=ranks)


def lines_of(run: RecognisedRun, steps: Sequence[StepReport] = (), clock: Clock = ONE_CLOCK) -> list[str]:
    return list(explain_nulls(run, clock, steps))


def those_with(text: str, lines: Sequence[str]) -> list[str]:
    return [line for line in lines if text in line]


BOTH = (op(0), op(1), op(0, "OPTIMIZER", 0, 100_000))
STEP = step_of(rank_step(0), rank_step(1))


@pytest.mark.parametrize(("uncertainty", "is_named"), [(None, False), (10, False), (11, True)])
def test_clocks_are_named_where_they_are_off_by_more_than_a_tenth_of_the_median_op(
    uncertainty: int | None, is_named: bool
) -> None:
    """Of 100 ns; that an optimizer takes longer does not count."""
    clock = replace(ONE_CLOCK, uncertainty_ns=uncertainty, warnings=("rank 1: its clock …",))
    lines = lines_of(run_of(BOTH), [STEP], clock)
    assert lines[0] == "rank 1: its clock …"
    assert len(those_with("the clocks may be off", lines)) == is_named
    assert those_with("the clocks may be off", lines_of(run_of(BOTH), [], clock)) == []


@pytest.mark.parametrize(
    ("compute", "is_named"), [((1_000, 1_000), False), ((1_300, 900), True), ((1_300, None), True)]
)
def test_ops_that_take_longer_than_their_steps_overlap(compute: tuple[int | None, ...], is_named: bool) -> None:
    """A single step that is shorter than usual is no sign of it."""
    lines = lines_of(run_of(BOTH), [replace(STEP, ideal_ns=ns) for ns in compute])
    assert len(those_with("ops of a rank overlap: they take 1", lines)) == is_named


def test_what_uncertain_clocks_mean_is_null_only_where_no_step_has_a_span() -> None:
    clock = replace(ONE_CLOCK, uncertainty_ns=60_000)
    unknown = step_of(span=None)
    for steps, doubt in (
        ([STEP, unknown], "are only that exact"),
        ([unknown], "are not known, since that is more than half a step"),
    ):
        (line,) = those_with("the clocks may be off", lines_of(run_of(BOTH), steps, clock))
        assert line.startswith("the clocks may be off by ±60.0 µs where the median op lasts 0.1 µs: ")
        assert line.endswith(f" {doubt}")


@pytest.mark.parametrize(
    ("uncertainty", "doubt"), [(100, None), (101, "only that exact"), (500, "only that exact"), (501, "not known")]
)
def test_without_a_pipeline_clocks_are_compared_with_the_shortest_step(uncertainty: int, doubt: str | None) -> None:
    steps = [replace(STEP, start_ns=9_000, end_ns=10_000), replace(STEP, start_ns=5_000, end_ns=7_000)]
    run, clock = run_of([op(0, "STEP")]), replace(ONE_CLOCK, uncertainty_ns=uncertainty)
    named = those_with("the clocks may be off", lines_of(run, steps, clock))
    assert [(found.cause, found.line) for found in doubts_of_times(run, clock, steps, ())] == [
        (InDoubt.CLOCK, line) for line in named
    ]
    assert [line.rpartition(" are ")[2] for line in named] == ([] if doubt is None else [doubt])
    assert all("where a step lasts 1.0 µs" in line for line in named)


def test_where_no_devices_events_are_there_nothing_compares_clocks() -> None:
    clock = replace(ONE_CLOCK, uncertainty_ns=90, warnings=("rank 1: its clock …",))
    one = replace(run_of(BOTH), work={0: device(1), 1: device(0, "nccl")})
    both = replace(run_of(BOTH), work={0: device(0, "cuda"), 1: device(0, "nccl")})
    assert len(those_with("clock", lines_of(one, [STEP], clock))) == 2
    assert those_with("clock", lines_of(both, [STEP], clock)) == []
    (line,) = those_with("no device events", lines_of(one, [STEP]))
    assert line.startswith("no device events of rank 1, though the run computes on devices (nccl): times are those of")
    (line,) = those_with("no device events", lines_of(both, [STEP]))
    assert line.startswith("no device events, though the run computes on devices (cuda): ")
    several = replace(run_of(BOTH), work={8: device(0, "cuda"), 1: device(0, "nccl"), 0: device(1)})
    (line,) = those_with("no device events", lines_of(several, [STEP]))
    assert line.startswith("no device events of rank 1, 8, though")


def test_without_device_events_times_are_those_of_the_hosts_or_of_tables_that_say_device() -> None:
    none, some = {0: device(), 1: device()}, {0: device(), 1: device(1)}
    on_device = run_of([op(0, clock="device"), op(1, clock="device")])
    mixed = run_of([op(0, clock="device"), op(1)])
    for run, work, what in (
        (on_device, none, ["times are those of the tables, which say device"]),
        (mixed, none, ["times are host ranges"]),
        (run_of(), none, ["times are host ranges"]),
        (mixed, some, []),
    ):
        named = those_with("no device events", lines_of(replace(run, work=work)))
        assert [line.partition(": ")[2].partition("; what devices did")[0] for line in named] == what


def test_ranks_without_a_trace_are_listed_with_what_lacks_them() -> None:
    """Those of the pipelines if there are any, else as many as the run had."""
    steps = [STEP]
    for present, run_steps, line in (
        ((0, 1, 2, 3), steps, None),
        (
            (0, 2),
            steps,
            "no trace of rank 1, 3 (of 4): windows and waits do not include it, and bubbles that depend on",
        ),
        ((2,), steps, "no trace of rank 0, 1, 3 (of 4): the windows of steps, waits and bubbles do not include those"),
        ((0, 3), (), "no trace of rank 1, 2 (of 4)"),
    ):
        named = those_with("no trace of", lines_of(run_of(mesh=FOUR, present=present), run_steps))
        assert len(named) == (line is not None)
        assert all(text.startswith(line or "") for text in named)
        assert run_steps or line is None or named == [line]
    apart = replace(FOUR, pipelines=((9, 8, 1, 0),), num_ranks=10)
    assert lines_of(run_of(mesh=apart, present=(0,)))[0] == "no trace of rank 1, 8, 9 (of 10)"
    more = replace(TWO, num_ranks=12)
    assert lines_of(run_of(mesh=more))[0] == "no trace of rank 2, 3, 4, 5, 6, 7, 8, 9 and 2 more (of 12)"
    assert lines_of(run_of(mesh=replace(TWO, num_ranks=10)))[0] == "no trace of rank 2, 3, 4, 5, 6, 7, 8, 9 (of 10)"


def test_a_trace_of_a_rank_that_the_run_did_not_have_does_not_stand_for_another() -> None:
    mesh = MeshInfo(3, None, None, None, None, None, None)
    assert lines_of(run_of(mesh=mesh, present=(0, 7)))[0] == "no trace of rank 1, 2 (of 3)"
    assert lines_of(run_of(mesh=mesh, present=(0, -1)))[0] == "no trace of rank 1, 2 (of 3)"


def test_the_sizes_of_the_mesh_are_explained_where_calls_name_no_group() -> None:
    nothing = MeshInfo(2, None, None, None, None, None, None)
    call: Row = {"kind": "all_reduce", "axis": "unknown", "group_size": -1}
    grouped, named = call | {"group_size": 1}, call | {"axis": "dp"}
    for mesh, comms, explained in (
        *((nothing, [call, call], True), (nothing, [], False), (nothing, [call, grouped], False)),
        *((nothing, [call, named], False), (replace(nothing, num_ranks=1), [call], False)),
        *((replace(nothing, dp=2), [call], False), (replace(nothing, tp=2), [call], False)),
    ):
        lines = lines_of(run_of(comms=comms, mesh=mesh))
        assert len(those_with("not known: how the ranks divide", lines)) == explained


def message(rank: int, peer: int, **more: object) -> Row:
    return {"rank": rank, "kind": "send", "axis": "pp", "peer": peer, "match": -1, **more}


def test_a_rank_alone_in_its_pipeline_is_told_whose_traces_would_help() -> None:
    def advice(run: RecognisedRun) -> list[str]:
        return [
            line.partition(":")[0] for line in lines_of(run, [step_of(rank_step(2))]) if "give their traces" in line
        ]

    alone = run_of(mesh=FOUR, present=(2,))
    lines = lines_of(alone, [step_of(rank_step(2))])
    assert len(those_with("the windows of steps are those of rank 2 alone", lines)) == 1
    assert advice(alone) == []
    comms = [message(2, 3), message(2, 0, kind="recv"), message(2, 3), message(2, -1), message(0, 9)]
    others = [message(2, 7, axis="cp"), message(2, 8, kind="all_reduce")]
    assert advice(run_of(comms=[*comms, *others], mesh=FOUR, present=(2,))) == [
        "rank 2 exchanges messages with rank 0 and rank 3"
    ]
    from_plan = replace(alone, schedule=replace(alone.schedule, plan=build("1f1b", 4, 4)))
    assert advice(from_plan) == ["rank 2 exchanges messages with rank 1 and rank 3"]
    somewhere = replace(from_plan, mesh=replace(FOUR, known_pp_ranks=((2, 3),)))
    assert advice(somewhere) == ["rank 2 exchanges messages with pipeline rank 2"]
    too_short = replace(alone, schedule=replace(alone.schedule, plan=build("1f1b", 2, 4)))
    assert advice(too_short) == []
    for pp_rank, peers in ((0, [1]), (3, [2]), (1, [0, 2])):
        candidates = tuple(Candidate("1f1b", 4, m, 4, 1, {2: pp_rank}) for m in (4, 8))
        several = replace(alone, schedule=replace(alone.schedule, candidates=candidates))
        listed = " and ".join(f"pipeline rank {peer}" for peer in peers)
        located = replace(several, mesh=replace(FOUR, known_pp_ranks=((2, pp_rank),)))
        assert advice(located) == [f"rank 2 exchanges messages with {listed}"]
    chunked = replace(several, schedule=replace(several.schedule, candidates=(replace(candidates[0], num_chunks=2),)))
    assert advice(chunked) == []


def test_of_pipelines_with_two_traces_or_all_their_ranks_none_is_alone() -> None:
    steps = [step_of(rank_step(0), rank_step(1))]
    assert those_with("alone, from its first op", lines_of(run_of(mesh=FOUR, present=(0, 1)), steps)) == []
    two = MeshInfo(2, 1, 1, 1, 1, 2, 1, pipelines=((0,), (1,)))
    assert those_with("alone, from its first op", lines_of(run_of(mesh=two), steps)) == []


def test_ranks_alone_are_listed_in_order() -> None:
    mesh = replace(FOUR, pipelines=((8, 9), (1, 2)))
    (line,) = those_with("alone,", lines_of(run_of(mesh=mesh, present=(8, 1)), [step_of(rank_step(8), rank_step(1))]))
    assert line.startswith("the windows of steps are those of rank 1, 8 alone")


def test_ranks_with_fewer_forwards_and_backwards_than_their_pipeline_are_named_by_step() -> None:
    """A pair counts twice, a weight gradient and an op of no microbatch not at all; step 3 is whole."""
    ops = [op(0, kind, step=step) for step in (3, 4, 5) for kind in ("F", "B", "W")]
    ops += [op(1, "OVERLAP_F_B", step=3), op(1, "I", step=4), op(1, "F", step=4, microbatch=-1)]
    steps = [step_of(rank_step(0), rank_step(1), step=step) for step in (3, 4, 5)]
    reported = those_with("its trace has", lines_of(run_of(ops), steps))
    assert reported == [
        "rank 1: its trace has 1 of 2 ops of step 4: the figures of that step do not include them",
        "rank 1: its trace has no ops of step 5: the figures of that step do not include them",
    ]
    both = [op(0, "F", step=3), op(0, "F", step=4)]
    assert those_with("its trace has", lines_of(run_of(both), steps)) == [
        "rank 1: its trace has no ops of step 3, 4: the figures of that step do not include them"
    ]
    assert those_with("its trace has", lines_of(run_of(both, present=(0,)), steps)) == []


def waiting(axis: str = "dp", wait: int | None = None, total: int | None = 9) -> CommSummary:
    return CommSummary(axis, "all_reduce", 1, 8, total, wait, None, None, None, None, None)


def test_unknown_bubbles_are_told_with_the_reason_and_the_communication_that_is_unknown_too() -> None:
    steps = [step_of(rank_step(1, None, waiting("tp"), waiting("dp"), waiting("pp", wait=0)), rank_step(0))]
    call: Row = {"rank": 1, "kind": "all_reduce", "axis": "dp", "match": -1}
    other_side = "the other side of their messages is not in the traces"
    members = "the members of collectives are unknown (add a column match, or dp_rank, tp_rank, … to the table)"
    others = "other members of their collectives have no trace, or are unknown"
    unknown = replace(TWO, dp=None)
    for mesh, comms, framework, why in (
        (unknown, [call], "pptrace", others),
        (unknown, [call], OP_TABLE, members),
        (TWO, [call], OP_TABLE, others),
        (unknown, [call, message(1, 0)], OP_TABLE, other_side),
        (unknown, [call, message(0, 1), message(1, 0, match=4)], OP_TABLE, members),
    ):
        lines = lines_of(run_of(comms=comms, mesh=mesh, framework=framework), steps)
        (line,) = those_with("bubble and exposed communication of rank", lines)
        assert line == (
            f"bubble and exposed communication of rank 1 are not known: {why}, so that waiting cannot be separated from transfer"
            "; nor is how much of dp all_reduce, tp all_reduce waits, is hidden or is exposed"
        )
        assert those_with("other members of the calls", lines) == []
    axes = ("tp", "ep", "pp", "cp", "dp")
    (line,) = those_with("nor is how much", lines_of(run_of(), [step_of(rank_step(1, None, *map(waiting, axes)))]))
    assert "of cp all_reduce, dp all_reduce, ep all_reduce, pp all_reduce, tp all_reduce waits" in line
    several = [step_of(rank_step(8, None)), step_of(rank_step(1, None), rank_step(8, None), step=1)]
    (line,) = those_with("bubble and exposed communication of rank", lines_of(run_of(), several))
    assert line.startswith("bubble and exposed communication of rank 1, 8 are not known:")
    one_of_two, lost = (
        [step_of(rank_step(1, None)), step_of(rank_step(1), step=1)],
        LostKernels(*np.array([[5], [6]]), 4),
    )
    run = run_of([op(0, "STEP", step=0)])
    for work, why in ((run.work, other_side), ({**run.work, 0: replace(run.work[0], lost=lost)}, "lost kernels")):
        (line,) = those_with("bubble and exposed", lines_of(replace(run, work=work), one_of_two))
        assert "of rank 1 are not known in step 0: " in line
        assert f"{why}, so that" in line
    early = replace(ONE_CLOCK, early_ends={1: np.array([5])})
    ends = "the recorded ends of some messages or collectives are before their other side has begun"
    for rows, why in (([message(1, 0, match=4)], ends), ([call], ends), ([message(1, 0)], other_side)):
        (line,) = those_with("bubble and exposed", lines_of(run_of(comms=rows), one_of_two, early))
        assert f"{why}, so that" in line
    unseen = [step_of(rank_step(1, None, waiting(total=None)))]
    (line,) = those_with("bubble and exposed communication of rank", lines_of(run_of(), unseen))
    assert line.endswith("separated from transfer")
    assert those_with("bubble and exposed", lines_of(run_of(), [step_of(rank_step(1, None), span=None)])) == []
    (line,) = those_with("not known: ", lines_of(run_of(), [step_of(rank_step(1, 5, waiting()))]))
    assert "how much of dp all_reduce waits, is hidden or is exposed (other members of the calls have no trace" in line
    some = [step_of(rank_step(1, 5, waiting())), step_of(rank_step(1, 5), step=1)]
    for work, why in (
        (run.work, "have no trace, or"),
        ({**run.work, 0: replace(run.work[0], lost=lost)}, "lost kernels"),
    ):
        (line,) = those_with("not known: ", lines_of(replace(run, work=work), some))
        assert f"waits, is hidden or is exposed in step 0 (other members of the calls {why}" in line


def test_messages_between_stages_are_missed_where_bubbles_are_known_and_stages_are_apart() -> None:
    alone = MeshInfo(2, 1, 1, 1, 1, 2, 1, pipelines=((0,), (1,)))
    collective: Row = {"kind": "all_reduce", "axis": "dp"}
    for run, steps, missed in (
        (run_of(comms=[collective]), [STEP], True),
        (run_of(comms=[collective, message(0, 1)]), [STEP], False),
        *((run_of(comms=[message(0, 1, kind="recv")]), [STEP], False), (run_of(mesh=alone), [STEP], False)),
        (run_of(), [step_of(rank_step(0, None), rank_step(1, None))], False),
        *((run_of(), [step_of(rank_step(0, None), rank_step(1))], True), (run_of(), [], False)),
    ):
        assert len(those_with("no messages between stages", lines_of(run, steps))) == missed


def test_rows_of_a_table_inside_ops_are_counted() -> None:
    """Two calls of some time within ops of their own rank; one of no time, one of rank 1 without ops."""
    inside: Row = {"rank": 0, "kind": "all_reduce", "clock": "host", "start_ns": 10, "end_ns": 20}
    comms = [inside, inside | {"start_ns": 30}, inside | {"start_ns": 20}, inside | {"rank": 1}]
    comms[1]["end_ns"] = 40
    of_table = run_of([op(0)], comms, framework=OP_TABLE)
    (line,) = those_with("communication inside ops", lines_of(of_table))
    assert "is taken out of compute (2 rows): " in line
    assert those_with("communication inside ops", lines_of(replace(of_table, framework="pptrace"))) == []
    assert those_with("communication inside ops", lines_of(replace(of_table, comms=table(COMMS, comms[2:])))) == []


def test_each_note_of_the_ranks_recorders_is_given_once() -> None:
    noted = replace(run_of(), facts={0: {"notes": ["hooks off", "late"]}, 1: {"notes": ["hooks off"]}})
    assert [line for line in lines_of(noted) if line in ("hooks off", "late")] == ["hooks off", "late"]


def test_without_steps_the_reason_is_what_was_recognised() -> None:
    for ops, start in (
        ([op(0)], "pipeline steps, phases and bubbles are not known: forwards and backwards were recognised, but not"),
        ([op(0, "STEP")], "no forward or backward of a microbatch recognised (the traces hold ranges of steps,"),
        ([], "no forward or backward of a microbatch recognised (neither marks of pptrace nor known labels)"),
    ):
        assert [line[: len(start)] for line in those_with("are not known", lines_of(run_of(ops)))] == [start]


def test_of_a_plan_what_it_does_not_cover_is_null() -> None:
    plan = build("1f1b", 2, 4)
    known = run_of(plan=plan)
    longer = replace(known, mesh=FOUR, facts={rank: {} for rank in range(4)})
    without_fall = step_of(rank_step(0), rank_step(1), step=3, fall=None)
    for run, steps, lines in (
        (known, [STEP], []),
        (
            longer,
            [STEP],
            [
                "the ideal bubble and what the bubble consists of are not known: the recognised plan covers 2 of the 4 ranks of "
                "a pipeline"
            ],
        ),
        (
            replace(known, mesh=replace(TWO, pp=None, is_cut=True)),
            [STEP],
            [
                "the ideal bubble and what the bubble consists of are not known: the recognised plan covers 2 of the ranks of "
                "a pipeline"
            ],
        ),
        (
            known,
            [STEP, without_fall],
            [
                "the ideal bubble of step 3 is not known: the step has other ops than the plan",
                "what the bubble consists of is not known where a step lacks ops of the plan",
            ],
        ),
        (
            run_of(),
            [without_fall],
            ["the ideal bubble and what the bubble consists of are not known where there is no plan"],
        ),
        (run_of(), [replace(without_fall, span_ns=None)], []),
    ):
        reported = those_with("what the bubble consists of is", got := lines_of(run, steps)) + those_with(
            "the ideal bubble", got
        )
        assert sorted(line[: len(expected)] for line, expected in zip(sorted(reported), lines, strict=True)) == lines


def test_where_all_fields_are_known_none_is_listed() -> None:
    ranks = tuple(replace(rank, peak_memory_bytes=1) for rank in STEP.ranks)
    known = replace(STEP, ranks=ranks, bubble=replace(STEP.bubble, waterfall_ns=replace(FALL, host=0)))
    measured = Stragglers(1.1, 0.5, 0.5, (), (), (), 1, "step")
    assert those_with("not known: ", explain_nulls(run_of(), ONE_CLOCK, [known], measured)) == []


def test_fields_that_are_null_are_listed_with_their_reasons() -> None:
    without_sizes = CommSummary("pp", "send", 1, None, 9, 0, 0, 9, 0.0, None, None)
    with_memory = replace(STEP, ranks=tuple(replace(rank, peak_memory_bytes=1) for rank in STEP.ranks))
    for run, step, starts in (
        (run_of(), STEP, ["what hosts cost the step", "peak memory", "what stragglers cost"]),
        (run_of(), with_memory, ["what hosts cost the step", "what stragglers cost"]),
        (
            run_of(),
            replace(STEP, ranks=(with_memory.ranks[0], STEP.ranks[1])),
            ["what hosts cost the step", "peak memory", "what stragglers cost"],
        ),
        (run_of(), step_of(rank_step(0), fall=None), ["peak memory", "what stragglers cost"]),
        (
            run_of(),
            step_of(rank_step(0, 5, without_sizes), fall=None),
            ["peak memory", "sizes and bandwidths of messages", "what stragglers cost"],
        ),
    ):
        (line,) = those_with("not known: ", lines_of(run, [step]))
        fields = line.removeprefix("not known: ").split("; ")
        assert [field.partition(" (")[0] for field in fields] == starts
    no_pipeline = step_of(rank_step(0, 5, ops=0), fall=None)
    lines = lines_of(run_of(), [no_pipeline])
    assert lines[-1].startswith("not known: peak memory")
    assert len(those_with("no pipeline in these traces, and so no bubbles", lines)) == 1
    lines = lines_of(run_of(comms=[{"rank": 0, "kind": "send"}]), [no_pipeline])
    assert len(those_with("whether the messages between ranks are those of a pipeline is not known", lines)) == 1
    assert those_with("no pipeline in these traces", lines) == []


@pytest.mark.parametrize(
    ("formats", "cure"),
    [
        ({"xplane"}, "profile from before the first step to after the last"),
        ({"rocpd"}, "record calls of HIP"),
        ({"ascend"}, "record host and device from before the first step to after the last (torch_npu"),
        ({"kineto"}, "record CUDA runtime calls"),
        ({"kineto", "xplane"}, "record CUDA runtime calls"),
    ],
)
def test_why_devices_idled_is_told_by_a_recording_as_its_format_has_them(formats: set[str], cure: str) -> None:
    idle = [replace(rank_step(rank), device=replace(NO_DEVICE, idle_ns=5)) for rank in (0, 1)]
    (line,) = explain_unknown_idle([step_of(*idle)], (), {}, formats)
    assert line.startswith("why the device was idle is not known of rank 0, 1: ")
    assert f"was not recorded; {cure}" in line


@pytest.mark.parametrize(("span", "is_impossible"), [(600, False), (599, True), (None, False)])
def test_a_part_is_no_longer_than_its_step(span: int | None, is_impossible: bool) -> None:
    steps = [replace(step_of(step=3, span=span), ideal_ns=600, causes=()), step_of(step=4)]
    found, _, line = without_impossible(steps, ())
    assert line.startswith("step 3: parts would be longer than the step") is is_impossible
    assert [step.bubble.waterfall_ns for step in found] == [None if is_impossible else FALL, FALL]
    assert found[0].ideal_ns == (None if is_impossible else 600)


def test_ranks_that_share_a_device_are_named_and_others_are_not() -> None:
    run = run_of(mesh=FOUR, present=(0, 1, 2, 3))
    uuids: list[dict[str, object]] = [{"device_id": "a"}, {"device_id": "b"}, {"device_id": "a"}, {}]
    shared = list(explain_nulls(replace(run, facts=dict(enumerate(uuids))), ONE_CLOCK, ()))
    assert [line for line in shared if "share a GPU" in line] == [
        "ranks 0, 2 share a GPU, where their work takes turns: kernels begin late and run long while those of "
        "another rank run; give each rank a GPU of its own, as torch.cuda.set_device(local_rank) does"
    ]
    assert not [line for line in explain_nulls(run, ONE_CLOCK, ()) if "share a GPU" in line]
    (doubt,) = doubts_of_times(run, ONE_CLOCK, (), [SharedDevice((0, 2))])
    assert (doubt.cause, doubt.line in shared) == (InDoubt.DEVICE, True)


def test_the_analysis_keeps_which_device_a_rank_runs_on() -> None:
    trace = make_trace([], 0, {"device_id": "a", "unknown": 1})
    assert recognise_trace(trace).info.metadata == {"device_id": "a"}
