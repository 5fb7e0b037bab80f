"""A rank whose steps nothing numbers, in a run whose other ranks have numbered ones."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from pptrace.recognise.rank import recognise_rank
from pptrace.recognise.recognised_rank import RecognisedRank
from pptrace.recognise.run import recognise_ranks
from pptrace.recognise.steps.common_steps import with_common_steps, with_recorded_steps
from pptrace.schedule.registry import build
from tests.support.synthetic import record, renamed

FIRST = 5


def ranks(lacking: int, steps: int = 3) -> list[RecognisedRank]:
    """Steps 5, 6 and 7; those of one rank are counted from 0, as where no range numbers them."""
    traces = record(build("1f1b", 2, 4, 1), steps=steps).traces()
    later = [
        renamed(t, lambda name: re.sub(r"step=(\d+)", lambda m: f"step={FIRST + int(m[1])}", name)) for t in traces
    ]
    rows = [recognise_rank(trace) for trace in later]
    own = rows[lacking]
    ops, comms = (table.assign(step=table["step"] - FIRST) for table in (own.ops, own.comms))
    rows[lacking] = replace(own, ops=ops[ops["kind"] != "STEP"], comms=comms)
    return rows


@pytest.mark.parametrize("lacking", [0, 1])
def test_its_steps_are_taken_in_order_for_those_of_the_others(lacking: int) -> None:
    run = recognise_ranks(ranks(lacking))
    steps = run.ops[run.ops["step"] >= 0].groupby("rank")["step"].agg(set)
    assert steps[0] == steps[1] == {5, 6, 7}
    assert (run.comms["match"] >= 0).all()
    assert run.schedule.mismatches == ()
    assert any(f"the steps of rank {lacking} have no numbers" in line for line in run.warnings)


def test_of_another_number_of_steps_nothing_is_taken() -> None:
    result = ranks(1)
    result[1] = replace(result[1], ops=result[1].ops[result[1].ops["step"] < 2])
    same, warnings = with_common_steps(result)
    assert warnings == ()
    assert set(same[1].ops["step"]) == {0, 1}


def recorded(*steps: tuple[int, int]) -> list[RecognisedRank]:
    """Ranks of one run, each with those of steps 0 to 3 that its metadata names."""
    traces = record(build("1f1b", 2, 4, 1), steps=4).traces()
    result = []
    for trace, (first, stop) in zip(traces, steps, strict=True):
        own = recognise_rank(trace)
        kept = [table[table["step"].between(first, stop - 1)] for table in (own.ops, own.comms)]
        facts = {**own.info.metadata, "schema": "pptrace.trace/1", "steps": [first, stop]}
        result.append(replace(own, ops=kept[0], comms=kept[1], info=replace(own.info, metadata=facts)))
    return result


def test_of_ranks_that_recorded_different_steps_those_are_taken_that_all_have() -> None:
    run = recognise_ranks(recorded((1, 3), (1, 4)))
    assert set(run.ops.loc[run.ops["step"] >= 0, "step"]) == {1, 2}
    assert (run.comms["match"] >= 0).all()
    assert (
        "ranks recorded different steps (rank 0: steps 1–2; rank 1: steps 1–3): the report is of steps 1–2, which all ranks "
        "recorded"
    ) in run.warnings


def test_ranks_without_a_step_in_common_keep_their_own_and_say_so() -> None:
    kept, warnings = with_recorded_steps(recorded((0, 2), (2, 4)))
    assert [set(result.ops.loc[result.ops["step"] >= 0, "step"]) for result in kept] == [{0, 1}, {2, 3}]
    assert len(warnings) == 1
    assert "no step is common to all" in warnings[0]


def test_ranks_that_recorded_the_same_steps_are_left_as_they_are() -> None:
    ranks = recorded((1, 3), (1, 3))
    assert with_recorded_steps(ranks) == (ranks, ())
