"""Findings: the main causes of lost time, each with where it is and what a step would get back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from pptrace.analysis.findings.plain import (
    IDLE_FIGURES,
    LAST_TO_COLLECTIVES,
    device_findings,
    of_ranks,
    plain_host_findings,
    with_idle_spans,
    with_synchronisations,
)
from pptrace.analysis.findings.reasons import explained_steps, mean_length
from pptrace.analysis.findings.root_causes import STRAGGLER
from pptrace.analysis.findings.steps import Shares, finding_of, findings_of_series
from pptrace.analysis.part_words import IDLE_WORDS, SLOW_RANK_ALIKE, WORDS
from pptrace.analysis.result import Finding, MissingEvidence, RankStep, ScheduleSummary, Severity, StepReport
from pptrace.analysis.stragglers.alike import SLOW_RANK, Place
from pptrace.analysis.stragglers.communication import LATE_MEMBER
from pptrace.analysis.stragglers.detectors import Study
from pptrace.analysis.stragglers.reason import LEAST_ANYWHERE, LEAST_SHARE, Reason, is_noise
from pptrace.analysis.stragglers.sequences import LONG_SEQUENCES
from pptrace.analysis.whole_run import INTERACTION, LATE_OPS, Cause, StepSeries
from pptrace.model.tables import Int64

_ANYWHERE = ("jitter", "communication", LATE_OPS, "unexplained")
"""Causes that every run has some of, wherever it has most of them."""
_COMPARED = ("imbalance", "straggler")
"""Causes whose gain is that of a run in which one place costs what its like costs."""
_LEAST_OF_GAIN = 0.1
"""Part of such a gain that the cause takes of the steps at least: else ops last longer there by another cause."""
_MOST_OF_IT, _NEARLY_ALL = 0.5, 0.8
"""A place with this share of a cause is named; with that, of one that all places have some of."""
_SEVERITIES = (Severity.CRITICAL, Severity.WARNING, Severity.INFO)
_MOST_FINDINGS = 10
_NOT_STUDIED = Study()


def find(
    steps: Sequence[StepReport],
    schedule: ScheduleSummary,
    study: Study = _NOT_STUDIED,
    series: StepSeries | None = None,
    missing: Sequence[MissingEvidence] = (),
    others: Sequence[Finding] = (),
) -> tuple[Finding, ...]:
    """Findings over all steps, ten at most: those of most severity first, of these the largest gain.

    Steps that are outliers in ``series`` are a finding of their own: the causes are those of the others. Steps that are long for
    a reason are no outliers.

    Args:
        steps, study: those of :func:`~pptrace.analysis.findings.reasons.with_reasons`: the study has reasons with findings of
            their own, the gains of places, and what chance explains, so that it is no finding.
        missing: what the run does not show.
        others: findings about what is no part of any step.
    """
    findings = [
        Finding(
            Severity.CRITICAL,  # every figure that rests on the plan is in doubt
            "The run does not follow the plan",
            f"{len(schedule.mismatches)} of its orders differ from {schedule.name}; the first: {schedule.mismatches[0]}",
        )
        for _ in schedule.mismatches[:1]  # one finding, however many differ
    ]
    explained = explained_steps(steps, series)
    plain = [step for step in steps if not step.has_pipeline]
    series = _without_explained(series, study, _of_outside(steps, others) + _of_hosts([] if explained else plain))
    of_series = list(findings_of_series(series, steps)) if series else []
    if not explained:
        apart = {outlier.step for outlier in series.outliers} if series else set()
        outliers = [step for step in plain if step.step in apart]
        plain = [step for step in plain if step.step not in apart]
        of_hosts = (*_host_without_pipeline(plain), *plain_host_findings(plain, outliers), *device_findings(plain))
        rest = (*of_series, *others, *of_hosts, *_exposed_without_pipeline(plain))
        return (*findings, *_in_order(rest))
    shares = Shares.of(steps, mean_length(explained))
    losses = _losses_of([step.causes or () for step in explained])
    of_reasons = [_finding_of(reason, shares) for reason in study.reasons]
    has_reason = any(STRAGGLER in reason.causes for reason in study.reasons)
    if has_reason and STRAGGLER in losses and not losses[STRAGGLER].where:
        del losses[STRAGGLER]  # none of them more than others: not named besides a reason for it
    if any(reason.name == SLOW_RANK for reason in study.reasons):
        losses.pop("imbalance", None)  # that of its stages
    for finding in of_series:
        if "step" in finding.evidence and (name := finding.evidence["cause"]) in losses:
            losses[name] = losses[name].without(finding.gain_ns or 0)
    if not any(step.has_devices for step in explained) and "host" in losses:
        late = losses.pop("host")  # every rank has some of it
        most = {place: ns for place, ns in late.places.items() if ns >= _NEARLY_ALL * max(late.total, 1)}
        losses[LATE_OPS] = replace(late, name=LATE_OPS, places=most)
    candidates = [
        _finding(losses[name], shares, study.gains) for name, words in WORDS.items() if words.takes and name in losses
    ]
    has_sequences = any(reason.name == LONG_SEQUENCES for reason in study.reasons)
    waited_for = [reason.where for reason in study.reasons if reason.name == LATE_MEMBER]
    alone = SLOW_RANK_ALIKE if any(STRAGGLER in kinds.findings for kinds in missing) else ""
    named: list[Finding] = []
    for finding in filter(None, candidates):
        cause, where = finding.evidence["cause"], finding.evidence["where"]
        by_chance = study.noise is not None and study.noise.explains(cause, where, finding.gain_ns or 0)
        is_of_sequences = cause == "jitter" and not where and has_sequences  # the work of the long ones is no loss
        if by_chance or is_of_sequences or (cause == "straggler" and where in waited_for):
            continue
        if cause == "imbalance" and where:
            finding = replace(finding, detail=f"{finding.detail}{alone}")
        finding = _with_axes(finding, explained, losses.get("communication"))
        named.append(with_synchronisations(with_idle_spans(finding, explained), explained))
    named += [replace(finding, detail=f"{finding.detail}{alone}") for finding in _shared(losses, shares, study, named)]
    structural = [_structural(losses["structural"], shares, schedule)] if "structural" in losses else []
    structural = [finding for finding in structural if finding.evidence["share"] >= _LEAST_FILL]
    unordered = (*of_reasons, *named, *of_series, *others, *structural)
    return (*findings, *_in_order(unordered))[:_MOST_FINDINGS]


def _in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Findings of most severity first, of these the largest gain."""
    return sorted(findings, key=lambda finding: (_SEVERITIES.index(finding.severity), -(finding.gain_ns or 0)))


def _finding_of(reason: Reason, shares: Shares) -> Finding:
    """The finding of a reason."""
    words, share = shares.text(reason.name, reason.gain)
    known = {"cause": reason.causes[0], "where": reason.where, "share": share, "reason": reason.name}
    detail = reason.detail
    for kind, of_it in reason.evidence.get("idle_spans", {}).items():
        detail = f"{detail}; {of_it:.0%} of it while hosts {IDLE_WORDS[kind].takes}: {IDLE_WORDS[kind].advice}"
    return finding_of(reason.gains, reason.title.format(share=words), detail, {**known, **reason.evidence})


class _Loss(Struct, frozen=True, eq=False):
    """Time that a cause took of each step, ns, shape (steps,), and of all steps at each place."""

    name: str
    of_steps: Int64
    places: Mapping[tuple[str, int | str], int]

    @property
    def total(self) -> int:
        return int(self.of_steps.sum())

    @property
    def mean(self) -> int:
        """Mean over the steps, ns; 0 where they gain by it."""
        return max(self.total // len(self.of_steps), 0)

    def without(self, ns: int) -> _Loss:
        """The loss without ``ns`` of each step, as far as there is that much."""
        return replace(self, of_steps=self.of_steps - min(ns, self.mean))

    @property
    def where(self) -> dict[str, int | str]:
        """The place that has most of it; {} if there is none."""
        if not self.places:
            return {}
        place, ns = max(self.places.items(), key=lambda item: (item[1], str(item[0])))
        return {place[0]: place[1]} if ns >= _MOST_OF_IT * max(self.total, 1) else {}


def _losses_of(causes: Sequence[Sequence[Cause]]) -> dict[str, _Loss]:
    """The losses by the name of their cause, without what has a reason."""
    of_steps: dict[str, Int64] = {}
    places: dict[str, Counter[tuple[str, int | str]]] = {}
    for index, of_step in enumerate(causes):
        for cause in (cause for cause in of_step if cause.reason is None):
            of_steps.setdefault(cause.cause, np.zeros(len(causes), dtype=np.int64))[index] += cause.ns
            places.setdefault(cause.cause, Counter()).update(dict.fromkeys(cause.where.items(), cause.ns))
    return {name: _Loss(name, values, places[name]) for name, values in of_steps.items()}


def _finding(loss: _Loss, shares: Shares, gains: Mapping[Place, Int64]) -> Finding | None:
    """The finding of a cause, None where it is too small or varies too much.

    Its gain is what steps would get back if the place that it is at cost what its like costs, where that is known, else the
    share of the cause.
    """
    where = loss.where
    is_alike = loss.name in _COMPARED
    of_steps = next((gains[at] for at in where.items() if is_alike and at in gains), loss.of_steps)
    gain = int(of_steps.sum()) // len(of_steps)
    is_anywhere = loss.name in _ANYWHERE or (loss.name == "straggler" and not where)
    least = LEAST_ANYWHERE if is_anywhere else LEAST_SHARE
    if gain < least * shares.mean_ns or is_noise(of_steps) or (is_alike and loss.mean < _LEAST_OF_GAIN * gain):
        return None
    texts = WORDS[loss.name]
    takes = texts.takes_at.format(place=" ".join(f"{kind} {at}" for kind, at in where.items())) if where else ""
    advice = texts.look
    cause = "host" if loss.name == LATE_OPS else loss.name
    words, share = shares.text(cause, loss.mean)
    evidence: dict[str, Any] = {"cause": cause, "where": where, "share": share}
    if of_steps is not loss.of_steps:
        evidence["gain_if_spread_ns"] = loss.mean
        others = f"{gain / 1e6:,.1f} ms a step if it cost what the others cost"
        spread = f"{loss.mean / 1e6:,.1f} ms a step if its work were spread over all stages, {others}"
        advice = f"{spread if loss.name == 'imbalance' else others}: {advice}"
    return finding_of(of_steps, f"{cause.capitalize()}: {words} {takes or texts.takes}", advice, evidence)


def _shared(losses: Mapping[str, _Loss], shares: Shares, study: Study, found: Sequence[Finding]) -> Iterator[Finding]:
    """The finding on what is shared by several causes, where the slowest stage is one of them and has no finding of its own: what
    it costs more comes back where it costs what the others do, though not where its work is spread over stages that wait.
    """
    shared, least = losses.get(INTERACTION), LEAST_ANYWHERE * shares.mean_ns
    if shared is None or shared.mean < least or any("stage" in finding.evidence["where"] for finding in found):
        return
    for place, of_steps in study.gains.items():
        gain = int(of_steps.sum()) // len(of_steps)
        is_sure = study.noise is not None and place in study.noise.slow and not is_noise(of_steps)
        if place[0] == "stage" and is_sure and gain >= least:
            words, share = shares.text(INTERACTION, shared.mean)
            title = f"Interaction: {words} is shared by several causes, one of them stage {place[1]}, which costs more"
            spread = losses["imbalance"].mean if "imbalance" in losses else 0
            detail = (
                f"{gain / 1e6:,.1f} ms a step if it cost what the others cost, {spread / 1e6:,.1f} if its work were spread over "
                "ranks that are late by other causes too: see why its ops take longer, in what stages compute"
            )
            yield finding_of(
                of_steps, title, detail, {"cause": INTERACTION, "where": {"stage": place[1]}, "share": share}
            )


def _with_axes(finding: Finding, steps: Sequence[StepReport], loss: _Loss | None) -> Finding:
    """Add the axes to a finding about communication: their parts of what it costs the step where ``loss`` has them, else of what
    the ranks have exposed. An axis that ranks share with others that wait costs the step less than it has exposed.
    """
    if finding.evidence["cause"] != "communication":
        return finding
    exposed: Counter[str] = Counter()
    for comm in (comm for step in steps for rank in step.ranks for comm in rank.comms):
        exposed[comm.axis] += comm.exposed_ns or 0
    places = loss.places.items() if loss else ()
    lost = {str(axis): ns for (place, axis), ns in places if place == "axis" and ns > 0}
    detail, evidence = finding.detail, dict(finding.evidence)
    if lost or any(exposed.values()):
        name, parts = ("by axis", lost) if lost else ("of what is exposed", exposed)
        detail = f"{name}: {', '.join(f'{axis} {share:.0%}' for axis, share in _shares(parts).items())}; {detail}"
    if any(exposed.values()):
        evidence["exposed_by_axis"] = _shares(exposed)
    return replace(finding, detail=detail, evidence=evidence)


def _shares(parts: Mapping[str, int]) -> dict[str, float]:
    """Parts of their sum that are not 0, the largest first."""
    total = sum(parts.values())
    return {name: part / total for name, part in Counter(parts).most_common() if part}


def _exposed_without_pipeline(steps: Sequence[StepReport]) -> tuple[Finding, ...]:
    """The finding on communication that nothing hides in steps without a pipeline: the mean over the ranks, by axis, without that
    during which a rank was waited for anyway.
    """
    known = [step for step in steps if step.ranks and all(rank.exposed_comm_ns is not None for rank in step.ranks)]
    if not known:
        return ()
    exposed = []
    for step in known:  # without what the others of a late rank had exposed while they waited for it
        waited = sum(rank.late_in_transfer_ns or 0 for rank in step.ranks) * (len(step.ranks) - 1)
        exposed.append(max(sum(rank.exposed_comm_ns or 0 for rank in step.ranks) - waited, 0) // len(step.ranks))
    places: Counter[tuple[str, int | str]] = Counter()
    for step in known:
        for rank in step.ranks:
            for comm in rank.comms:
                places["axis", comm.axis] += (comm.exposed_ns or 0) // len(step.ranks)
    loss = _Loss("communication", np.array(exposed, dtype=np.int64), places)
    span = sum(step.length_ns or step.span_ns or 0 for step in known)
    finding = _finding(loss, Shares(None, span // len(known)), {}) if span >= len(known) else None
    return () if finding is None else (_with_axes(finding, known, loss),)


def _host_without_pipeline(steps: Sequence[StepReport]) -> tuple[Finding, ...]:
    """The finding on launching in steps without a pipeline: what devices waited for it while their hosts ran operators."""
    known = [(step, ns) for step in steps if (ns := of_ranks(step, _waits_for_launches)) is not None]
    if not known:
        return ()
    loss = _Loss("host", np.array([ns for _, ns in known], dtype=np.int64), {})
    span = sum(step.length_ns or sum(rank.window_ns for rank in step.ranks) // len(step.ranks) for step, _ in known)
    finding = _finding(loss, Shares(None, span // len(known)), {})
    if finding is None:
        return ()
    of_steps = [step for step, _ in known]
    num_known = min(sum(rank.host is not None for rank in step.ranks) for step in of_steps)
    if num_known < (num_ranks := max(len(step.ranks) for step in of_steps)):
        finding = replace(finding, detail=f"known of {num_known} of {num_ranks} ranks; {finding.detail}")
    return (with_synchronisations(finding, of_steps),)


def _waits_for_launches(rank: RankStep) -> int | None:
    """Time that a device waited for launches while its host ran operators, ns; None where it is not known."""
    if rank.host is None:
        return None
    named = sum((rank.idle_spans or {}).values()) if rank.between_operators_ns is None else rank.between_operators_ns
    return rank.host.launch_starved_ns - named


_OF_SPLIT_BACKWARDS = ("zb", "v-half", "v-min", "dualpipe")
"""Parts of the names of schedules that fill their bubbles with gradients of weights."""
_LEAST_FILL = 0.01
"""Part of a step from which on its fill and drain are a finding."""


def _structural(loss: _Loss, shares: Shares, schedule: ScheduleSummary) -> Finding:
    words, share = shares.text("structural", loss.total // len(loss.of_steps))
    kinds = [] if (schedule.num_chunks or 1) > 1 else ["interleaved"]
    kinds += [] if any(part in schedule.title for part in _OF_SPLIT_BACKWARDS) else ["zero-bubble"]
    such = f" ({', '.join(kinds)})" if kinds else ""
    name, advice = f"{schedule.name} itself", "more microbatches, or"
    if len(schedule.runs) > 1:
        name = f"the schedule in each of the {len(schedule.runs)} calls of a step"
        advice = f"one call with all {schedule.num_microbatches} microbatches fills and drains once; that, or"
    elif name == "custom":
        name = "the order of the run's ops itself"
    return finding_of(
        loss.of_steps,
        f"Structural: {words} is the fill and drain of {name}",
        f"{advice} a schedule with a smaller bubble{such}, would shrink it: pptrace whatif says by how much",
        {"cause": "structural", "where": {}, "share": share},
        Severity.INFO,
    )


_EXPLAINED = 0.5
"""An outlier is none for the findings if reasons explain this part of its excess."""


def _of_outside(steps: Sequence[StepReport], findings: Sequence[Finding]) -> Counter[int]:
    """The time, ns, that each step has more than is usual of the parts outside the pipeline that have a finding."""
    named = {finding.evidence["cause"] for finding in findings if "is_outside" in finding.evidence}
    known = [step for step in steps if step.outside is not None]
    of_steps = np.array([sum(part.ns for part in step.outside or () if part.part in named) for step in known])
    more = of_steps - int(np.median(of_steps)) if len(known) else of_steps
    return Counter(dict(zip((step.step for step in known), more.tolist(), strict=True)))


def _of_hosts(steps: Sequence[StepReport]) -> Counter[int]:
    """The time, ns, that each step without a pipeline has more than is usual of what has a finding on its hosts. A rank that
    does something alone at the end of a step makes the next one long for those that wait for it.
    """
    causes = {finding.evidence["reason"] for finding in plain_host_findings(steps)}
    figures = [of_rank for reason, of_rank in IDLE_FIGURES.items() if reason in causes]
    of_steps = [
        max((sum(of_rank(rank) or 0 for of_rank in figures) for rank in step.ranks), default=0) for step in steps
    ]
    usual = int(np.median(of_steps)) if steps else 0
    before = [usual, *of_steps[:-1]] if LAST_TO_COLLECTIVES in causes else of_steps
    longer = zip((step.step for step in steps), map(max, of_steps, before), strict=True)
    return Counter({step: max(ns - usual, 0) for step, ns in longer})


def _without_explained(series: StepSeries | None, study: Study, outside: Counter[int]) -> StepSeries | None:
    """The series without the outliers that are long for a reason whose finding has their time already, or by what they have
    ``outside`` the pipeline.
    """
    if series is None or not series.outliers:
        return series
    of_step = Counter(outside)
    for reason in study.reasons:
        if reason.is_finding(series.median_ns) and len(study.steps) == len(reason.gains):
            of_step.update(dict(zip(study.steps, reason.gains.tolist(), strict=True)))
    kept = [outlier for outlier in series.outliers if of_step[outlier.step] < _EXPLAINED * outlier.excess_ns]
    return replace(series, outliers=tuple(kept))
