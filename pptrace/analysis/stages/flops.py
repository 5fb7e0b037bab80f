"""Floating-point operations of what the stages compute: by the operators that a trace has, else by the sizes of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from pptrace.model.device import WorkClass
from pptrace.model.predicted import PREDICTED
from pptrace.model.tables import Int64

OPERATORS, SIZES = "operators", "sizes"
MULTIPLYING = (WorkClass.MATMUL, WorkClass.ATTENTION)
_NO_SHAPES = "its operators have no shapes: record with record_shapes=True (or with_flops=True), or `pptrace run --record shapes`"
StageFlops = Mapping[tuple[int, str], Mapping[str, int]]
"""FLOPs of an op by its stage and kind, and by kind of work."""
NOT_PREDICTED: StageFlops = {}


class FlopSums(Struct):
    """FLOPs of some ops by the name of a kind of work, or of a part, and the time in which they may multiply, ns, of which
    the FLOPs are not known.
    """

    flops: Counter[str] = field(default_factory=Counter)
    unknown: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, flops: Int64, lengths: Int64) -> None:
        """Add pieces of one name, of which those of unknown FLOPs have -1."""
        self.flops[name] += int(flops[flops > 0].sum())
        self.unknown[name] += int(lengths[flops < 0].sum())

    def update(self, other: FlopSums) -> None:
        """Add those of other ops."""
        self.flops.update(other.flops)
        self.unknown.update(other.unknown)

    def of(self, name: str) -> int | None:
        """The FLOPs of a kind of work or a part; None where they are not known."""
        return None if self.unknown[name] else self.flops[name]


class OpSums(Struct):
    """Sums of the ops of one stage and kind: their number, their compute, ns, that by class and by part, and pieces by class.

    ``class_flops`` and ``part_flops`` are the floating-point operations of each.
    """

    count: int = 0
    compute: int = 0
    classes: Counter[str] = field(default_factory=Counter)
    parts: Counter[str] = field(default_factory=Counter)
    pieces: Counter[str] = field(default_factory=Counter)
    class_flops: FlopSums = field(default_factory=FlopSums)
    part_flops: FlopSums = field(default_factory=FlopSums)


def flop_sums(
    flops: Int64, lengths: Int64, codes: npt.NDArray[np.signedinteger[Any]], names: Iterable[str]
) -> FlopSums:
    """The sums of pieces by the names of their codes."""
    sums, names = FlopSums(), list(names)
    for code in np.unique(codes).tolist():
        sums.add(names[code], flops[codes == code], lengths[codes == code])
    return sums


def predicted_by_run(facts: Iterable[Mapping[str, Any]]) -> StageFlops:
    """The FLOPs that the runtime of a run wrote down of its own ops (:func:`pptrace.sizes.flops.op_flops`); {} of other runs."""
    found: dict[tuple[int, str], dict[str, int]] = {}
    for of_rank in facts:
        of_stages = (of_rank.get(PREDICTED) or {}).get("flops") or {}
        for stage, of_kinds in of_stages.items():
            for kind, by_class in of_kinds.items():
                found[int(stage), str(kind)] = {str(name): int(number) for name, number in by_class.items()}
    return found


def with_sizes(classes: Container[str], count: int, predicted: Mapping[str, int]) -> FlopSums:
    """The FLOPs of so many ops by kind of work, as predicted; an attention without kernels of its own is among products."""
    names = [name for name in MULTIPLYING if name in classes] or [WorkClass.PYTHON]
    counted = Counter({str(name): count * predicted.get(name, 0) for name in names})
    counted[str(names[0])] += count * sum(number for name, number in predicted.items() if name not in names)
    return FlopSums(counted)


def why_unknown(sums: FlopSums, compute_ns: int) -> str:
    """The reason why the FLOPs of some ops are not known; "" where they are."""
    unknown = sum(sums.unknown.values())
    if not unknown:
        return ""
    if not sums.flops.total():
        return _NO_SHAPES
    kinds = " and ".join(name for name, ns in sums.unknown.items() if ns)
    return f"{kinds}, {unknown / max(compute_ns, 1):.1%} of its compute, is in no operator whose FLOPs are known"
