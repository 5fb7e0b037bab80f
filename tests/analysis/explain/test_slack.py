"""The slack of ops against runs in which each op takes longer by it, and by one nanosecond more."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from pptrace.analysis.explain.binding import bindings_of
from pptrace.analysis.explain.slack import _Edges, _least, meetings_of, slacks_of
from pptrace.model.tables import COMPUTE_KINDS
from pptrace.schedule.actions import Action
from pptrace.schedule.plan_table import PlanTable
from pptrace.schedule.registry import SCHEDULES, build
from pptrace.schedule.replay_table import makespans
from pptrace.slices import Slice
from pptrace.workflow.analyse import Analysis, analyse
from tests.support.extent import ALL
from tests.support.replayed_times import replayed_times
from tests.support.synthetic import Job, PaperRun, Recording, run_on_paper

NUM_GRAPHS = 1000 if ALL else 150
NAMES = [name for name in SCHEDULES if name != "zb-auto"]
_OF_ENDS = ("window", "rank", "match", "ready", "asked", "done", "met_ns", "moved_ns")
_NOTHING = {name: np.empty(0, dtype=np.int64) for name in _OF_ENDS}
NO_MEETINGS = meetings_of(Slice(_NOTHING | {"is_send": np.empty(0, dtype=np.bool_)}))


def random_table(rng: random.Random) -> PlanTable:
    name, pp = rng.choice(NAMES), rng.choice((2, 4))
    return build(name, pp, rng.choice((2, 4)) * pp if "dualpipe" in name else pp * rng.randint(1, 2)).table


def test_a_replay_in_which_an_op_takes_its_slack_longer_is_as_long_and_with_one_nanosecond_more_one_longer() -> None:
    rng = random.Random(11)
    for _ in range(NUM_GRAPHS):
        table, latency = random_table(rng), rng.choice((0, 7))
        durations = np.array([rng.randint(0, 50) for _ in range(len(table))], dtype=np.int64)
        times = replayed_times(table, [durations], latency)
        slacks = slacks_of(times, bindings_of(times), NO_MEETINGS)
        usual, each = int(makespans(table, durations, latency)), np.eye(len(table), dtype=np.int64)
        longer = durations + each * slacks.slack[0][:, np.newaxis]
        assert (makespans(table, longer, latency) == usual).all()
        assert (makespans(table, longer + each, latency) == usual + 1).all()
        on_path = slacks.on_path[0]
        assert (slacks.slack[0][on_path] == 0).all()
        shorter = durations - each * np.minimum(durations, 1)[:, np.newaxis]
        assert (makespans(table, shorter, latency)[~on_path] == usual).all()


def analysed(run: PaperRun) -> Analysis:
    return analyse(Recording(Job(run.plan), run).traces())


def slack_by_action(analysis: Analysis) -> dict[tuple[str, int, int], int]:
    """The slack of each op of the only step, by kind, stage and microbatch."""
    ops = analysis.data.ops.assign(slack=analysis.op_slack.slack_ns)
    rows = ops[ops["kind"].isin(COMPUTE_KINDS)]
    return {
        (kind, stage, microbatch): slack
        for kind, stage, microbatch, slack in zip(
            *(rows[name].tolist() for name in ("kind", "stage", "microbatch", "slack")), strict=True
        )
    }


@pytest.mark.parametrize(
    ("name", "latency"), [("1f1b", 0), ("1f1b", 9), ("gpipe", 9), ("zb-h1", 5), ("interleaved-1f1b", 0)]
)
def test_a_run_with_blocking_messages_takes_no_longer_with_each_slack(name: str, latency: int) -> None:
    """Messages for which both of their ranks wait: run again on paper, action by action.

    Of messages that were posted together a rank sees the end of the last one, so that a slack may be too small.
    """
    rng = random.Random(name)
    plan = build(name, 3, 6 if name == "interleaved-1f1b" else 5)
    actions = [action for rank in range(plan.pp) for action in plan.compute_actions(rank)]
    costs = {action: rng.randint(20, 99) for action in actions}

    def span(longer: Action | None = None, ns: int = 0) -> int:
        first, last = run_on_paper(plan, lambda action: costs[action] + ns * (action == longer), latency).window
        return last - first

    slacks = slack_by_action(analysed(run_on_paper(plan, costs.__getitem__, latency)))
    slack = {action: slacks[str(action.kind), action.stage, action.microbatch or 0] for action in actions}
    assert {action for action in actions if span(action, slack[action]) != span()} == set()
    num_exact = sum(span(action, slack[action] + 1) == span() + 1 for action in actions)
    assert num_exact >= 0.85 * len(actions)


def test_a_trace_in_which_an_op_is_missing_has_no_slack() -> None:
    plan = build("1f1b", 2, 4)
    run = run_on_paper(plan, lambda action: 100, 9)
    assert min(slack_by_action(analysed(run)).values()) == 0
    shorter = replace(run, ranks=(run.ranks[0][:-1], run.ranks[1]))
    assert set(slack_by_action(analysed(shorter)).values()) == {-1}


def test_ops_that_depend_on_themselves_have_no_slack() -> None:
    """Clocks that contradict each other may make circles."""
    edges = _Edges(*(np.array(column) for column in ([0, 1, 2, 3], [1, 2, 1, 2], [5, 5, 5, 5])))
    assert _least(edges, np.array([40, 30, 20, 10, 7])).tolist() == [-1, -1, -1, -1, 7]
    edges = _Edges(*(np.array(column) for column in ([0, 1, 3], [1, 2, 2], [5, 1, 50])))
    assert _least(edges, np.array([40, 30, 20, 60, 7])).tolist() == [26, 21, 20, 60, 7]
