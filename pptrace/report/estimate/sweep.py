"""A sweep of estimates as columns and as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pptrace.model import units
from pptrace.model.report_table import ReportTable, table_of
from pptrace.model.wording import counted
from pptrace.report.columns import as_rows
from pptrace.report.estimate.columns import missing_reasons
from pptrace.report.estimate.table import excess
from pptrace.report.sweep.table import by_reason
from pptrace.simulator.estimated_step import Candidate

SWEEP_SCHEMA = "pptrace.estimate-sweep/1"

_MOST_ROWS = 20
_MOST_REASONS = 6
_HEADS = {"chunks": "v", "microbatches": "m", "microbatch_size": "b", "zero": "ZeRO"}


def candidate_columns(candidates: Sequence[Candidate]) -> dict[str, list[Any]]:
    """A row for each combination, None for what one that cannot be does not have."""
    columns: dict[str, list[Any]] = {name: [one.options[name] for one in candidates] for name in candidates[0].options}
    columns["chunks"] = [_chunks(one) for one in candidates]
    columns["peak_bytes"] = [None if one.estimate is None else one.estimate.peak_bytes for one in candidates]
    columns["step_ns"] = [None if one.step is None else one.step.step_ns for one in candidates]
    columns["rank_ns_per_token"] = [one.rank_ns_per_token for one in candidates]
    return columns | {"fits": [one.fits for one in candidates], "reason": [reason(one) for one in candidates]}


def sweep_object(candidates: Sequence[Candidate]) -> dict[str, Any]:
    """The JSON object of a sweep."""
    limits = {one.limit_bytes for one in candidates if one.estimate is not None}
    limit_bytes = limits.pop() if limits else None
    points = as_rows(candidate_columns(candidates))
    return {"schema": SWEEP_SCHEMA, "limit_bytes": limit_bytes, "reasons": _unknown(candidates), "points": points}


def reason(candidate: Candidate) -> str:
    """Reason for which a combination does not fit; "" of one that does."""
    if candidate.estimate is None:
        return candidate.refused
    return "" if candidate.fits else excess(candidate.estimate)


def candidate_table(candidates: Sequence[Candidate]) -> ReportTable:
    """The combinations that fit, the best first, with the options that differ."""
    fitting = [one for one in candidates if one.fits]
    options = candidate_columns(candidates)
    names = [name for name in candidates[0].options if len(set(map(str, options[name]))) > 1] or ["schedule"]
    columns: dict[str, Callable[[Candidate], str]] = {_HEADS.get(name, name): _option(name) for name in names}
    columns["peak"] = lambda one: units.num_bytes(None if one.estimate is None else one.estimate.peak_bytes)
    columns["activations"] = lambda one: units.num_bytes(
        None if one.estimate is None else one.estimate.fullest.activations_bytes
    )
    if any(one.step is not None for one in fitting):
        columns["step ms"] = lambda one: units.milliseconds(one.step.step_ns) if one.step else "–"
        columns["bubble"] = lambda one: units.ratio(one.step.simulation.bubble_ratio if one.step else None)
        columns["tokens/s of a rank"] = lambda one: f"{1e9 / (one.rank_ns_per_token or 1):,.0f}"
    left_out = len(fitting) - _MOST_ROWS
    notes = [f"… {left_out} more: --csv and --json have all"] if left_out > 0 else []
    return table_of("estimates", "What fits, best first", fitting[:_MOST_ROWS], columns, notes, num_labels=len(names))


def sweep_lines(candidates: Sequence[Candidate]) -> list[str]:
    """Say how many fit, and of each reason for which others do not, how many and the one that needs least."""
    refused = [one for one in candidates if not one.fits]
    groups = by_reason(refused, lambda one: "" if one.estimate is not None else one.refused)
    lines = [f"{counted(len(candidates), 'combination')}: {len(candidates) - len(refused)} fit"]
    for members in groups[:_MOST_REASONS]:
        verb = "cannot be" if members[0].estimate is None else "do not fit"
        lines.append(f"{len(members)} {verb}, such as {_named(members[0])}: {reason(members[0])}")
    left_out = len(groups) - _MOST_REASONS
    lines += [f"… {counted(left_out, 'more reason')}: --csv and --json have all"] if left_out > 0 else []
    return lines + _unknown(candidates)


def _unknown(candidates: Sequence[Candidate]) -> list[str]:
    """Lines that say why something is None in all combinations: sizes that are not given are missing in each."""
    estimates = (one.estimate for one in candidates if one.estimate is not None)
    return list(dict.fromkeys(line for estimate in estimates for line in missing_reasons(estimate)))


def _named(candidate: Candidate) -> str:
    """Options that are not those of every model: all sizes above 1, and what is recomputed."""
    return " ".join(
        str(value) if name in ("schedule", "recompute") else f"{_HEADS.get(name, name)} {value}"
        for name, value in candidate.options.items()
        if value not in (None, 0, 1, "none")
    )


def _option(name: str) -> Callable[[Candidate], str]:
    return lambda one: units.text(_chunks(one) if name == "chunks" else one.options[name])


def _chunks(candidate: Candidate) -> object:
    return candidate.options["chunks"] if candidate.estimate is None else candidate.estimate.plan.num_chunks
