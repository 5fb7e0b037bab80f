"""Parts of a backward in predictions: recompute, W's part of a full one, other numbers of layers that recompute; and what I and W
cost as two passes over what a whole B computes in one.

A prediction takes I and W together to be as long as a B. How far they are from that is one unknown, and the interval has both of
its ends. In this project's runtime on CPUs, of a stage of four layers with 128 tokens, I and W together took 1.05 to 1.09 of the
processor time of a B with full recompute, and without it 1.12 to 1.04 where a B takes up to 10 ms, 0.96 to 0.91 from 27 ms on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from pptrace.analysis.recompute.types import BackwardOps, RecomputeReport
from pptrace.analysis.whatif.stage_map import end_shares
from pptrace.errors import UsageError
from pptrace.model.tables import Bool, Floats
from pptrace.schedule.actions import Kind
from pptrace.schedule.needs import Output
from pptrace.schedule.plan import Plan

if TYPE_CHECKING:
    from pptrace.analysis.whatif.stage_costs import StageCosts


SPLIT_COST = 0.08
"""Part of a B by which I and W together may be longer, where the run does not have both."""


def whole_backwards(plan: Plan) -> Bool:
    """Tell which backwards are whole B, shape (model stages, microbatches)."""
    kinds = plan.table.slot_kind.reshape(plan.num_chains, plan.chain_length, plan.num_microbatches, len(Output))
    whole: Bool = kinds.max(axis=0)[:, :, Output.BACKWARD] == Kind.B.code
    return whole


def measured_split_cost(work: Floats, is_whole: Bool, in_pairs: Bool) -> float | None:
    """The part of a B by which I and W together are longer: the median over the stages that have both; None without any.

    Args:
        work: what ops took, ns, shape (windows, model stages, microbatches, outputs); of a whole B all in ``BACKWARD``.
        is_whole: as :func:`whole_backwards` has it.
        in_pairs: the same of those that ran overlapped with a forward, whose part of the pair is not measured.
    """
    both = np.median(work[..., Output.BACKWARD] + work[..., Output.WEIGHT_GRAD], axis=0)
    ratios = []
    for stage, (whole, paired) in enumerate(zip(is_whole, in_pairs, strict=True)):
        of_whole, of_split = both[stage, whole & ~paired], both[stage, ~whole]
        if len(of_whole) and len(of_split) and (usual := float(np.median(of_whole))):
            ratios.append(float(np.median(of_split)) / usual)
    return float(np.median(ratios)) - 1 if ratios else None


def parts_of_whole(is_whole: Bool, shares: Floats) -> Floats:
    """The part of each backward of a plan's stages that was measured whole, shape (stages, measured microbatches).

    ``shares`` are those of a backward: of the measured stages in each stage of the plan.
    """
    weights = shares + (shares.sum(axis=1, keepdims=True) == 0)  # a stage that has nothing of them has nothing to split
    parts: Floats = (weights @ is_whole) / (weights @ np.ones(is_whole.shape))
    return parts


WEIGHT_SHARE, WEIGHT_SHARES = 0.35, (0.25, 0.5)
"""Part of a full backward, without its recompute, that is the gradient of the weights, where nothing tells it; and its bounds."""
_MOST_RECOMPUTE = 1 / 3
"""Part of a full backward that a recompute of all of its forward is, where an F, an I and a W take as long."""
_OF_OPERATORS = (0.85, 1.5)
"""W by itself as a multiple of the gradients of weights in a full B, by its operators: then also what it does around them."""


class BackwardShares(Struct, frozen=True, eq=False):
    """Parts of full backwards by stage of the model: ``recompute``, and ``weights`` as the operators in them tell it; NaN where
    that is not known.
    """

    recompute: Floats
    weights: Floats

    def of_weights(self, factor: float | None = None) -> Floats:
        """W's part of a full backward; with a ``factor`` between 0 and 1 that from the least to the most that it may be."""
        none = np.nan_to_num(self.recompute)
        if factor is None:
            return np.where(np.isnan(self.weights), WEIGHT_SHARE * (1 - none), self.weights)
        most_again = none if factor else np.nan_to_num(self.recompute, nan=_MOST_RECOMPUTE)
        guessed = np.interp(factor, (0, 1), WEIGHT_SHARES) * (1 - most_again)
        measured = np.minimum(self.weights * np.interp(factor, (0, 1), _OF_OPERATORS), 1 - none)
        return np.where(np.isnan(self.weights), guessed, measured)


def backward_shares(recompute: RecomputeReport | None, plan: Plan) -> BackwardShares:
    """The parts of backwards that the report tells; of I and W that of the I."""
    unknown = np.full(plan.chain_length, np.nan)
    if recompute is None:
        return BackwardShares(unknown, unknown)
    if not recompute.ops and recompute.recompute_reason is None:
        return BackwardShares(np.zeros(plan.chain_length), unknown)
    of_stage: list[list[BackwardOps]] = [[] for _ in unknown]
    for one in recompute.ops:
        if one.kind != "OVERLAP_F_B" and one.stage < plan.num_stages:
            of_stage[plan.model_stage(one.stage)].append(one)
    again, weights = (
        np.array([_share(ops, [getattr(one, name) for one in ops]) for ops in of_stage])
        for name in ("recompute_ns", "weights_ns")
    )
    return BackwardShares(again, weights)


def _share(ops: Sequence[BackwardOps], parts: Sequence[int | None]) -> float:
    known = [(one.compute_ns, part) for one, part in zip(ops, parts, strict=True) if part is not None]
    compute = sum(ns for ns, _ in known)
    return sum(part for _, part in known) / compute if compute else np.nan


def layers_that_recompute(recompute: RecomputeReport | None, layers: Sequence[int] | None) -> tuple[float, ...]:
    """The part of each stage's layers that recomputes fully today, all of them in a stage without any; () where something else
    recomputes, or that is not known.
    """
    if recompute is None or recompute.granularity != "full" or layers is None or not recompute.of_every_microbatch:
        return ()
    return tuple(min(of_stage, recompute.num_layers or of_stage) / of_stage if of_stage else 1.0 for of_stage in layers)


def parts_after(costs: StageCosts, num_layers: int, num_stages: int) -> Floats:
    """The part of each measured stage's layers that recomputes where ``num_layers`` of each of ``num_stages`` do (Megatron-LM's
    method block).

    Raises:
        UsageError: the layers of the stages are not known.
    """
    if not num_layers:
        return np.zeros(costs.num_stages)
    if costs.layers is None:
        raise UsageError(
            f"--recompute-layers {num_layers}: the trace does not tell the layers of its stages; give --layers"
        )
    layers = np.array(costs.layers, dtype=np.float64)
    if num_stages != costs.num_stages:
        layers[:] = layers.sum() / num_stages
    return np.minimum(num_layers, layers) / np.maximum(layers, 1)


def with_recompute(costs: StageCosts, parts: Floats) -> StageCosts:
    """The costs where these parts of the layers of each stage run their forward again in the backward, and no others.

    What recomputes fully today tells what a layer takes for that, else its forward does (of three stages or more, without what
    the ends have besides their layers).

    Raises:
        UsageError: it is not known what the run recomputes.
    """
    if np.isnan(costs.recompute).any():
        raise UsageError(
            "--recompute-layers: what backwards recompute today is not known; record with `pptrace run`, or with operators"
        )
    work = costs.work.copy()
    today = costs.recompute[:, np.newaxis] * (work[..., Output.BACKWARD] + work[..., Output.WEIGHT_GRAD])
    if len(costs.recomputing) and all(costs.recomputing):
        of_all = today / np.array(costs.recomputing)[:, np.newaxis]
    else:
        kept = np.ones(costs.num_stages)
        kept[[0, -1]] -= end_shares(costs.typical, costs.layers or (1,) * costs.num_stages)[:, Output.FORWARD]
        of_all = work[..., Output.FORWARD] * kept[:, np.newaxis]
    without = np.maximum(work[..., Output.BACKWARD] - today, 0.0)
    work[..., Output.BACKWARD] = without + parts[:, np.newaxis] * of_all
    both = work[..., Output.BACKWARD] + work[..., Output.WEIGHT_GRAD]
    again = np.median(parts[:, np.newaxis] * of_all / np.maximum(both, 1.0), axis=(0, 2))
    return replace(costs, work=work, inner=np.minimum(costs.inner, work), recompute=again, recomputing=())
