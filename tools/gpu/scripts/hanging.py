"""A training loop in miniature with one fault, over NCCL.

pptrace run -n 2 --hang-timeout 5 tools/gpu/scripts/hanging.py FAULT
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from place import join  # type: ignore[import-not-found]

FAULT_STEP, STEPS = 6, 12


def main(fault: str) -> None:
    device = join()
    rank, world = dist.get_rank(), dist.get_world_size()
    is_last = rank == world - 1
    gradients = torch.ones(1024, device=device)
    message = torch.ones(1 << 22, device=device)
    for step in range(STEPS):
        now = step == FAULT_STEP
        if now and is_last and fault == "sleep":
            time.sleep(600)
        if now and is_last and fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if now and is_last and fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if not (now and is_last and fault == "skip"):
            dist.all_reduce(gradients)
        peer = rank ^ 1
        first, second = (dist.recv, dist.send) if now and fault == "cross" else (dist.send, dist.recv)
        if rank % 2 == 0:
            first(message, peer)
            second(message, peer)
        else:
            dist.recv(message, peer)
            dist.send(message, peer)
        gradients.div_(world)
        print(f"step {step} sum {gradients.sum().item():.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
