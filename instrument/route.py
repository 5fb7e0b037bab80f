"""The route that tensors take between ranks, and the copies through host memory: staging, wherever it is done."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import torch
from torch import Tensor


class Route(StrEnum):
    """The memory through which a tensor is sent."""

    DIRECT = "direct"  # from the memory it is in: gloo from the host's, NCCL from the device's
    HOST_STAGED = "host-staged"  # through pinned host memory over gloo: several ranks on one GPU


def host_buffer(shape: Sequence[int], like: Tensor) -> Tensor:
    """An empty tensor on the host, pinned where ``like`` is on a GPU."""
    return torch.empty(tuple(shape), dtype=like.dtype, pin_memory=like.is_cuda)


def copy_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies on the host, pinned where a tensor is on a GPU.

    Waits for one event of the current stream of each GPU that has some of them, never for a whole device.
    """
    copies = [
        torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)
        for tensor in tensors
    ]
    for device in {tensor.device for tensor in tensors}:
        _wait_for_copies(device)
    return copies


def copy_to_device(buffer: Tensor, device: torch.device) -> Tensor:
    """A copy of a host buffer on a device, without waiting for it.

    The allocator of pinned memory does not reuse the buffer before the stream of this copy has passed it.
    """
    return buffer.to(device, non_blocking=True)


def _wait_for_copies(device: torch.device) -> None:
    """Wait on the host for the work queued on the current stream of a GPU, which need not be the current one."""
    if device.type != "cuda":
        return
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(device))
    copied.synchronize()
