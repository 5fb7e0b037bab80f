"""Communication of a model's layers with experts in a step of one rank, from the run's facts and the routes that it counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pptrace.analysis.volume.expert_activations import ExpertTensors
from pptrace.analysis.volume.experts import (
    INDEX_BYTES,
    ExpertCall,
    ExpertSizes,
    LayerRows,
    layer_calls,
    rows_of_layer,
)
from pptrace.analysis.volume.gpt_facts import GptFacts
from pptrace.analysis.volume.transformer import (
    UNKNOWN,
    BothWays,
    Calls,
    TensorSizes,
    Volume,
    collective,
    pair_volume,
    total,
)
from pptrace.marks import Axis, Collective
from pptrace.model.mesh import MeshInfo

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class LayerRoutes:
    """Forwards of one layer in one step on a rank, in their order: ``kept`` (forwards, experts) counts the routes of its tokens
    without dropped ones, ``rows`` (forwards,) what its experts computed.
    """

    kept: Int64
    rows: Int64


Routes = Mapping[tuple[int, int, int], LayerRoutes]
"""(rank, step, layer) → its forwards."""


@dataclass(frozen=True, slots=True, eq=False)
class _Totals:
    """All forwards of a layer on a rank together: their number, ``rows`` that its experts computed, and ``kept`` (experts,)."""

    forwards: int
    rows: int
    kept: Int64

    def __add__(self, other: _Totals) -> _Totals:
        return _Totals(self.forwards + other.forwards, self.rows + other.rows, self.kept + other.kept)


@dataclass(frozen=True, slots=True)
class ExpertVolume:
    """Predicts calls of layers with experts.

    Args:
        facts: of a model that has some.
        mesh: of the run.
        routes: that it counted; none where nothing did.
    """

    facts: GptFacts
    mesh: MeshInfo
    routes: Routes = field(default_factory=dict)
    _sums: dict[tuple[int, int], _Totals] = field(default_factory=dict)

    def fixed(self, tensor: TensorSizes) -> BothWays:
        """Communication besides that along axes of experts: tokens that ranks of tp share out, and a shared MLP.

        Its forward is repeated where the layer is recomputed.
        """
        options = self.facts.experts
        assert options is not None
        gathered = _gathered(tensor)
        repeated: Volume = gathered if self._repeats_end else {}
        if not options.shared_width:
            return BothWays(repeated, gathered)
        shared = pair_volume(tensor)
        return BothWays(total((repeated, shared.forward)), total((gathered, shared.backward)))

    def unrepeated(self, layer: int, tensor: TensorSizes) -> Volume:
        """Communication of a forward that no recomputation repeats: of ranks that share sequences before its routes are certain,
        and at its end.
        """
        facts, options, num = self.facts, self.facts.experts, self.facts.experts_of(layer)
        assert options is not None
        tp, cp, sequences = self.mesh.tp or 1, self.mesh.cp or 1, facts.microbatch_size
        volumes: list[Volume] = [] if self._repeats_end else [_gathered(tensor)]
        if options.aux_loss:
            num_bytes = sequences * num * INDEX_BYTES
            volumes += [collective(axis, Collective.ALL_REDUCE, size, num_bytes) for axis, size in _of(tp, cp)]
        if options.capacity_factor is not None:
            by_weight = options.drop_order == "weights"
            for (axis, size), tokens in zip(_of(tp, cp), (facts.sequence // cp, facts.sequence), strict=True):
                routes = sequences * tokens * options.top_k
                for item_bytes in (INDEX_BYTES, *([facts.sum_bytes] if by_weight else [])):
                    volumes.append(collective(axis, Collective.ALL_GATHER, size, routes * item_bytes))
        return total(volumes)

    def routed(self, rank: int, step: int, layer: int, again: Sequence[bool]) -> Volume:
        """Calls along ep and etp of all forwards of a layer in a step, and of their backwards.

        Args:
            again: of each forward, in their order, whether backward recomputes it.
        """
        sizes, options = self._sizes(layer), self.facts.experts
        assert options is not None
        every = (True,) * len(again)
        rows = self._rows(rank, step, layer, sizes, every)
        calls = layer_calls(options.dispatcher, sizes, rows or LayerRows(len(again), 0, 0, 0, 0))
        volumes = [_volume((*calls.once, *calls.forward, *calls.backward), len(again))]
        if any(again):
            repeated = self._rows(rank, step, layer, sizes, again) or LayerRows(sum(again), 0, 0, 0, 0)
            forward = layer_calls(options.dispatcher, sizes, repeated).forward
            if options.dispatcher == "all-gather" and not self._repeats_end:
                forward = [call for call in forward if call.kind != Collective.REDUCE_SCATTER]
            volumes.append(_volume(forward, sum(again)))
        volume = total(volumes)
        return volume if rows is not None else {key: Calls(each.count, UNKNOWN) for key, each in volume.items()}

    @property
    def _repeats_end(self) -> bool:
        """Return whether a recomputation brings the experts' output back to its tokens: torch ends it behind the last tensor that
        backward needs, a dropout's mask or those of a shared MLP that runs (or is weighed) after the experts.
        """
        options = self.facts.experts
        assert options is not None
        is_ahead = options.overlap and self.has_journeys
        return self.facts.has_dropout or (options.shared_width > 0 and not (is_ahead and options.shared == "added"))

    @property
    def has_journeys(self) -> bool:
        """Return whether rows travel to experts and back, so that other things can be computed meanwhile."""
        options = self.facts.experts
        return options is not None and (self.mesh.ep or 1) > 1 and options.dispatcher != "all-gather"

    @property
    def counts_rows(self) -> bool:
        """Return whether the rows that experts compute are known only where they were counted."""
        options = self.facts.experts
        return options is not None and (options.dispatcher != "padded" or options.capacity_factor is None)

    def kept_bytes(self, rank: int, layer: int, recompute: str, *, in_pieces: bool = False) -> int | None:
        """Activations of a layer's experts of one microbatch, by the mean of the rows of all forwards; None where they are not
        known. ``in_pieces``: of forwards that pause while rows travel.
        """
        tensors, sizes, rows = self._tensors(layer), self._sizes(layer), self._mean_rows(rank, layer)
        if rows is None:
            return None
        if recompute == "full":
            return round(tensors.kept_for_recompute(rows))
        if not in_pieces:
            return round(tensors.kept(rows))
        travelled = self._travelled(rank, layer, sizes, rows)
        return None if travelled is None else round(tensors.kept(rows) + tensors.kept_at_cuts(*travelled))

    def weight_work(self, rank: int, layer: int) -> int | None:
        """Bytes of a layer's experts of one microbatch that W reads, by the mean of the rows of all forwards; None where they are
        not known.
        """
        rows = self._mean_rows(rank, layer)
        return None if rows is None else round(self._tensors(layer).weight_work(rows))

    def _mean_rows(self, rank: int, layer: int) -> float | None:
        """The mean of the rows that a rank's experts compute in a forward; None where they are not known."""
        if not self.counts_rows:
            sizes = self._sizes(layer)
            return sizes.num_experts * sizes.slots * sizes.etp
        totals = self._totals.get((rank, layer))
        return None if totals is None else totals.rows / totals.forwards

    def _travelled(self, rank: int, layer: int, sizes: ExpertSizes, rows: float) -> tuple[float, float] | None:
        """(rows that come to a rank along ep in a forward, rows that come back to it), of one that computes ``rows``; None where
        they are not known.
        """
        options, sharing = self.facts.experts, self._sharing(rank)
        assert options is not None
        if options.dispatcher == "padded":
            return rows / sizes.etp, rows / sizes.etp
        if sizes.etp == 1:
            own = self._totals[rank, layer]
            return rows, int(own.kept.sum()) / own.forwards
        totals = [self._totals.get((each, layer)) for each in sharing]
        known = [each for each in totals if each is not None and len(each.kept) == sizes.num_experts]
        if len(known) < len(sharing) or len({each.forwards for each in known}) > 1:
            return None
        kept = np.stack([each.kept for each in known])[:, np.newaxis]
        together = rows_of_layer(sizes, kept, sharing.index(rank), 0)
        return together.arriving / known[0].forwards, together.own / known[0].forwards

    @property
    def _totals(self) -> Mapping[tuple[int, int], _Totals]:
        """The totals of each (rank, layer), all steps together."""
        if not self._sums:
            for (rank, _, layer), each in self.routes.items():
                totals = _Totals(len(each.rows), int(each.rows.sum()), each.kept.sum(0))
                before = self._sums.get((rank, layer))
                self._sums[rank, layer] = totals if before is None else before + totals
        return self._sums

    def _tensors(self, layer: int) -> ExpertTensors:
        facts, options, num = self.facts, self.facts.experts, self.facts.experts_of(layer)
        assert options is not None
        tp, ep, etp = self.mesh.tp or 1, self.mesh.ep or 1, self.mesh.etp or 1
        held = facts.microbatch_size * facts.sequence // (self.mesh.cp or 1)
        return ExpertTensors(
            options=options,
            num_experts=num,
            sharing=ep * etp,
            held_experts=num // ep,
            hidden=facts.hidden,
            width=facts.expert_width // etp,
            shared_width=options.shared_width // tp,
            sequences=facts.microbatch_size,
            num_tokens=held // tp,
            held=held,
            between=held // tp if facts.sequence_parallel else held,
            item_bytes=facts.item_bytes,
            weight_bytes=facts.sum_bytes,
        )

    def _sizes(self, layer: int) -> ExpertSizes:
        facts, options, num = self.facts, self.facts.experts, self.facts.experts_of(layer)
        assert options is not None
        ranks = (self.mesh.cp or 1) * (self.mesh.tp or 1)
        held = facts.sequence // ranks
        capacity = options.capacity(facts.sequence, num)
        return ExpertSizes(
            self.mesh.ep or 1,
            self.mesh.etp or 1,
            num,
            options.top_k,
            facts.hidden,
            facts.microbatch_size * held,
            facts.item_bytes,
            facts.sum_bytes,
            0 if capacity is None else facts.microbatch_size * min(held, capacity),
            capacity is not None,
        )

    def _rows(self, rank: int, step: int, layer: int, sizes: ExpertSizes, which: Sequence[bool]) -> LayerRows | None:
        """The rows of some forwards together, as far as the dispatcher's calls depend on them; None where none were counted."""
        options, mask = self.facts.experts, np.asarray(which, dtype=bool)
        assert options is not None
        forwards = int(mask.sum())
        if options.dispatcher == "all-gather" or (options.dispatcher == "padded" and sizes.is_fixed):
            return LayerRows(forwards, 0, 0, 0, forwards * sizes.num_experts * sizes.slots)
        own = self.routes.get((rank, step, layer))
        if own is None or len(own.rows) != len(mask):
            return None
        if options.dispatcher == "padded":  # a rank computes the slots of all ranks of its etp group and of ep
            return LayerRows(forwards, 0, 0, 0, int(own.rows[mask].sum()) // sizes.etp)
        sharing = self._sharing(rank)
        kept = [self.routes.get((each, step, layer)) for each in sharing]
        known = [
            each.kept[mask] for each in kept if each is not None and each.kept.shape == (len(mask), sizes.num_experts)
        ]
        if len(known) < len(sharing):
            return None
        return rows_of_layer(sizes, np.stack(known), sharing.index(rank), 0)

    def _sharing(self, rank: int) -> list[int]:
        """The ranks that share the experts of a layer, with etp fastest."""
        along_ep = self.mesh.group_of(rank, Axis.EP) or (rank,)
        groups = (self.mesh.group_of(each, Axis.ETP) or (each,) for each in along_ep)
        return [each for group in groups for each in group]


def _of(tp: int, cp: int) -> tuple[tuple[Axis, int], tuple[Axis, int]]:
    return (Axis.TP, tp), (Axis.CP, cp)


def _gathered(tensor: TensorSizes) -> Volume:
    """The all-gather of parts that ranks of tp made of the same tokens."""
    return {} if tensor.sequence_parallel else tensor.gathered()


def _volume(calls: Iterable[ExpertCall], forwards: int) -> Volume:
    return total({(str(call.axis), call.kind): Calls(forwards, call.bytes)} for call in calls)
