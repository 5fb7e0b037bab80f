"""GEMMs overlapped with the communication that feeds or follows them, as in Transformer Engine's userbuffers overlap.

Two patterns split a GEMM along the sequence, one chunk per rank of the axis:

- :func:`gather_matmul`: the all-gather becomes a ring of neighbour exchanges; while the GEMM works on the chunk at hand, that
  chunk travels on.
- :func:`matmul_scatter`: the reduce-scatter becomes a message to each owner; while a partial result travels, the next is
  computed. The owner adds them up at the end, in the order of the ranks.

The third, bulk overlap of a whole collective with a GEMM that does not need it, is with the layers
(:mod:`instrument.tensor.linear`).

Results: the same products and the same sums. A chunk's rows are the same dot products as those of the whole GEMM, which a
BLAS kernel may add up in another order when it has fewer rows (bfloat16 kernels do). The scatter form adds the same partial
results in the order of the ranks, a collective in an order that its backend chooses, which with more than two ranks may differ in
the last bits. Where sums are exact, switching overlap on changes nothing, bit by bit.
"""

from __future__ import annotations

from torch import Tensor

from instrument.collectives import AxisGroup, Pending

SEQUENCE_DIM = -2
"""Dimension of the sequence in activations (…, sequence, hidden)."""


def gather_matmul(shard: Tensor, matrix: Tensor, group: AxisGroup) -> tuple[Tensor, Tensor]:
    """All-gather ``shard`` (…, s/n, i) along the sequence and multiply with ``matrix`` (i, o), in n ring chunks.

    Each rank sends and receives (n − 1) chunks: as many bytes as a ring all-gather.

    Returns:
        (product (…, s, o), gathered input (…, s, i)).
    """
    n, rows = group.size, shard.shape[SEQUENCE_DIM]
    whole = shard.new_empty((*shard.shape[:-2], n * rows, shard.shape[-1]))
    product = shard.new_empty((*shard.shape[:-2], n * rows, matrix.shape[-1]))
    chunk = shard.contiguous()
    for step in range(n):
        pending = group.start_rotation(chunk) if step < n - 1 else None
        start = (group.rank - step) % n * rows
        product.narrow(SEQUENCE_DIM, start, rows).copy_(chunk.matmul(matrix))
        whole.narrow(SEQUENCE_DIM, start, rows).copy_(chunk)
        if pending is not None:
            chunk = pending.wait()
    return product, whole


def matmul_scatter(x: Tensor, matrix: Tensor, group: AxisGroup) -> Tensor:
    """Multiply ``x`` (…, s, i) with ``matrix`` (i, o) and reduce-scatter along the sequence, in n chunks.

    The chunk of rank + k is computed k-th and sent while the next is computed; this rank's chunk comes last.
    Each rank sends and receives (n − 1) chunks: as many bytes as a ring reduce-scatter.

    Returns:
        This rank's part (…, s/n, o) of the sum.
    """
    n, rank = group.size, group.rank
    pieces = x.chunk(n, SEQUENCE_DIM)
    rotations: dict[int, Pending[Tensor]] = {}
    for distance in range(1, n):
        owner, source = (rank + distance) % n, (rank - distance) % n
        partial = pieces[owner].matmul(matrix)
        rotations[source] = group.start_rotation(partial, distance)
    local = pieces[rank].matmul(matrix)
    parts = {source: pending.wait() for source, pending in rotations.items()} | {rank: local}
    total = parts[0]
    for source in range(1, n):
        total = total + parts[source]
    return total
