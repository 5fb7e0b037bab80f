"""The route that tensors take between ranks, and the copies through host memory."""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor


class Route(StrEnum):
    """The memory through which a tensor is sent."""

    DIRECT = "direct"  # from the memory it is in: gloo from the host's, NCCL from the device's
    HOST_STAGED = "host-staged"  # through pinned host memory over gloo: several ranks on one GPU


def host_copy(tensor: Tensor) -> Tensor:
    """A copy on the host, pinned where the tensor is on a GPU; readable after :func:`wait_for_copies`."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)


def wait_for_copies(device: torch.device) -> None:
    """Wait on the host for the work queued on the current stream of ``device``; no-op for a CPU.

    One event, never the whole device. ``device`` is the tensor's GPU, which need not be the current one.
    """
    if device.type != "cuda":
        return
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(device))
    copied.synchronize()
