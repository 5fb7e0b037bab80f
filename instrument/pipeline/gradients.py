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
    """Averages gradients over dp, and sums those of a tied embedding over the first and last stage.

    Source of the order: Megatron-LM ``finalize_model_grads``.
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
        if self._mesh.shape.dp == 1 and embedding is None:
            return
        with self._recorder.span(SpanKind.GRAD_SYNC, step):
            if self._mesh.shape.dp > 1:
                for bucket in self._buckets():
                    self._average(bucket, step)
            if embedding is not None and self._tied is not None:
                self._all_reduce(_gradient(self._tied), embedding, Axis.EMBEDDING, step)

    def mean_loss(self, loss: Tensor, step: int) -> Tensor:
        """The loss averaged over dp; called by every rank of the last stage."""
        if self._mesh.shape.dp == 1:
            return loss
        total = loss.clone()
        self._all_reduce(total, self._mesh.groups[Axis.DP], Axis.DP, step)
        return total / self._mesh.shape.dp

    def _average(self, bucket: Sequence[Tensor], step: int) -> None:
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        self._all_reduce(flat, self._mesh.groups[Axis.DP], Axis.DP, step)
        flat.div_(self._mesh.shape.dp)
        start = 0
        for gradient in bucket:
            gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()

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
