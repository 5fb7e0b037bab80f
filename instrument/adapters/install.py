"""Installs the hooks of a rank before the script's first line.

Hooks of a package come with its import, so that it is hooked only if the script uses it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TypeVar

import torch
import torch.distributed as dist

from instrument.adapters import deepspeed_pipe, megatron_core, megatron_state, recompute
from instrument.adapters.call_marks import CallMarks
from instrument.adapters.calls import CallObserver
from instrument.adapters.hooks import Hooks
from instrument.adapters.torch_data_parallel import DataParallelHooks
from instrument.adapters.torch_distributed import DistributedCalls
from instrument.adapters.torch_functional_collectives import MODULE as FUNCTIONAL
from instrument.adapters.torch_functional_collectives import FunctionalCalls
from instrument.adapters.torch_pipelining import PipeliningHooks
from instrument.adapters.works import Works
from instrument.session import Session

Installer = Callable[[ModuleType], None]


class ImportHooks(MetaPathFinder):
    """Calls an installer with each chosen module, directly after its first import."""

    def __init__(self) -> None:
        self._installers: dict[str, list[Installer]] = {}
        self._searching: set[str] = set()
        sys.meta_path.insert(0, self)

    def when_imported(self, name: str, install: Installer) -> None:
        """Call ``install(module)`` once: now, where the module is imported already."""
        if name in sys.modules:
            install(sys.modules[name])
        else:
            self._installers.setdefault(name, []).append(install)

    def remove(self) -> None:
        """Watch no import any more."""
        self._installers.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._installers or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = find_spec(fullname)
        finally:
            self._searching.discard(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module
        installers = self._installers.pop(fullname)

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for install in installers:
                install(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_T = TypeVar("_T")


class Adapters:
    """The hooks of this process and what they learnt.

    ``session`` gets steps, passes and plans; ``observers`` watch the communication, in addition to the one that writes marks, and
    ``logs`` as :class:`DistributedCalls` says.
    """

    def __init__(
        self, session: Session, observers: Sequence[CallObserver] = (), logs: Sequence[CallObserver] = ()
    ) -> None:
        self.hooks = Hooks(lambda line: print(f"pptrace: {line}", file=sys.stderr, flush=True))
        self.imports = ImportHooks()
        self.framework = ""
        """Framework of data parallelism; "" where nothing of it was made."""
        self._session = session
        self._watch("checkpoint", recompute.TORCH, lambda module: recompute.watch_torch(module, self.hooks, session))
        self._marks: CallMarks | None = None
        self.calls: DistributedCalls | None = None
        if dist.is_available():
            self.calls = self._try("torch.distributed", torch.__version__, lambda: self._watch_calls(observers, logs))
        if self.calls is None:
            return
        self._watch("torch.distributed.pipelining", "torch.distributed.pipelining.schedules", self._watch_pipelining)
        groups = DataParallelHooks(self.hooks, self.calls, self._name_framework)
        self._watch("functional collectives", FUNCTIONAL, self._watch_functional)
        self._watch("DeviceMesh", "torch.distributed.device_mesh", groups.mesh)
        self._watch("DDP", "torch.nn.parallel.distributed", groups.ddp)
        self._watch("FSDP", "torch.distributed.fsdp.fully_sharded_data_parallel", groups.fsdp1)
        self._watch("FSDP2", "torch.distributed.fsdp._fully_shard._fsdp_common", groups.fsdp2)
        for name in megatron_core.MODULES:
            self.imports.when_imported(name, self._watch_megatron)
        megatron = version_of("megatron-core")
        self.imports.when_imported(
            recompute.MEGATRON,
            lambda module: self._try(
                module.__name__, megatron, lambda: recompute.watch_function(module, self.hooks, session)
            ),
        )
        self.imports.when_imported(deepspeed_pipe.ENGINE, self._watch_deepspeed)

    def remove(self) -> None:
        """Take all hooks out."""
        self.imports.remove()
        self.hooks.remove()

    def facts(self) -> Mapping[str, object]:
        """Facts of the hooks for the trace's metadata: versions, what was reported, calls that raised, groups by name."""
        calls = self.calls
        groups = {} if calls is None else calls.groups
        axes = {} if calls is None else calls.axes
        described = {} if calls is None else calls.descriptions
        return {
            "hooks": dict(self.hooks.installed),
            "notes": list(self.hooks.lines),
            "failed_calls": [list(call) for call in self._marks.failed_calls] if self._marks is not None else [],
            "groups": {
                "_".join(name.split()) or "-": {
                    "ranks": list(group.ranks),
                    "axis": "" if name in described else axes.get(name, group.axis),
                    "description": described.get(name, group.description),
                    **({"reducer": True} if self.calls is not None and name in self.calls.reducers else {}),
                }
                for name, group in groups.items()
            },
        }

    def _watch_calls(self, observers: Sequence[CallObserver], logs: Sequence[CallObserver]) -> DistributedCalls:
        works = Works(self.hooks)
        self._works = works
        marks = self._marks = CallMarks(self._session)
        return DistributedCalls(self.hooks, works, [*observers, marks], logs)

    def _watch_pipelining(self, module: ModuleType) -> None:
        PipeliningHooks(module, self.hooks, self._works, self._session)

    def _watch_functional(self, module: ModuleType) -> None:
        assert self.calls is not None
        FunctionalCalls(self.hooks, self.calls)

    def _watch(self, name: str, module: str, install: Callable[[ModuleType], None]) -> None:
        """Install the hooks of a part of torch when the script imports it."""
        self.imports.when_imported(module, lambda loaded: self._try(name, torch.__version__, lambda: install(loaded)))

    def _name_framework(self, name: str) -> None:
        self.framework = name

    def _watch_megatron(self, module: ModuleType) -> None:
        """Hook one of Megatron-LM's modules, each of which may be of a shape that is not known."""
        hooks, session = self.hooks, self._session
        install: dict[str, Callable[[], object]] = {
            megatron_state.STATE: lambda: megatron_state.watch_order(module, hooks),
            megatron_state.OPTIMIZERS: lambda: megatron_state.watch_optimizers(module, hooks, session),
            megatron_state.GRADIENTS: lambda: megatron_state.watch_gradients(module, hooks, session),
            megatron_core.SCHEDULES: lambda: megatron_core.MegatronHooks(module, hooks, self._works, session),
        }
        self._try(module.__name__, version_of("megatron-core"), install[module.__name__])

    def _watch_deepspeed(self, module: ModuleType) -> None:
        axes = {} if self.calls is None else self.calls.axes
        install = deepspeed_pipe.DeepSpeedHooks
        self._try(
            "deepspeed",
            version_of("deepspeed"),
            lambda: install(module, self.hooks, self._works, self._session, axes),
        )

    def _try(self, name: str, version: str, install: Callable[[], _T]) -> _T | None:
        """Install the hooks of a package; one of a shape that is not known runs without, with a line: then None."""
        try:
            installed = install()
        except (AttributeError, KeyError, TypeError, ValueError, ImportError) as err:
            self.hooks.say(f"{name} {version} is not a version that pptrace knows ({err}); it runs without hooks")
            return None
        self.hooks.installed[name] = version
        return installed


def version_of(package: str) -> str:
    """The version of an installed package; "unknown" where nothing says it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
