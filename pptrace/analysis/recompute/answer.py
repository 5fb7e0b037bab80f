"""Parts of the backwards of each rank and stage: forwards that run again, gradients of weights, and the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from pptrace.analysis.aligned import AlignedRun, StepsOfRank
from pptrace.analysis.recompute.types import BackwardOps, RecomputeReport, StepRecompute
from pptrace.intervals import intersect, lengths_within, union

if TYPE_CHECKING:
    from pptrace.analysis.questions import QuestionInputs

_BACKWARDS = ("B", "I", "OVERLAP_F_B")
_LEAST_TOLD = 0.75
"""Part of the backwards that kernels or operators have to fill for those of weights to tell W's part of them."""
_FEW_OPERATORS = "operators fill less than three quarters of its backwards, and what else these do is not known"


class OfRank(Struct, frozen=True):
    """The backwards of a rank, its recompute by step, ns, and the reasons why it is not known, nor the gradients of weights."""

    ops: tuple[BackwardOps, ...]
    steps: Mapping[int, int]
    no_recompute: str
    no_weights: str


def of_rank(rank: int, steps: StepsOfRank, data: AlignedRun) -> OfRank | None:
    """The backwards of a rank in those steps in which it is known when it computed; None without any."""
    work, ops = data.work.get(rank), data.rows.of_rank(rank).ops
    if work is None or work.missing_device_events or not len(ops):
        return None
    known = sorted({*steps.reported} - data.lost_steps.get(rank, frozenset()))
    ops = ops.where(np.isin(ops["step"], known) & (ops["stage"] >= 0) & ops.among("kind", _BACKWARDS))
    if not len(ops):
        return None
    kind, kinds = ops.codes("kind")
    parts, compute = data.backward_of(rank), data.lanes[rank].compute
    pieces = (data.clock.to_common_clock(rank, times) for times in (work.pieces.start_ns, work.pieces.end_ns))
    sets = (compute, parts.recompute, parts.weights, intersect(union(*pieces), compute))
    computes, again, weights, in_operators = (lengths_within(times, ops["start_ns"], ops["end_ns"]) for times in sets)
    if not parts.no_weights and in_operators.sum() < _LEAST_TOLD * computes.sum():
        parts = replace(parts, no_weights=_FEW_OPERATORS)
    found = []
    for stage, code in sorted(set(zip(ops["stage"].tolist(), kind.tolist(), strict=True))):
        chosen = (ops["stage"] == stage) & (kind == code)
        sums = [int(part[chosen].sum()) for part in (computes, again, weights)]
        is_whole, name = str(kinds[code]) == "B", str(kinds[code])
        found.append(
            BackwardOps(
                *(rank, stage, name, int(chosen.sum()), sums[0]),
                None if parts.no_recompute else sums[1],
                sums[2] if is_whole and not parts.no_weights else None,
            )
        )
    by_step = {step: int(again[ops["step"] == step].sum()) for step in known}
    return OfRank(tuple(found), by_step, parts.no_recompute, parts.no_weights)


def answer(inputs: QuestionInputs) -> Mapping[str, Any]:
    """Parts of the backwards of all ranks; nothing where no rank tells anything and none says that it recomputes."""
    models = {rank: facts.get("model") for rank, facts in inputs.run.facts.items()}
    stated = {rank: _granularity(model) for rank, model in models.items()}
    granularity = next(filter(None, stated.values()), "")
    parts = [_as_stated(part, models.get(rank)) for rank, part in inputs.of_ranks.items()]
    if not parts or (not granularity and all(part.no_recompute and part.no_weights for part in parts)):
        return {}
    steps = Counter[int]()
    for part in parts if not any(part.no_recompute for part in parts) else ():
        steps.update(part.steps)
    ops = tuple(sorted((one for part in parts for one in part.ops), key=lambda one: (one.stage, one.kind, one.rank)))
    if not any(one.recompute_ns != 0 or one.weights_ns is not None for one in ops):
        ops = ()  # nothing is recomputed, and no more is known
    of_steps = tuple(StepRecompute(step, ns) for step, ns in sorted(steps.items()))
    reasons = [_first(part.no_recompute for part in parts), _first(part.no_weights for part in parts)]
    model: Any = next((models[rank] for rank, granularity in stated.items() if granularity), {})
    layers, beyond = (model.get(name) for name in ("recompute_num_layers", "recompute_microbatches_beyond"))
    by_number = layers if isinstance(layers, int) and model.get("recompute_method") == "block" else None
    return {"recompute": RecomputeReport(ops, of_steps, granularity, by_number, beyond is None, *reasons)}


def _granularity(model: object) -> str:
    """Recompute that a run of this project says it does: none, selective or full; "" of others."""
    if not isinstance(model, Mapping) or not isinstance(granularity := model.get("recompute"), str):
        return ""
    return "full" if granularity == "none" and model.get("recompute_microbatches_beyond") is not None else granularity


def _as_stated(part: OfRank, model: object) -> OfRank:
    """The answer of a rank with what its run says of recompute and of ops that sleep, where its events do not tell."""
    layers = model.get("layers_per_stage") if isinstance(model, Mapping) else None
    granularity = _granularity(model)
    if layers and isinstance(layers, list) and all(layers[one.stage % len(layers)] == 0 for one in part.ops):
        granularity = "none"  # the rank has ends of the model alone, of which nothing runs again
    if part.no_recompute and granularity == "none":
        part = replace(part, ops=tuple(replace(one, recompute_ns=0) for one in part.ops), no_recompute="")
    elif part.no_recompute and granularity:
        why = (
            f"the run recomputes ({granularity}), and {part.no_recompute}; record it again with this version of pptrace"
        )
        part = replace(part, no_recompute=why)
    share = _asleep_for_weights(model)
    if share is not None and part.no_weights != "":
        ops = (replace(one, weights_ns=round(share * one.compute_ns)) if one.kind == "B" else one for one in part.ops)
        part = replace(part, ops=tuple(ops), no_weights="")
    return part


def _asleep_for_weights(model: object) -> float | None:
    """The part of a backward that is W's in a run whose ops sleep; None of others."""
    facts = model if isinstance(model, Mapping) else {}
    whole, weights = (facts.get(name) for name in ("sleep_backward_ms", "sleep_weight_ms"))
    if not isinstance(whole, int | float) or not isinstance(weights, int | float):
        return None
    return weights / whole if 0 <= weights <= whole and whole > 0 else None


def _first(reasons: Iterable[str]) -> str | None:
    return next(filter(None, reasons), None)
