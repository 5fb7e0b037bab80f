"""Types of what backwards are made of; each field is the JSON field of the same name."""

from __future__ import annotations

from msgspec import Struct


class BackwardOps(Struct, frozen=True):
    """The backwards of one rank, stage and kind in all steps."""

    rank: int  #: global rank
    stage: int  #: virtual stage
    kind: str  #: B, I, or an overlapped pair, whose forward is in it too
    count: int  #: ops
    compute_ns: int  #: their compute together
    #: part of it that runs forwards again; null without ranges and operators, unless the run says that it recomputes nothing
    recompute_ns: int | None
    #: part of it that computes gradients of weights in a full B; of this project's ops that sleep their W's share; null of other
    #: kinds; without operators; where products are not in pairs (compiled graphs, fused gradients), or operators fill less than
    #: three quarters of the backwards
    weights_ns: int | None


class StepRecompute(Struct, frozen=True):
    """The recompute of all ranks in a step."""

    step: int  #: number of the step
    recompute_ns: int  #: recompute of all ranks together


class RecomputeReport(Struct, frozen=True):
    """Parts of the backwards of each rank, over all microbatches and steps (but those in which kernels are missing)."""

    #: one entry for each rank, stage and kind of backward; empty where nothing is recomputed and no more is known
    ops: tuple[BackwardOps, ...]
    steps: tuple[StepRecompute, ...]  #: one entry for each step; empty where the recompute of a rank is not known
    #: extent to which a run of this project says that it recomputes: ``none``, ``selective``, ``full``; empty of others
    granularity: str
    num_layers: int | None  #: layers of each stage that recompute, with method block; null: all of them, or not known
    of_every_microbatch: bool  #: false where microbatches differ (``--recompute-microbatches-beyond``)
    recompute_reason: str | None  #: reason why a ``recompute_ns`` is null somewhere; null where each is known
    weights_reason: str | None  #: reason why a ``weights_ns`` is null somewhere; null where each is known

    def mean_of_ranks(self, step: int) -> int | None:
        """The recompute of a rank in a step, in the mean, ns; None where it is not known."""
        ranks = {one.rank for one in self.ops}
        return next(
            (of_step.recompute_ns // len(ranks) for of_step in self.steps if of_step.step == step and ranks), None
        )
