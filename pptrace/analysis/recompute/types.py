"""Types of what backwards are made of; each field is the JSON field of the same name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BackwardOps:
    """The backwards of one ``rank``, ``stage`` and ``kind`` (B, I, or an overlapped pair, whose forward is in it too) in all
    steps: ``count`` of them compute ``compute_ns`` together.

    In ``recompute_ns`` of that they run forwards again, in ``weights_ns`` they compute gradients of weights. None: not known.
    """

    rank: int
    stage: int
    kind: str
    count: int
    compute_ns: int
    recompute_ns: int | None
    weights_ns: int | None

    @property
    def recompute_share(self) -> float | None:
        """The part of the op that is recompute."""
        return None if self.recompute_ns is None or not self.compute_ns else self.recompute_ns / self.compute_ns


@dataclass(frozen=True, slots=True)
class StepRecompute:
    """The recompute of all ranks in a step, ns."""

    step: int
    recompute_ns: int


@dataclass(frozen=True, slots=True)
class RecomputeReport:
    """Parts of the backwards of each rank, stage and kind; the recompute of each step in which it is known of all ranks.

    ``granularity`` is what the run says it recomputes, "" where it says nothing; ``num_layers`` how many layers of each stage do,
    None: all of them. Without ``of_every_microbatch`` only some microbatches recompute so, or what others do not. The reasons say
    why a time is null somewhere, None where each is known.
    """

    ops: tuple[BackwardOps, ...]
    steps: tuple[StepRecompute, ...]
    granularity: str
    num_layers: int | None
    of_every_microbatch: bool
    recompute_reason: str | None
    weights_reason: str | None

    def mean_of_ranks(self, step: int) -> int | None:
        """The recompute of a rank in a step, in the mean, ns; None where it is not known."""
        ranks = {one.rank for one in self.ops}
        return next(
            (of_step.recompute_ns // len(ranks) for of_step in self.steps if of_step.step == step and ranks), None
        )
