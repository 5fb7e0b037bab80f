"""Gradient sums between ranks, once per step, during and after the backward of the last microbatch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn

from instrument.backward_split.gradients_of import gradient_of
from instrument.backward_split.split import Splittable
from instrument.collectives import AxisGroup
from instrument.expert.bias import biased_routers, forget_counts, update_biases
from instrument.expert.linear import copied_biases, expert_parameters
from instrument.mesh import Mesh
from instrument.optim.averages import Averages
from instrument.optim.buckets import BUCKET_BYTES, Bucket, Mean, OverlappedMean
from instrument.optim.main_parameters import Joined, MainParameters, Zero, main_parameters
from instrument.route import Route
from instrument.sequence.partial import partial_gradients, sum_partial_gradients
from instrument.tensor.shards import Share, counted_shares
from pptrace.marks import Axis, SpanKind
from pptrace.schedule.actions import Action, Kind

if TYPE_CHECKING:
    from instrument.optim.fully_sharded import FullySharded


@dataclass(frozen=True, slots=True)
class Finish:
    """Gradients of a stage that an action completes: of layers that can be split (``splittable``), of all others, or both."""

    stage: int
    splittable: bool
    others: bool


def finishing_actions(actions: Sequence[Action]) -> dict[Action, tuple[Finish, ...]]:
    """The actions of a rank's plan that complete gradients of a stage."""
    halves = [(action, half) for action in actions for half in action.halves]
    last_weights = {half.stage: half for _, half in halves if half.kind in (Kind.B, Kind.W)}
    last_inputs = {half.stage: half for _, half in halves if half.kind in (Kind.B, Kind.I)}
    finishing: dict[Action, tuple[Finish, ...]] = {}
    for action, half in halves:
        weights, inputs = (last.get(half.stage) is half for last in (last_weights, last_inputs))
        if weights or inputs:
            finishing[action] = (*finishing.get(action, ()), Finish(half.stage, weights, inputs))
    return finishing


class Reduce(StrEnum):
    """The time at which a rank begins to average the gradients of a stage."""

    OVERLAP = "overlap"  # during the stage's last backward
    ALIGNED = "aligned"  # at one time along the pipeline: rank r as many backwards later, or after its last op
    AFTER = "after"  # after the rank's last op

    def begins_within(self, pp_rank: int) -> bool:
        """Return whether the gradients of an action are sent while it runs."""
        return self is Reduce.OVERLAP or (self is Reduce.ALIGNED and pp_rank == 0)


def sending_actions(actions: Sequence[Action], reduce: Reduce, pp_rank: int) -> dict[Action, tuple[Finish, ...]]:
    """The actions of a rank's plan with or after which complete gradients are sent; the others' are sent after the last one.

    Source: Megatron-LM ``align_grad_reduce``: asynchronous communication slows compute, and ranks that are slowed at different
    times wait for each other. Its first rank sends after the action where a rank has several stages, here during it.
    """
    finishing = finishing_actions(actions)
    if reduce.begins_within(pp_rank):
        return finishing
    backwards = [action for action in actions if any(half.kind in (Kind.B, Kind.I) for half in action.halves)]
    sending: dict[Action, tuple[Finish, ...]] = {}
    index = -1
    for action in actions if reduce is Reduce.ALIGNED else ():
        index += action in backwards[index + 1 : index + 2]
        if action in finishing and index + pp_rank < len(backwards):
            later = backwards[index + pp_rank]
            sending[later] = sending.get(later, ()) + finishing[action]
    return sending


@dataclass(frozen=True, slots=True)
class Averaging:
    """Averaging of gradients over the replicas: dp × cp.

    Args:
        route: of all axes but tp.
        bucket_bytes: how much is averaged by one call.
        zero: what is sharded over the replicas.
        fully_sharded: the stages, where ``zero`` shards gradients or parameters.
        reduce: when it begins.
        overlaps_gathers: ZeRO-1's parameters are gathered while the next forwards run, each awaited by the layer that has it.
    """

    route: Route = Route.DIRECT
    bucket_bytes: int = BUCKET_BYTES
    zero: Zero = Zero.NONE
    fully_sharded: FullySharded | None = None
    reduce: Reduce = Reduce.OVERLAP
    overlaps_gathers: bool = False


class GradientSync:
    """Averages gradients over dp × cp and sums parts of one gradient: over tp those of norms under SP and of copied KV
    heads, over the first and last stage those of a tied embedding, over mirrored ranks (DualPipe) those of whole stages.

    Experts are averaged over edp. Their gradients are sums over the tokens of all ranks of ep already, which the way back of
    the tokens brought, so that the sum over edp is divided by dp · cp, as all others' over dp × cp are.

    The averages overlap with the last microbatch's backward, except of parameters whose parts have to be summed first.
    A loss is the mean over one rank's tokens, of which every rank of dp × cp has equally many, so that the mean over these
    ranks is the mean over all tokens. Every sum has an order that the backend chooses: runs agree up to rounding.
    Source of the sums: Megatron-LM ``finalize_model_grads``.

    Args:
        mesh: of this rank.
        stages: stage → module, in an order that all ranks share that hold copies of them.
        tied: this rank's copy of a tied embedding whose other end is on another rank, if it has one.
        tensor_group: the axis tp.
    """

    def __init__(
        self,
        mesh: Mesh,
        stages: Mapping[int, nn.Module],
        tied: nn.Parameter | None,
        tensor_group: AxisGroup,
        averaging: Averaging,
    ) -> None:
        route, zero, fully_sharded = averaging.route, averaging.zero, averaging.fully_sharded
        modules = list(stages.values())
        self._recorder = recorder = tensor_group.recorder
        self._tied = tied
        self._tensor = tensor_group
        self._partials = [partial for stage in modules for partial in partial_gradients(stage)]
        self._replicas = AxisGroup(mesh.groups[mesh.replicas], mesh.replicas, recorder, route)
        self._has_experts = Axis.EDP in mesh.groups
        edp = AxisGroup(mesh.groups.get(Axis.EDP), Axis.EDP, recorder, route)
        experts = {id(parameter) for stage in modules for parameter in expert_parameters(stage)}
        self._mirror = None if mesh.mirror is None else AxisGroup(mesh.mirror, Axis.MIRROR, recorder, route)
        has_copy = tied is not None and mesh.embedding is not None
        self._routers = biased_routers(modules)
        self._embedding = AxisGroup(mesh.embedding, Axis.EMBEDDING, recorder, route) if has_copy else None
        parameters = list(nn.ModuleList(modules).parameters())
        late = self._late_parameters(parameters)
        # Backward finishes the last layers first.
        early = [parameter for parameter in reversed(parameters) if id(parameter) not in late]
        last = [parameter for parameter in parameters if id(parameter) in late]
        self._fully_sharded = fully_sharded
        self.sharded = zero is not Zero.NONE or self._has_experts
        self._averages: list[Averages] = []
        for replicas, of_experts in ((self._replicas, False), (edp, True)):
            first, second = ([p for p in part if (id(p) in experts) is of_experts] for part in (early, last))
            if fully_sharded is None and first + second:
                sizes = (self._replicas.size, averaging.bucket_bytes, zero is Zero.OPTIMIZER)
                self._averages.append(Averages(first, second, replicas, *sizes))
        is_first_of_etp = Axis.ETP not in mesh.groups or dist.get_rank(mesh.groups[Axis.ETP]) == 0
        copied = set() if is_first_of_etp else {id(bias) for stage in modules for bias in copied_biases(stage)}
        counts_experts = edp.rank == 0 or zero is Zero.OPTIMIZER
        self._counted_experts = [p for p in parameters if id(p) in experts and counts_experts and id(p) not in copied]
        self._is_sharded = zero is Zero.OPTIMIZER
        self._reduce, self._pp_rank = averaging.reduce, mesh.pp_rank
        self._shards = [averages.shards for averages in self._averages if averages.shards is not None]
        for shards in self._shards:
            shards.overlaps_gathers = averaging.overlaps_gathers
        if averaging.overlaps_gathers:
            for stage in modules:
                stage.before_part = self.complete_parameters  # type: ignore[assignment]
        self._shares = self._counted_shares(modules, experts)
        self.main = self._main_parameters(parameters)
        self._watch_completion(stages, early)

    def _main_parameters(self, parameters: Sequence[nn.Parameter]) -> MainParameters | None:
        return Joined(self._shards) if self._shards else main_parameters(parameters, self._fully_sharded)

    def _late_parameters(self, parameters: Sequence[nn.Parameter]) -> set[int]:
        """Ids of the parameters whose gradients are averaged after the backward, because their parts are summed first."""
        if self._mirror is not None:
            return {id(parameter) for parameter in parameters}
        late = {id(partial.parameter) for partial in self._partials} if self._tensor.size > 1 else set()
        return late | ({id(self._tied)} if self._embedding is not None else set())

    def _watch_completion(self, stages: Mapping[int, nn.Module], early: Sequence[nn.Parameter]) -> None:
        """Count the stages that hold each parameter, and hook the accumulation of early gradients."""
        self._parts = {stage: _Parts.of(module) for stage, module in stages.items()}
        holders = Counter(id(p) for parts in self._parts.values() for p in (*parts.splittable, *parts.others))
        self._holders = {id(parameter): holders[id(parameter)] for parameter in early}
        self._finished: Counter[int] = Counter()
        self._awaited: set[int] = set()
        self._overlapped: list[OverlappedMean] = [a.overlapped for a in self._averages if a.overlapped is not None]
        self._overlapped_of = {key: mean for mean in self._overlapped for key in mean.parameters()}
        for parameter in early:
            if id(parameter) in self._overlapped_of:
                parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]

    def sending(self, actions: Sequence[Action]) -> dict[Action, tuple[Finish, ...]]:
        """:func:`sending_actions` of this rank's plan."""
        return sending_actions(actions, self._reduce, self._pp_rank)

    def complete_parameters(self, module: nn.Module | None = None) -> None:
        """Wait for the gathers of a module's parameters that are under way, or of all; every replica calls it alike."""
        for shards in self._shards:
            shards.complete(module)

    @contextmanager
    def finishing(self, finishes: Sequence[Finish]) -> Iterator[None]:
        """Context of an action of :func:`sending_actions`: what is complete may be sent, as soon as it is if during it."""
        if self._fully_sharded is not None:
            with self._fully_sharded.finishing([finish.stage for finish in finishes]):
                yield
            return
        if not self._overlapped:
            yield
            return
        completed: list[nn.Parameter] = []
        for finish in finishes:
            parts = self._parts[finish.stage]
            completed += [*(parts.splittable if finish.splittable else ()), *(parts.others if finish.others else ())]
        awaited = {id(parameter) for parameter in completed}
        self._awaited = awaited if self._reduce.begins_within(self._pp_rank) else set()
        yield
        self._awaited |= awaited if not self._reduce.begins_within(self._pp_rank) else set()
        for parameter in reversed(completed):
            self._accumulated(parameter)

    def run(self, step: int) -> None:
        """Complete the gradients of this rank's stages. Called when all microbatches have run."""
        self._finished.clear()
        sums_parts = bool(self._partials) and self._tensor.size > 1
        if not (
            sums_parts or self._routers or self._overlapped or self._mirror is not None or self._embedding is not None
        ):
            return
        with self._recorder.span(SpanKind.GRAD_SYNC, step):
            if sums_parts:
                sum_partial_gradients(self._partials, self._tensor)
            if self._embedding is not None and self._tied is not None:
                self._embedding.all_reduce(gradient_of(self._tied))
            for averages in self._averages:
                if self._mirror is not None or averages.overlapped is not None:
                    for bucket in averages.late_buckets:
                        self._complete(bucket, averages.mean)
                if averages.overlapped is not None:
                    averages.overlapped.finish()
            mirror = () if self._mirror is None else (self._mirror,)
            update_biases(self._routers, (self._tensor, self._replicas, *mirror))

    def forget_forwards(self) -> None:
        """Forget what forwards counted that are run again."""
        forget_counts(self._routers)

    def counted(self) -> list[Tensor]:
        """The gradients that this rank counts in a sum over the whole model, such as their norm: over pp and tp, and over
        replicas where these have shards or experts.

        Of a parameter with copies on several of these ranks, all of which have the summed gradient, only the first rank's
        counts.
        """
        if self._is_sharded:
            rows = {id(share.parameter): share.rows for share in self._shares}
            return [part for each in self._shards for part in each.counted(rows)]
        return [share.gradient() for share in self._shares]

    def mean_loss(self, losses: Tensor, step: int) -> Tensor:
        """The mean of all losses (one per microbatch) of all pipelines; called by every rank that holds a last stage."""
        self._recorder.step = step
        loss = losses.mean()
        if self._mirror is not None:  # each end has half of the microbatches
            loss = self._mirror.all_reduce(loss / 2)
        return self._replicas.all_reduce(loss).div_(self._replicas.size)

    def _complete(self, bucket: Bucket, mean: Mean) -> None:
        gradients = bucket.gradients()
        if self._mirror is not None:
            self._mirror.all_reduce(gradients)
        mean.finish(bucket, mean.start(bucket, gradients).wait())

    def _counted_shares(self, modules: Sequence[nn.Module], experts: Collection[int]) -> list[Share]:
        """Without ZeRO, sums go over replicas for the experts' sake alone, and the first has all other parameters for them."""
        if self._mirror is not None and self._mirror.rank > 0:
            return []
        of_experts = [Share(parameter) for parameter in self._counted_experts]
        if self._has_experts and not self._is_sharded and self._replicas.rank > 0:
            return of_experts
        copied = self._tied if self._embedding is not None and self._embedding.rank > 0 else None
        shares = counted_shares(modules, self._tensor.rank)
        return [s for s in shares if s.parameter is not copied and id(s.parameter) not in experts] + of_experts

    def _accumulated(self, parameter: Tensor) -> None:
        """Report an awaited gradient ready, once it is complete in every stage that has the parameter."""
        if id(parameter) not in self._awaited:
            return
        self._awaited.discard(id(parameter))
        self._finished[id(parameter)] += 1
        mean = self._overlapped_of.get(id(parameter))
        if mean is not None and self._finished[id(parameter)] == self._holders.get(id(parameter)):
            assert isinstance(parameter, nn.Parameter)
            mean.ready(parameter)


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """A stage's parameters: those of layers whose weight gradients may be deferred, and all others."""

    splittable: tuple[nn.Parameter, ...]
    others: tuple[nn.Parameter, ...]

    @classmethod
    def of(cls, stage: nn.Module) -> _Parts:
        layers = [part for part in stage.modules() if isinstance(part, Splittable)]
        split = {id(p) for layer in layers for p in layer.parameters(recurse=False)}
        parameters = tuple(stage.parameters())
        return cls(tuple(p for p in parameters if id(p) in split), tuple(p for p in parameters if id(p) not in split))
