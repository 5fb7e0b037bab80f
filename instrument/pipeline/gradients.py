"""Gradient sums between ranks, once per step, after the last microbatch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from instrument.mesh import Mesh
from instrument.pipeline.transport import Route
from instrument.recorder import Recorder
from pptrace.errors import PptraceError
from pptrace.marks import Axis, Collective, SpanKind

BUCKET_BYTES = 25 * 2**20  # as DDP


class GradientSync:
    """Averages gradients over dp, and sums those of copies: of a tied embedding over the first and last stage, of whole
    stages over mirrored ranks (DualPipe).

    ``parameters`` stand in the same order on all ranks that hold copies of them. Source of the order: Megatron-LM
    ``finalize_model_grads``.
    """

    def __init__(
        self,
        mesh: Mesh,
        parameters: Sequence[nn.Parameter],
        tied: nn.Parameter | None,
        recorder: Recorder,
        route: Route = Route.DIRECT,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._mesh = mesh
        self._parameters = tuple(parameters)
        self._tied = tied
        self._recorder = recorder
        self._route = route
        self._bucket_bytes = bucket_bytes

    def run(self, step: int) -> None:
        """All-reduce the gradients of this rank's stages. Called with the gradients of all microbatches in place."""
        embedding = self._mesh.embedding if self._tied is not None else None
        if self._mesh.shape.dp == 1 and embedding is None and self._mesh.mirror is None:
            return
        with self._recorder.span(SpanKind.GRAD_SYNC, step):
            if self._mesh.shape.dp > 1 or self._mesh.mirror is not None:
                for bucket in self._buckets():
                    self._reduce(bucket, step)
            if embedding is not None and self._tied is not None:
                self._all_reduce(_gradient(self._tied), embedding, Axis.EMBEDDING, step)

    def counted(self) -> tuple[nn.Parameter, ...]:
        """Those of this rank's parameters that it counts in a sum over the whole model, such as the gradient norm.

        Of a parameter with copies on several ranks of a pipeline, all of which have the summed gradient, only the first
        rank's counts; the copies of other pipelines are in those pipelines' sums.
        """
        mirror, embedding = self._mesh.mirror, self._mesh.embedding
        if mirror is not None and mirror.rank() > 0:
            return ()
        copied = self._tied if embedding is not None and embedding.rank() > 0 else None
        return tuple(parameter for parameter in self._parameters if parameter is not copied)

    def mean_loss(self, losses: Tensor, step: int) -> Tensor:
        """The mean of all losses (one per microbatch) of all pipelines; called by every rank that holds a last stage."""
        total = losses.mean() / (1 if self._mesh.mirror is None else 2)  # each end has half of the microbatches
        self._sum(total, step)
        return total / self._mesh.shape.dp

    def _reduce(self, bucket: Sequence[Tensor], step: int) -> None:
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        self._sum(flat, step)
        flat.div_(self._mesh.shape.dp)
        start = 0
        for gradient in bucket:
            gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()

    def _sum(self, tensor: Tensor, step: int) -> None:
        """Sum over the copies of this rank's stages in its own pipeline, then over all pipelines; in place."""
        if self._mesh.mirror is not None:
            self._all_reduce(tensor, self._mesh.mirror, Axis.MIRROR, step)
        if self._mesh.shape.dp > 1:
            self._all_reduce(tensor, self._mesh.groups[Axis.DP], Axis.DP, step)

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

    def _all_reduce(self, tensor: Tensor, group: dist.ProcessGroup, axis: Axis, step: int) -> None:
        """Sum in place. Host-staged: through pinned memory, with one event awaited on the host."""
        with self._recorder.collective(Collective.ALL_REDUCE, axis, group.size(), tensor.nbytes, step):
            if self._route is Route.DIRECT or not tensor.is_cuda:
                dist.all_reduce(tensor, group=group)
                return
            host = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
            copied.synchronize()
            dist.all_reduce(host, group=group)
            tensor.copy_(host, non_blocking=True)


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        raise PptraceError(
            f"a parameter of shape {tuple(parameter.shape)} has no gradient after the step; every parameter of a stage "
            "must take part in its forward"
        )
    return parameter.grad
