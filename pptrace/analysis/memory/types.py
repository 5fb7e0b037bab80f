"""Memory of all ranks, as types; each field is the JSON field of the same name, and None is its ``null``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InFlight:
    """Most microbatches of one chunk whose activations are held at once, by the plan and as measured."""

    planned: int | None
    measured: int | None


@dataclass(frozen=True, slots=True)
class StageActivations:
    """Activations that one microbatch keeps of a stage of the plan, bytes, from its forward to its backward; and those that it
    would keep if no layer recomputed, or each did.
    """

    stage: int
    bytes_per_microbatch: int
    without_recompute_bytes: int | None = None
    full_recompute_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class PredictedMemory:
    """Memory that the run's sizes and options come to (:mod:`pptrace.model.predicted`)."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int | None
    total_bytes: int | None
    stages: tuple[StageActivations, ...]


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The step with a rank's highest peak; ``kind`` as in :class:`pptrace.model.step_memory.MemoryKind`."""

    rank: int
    pp_rank: int | None
    stages: tuple[int, ...]
    step: int | None
    peak_bytes: int | None
    kind: str | None
    start_bytes: int | None
    reserved_bytes: int | None
    in_flight: InFlight
    predicted: PredictedMemory | None


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """``reasons`` say why figures are null."""

    ranks: tuple[RankMemory, ...]
    reasons: tuple[str, ...]
