"""Types of what the stages compute, by kind of work and part of the model; each field is the JSON field of the same name."""

from __future__ import annotations

from msgspec import Struct


class StagePart(Struct, frozen=True):
    """A kind of work, or parts of the model that are alike, in an op of a stage."""

    name: str  #: kind of work, or of the parts what their names have in common; empty of what is of no part
    ns: int  #: time by which there is more of it, below 0 less


class StageWork(Struct, frozen=True):
    """A kind of work, or a part of the model, in all ops of a stage."""

    #: kind of work, or part of the model; ``others`` are the smallest of more than 40 parts; empty of what is of no part
    name: str
    ns: int  #: its time in all ops
    #: its floating-point operations; over ``ns``: FLOP/s in the table; null of kinds other than ``matmul`` and ``attention``,
    #: which are not counted, of ``others``, and where they are not known
    flops: int | None = None


class StageOps(Struct, frozen=True):
    """The ops of one kind and stage in all steps and replicas."""

    stage: int  #: virtual stage
    kind: str  #: kind of the ops
    count: int  #: ops
    compute_ns: int  #: their compute together
    #: ``compute_ns`` by kind of work (:class:`pptrace.model.device.WorkClass`); they sum to it exactly, the largest first
    classes: tuple[StageWork, ...]
    #: ``compute_ns`` by part of the model; they sum to it exactly; empty where nothing is named and nothing repeats, as in stages
    #: of one layer
    parts: tuple[StageWork, ...]
    flops: int | None = None  #: floating-point operations of all ops together; null where ``no_flops`` says why
    #: ``operators``: by the shapes of their inputs, or ``sizes`` of the model, as the run wrote them down; empty with ``flops``
    #: null
    flops_from: str = ""
    no_flops: str = ""  #: reason why they are null; empty where ``flops`` are known


class StageDifference(Struct, frozen=True):
    """Ops of a stage that take longer than those of the stage with the lower median, by 2 % or more, the mean of each."""

    kind: str  #: kind of the ops
    stage: int  #: stage whose ops take longer
    than: int  #: stage that it is compared with
    more_ns: int  #: time by which the mean op takes longer
    #: part of it that is due to each kind of work, the largest first, be it more or less; they sum to it exactly
    classes: tuple[StagePart, ...]
    #: part of it that is due to each part of the model, those that are alike together (``Layer_0`` and ``Layer_1``): they sum to
    #: it exactly; empty where one of the stages has no parts
    parts: tuple[StagePart, ...] = ()


class StageCompute(Struct, frozen=True):
    """Compute of the stages' ops, and reasons why one takes longer than another."""

    ops: tuple[StageOps, ...]  #: one entry for each stage and kind
    #: one entry for each stage and kind that takes longer; empty where none does
    differences: tuple[StageDifference, ...]
