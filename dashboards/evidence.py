"""Places of the evidence of findings, and the timeline's addresses there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlencode

from pptrace.analysis.findings.plain import LAST_TO_COLLECTIVES
from pptrace.analysis.report import Report
from pptrace.analysis.result import Finding, StepReport
from pptrace.analysis.stragglers.communication import LATE_MEMBER, LATE_RECEIVES
from pptrace.analysis.stragglers.hosts import LATE_LAUNCHES, LATE_START
from pptrace.analysis.whole_run import BlamedOp


@dataclass(frozen=True, slots=True)
class Place:
    """Place where a finding shows most: the step, the ranks that it is about (() for all), and the op that is blamed there."""

    step: StepReport
    ranks: tuple[int, ...]
    op: BlamedOp | None


def place_of(finding: Finding, report: Report, shown: int | None = None) -> Place | None:
    """The place of a finding's evidence: a step, its ranks; None without steps.

    The step is the one that the finding names, else the ``shown`` one if it lost time to the cause, else the one that lost most.
    Where an op of those ranks is blamed for bubbles of that step, it is that with the largest part of them; findings on ops that
    vary or begin late and name no rank have that of all ranks.
    """
    where = finding.evidence.get("where") or {}
    step = _step_of(finding, where, report, shown)
    if step is None:
        return None
    ranks = _ranks_of(where, step)
    is_of_ops = not where and finding.evidence.get("cause") in ("jitter", "host")
    return Place(step, tuple(ranks), _blamed(step, [row.rank for row in step.ranks] if is_of_ops else ranks))


def evidence_of(finding: Finding, report: Report, shown: int | None = None) -> str | None:
    """The timeline's address at the evidence of a finding, in a step: bars of what it speaks of are marked, or else the
    microbatch of the op that is blamed most is selected; so are its ranks.

    The critical path is shown with findings about what ops cost; what is outside the pipeline is shown up to the next step. None
    without steps.
    """
    place = place_of(finding, report, shown)
    if place is None:
        return None
    number = place.step.step
    query: dict[str, int | str] = {"step": number}
    if place.ranks:
        index = {rank: at for at, rank in enumerate(sorted(row.rank for row in place.step.ranks))}
        query["rows"] = ".".join(str(index[rank]) for rank in place.ranks)
    if marked := _marked(finding, place):
        query["find"] = f"{marked} step {number}"
    elif (op := place.op) is not None:
        query["select"] = f"{op.rank}.{op.microbatch}.{number}"
    cause = finding.evidence.get("cause")
    if finding.evidence.get("is_outside"):
        query["period"] = 1
    elif place.step.has_pipeline and cause in ("imbalance", "straggler", "jitter", "communication"):
        query["critical"] = 1
    return f"/timeline?{urlencode(query)}"


_MARKS = {
    LATE_MEMBER: "late collective",
    LAST_TO_COLLECTIVES: "late collective",
    LATE_RECEIVES: "receives",
    LATE_START: "",
    LATE_LAUNCHES: "",
}
"""Words of the timeline's search for what findings of a reason speak of; "" for nothing but their ranks."""
_MARKS_OUTSIDE = {
    "gradient_sync": "GRAD_SYNC",
    "optimizer": "OPTIMIZER",
    "data": "DATA",
    "evaluation": "EVAL",
    "garbage_collection": "GC",
    "communication": "exposed transfer",
    "host": "not launched",
    "compute": "other work",
    "barrier": "late collective",
    "unrecorded_ranks": "late collective",
    "unknown_rank": "late collective",
}


def _marked(finding: Finding, place: Place) -> str:
    """Words of the search for what a finding speaks of; "" where its bars have no name of their own."""
    evidence = finding.evidence
    where, cause, reason = evidence.get("where") or {}, evidence.get("cause"), str(evidence.get("reason", ""))
    at = f" rank {where['rank']}" if "rank" in where else ""
    if evidence.get("is_outside"):
        return f"{_MARKS_OUTSIDE.get(str(cause), 'unexplained')}{at}"
    if reason in _MARKS:
        waiting = list(evidence.get("waiting_ranks") or ())
        return f"{_MARKS[reason]}{f' rank {waiting[0]}' if len(waiting) == 1 else ''}" if _MARKS[reason] else ""
    if cause == "communication":
        return f"exposed transfer {where['axis']}" if "axis" in where else "exposed transfer"
    if cause == "structural":
        return "fill, drain"
    if cause == "imbalance" and "stage" in where:
        return f"stage {where['stage']}"
    if cause == "host" and any(row.host is not None for row in place.step.ranks):
        return f"not launched{at}"
    return ""


def _step_of(finding: Finding, where: Mapping[str, int | str], report: Report, shown: int | None) -> StepReport | None:
    """The step that the finding names, else the shown one, else the one that lost most to its cause, else the typical one."""
    by_number = {step.step: step for step in report.steps if step.has_pipeline} or {
        step.step: step for step in report.steps
    }
    named = finding.evidence.get("step", next(iter(finding.evidence.get("steps") or ()), None))
    if named in by_number:
        return by_number[named]
    losses = {step.step: _loss(step, str(finding.evidence.get("cause", "")), where) for step in by_number.values()}
    if shown in by_number and (losses[shown] or not any(losses.values())):
        return by_number[shown]
    if any(losses.values()):
        return by_number[max(losses, key=lambda number: losses[number])]
    typical = report.typical_step
    return typical if typical is not None and typical.step in by_number else None


def _loss(step: StepReport, cause: str, where: Mapping[str, int | str]) -> int:
    """Time that a step lost to a cause at a place, or at all of them where none is named, ns."""
    of_cause = [part for part in step.causes or () if part.cause == cause]
    return sum(part.ns for part in of_cause if not where or (part.where and part.where.items() <= where.items()))


def _ranks_of(where: Mapping[str, int | str], step: StepReport) -> list[int]:
    """The ranks of a place: a rank itself, or those of a stage."""
    present = {row.rank for row in step.ranks}
    if "rank" in where:
        return [int(where["rank"])] if where["rank"] in present else []
    if "stage" in where:
        return [row.rank for row in step.ranks if where["stage"] == row.stage]
    return []


def _blamed(step: StepReport, ranks: list[int]) -> BlamedOp | None:
    """The op with the largest part of the step's bubbles, of some ranks, if there are any."""
    if step.blame is None or not ranks:
        return None
    return next((op for op in step.blame.ops if op.rank in ranks), None)
