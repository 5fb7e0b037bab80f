"""Hooks of torch's data parallelism and meshes: which process groups are whose.

DDP (``torch/nn/parallel/distributed.py``) reduces its buckets in C++, FSDP2 (``torch/distributed/fsdp/_fully_shard``) and
FSDP1 gather and scatter through ``torch.distributed``: the calls are seen by others, these hooks name the axis of their
groups. A ``DeviceMesh`` names its dimensions; the profiler writes that name only where the mesh has made the group itself.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from instrument.adapters.hooks import Hook, Hooks, Watch
from instrument.adapters.torch_distributed import DistributedCalls

DDP = "torch.nn.parallel.DistributedDataParallel"
FSDP = "torch.distributed.fsdp"
Name = Callable[[str], None]
"""Takes the framework that ran, where no pipeline's runtime says it."""


def _made(read: Callable[[Any], None]) -> Hook:
    """Read process groups off an object when it has been made."""

    def watch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        yield
        read(args[0])

    return watch


class DataParallelHooks:
    """Installers for the modules that make groups of data parallelism and meshes."""

    def __init__(self, hooks: Hooks, calls: DistributedCalls, name_framework: Name) -> None:
        self._hooks = hooks
        self._calls = calls
        self._name = name_framework

    def ddp(self, module: ModuleType) -> None:
        """``torch.nn.parallel.distributed``."""
        self._hooks.wrap(module.DistributedDataParallel, "__init__", _made(self._read_ddp))

    def fsdp1(self, module: ModuleType) -> None:
        """``torch.distributed.fsdp.fully_sharded_data_parallel``."""
        self._hooks.wrap(module.FullyShardedDataParallel, "__init__", _made(self._read_fsdp1))

    def fsdp2(self, module: ModuleType) -> None:
        """``torch.distributed.fsdp._fully_shard._fsdp_common``: the classes that say which mesh dimension does what."""
        for name in ("FSDPMeshInfo", "DDPMeshInfo"):
            self._hooks.wrap(getattr(module, name), "__post_init__", _made(self._read_fsdp2))

    def mesh(self, module: ModuleType) -> None:
        """``torch.distributed.device_mesh``."""
        self._hooks.wrap(module.DeviceMesh, "__init__", _made(self._read_mesh))

    def _read_ddp(self, model: Any) -> None:
        self._name(DDP)
        self._is_data_parallel(model.process_group)
        self._calls.note_reducer(model.process_group)

    def _read_fsdp1(self, model: Any) -> None:
        self._name(FSDP)
        self._is_data_parallel(model.process_group)
        self._is_data_parallel(getattr(model, "_inter_node_pg", None))

    def _read_fsdp2(self, info: Any) -> None:
        self._name(FSDP)
        names = info.mesh.mesh_dim_names or ()
        for use in ("shard", "replicate"):
            group, dimension = (getattr(info, f"{use}_{what}", None) for what in ("process_group", "mesh_dim"))
            self._is_data_parallel(group)
            # A mesh that was cut out of another one has its groups only now.
            if names and group is not None and dimension is not None:
                self._calls.name_dimension(group, names[dimension])

    def _is_data_parallel(self, group: Any) -> None:
        if group is not None:
            self._calls.name_axis(group, "dp")

    def _read_mesh(self, mesh: Any) -> None:
        names = mesh.mesh_dim_names
        if not names or mesh.get_coordinate() is None:
            return
        for dimension, name in enumerate(names):
            try:
                group = mesh.get_group(dimension)
            except RuntimeError:  # a view of another mesh, which has the groups
                return
            self._calls.name_dimension(group, name)
