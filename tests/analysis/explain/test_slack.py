"""The slack of ops against runs in which each op takes longer by it, and by one nanosecond more."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from pptrace.analysis.explain.critical_path import bindings_of
from pptrace.analysis.op_slack import _least, meetings_of, slacks_of
from pptrace.model.tables import COMPUTE_KINDS
from pptrace.schedule.actions import Action
from pptrace.schedule.plan_table import PlanTable
from pptrace.schedule.registry import SCHEDULES, build
from pptrace.schedule.replay_table import makespans
from pptrace.slices import Slice
from pptrace.workflow.analyse import Analysis
from tests.support.analysed import analyse
from tests.support.extent import ALL
from tests.support.replayed_times import replayed_times
from tests.support.synthetic import Job, PaperRun, Recording, run_on_paper

NUM_GRAPHS = 1000 if ALL else 60
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
        slack, on_path = (matrix[0] for matrix in slacks_of(times, bindings_of(times), NO_MEETINGS))
        usual, each = int(makespans(table, durations, latency)), np.eye(len(table), dtype=np.int64)
        longer = durations + each * slack[:, np.newaxis]
        assert (makespans(table, longer, latency) == usual).all()
        assert (makespans(table, longer + each, latency) == usual + 1).all()
        assert (slack[on_path] == 0).all()
        shorter = durations - each * np.minimum(durations, 1)[:, np.newaxis]
        assert (makespans(table, shorter, latency)[~on_path] == usual).all()


def test_a_send_that_ended_before_the_receiver_came_held_up_nobody() -> None:
    """Buffered sends: the next op of the sender depends on no op of the receiver."""
    rng, latency, table = random.Random(5), 3, build("zbv", 2, 4).table
    sender, reader = table.dep[table.dep_is_message], table.dep_reader[table.dep_is_message]
    message = np.arange(len(sender))
    for _ in range(20):
        durations = np.array([rng.randint(10, 50) for _ in range(len(table))], dtype=np.int64)
        times = replayed_times(table, [durations], latency)
        end, before = times.end[0], times.before[0, reader]
        sent, asked = end[sender], np.where(before >= 0, end[before], 0)
        both = {"window": 0 * message, "match": message, "met_ns": np.maximum(sent, asked)}
        done = {True: sent + latency, False: np.maximum(asked, sent + latency)}
        ends = [
            {**both, "rank": table.rank[row], "ready": ready, "asked": ready, "done": done[is_send]}
            | {"moved_ns": done[is_send], "is_send": np.full(len(message), is_send)}
            for row, ready, is_send in ((sender, sent, True), (reader, asked, False))
        ]
        meetings = meetings_of(Slice({name: np.concatenate([part[name] for part in ends]) for name in ends[0]}))
        slacks, _ = slacks_of(times, bindings_of(times), meetings)
        assert (slacks >= 0).all()
        assert (slacks <= slacks_of(times, bindings_of(times), NO_MEETINGS)[0]).all()


def analysed(run: PaperRun) -> Analysis:
    return analyse(Recording(Job(run.plan), run).traces())


def measured_by_action(analysis: Analysis) -> dict[tuple[str, int, int], tuple[int, bool]]:
    """(slack, whether it is on the critical path) of each op of the only step, by kind, stage and microbatch."""
    found = analysis.op_slack
    ops = analysis.data.ops.assign(slack=found.slack_ns, on_path=found.on_critical_path == 1)
    rows = ops[ops["kind"].isin(COMPUTE_KINDS)]
    return {
        (kind, stage, microbatch): (slack, on_path)
        for kind, stage, microbatch, slack, on_path in zip(
            *(rows[name].tolist() for name in ("kind", "stage", "microbatch", "slack", "on_path")), strict=True
        )
    }


def slack_by_action(analysis: Analysis) -> dict[tuple[str, int, int], int]:
    return {key: slack for key, (slack, _) in measured_by_action(analysis).items()}


BLOCKING = ("1f1b", "gpipe", "zb-h1", "interleaved-1f1b", "zbv")


@pytest.mark.parametrize("seed", range(60 if ALL else 5))
def test_runs_with_blocking_messages_are_as_long_with_each_slack_and_longer_with_more(seed: int) -> None:
    """Messages for which both of their ranks wait, run again on paper, action by action: an op on the critical path has no slack,
    none off it makes the run shorter, and every slack is exact.
    """
    rng = random.Random(seed)
    plan = build(BLOCKING[seed % len(BLOCKING)], pp := rng.choice((2, 3, 4)), 2 * pp)
    latency = rng.choice((0, 5, 9, 40))
    actions = [action for rank in range(plan.pp) for action in plan.compute_actions(rank)]
    costs = {action: rng.randint(20, 99) for action in actions}

    def span(longer: Action | None = None, ns: int = 0) -> int:
        first, last = run_on_paper(plan, lambda action: costs[action] + ns * (action == longer), latency).window
        return last - first

    measured = measured_by_action(analysed(run_on_paper(plan, costs.__getitem__, latency)))
    assert len(measured) == len(actions)
    for action in actions:
        slack, on_path = measured[str(action.kind), action.stage, action.microbatch or 0]
        assert (span(action, slack), span(action, slack + 1)) == (span(), span() + 1)
        assert slack == 0 if on_path else span(action, -1) == span()


def test_a_trace_in_which_an_op_is_missing_has_no_slack() -> None:
    plan = build("1f1b", 2, 4)
    run = run_on_paper(plan, lambda action: 100, 9)
    assert min(slack_by_action(analysed(run)).values()) == 0
    shorter = replace(run, ranks=(run.ranks[0][:-1], run.ranks[1]))
    assert set(slack_by_action(analysed(shorter)).values()) == {-1}


def edges(columns: dict[str, list[int]]) -> Slice:
    return Slice({name: np.array(column) for name, column in columns.items()})


def test_ops_that_depend_on_themselves_have_no_slack() -> None:
    """Clocks that contradict each other may make circles."""
    circle = {"source": [0, 1, 2, 3], "reader": [1, 2, 1, 2], "slack": [5, 5, 5, 5]}
    assert _least(edges(circle), np.array([40, 30, 20, 10, 7])).tolist() == [-1, -1, -1, -1, 7]
    none = {"source": [0, 1, 3], "reader": [1, 2, 2], "slack": [5, 1, 50]}
    assert _least(edges(none), np.array([40, 30, 20, 60, 7])).tolist() == [26, 21, 20, 60, 7]
