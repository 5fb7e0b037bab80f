"""Findings about single steps: outliers, and changes of the steps' length within the run.

Findings on what takes time outside the pipeline, from its last op to the first one of the next step.

Findings from what steps would gain, and shares in words: of the typical step, with those of all steps where they differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
from msgspec import Struct

from pptrace.analysis.part_words import OUTSIDE_WORDS, SPREAD_STATE
from pptrace.analysis.result import Finding, Severity, StepReport, typical_of
from pptrace.analysis.steps.outside_pipeline import COMPUTE, DATA_PARALLEL, HOST, OTHER, UNKNOWN_RANK, UNRECORDED
from pptrace.analysis.stragglers.reason import LEAST_ANYWHERE, LEAST_SHARE, gain_interval
from pptrace.analysis.whole_run import OUTSIDE, Cause, StepChange, StepOutlier, StepSeries
from pptrace.marks import Collective
from pptrace.model.known import sum_of
from pptrace.model.mesh import MeshSizes
from pptrace.model.tables import Int64

_FAR_LESS = 0.5


class Shares(Struct, frozen=True):
    """Shares of the ``typical`` step, and of a mean one of ``mean_ns``."""

    typical: StepReport | None
    mean_ns: int

    @classmethod
    def of(cls, steps: Sequence[StepReport], mean_ns: int) -> Shares:
        """The shares of a run's steps."""
        return cls(typical_of(steps), mean_ns)

    def text(self, part: str, of_mean_ns: float) -> tuple[str, float]:
        """(words for the share of a part of which a mean step has ``of_mean_ns``, the first share in them).

        What hardly comes in the typical step has the share of all steps alone.
        """
        of_mean = of_mean_ns / self.mean_ns
        of_typical = self._of_typical(part)
        if of_typical is None:
            return f"{of_mean:.1%} of the step", of_mean
        if of_typical < _FAR_LESS * of_mean:
            return f"{of_mean:.1%} of all steps", of_mean
        also = "" if f"{of_typical:.0%}" == f"{of_mean:.0%}" else f" ({of_mean:.1%} of all steps)"
        return f"{of_typical:.1%} of the step{also}", of_typical

    def _of_typical(self, part: str) -> float | None:
        step = self.typical
        if step is None or not step.length_ns:
            return None
        if part.startswith(OUTSIDE):
            outside = step.outside or ()
            return sum(entry.ns for entry in outside if f"{OUTSIDE}{entry.part}" == part) / step.length_ns
        return None if step.parts is None else step.parts.get(part, 0) / step.length_ns


def finding_of(
    of_steps: Int64, title: str, detail: str, evidence: Mapping[str, Any], severity: Severity = Severity.WARNING
) -> Finding:
    """A finding by what each step would get back, ns: the mean, and its interval."""
    low, high = gain_interval(of_steps)
    return Finding(severity, title, detail, int(of_steps.sum()) // len(of_steps), evidence, low, high)


_OF_OTHERS = (UNRECORDED, UNKNOWN_RANK)
"""Parts that are the time of other ranks, which nothing tells: no gain is known."""
_ANYWHERE = ("optimizer", HOST, COMPUTE, OTHER)
"""Parts that every run has some of."""
_NOW_AND_THEN = ("evaluation", "checkpoint")
"""Parts that a program has in every so many steps: that others have none is no chance."""
_MOST_OF_IT = 0.5
"""A cause or a place with this share of a part or of a difference is named."""
_NO_SIZES = MeshSizes(0)


def outside_findings(steps: Sequence[StepReport], mesh: MeshSizes = _NO_SIZES) -> Iterator[Finding]:
    """A finding for each part outside the pipeline that takes a share of the steps worth naming: their means."""
    known = [step for step in steps if step.outside is not None and not step.is_evaluation]
    periods = [step.period_ns or 0 for step in known]
    if {entry.part for step in known for entry in step.outside or ()} <= {OTHER}:
        return  # nothing was recorded there
    shares = Shares.of(steps, sum(periods) // len(periods))
    for part, (name, advice) in OUTSIDE_WORDS.items():
        places = _places(known, part) if advice else {}
        if not places:
            continue
        of_steps: Int64 = np.sum(list(places.values()), axis=0)
        gain = int(of_steps.mean())
        low, high = gain_interval(of_steps)
        recurs = part in _NOW_AND_THEN and int((of_steps > 0).sum()) > 1
        is_noise = low is not None and low <= 0 and len(known) > 1 and not recurs
        if gain < (LEAST_ANYWHERE if part in _ANYWHERE else LEAST_SHARE) * shares.mean_ns or is_noise:
            continue
        if part == "optimizer" and _has_whole_state(known, mesh):
            advice = f"{advice}; {SPREAD_STATE}"
        where = _place_with_most(places, shares.typical, part)
        at = "".join(f" ({kind} {name})" for kind, name in where.items())
        words, share = shares.text(f"{OUTSIDE}{part}", gain)
        yield Finding(
            Severity.WARNING,
            f"Outside the pipeline: {words} is {name}{at}",
            f"{gain / 1e6:,.1f} ms from the pipeline's last op to the next step's first one, a step takes "
            f"{sum(periods) / len(periods) / 1e6:,.1f} ms: {advice}",
            gain_ns=None if part in _OF_OTHERS else gain,
            evidence={"cause": part, "where": where, "share": share, "reason": name, "is_outside": True}
            | ({"in_some_steps": True} if words.endswith(" of all steps") else {}),
            gain_low_ns=None if part in _OF_OTHERS else low,
            gain_high_ns=None if part in _OF_OTHERS else high,
        )


def _has_whole_state(steps: Sequence[StepReport], mesh: MeshSizes) -> bool:
    """Return whether there are replicas that update the same parameters each: what they sum along dp, they neither scatter nor
    gather again, as where their optimizer's state is spread over them.
    """
    sent: dict[str, list[int | None]] = {}
    for comm in (comm for step in steps for rank in step.ranks for comm in rank.comms):
        if DATA_PARALLEL.search(comm.axis):
            sent.setdefault(comm.kind, []).append(comm.bytes)
    if mesh.dp == 1 or Collective.REDUCE_SCATTER in sent:
        return False
    reduced, gathered = sent.get(Collective.ALL_REDUCE, []), sent.get(Collective.ALL_GATHER, [])
    every, parameters = sum_of(reduced), sum_of(gathered)
    if gathered and (every is None or parameters is None or parameters >= _OF_GRADIENTS * every):
        return False
    return bool(reduced) or mesh.dp is not None


_OF_GRADIENTS = 0.25
"""Bytes that are gathered along dp over those of gradients, from which on they are parameters, of less precision perhaps."""


def _place_with_most(
    places: Mapping[tuple[str, int | str], Int64], typical: StepReport | None, part: str
) -> dict[str, int | str]:
    """The place that has most of a part in all steps; {} if there is none, or the typical step has more of it elsewhere."""
    place, most = max(places.items(), key=lambda item: int(item[1].sum()))
    if not place[0] or int(most.sum()) < _MOST_OF_IT * sum(int(of_steps.sum()) for of_steps in places.values()):
        return {}
    of_typical = [entry for entry in (typical and typical.outside) or () if entry.part == part]
    largest = max(of_typical, key=lambda entry: entry.ns, default=None)
    return dict((place,)) if largest is None or largest.where == dict((place,)) else {}


def _places(steps: Sequence[StepReport], part: str) -> Mapping[tuple[str, int | str], Int64]:
    """The time of a part in each step, ns, by its place (("", "") for none)."""
    places: dict[tuple[str, int | str], Int64] = {}
    for index, step in enumerate(steps):
        for entry in step.outside or ():
            if entry.part == part:
                place = next(iter(entry.where.items()), ("", ""))
                places.setdefault(place, np.zeros(len(steps), dtype=np.int64))[index] += entry.ns
    return places


def findings_of_series(series: StepSeries, steps: Sequence[StepReport]) -> Iterator[Finding]:
    """Findings on ``steps``, all of the run in order.

    The first steps of a run are long wherever things are made at their first use: they are a finding where one rank delays them.
    Steps that have more microbatches than those that they are compared with (batch size ramp-up) are none.
    """
    order = [step.step for step in steps if step.span_ns is not None and not step.is_evaluation]
    work = {step.step: step.num_forwards for step in steps}
    long = {outlier.step for outlier in series.outliers}
    first = set(takewhile(long.__contains__, order))
    outliers = []
    for outlier in series.outliers:
        main = _largest(outlier.differences, outlier.excess_ns)
        is_warmup = outlier.step in first and (main is None or "rank" not in main.where)
        if work[outlier.step] <= work[outlier.usual_step] and not is_warmup:
            outliers.append(outlier)
    if finding := _of_outliers(outliers, order, series, {step.step: step for step in steps}):
        yield finding
    for change in series.changes:
        if work[change.after_step] > work[change.before_step]:
            continue
        faster = [
            later.step for later in series.changes if later.step > change.step and later.after_ns < later.before_ns
        ]
        slow = order[order.index(change.step) : order.index(faster[0]) if faster else None]
        if finding := _of_change(change, len(slow) / len(order), slow[-1] if faster else None):
            yield finding


_FAR = 1.5


def _of_outliers(
    outliers: Sequence[StepOutlier], order: Sequence[int], series: StepSeries, steps: Mapping[int, StepReport]
) -> Finding | None:
    if not outliers:
        return None
    excess = np.zeros(len(order), dtype=np.int64)
    number_of = {step: number for number, step in enumerate(order)}
    for outlier in outliers:
        excess[number_of[outlier.step]] = outlier.excess_ns
    if int(excess.sum()) // len(order) < LEAST_SHARE * series.median_ns:
        return None
    low, _ = gain_interval(excess)
    worst = outliers[0]
    main = _largest(worst.differences, worst.excess_ns)
    times = f"{worst.span_ns / worst.usual_ns:.1f} times the usual"
    counted = (
        f"{len(outliers)} of {len(order)} steps {'is' if len(outliers) == 1 else 'are'} "
        f"{'far ' * (worst.span_ns >= _FAR * worst.usual_ns)}longer than the others"
    )
    of_ops = "".join(
        f"; most of the bubble that it has more is due to {op.kind} of microbatch {op.microbatch} on rank {op.rank} "
        f"(stage {op.stage})"
        for op in worst.ops
    )
    whose = "that rank's host" if worst.ops or (main and "rank" in main.where) else "the hosts"
    recurs = len(outliers) > 1 or (low is not None and low > 0)  # once is not enough to say that it happens again
    return finding_of(
        excess,
        f"Outliers: {counted}{_at(main)} (step {worst.step}: {times})",
        f"step {worst.step} takes {_ms(worst.excess_ns)} ms more than step {worst.usual_step}{of_ops}"
        f"{_call_behind(steps[worst.step], worst.excess_ns)}; "
        f"look at what {whose} did then: input, checkpoints, garbage collection, neighbours",
        _evidence(main) | {"steps": [outlier.step for outlier in outliers]},
        Severity.WARNING if recurs else Severity.INFO,
    )


def _call_behind(step: StepReport, excess_ns: int) -> str:
    """Words for a call for which a device ran dry for most of what a step is longer."""
    calls = [(sync.drained_ns, rank.rank, sync) for rank in step.ranks for sync in rank.synchronisations or ()]
    for drained, rank, sync in sorted(calls, key=lambda entry: -entry[0])[:1]:
        if drained >= _MOST_OF_IT * excess_ns:
            return f"; {sync.call} takes {_ms(sync.longest_ns)} ms on rank {rank}, while its device runs dry"
    return ""


def _of_change(change: StepChange, share: float, last: int | None) -> Finding | None:
    """A finding where steps got longer, for the ``share`` of the run's steps since then, to the ``last`` one before they got
    shorter again.
    """
    longer = change.after_ns - change.before_ns
    gain = round(longer * share)
    if gain < LEAST_SHARE * change.before_ns:
        return None
    main = _largest(change.differences, longer)
    since = f"since step {change.step}" if last is None else f"from step {change.step} to {last}"
    return Finding(
        Severity.WARNING,
        f"Slower {since}: steps take {longer / change.before_ns:.0%} longer than before{_at(main)}",
        f"compare step {change.before_step} ({_ms(change.before_ns)} ms) with step {change.after_step} "
        f"({_ms(change.after_ns)} ms): clocks, temperature, input lengths, neighbours",
        gain_ns=gain,
        evidence=_evidence(main) | {"step": change.step},
        gain_low_ns=0,
        gain_high_ns=longer,
    )


def _largest(differences: Sequence[Cause] | None, total_ns: int) -> Cause | None:
    """The difference that makes most of the total; None if none does."""
    return next((part for part in differences or () if part.ns >= _MOST_OF_IT * total_ns), None)


def _evidence(main: Cause | None) -> dict[str, Any]:
    return {"cause": main.cause, "where": dict(main.where)} if main else {"cause": "unexplained", "where": {}}


def _at(main: Cause | None) -> str:
    if main is None:
        return ""
    where = "".join(f" of {place} {name}" for place, name in main.where.items())
    return f", by {'compute' if main.cause == 'jitter' else main.cause}{where}"


def _ms(ns: int) -> str:
    return f"{ns / 1e6:,.1f}"
