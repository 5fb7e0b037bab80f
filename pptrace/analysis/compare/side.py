"""One side of a comparison: the runs of one program, taken one after the other, as one series of steps that knows its runs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import combinations, pairwise

import numpy as np
from msgspec import Struct, field

from pptrace.analysis.compare.bootstrap import NOTHING_KNOWN, Prior, Typical, typical_of, typical_of_few, typical_part
from pptrace.analysis.compare.facts import Facts
from pptrace.analysis.compare.figures import CAUSE, Series, StepFigures
from pptrace.analysis.compare.matching import joined
from pptrace.analysis.compare.recording import NOT_KNOWN, Recording, of_runs
from pptrace.analysis.compare.run_to_run import MeanStep, Order, mean_step_of
from pptrace.analysis.compare.undisturbed import OpTimes, Steadiness, least_disturbed
from pptrace.analysis.shared_devices import USUAL_CORE_WAIT
from pptrace.errors import TraceError
from pptrace.model.known import all_known
from pptrace.model.tables import Int64
from pptrace.model.wording import counted, listed
from pptrace.slices import Array


class ComparedRun(Struct, frozen=True, eq=False, dict=True):
    """One run as far as it is compared; ``warnings`` are lines about it, ``name`` is where it was read.

    ``core_wait`` is the share of the time for which a rank waited for a core, the mean over ranks; None where it is not known.
    ``op_times`` are those of the ops of its plan, None where it has none.
    ``steadiness`` is that of its ops, None where too few tell. ``recording`` is how it was recorded.
    ``period`` is its first and its last time, ns; None where it is not known.
    """

    figures: StepFigures
    schedule: str
    num_ranks: int
    facts: Facts = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    core_wait: float | None = None
    op_times: OpTimes | None = None
    recording: Recording = NOT_KNOWN
    name: str = ""
    period: tuple[int, int] | None = None
    steadiness: Steadiness | None = None

    @property
    def is_disturbed(self) -> bool:
        """Return whether its ranks waited for a core for longer than is usual."""
        return (self.core_wait or 0.0) > USUAL_CORE_WAIT

    @cached_property
    def undisturbed(self) -> Typical | None:
        """The step without what disturbed it; None where too few steps or no plan tell."""
        return None if self.op_times is None else self.op_times.undisturbed()

    def typical(self, series: Int64, known: Prior | None = None) -> Typical:
        """The typical value of a series of its steps, of few of them by what is ``known`` before. A wait for a core may be part
        of any figure of the step.
        """
        typical = typical_of(series, self.core_wait_ns)
        return typical if known is None or typical.deviation is not None else typical_of_few(series, known)

    @property
    def core_wait_ns(self) -> float:
        """The time of a step for which a rank waited for a core; 0 where it is not known."""
        return (self.core_wait or 0.0) * float(np.median(self.figures.window))


class Side(Struct, frozen=True, eq=False, dict=True):
    """The runs of one side, one or several, all of one program."""

    name: str
    runs: tuple[ComparedRun, ...]

    @cached_property
    def figures(self) -> StepFigures:
        """The figures of the steps of all runs, run after run."""
        return joined([run.figures for run in self.runs])

    @property
    def schedule(self) -> str:
        return self.runs[0].schedule

    @property
    def num_ranks(self) -> int:
        return self.runs[0].num_ranks

    @property
    def fewest_steps(self) -> int:
        """The number of whole steps of the run that has fewest."""
        return min(run.figures.num_steps for run in self.runs)

    @property
    def is_disturbed(self) -> bool:
        """Return whether the ranks of any run waited for a core for longer than is usual."""
        return any(run.is_disturbed for run in self.runs)

    @cached_property
    def recording(self) -> Recording:
        """The recording of its runs."""
        return of_runs([run.recording for run in self.runs])

    def undisturbed(self) -> list[Typical] | None:
        """The step of each run without what disturbed it; None where one does not tell."""
        return all_known(run.undisturbed for run in self.runs)

    def typical(
        self, series: Series, prior_of: Callable[[Steadiness | None], Prior | None] = lambda _: None
    ) -> list[Typical] | None:
        """The typical value of each run, of a series of all steps (NaN where it is not known); None where a run lacks it.
        ``prior_of`` is what is known of a run with few steps before, by its ops.
        """
        parts = [self._known(part) for part in self._of_runs(series)]
        if not all(part.size for part in parts):
            return None
        return [run.typical(part, prior_of(run.steadiness)) for run, part in zip(self.runs, parts, strict=True)]

    def typical_part(self, series: Series, lengths: Int64) -> list[Typical] | None:
        """The same of a part that sums to the ``lengths`` of all steps with others, by those whose lengths are in the middle."""
        of_runs = [
            (part[is_known], of_steps[is_known])
            for part, of_steps in zip(self._of_runs(series), self._of_runs(lengths), strict=True)
            for is_known in (~np.isnan(part),)
        ]
        if not all(part.size for part, _ in of_runs):
            return None
        return [typical_part(*of, run.core_wait_ns) for run, of in zip(self.runs, of_runs, strict=True)]

    def typical_steps(self, lengths: Int64) -> list[Typical]:
        """The typical step of each run: of the recorded ones, or of those that were timed unrecorded. Of few steps it is hardly
        known, and not unknown.
        """
        typical = self.typical(lengths.astype(np.float64), lambda of: NOTHING_KNOWN if of is None else of.of_steps)
        assert typical is not None  # all runs have whole steps
        measured = [run.recording.measured for run in self.runs]
        if self.figures.period is not lengths:
            return typical
        return [
            of_run if unrecorded is None else run.typical(unrecorded)
            for run, of_run, unrecorded in zip(self.runs, typical, measured, strict=True)
        ]

    def mean_steps(self) -> list[MeanStep] | None:
        """The mean step of each run: of the recorded ones, or of those that were timed unrecorded; None where the time from step
        to step is not known.
        """
        if self.figures.period is None:
            return None
        recorded = self._of_runs(self.figures.period)
        measured = [run.recording.measured for run in self.runs]
        return [
            mean_step_of(periods if unrecorded is None else unrecorded, run.core_wait_ns)
            for run, periods, unrecorded in zip(self.runs, recorded, measured, strict=True)
        ]

    def typical_compute(self, series: Series) -> list[Typical] | None:
        """The same of what ops compute; of runs with few steps not known without evidence of their ops."""
        return self.typical(series, lambda of: None if of is None else of.of_ops)

    @property
    def prior(self) -> tuple[Prior, bool]:
        """(prior of the steps of the run of which least is known before they are seen; whether that is by its ops)."""
        known = all_known(run.steadiness for run in self.runs)
        if known is None:
            return NOTHING_KNOWN, False
        return max((of.of_steps for of in known), key=lambda prior: prior.lasting), True

    def least_disturbed(self, series: Series) -> list[Typical] | None:
        """The same in the least disturbed steps; None where a run has too few steps as well."""
        return all_known(least_disturbed(self._known(part)) for part in self._of_runs(series))

    def lines(self) -> Iterator[tuple[str, str]]:
        """(warning, of which runs it is). Of those that differ in numbers alone the first one."""
        alike: dict[tuple[str, int], list[str]] = {}
        for run in self.runs:
            seen: Counter[str] = Counter()
            for line in dict.fromkeys(run.warnings):
                words = _NUMBER.sub("", line)
                alike.setdefault((words, seen[words]), []).append(line)
                seen[words] += 1
        for lines in alike.values():
            is_same = len(set(lines)) == 1
            of_these = f" ({len(lines)} of {len(self.runs)} runs{'' if is_same else ', numbers are of the first'})"
            yield lines[0], self.name + ("" if is_same and len(lines) == len(self.runs) else of_these)

    def _of_runs(self, series: Array) -> list[Array]:
        ends = np.cumsum([run.figures.num_steps for run in self.runs])
        return np.split(series, ends[:-1])

    @staticmethod
    def _known(series: Series) -> Int64:
        """The steps in which a figure is known, ns."""
        return np.rint(series[~np.isnan(series)]).astype(np.int64)


def side_of(name: str, runs: Sequence[ComparedRun]) -> Side:
    """The side of these runs.

    Raises:
        TraceError: they are of different programs, or one is a copy of another; the message is one line.
    """
    for run in runs[1:]:
        for what, value, first in zip(_SAME, _structure(run), _structure(runs[0]), strict=True):
            if value != first:
                raise TraceError(
                    f"{name}: {run.name} has {what} {value} and {runs[0].name} {first}; expected several runs of one program, "
                    "all of them whole; leave out those that differ"
                )
    for one, other in combinations(runs, 2):
        if one.figures.is_copy(other.figures):
            raise TraceError(
                f"{name}: {other.name} has the steps of {one.name}, to the nanosecond; expected runs that were taken one after "
                "the other, since a copy shows nothing of how runs differ; leave it out"
            )
    return Side(name, tuple(runs))


_NUMBER = re.compile(r"\d+(\.\d+)?")

_SAME = ("schedule", "ranks", "stages", "microbatches", "chunks per rank", "times of", "steps")


def _structure(run: ComparedRun) -> tuple[object, ...]:
    """The facts that all runs of a side have to have in common."""
    facts = (run.facts.get(fact) for fact in ("microbatches", "chunks per rank"))
    times = "devices" if run.recording.has_devices else "the host"
    steps = "with known causes" if CAUSE in run.figures.parts else "without known causes"
    return run.schedule, run.num_ranks, run.figures.num_stages, *facts, times, steps


def order_of(a: Side, b: Side) -> Order | None:
    """The order of the runs; None where their times do not tell it."""
    periods = all_known(run.period for side in (a, b) for run in side.runs)
    if periods is None or any(end > start for (_, end), (start, _) in pairwise(sorted(periods))):
        return None
    places = [sorted(periods).index(period) for period in periods]
    return Order(tuple(places[: len(a.runs)]), tuple(places[len(a.runs) :]))


def describe_counts(a: Side, b: Side) -> str:
    """The number of runs in words: "5 runs of each"; "" with one of each."""
    counts = len(a.runs), len(b.runs)
    if counts == (1, 1):
        return ""
    if counts[0] == counts[1]:
        return f"{counts[0]} runs of each"
    return listed(f"{counted(count, 'run')} of {side.name}" for count, side in zip(counts, (a, b), strict=True))
