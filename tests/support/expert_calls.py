"""The calls of a layer with experts from the routes of all its ranks, which each rank by itself counts in part."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pptrace.sizes.experts import ExpertCall, ExpertSizes, LayerRows, layer_calls


def expert_calls(dispatcher: str, sizes: ExpertSizes, kept: NDArray[np.int64], rank: int) -> list[ExpertCall]:
    """All calls of one forward and backward, in no order; none along an axis of one rank.

    Args:
        dispatcher: ``all-to-all``, ``padded`` or ``all-gather``.
        sizes: of the layer.
        kept: (ranks, experts) routes of each rank's tokens, without dropped ones.
        rank: whose calls.
    """
    first = rank - rank % sizes.etp
    arriving = {each: _arriving(sizes, kept, each) for each in range(first, first + sizes.etp)}
    slots = sizes.num_experts * sizes.slots
    rows = LayerRows(1, int(kept[rank].sum()), arriving[rank], sum(arriving.values()), slots)
    return [call for part in layer_calls(dispatcher, sizes, rows) for call in part]


def _arriving(sizes: ExpertSizes, kept: NDArray[np.int64], rank: int) -> int:
    """Rows that come to a rank along ep: from those at its place in their etp groups, to its experts."""
    ep_rank, etp_rank = divmod(rank, sizes.etp)
    held = sizes.num_experts // sizes.ep
    return int(kept[etp_rank :: sizes.etp, ep_rank * held : (ep_rank + 1) * held].sum())
