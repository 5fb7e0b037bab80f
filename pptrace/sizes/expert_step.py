"""Communication of a model's layers with experts in a step of one rank, from the run's sizes and the routes that it counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from operator import attrgetter

from pptrace.marks import Axis, Collective
from pptrace.sizes.expert_options import Dispatcher, DropOrder, ExpertOptions, Shared
from pptrace.sizes.experts import (
    INDEX_BYTES,
    ExpertCall,
    ExpertSizes,
    ExpertTensors,
    LayerRows,
    layer_calls,
)
from pptrace.sizes.gpt_facts import FULLY, GptFacts
from pptrace.sizes.mesh import MeshAxes
from pptrace.sizes.transformer import (
    UNKNOWN,
    BothWays,
    Calls,
    TensorSizes,
    Volume,
    collective,
    pair_volume,
    total,
)


@dataclass(frozen=True, slots=True)
class LayerRoutes:
    """Forwards of one layer in one step on a rank, in their order: of each the routes of its tokens without dropped ones
    (``kept``), the rows that came to it along ep (``arrived``), and those that its experts computed (``rows``).
    """

    kept: Sequence[int]
    arrived: Sequence[int]
    rows: Sequence[int]


_COLUMNS = (attrgetter("kept"), attrgetter("arrived"), attrgetter("rows"))
Routes = Mapping[tuple[int, int, int], LayerRoutes]
"""(rank, step, layer) → its forwards."""


@dataclass(frozen=True, slots=True)
class ExpertVolume:
    """Predicts calls of layers with experts.

    Args:
        facts: of a model that has some.
        mesh: of the run.
        routes: that it counted; none where nothing did.
    """

    facts: GptFacts
    mesh: MeshAxes
    routes: Routes = field(default_factory=dict)
    _known: dict[tuple[int, int], Sequence[float]] = field(default_factory=dict)

    @property
    def _options(self) -> ExpertOptions:
        assert self.facts.experts is not None
        return self.facts.experts

    def fixed(self, tensor: TensorSizes) -> BothWays:
        """Communication besides that along axes of experts: tokens that ranks of tp share out, and a shared MLP.

        Its forward is repeated where the layer is recomputed.
        """
        options = self._options
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
        facts, options, num = self.facts, self._options, self.facts.experts_of(layer)
        tp, cp, sequences = self.mesh.tp, self.mesh.cp, facts.microbatch_size
        volumes: list[Volume] = [] if self._repeats_end else [_gathered(tensor)]
        if options.aux_loss:
            num_bytes = sequences * num * INDEX_BYTES
            volumes += [collective(axis, Collective.ALL_REDUCE, size, num_bytes) for axis, size in _of(tp, cp)]
        if options.capacity_factor is not None:
            by_weight = options.drop_order is DropOrder.WEIGHTS
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
        sizes, options = self._sizes(layer), self._options
        every = (True,) * len(again)
        rows = self._rows(rank, step, layer, sizes, every)
        calls = layer_calls(options.dispatcher, sizes, rows or LayerRows(len(again), 0, 0, 0, 0))
        volumes = [_volume(chain(*calls), len(again))]
        if any(again):
            repeated = self._rows(rank, step, layer, sizes, again) or LayerRows(sum(again), 0, 0, 0, 0)
            _, forward, _ = layer_calls(options.dispatcher, sizes, repeated)
            if options.dispatcher is Dispatcher.ALL_GATHER and not self._repeats_end:
                forward = [call for call in forward if call.kind != Collective.REDUCE_SCATTER]
            volumes.append(_volume(forward, sum(again)))
        volume = total(volumes)
        return volume if rows is not None else {key: Calls(each.count, UNKNOWN) for key, each in volume.items()}

    @property
    def _repeats_end(self) -> bool:
        """Return whether a recomputation brings the experts' output back to its tokens: torch ends it behind the last tensor that
        backward needs, a dropout's mask or those of a shared MLP that runs (or is weighed) after the experts.
        """
        options = self._options
        is_ahead = options.overlap and self.has_journeys
        return self.facts.dropout > 0 or (
            options.shared_width > 0 and not (is_ahead and options.shared is Shared.ADDED)
        )

    @property
    def has_journeys(self) -> bool:
        """Return whether rows travel to experts and back, so that other things can be computed meanwhile."""
        return self.mesh.ep > 1 and self._options.dispatcher is not Dispatcher.ALL_GATHER

    def kept_bytes(self, rank: int, layer: int, recompute: str, *, in_pieces: bool = False) -> int | None:
        """Activations of a layer's experts of one microbatch, by the mean of the rows of all forwards; None where they are not
        known. ``in_pieces``: of forwards that pause while rows travel.
        """
        tensors, sizes, rows = self._tensors(layer), self._sizes(layer), self._mean_rows(rank, layer)
        if rows is None:
            return None
        if recompute in FULLY:
            return round(tensors.kept_for_recompute(rows))
        if not in_pieces:
            return round(tensors.kept(rows))
        arrived = back = rows / sizes.etp
        if self._options.dispatcher is not Dispatcher.PADDED:
            back, arrived, _ = self._means[rank, layer]
        return round(tensors.kept(rows) + tensors.kept_at_cuts(arrived, back))

    def weight_work(self, rank: int, layer: int) -> int | None:
        """Bytes of a layer's experts of one microbatch that W reads, by the mean of the rows of all forwards; None where they are
        not known.
        """
        rows = self._mean_rows(rank, layer)
        return None if rows is None else round(self._tensors(layer).weight_work(rows))

    def _mean_rows(self, rank: int, layer: int) -> float | None:
        """The mean of the rows that a rank's experts compute in a forward; None where they are not known."""
        if self._options.dispatcher is Dispatcher.PADDED and self._options.capacity_factor is not None:
            sizes = self._sizes(layer)  # else they are known only where they were counted
            return sizes.num_experts * sizes.slots * sizes.etp
        means = self._means.get((rank, layer))
        return None if means is None else means[-1]

    @property
    def _means(self) -> Mapping[tuple[int, int], Sequence[float]]:
        """The means of ``kept``, ``arrived`` and ``rows`` of each (rank, layer), over all forwards of all steps."""
        if not self._known:
            by_layer: dict[tuple[int, int], list[LayerRoutes]] = {}
            for (rank, _, layer), each in self.routes.items():
                by_layer.setdefault((rank, layer), []).append(each)
            for key, steps in by_layer.items():
                columns = ([num for each in steps for num in column(each)] for column in _COLUMNS)
                self._known[key] = [sum(numbers) / len(numbers) for numbers in columns]
        return self._known

    def _tensors(self, layer: int) -> ExpertTensors:
        facts, options, num = self.facts, self._options, self.facts.experts_of(layer)
        tp, ep, etp = self.mesh.tp, self.mesh.ep, self.mesh.etp
        held = facts.microbatch_size * facts.sequence // self.mesh.cp
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
            form=facts.form,
            weight_bytes=facts.sum_bytes,
        )

    def _sizes(self, layer: int) -> ExpertSizes:
        facts, options, num = self.facts, self._options, self.facts.experts_of(layer)
        ranks = self.mesh.cp * self.mesh.tp
        held = facts.sequence // ranks
        capacity = options.of_layer(layer).capacity(facts.sequence)
        return ExpertSizes(
            self.mesh.ep,
            self.mesh.etp,
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
        options, forwards = self._options, sum(which)
        is_padded = options.dispatcher is Dispatcher.PADDED
        if options.dispatcher is Dispatcher.ALL_GATHER or (is_padded and sizes.is_fixed):
            return LayerRows(forwards, 0, 0, 0, forwards * sizes.num_experts * sizes.slots)
        routes = self.routes.get((rank, step, layer))
        if routes is None or len(routes.rows) != len(which):
            return None
        kept, arrived, rows = (sum(compress(column(routes), which)) for column in _COLUMNS)
        if is_padded:  # a rank computes the slots of all ranks of its etp group and of ep
            return LayerRows(forwards, 0, 0, 0, rows // sizes.etp)
        return LayerRows(forwards, kept, arrived, rows, 0)


def _of(tp: int, cp: int) -> tuple[tuple[Axis, int], tuple[Axis, int]]:
    return (Axis.TP, tp), (Axis.CP, cp)


def _gathered(tensor: TensorSizes) -> Volume:
    """The all-gather of parts that ranks of tp made of the same tokens."""
    return {} if tensor.sequence_parallel else tensor.gathered()


def _volume(calls: Iterable[ExpertCall], forwards: int) -> Volume:
    return total({(str(call.axis), call.kind): Calls(forwards, call.bytes)} for call in calls)
