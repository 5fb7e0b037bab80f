"""The route that tensors take between ranks."""

from __future__ import annotations

from enum import StrEnum


class Route(StrEnum):
    """Where a tensor goes on its way."""

    DIRECT = "direct"  # from the memory it is in: gloo from the host's, NCCL from the device's
    HOST_STAGED = "host-staged"  # through pinned host memory over gloo: several ranks on one GPU
