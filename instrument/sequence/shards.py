"""Equal shards of a tensor, one for each rank of an axis."""

from __future__ import annotations

from torch import Tensor

from instrument.collectives import AxisGroup
from pptrace.errors import UsageError


def require_divisible(sequence: int, group: AxisGroup) -> None:
    """Refuse a sequence that cannot be cut into equal shards.

    Raises:
        UsageError: the ranks do not divide it.
    """
    if sequence % group.size:
        raise UsageError(
            f"sequence parallelism cuts a sequence of {sequence} into {group.size} shards, one for each rank of "
            f"{group.axis}; choose a multiple of {group.size}"
        )


def local_part(x: Tensor, dim: int, group: AxisGroup) -> Tensor:
    """This rank's part of ``x`` along ``dim``."""
    return x.chunk(group.size, dim)[group.rank].contiguous()
