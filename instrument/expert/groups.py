"""The ranks that share the experts and the tokens of a layer."""

from __future__ import annotations

from dataclasses import dataclass, field

from instrument.collectives import AxisGroup, axis_group
from instrument.context.shard import ContextShape
from instrument.mesh import Mesh
from instrument.recorder import Recorder
from instrument.route import Route
from pptrace.marks import Axis


def _alone_along_etp() -> AxisGroup:
    return AxisGroup(None, Axis.ETP, Recorder())


@dataclass(frozen=True, slots=True, eq=False)
class ExpertGroups:
    """One rank's groups.

    Args:
        ep: the ranks that share the experts of a layer, each with consecutive ones.
        cp: the ranks that share a sequence, besides those of tp.
        context: how they share it.
        loss_weight: weight in a step's loss of the router's losses of one microbatch on one rank: the ranks of cp, each of which
            adds its part of a sum where gradients are averaged, over the microbatches of a step.
        first_microbatch: of this replica's pipeline, counted through all replicas of a step.
        etp: the ranks that share each of these experts.
    """

    ep: AxisGroup
    cp: AxisGroup
    context: ContextShape = ContextShape()  # noqa: RUF009 — frozen
    loss_weight: float = 1.0
    first_microbatch: int = 0
    etp: AxisGroup = field(default_factory=_alone_along_etp)


def expert_groups(
    mesh: Mesh, context: ContextShape, recorder: Recorder, route: Route = Route.DIRECT
) -> ExpertGroups | None:
    """The groups of a rank; None where the mesh has none of experts."""
    if Axis.EP not in mesh.groups:
        return None
    ep, cp = (axis_group(mesh, axis, recorder, route) for axis in (Axis.EP, Axis.CP))
    etp = AxisGroup(mesh.groups.get(Axis.ETP), Axis.ETP, recorder, route)
    return ExpertGroups(ep, cp, context, etp=etp)


def alone() -> ExpertGroups:
    """The groups of a rank that has all experts and whole sequences; needs no process group."""
    recorder = Recorder()
    return ExpertGroups(AxisGroup(None, Axis.EP, recorder), AxisGroup(None, Axis.CP, recorder))
