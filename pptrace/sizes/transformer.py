"""Bytes that the parallel parts of a transformer move, in closed form.

All figures are one rank's, as communication marks count them (:mod:`pptrace.marks`): of a collective the whole tensor,
gathered or before it is scattered, as nccl-tests does; of point-to-point messages what the rank sends and what it
receives. What a whole step of the GPT runtime moves is in :mod:`pptrace.sizes.step`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pptrace.marks import Axis, Collective

SEND, RECV = "send", "recv"
UNKNOWN = -1
"""Bytes of calls that are not known."""


@dataclass(frozen=True, slots=True)
class Calls:
    """Number of calls or messages, and their bytes together, :data:`UNKNOWN` where those of one are."""

    count: int
    bytes: int

    def __add__(self, other: Calls) -> Calls:
        is_known = UNKNOWN not in (self.bytes, other.bytes)
        return Calls(self.count + other.count, self.bytes + other.bytes if is_known else UNKNOWN)

    def __mul__(self, times: int) -> Calls:
        return Calls(self.count * times, self.bytes if self.bytes == UNKNOWN else self.bytes * times)

    @property
    def known_bytes(self) -> int | None:
        return None if self.bytes == UNKNOWN else self.bytes


Volume = Mapping[tuple[str, str], Calls]
"""(axis, kind) → calls; kinds are those of the comms table, of which exchanges and transfers are ``send`` and ``recv``."""


_BUS_FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}
"""Bus bandwidth over algorithm bandwidth, by group size n (nccl-tests, PERFORMANCE.md); 1 for every other kind.

All parts of an all-to-all are taken to be equal: of uneven ones bus bandwidth is not defined.
"""


def bus_factor(kind: str, size: int) -> float | None:
    """Bus bandwidth in parts of that of the algorithm; None of a group of one, which has no bus, or of unknown size."""
    if kind not in _BUS_FACTORS:
        return 1.0
    return _BUS_FACTORS[kind](size) if size > 1 else None


def total(volumes: Iterable[Volume]) -> Volume:
    """The sum, without entries of no call."""
    totals: dict[tuple[str, str], Calls] = {}
    for volume in volumes:
        for key, calls in volume.items():
            totals[key] = totals.get(key, Calls(0, 0)) + calls
    return {key: calls for key, calls in totals.items() if calls.count}


def times(volume: Volume, count: int) -> Volume:
    return {key: calls * count for key, calls in volume.items()}


def collective(axis: Axis, kind: Collective, size: int, num_bytes: int, count: int = 1) -> Volume:
    """``count`` calls with ``num_bytes`` each; none on an axis of one rank, where nothing is communicated."""
    return {(str(axis), str(kind)): Calls(count, count * num_bytes)} if size > 1 else {}


def messages(axis: Axis, num_bytes: int, sent: int, received: int) -> Volume:
    """Point-to-point messages of ``num_bytes`` each."""
    return {
        (str(axis), SEND): Calls(sent, sent * num_bytes),
        (str(axis), RECV): Calls(received, received * num_bytes),
    }


@dataclass(frozen=True, slots=True)
class BothWays:
    """Communication of one layer for one microbatch."""

    forward: Volume
    backward: Volume


@dataclass(frozen=True, slots=True)
class TensorSizes:
    """Activations along tp. ``activation_bytes`` are b · s/cp · h items, of which SP leaves a rank 1/tp between layers.

    With ``overlap``, gathers and scatters next to a GEMM become rings of exchanges (:mod:`instrument.sequence.overlap`).
    """

    tp: int
    activation_bytes: int
    sequence_parallel: bool
    overlap: bool

    @property
    def is_cut(self) -> bool:
        return self.sequence_parallel and self.tp > 1

    def reduced(self, count: int = 1) -> Volume:
        """All-reduces of whole activations."""
        return collective(Axis.TP, Collective.ALL_REDUCE, self.tp, self.activation_bytes, count)

    def gathered(self, count: int = 1) -> Volume:
        return collective(Axis.TP, Collective.ALL_GATHER, self.tp, self.activation_bytes, count)

    def scattered(self, count: int = 1) -> Volume:
        return collective(Axis.TP, Collective.REDUCE_SCATTER, self.tp, self.activation_bytes, count)

    def ring(self, count: int = 1) -> Volume:
        """tp − 1 neighbour exchanges of a 1/tp chunk: what a ring all-gather or reduce-scatter sends."""
        steps = count * (self.tp - 1)
        return messages(Axis.TP, self.activation_bytes // self.tp, steps, steps)


def column_volume(sizes: TensorSizes) -> BothWays:
    """A linear layer cut by outputs: the conjugate f of arXiv 1909.08053, with SP the g of arXiv 2205.05198.

    Nothing in forward and an all-reduce in backward; with SP an all-gather in forward, and in backward the input is
    gathered again (it is kept as a shard) while its gradient is reduce-scattered.
    """
    if not sizes.is_cut:
        return BothWays({}, sizes.reduced())
    again = total((sizes.gathered(), sizes.scattered()))
    return BothWays(sizes.ring() if sizes.overlap else sizes.gathered(), again)


def row_volume(sizes: TensorSizes) -> BothWays:
    """A linear layer cut by inputs: an all-reduce in forward; with SP a reduce-scatter, and in backward an all-gather."""
    if not sizes.is_cut:
        return BothWays(sizes.reduced(), {})
    if sizes.overlap:
        return BothWays(sizes.ring(), sizes.ring())
    return BothWays(sizes.scattered(), sizes.gathered())


def pair_volume(sizes: TensorSizes) -> BothWays:
    """A column and a row layer, one behind the other; a layer has two such pairs: 4 all-reduces of b·s·h (arXiv 1909.08053,
    section 3).

    With SP 4 all-gathers and 4 reduce-scatters, as many bytes on the wire, and 2 all-gathers that fetch kept shards again
    (arXiv 2205.05198, section 4.2.2).
    """
    column, row = column_volume(sizes), row_volume(sizes)
    return BothWays(total((column.forward, row.forward)), total((column.backward, row.backward)))


def vocabulary_volume(sizes: TensorSizes) -> BothWays:
    """An embedding cut by vocabulary: an all-reduce in forward; with SP a reduce-scatter, and in backward an all-gather."""
    if not sizes.is_cut:
        return BothWays(sizes.reduced(), {})
    return BothWays(sizes.scattered(), sizes.gathered())


def cross_entropy_volume(tp: int, tokens: int, number_bytes: int) -> Volume:
    """Communication of the cross-entropy of logits cut by vocabulary: 3 · b · s numbers in place of b · s · V logits (arXiv
    1909.08053, section 3).

    The largest logit of each token, then two sums in one all-reduce; in forward, and nothing in backward.
    """
    largest = collective(Axis.TP, Collective.ALL_REDUCE, tp, tokens * number_bytes)
    return total((largest, collective(Axis.TP, Collective.ALL_REDUCE, tp, 2 * tokens * number_bytes)))


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """One layer's attention over whole sequences by ``ring`` · ``ulysses`` context ranks.

    Heads are those of one rank of tp. ``sum_bytes`` is the width of what gradients are summed in; ``gathers``: keys
    do not rotate, but are gathered. ``value_dim`` is that of values and the output where it is not ``head_dim``.
    """

    microbatch: int
    sequence: int
    heads: int
    kv_heads: int
    head_dim: int
    item_bytes: int
    ring: int = 1
    ulysses: int = 1
    gathers: bool = False
    value_dim: int | None = None

    @property
    def sum_bytes(self) -> int:
        return max(4, self.item_bytes)

    @property
    def mean_dim(self) -> int:
        """The mean of a key and its value, or of a query and its output, numbers."""
        return (self.head_dim + (self.head_dim if self.value_dim is None else self.value_dim)) // 2

    @property
    def travelling_kv_heads(self) -> int:
        """KV heads that Ulysses shares out: as many copies as make one for each of its ranks."""
        return self.kv_heads if self.kv_heads % self.ulysses == 0 else self.ulysses


def ulysses_elements(sequence: int, hidden: int, size: int, kv_hidden: int | None = None) -> int:
    """Elements per layer and sequence, forward and backward: 8 · N · d / P.

    q, k, v and the output, N · d / P elements each, in either direction (DeepSpeed-Ulysses, arXiv 2309.14509, section
    3.2, counts the forward: 4 · N · h / P). ``kv_hidden`` is the width of k and v where it differs: KV heads that
    travel times head dim.
    """
    kv_hidden = hidden if kv_hidden is None else kv_hidden
    return 4 * (hidden + kv_hidden) * sequence // size


def ring_step_bytes(chunk: int, hidden: int, item_bytes: int = 2) -> int:
    """Bytes of one step and sequence: 4 · c · d with 16-bit items.

    k and v of the c positions that a rank holds (Ring Attention, arXiv 2310.01889, section 3). ``hidden`` is the width
    of k: KV heads times head dim.
    """
    return 2 * chunk * hidden * item_bytes


def ulysses_volume(sizes: AttentionSizes) -> BothWays:
    """The all-to-alls: q, k and v in one, the output in another; the same bytes in backward."""
    held = sizes.sequence // sizes.ring
    hidden, kv_hidden = sizes.heads * sizes.mean_dim, sizes.travelling_kv_heads * sizes.mean_dim
    both = sizes.microbatch * ulysses_elements(held, hidden, sizes.ulysses, kv_hidden) * sizes.item_bytes
    each = {(str(Axis.CP), str(Collective.ALL_TO_ALL)): Calls(2, both // 2)} if sizes.ulysses > 1 else {}
    return BothWays(each, each)


def ring_volume(sizes: AttentionSizes) -> BothWays:
    """The exchanges: ring − 1 steps with k and v, and in backward as many again and as many with their gradients' sums."""
    hidden = sizes.travelling_kv_heads // sizes.ulysses * sizes.mean_dim
    held, steps = sizes.microbatch * sizes.sequence // sizes.ring, sizes.ring - 1
    keys = messages(Axis.CP, ring_step_bytes(held, hidden, sizes.item_bytes), steps, steps)
    sums = messages(Axis.CP, ring_step_bytes(held, hidden, sizes.sum_bytes), steps, steps)
    return BothWays(total((keys,)), total((keys, sums)))


def gather_volume(sizes: AttentionSizes) -> BothWays:
    """The keys and values of all ranks of the ring, in backward again, and the sums of their gradients."""
    hidden = sizes.travelling_kv_heads // sizes.ulysses * sizes.mean_dim
    tokens = sizes.microbatch * sizes.sequence

    def of(kind: Collective, item_bytes: int) -> Volume:
        return collective(Axis.CP, kind, sizes.ring, ring_step_bytes(tokens, hidden, item_bytes))

    keys = of(Collective.ALL_GATHER, sizes.item_bytes)
    return BothWays(keys, total((keys, of(Collective.REDUCE_SCATTER, sizes.sum_bytes))))


def _keys_volume(sizes: AttentionSizes) -> BothWays:
    return gather_volume(sizes) if sizes.gathers else ring_volume(sizes)


def attention_volume(sizes: AttentionSizes) -> BothWays:
    """Communication of forward and backward together (USP, arXiv 2405.07719)."""
    parts = (ulysses_volume(sizes), _keys_volume(sizes))
    return BothWays(total(part.forward for part in parts), total(part.backward for part in parts))


def attention_again_volume(sizes: AttentionSizes) -> Volume:
    """Communication that selective recompute repeats: q, k and v are shared out again and keys travel again; no output comes
    back.

    Backward needs the attention's output, which is there before Ulysses gives it back, so that the recomputation ends
    there.
    """
    scattered: Volume = {}
    if sizes.ulysses > 1:
        numbers = sizes.heads * sizes.head_dim + 2 * sizes.travelling_kv_heads * sizes.mean_dim
        held = sizes.sequence // (sizes.ring * sizes.ulysses)
        num_bytes = sizes.microbatch * held * numbers * sizes.item_bytes
        scattered = collective(Axis.CP, Collective.ALL_TO_ALL, sizes.ulysses, num_bytes)
    return total((scattered, _keys_volume(sizes).forward))
