"""The GPT example whose experts sleep for each row: ``expert_train.py SLOW_RANK FACTOR ARGUMENTS…`` (−1: no rank is slow).

So what experts take depends on their rows and on the rank alone, whatever else runs on the machine.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function

from instrument.examples import train_gpt
from instrument.expert.layer import ExpertLayer

ROW_S = 0.0004
"""Sleep for each row in a forward; twice as much in a backward."""


class _Sleep(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(len(rows) * seconds)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * len(gradients[0]) * ctx.seconds)
        return gradients[0], None


def install(seconds: float) -> None:
    """Make this process's experts sleep for each row."""
    compute = ExpertLayer._compute

    def slower(self: ExpertLayer, rows: Tensor, rows_of_expert: Sequence[int]) -> Tensor:
        slept: Tensor = _Sleep.apply(rows, seconds)  # type: ignore[no-untyped-call]
        return compute(self, slept, rows_of_expert)

    ExpertLayer._compute = slower  # type: ignore[method-assign]


if __name__ == "__main__":
    slow, factor = int(sys.argv[1]), float(sys.argv[2])
    install(ROW_S * (factor if int(os.environ["RANK"]) == slow else 1.0))
    train_gpt.main(sys.argv[3:])
