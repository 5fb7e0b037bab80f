"""The region of layers that are parallel over tp, and sharding of full tensors for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from instrument.collectives import AxisGroup
from pptrace.errors import UsageError


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """A region of layers that are parallel over tp.

    With ``sequence``, activations between the layers are sequence shards (Megatron SP). With ``overlap``, communication
    overlaps with the GEMMs (:mod:`instrument.sequence.overlap`); the results are the same, see there for the last bits.
    """

    group: AxisGroup
    sequence: bool = False
    overlap: bool = False

    @property
    def shards_sequence(self) -> bool:
        """Return whether activations are in fact cut: one rank keeps the whole sequence."""
        return self.sequence and self.group.size > 1


def divide(count: int, size: int, what: str) -> int:
    """``count`` / ``size``.

    Raises:
        UsageError: it has a remainder; ``what`` names the things counted, in the plural.
    """
    if count % size:
        raise UsageError(
            f"{count} {what} do not divide among {size} tensor-parallel ranks; choose a multiple of {size}"
        )
    return count // size


def shard(full: Tensor, dim: int, rank: int, size: int) -> Tensor:
    """The part of a full parameter that a rank holds: equal consecutive slices along ``dim``.

    Raises:
        UsageError: ``size`` does not divide the dimension.
    """
    length = divide(full.shape[dim], size, f"entries of dimension {dim}")
    return full.narrow(dim, rank * length, length)


def take_rows(full: Tensor, rows: Sequence[range]) -> Tensor:
    """The rows of a full parameter that a rank holds, in the order given."""
    return torch.cat([full[part.start : part.stop] for part in rows])
