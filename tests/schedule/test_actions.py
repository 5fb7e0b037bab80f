"""The text of single actions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _Action, _ComputationType

from pptrace.errors import ScheduleError
from pptrace.schedule.actions import Action, Kind, parse_action

SIMPLE = [kind for kind in Kind if kind is not Kind.OVERLAP_F_B]
ALONE = [Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD]
numbers = st.integers(0, 10**9 - 1)
simple_actions = st.one_of(
    st.builds(Action, st.sampled_from([kind for kind in SIMPLE if kind not in ALONE]), numbers, numbers),
    st.builds(Action, st.sampled_from(ALONE), numbers, st.none()),
)


@st.composite
def overlaps(draw: st.DrawFn) -> Action:
    forward = Action(Kind.F, draw(numbers), draw(numbers))
    backward = Action(draw(st.sampled_from([Kind.B, Kind.I])), draw(numbers), draw(numbers))
    return Action(Kind.OVERLAP_F_B, forward.stage, forward.microbatch, parts=(forward, backward))


@given(st.one_of(simple_actions, overlaps()))
def test_an_action_is_read_back_from_its_text(action: Action) -> None:
    assert parse_action(str(action)) == action


@given(st.one_of(simple_actions, overlaps()))
def test_torch_reads_the_text_of_an_action_and_writes_it_the_same(action: Action) -> None:
    theirs = _Action.from_str(str(action))
    assert str(theirs) == str(action)
    if not action.parts:
        expected = (action.stage, _ComputationType(action.kind.value), action.microbatch)
        assert tuple(theirs)[:3] == expected


def test_the_kinds_are_those_of_torch() -> None:
    assert {kind.value for kind in Kind} == {kind.value for kind in _ComputationType}


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "F0", "0", "0F", "1F0xyz", " 1F0", "1F0 ", "1 F0", "1F 0", " 1 F0", "1F0\n", "-1F0", "+1F0", "1F-1"),
        *("1f0", "1X0", "1FB0", "1F0.0", "1F1_0", "0x1F0", "1F0,1F1", "1F0;1B0", "١F0", "1F٢", "１F０", "²F0"),
        *("0UNSHARD3", "0RESHARD0", "1REDUCE_GRAD2", "0SEND0", "0SEND_F", "0RECV_B", "0SENDF0", "0OVERLAP_F_B0"),
        *("(0F0)OVERLAP_F_B", "(0F0;0B0)", "()OVERLAP_F_B", "(0F0;0B0;0W0)OVERLAP_F_B", "(0F0;0B0)OVERLAP_F_B1"),
        *("(0B0;0F0)OVERLAP_F_B", "(0F0;0F1)OVERLAP_F_B", "(0F0;0W0)OVERLAP_F_B", "(0F0;x)OVERLAP_F_B", "((0F0;0B0)F"),
        *("1234567890F0", "0F1234567890", "9" * 5000 + "F0"),
    ],
)
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action"):
        parse_action(text)


def test_a_refusal_says_what_the_kind_needs() -> None:
    with pytest.raises(
        ScheduleError, match="'0UNSHARD3' is not an action: UNSHARD takes no microbatch, such as '0UNSHARD'"
    ):
        parse_action("0UNSHARD3")
    with pytest.raises(
        ScheduleError, match="'3SEND_B' is not an action: SEND_B needs a microbatch, such as '0SEND_B0'"
    ):
        parse_action("3SEND_B")
    with pytest.raises(ScheduleError, match="OVERLAP_F_B takes a forward and then a backward"):
        parse_action("(0B0;0F0)OVERLAP_F_B")


@given(st.text(alphabet="0123456789FBIW_SENDRCVUHAGOLP();x ٣", max_size=20))
def test_any_text_is_an_action_written_back_the_same_or_refused(text: str) -> None:
    try:
        action = parse_action(text)
    except ScheduleError:
        return
    assert parse_action(str(action)) == action
    assert str(action).replace(" ", "").lstrip("0") or text
