"""Parts of the backwards of one rank: forwards that run again, and gradients of weights."""

from __future__ import annotations

from dataclasses import dataclass, field

from pptrace.intervals import EMPTY, Int64

NO_NODES = "its trace has no operators of autograd"
NO_RANGES = f"{NO_NODES}, and no ranges of recompute"


@dataclass(frozen=True, slots=True, eq=False)
class BackwardParts:
    """Sets of time (:mod:`pptrace.intervals`), ns on the rank's own clock: of its kernels, without a device of its host.

    ``recompute`` is when a backward ran a forward again, ``weights`` when a full backward computed gradients of weights. Each is
    known where its reason is "".
    """

    recompute: Int64 = field(default_factory=lambda: EMPTY)
    weights: Int64 = field(default_factory=lambda: EMPTY)
    no_recompute: str = NO_RANGES
    no_weights: str = NO_NODES
