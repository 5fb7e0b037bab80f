"""Predictions of a rank as JSON values of its trace: bytes of each axis and kind of call by step, and its memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pptrace.sizes.expert_step import LayerRoutes, Routes
from pptrace.sizes.flops import op_flops
from pptrace.sizes.memory import MemoryPrediction
from pptrace.sizes.step import StepVolume


def predicted_facts(volume: StepVolume, rank: int, steps: range, *, on_device: bool) -> dict[str, object]:
    """The predictions of a rank in some steps.

    ``communication`` has for each range of equal ``steps`` [first, beyond the last] the ``bytes`` by axis and kind, null where
    they depend on routes that were not counted. ``memory`` has bytes of the rank's parts, by ``stages`` of the plan what one
    microbatch keeps (``by_recompute``: if no layer recomputed, or all did), and the ``reason`` where the activations are null.
    ``flops`` are those of an op, by stage of the plan, kind, and kind of work.
    """
    plan, pp_rank, mesh = volume.plan, volume.pp_rank(rank), volume.mesh
    stages = [stage for stage, owner in enumerate(plan.placement) if owner == pp_rank]
    flops = {str(stage): op_flops(volume.facts, plan.model_stage(stage), mesh.tp, mesh.cp) for stage in stages}
    return {
        "communication": _communication(volume, rank, steps),
        "memory": _memory(MemoryPrediction(volume, on_device=on_device), rank),
        "flops": {stage: of_kinds for stage, of_kinds in flops.items() if of_kinds},
    }


def routes_of(rank: int, counts: Mapping[str, Any] | None) -> Routes:
    """The routes that a rank counted (:meth:`instrument.expert_counts.ExpertCounts.facts`)."""
    if counts is None:
        return {}
    kept = [sum(line) for line in counts["kept"] or counts["chosen"]]
    rows = [sum(of_experts) for _, _, of_experts in counts["forwards"]]
    arrived = counts.get("arrived", rows)
    forwards: dict[tuple[int, int, int], list[int]] = {}
    for index, (step, layer, _) in enumerate(counts["forwards"]):
        forwards.setdefault((rank, step, layer), []).append(index)
    return {
        key: LayerRoutes(*([column[index] for index in of_layer] for column in (kept, arrived, rows)))
        for key, of_layer in forwards.items()
    }


def _communication(volume: StepVolume, rank: int, steps: range) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for step in steps:
        num_bytes: dict[str, dict[str, int | None]] = {}
        for (axis, kind), calls in sorted(volume.of_rank(rank, step).items()):
            num_bytes.setdefault(axis, {})[kind] = calls.known_bytes
        if parts and parts[-1]["bytes"] == num_bytes:
            parts[-1]["steps"][1] = step + 1
        else:
            parts.append({"steps": [step, step + 1], "bytes": num_bytes})
    return parts


def _memory(prediction: MemoryPrediction, rank: int) -> dict[str, object]:
    parts, reason = prediction.of_rank(rank), prediction.reason
    if parts.activations is None and reason is None:
        reason = "what experts keep depends on routes that were not counted"
    return {
        "weights_bytes": parts.weights,
        "gradients_bytes": parts.gradients,
        "optimizer_bytes": parts.optimizer,
        "activations_bytes": parts.activations,
        "stages": {str(stage): num_bytes for stage, num_bytes in parts.activations_of_stage.items()},
        "by_recompute": {
            how: {str(stage): num_bytes for stage, num_bytes in of_stages.items()}
            for how, of_stages in parts.by_recompute.items()
        },
        "reason": reason,
    }
