"""Pieces of a rank's compute: when which kind of work ran, and for which part of the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from pptrace.model.tables import Int8, Int32, Int64


class WorkClass(StrEnum):
    """Kinds of work that kernels and operators do, as ``stages[].classes[].name`` of the report names them."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    NORM = "norm"
    LOSS = "softmax and loss"
    EMBEDDING = "embedding"
    OPTIMIZER = "optimizer"
    ELEMENTWISE = "elementwise"
    REDUCTION = "reduction"
    COPY = "copy"
    RANDOM = "random numbers"
    OTHER = "other work"
    PYTHON = "outside operators"


CLASSES = tuple(WorkClass)


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Disjoint pieces of time in order, ns on the rank's own clock, in which it computed: of kernels each until another one runs
    that began before it had ended, without a device of the innermost operators.

    ``work`` is the index of each one's class in :data:`CLASSES`, ``part`` that of its part of the model in ``names``: a module or
    a range that the program set; the first name is "", of what nothing names. ``name`` is a number for the name of each kernel or
    operator. ``flops`` are the floating-point operations of the operators whose longest piece it is: 0 where another one is,
    or it multiplies nothing, -1 where it may multiply, but is in no operator whose FLOPs are known.
    """

    start_ns: Int64 = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    end_ns: Int64 = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    work: Int8 = field(default_factory=lambda: np.zeros(0, dtype=np.int8))
    part: Int32 = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    name: Int32 = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    names: tuple[str, ...] = ("",)
    flops: Int64 = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.start_ns)
