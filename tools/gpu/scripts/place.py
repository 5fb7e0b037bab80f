"""The process group and device of a rank of these scripts: NCCL on a GPU that it may share with others, else gloo."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def join() -> torch.device:
    """Make the process group; the device of this rank."""
    rank = int(os.environ["RANK"])
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    os.environ["NCCL_HOSTID"] = f"rank-{rank}"  # else NCCL refuses two ranks on one GPU
    os.environ["NCCL_SOCKET_IFNAME"], os.environ["NCCL_IB_DISABLE"] = "lo", "1"
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device
