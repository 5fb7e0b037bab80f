"""Memory of all ranks, as types; each field is the JSON field of the same name, and None is its ``null``."""

from __future__ import annotations

from msgspec import Struct


class InFlight(Struct, frozen=True):
    """Most microbatches of one chunk whose activations are held at once, counted as ``peak_in_flight`` of a step's rank."""

    planned: int | None  #: most by the plan of the step with the highest peak; null without a plan of all ranks
    measured: int | None  #: most of all steps; null as ``peak_in_flight``


class StageActivations(Struct, frozen=True):
    """Activations that one microbatch keeps of a stage of the plan, from its forward to its backward."""

    stage: int  #: virtual stage
    bytes_per_microbatch: int  #: bytes that it keeps
    without_recompute_bytes: int | None = None  #: bytes if no layer recomputed; null in traces of earlier versions
    full_recompute_bytes: int | None = None  #: bytes if each layer did; null in traces of earlier versions


class PredictedMemory(Struct, frozen=True):
    """Memory that the run's sizes and options come to (:mod:`pptrace.model.predicted`), as held between steps."""

    weights_bytes: int  #: parameters
    gradients_bytes: int  #: gradients, at most
    optimizer_bytes: int  #: moments, with main parameters
    #: activations at the peak of the plan, with what is kept from I to W where it splits backwards; null where attention stored
    #: its scores, the routes to experts were not counted, or the router saw noise (``--router-jitter``)
    activations_bytes: int | None
    total_bytes: int | None  #: sum of these four; null as ``activations_bytes``
    #: activations that one microbatch keeps of each stage; empty where that is not predicted
    stages: tuple[StageActivations, ...]


class RankMemory(Struct, frozen=True):
    """The step with a rank's highest peak."""

    rank: int  #: global rank
    pp_rank: int | None  #: rank in the pipeline; null without a pipeline
    #: stages of the plan on this rank; without a plan, the lowest that it ran; empty where none is known
    stages: tuple[int, ...]
    step: int | None  #: the step with the highest peak; null as ``peak_bytes``
    peak_bytes: int | None  #: ``peak_memory_bytes`` of that step; null as there
    #: ``peak_memory_kind`` of that step (:class:`pptrace.model.step_memory.MemoryKind`); null as there
    kind: str | None
    start_bytes: int | None  #: ``start_memory_bytes`` of that step; null as there
    reserved_bytes: int | None  #: ``peak_reserved_bytes`` of that step; null as there
    in_flight: InFlight  #: peak of microbatches in flight
    #: memory that the run's sizes and options come to; null where the trace has no predictions, as of every model but
    #: ``instrument/``'s and of traces of earlier versions; ``reasons`` say which
    predicted: PredictedMemory | None


class MemoryReport(Struct, frozen=True):
    """Memory of every rank."""

    ranks: tuple[RankMemory, ...]  #: one entry per rank in the steps
    reasons: tuple[str, ...]  #: reasons why figures are null, a line each; empty where none are
