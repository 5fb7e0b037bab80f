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


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Rows of ``forwards`` forwards of a layer together: those that a rank hands in (``own``), those that come to it along ep
    (``arriving``) and to all ranks of its etp group (``gathered``), and E·C ``slots`` of padded buffers.
    """

    forwards: int
    own: int
    arriving: int
    gathered: int
    slots: int


@dataclass(frozen=True, slots=True)
class LayerCalls:
    """Calls of a layer: those that a forward makes ``once``, however often it is computed, those of each computation of it, and
    those of its backward. Of several forwards together an entry is as many calls.
    """

    once: Sequence[ExpertCall]
    forward: Sequence[ExpertCall]
    backward: Sequence[ExpertCall]


def layer_calls(dispatcher: str, sizes: ExpertSizes, rows: LayerRows) -> LayerCalls:
    """The calls of a layer's forwards; none along an axis of one rank."""
    calls = _CALLS[dispatcher](sizes, rows)
    present = {Axis.EP: sizes.ep > 1, Axis.ETP: sizes.etp > 1}
    return LayerCalls(*([call for call in part if present[call.axis]] for part in calls))


def _all_to_all(sizes: ExpertSizes, rows: LayerRows) -> _Parts:
    counts = INDEX_BYTES * sizes.num_experts * rows.forwards
    own, arriving, gathered = (num * sizes.row_bytes for num in (rows.own, rows.arriving, rows.gathered))
    copies = sizes.etp * arriving
    once = [ExpertCall(Axis.EP, "all_to_all", counts), ExpertCall(Axis.ETP, "all_gather", counts * sizes.etp)]
    there_and_back = [
        ExpertCall(Axis.EP, "all_to_all", own, arriving),
        ExpertCall(Axis.EP, "all_to_all", arriving, own),
        ExpertCall(Axis.ETP, "all_to_all", copies, gathered),
        ExpertCall(Axis.ETP, "all_to_all", gathered, copies),
    ]
    return once, there_and_back, there_and_back  # backward: the gradients of what came back, and of what set out


def _padded(sizes: ExpertSizes, rows: LayerRows) -> _Parts:
    num_bytes = rows.slots * sizes.row_bytes
    agreed = [ExpertCall(axis, "all_reduce", INDEX_BYTES * rows.forwards) for axis in (Axis.EP, Axis.ETP)]
    within = [ExpertCall(Axis.ETP, kind, sizes.etp * num_bytes) for kind in ("all_gather", "reduce_scatter")]
    there_and_back = [*[ExpertCall(Axis.EP, "all_to_all", num_bytes)] * 2, *within]
    return [] if sizes.is_fixed else agreed, there_and_back, there_and_back


def _all_gather(sizes: ExpertSizes, rows: LayerRows) -> _Parts:
    routes = rows.forwards * sizes.num_tokens * sizes.top_k
    once, forward, backward = [], [], []
    for axis, num in ((Axis.EP, sizes.ep), (Axis.ETP, sizes.ep * sizes.etp)):
        tokens, weights = num * rows.forwards * sizes.num_tokens * sizes.row_bytes, num * routes * sizes.weight_bytes
        once.append(ExpertCall(axis, "all_gather", num * routes * INDEX_BYTES))
        both = [ExpertCall(axis, kind, tokens) for kind in ("all_gather", "reduce_scatter")]
        forward += [*both, ExpertCall(axis, "all_gather", weights)]
        backward += [*both, ExpertCall(axis, "reduce_scatter", weights)]
    return once, forward, backward


_Parts = tuple[list[ExpertCall], list[ExpertCall], list[ExpertCall]]
_CALLS: Mapping[str, Callable[[ExpertSizes, LayerRows], _Parts]] = {
    "all-to-all": _all_to_all,
    "padded": _padded,
    "all-gather": _all_gather,
}
