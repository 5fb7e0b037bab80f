"""Start the processes, let them run some steps, and measure how long these take."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median_low

from pptrace.errors import PptraceError
from pptrace.verify.program import Workload, programs

STEPS = 5
_HEAD_START_NS = 20_000_000
"""From the order to begin until a step begins: all processes have read it by then."""
_MOST_RANKS = 64
_START_S = 60.0
_LIMIT_TIMES, _LIMIT_S = 20, 60.0
"""A step that takes so many times as long as predicted, and this beyond it, is given up."""


def execute(work: Workload, predicted_ns: int) -> int:
    """Run a step of a plan in real processes, a few times. Returns the median of its lengths, ns.

    Raises:
        PptraceError: there are more ranks than this machine should start, or they do not end.
    """
    if work.plan.pp > _MOST_RANKS:
        raise PptraceError(
            f"--verify: {work.plan.pp} pipeline ranks; expected at most {_MOST_RANKS}, a process for each"
        )
    limit_s = _LIMIT_S + _LIMIT_TIMES * predicted_ns / 1e9
    with _processes(work) as processes:
        _answers(processes, _START_S)
        spans = []
        for step in range(STEPS + 1):
            at = time.monotonic_ns() + _HEAD_START_NS
            for process in processes:
                _write(process, f"{step} {at}")
            times = [tuple(map(int, line.split())) for line in _answers(processes, limit_s)]
            spans.append(max(ended for _, ended in times) - min(began for began, _ in times))
    return median_low(spans[1:])  # the first one warms up


@contextmanager
def _processes(work: Workload) -> Iterator[list[subprocess.Popen[str]]]:
    """The processes of all ranks, with a socket between any two that exchange messages; they end with the block."""
    rows = programs(work)
    pairs = sorted(
        {
            (min(rank, peer), max(rank, peer))
            for rank, program in enumerate(rows)
            for what, group in program
            if what == "transfers"
            for _, peer, *_ in group
        }
    )
    with ExitStack() as stack:
        ends: list[dict[int, socket.socket]] = [{} for _ in rows]
        for first, second in pairs:
            ends[first][second], ends[second][first] = map(stack.enter_context, socket.socketpair())
        processes: list[subprocess.Popen[str]] = []
        stack.callback(_end, processes)
        for program, peers in zip(rows, ends, strict=True):  # each one gets its own ends
            numbers = {peer: end.fileno() for peer, end in peers.items()}
            process = subprocess.Popen(
                [sys.executable, "-S", str(Path(__file__).with_name("rank.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=list(numbers.values()),
                text=True,
            )
            processes.append(process)
            setting = {"program": program, "messaging": work.messaging, "prefetch": work.prefetch, "peers": numbers}
            _write(process, json.dumps(setting | {"message_bytes": work.message_bytes}))
        yield processes


def _write(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    except OSError:
        raise PptraceError(
            "--verify: a process ended before its step; is there memory for one process per rank?"
        ) from None


def _answers(processes: Sequence[subprocess.Popen[str]], limit_s: float) -> list[str]:
    """A line of each process; all of them are ended when that takes longer than a limit."""
    timer = threading.Timer(limit_s, _end, [processes])
    timer.start()
    try:
        lines = []
        for process in processes:
            assert process.stdout is not None
            lines.append(process.stdout.readline())
    finally:
        timer.cancel()
    if not all(lines):
        raise PptraceError(
            f"--verify: the processes did not end their step within {limit_s:.0f} s, or were ended; nothing is verified"
        )
    return lines


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    """End all processes; whatever they run, nothing is lost."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):  # what was not written yet cannot be
                    stream.close()
