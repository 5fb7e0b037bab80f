"""Bytes that a layer with experts sends, from its sizes and the routes that its tokens took.

Every call of one forward and backward of one microbatch on one rank, by axis: as marks count them, the whole tensor, with this
rank's own part. n tokens with k routes each of h numbers of e bytes; E experts; R rows that come to a rank along ep, R' to all
ranks of its etp group; C slots of an expert for each rank.

    all-to-all   counts 8·E, and 8·E·etp over etp; rows n·k·h·e (without dropped ones) → R·h·e, back the same swapped; over
                 etp copies of R rows for each → R', back the same swapped
    padded       one number of 8 bytes where no capacity fixes C; E·C·h·e four times; over etp etp·E·C·h·e four times
    all-gather   routes 8·ep·n·k; rows ep·n·h·e and weights ep·n·k·p, of p bytes each, there and back; over etp all etp times

Source: the tables of ``instrument.expert``'s dispatchers; measured and predicted are compared call by call in the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pptrace.axes import Axis

INDEX_BYTES = 8
"""Bytes of a route or a count: int64."""


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Sizes of a layer on ranks that share its experts, numbered with etp fastest, then ep.

    ``num_tokens`` is n; ``slots`` is C, which ``is_fixed`` by a capacity or agreed on by the ranks.
    """

    ep: int
    etp: int
    num_experts: int
    top_k: int
    hidden: int
    num_tokens: int
    item_bytes: int
    weight_bytes: int
    slots: int = 0
    is_fixed: bool = False

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.item_bytes


@dataclass(frozen=True, slots=True, order=True)
class ExpertCall:
    """One call: ``bytes`` as its mark has them, and what the rank receives of uneven parts (elsewhere 0)."""

    axis: Axis
    kind: str
    bytes: int
    received_bytes: int = 0


def expert_calls(dispatcher: str, sizes: ExpertSizes, kept: NDArray[np.int64], rank: int) -> list[ExpertCall]:
    """All calls of one forward and backward, in no order; none along an axis of one rank.

    Args:
        dispatcher: ``all-to-all``, ``padded`` or ``all-gather``.
        sizes: of the layer.
        kept: (ranks, experts) routes of each rank's tokens, without dropped ones.
        rank: whose calls.
    """
    calls = _CALLS[dispatcher](sizes, kept, rank)
    present = {Axis.EP: sizes.ep > 1, Axis.ETP: sizes.etp > 1}
    return [call for call in calls if present[call.axis]]


def _all_to_all(sizes: ExpertSizes, kept: NDArray[np.int64], rank: int) -> list[ExpertCall]:
    counts = INDEX_BYTES * sizes.num_experts
    own, arriving = (rows * sizes.row_bytes for rows in (int(kept[rank].sum()), _arriving(sizes, kept, rank)))
    neighbours = range(rank - rank % sizes.etp, rank - rank % sizes.etp + sizes.etp)
    gathered = sum(_arriving(sizes, kept, each) for each in neighbours) * sizes.row_bytes
    copies = sizes.etp * arriving
    return [
        ExpertCall(Axis.EP, "all_to_all", counts),
        ExpertCall(Axis.ETP, "all_gather", counts * sizes.etp),
        *[ExpertCall(Axis.EP, "all_to_all", own, arriving)] * 2,  # rows, and the gradients of what came back
        *[ExpertCall(Axis.EP, "all_to_all", arriving, own)] * 2,
        *[ExpertCall(Axis.ETP, "all_to_all", copies, gathered)] * 2,
        *[ExpertCall(Axis.ETP, "all_to_all", gathered, copies)] * 2,
    ]


def _padded(sizes: ExpertSizes, kept: NDArray[np.int64], rank: int) -> list[ExpertCall]:  # noqa: ARG001
    rows = sizes.num_experts * sizes.slots * sizes.row_bytes
    agreed = [] if sizes.is_fixed else [ExpertCall(axis, "all_reduce", INDEX_BYTES) for axis in (Axis.EP, Axis.ETP)]
    within = [ExpertCall(Axis.ETP, kind, sizes.etp * rows) for kind in ("all_gather", "reduce_scatter")]
    return [*agreed, *[ExpertCall(Axis.EP, "all_to_all", rows)] * 4, *within * 2]


def _all_gather(sizes: ExpertSizes, kept: NDArray[np.int64], rank: int) -> list[ExpertCall]:  # noqa: ARG001
    routes = sizes.num_tokens * sizes.top_k
    calls = []
    for axis, num in ((Axis.EP, sizes.ep), (Axis.ETP, sizes.ep * sizes.etp)):
        rows, weights = num * sizes.num_tokens * sizes.row_bytes, num * routes * sizes.weight_bytes
        calls.append(ExpertCall(axis, "all_gather", num * routes * INDEX_BYTES))
        calls += [ExpertCall(axis, kind, rows) for kind in ("all_gather", "reduce_scatter")] * 2
        calls += [ExpertCall(axis, kind, weights) for kind in ("all_gather", "reduce_scatter")]
    return calls


def _arriving(sizes: ExpertSizes, kept: NDArray[np.int64], rank: int) -> int:
    """Rows that come to a rank along ep: from those at its place in their etp groups, to its experts."""
    ep_rank, etp_rank = divmod(rank, sizes.etp)
    held = sizes.num_experts // sizes.ep
    return int(kept[etp_rank :: sizes.etp, ep_rank * held : (ep_rank + 1) * held].sum())


_Calls = Callable[[ExpertSizes, NDArray[np.int64], int], Sequence[ExpertCall]]
_CALLS: Mapping[str, _Calls] = {"all-to-all": _all_to_all, "padded": _padded, "all-gather": _all_gather}
