"""The mesh of ranks, as far as sizes depend on it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from pptrace import axes
from pptrace.axes import MESH_ORDER, Axis
from pptrace.errors import UsageError


@dataclass(frozen=True, slots=True)
class MeshAxes:
    """Size of every axis; ``order`` says which varies fastest from rank to rank (first) and which slowest.

    ``ep`` of the ranks of a stage share its experts, and ``etp`` each of them; both take no ranks of their own.
    """

    pp: int
    dp: int = 1
    cp: int = 1
    tp: int = 1
    order: tuple[Axis, ...] = MESH_ORDER
    ep: int = 1
    etp: int = 1

    @property
    def of_stage(self) -> int:
        """Ranks of one stage: dp · cp · tp."""
        return self.dp * self.cp * self.tp

    @property
    def edp(self) -> int:
        """Ranks that hold the same experts of a stage."""
        return self.of_stage // (self.ep * self.etp)

    @property
    def world(self) -> int:
        return prod(self.sizes.values())

    @property
    def sizes(self) -> dict[Axis, int]:
        """Sizes of the axes that ranks are numbered along."""
        return {axis: getattr(self, axis) for axis in MESH_ORDER}

    def coordinates_of(self, rank: int) -> tuple[int, int, int, int]:
        """(pp, dp, cp, tp) of a global rank."""
        at = axes.coordinates_of(rank, self.sizes, self.order)
        return at[Axis.PP], at[Axis.DP], at[Axis.CP], at[Axis.TP]


@dataclass(frozen=True, slots=True)
class MeshSizes(MeshAxes):
    """A mesh of no run yet.

    Raises:
        UsageError: experts cannot be spread over the ranks of a stage.
    """

    def __post_init__(self) -> None:
        if self.of_stage % (self.ep * self.etp):
            raise UsageError(
                f"ep {self.ep} does not divide the {self.of_stage} ranks of a stage (dp · cp · tp), over which experts are "
                "spread; choose a divisor"
            )
