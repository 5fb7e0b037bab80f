"""Follow a run that goes on: the figures of each step, once all ranks have written it."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from pptrace.analysis.live_cost import LiveCosts, cost_of, own_share
from pptrace.analysis.slow_rank import PAST_STEPS, SlowRank, SlowRanks
from pptrace.errors import PptraceError, TraceError
from pptrace.live_records.codec import Flag, StepHead
from pptrace.live_records.file import LiveFile, LiveStep, live_files
from pptrace.regular import read_regular
from pptrace.workflow.live.op_times import has_ops, op_times
from pptrace.workflow.live.template import RankFigures, StepAnalyser, StepFigures
from pptrace.workflow.live.traces import wall_shift_ns

MOST_AT_ONCE = 32
"""Steps that are analysed together."""
MOST_COMPARED = 2000
"""Steps of which the cost of observing is found, the last ones."""
MOST_WAITING = 1000
"""Steps that wait for ranks which have not written them; of a rank that writes no more the others' steps are dropped."""
_LAUNCHES = "the host's times of ranges are those of launches, so compute is not known"
_NO_OPS = (
    "no range names an op, so that compute and bubbles are not known: only lengths of steps and sums of communication"
)
_NOT_RUNNING = ("ok", "failed", "interrupted", "timeout")


@dataclass(frozen=True, slots=True)
class LiveRank:
    """A rank in a step, ns: the figures of the report of the same name, and ``wait_ns``, its waiting in all communication.

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


@dataclass(frozen=True, slots=True)
class LiveStepFigures:
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


@dataclass(slots=True)
class _Costs:
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


@dataclass(slots=True)
class LiveRun:
    """The live files of a run directory, followed. ``last``: of the steps that are there at first, at least this many."""

    run_dir: Path
    last: int | None = None
    files: dict[int, LiveFile] = field(default_factory=dict)
    _waiting: dict[int, dict[int, LiveStep]] = field(default_factory=dict)
    _analyser: StepAnalyser = field(default_factory=StepAnalyser)
    _slow: SlowRanks = field(default_factory=SlowRanks)
    _lengths: deque[int] = field(default_factory=lambda: deque(maxlen=PAST_STEPS))
    _costs: _Costs = field(default_factory=lambda: _Costs())

    def poll(self) -> list[LiveStepFigures]:
        """The steps that are complete on all ranks since the last call, in order."""
        known = live_files(self.run_dir)
        for rank, path in known.items():
            if rank not in self.files:
                self.files[rank] = LiveFile(path, rank)
        for rank, file in self.files.items():
            for step in file.poll(self.last):
                self._waiting.setdefault(step.step, {})[rank] = step
        if not self.files or (len(self.files) < self.world_size and not self.has_ended):
            return []
        self.last = None
        complete = sorted(number for number, ranks in self._waiting.items() if len(ranks) == len(self.files))
        steps = [self._waiting.pop(number) for number in complete]
        for number in sorted(self._waiting)[:-MOST_WAITING]:
            del self._waiting[number]
        found = []
        for first in range(0, len(steps), MOST_AT_ONCE):
            together = steps[first : first + MOST_AT_ONCE]
            figures, notes = self._step_figures([ranks for ranks in together if _is_observed(ranks)])
            found += [self._one(ranks, figures.get(next(iter(ranks.values())).step), notes) for ranks in together]
        return found

    @property
    def world_size(self) -> int:
        """Ranks that the run has, as one of them says; 0 before that."""
        sizes = [file.facts.get("world_size") for file in self.files.values()]
        return max((size for size in sizes if isinstance(size, int)), default=0) or len(self.files) + 1

    @property
    def has_ended(self) -> bool:
        """Return whether run.json says that the run is over."""
        return status_of(self.run_dir) in _NOT_RUNNING

    @property
    def cost(self) -> LiveCosts:
        """Cost of observing, from the last steps."""
        return self._costs.costs

    def _step_figures(self, steps: Sequence[Mapping[int, LiveStep]]) -> tuple[dict[int, StepFigures], tuple[str, ...]]:
        """The figures of each step that has any, and why others have none."""
        on_device = sorted({str(file.facts.get("device")) for file in self.files.values()} - {"cpu"})
        if on_device:
            return {}, (f"ops run on {on_device[0]}: {_LAUNCHES}",)
        with_ops = [ranks for ranks in steps if all(has_ops(step) for step in ranks.values())]
        if not with_ops:
            return {}, (_NO_OPS,) if steps else ()
        facts = {rank: file.facts for rank, file in self.files.items()}
        try:
            return self._analyser.figures(with_ops, facts), ()
        except PptraceError as err:
            return {}, (" ".join(str(err).split()),)

    def _one(self, ranks: Mapping[int, LiveStep], known: StepFigures | None, notes: tuple[str, ...]) -> LiveStepFigures:
        heads = {rank: step.record.head for rank, step in ranks.items()}
        first = next(iter(heads.values()))
        observed = _is_observed(ranks)
        step_ns = max(head.dur_ns for head in heads.values())
        usual = median(self._lengths) if self._lengths else None
        self._lengths.append(step_ns)
        self._costs.add(tuple(heads.values()))
        starts = [head.begin_ns + wall_shift_ns(self.files[rank].facts) for rank, head in heads.items()]
        figures = LiveStepFigures(
            step=first.step,
            start_ns=min(starts),
            step_ns=step_ns,
            observed=observed,
            deviation=None if usual is None else step_ns / usual - 1,
            span_ns=None,
            slowest_rank=None,
            ranks=tuple(LiveRank(rank, head.dur_ns) for rank, head in heads.items()),
        )
        if not observed:
            return figures
        by_rank = {} if known is None else known.ranks
        computed = {rank: of_rank.compute_ns for rank, of_rank in by_rank.items() if of_rank.compute_ns is not None}
        return replace(
            figures,
            span_ns=None if known is None else known.span_ns,
            slowest_rank=max(computed, key=lambda rank: computed[rank]) if computed else None,
            ranks=tuple(_rank(ranks[rank], by_rank.get(rank)) for rank in ranks),
            slow_ranks=() if notes else self._slow_ranks(ranks),
            quantum_ns=max(step.record.quantum_ns for step in ranks.values()),
            notes=notes,
        )

    def _slow_ranks(self, ranks: Mapping[int, LiveStep]) -> tuple[SlowRank, ...]:
        waits = {rank: ns for rank, step in ranks.items() if (ns := step.record.head.core_wait_ns) >= 0}
        times = {rank: op_times(step) for rank, step in ranks.items()}
        return self._slow.add(next(iter(ranks.values())).step, times, waits)


def _is_observed(ranks: Mapping[int, LiveStep]) -> bool:
    return all(Flag.OBSERVED in step.record.head.flags for step in ranks.values())


def _rank(step: LiveStep, figures: RankFigures | None) -> LiveRank:
    head = step.record.head
    waited_ns = None if head.core_wait_ns < 0 else head.core_wait_ns
    known = LiveRank(step.rank, head.dur_ns, op_ns=head.op_ns, host_comm_ns=head.comm_ns, core_wait_ns=waited_ns)
    return known if figures is None else replace(known, **asdict(figures))


def cost_of_run(run_dir: Path) -> LiveCosts:
    """Cost of observing, from the last steps of a run."""
    costs, steps = _Costs(), dict[int, list[StepHead]]()
    files = live_files(run_dir)
    for rank, path in files.items():
        for step in LiveFile(path, rank).poll(MOST_COMPARED):
            steps.setdefault(step.step, []).append(step.record.head)
    for _, heads in sorted(steps.items()):
        if len(heads) == len(files):
            costs.add(heads)
    return costs.costs


def require_live(run_dir: Path) -> None:
    """Refuse a directory without live files whose run has ended, or is none.

    Raises:
        TraceError: with what to do.
    """
    if not live_files(run_dir) and status_of(run_dir) != "running":
        raise TraceError(
            f"{run_dir}: no live records; expected a run directory of `pptrace run --live`{_where_to_look(run_dir)}"
        )


def _where_to_look(run_dir: Path) -> str:
    """The newest of the runs inside a directory, for those who name the directory of several."""
    if not run_dir.exists():
        return ", which is made when the run begins"
    runs = [folder for folder in run_dir.iterdir() if live_files(folder)] if run_dir.is_dir() else []
    if not runs:
        return ""
    return f"; the newest one inside is {max(runs, key=lambda folder: folder.stat().st_mtime)}"


def status_of(run_dir: Path) -> str | None:
    """The status that run.json has; None where there is none."""
    try:
        run: Any = json.loads(read_regular(run_dir / "run.json"))
    except (OSError, ValueError, RecursionError):
        return None
    status = run.get("status") if isinstance(run, dict) else None
    return status if isinstance(status, str) else None
