"""Follow a run that goes on: the figures of each step, once all ranks have written it.

The steps that are new are analysed together, as those of any trace: ten of them take little longer than one.

Live records become traces of marks, so that their figures are those of any trace (docs/report.md).
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from pptrace.analysis.live_cost import LiveCosts, cost_of, own_share
from pptrace.analysis.result import RankStep, StepReport
from pptrace.analysis.slow_rank import PAST_STEPS, OpTimesByKind, SlowRank, SlowRanks, op_times
from pptrace.errors import PptraceError, TraceError
from pptrace.hang_diagnosis.calls import rank_text
from pptrace.ingest.inputs.resolve import RUN_FILE, ranks_of_run, run_of
from pptrace.live_records.codec import Flag, LiveStep, StepHead
from pptrace.live_records.file import MOST_PROGRAMS, LiveFile, live_files
from pptrace.marks import METADATA_KEY
from pptrace.model.known import all_known
from pptrace.model.traces import Category, Events, InputFormat, Trace
from pptrace.workflow.analyse import measure

_NUMBER = re.compile(r" (step|handle|seq)=(\d+)", re.ASCII)
_PER_STEP = 1 << 20
"""Handles and sequence numbers count within a step; those of the next step begin so much higher."""


def trace_of(rank: int, facts: Mapping[str, Any], steps: Sequence[LiveStep]) -> Trace:
    """A trace of these observed steps of one rank, in wall-clock time."""
    names = [name for step in steps for name in _names_of(step)]
    number = {name: index for index, name in enumerate(dict.fromkeys(names))}
    starts = np.concatenate([step.begin_ns for step in steps])
    ends = np.concatenate([step.end_ns for step in steps])
    order = np.lexsort((starts - ends, starts))
    num = len(order)
    host = np.full(num, -1, dtype=np.int64)
    events = Events(
        category=np.full(num, Category.ANNOTATION, dtype=np.int8),
        name_id=np.array([number[name] for name in names], dtype=np.int32)[order],
        start_ns=starts[order] + wall_shift_ns(facts),
        dur_ns=(ends - starts)[order],
        device=host.astype(np.int32),
        stream=host,
        thread=np.zeros(num, dtype=np.int64),
        correlation=host,
        names=tuple(number),
    )
    return Trace(
        path="",
        format=InputFormat.RUN,
        rank=rank,
        producer=METADATA_KEY,
        events=events,
        metadata=facts,
    )


def wall_shift_ns(facts: Mapping[str, Any]) -> int:
    """Time that is added to a rank's monotonic times to have wall-clock ones, ns; 0 where the facts do not tell."""
    clock = facts.get("clock")
    start = clock.get("start") if isinstance(clock, Mapping) else None
    if not isinstance(start, Mapping):
        return 0
    wall, monotonic = start.get("time_ns"), start.get("perf_counter_ns")
    return wall - monotonic if isinstance(wall, int) and isinstance(monotonic, int) else 0


def _names_of(step: LiveStep) -> list[str]:
    """The names of its ranges with its own number, and with handles and sequence numbers that no other step has."""

    def renumbered(match: re.Match[str]) -> str:
        return f" {match[1]}={step.head.step if match[1] == 'step' else step.head.step * _PER_STEP + int(match[2])}"

    return [_NUMBER.sub(renumbered, name) for name in step.names]


MOST_AT_ONCE = 64
"""Steps that are analysed together."""
MOST_COMPARED = 2000
"""Steps of which the cost of observing is found, the last ones."""
MOST_WAITING = 1000
"""Steps that wait for ranks which have not written them; of a rank that writes no more the others' steps are dropped."""
_LAUNCHES = "the host's times of ranges are those of launches, so compute is not known"
_ONLY_SUMS = "compute and bubbles are not known: only lengths of steps and sums of communication"
_NO_OPS = f"no range names an op, so that {_ONLY_SUMS}"
_OTHER_ORDER = f"the ranges of a rank are in none of its first {MOST_PROGRAMS} orders, so that {_ONLY_SUMS}"

RanksOfStep = Mapping[int, LiveStep]
"""A step as each rank has written it."""


class LiveRank(Struct, frozen=True):
    """A rank in a step, ns: the figures of the report of the same names, and ``wait_ns``, its waiting in all communication.

    ``op_ns`` and ``host_comm_ns`` are the sums of its ops' and communication's ranges on the host, known without any recognition;
    ``core_wait_ns`` is for how long its thread was ready to run and had no core.
    """

    rank: int
    step_ns: int
    compute_ns: int | None = None
    exposed_comm_ns: int | None = None
    bubble_ns: int | None = None
    not_compute_ns: int | None = None
    wait_ns: int | None = None
    op_ns: int | None = None
    host_comm_ns: int | None = None
    core_wait_ns: int | None = None


class LiveStepFigures(Struct, frozen=True):
    """A step of all ranks. ``start_ns`` is wall-clock time, ``step_ns`` the longest of the ranks' steps, ``span_ns`` as reported.

    ``deviation`` is ``step_ns`` over the median of the steps before, minus 1, None of the first; ``slowest_rank`` has computed
    longest. ``observed`` is False of the steps in between, of which the bounds alone are known.
    """

    step: int
    start_ns: int
    step_ns: int
    observed: bool
    deviation: float | None
    span_ns: int | None
    slowest_rank: int | None
    ranks: tuple[LiveRank, ...]
    slow_ranks: tuple[SlowRank, ...] = ()
    quantum_ns: int | None = None
    notes: tuple[str, ...] = ()


class _Costs(Struct):
    """Lengths of the last steps, and what ranks counted as their own time."""

    bounds: deque[tuple[int, int, bool, bool]] = field(default_factory=lambda: deque(maxlen=MOST_COMPARED))
    own: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=MOST_COMPARED))

    def add(self, heads: Sequence[StepHead]) -> None:
        """Add a step of all ranks."""
        observed = all(Flag.OBSERVED in head.flags for head in heads)
        profiled = any(Flag.PROFILED in head.flags for head in heads)
        self.bounds.append((heads[0].step, max(head.dur_ns for head in heads), observed, profiled))
        self.own.extend((head.own_ns, head.dur_ns) for head in heads if head.own_ns and not profiled)

    @property
    def costs(self) -> LiveCosts:
        return LiveCosts(cost_of(self.bounds), own_share(self.own))


class LiveRun(Struct):
    """The live files of a run directory, followed. ``last``: of the steps that are there at first, at least this many."""

    run_dir: Path
    last: int | None = None
    files: dict[int, LiveFile] = field(default_factory=dict)
    _waiting: dict[int, dict[int, LiveStep]] = field(default_factory=dict)
    _slow: SlowRanks = field(default_factory=SlowRanks)
    _lengths: deque[int] = field(default_factory=lambda: deque(maxlen=PAST_STEPS))
    _costs: _Costs = field(default_factory=_Costs)

    def poll(self) -> Iterator[LiveStepFigures]:
        """Yield the steps that are whole on all ranks since the last call, in order, without what explains them.

        Those that come together, and can be analysed, are from one partition.
        """
        for steps in self.whole_steps():
            notes = {number: (note,) for number, ranks in steps.items() if (note := self._why_unknown(ranks))}
            known = [ranks for number, ranks in steps.items() if number not in notes]
            reports: dict[int, StepReport] = {}
            times: dict[int, dict[int, OpTimesByKind]] = {}
            reasons: tuple[str, ...] = ()
            try:
                if known:
                    measured = measure(self.traces(known), len(self.files))
                    reports, times = {step.step: step for step in measured.steps}, op_times(measured.data)
                    reasons = measured.warnings
            except PptraceError as err:
                reasons = (" ".join(str(err).split()),)
            for number, ranks in steps.items():
                yield self._step(number, ranks, reports.get(number), times.get(number), notes.get(number, reasons))

    def whole_steps(self) -> Iterator[dict[int, RanksOfStep]]:
        """Yield the steps that all ranks have written since the last call by number, some at a time."""
        for rank, path in live_files(self.run_dir).items():
            if rank not in self.files:
                self.files[rank] = LiveFile(path, self.last)
        unread = {rank: file.poll() for rank, file in self.files.items()}
        while unread:
            for rank, steps in list(unread.items()):
                some = list(islice(steps, MOST_AT_ONCE))
                for step in some:
                    self._waiting.setdefault(step.head.step, {})[rank] = step
                if not some:
                    del unread[rank]
            whole: list[int] = []
            if len(self.files) >= self.world_size or self.has_ended:
                whole = sorted(number for number, ranks in self._waiting.items() if len(ranks) == len(self.files))
            for first in range(0, len(whole), MOST_AT_ONCE):
                yield {number: self._waiting.pop(number) for number in whole[first : first + MOST_AT_ONCE]}
            for number in sorted(self._waiting)[:-MOST_WAITING]:
                del self._waiting[number]

    def traces(self, steps: Collection[RanksOfStep]) -> list[Trace]:
        """Some whole steps as traces, one of each rank."""
        return [trace_of(rank, of_rank, [ranks[rank] for ranks in steps]) for rank, of_rank in self._facts().items()]

    def _facts(self) -> dict[int, Mapping[str, Any]]:
        """The facts of each rank, with one reading of the wall clock for all of a host, whose monotonic times compare exactly."""
        clocks: dict[str, object] = {}
        return {
            rank: {**file.facts, "clock": clocks.setdefault(str(file.facts.get("host", rank)), file.facts.get("clock"))}
            for rank, file in sorted(self.files.items())
        }

    @property
    def world_size(self) -> int:
        """Ranks that the run has, as one of them says; one more than there are files before that."""
        sizes = [file.facts.get("world_size") for file in self.files.values()]
        return max((size for size in sizes if isinstance(size, int)), default=0) or len(self.files) + 1

    @property
    def has_ended(self) -> bool:
        """Return whether run.json says that the run is over."""
        return status_of(self.run_dir) not in (None, "running")

    @property
    def early_end(self) -> str | None:
        """Line where records end before their ranks do, as on a full disk; None where nothing says so, after the last poll."""
        last = {rank: file.last_step for rank, file in self.files.items()}
        cut = [rank for rank, file in self.files.items() if file.is_cut]
        seen = {}
        for entry in ranks_of_run(run_of(self.run_dir)):
            rank, steps = entry.get("rank"), entry.get("steps_seen")
            if isinstance(rank, int) and isinstance(steps, int) and steps > last.get(rank, steps) + 1:
                seen[rank] = steps
        why = (
            "a full disk, or a killed rank" if self.has_ended else "a full disk, a killed rank, or one that writes now"
        )
        reasons = [f"what {rank_text(cut)} wrote after it is cut ({why})"] if cut else []
        reasons += [f"{rank_text(seen)} went on to step {max(seen.values()) - 1}"] if seen else []
        end = min(last.values(), default=-1)
        where = f"end with step {end}" if end >= 0 else "end before the first step does"
        return f"the live records {where}: {'; '.join(reasons)}" if reasons else None

    @property
    def cost(self) -> LiveCosts:
        """Cost of observing, from the last steps."""
        return self._costs.costs

    def _why_unknown(self, ranks: RanksOfStep) -> str | None:
        """Reason why a step is not analysed; None where it is."""
        on_device = sorted({str(file.facts.get("device")) for file in self.files.values()} - {"cpu"})
        if on_device:
            return f"ops run on {on_device[0]}: {_LAUNCHES}"
        if not all(step.head.op_ns for step in ranks.values()):
            return _NO_OPS
        return None if all(step.names for step in ranks.values()) else _OTHER_ORDER

    def _step(
        self,
        number: int,
        ranks: RanksOfStep,
        report: StepReport | None,
        times: Mapping[int, OpTimesByKind] | None,
        reasons: tuple[str, ...],
    ) -> LiveStepFigures:
        """The figures of a step; ``reasons`` are those why some of them may not be known."""
        heads = {rank: ranks[rank].head for rank in sorted(ranks)}
        observed = all(Flag.OBSERVED in head.flags for head in heads.values())
        step_ns, facts = max(head.dur_ns for head in heads.values()), self._facts()
        usual = median(self._lengths) if self._lengths else None
        self._lengths.append(step_ns)
        self._costs.add(list(heads.values()))
        reported = {} if report is None else {rank.rank: rank for rank in report.ranks}
        figures = tuple(_rank(rank, head, reported.get(rank)) for rank, head in heads.items())
        computed = {rank.rank: rank.compute_ns for rank in figures if rank.compute_ns is not None}
        is_unknown = observed and any(rank.bubble_ns is None for rank in figures)
        return LiveStepFigures(
            step=number,
            start_ns=min(head.begin_ns + wall_shift_ns(facts[rank]) for rank, head in heads.items()),
            step_ns=step_ns,
            observed=observed,
            deviation=None if usual is None else step_ns / usual - 1,
            span_ns=None if report is None else report.span_ns,
            slowest_rank=max(computed, key=lambda rank: computed[rank]) if computed else None,
            ranks=figures,
            slow_ranks=() if times is None else self._slow.add(number, times, core_waits(ranks)),
            quantum_ns=max(step.quantum_ns for step in ranks.values()) if observed else None,
            notes=reasons if is_unknown else (),
        )


def core_waits(ranks: RanksOfStep) -> dict[int, int]:
    """For how long each rank waited for a core, where that is known, ns."""
    return {rank: ns for rank, step in ranks.items() if (ns := step.head.core_wait_ns) >= 0}


def _rank(rank: int, head: StepHead, report: RankStep | None) -> LiveRank:
    if Flag.OBSERVED not in head.flags:
        return LiveRank(rank, head.dur_ns)
    waited_ns = None if head.core_wait_ns < 0 else head.core_wait_ns
    known = LiveRank(rank, head.dur_ns, op_ns=head.op_ns, host_comm_ns=head.comm_ns, core_wait_ns=waited_ns)
    if report is None:
        return known
    waits = all_known(comm.wait_ns for comm in report.comms)
    return replace(
        known,
        compute_ns=report.compute_ns,
        exposed_comm_ns=report.exposed_comm_ns,
        bubble_ns=report.bubble_ns,
        not_compute_ns=report.not_compute_ns,
        wait_ns=None if waits is None else sum(waits),
    )


def cost_of_run(run_dir: Path) -> LiveCosts:
    """Cost of observing, from the last steps of the ranks that wrote into this directory: a node's may be some of all."""
    costs, steps, paths = _Costs(), dict[int, list[StepHead]](), live_files(run_dir).values()
    for path in paths:
        for step in LiveFile(path, MOST_COMPARED).poll():
            steps.setdefault(step.head.step, []).append(step.head)
    for _, heads in sorted(steps.items()):
        if len(heads) == len(paths):
            costs.add(heads)
    return costs.costs


def require_live(run_dir: Path) -> None:
    """Refuse a directory without live files whose run has ended, or is none.

    Raises:
        TraceError: with what to do.
    """
    if live_files(run_dir) or status_of(run_dir) == "running":
        return
    where = "" if run_dir.exists() else ", which is made when the run begins"
    if run_dir.is_dir() and (runs := [folder for folder in run_dir.iterdir() if live_files(folder)]):
        where = f"; the newest one inside is {max(runs, key=lambda folder: folder.stat().st_mtime)}"
    raise TraceError(f"{run_dir}: no live records; expected a run directory of `pptrace run --live`{where}")


def status_of(run_dir: Path) -> str | None:
    """The status that run.json has, ``killed`` where it is out of date; None where there is none."""
    run = run_of(run_dir)
    status = run.get("status")
    if status == "running" and _is_killed(run, run_dir):
        return "killed"
    return status if isinstance(status, str) else None


_QUIET_S = 30.0


def _is_killed(run: Mapping[str, Any], run_dir: Path) -> bool:
    """Return whether the launcher was a process of this host and is no more, and no rank writes any longer."""
    host, pid = run.get("host"), run.get("pid")
    if os.name != "posix" or not isinstance(pid, int) or not str(host).startswith(f"{socket.gethostname()}-"):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        written = (path.stat().st_mtime for path in (run_dir / RUN_FILE, *live_files(run_dir).values()))
        return max(written) < time.time() - _QUIET_S
    except (OSError, OverflowError):  # somebody else's, or no number of a process
        return False
    return False
