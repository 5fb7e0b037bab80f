"""DualPipe's order of calls, written down on its own from deepseek-ai/DualPipe ``DualPipe.step``.

Nothing here uses the package under test, so that the two can disagree.
"""

from __future__ import annotations


class _Rank:
    """Counts as the original does, by direction: 0 is fed at rank 0, 1 at the last rank. A phase is a direction as seen from
    the nearer end."""

    def __init__(self, num_ranks: int, rank: int, half_num_chunks: int) -> None:
        self.is_in_second_half = rank >= num_ranks // 2
        self.stage = (rank, num_ranks + num_ranks - 1 - rank)
        self.first = (0, half_num_chunks)
        self.f_chunk = [0, 0]
        self.b_chunk = [0, 0]
        self.weights: list[str] = []
        self.cells: list[str] = []

    def forward_cell(self, phase: int) -> str:
        phase ^= self.is_in_second_half
        self.f_chunk[phase] += 1
        return f"{self.stage[phase]}F{self.first[phase] + self.f_chunk[phase] - 1}"

    def backward_cell(self, phase: int, enable_zb: bool = False) -> str:
        phase ^= self.is_in_second_half
        self.b_chunk[phase] += 1
        mb = self.first[phase] + self.b_chunk[phase] - 1
        if enable_zb:
            self.weights.append(f"{self.stage[phase]}W{mb}")
        return f"{self.stage[phase]}{'I' if enable_zb else 'B'}{mb}"

    def forward_chunk(self, phase: int) -> None:
        self.cells.append(self.forward_cell(phase))

    def backward_chunk(self, phase: int, enable_zb: bool = False) -> None:
        self.cells.append(self.backward_cell(phase, enable_zb))

    def forward_backward_chunk(self, phase0: int, phase1: int) -> None:
        self.cells.append(f"({self.forward_cell(phase0)};{self.backward_cell(phase1)})OVERLAP_F_B")

    def weight_chunk(self) -> None:
        self.cells.append(self.weights.pop(0))


def dualpipe_row(num_ranks: int, rank: int, num_chunks: int) -> list[str]:
    """The compute actions of a rank. The second direction's stages are called p … 2p−1, its microbatches come second."""
    half_ranks, half_chunks = num_ranks // 2, num_chunks // 2
    half_rank = min(rank, num_ranks - 1 - rank)
    is_middle = rank in (half_ranks - 1, half_ranks)
    me = _Rank(num_ranks, rank, half_chunks)
    for _ in range((half_ranks - half_rank - 1) * 2):
        me.forward_chunk(0)
    for _ in range(half_rank + 1):
        me.forward_chunk(0)
        me.forward_chunk(1)
    for _ in range(half_ranks - half_rank - 1):
        me.backward_chunk(1, enable_zb=True)
        me.weight_chunk()
        me.forward_chunk(1)
    for i in range(half_chunks - num_ranks + half_rank + 1):
        if i == 0 and is_middle:
            me.forward_chunk(0)
            me.backward_chunk(1)
        else:
            me.forward_backward_chunk(0, 1)
        me.forward_backward_chunk(1, 0)
    for _ in range(half_ranks - half_rank - 1):
        me.backward_chunk(1)
        me.forward_backward_chunk(1, 0)
    enable_zb = False
    for i in range(half_rank + 1):
        if i == (half_rank + 1) // 2 and half_rank % 2 == 1:
            enable_zb = True
        me.backward_chunk(1, enable_zb=enable_zb)
        if i == (half_rank + 1) // 2 and half_rank % 2 == 0:
            enable_zb = True
        me.backward_chunk(0, enable_zb=enable_zb)
    for _ in range(half_ranks - half_rank - 1):
        me.weight_chunk()
        me.backward_chunk(0, enable_zb=True)
    for _ in range(half_rank + 1):
        me.weight_chunk()
    assert not me.weights
    return me.cells
