"""What the resource of OpenTelemetry spans says of its process: the rank, the sizes of the mesh, the host, whether it has a GPU.

Megatron-LM's are ``dl.rank``, ``dl.world_size``, ``dl.{pipeline,tensor,data}_parallel.size``, ``host.name``, ``process.pid``,
``nemo.run.id`` (``megatron/training/global_vars.py``; NVIDIA-NeMo/Lens, ``providers.py``, ``semconv.py``). The context-parallel
size and the number of model chunks are not among them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pptrace.ingest.common.rank_names import rank_of_value
from pptrace.ingest.otlp.spans import Attributes
from pptrace.model.tables import HOST, ONE_CLOCK

PARALLEL = "parallel"
"""The fact of sizes whose ranks are not laid out yet: {"pp", "tp", "dp", "cp"} and ``pp_rank`` where the process says it."""

DEVICE = "device"
"""The fact of a process with a GPU: its name, or the attribute that tells it. None of its work is in the spans."""

_RANK = ("dl.rank", "global_rank", "rank", "process.rank", "torch.distributed.rank")
_INSTANCE = re.compile(r"-rank(\d{1,9})$")
_SIZES = {
    "pp": "dl.pipeline_parallel.size",
    "tp": "dl.tensor_parallel.size",
    "dp": "dl.data_parallel.size",
    "cp": "dl.context_parallel.size",
}
_MOST_RANKS = 1_000_000
_RUN = ("nemo.run.id", "nemo.lens.run_uuid")
_PROCESS = ("service.name", "service.instance.id", "host.name", "process.pid")
_GPU = ("dl.gpu.name", "dl.gpu.uuid")


def rank_of(resource: Attributes) -> int | None:
    """The global rank, None where no attribute tells it."""
    for name in _RANK:
        if (rank := rank_of_value(resource.get(name))) is not None:
            return rank
    match = _INSTANCE.search(str(resource.get("service.instance.id", "")))
    return int(match[1]) if match else None


def process_of(resource: Attributes) -> tuple[str, ...]:
    """The same for all spans of a process that says no rank."""
    return tuple(str(resource.get(name, "")) for name in _PROCESS)


def run_of(resource: Attributes) -> str:
    return next((str(resource[name]) for name in _RUN if name in resource), "")


def one_clock_of(resources: Sequence[Attributes]) -> Mapping[str, str]:
    """What processes of one host share, whose spans are all timed by its clock; {} where they do not name one host."""
    hosts = {str(resource.get("host.name", "")) for resource in resources}
    host = hosts.pop() if len(hosts) == 1 else ""
    return {ONE_CLOCK: f"{HOST}{host}"} if host and host != "localhost" else {}


def distributed_of(resource: Attributes, rank: int | None) -> Mapping[str, Any]:
    """The job in the words of Kineto's ``distributedInfo``. With a GPU the host's spans show launching alone."""
    told: dict[str, Any] = {}
    world = rank_of_value(resource.get("dl.world_size"))
    if rank is not None and world and rank < world <= _MOST_RANKS:
        told |= {"rank": rank, "world_size": world}
    gpus = rank_of_value(resource.get("host.gpu.count"))
    names = [str(resource[name]) for name in _GPU if name in resource]
    if names or gpus:
        told |= {"backend": "nccl", DEVICE: names[0] if names else "host.gpu.count"}
    return told


def parallel_of(resource: Attributes) -> Mapping[str, Any]:
    """Facts of the mesh's sizes; {} where the pipeline's is not told or they do not multiply up to the ranks."""
    world = rank_of_value(resource.get("dl.world_size"))
    sizes = {axis: rank_of_value(resource.get(name)) for axis, name in _SIZES.items()}
    known = [size for size in sizes.values() if size]
    product = math.prod(known)
    if not sizes["pp"] or not world or world > _MOST_RANKS or world % product:
        return {}
    lacking = [axis for axis, size in sizes.items() if not size]
    if lacking == ["cp"]:
        sizes["cp"] = world // product
    elif lacking or product != world:
        return {}
    place = rank_of_value(resource.get("dl.pipeline_parallel.rank"))
    return {PARALLEL: {**sizes, "pp_rank": place}, "world_size": world}
