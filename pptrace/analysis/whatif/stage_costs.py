"""Measured costs of a run's steps by what they are of, whatever the schedule: stage of the model, microbatch, and output.

A schedule orders the same work in another way, so that its prediction begins here and not at the rows of the measured plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from pptrace.analysis.matrix.step_matrix import StepMatrix, pipelines_of
from pptrace.analysis.recompute.types import RecomputeReport
from pptrace.analysis.whatif.collectives import KnownOfCollectives
from pptrace.analysis.whatif.fixed_part import measured_fixed_part
from pptrace.analysis.whatif.measured_layers import MeasuredLayers
from pptrace.analysis.whatif.recompute import (
    BackwardShares,
    backward_shares,
    layers_that_recompute,
    measured_split_cost,
    whole_backwards,
)
from pptrace.analysis.whatif.stage_map import end_shares
from pptrace.model.tables import Bool, Floats, Int64
from pptrace.schedule.actions import Kind
from pptrace.schedule.needs import Output
from pptrace.schedule.plan import Plan

F, BACKWARD, W = Output.FORWARD, Output.BACKWARD, Output.WEIGHT_GRAD
Latencies = Mapping[tuple[int, int], int]
"""Latency of the link from one global rank to another, ns."""


class Assumed(Struct, frozen=True):
    """Assumptions of a user where the run does not tell; None: the usual value, and the interval has others.

    ``weight_share`` is the part of a full backward that is W's, ``fixed`` the part of a usual op that any takes however much it
    does.
    """

    weight_share: float | None = None
    fixed: float | None = None


NOTHING_ASSUMED = Assumed()


_FEW_STEPS = 16
_OF_MICROBATCHES = ("work", "inner", "delay", "transfer", "latency", "routed_work", "routed_inner", "exposed")


class StageCosts(Struct, frozen=True, eq=False, dict=True):
    """Costs in windows of steps, ns.

    Of ops the shape is (windows, model stages, microbatches, outputs): F; what a B does for the gradient of its input (an I);
    what it does for those of the weights (a W). ``work`` is what an op takes, ``inner`` the part of it in which it communicates
    and does not compute, ``delay`` how late it began although all that it needs was there. ``transfer`` (windows, model stages,
    microbatches, 2) is what the message of a stage's output costs its reader: of an F to the next stage, of a backward to the
    one before; 0 where there is none. ``latency``, of the same shape, is what of it does not depend on the message's size and the
    link's bandwidth, as fitted to its link; NaN where that is not known.

    ``plan`` is that of the run; ``layers`` how many the model has in each of its stages, None where that is not known.
    ``splits_backward``: I and W were measured and not a B alone. ``pair_factor`` is what an overlapped pair takes in parts of
    what its halves take one after the other, ``shares`` what is known of the parts of full backwards, ``weight_share`` the part
    that is taken to be W's in the mean over stages. ``recompute`` is the part of I and W together that is recompute, by stage,
    NaN where it is not known; ``recomputing`` as :func:`layers_that_recompute` has it.

    ``split_cost`` is the part of a whole B by which I and W together are longer, None of a run that has not both.

    ``routed_work`` and ``routed_inner`` are the parts of ``work`` and ``inner`` that would be gone if all experts had equally
    many rows (1: all of it); None of a run without experts on several ranks.

    ``exposed``, with ``INNER_AXES`` as a further axis, are the parts of ``inner`` that are transfers along them, ns, None where
    there are none; ``collectives`` is what is known of these.

    ``fixed`` is what an op takes however much it does, ns, by output. ``measured`` are the layers, where traces tell them.
    """

    plan: Plan
    step: Int64
    ranks: Int64
    work: Floats
    inner: Floats
    delay: Floats
    transfer: Floats
    layers: tuple[int, ...] | None
    splits_backward: bool
    pair_factor: float
    latency: Floats
    fixed: Floats
    shares: BackwardShares
    recompute: Floats
    recomputing: tuple[float, ...]
    weight_share: float
    split_cost: float | None = None
    routed_work: Floats | None = None
    routed_inner: Floats | None = None
    exposed: Floats | None = None
    collectives: KnownOfCollectives = KnownOfCollectives()
    assumed: Assumed = NOTHING_ASSUMED
    measured: MeasuredLayers | None = None

    @property
    def num_stages(self) -> int:
        """Stages of the model: a bidirectional schedule has each of them twice."""
        return self.plan.chain_length

    @property
    def owners(self) -> Int64:
        """The pipeline rank that runs each microbatch in each stage of the model, shape (model stages, microbatches)."""
        plan = self.plan
        chain = np.arange(plan.num_microbatches) * plan.num_chains // plan.num_microbatches
        stage = np.arange(self.num_stages)[:, np.newaxis] + chain * self.num_stages
        owners: Int64 = np.array(plan.placement, dtype=np.int64)[stage]
        return owners

    @property
    def knows_latency(self) -> bool:
        """Return whether the latency of every link is known that messages took."""
        of_messages = [where for key, where in self.links().items() if isinstance(key, tuple)]
        return (
            bool(of_messages)
            and not np.isnan(self.latency.reshape(len(self.step), -1)[:, np.concatenate(of_messages)]).any()
        )

    def links(self) -> dict[tuple[int, int] | Output, npt.NDArray[np.intp]]:
        """Places in ``transfer``, flattened from its second index on, by (sending, reading) pipeline rank and by direction."""
        owners, places = self.owners, np.arange(self.transfer[0].size).reshape(self.transfer.shape[1:])
        links: dict[tuple[int, int] | Output, list[npt.NDArray[np.intp]]] = {}
        for direction, begin, end in ((F, 0, 1), (BACKWARD, 1, 0)):
            inner = self.num_stages - 1
            sender, reader = owners[begin : begin + inner].ravel(), owners[end : end + inner].ravel()
            of_it = places[begin : begin + inner, :, direction].ravel()
            is_message = sender != reader
            links[direction] = [of_it[is_message]]
            for key in set(zip(sender[is_message].tolist(), reader[is_message].tolist(), strict=True)):
                links.setdefault(key, []).append(of_it[(sender == key[0]) & (reader == key[1])])
        return {key: np.concatenate(parts) for key, parts in links.items()}

    def of_windows(self, windows: npt.NDArray[np.integer[Any]] | Bool) -> StageCosts:
        """The costs of some windows."""
        names = ("step", "ranks", *_OF_MICROBATCHES)
        values = {name: value[windows] for name in names if (value := getattr(self, name)) is not None}
        return replace(self, **values)

    def drawn(self, windows: Int64, step: Int64, orders: npt.NDArray[np.intp]) -> StageCosts:
        """Some windows as other steps, each with its microbatches in an order of its own (shape: windows, microbatches)."""
        chosen = self.of_windows(windows)
        values: dict[str, Any] = {
            name: np.take_along_axis(value, orders.reshape(len(orders), 1, -1, *[1] * (value.ndim - 3)), axis=2)
            for name in _OF_MICROBATCHES
            if (value := getattr(chosen, name)) is not None
        }
        return replace(chosen, step=step, **values)

    @cached_property
    def few(self) -> StageCosts:
        """The costs of some of the steps, evenly spaced, where there are many more than what is assumed has to be tried with."""
        steps = np.unique(self.step)
        if len(steps) < 2 * _FEW_STEPS:
            return self
        return self.of_windows(np.isin(self.step, steps[:: len(steps) // _FEW_STEPS][:_FEW_STEPS]))

    @cached_property
    def has_inner(self) -> bool:
        """Return whether some op communicates."""
        return bool(self.inner.any())

    @cached_property
    def typical(self) -> Floats:
        """The median of an op, shape (model stages, outputs)."""
        return np.median(self.work, axis=(0, 2))

    @property
    def fixed_shares(self) -> Floats:
        """The part of an op of each stage that is its fixed part, shape (model stages, outputs)."""
        usual = self.typical
        return np.minimum(np.divide(self.fixed, usual, out=np.zeros(usual.shape), where=usual > 0), 1.0)

    def of_layers(self) -> Floats:
        """The median of an op without its fixed part, shape (model stages, outputs)."""
        return self.typical * (1 - self.fixed_shares)

    def ends(self) -> Floats:
        """Part of the first and the last stage's work that is not of its layers, shape (2, outputs): measured, else inferred."""
        of_layers, layers = self.of_layers(), self.layers or (1,) * self.num_stages
        inferred = end_shares(of_layers, layers)
        if self.measured is None:
            return inferred
        whole, without_fixed = self.typical[[0, -1]], of_layers[[0, -1]]
        ends = self.measured.ends * np.divide(whole, without_fixed, out=np.ones(whole.shape), where=without_fixed > 0)
        ends = np.where(np.isnan(ends), inferred, np.minimum(ends, 1.0))
        ends[np.array([layers[0], layers[-1]]) == 0] = 1.0
        return ends

    @property
    def parts_of_ops(self) -> Floats:
        """The part of a measured op that each output is: of a full backward two have one together."""
        return np.array([1.0, 1.0, 1.0] if self.splits_backward else [1.0, 1 - self.weight_share, self.weight_share])


def stage_costs(
    plan: Plan,
    matrix: StepMatrix,
    layers: tuple[int, ...] | None,
    latencies: Latencies = MappingProxyType({}),
    recompute: RecomputeReport | None = None,
) -> StageCosts:
    """The costs of steps by stage of the model, microbatch and output, from those by row of their plan.

    ``latencies`` are those of the links, by sending and reading global rank; ``recompute`` is what the report says of backwards.
    """
    table, pairs = matrix.table, np.flatnonzero(matrix.table.second_slot >= 0)
    firsts, seconds = places_of(plan, table.slot), places_of(plan, table.second_slot[pairs])

    def by_stage(of_rows: npt.NDArray[Any], of_seconds: Floats | None = None) -> Floats:
        """Values of rows, and of second halves of pairs, by window, model stage, microbatch and output; 0 where there is none."""
        values = np.zeros((len(matrix.step), plan.chain_length, plan.num_microbatches, len(Output)))
        values[:, *firsts] = of_rows
        if of_seconds is not None:
            values[:, *seconds] = of_seconds
        return values

    durations, of_seconds, pair_factor = _halves(plan, matrix, pairs)
    work, inner, delay = by_stage(durations, of_seconds), by_stage(matrix.inner), by_stage(matrix.delays)
    routed: dict[str, Any] = {}
    if len(matrix.routed):
        shorter = matrix.spread(matrix.routed)
        waits = shorter - matrix.spread(matrix.routed, "compute")
        for name, gone, whole in (("routed_work", shorter, matrix.durations), ("routed_inner", waits, matrix.inner)):
            share = np.clip(np.divide(gone, whole, out=np.zeros(whole.shape), where=whole > 0), -1.0, 1.0)
            part = by_stage(share, share[:, pairs])
            part[..., W] = np.where(
                part[..., W] == 0, part[..., BACKWARD], part[..., W]
            )  # of a full backward both have it
            routed[name] = part
    shares = backward_shares(recompute, plan)
    exposed, of_axes = None, np.empty(0)
    if matrix.exposed is not None and matrix.exposed.any():
        exposed = np.stack([by_stage(of_axis) for of_axis in np.moveaxis(matrix.exposed, -1, 0)], axis=-1)
        of_axes = np.moveaxis(exposed, -1, 0)  # the same memory
    in_pairs = np.zeros((plan.chain_length, plan.num_microbatches), dtype=bool)
    in_pairs[seconds[0], seconds[1]] = True
    split_cost = measured_split_cost(work, whole_backwards(plan), in_pairs)
    are_whole, share = _split_whole_backwards(plan, (work, inner, *of_axes), shares.of_weights())
    transfer, splits = _transfers(plan, matrix), not are_whole.all()
    usual = np.median(work, axis=(0, 2))
    of_both = np.divide(
        usual[:, BACKWARD], usual[:, BACKWARD] + usual[:, W], out=np.ones(len(usual)), where=usual[:, W] > 0
    )
    costs = StageCosts(
        *(plan, matrix.step, matrix.ranks, work, inner, delay, transfer, layers, splits, pair_factor),
        latency=np.full_like(transfer, np.nan),
        fixed=measured_fixed_part(work, layers),
        shares=shares,
        recompute=shares.recompute * np.where(are_whole, 1.0, of_both),
        recomputing=layers_that_recompute(recompute, layers),
        weight_share=float(share.mean()),
        split_cost=split_cost,
        exposed=exposed,
        **routed,
    )
    latency = costs.latency.reshape(len(costs.step), -1)  # the same memory
    places = {key: where for key, where in costs.links().items() if isinstance(key, tuple)}
    for ranks, windows in pipelines_of(costs.ranks):
        for (sender, reader), where in places.items():
            known = latencies.get((ranks[sender], ranks[reader]))
            if known is not None:
                latency[np.ix_(windows, where)] = known
    return costs


def places_of(plan: Plan, slots: npt.NDArray[np.int32] | Int64) -> tuple[Int64, Int64, Int64]:
    """(model stage, microbatch, output) of slots of a plan."""
    cell, output = np.divmod(slots.astype(np.int64), len(Output))
    stage, microbatch = np.divmod(cell, plan.num_microbatches)
    return stage % plan.chain_length, microbatch, output


def _halves(plan: Plan, matrix: StepMatrix, pairs: npt.NDArray[np.intp]) -> tuple[Floats, Floats | None, float]:
    """(durations of the rows, of pairs those of their forwards; of the backwards of pairs; the factor of pairs).

    Both halves are what they would take one after the other, in the proportion of their stages' F and B outside of pairs.
    """
    table, durations = matrix.table, matrix.durations.astype(np.float64)
    if not len(pairs):
        return durations, None, 1.0

    def usual_alone(kinds: tuple[Kind, ...]) -> Floats | None:
        """The usual op of a kind in each stage outside of pairs, of a stage without any that of the others; None without all."""
        known = np.full(plan.num_stages, np.nan)
        for stage in range(plan.num_stages):
            of_kinds = [(table.kind == kind.code) & (table.stage == stage) for kind in kinds]
            if all(rows.any() for rows in of_kinds):
                known[stage] = sum(float(np.median(durations[:, rows])) for rows in of_kinds)
        return None if np.isnan(known).all() else np.where(np.isnan(known), np.nanmedian(known), known)

    forwards, backwards = usual_alone((Kind.F,)), usual_alone((Kind.B,))
    if backwards is None:
        backwards = usual_alone((Kind.I, Kind.W))  # a full backward that no stage has alone
    forward = np.ones(len(pairs)) if forwards is None else forwards[table.stage[pairs]]
    backward = np.full(len(pairs), 2.0) if backwards is None else backwards[table.second_stage[pairs]]
    factor = float(np.median(np.median(durations[:, pairs], axis=0) / (forward + backward)))
    one_after_the_other = durations[:, pairs] / factor
    durations[:, pairs] = one_after_the_other * (forward / (forward + backward))
    return durations, one_after_the_other - durations[:, pairs], factor


def _transfers(plan: Plan, matrix: StepMatrix) -> Floats:
    """Costs of the messages; of those of which one end is unknown, the usual one of their direction."""
    table, is_known = matrix.table, matrix.transfers >= 0
    stage, microbatch, output = places_of(plan, table.messages[2])
    transfers = np.zeros((len(matrix.step), plan.chain_length, plan.num_microbatches, 2))
    measured = matrix.transfers.astype(np.float64)
    for direction in (F, BACKWARD):
        of_it = output == direction
        known = measured[is_known & of_it]
        measured[~is_known & of_it] = np.median(known) if known.size else 0.0
    transfers[:, stage, microbatch, output] = measured
    return transfers


def _split_whole_backwards(plan: Plan, of_ops: Sequence[Floats], share: Floats) -> tuple[Bool, Floats]:
    """Share out what full backwards took (the first of ``of_ops``; others are parts of it) over both outputs, in place. Returns
    whether all of each stage are whole, and W's part.

    ``share`` is W's part of a full backward of each stage, where the run did not measure both somewhere.
    """
    is_whole, work = whole_backwards(plan), of_ops[0]
    if not is_whole.all():
        share = share.copy()
        both = work[:, :, :, BACKWARD] + work[:, :, :, W]
        of_weights = np.where(is_whole | (both <= 0), np.nan, work[:, :, :, W] / np.where(both > 0, both, 1))
        usual = np.nanmedian(of_weights)
        for stage in range(plan.chain_length):
            known = of_weights[:, stage][~np.isnan(of_weights[:, stage])]
            share[stage] = np.median(known) if known.size else usual
    for values in of_ops:
        whole = values[:, :, :, BACKWARD]
        values[:, :, :, W] = np.where(is_whole, whole * share[:, np.newaxis], values[:, :, :, W])
        values[:, :, :, BACKWARD] = np.where(is_whole, whole * (1 - share[:, np.newaxis]), whole)
    are_whole: npt.NDArray[np.bool_] = np.logical_and.reduce(is_whole, axis=1)
    return are_whole, share


def with_assumed(costs: StageCosts, assumed: Assumed) -> StageCosts:
    """The costs with what a user takes for granted."""
    known = replace(costs, assumed=assumed)
    known = known if assumed.fixed is None else with_fixed_share(known, assumed.fixed)
    return known if assumed.weight_share is None else with_weight_share(known, assumed.weight_share)


def with_weight_share(costs: StageCosts, share: float | Floats) -> StageCosts:
    """The costs with another part of full backwards, of all or of each stage, for the gradients of the weights."""
    work = costs.work.copy()
    both = work[..., BACKWARD] + work[..., W]
    of_stages = np.broadcast_to(share, costs.num_stages)[:, np.newaxis]
    work[..., BACKWARD], work[..., W] = both * (1 - of_stages), both * of_stages
    mean = float(np.mean(share))
    fixed = np.array([costs.fixed[F], *np.array([1 - mean, mean]) * (costs.fixed[BACKWARD] + costs.fixed[W])])
    return replace(costs, work=work, weight_share=mean, fixed=fixed)


def with_fixed_share(costs: StageCosts, share: float) -> StageCosts:
    """The costs with a fixed part of every op: so much of that of the usual stage."""
    return replace(costs, fixed=share * np.median(costs.typical, axis=0))
