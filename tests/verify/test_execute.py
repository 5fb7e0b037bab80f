"""Plans run in real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pptrace.errors import PptraceError
from pptrace.schedule.message_graph import Messaging, make_graph
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import SCHEDULES, build
from pptrace.simulator import uniform
from pptrace.verify import execute as execution
from pptrace.verify.execute import execute
from pptrace.verify.program import Workload, programs
from tests.support.extent import ALL

MS = 1_000_000
WAYS = list(Messaging)
SIZES = [("1f1b", 3, 4), ("zbv", 2, 4), ("dualpipe", 2, 4), ("zb-h1", 2, 3), ("interleaved-1f1b", 2, 2)]
CASES = [
    *((*size, way) for size in SIZES for way in WAYS if ALL or SIZES.index(size) == WAYS.index(way)),
    ("gpipe", 1, 2, Messaging.AHEAD),
]


def workload(
    plan: Plan,
    messaging: Messaging,
    forward_ms: int = 4,
    transfer_ms: int = 2,
    size: int = 100_000,
    prefetch: int = 0,
) -> Workload:
    durations = uniform(forward_ms * MS, 2 * forward_ms * MS).durations(plan)
    transfers = [transfer_ms * MS] * plan.table.num_messages
    return Workload(plan, durations.tolist(), transfers, messaging.name.lower(), size, prefetch)


def predicted(work: Workload, messaging: Messaging) -> int:
    durations, transfers = (np.array([part], dtype=float) for part in (work.durations, work.transfers))
    return int(make_graph(work.plan, messaging, work.prefetch).ends(durations, transfers).max())


@pytest.mark.parametrize(("name", "pp", "microbatches", "messaging"), CASES)
def test_a_step_takes_at_least_what_its_replay_says(
    name: str, pp: int, microbatches: int, messaging: Messaging
) -> None:
    work = workload(build(name, pp, microbatches), messaging)
    least = predicted(work, messaging)
    span = execute(work, least)
    assert least <= span < 4 * least  # other processes have the cores too


def test_receives_posted_ahead_save_what_the_replay_says() -> None:
    plan = build("gpipe", 2, 6)
    works = [workload(plan, Messaging.BLOCKING_RECEIVES, 20, 19, 1000, prefetch) for prefetch in (0, 1)]
    blocking, prefetched = (predicted(work, Messaging.BLOCKING_RECEIVES) for work in works)
    assert prefetched < blocking
    assert prefetched <= execute(works[1], prefetched) < blocking


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("messaging", WAYS)
def test_every_message_has_two_ends_and_every_op_is_there(name: str, messaging: Messaging) -> None:
    work = workload(build(name, 4, 8), messaging)
    rows = programs(work)
    ends = [
        (message, min(rank, peer), max(rank, peer), is_send)
        for rank, program in enumerate(rows)
        for what, group in program
        if what == "transfers"
        for message, peer, is_send, _ in group
    ]
    sends, receives = ({end[:3] for end in ends if end[3] is side} for side in (True, False))
    assert sends == receives
    assert len(ends) == 2 * work.plan.table.num_messages
    assert [[ns for what, ns in program if what == "op"] for program in rows] == [
        list(work.durations[begin:end])
        for begin, end in zip(work.plan.table.rank_ptr[:-1], work.plan.table.rank_ptr[1:], strict=True)
    ]


def test_a_step_that_does_not_end_is_given_up_and_no_process_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []

    class Watched(subprocess.Popen):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(execution.subprocess, "Popen", Watched)
    monkeypatch.setattr(execution, "_LIMIT_S", 0.6)
    with pytest.raises(PptraceError, match="did not end their step within 1 s"):
        execute(workload(build("1f1b", 2, 2), Messaging.AHEAD, forward_ms=60_000), predicted_ns=1)
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)


def test_more_ranks_than_a_machine_should_start_are_refused() -> None:
    with pytest.raises(PptraceError, match="--verify: 65 pipeline ranks; expected at most 64"):
        execute(workload(build("gpipe", 65, 1), Messaging.AHEAD), 1)


def test_the_script_of_a_rank_needs_no_package() -> None:
    script = Path(execution.__file__).with_name("rank.py")
    ended = subprocess.run(
        [sys.executable, "-I", "-S", script],
        input='{"program": [["op", 1000]], "messaging": "ahead", "prefetch": 0, "message_bytes": 0, "peers": {}}\n0 0\n',
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    ready, times = ended.stdout.splitlines()
    began, end = map(int, times.split())
    assert ready == "ready"
    assert end - began == 1000
