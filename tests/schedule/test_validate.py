"""Broken plans: each kind of break gives one line that names it and a grid that marks the place."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pptrace.errors import ScheduleError
from pptrace.schedule.actions import Action
from pptrace.schedule.lower import lower
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build
from pptrace.schedule.replay import replay
from pptrace.schedule.text import from_rows, to_rows
from pptrace.schedule.validate import validate
from tests.schedule import rendezvous
from tests.schedule.shapes import plans

GOOD = {
    "compute": [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]],
    "lowered": to_rows(lower(build("1f1b", 2, 2))),
    "split": [["0F0", "0I0", "0W0"], ["1F0", "1I0", "1W0"]],
}


@pytest.mark.parametrize("rows", GOOD.values(), ids=GOOD.keys())
def test_the_plans_that_are_broken_below_are_sound_before(rows: list[list[str]]) -> None:
    validate(from_rows(rows, "good"))


LAST = ["1RECV_F2", "1F2", "1B2", "1SEND_B2"]
BROKEN = {
    "a forward is missing": (
        [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1B1"]],
        "stage 1, microbatch 1 has B; expected F and B, or F, I and W", {(1, "1B1")},
    ),
    "a backward is missing": (
        [["0F0", "0F1", "0B0"], ["1F0", "1B0", "1F1", "1B1"]],
        "stage 0, microbatch 1 has F; expected F and B, or F, I and W", {(0, "0F1")},
    ),
    "a weight gradient is missing": (
        [["0F0", "0I0"], ["1F0", "1B0"]],
        "stage 0, microbatch 0 has F, I; expected F and B, or F, I and W", {(0, "0F0"), (0, "0I0")},
    ),
    "a full backward and a split one": (
        [["0F0", "0B0", "0W0"], ["1F0", "1B0"]],
        "stage 0, microbatch 0 has B, F, W; expected F and B, or F, I and W", {(0, "0F0"), (0, "0B0"), (0, "0W0")},
    ),
    "a microbatch is missing from a stage": (
        [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0"]],
        "stage 1, microbatch 1 has nothing; expected F and B, or F, I and W", set(),
    ),
    "a duplicate": (
        [["0F0", "0F1", "0F0", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]],
        "rank 0 has 0F0 2 times; expected once", {(0, "0F0")},
    ),
    "a duplicate send": (
        [["0F0", "0SEND_F0", "0SEND_F0", "0RECV_B0", "0B0"], ["1RECV_F0", "1F0", "1B0", "1SEND_B0"]],
        "rank 0 has 0SEND_F0 2 times; expected once", {(0, "0SEND_F0")},
    ),
    "backward before forward": (
        [["0B0", "0F0"], ["1F0", "1B0"]], "deadlock: rank 0 waits at 0B0 for 0F0 on rank 0", {(0, "0B0")},
    ),
    "W before I": (
        [["0F0", "0W0", "0I0"], ["1F0", "1I0", "1W0"]], "deadlock: rank 0 waits at 0W0 for 0I0 on rank 0", {(0, "0W0")},
    ),
    "a cycle of computes": (
        [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B1", "1B0"]],
        "deadlock: rank 0 waits at 0B0 for 1B0 on rank 1; rank 1 waits at 1F1 for 0F1 on rank 0", {(0, "0B0"), (1, "1F1")},
    ),
    "a send without its receive": (
        [["0F0", "0SEND_F0", "0RECV_B0", "0B0"], ["1F0", "1B0", "1SEND_B0"]],
        "rank 0 sends 0SEND_F0, but rank 1 never receives it (1RECV_F0 is missing)", {(0, "0SEND_F0")},
    ),
    "a receive without its send": (
        [["0F0", "0SEND_F0", "0RECV_B0", "0B0"], ["1RECV_F0", "1F0", "1B0"]],
        "rank 0 waits for 0RECV_B0, but rank 1 never sends it (1SEND_B0 is missing)", {(0, "0RECV_B0")},
    ),
    "neither send nor receive": (
        [["0F0", "0SEND_F0", "0B0"], ["1RECV_F0", "1F0", "1B0"]], "rank 0: 0B0 comes before 0RECV_B0", {(0, "0B0")},
    ),
    "a send before its compute": (
        [["0SEND_F0", "0F0", "0RECV_B0", "0B0"], ["1RECV_F0", "1F0", "1B0", "1SEND_B0"]],
        "rank 0: 0SEND_F0 comes before 0F0", {(0, "0SEND_F0")},
    ),
    "a compute before its receive": (
        [["0F0", "0SEND_F0", "0RECV_B0", "0B0"], ["1F0", "1RECV_F0", "1B0", "1SEND_B0"]],
        "rank 1: 1F0 comes before 1RECV_F0", {(1, "1F0")},
    ),
    "a cycle of blocking messages": (
        [
            ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0F2", "0SEND_F2", "0RECV_B0", "0B0", "0RECV_B1", "0B1", "0RECV_B2", "0B2"],
            ["1RECV_F0", "1F0", "1I0", "1SEND_B0", "1W0", "1RECV_F1", "1F1", "1B1", "1SEND_B1", *LAST],
        ],
        "deadlock: rank 0 blocks in 0SEND_F1 to rank 1; rank 1 blocks in 1SEND_B0 to rank 0",
        {(0, "0SEND_F1"), (1, "1SEND_B0")},
    ),
    "messages out of order": (
        [
            ["0F0", "0F1", "0SEND_F0", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"],
            ["1RECV_F1", "1RECV_F0", "1F0", "1B0", "1SEND_B0", "1F1", "1B1", "1SEND_B1"],
        ],
        "rank 0 sends 0SEND_F0 to rank 1, which expects 0SEND_F1 first; messages between two ranks must be received in",
        {(0, "0SEND_F0")},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "words", "places"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_plan_gives_one_line_and_a_grid_that_marks_the_place(
    rows: list[list[str]], words: str, places: set[tuple[int, str]]
) -> None:
    if "blocks in" in words:
        with pytest.raises(rendezvous.StuckError):
            rendezvous.run(rows, one_at_a_time=False)
    with pytest.raises(ScheduleError) as caught:
        validate(from_rows(rows, "broken"))
    message, grid = str(caught.value), caught.value.grid
    assert message.startswith(f"broken: {words}")
    assert "\n" not in message
    lines = grid.splitlines()
    assert len(lines) == len(rows)
    marked = {(rank, word.strip("><")) for rank, line in enumerate(lines) for word in line.split() if word[0] == ">"}
    assert marked == places


def test_an_action_on_the_rank_of_another_stage_is_found() -> None:
    plan = build("1f1b", 2, 2)
    moved = replace(plan, ranks=(plan.ranks[0][:-1], (*plan.ranks[1], plan.ranks[0][-1])))
    with pytest.raises(ScheduleError, match="rank 1 has 0B1, but stage 0 belongs to rank 0") as caught:
        validate(moved)
    assert ">0B1<" in caught.value.grid.splitlines()[1]
    with pytest.raises(ScheduleError, match="stage 0 has actions on rank 0 and on rank 1; a stage belongs to one rank"):
        from_rows(to_rows(moved), "moved")


def test_a_stage_or_microbatch_that_does_not_exist_is_found() -> None:
    plan = build("1f1b", 2, 2)
    for extra, words in [
        (Action(plan.ranks[0][0].kind, 7, 0), "rank 0 has 7F0; expected a stage from 0 to 1"),
        (Action(plan.ranks[0][0].kind, 0, 9), "rank 0 has 0F9; expected a microbatch from 0 to 1"),
    ]:
        with pytest.raises(ScheduleError, match=words):
            validate(replace(plan, ranks=((*plan.ranks[0], extra), plan.ranks[1])))


def test_a_deadlock_names_only_the_ranks_of_the_cycle() -> None:
    """Ranks that merely wait behind it are not in the line."""
    rows = to_rows(build("gpipe", 4, 2))
    rows[2] = ["2F0", "2B0", "2F1", "2B1"]
    rows[3] = ["3F0", "3F1", "3B0", "3B1"]
    with pytest.raises(ScheduleError) as caught:
        validate(from_rows(rows, "broken"))
    assert str(caught.value) == (
        "broken: deadlock: rank 2 waits at 2B0 for 3B0 on rank 3; rank 3 waits at 3F1 for 2F1 on rank 2"
    )


@given(plans())
def test_random_plans_and_their_lowered_forms_are_sound(plan: Plan) -> None:
    validate(plan)
    validate(lower(plan))


@st.composite
def mutations(draw: st.DrawFn) -> tuple[Plan, list[list[Action]]]:
    """A legal plan, and its rows with one to three actions swapped, dropped, doubled, or moved to another rank."""
    plan = draw(plans(max_pp=4))
    plan = lower(plan) if draw(st.booleans()) else plan
    rows = [list(row) for row in plan.ranks]
    for _ in range(draw(st.integers(1, 3))):
        row = draw(st.sampled_from([row for row in rows if row]))
        index, other = (draw(st.integers(0, len(row) - 1)) for _ in range(2))
        match draw(st.sampled_from(["swap", "drop", "duplicate", "move"])):
            case "swap":
                row[index], row[other] = row[other], row[index]
            case "drop":
                del row[index]
            case "duplicate":
                row.insert(other, row[index])
            case "move":
                draw(st.sampled_from(rows)).insert(0, row.pop(index))
        if not any(rows):
            break
    return plan, rows


@settings(max_examples=200)
@given(mutations(), st.booleans())
def test_a_mutated_plan_is_refused_in_one_line_or_runs_to_its_end(
    mutation: tuple[Plan, list[list[Action]]], through_text: bool
) -> None:
    plan, rows = mutation
    try:
        if through_text:
            mutated = from_rows([[str(action) for action in row] for row in rows], "mutated")
        else:
            mutated = replace(plan, ranks=tuple(map(tuple, rows)))
        validate(mutated)
    except ScheduleError as err:
        refusal = str(err)
    else:
        refusal = ""
    if refusal:
        assert "\n" not in refusal
        return
    assert not replay(mutated).blocked
    rendezvous.run(to_rows(lower(mutated)), one_at_a_time=False)


@settings(max_examples=80)
@given(plans(max_pp=4), st.data())
def test_a_swap_in_a_lowered_plan_is_refused_exactly_when_it_can_stop_the_run(plan: Plan, data: st.DataObject) -> None:
    """Both ways: what is refused as a deadlock does stop a machine with blocking messages, what passes does not."""
    lowered = lower(plan)
    row = data.draw(st.integers(0, plan.pp - 1))
    actions = list(lowered.ranks[row])
    index = data.draw(st.integers(0, len(actions) - 2))
    actions[index], actions[index + 1] = actions[index + 1], actions[index]
    mutated = replace(lowered, ranks=(*lowered.ranks[:row], tuple(actions), *lowered.ranks[row + 1 :]))
    try:
        validate(mutated)
    except ScheduleError as err:
        if "blocks in" in str(err):
            with pytest.raises(rendezvous.StuckError):
                rendezvous.run(to_rows(mutated), one_at_a_time=False)
        return
    rendezvous.run(to_rows(mutated), one_at_a_time=False)
