"""Places of the evidence of findings, and the timeline's addresses there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlencode

from pptrace.analysis.result import Finding, Report, StepReport
from pptrace.analysis.step_parts import BlamedOp


@dataclass(frozen=True, slots=True)
class Place:
    """Place where a finding shows most: the step, the ranks that it is about (() for all), and the op that is blamed there."""

    step: StepReport
    ranks: tuple[int, ...]
    op: BlamedOp | None


def place_of(finding: Finding, report: Report) -> Place | None:
    """The place of a finding's evidence: the step where it shows most, its ranks; None without a pipeline.

    Where an op of those ranks is blamed for bubbles of that step, it is that with the largest part of them.
    """
    where = finding.evidence.get("where") or {}
    step = _step_of(finding, where, report)
    if step is None:
        return None
    ranks = _ranks_of(where, step)
    return Place(step, tuple(ranks), _blamed(step, ranks))


def evidence_of(finding: Finding, report: Report) -> str | None:
    """The timeline's address at the evidence of a finding: its ranks are marked, and the microbatch of its op is selected.

    The critical path is shown with findings about what ops cost. None without a pipeline.
    """
    place = place_of(finding, report)
    if place is None:
        return None
    number = place.step.step
    query: dict[str, int | str] = {"step": number}
    if place.ranks:
        index = {rank: at for at, rank in enumerate(sorted(row.rank for row in place.step.ranks))}
        query["rows"] = ".".join(str(index[rank]) for rank in place.ranks)
    if (op := place.op) is not None:
        query["select"] = f"{op.rank}.{op.microbatch}.{number}"
    if finding.evidence.get("cause") in ("imbalance", "straggler", "jitter", "communication"):
        query["critical"] = 1
    return f"/timeline?{urlencode(query)}"


def _step_of(finding: Finding, where: Mapping[str, int | str], report: Report) -> StepReport | None:
    """The step that the finding names, else the one that lost most to its cause there, else the typical one."""
    by_number = {step.step: step for step in report.steps if step.has_pipeline}
    named = finding.evidence.get("step", next(iter(finding.evidence.get("steps") or ()), None))
    if named in by_number:
        return by_number[named]
    losses = {step.step: _loss(step, str(finding.evidence.get("cause", "")), where) for step in by_number.values()}
    if any(losses.values()):
        return by_number[max(losses, key=lambda number: losses[number])]
    typical = report.typical_step
    return typical if typical is not None and typical.has_pipeline else None


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
