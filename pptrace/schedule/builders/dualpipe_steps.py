"""The eight steps that DualPipe and DualPipe-V share: one rank between two ends of a V.

Source: deepseek-ai/DualPipe, ``DualPipe.step`` and ``DualPipeV.step``; torch.distributed.pipelining.ScheduleDualPipeV.
"""

from __future__ import annotations

from pptrace.schedule.actions import Phase
from pptrace.schedule.builders.counting import Row


def append_steps(row: Row, near: int, far: int, position: int, num_positions: int, num_microbatches: int) -> None:
    """Append a rank's whole step to ``row``.

    ``near`` is the stage that the rank's first microbatch reaches first, ``far`` the one that it (DualPipe-V) or the other
    direction (DualPipe) reaches later. ``position`` counts ranks from the end of the V that is fed, 0 to ``num_positions`` − 1.
    ``num_microbatches`` is that of one stage. Steps 1 to 3 are the warmup, 4 is steady, 5 to 8 the cooldown.
    """
    behind = num_positions - position - 1
    _warm_up(row, near, far, position, behind)
    row.phase = Phase.STEADY
    for index in range(num_microbatches - 2 * num_positions + position + 1):  # step 4
        if index == 0 and behind == 0:
            row.forward(near)  # not overlapped: a smaller bubble
            row.backward(far)
        else:
            row.overlapped(near, far)
        row.overlapped(far, near)
    row.phase = Phase.COOLDOWN
    _cool_down(row, near, far, position, behind)


def _warm_up(row: Row, near: int, far: int, position: int, behind: int) -> None:
    for _ in range(2 * behind):  # step 1
        row.forward(near)
    for _ in range(position + 1):  # step 2
        row.forward(near)
        row.forward(far)
    for _ in range(behind):  # step 3
        row.input_grad(far)
        row.weight_grad()
        row.forward(far)


def _cool_down(row: Row, near: int, far: int, position: int, behind: int) -> None:
    for _ in range(behind):  # step 5
        row.backward(far)
        row.overlapped(far, near)
    order = [stage for _ in range(position + 1) for stage in (far, near)]
    for index, stage in enumerate(order):  # step 6: the second half splits the backward
        if index <= position:
            row.backward(stage)
        else:
            row.input_grad(stage)
    for _ in range(behind):  # step 7
        row.weight_grad()
        row.input_grad(near)
    for _ in range(position + 1):  # step 8
        row.weight_grad()
