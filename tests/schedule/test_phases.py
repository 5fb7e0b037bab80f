"""Phases from the order of a rank's ops alone, as letters."""

from __future__ import annotations

import pytest

from pptrace.schedule.actions import Kind
from pptrace.schedule.plan import phases_by_order, tag_phases
from pptrace.schedule.text import from_rows

KINDS = {"F": Kind.F, "B": Kind.B, "I": Kind.I, "W": Kind.W, "O": Kind.OVERLAP_F_B}


@pytest.mark.parametrize(
    ("order", "phases"),
    [
        *(("FFFBFBFBBB", "wwsssssscc"), ("FFFIFIFIWWWII", "wwssssssccccc"), ("FFFBBB", "wwwccc")),
        *(("FFIWIW", "wwcccc"), ("FB", "ss"), ("FIW", "ssc"), ("FBFBFB", "ssssss"), ("FFBWFBB", "wsssssc")),
        *(("FFOOBB", "wwsssc"), ("FOFB", "wsss"), ("FOB", "wss"), ("OO", "ss"), ("BF", "ss"), ("BFF", "sss")),
        *(("BBF", "sss"), ("FFF", "www"), ("WWB", "ccc"), ("W", "c"), ("", "")),
    ],
)
def test_the_steady_phase_is_from_the_pair_of_the_first_backward_to_that_of_the_last_forward(
    order: str, phases: str
) -> None:
    assert "".join(str(phase)[0] for phase in phases_by_order([KINDS[letter] for letter in order])) == phases


def test_a_pair_and_its_halves_have_one_phase() -> None:
    plan = tag_phases(from_rows([["0F0", "0F1", "(0F2;0B0)OVERLAP_F_B", "0B1", "0B2"]], "custom"))
    assert [str(action.phase) for action in plan.ranks[0]] == ["warmup", "warmup", "steady", "steady", "cooldown"]
    assert [half.phase for half in plan.ranks[0][2].parts] == [plan.ranks[0][2].phase] * 2
