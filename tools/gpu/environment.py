"""Part ``environment``: what the machine has, and whether its GPU computes, copies and is timed as the other parts need."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tools.gpu.checks import Skip
from tools.gpu.part import Setting, main

_PACKAGES = ("torch", "numpy", "pandas", "click", "pytest", "nvtx", "msgspec", "rich", "plotly")
_SIZE = 1024


def part(setting: Setting) -> None:
    checks = setting.checks
    with checks.check("facts") as figures:
        figures |= facts()
    with checks.check("a GPU is there") as figures:
        if setting.dry:
            raise Skip("dry run on CPUs")
        assert torch.cuda.is_available(), "torch sees no CUDA device; `make gpu DRY=1` needs none"
        figures["gpus"] = [describe_gpu(index) for index in range(torch.cuda.device_count())]
    with checks.check("a product and a pinned copy are right"):
        _check_product(torch.device("cpu" if setting.dry else "cuda"))
    with checks.check("the profiler records kernels") as figures:
        if setting.dry:
            raise Skip("dry run on CPUs")
        figures["kernels"] = _count_kernels()
        assert figures["kernels"] > 0, "CUPTI recorded no kernel: recorded runs will have host times alone"


def facts() -> dict[str, Any]:
    """Versions and sizes, without names of the machine."""
    versions = {name: _version(name) for name in _PACKAGES}
    return {
        "python": platform.python_version(),
        "versions": versions,
        "cuda": torch.version.cuda,
        "nccl": dist.is_nccl_available(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "nsys": _nsys_version(),
    }


def describe_gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "is_slice": "MIG" in properties.name,
    }


def _check_product(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    left = torch.rand(_SIZE, _SIZE, dtype=torch.float64, generator=generator)
    result = left.to(device) @ left.to(device)
    host = torch.empty(result.shape, dtype=result.dtype, pin_memory=device.type == "cuda").copy_(result)
    torch.testing.assert_close(host, left @ left, rtol=1e-12, atol=1e-9)


def _count_kernels() -> int:
    matrix = torch.rand(_SIZE, _SIZE, device="cuda")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        matrix @ matrix
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profiler.events())


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _nsys_version() -> str | None:
    program = shutil.which("nsys")
    if program is None:
        return None
    done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip().rpartition("version ")[2] or "present, but `nsys --version` fails"


if __name__ == "__main__":
    main(part)
