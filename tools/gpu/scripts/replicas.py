"""A script of somebody else's: DDP over NCCL.

pptrace run -n 2 tools/gpu/scripts/replicas.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from place import join  # type: ignore[import-not-found]
from torch.nn.parallel import DistributedDataParallel

WIDTH, STEPS = 512, 6


def main() -> None:
    device = join()
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(8)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers).to(device), bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(256, WIDTH, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.6f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
