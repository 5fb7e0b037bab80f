"""A rank whose steps nothing numbers, in a run whose other ranks have numbered ones."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from pptrace.recognise.common_steps import with_common_steps
from pptrace.recognise.rank import RankFound, recognise_rank
from pptrace.recognise.recognise import recognise_ranks
from pptrace.schedule.registry import build
from tests.synthetic import record, renamed

FIRST = 5


def ranks(lacking: int, steps: int = 3) -> list[RankFound]:
    """Steps 5, 6 and 7; those of one rank are counted from 0, as where no range numbers them."""
    traces = record(build("1f1b", 2, 4, 1), steps=steps).traces()
    later = [
        renamed(t, lambda name: re.sub(r"step=(\d+)", lambda m: f"step={FIRST + int(m[1])}", name)) for t in traces
    ]
    found = [recognise_rank(trace) for trace in later]
    own = found[lacking]
    ops, comms = (table.assign(step=table["step"] - FIRST) for table in (own.ops, own.comms))
    found[lacking] = replace(own, ops=ops[ops["kind"] != "STEP"], comms=comms)
    return found


@pytest.mark.parametrize("lacking", [0, 1])
def test_its_steps_are_taken_in_order_for_those_of_the_others(lacking: int) -> None:
    run = recognise_ranks(ranks(lacking))
    steps = run.ops[run.ops["step"] >= 0].groupby("rank")["step"].agg(set)
    assert steps[0] == steps[1] == {5, 6, 7}
    assert (run.comms["match"] >= 0).all()
    assert run.schedule.mismatches == ()
    assert any(f"nothing numbers the steps of rank {lacking}" in line for line in run.warnings)


def test_of_another_number_of_steps_nothing_is_taken() -> None:
    found = ranks(1)
    found[1] = replace(found[1], ops=found[1].ops[found[1].ops["step"] < 2])
    same, warnings = with_common_steps(found)
    assert warnings == ()
    assert set(same[1].ops["step"]) == {0, 1}
