"""NCCL between ranks that share a GPU, which it refuses by itself ("Duplicate GPU detected")."""

from __future__ import annotations

import os


def let_nccl_share_gpus(rank: int, *, one_node: bool) -> None:
    """Have NCCL take this rank for a host of its own, before any process group is made.

    NCCL compares GPUs within a host alone, and a host is what ``NCCL_HOSTID`` names. Messages then go through sockets, on
    loopback where all ranks are on one node: kernels, streams and calls are NCCL's, the bandwidth is that of the sockets.
    Variables that are set already stay.
    """
    os.environ.setdefault("NCCL_HOSTID", f"rank-{rank}")
    os.environ.setdefault("NCCL_IB_DISABLE", "1")
    if one_node:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
