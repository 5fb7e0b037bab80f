"""Facts about a process that make its trace readable elsewhere: versions, host, clocks, plan. Nothing private is among
them: no paths, no user name, and of the environment a list of settings alone (:mod:`pptrace.environment`)."""

from __future__ import annotations

import hashlib
import platform
import socket
import time
from pathlib import Path

import pptrace
from pptrace.schedule.plan import Plan

TRACE_SCHEMA = "pptrace.trace/1"
UNKNOWN_SIZE = 0
"""Number of ranks in a process that the script started, until torch.distributed knows it."""


def sample_clock() -> dict[str, int]:
    """One moment on three clocks, ns, read one directly after the other."""
    return {
        "time_ns": time.time_ns(),
        "monotonic_ns": time.monotonic_ns(),
        "perf_counter_ns": time.perf_counter_ns(),
    }


def host_name() -> str:
    """Host name and eight digits that change with each boot: equal for two ranks exactly if they share their clocks."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        boot = ""
    return f"{socket.gethostname()}-{hashlib.sha256(boot.encode()).hexdigest()[:8]}"


def read_versions() -> dict[str, str | None]:
    """Versions of everything that shapes a trace; null for what is absent. Imports torch."""
    import torch
    import torch.cuda.nccl

    cuda: str | None = torch.version.cuda
    nccl: str | None = None
    if cuda and torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": cuda,
        "nccl": nccl,
        "pptrace": pptrace.__version__,
    }


def read_backend() -> str | None:
    """The default process group's backend; null before there is one."""
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None
    if (name := str(dist.get_backend())) != "undefined":
        return name
    of_device = dict(part.split(":") for part in str(dist.get_backend_config()).split(",") if ":" in part)
    return of_device.get(
        "cuda" if torch.cuda.is_available() else "cpu"
    )  # the script named none: each device has its own


def read_rank() -> tuple[int, int] | None:
    """The default process group's (rank, size); None before there is one."""
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else None


def read_device() -> str:
    """The accelerator this process has used, with its name; otherwise ``cpu``."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device()
        return f"cuda:{index} {torch.cuda.get_device_name(index)}"
    return "cpu"


def read_device_id() -> str | None:
    """Eight digits for the GPU that this process has used, equal for two ranks exactly if they share it; None without one, for a
    MIG instance, which shares its part with nobody, and before torch 2.4.
    """
    import torch

    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    uuid = None if "MIG" in properties.name.split() else getattr(properties, "uuid", None)
    return None if uuid is None else hashlib.sha256(str(uuid).encode()).hexdigest()[:8]


def read_network_ports(root: Path = Path("/sys/class/infiniband")) -> dict[str, str]:
    """Rates of the active ports of the host's InfiniBand and RoCE cards, by card and port, as Linux writes them."""
    ports = {}
    for port in sorted(root.glob("*/ports/*")):
        try:
            if "ACTIVE" in (port / "state").read_text():
                ports[f"{port.parent.parent.name}/{port.name}"] = (port / "rate").read_text().strip()
        except OSError:
            continue
    return ports


def plan_as_json(plan: Plan) -> dict[str, object]:
    """Name, microbatches and the rows of compute actions, as in torch's CSV."""
    rows = [[str(action) for action in plan.compute_actions(rank)] for rank in range(plan.pp)]
    return {"name": plan.name, "num_microbatches": plan.num_microbatches, "rows": rows}
