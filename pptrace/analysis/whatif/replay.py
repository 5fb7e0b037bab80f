"""Replay of a plan with the measured costs of a run that had another."""

from __future__ import annotations

from collections import Counter
from functools import cached_property

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from pptrace.analysis.matrix.step_matrix import longest_of_steps
from pptrace.analysis.whatif.recompute import parts_of_whole, whole_backwards
from pptrace.analysis.whatif.stage_costs import BACKWARD, F, StageCosts, W, places_of
from pptrace.analysis.whatif.stage_map import StageMap
from pptrace.model.tables import Bool, Floats, Int64
from pptrace.schedule.actions import Kind
from pptrace.schedule.message_graph import Graph, Messaging, make_graph
from pptrace.schedule.needs import Output
from pptrace.schedule.plan import Plan
from pptrace.schedule.replay import Replay
from pptrace.simulator import Simulation

_CELLS = 1 << 19
Graphs = dict[tuple[Messaging, int], Graph]
"""Graphs of one plan, by the way of its messages and how far ahead receives are posted."""


class Target(Struct, frozen=True, eq=False):
    """A plan with what its ops and messages are made of.

    ``scale`` is the size of a microbatch in parts of the measured, ``link_speed`` how many times as fast messages are;
    ``placement`` the measured pipeline rank that each of its ranks is, ``messaging`` how its messages travel, and ``prefetch``
    how many ops before they are needed receives that block are posted. ``latency_share`` is the part of a message that is its
    link's latency where that is not known. With ``scales_delays`` an op that does half begins half as late. ``split_cost`` is the
    part of a B by which I and W together are longer, which counts where the plan splits a backward that was measured whole, or
    the reverse. ``graphs`` are those of the plan that were made so far; targets with other assumptions share them.
    """

    plan: Plan
    stages: StageMap
    messaging: Messaging = Messaging.AHEAD
    prefetch: int = 0
    scale: float = 1.0
    link_speed: float = 1.0
    placement: tuple[int, ...] | None = None
    latency_share: float = 0.0
    scales_delays: bool = False
    split_cost: float = 0.0
    graphs: Graphs = field(default_factory=dict)

    @property
    def changes_messages(self) -> bool:
        return self.scale != self.link_speed

    def graph(self) -> Graph:
        key = (self.messaging, self.prefetch)
        if key not in self.graphs:
            self.graphs[key] = make_graph(self.plan, *key)
        return self.graphs[key]


class Replayed(Struct, frozen=True, eq=False):
    """Replayed steps: their lengths, ns, and bubble over compute of all their ranks together, each of shape (steps,)."""

    spans: Int64
    bubble_ratios: Floats


def replay(costs: StageCosts, target: Target) -> Replayed:
    """Replay the plan once for every measured step, with the costs of that step.

    Microbatch i of M takes what microbatch ⌊i·m/M⌋ of the m measured ones took, and a stage what its parts of the measured
    stages took; each op begins as late as those of its kind did in the stage that it has most of.
    """
    graph, table = target.graph(), target.plan.table
    spans = np.empty(len(costs.step), dtype=np.int64)
    compute = np.empty(len(costs.step))
    builder = _Builder(costs, target)
    most = max(1, _CELLS // max(1, len(table)))
    for part in (slice(begin, begin + most) for begin in range(0, len(costs.step), most)):
        work, late = builder.durations(part)
        spans[part] = np.rint(graph.ends(work + late, builder.transfers(part))).max(axis=1)
        compute[part] = ((work - builder.inner(part)) if costs.has_inner else work).sum(axis=1)
    longest = longest_of_steps(costs.step, spans)
    of_step = np.flatnonzero(np.diff(costs.step, prepend=costs.step[0] - 1))
    total, windows = np.add.reduceat(compute, of_step), np.diff(np.append(of_step, len(costs.step)))
    ratios = np.divide(longest * windows * table.pp - total, total, out=np.zeros(len(total)), where=total > 0)
    return Replayed(longest, ratios)


def replay_step(costs: StageCosts, target: Target, step: int) -> Simulation:
    """The replay of one step of the run, with every op; of several pipelines the longest."""
    builder, graph = _Builder(costs, target), target.graph()
    windows = np.flatnonzero(costs.step == step)
    part = slice(int(windows[0]), int(windows[-1]) + 1)
    work, late = builder.durations(part)
    ends = graph.ends(work + late, builder.transfers(part))
    longest = int(ends.max(axis=1).argmax())
    end = np.rint(ends[longest]).astype(np.int64)
    return Simulation(Replay(target.plan, np.rint(end - work[longest]).astype(np.int64), end))


def costs_of_step(costs: StageCosts, target: Target, step: int) -> tuple[Int64, Int64]:
    """Return (what each row of the plan takes, with its delay, what each message takes) in one step of the run, ns; of several
    pipelines in the first.
    """
    builder, window = _Builder(costs, target), int(np.flatnonzero(costs.step == step)[0])
    part = slice(window, window + 1)
    work, late = builder.durations(part)
    durations, transfers = (np.rint(values[0]).astype(np.int64) for values in (work + late, builder.transfers(part)))
    return durations, transfers


def changes_ops(costs: StageCosts, target: Target) -> bool:
    """Return whether ops of the plan do more or less than the measured ones."""
    return not np.allclose(_Builder(costs, target).ops_in_rows, 1.0)


def splits_otherwise(costs: StageCosts, target: Target) -> bool:
    """Return whether the plan splits backwards that were measured whole, or has those whole that were split."""
    return _Builder(costs, target).splits_otherwise


def link_ends(plan: Plan, placement: tuple[int, ...] | None) -> tuple[Int64, Int64]:
    """(sending, reading) measured pipeline rank of each message of a plan; ``placement`` is that of each of its ranks."""
    places = np.array(range(plan.pp) if placement is None else placement, dtype=np.int64)
    sender, reader, _ = plan.table.messages
    return places[plan.table.rank[sender]], places[plan.table.rank[reader]]


class _Builder(Struct, frozen=True, eq=False, dict=True):
    """Costs of the rows and messages of a plan, from those of the measured stages."""

    costs: StageCosts
    target: Target

    def durations(self, windows: slice) -> tuple[Floats, Floats]:
        """(length of each row, its delay), ns, shape (windows, rows)."""
        stage, source, output = self._firsts
        late = _at(self.costs.delay[windows], self.target.stages.source[stage], source, output)
        if self.target.scales_delays:
            late = late * self.target.scale * self.target.stages.shares.sum(axis=2)[output, stage]
        return self._rows(self.costs.work, windows), late

    def inner(self, windows: slice) -> Floats:
        """The part of each row in which it communicates, ns."""
        return self._rows(self.costs.inner, windows)

    def _rows(self, values: Floats, windows: slice) -> Floats:
        values, shares, table = values[windows], self.costs.fixed_shares, self.target.plan.table
        by_output = self._by_output(values)
        fixed = self._by_output(values * shares[:, np.newaxis, :]) if shares.any() else None
        rows = self._ops(by_output, fixed, self._firsts, table.kind == Kind.B.code)
        pairs = np.flatnonzero(table.second_slot >= 0)
        if len(pairs):
            seconds = self._places(table.second_slot[pairs])
            backwards = self._ops(by_output, fixed, seconds, table.second_kind[pairs] == Kind.B.code)
            rows[:, pairs] = (rows[:, pairs] + backwards) * self.costs.pair_factor
        return rows * self.target.scale

    def _ops(self, by_output: Floats, fixed: Floats | None, where: tuple[Int64, Int64, Int64], whole: Bool) -> Floats:
        """Ops at (stage, measured microbatch, output), those of ``whole`` with their gradients of weights too.

        What does half of an op has half of what it takes, and the other half of the ``fixed`` part of it.
        """
        stage, source, output = where

        def of(values: Floats) -> Floats:
            ops = _at(values, stage, source, output)
            ops[:, whole] += _at(values, stage[whole], source[whole], np.full(int(whole.sum()), W))
            return ops

        ops = of(by_output)
        if fixed is not None:
            ops += of(fixed) * (1 / self._num_ops(stage, output, whole) - 1)
        if cost := self.target.split_cost:
            part = self._parts_of_whole[stage, source]
            ops *= np.where(whole, 1 / (1 + cost * (1 - part)), np.where(output == F, 1.0, 1 + cost * part))
        return ops

    @property
    def splits_otherwise(self) -> bool:
        """Return whether a backward that was measured whole is split, or one that was split is whole."""
        table = self.target.plan.table
        slots, kinds = np.append(table.slot, table.second_slot), np.append(table.kind, table.second_kind)
        stage, source, output = self._places(slots)
        is_backward = (slots >= 0) & (output != F)
        parts, whole = self._parts_of_whole[stage, source], kinds == Kind.B.code
        return not np.allclose(parts[is_backward], whole[is_backward])

    @cached_property
    def _parts_of_whole(self) -> Floats:
        return parts_of_whole(whole_backwards(self.costs.plan), self.target.stages.shares[BACKWARD])

    @cached_property
    def ops_in_rows(self) -> Floats:
        """Measured ops whose work each row has together, in parts of ops: 1/2 of a row that does half of one."""
        stage, _, output = self._firsts
        return self._num_ops(stage, output, self.target.plan.table.kind == Kind.B.code)

    def _num_ops(self, stage: Int64, output: Int64, whole: Bool) -> Floats:
        of_stages = self.target.stages.shares.sum(axis=2) * self.costs.parts_of_ops[:, np.newaxis]
        ops = of_stages[output, stage] + np.where(whole, of_stages[W, stage], 0.0)
        in_rows: Floats = np.maximum(ops * self.target.scale, np.finfo(np.float64).tiny)
        return in_rows

    def _by_output(self, values: Floats) -> Floats:
        """Values by the stages of the plan, from those by measured stages."""
        shares = self.target.stages.shares
        if self.target.stages.is_identity:
            return values
        by_output = np.empty((len(values), shares.shape[1], *values.shape[2:]))
        for output in range(values.shape[3]):
            by_output[..., output] = np.einsum("ts,wsm->wtm", shares[output], values[..., output])
        return by_output

    def _places(self, slots: npt.NDArray[np.int32]) -> tuple[Int64, Int64, Int64]:
        """(model stage, measured microbatch, output) of slots of the plan."""
        stage, microbatch, output = places_of(self.target.plan, slots)
        return stage, self._measured(microbatch), output

    def _measured(self, microbatch: Int64) -> Int64:
        return microbatch * self.costs.plan.num_microbatches // self.target.plan.num_microbatches

    @cached_property
    def _firsts(self) -> tuple[Int64, Int64, Int64]:
        """The places of the rows, of pairs those of their forwards."""
        return self._places(self.target.plan.table.slot)

    def transfers(self, windows: slice) -> Floats:
        """Cost of each message for its reader, ns, shape (windows, messages)."""
        times = self._of_messages(self.costs.transfer[windows])
        if not self.target.changes_messages:
            return times
        latency = self._of_messages(self.costs.latency[windows])
        latency = np.minimum(np.where(np.isnan(latency), times * self.target.latency_share, latency), times)
        return latency + (times - latency) * self.target.scale / self.target.link_speed

    def _of_messages(self, measured: Floats) -> Floats:
        """Values of the messages of stages, shape (windows, model stages, microbatches, 2), by message of the plan.

        A message that goes where that of its stage went has its value, and another one that of a message of its link (of a link
        without any, of its direction), in the order of microbatches: they vary as the measured ones do.
        """
        flat = measured.reshape(len(measured), -1)
        values: Floats = flat[:, self._measured_messages]
        values[:, self._measured_messages < 0] = 0.0
        return values

    @cached_property
    def _measured_messages(self) -> Int64:
        """The place of the measured message that each message of the plan is taken to be, −1 where there is none."""
        plan, measured = self.target.plan, self.costs.plan
        stage, microbatch, output = places_of(plan, plan.table.messages[2])
        stays = self.target.placement is None and plan.placement == measured.placement
        if stays and plan.num_chains == measured.num_chains:  # messages go where the measured ones of the same stage go
            return (stage * measured.num_microbatches + self._measured(microbatch)) * 2 + output
        groups, num_taken = _groups_of_links(self.costs), Counter[int]()
        places = np.full(len(stage), -1)
        ends = link_ends(plan, self.target.placement)
        keys, of_message = np.unique(np.stack((*ends, output, stage)), axis=1, return_inverse=True)
        in_order = np.argsort(microbatch, kind="stable")
        for index, (begin, end, direction, _) in enumerate(keys.T.tolist()):
            of_link = groups.get((begin, end), groups[Output(direction)])
            if of_link := [group for group in of_link if group[0] % 2 == direction] or of_link:
                chosen = in_order[of_message.ravel()[in_order] == index]
                group = min(of_link, key=lambda group: num_taken[int(group[0])])
                # One that is taken again begins a message later, so that a slow message is not slow in two stages at once.
                nth = np.arange(len(chosen)) * len(group) // len(chosen) + num_taken[int(group[0])]
                places[chosen] = group[nth % len(group)]
                num_taken[int(group[0])] += 1
        return places


def _at(values: Floats, stage: Int64, microbatch: Int64, output: Int64) -> Floats:
    """Values of shape (windows, stages, microbatches, outputs) at chosen places, shape (windows, places)."""
    places = np.ravel_multi_index((stage, microbatch, output), values.shape[1:])
    return values.reshape(len(values), -1).take(places, axis=1)


def _groups_of_links(costs: StageCosts) -> dict[tuple[int, int] | Output, list[npt.NDArray[np.intp]]]:
    """The measured messages of each direction and stage on a link, by link and by direction, in their order."""
    groups = {}
    for key, cells in costs.links().items():
        stage = cells // (2 * costs.plan.num_microbatches) * 2 + cells % 2
        groups[key] = [cells[stage == number] for number in np.unique(stage)]
    return groups
