"""Length of a step, from an estimate of its FLOPs and bytes and the speeds of ranks and links.

An op takes its FLOPs at the ranks' speed and, after them, what it sends along tp, cp and ep at the speed of these links. A
message of the pipeline is hidden by compute. Gradients are summed after a rank's last op. So nothing but messages of the
pipeline overlaps: a step that overlaps more is shorter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from pptrace.axes import Axis
from pptrace.schedule.actions import Kind
from pptrace.simulator.simulation import Costs, Simulation, simulate
from pptrace.sizes.estimate import Estimate
from pptrace.sizes.flops import stage_flops
from pptrace.sizes.transformer import SEND, Volume, total

_OF_EXPERTS = (Axis.EP, Axis.ETP)


class Speeds(Struct, frozen=True):
    """``flops_per_ns`` that a rank computes at, and bytes per ns that it sends along each axis; along others it takes no time."""

    flops_per_ns: float
    bytes_per_ns: Mapping[str, float]

    def sending_ns(self, estimate: Estimate, volume: Volume) -> float:
        """The time that a rank sends, one axis after the other, ns."""
        by_axis = estimate.wire_by_axis(volume)
        return sum(num_bytes / speed for axis, num_bytes in by_axis.items() if (speed := self.bytes_per_ns.get(axis)))


class EstimatedStep(Struct, frozen=True):
    """A step of a pipeline, ns: the ops until the last one ends, and until the gradients are summed."""

    simulation: Simulation
    step_ns: int

    @property
    def compute_ns(self) -> int:
        """Time that ranks compute and communicate in ops, all together."""
        return sum(rank.compute_ns for rank in self.simulation.ranks)


def estimated_step(estimate: Estimate, speeds: Speeds) -> EstimatedStep:
    """Simulate the step of an estimate."""
    plan = estimate.plan.compute_only()
    simulation = simulate(plan, costs_of(estimate, speeds))
    ends = simulation.replayed.end[plan.table.rank_ptr[1:] - 1].tolist()
    lengths = []
    for pp_rank, end in enumerate(ends):
        gradients = estimate.volume.gradients_of(estimate.first_rank(pp_rank))
        lengths.append(end + round(speeds.sending_ns(estimate, total(gradients.volumes()))))
    return EstimatedStep(simulation, max(lengths))


def costs_of(estimate: Estimate, speeds: Speeds) -> Costs:
    """Costs of the actions of each stage, and of a message, ns."""
    plan, facts, mesh = estimate.plan, estimate.facts, estimate.mesh
    stages: dict[tuple[Kind, int], int] = {}
    for rank in estimate.ranks:
        # Forwards and backwards send equally to experts.
        num_ops = 2 * sum(len(plan.microbatches_of(stage)) for stage in plan.stages_of(rank.rank))
        volume = {key: calls for key, calls in rank.volume.items() if key[0] in _OF_EXPERTS}
        to_experts = speeds.sending_ns(estimate, volume) / max(1, num_ops)
        for stage in plan.stages_of(rank.rank):
            flops = stage_flops(facts, plan.model_stage(stage), mesh.tp, mesh.cp)
            every = (estimate.volume.forward(stage), estimate.volume.backward(stage, fully_recomputed=False))
            inside = ({key: calls for key, calls in volume.items() if key[0] != Axis.PP} for volume in every)
            forward, backward = (speeds.sending_ns(estimate, volume) + to_experts for volume in inside)
            products, again = flops.forward / speeds.flops_per_ns, flops.again / speeds.flops_per_ns
            stages |= {
                (Kind.F, stage): round(products + forward),
                (Kind.B, stage): round(2 * products + again + backward),
                (Kind.I, stage): round(products + again + backward),
                (Kind.W, stage): round(products),
            }
    sends = (rank.volume[str(Axis.PP), SEND] for rank in estimate.ranks if (str(Axis.PP), SEND) in rank.volume)
    speed = speeds.bytes_per_ns.get(str(Axis.PP))
    message = max((round(calls.bytes / calls.count / speed) for calls in sends), default=0) if speed else 0
    return Costs(stages=stages, p2p_latency_ns=message)


class Candidate(Struct, frozen=True):
    """One combination of a sweep of estimates: its options by name, and the estimate with its step (None where no speeds are
    given), or why there is none. ``limit_bytes`` is what a rank has, None where that is not given.
    """

    options: Mapping[str, object]
    estimate: Estimate | None = None
    step: EstimatedStep | None = None
    limit_bytes: int | None = None
    refused: str = ""

    @property
    def fits(self) -> bool:
        """Return whether there is an estimate, within the memory if that is given."""
        return self.estimate is not None and (self.limit_bytes is None or self.estimate.peak_bytes <= self.limit_bytes)

    @property
    def rank_ns_per_token(self) -> float | None:
        """Time of one rank for one token, ns: the step times ranks over tokens; None where no speeds are given."""
        if self.estimate is None or self.step is None or self.estimate.tokens is None:
            return None
        return self.step.step_ns * self.estimate.mesh.world / self.estimate.tokens

    @property
    def order(self) -> tuple[bool, bool, float]:
        """Key that sorts those that fit first, of these the fastest or, without speeds, the smallest peak."""
        peak, time = 0 if self.estimate is None else self.estimate.peak_bytes, self.rank_ns_per_token
        return not self.fits, self.estimate is None, float(peak) if time is None or not self.fits else time


def missing_speeds(estimate: Estimate, speeds: Speeds) -> Iterable[str]:
    """Axes along which something is sent that takes no time, because their speed is not given."""
    axes = {axis for rank in estimate.ranks for axis in estimate.wire_by_axis(rank.volume)}
    return sorted(axes - set(speeds.bytes_per_ns))
