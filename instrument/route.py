"""The route that tensors take between ranks, and the copies through host memory."""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor


class Route(StrEnum):
    """Where a tensor goes on its way."""

    DIRECT = "direct"  # from the memory it is in: gloo from the host's, NCCL from the device's
    HOST_STAGED = "host-staged"  # through pinned host memory over gloo: several ranks on one GPU


def host_copy(tensor: Tensor) -> Tensor:
    """A copy on the host, pinned where the tensor is on a GPU; :func:`wait_for_copies` says when it may be read."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)


def wait_for_copies(device: torch.device) -> None:
    """Wait on the host for what the current stream of ``device`` has been given; nothing for a CPU.

    One event, never the whole device. The stream is that of the tensor's own GPU, which need not be the current one.
    """
    if device.type != "cuda":
        return
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(device))
    copied.synchronize()
