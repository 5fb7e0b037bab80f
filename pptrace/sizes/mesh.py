"""The mesh of ranks, as far as sizes depend on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pptrace import axes
from pptrace.axes import MESH_ORDER, Axis
from pptrace.errors import UsageError


class Mesh(Protocol):
    """A mesh of a run (``instrument.mesh.MeshShape``), or of none yet (:class:`MeshSizes`)."""

    @property
    def tp(self) -> int: ...
    @property
    def cp(self) -> int: ...
    @property
    def dp(self) -> int: ...
    @property
    def ep(self) -> int: ...
    @property
    def etp(self) -> int: ...
    @property
    def edp(self) -> int: ...
    @property
    def order(self) -> tuple[Axis, ...]: ...

    def coordinates_of(self, rank: int) -> tuple[int, int, int, int]:
        """(pp, dp, cp, tp) of a global rank."""

    def size_of(self, axis: Axis) -> int:
        """The size of an axis that ranks are numbered along."""


@dataclass(frozen=True, slots=True)
class MeshSizes:
    """Sizes of the axes of a mesh whose ranks are in Megatron-LM's order, the pipeline's slowest.

    Raises:
        UsageError: experts cannot be spread over the ranks of a stage.
    """

    pp: int
    tp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        if self.of_stage % (self.ep * self.etp):
            raise UsageError(
                f"ep {self.ep} does not divide the {self.of_stage} ranks of a stage (dp · cp · tp), over which experts are "
                "spread; choose a divisor"
            )

    @property
    def of_stage(self) -> int:
        """Ranks of one stage."""
        return self.tp * self.cp * self.dp

    @property
    def world(self) -> int:
        return self.pp * self.of_stage

    @property
    def edp(self) -> int:
        """Ranks that hold the same experts of a stage."""
        return self.of_stage // (self.ep * self.etp)

    @property
    def order(self) -> tuple[Axis, ...]:
        return MESH_ORDER

    def coordinates_of(self, rank: int) -> tuple[int, int, int, int]:
        at = axes.coordinates_of(rank, {axis: self.size_of(axis) for axis in self.order})
        return at[Axis.PP], at[Axis.DP], at[Axis.CP], at[Axis.TP]

    def size_of(self, axis: Axis) -> int:
        size: int = getattr(self, axis)
        return size
