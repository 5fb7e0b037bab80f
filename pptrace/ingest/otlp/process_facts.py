"""Read facts of a process from the resource of its OpenTelemetry spans: rank, sizes of the mesh, host, GPU.

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
from pptrace.model.traces import HOST, ONE_CLOCK, PARALLEL, SPANS_DEVICE

_RANK = ("dl.rank", "global_rank", "rank", "process.rank", "torch.distributed.rank")
_INSTANCE = re.compile(r"-rank(\d{1,9})$")
_SIZES = {
    "pp": "dl.pipeline_parallel.size",
    "tp": "dl.tensor_parallel.size",
    "dp": "dl.data_parallel.size",
    "cp": "dl.context_parallel.size",
}
_MAX_RANKS = 1_000_000
_RUN = ("nemo.run.id", "nemo.lens.run_uuid")
_PROCESS = ("service.name", "service.instance.id", "host.name", "process.pid")
_GPU = ("dl.gpu.name", "dl.gpu.uuid")


def rank_of(resource: Attributes) -> int | None:
    """The global rank, None if no attribute has it."""
    for name in _RANK:
        if (rank := rank_of_value(resource.get(name))) is not None:
            return rank
    match = _INSTANCE.search(str(resource.get("service.instance.id", "")))
    return int(match[1]) if match else None


def process_of(resource: Attributes) -> tuple[str, ...]:
    """Identifies a process without a rank."""
    return tuple(str(resource.get(name, "")) for name in _PROCESS)


def run_id_of(resource: Attributes) -> str:
    return next((str(resource[name]) for name in _RUN if name in resource), "")


def one_clock_of(resources: Sequence[Attributes]) -> Mapping[str, str]:
    """The ``one_clock`` fact of processes on one host, whose clock times all their spans; {} if the host is not known."""
    hosts = {str(resource.get("host.name", "")) for resource in resources}
    host = hosts.pop() if len(hosts) == 1 else ""
    return {ONE_CLOCK: f"{HOST}{host}"} if host and host != "localhost" else {}


def distributed_of(resource: Attributes, rank: int | None) -> Mapping[str, Any]:
    """Facts of the job, with the keys of Kineto's ``distributedInfo``; with a GPU, its name, as host spans only show launches."""
    facts: dict[str, Any] = {}
    world = rank_of_value(resource.get("dl.world_size"))
    if rank is not None and world and rank < world <= _MAX_RANKS:
        facts |= {"rank": rank, "world_size": world}
    gpus = rank_of_value(resource.get("host.gpu.count"))
    names = [str(resource[name]) for name in _GPU if name in resource]
    if names or gpus:
        facts |= {"backend": "nccl", SPANS_DEVICE: names[0] if names else "host.gpu.count"}
    return facts


def parallel_of(resource: Attributes) -> Mapping[str, Any]:
    """Facts of the sizes of the axes; {} if that of pp is missing or the product is not the number of ranks."""
    world = rank_of_value(resource.get("dl.world_size"))
    sizes = {axis: rank_of_value(resource.get(name)) for axis, name in _SIZES.items()}
    known_sizes = [size for size in sizes.values() if size]
    product = math.prod(known_sizes)
    if not sizes["pp"] or not world or world > _MAX_RANKS or world % product:
        return {}
    unknown_axes = [axis for axis, size in sizes.items() if not size]
    if unknown_axes == ["cp"]:
        sizes["cp"] = world // product
    elif unknown_axes or product != world:
        return {}
    pp_rank = rank_of_value(resource.get("dl.pipeline_parallel.rank"))
    return {PARALLEL: {**sizes, "pp_rank": pp_rank}, "world_size": world}
