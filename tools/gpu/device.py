"""Set-up of a rank's GPU before anything is measured; a module of its own, since parts run as scripts."""

from __future__ import annotations

import torch
import torch.distributed as dist


def touch_device() -> None:
    """Make this rank's GPU context, which the first use does."""
    if torch.cuda.is_available():
        torch.zeros(1, device=f"cuda:{dist.get_rank() % torch.cuda.device_count()}").item()
