"""Types of what the stages compute, by kind of work and part of the model; each field is the JSON field of the same name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StagePart:
    """A kind of work, or a part of the model: its time in an op of a stage, ns."""

    name: str
    ns: int


@dataclass(frozen=True, slots=True)
class StageWork:
    """A kind of work, or a part of the model: its time in all ops of a stage, ns, and its floating-point operations, None where
    they are not known or not counted: those of matrix products, convolutions and attention are.
    """

    name: str
    ns: int
    flops: int | None = None


@dataclass(frozen=True, slots=True)
class StageOps:
    """The ops of one ``kind`` and ``stage`` in all steps and replicas: ``count`` of them compute ``compute_ns`` together.

    ``classes`` (:class:`pptrace.model.pieces.WorkClass`) sum to it exactly, and so do ``parts``: modules or ranges that the
    program named, else what the order of kernels repeats; "" is what is of no part; none where nothing tells any.

    ``flops`` are the floating-point operations of all of it, ``flops_from`` what tells them: ``operators`` by the shapes of their
    inputs, or ``sizes`` of the model, as the run wrote them down; None and "" where neither does, and ``no_flops`` says why.
    """

    stage: int
    kind: str
    count: int
    compute_ns: int
    classes: tuple[StageWork, ...]
    parts: tuple[StageWork, ...]
    flops: int | None = None
    flops_from: str = ""
    no_flops: str = ""


@dataclass(frozen=True, slots=True)
class StageDifference:
    """Time by which an op of a ``stage`` takes longer than one of the stage ``than``, ns, the mean of each, and what of it is
    due to each kind of work: ``classes`` sum to ``more_ns`` exactly, and so do ``parts``, in which those that are alike are
    together; there are none where one of the stages has none.
    """

    kind: str
    stage: int
    than: int
    more_ns: int
    classes: tuple[StagePart, ...]
    parts: tuple[StagePart, ...] = ()


@dataclass(frozen=True, slots=True)
class StageCompute:
    """The compute of all stages: of their ops, and of those of each kind that take longer than the median stage's."""

    ops: tuple[StageOps, ...]
    differences: tuple[StageDifference, ...]
