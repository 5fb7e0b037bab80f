"""Costs of the embedding, the head and each layer as measured: from the parts of the model that the ops of the stages computed.

A part of the first stage alone is of its embedding, one of the last stage alone of its head and loss; what several stages have is
layers. Parts by order, which nothing names, tell neither.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct

from pptrace.analysis.stages.layer_order import BEFORE, BEHIND, REPEAT
from pptrace.analysis.stages.types import StageCompute, StageOps
from pptrace.analysis.whatif.stage_map import FEWEST_STAGES
from pptrace.model.tables import Floats
from pptrace.schedule.plan import Plan

_KINDS = (("F",), ("I", "B"), ("W", "B"))
"""Kinds of ops that each output is of, the first that a run has."""
_NUMBER = re.compile(r"[ _.:]*(\d+)$")
_MOST_UNKNOWN = 0.1
"""Time of no part, in parts of that of parts, up to which these tell what the ends have besides layers."""
_BY_ORDER = (BEFORE, BEHIND, REPEAT)


class MeasuredLayers(Struct, frozen=True, eq=False):
    """``ends`` are parts of the first and the last stage's ops that are not of its layers, shape (2, outputs), NaN where that was
    not measured. ``weights`` are what each layer takes, in any unit; None where layers are not known one by one.
    """

    ends: Floats
    weights: Floats | None


def measured_layers(stages: StageCompute | None, plan: Plan, layers: Sequence[int] | None) -> MeasuredLayers | None:
    """The layers of a run; None where no parts of its forwards are known.

    Of backwards without parts the ends of two stages, which nothing else tells, have the same share as of forwards: both multiply
    the same matrices.
    """
    if stages is None or layers is None or plan.chain_length < 2:
        return None
    of_kinds: dict[str, dict[int, list[StageOps]]] = {}
    for ops in stages.ops:
        of_kinds.setdefault(ops.kind, {}).setdefault(plan.model_stage(ops.stage), []).append(ops)
    last = plan.chain_length - 1
    alike = [_by_alike(of_kinds.get("F", {}).get(stage, [])) for stage in range(last + 1)]
    if not all(alike):
        return None
    of_layers = {name for name in alike[0] if any(name in of_stage for of_stage in alike[1:])}
    of_layers |= {name for of_stage in alike[1:-1] for name in of_stage}
    if not all(of_layers & of_stage.keys() for of_stage, number in zip(alike, layers, strict=True) if number):
        return None
    ends = np.full((2, len(_KINDS)), np.nan)
    for end, stage in ((0, 0), (1, last)):
        of_forwards = _share_beyond(alike[stage], of_layers)
        for output, names in enumerate(_KINDS):
            kind = next((name for name in names if name in of_kinds), "F")
            ends[end, output] = _share_beyond(_by_alike(of_kinds[kind].get(stage, [])), of_layers)
        if plan.chain_length < FEWEST_STAGES:
            ends[end] = np.where(np.isnan(ends[end]), of_forwards, ends[end])
    if plan.chain_length < FEWEST_STAGES and np.isnan(ends).any():
        return None
    return MeasuredLayers(ends, _weights(of_kinds, of_layers, layers))


def _share_beyond(parts: Mapping[str, int], of_layers: set[str]) -> float:
    """The part of a stage's ops that is not of its layers; NaN where parts are not known, or what is of none is too much."""
    known = sum(ns for name, ns in parts.items() if name)
    if not known or parts.get("", 0) > _MOST_UNKNOWN * known:
        return np.nan
    return sum(ns for name, ns in parts.items() if name and name not in of_layers) / known


def _by_alike(ops: Sequence[StageOps]) -> Mapping[str, int]:
    """Time of the named parts of ops of one stage, those that are numbered together; {} without any, or of parts by order."""
    found: dict[str, int] = {}
    for part in (part for of_one in ops for part in of_one.parts):
        if part.name.startswith(_BY_ORDER):
            return {}
        name = _NUMBER.sub("", part.name)
        found[name] = found.get(name, 0) + part.ns
    return found


def _weights(
    of_kinds: Mapping[str, Mapping[int, Sequence[StageOps]]], names: set[str], layers: Sequence[int]
) -> Floats | None:
    """The time of each layer in a forward and a backward; None where one stage's numbered parts are not as many as its layers."""
    weights: list[float] = []
    for stage, number in enumerate(layers):
        of_parts: dict[int, float] = {}
        for of_stages in of_kinds.values():
            for ops in of_stages.get(stage, ()):
                for part in ops.parts:
                    match = _NUMBER.search(part.name)
                    if match and _NUMBER.sub("", part.name) in names:
                        of_parts[int(match[1])] = of_parts.get(int(match[1]), 0.0) + part.ns / ops.count
        if len(of_parts) != number:
            return None
        weights += [of_parts[index] for index in sorted(of_parts)]
    return np.array(weights)
