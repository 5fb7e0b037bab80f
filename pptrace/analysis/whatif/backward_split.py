"""Cost of computing a backward as I and W: two passes over what a whole B computes in one.

A prediction takes I and W together to be as long as a B. How far they are from that is one unknown, and the interval has both of
its ends. In this project's runtime on CPUs, of a stage of four layers with 128 tokens, I and W together took 1.05 to 1.09 of the
processor time of a B with full recompute, and without it 1.12 to 1.04 where a B takes up to 10 ms, 0.96 to 0.91 from 27 ms on.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pptrace.schedule.actions import Kind
from pptrace.schedule.needs import Output
from pptrace.schedule.plan import Plan

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

SPLIT_COST = 0.08
"""Part of a B by which I and W together may be longer, where the run does not have both."""


def whole_backwards(plan: Plan) -> Bools:
    """Tell which backwards are whole B, shape (model stages, microbatches)."""
    kinds = plan.table.slot_kind.reshape(plan.num_chains, plan.chain_length, plan.num_microbatches, len(Output))
    whole: Bools = kinds.max(axis=0)[:, :, Output.BACKWARD] == Kind.B.code
    return whole


def measured_split_cost(work: Floats, is_whole: Bools, in_pairs: Bools) -> float | None:
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


def parts_of_whole(is_whole: Bools, shares: Floats) -> Floats:
    """The part of each backward of a plan's stages that was measured whole, shape (stages, measured microbatches).

    ``shares`` are those of a backward: of the measured stages in each stage of the plan.
    """
    weights = shares + (shares.sum(axis=1, keepdims=True) == 0)  # a stage that has nothing of them has nothing to split
    parts: Floats = (weights @ is_whole) / (weights @ np.ones(is_whole.shape))
    return parts
