"""Stages that take longer: for more that they do, or for the same; then their rank is slow, where there is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pptrace.analysis.stages.flops import OpSums
from pptrace.analysis.stages.types import StageDifference

_LEAST_RATIO = 1.1
_SAME_NUMBER = 0.02
"""Part of a number of kernels by which two stages may differ and still run as many."""
_LEAST_EXPLAINED = 0.8
_LAYERS = "layers"
"""The part of a stage of our model that its layers are."""


def same_work(
    differences: Sequence[StageDifference], ops: Mapping[tuple[int, str], OpSums], layers: Sequence[int] | None
) -> dict[str, Any] | None:
    """Text of a finding about a stage that does the same as another, and takes longer; None where it does more, or may.

    Args:
        differences: those of the stage, the largest first.
        ops: sums of (stage, kind).
        layers: the number of layers of each stage, all alike; None where they are not known, or not alike.

    Returns:
        ``same_work_as`` (the other stage, of several the median), ``same_work_ratio`` (how many times as long it takes) and
        ``same_work`` in words.
    """
    stage, kinds = differences[0].stage, [one.kind for one in differences]
    others = [other for other in {key[0] for key in ops} - {stage} if all((other, kind) in ops for kind in kinds)]
    if layers is None:
        same = [other for other in others if all(_run_as_many(ops[stage, kind], ops[other, kind]) for kind in kinds)]
        of = "kernels or operators of each kind of work"
    else:
        is_of_layers = all(_is_of_layers(one, len(layers)) for one in differences)
        same = [other for other in others if is_of_layers and layers[stage] <= layers[other]]
        of = f"layers ({layers[stage]})"
    if not same:
        return None
    lengths = {at: sum(ops[at, kind].compute / ops[at, kind].count for kind in kinds) for at in (stage, *same)}
    than = sorted(same, key=lambda other: (lengths[other], other))[(len(same) - 1) // 2]
    ratio = lengths[stage] / lengths[than]
    if ratio < _LEAST_RATIO:
        return None
    words = f"it takes {ratio:.2f} times as long as stage {than} for as many {of}"
    return {"same_work_as": than, "same_work_ratio": round(ratio, 3), "same_work": words}


def _is_of_layers(one: StageDifference, num_stages: int) -> bool:
    """Return whether layers are what takes longer, not the embedding or the head, which are at an end."""
    of_layers = sum(part.ns for part in one.parts if part.name == _LAYERS)
    return 0 < one.stage < num_stages - 1 or of_layers >= _LEAST_EXPLAINED * one.more_ns


def _run_as_many(stage: OpSums, than: OpSums) -> bool:
    """Return whether ops of two stages run as many pieces of each class."""
    names = stage.pieces.keys() | than.pieces.keys()
    pairs = [tuple(of.pieces.get(name, 0) / of.count for of in (stage, than)) for name in names]
    return bool(pairs) and all(abs(a - b) <= _SAME_NUMBER * max(a, b) for a, b in pairs)
