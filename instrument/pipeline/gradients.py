"""Gradient sums between ranks, once per step, after the last microbatch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from instrument.collectives import AxisGroup
from instrument.mesh import Mesh
from instrument.pipeline.transport import Route
from instrument.sequence.partial import partial_gradients, sum_partial_gradients
from pptrace.errors import PptraceError
from pptrace.marks import Axis, SpanKind

BUCKET_BYTES = 25 * 2**20  # as DDP


class GradientSync:
    """Averages gradients over dp × cp and sums parts of one gradient: over tp those of norms under SP and of copied KV
    heads, over the first and last stage those of a tied embedding, over mirrored ranks (DualPipe) those of whole stages.

    A loss is the mean over a rank's own tokens, of which every rank of dp × cp has as many, so that the mean over these
    ranks is the mean over all tokens. Every sum has an order that the backend chooses: runs agree up to rounding.
    Source of the order of the sums: Megatron-LM ``finalize_model_grads``.

    Args:
        mesh: where this rank stands.
        stages: this rank's, in an order that all ranks share that hold copies of them.
        tied: this rank's copy of a tied embedding whose other end is on another rank, if it has one.
        tensor_group: the axis tp.
        route: of the other axes.
        bucket_bytes: how much is summed by one call.
    """

    def __init__(
        self,
        mesh: Mesh,
        stages: Sequence[nn.Module],
        tied: nn.Parameter | None,
        tensor_group: AxisGroup,
        route: Route = Route.DIRECT,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        def axis(name: Axis) -> AxisGroup:
            return AxisGroup(mesh.groups[name], name, tensor_group.recorder, route)

        recorder = tensor_group.recorder
        self._parameters = tuple(nn.ModuleList(stages).parameters())
        self._tied = tied
        self._recorder = recorder
        self._bucket_bytes = bucket_bytes
        self._tensor = tensor_group
        self._partials = [partial for stage in stages for partial in partial_gradients(stage)]
        self._replicas = axis(mesh.replicas)
        self._mirror = None if mesh.mirror is None else AxisGroup(mesh.mirror, Axis.MIRROR, recorder, route)
        has_copy = tied is not None and mesh.embedding is not None
        self._embedding = AxisGroup(mesh.embedding, Axis.EMBEDDING, recorder, route) if has_copy else None

    def run(self, step: int) -> None:
        """All-reduce the gradients of this rank's stages. Called with the gradients of all microbatches in place."""
        tensor_parallel = bool(self._partials) and self._tensor.size > 1
        everywhere = self._replicas.size > 1 or self._mirror is not None
        if not (tensor_parallel or everywhere or self._embedding is not None):
            return
        with self._recorder.span(SpanKind.GRAD_SYNC, step):
            if everywhere:
                for bucket in self._buckets():
                    self._reduce(bucket)
            if tensor_parallel:
                sum_partial_gradients(self._partials, self._tensor)
            if self._embedding is not None and self._tied is not None:
                self._embedding.all_reduce(_gradient(self._tied))

    def counted(self) -> tuple[nn.Parameter, ...]:
        """Those of this rank's parameters that it counts in a sum over the whole model, such as the gradient norm.

        Of a parameter with copies on several ranks of a pipeline, all of which have the summed gradient, only the first
        rank's counts; the copies of other pipelines are in those pipelines' sums.
        """
        if self._mirror is not None and self._mirror.rank > 0:
            return ()
        copied = self._tied if self._embedding is not None and self._embedding.rank > 0 else None
        return tuple(parameter for parameter in self._parameters if parameter is not copied)

    def mean_loss(self, losses: Tensor, step: int) -> Tensor:
        """The mean of all losses (one per microbatch) of all pipelines; called by every rank that holds a last stage."""
        self._recorder.step = step
        total = losses.mean() / (1 if self._mirror is None else 2)  # each end has half of the microbatches
        self._sum(total)
        return total / self._replicas.size

    def _reduce(self, bucket: Sequence[Tensor]) -> None:
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        self._sum(flat)
        flat.div_(self._replicas.size)
        start = 0
        for gradient in bucket:
            gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()

    def _sum(self, tensor: Tensor) -> None:
        """Sum over the copies of this rank's stages in its own pipeline, then over all replicas; in place."""
        if self._mirror is not None:
            self._mirror.all_reduce(tensor)
        self._replicas.all_reduce(tensor)

    def _buckets(self) -> Iterator[list[Tensor]]:
        """The gradients in order, cut where a bucket is full or the dtype changes."""
        bucket: list[Tensor] = []
        size = 0
        for parameter in self._parameters:
            gradient = _gradient(parameter)
            if bucket and (size + gradient.nbytes > self._bucket_bytes or gradient.dtype != bucket[0].dtype):
                yield bucket
                bucket, size = [], 0
            bucket.append(gradient)
            size += gradient.nbytes
        if bucket:
            yield bucket


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        raise PptraceError(
            f"a parameter of shape {tuple(parameter.shape)} has no gradient after the step; every parameter of a stage "
            "must take part in its forward"
        )
    return parameter.grad
