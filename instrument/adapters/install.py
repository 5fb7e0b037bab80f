"""Installs the hooks of a rank before the script's first line.

Hooks of a package come with its import, so that it is hooked only if the script uses it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TypeVar

import torch
import torch.distributed as dist

from instrument.adapters import checkpoint_saves, deepspeed_pipe, dualpipe, megatron_core, megatron_state, recompute
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

Installer = Callable[[ModuleType], object]


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
        hooks = self.hooks
        self._watch("checkpoint", recompute.TORCH, lambda module: recompute.watch_torch(module, hooks, session))
        for name in checkpoint_saves.FUNCTIONS:
            package = "" if name.startswith("torch.") else "megatron-core"
            self._watch(name, name, lambda module: checkpoint_saves.watch_saves(module, hooks, session), package)
        self._marks = CallMarks(session)
        self.calls: DistributedCalls | None = None
        if dist.is_available():
            self.calls = self._try("torch.distributed", torch.__version__, lambda: self._watch_calls(observers, logs))
        if self.calls is None:
            return
        calls, works = self.calls, self._works
        pipelining = "torch.distributed.pipelining"
        self._watch(
            pipelining, f"{pipelining}.schedules", lambda module: PipeliningHooks(module, hooks, works, session)
        )
        groups = DataParallelHooks(hooks, calls, self._name_framework)
        self._watch("functional collectives", FUNCTIONAL, lambda _: FunctionalCalls(hooks, calls))
        self._watch("DeviceMesh", "torch.distributed.device_mesh", groups.mesh)
        self._watch("DDP", "torch.nn.parallel.distributed", groups.ddp)
        self._watch("FSDP", "torch.distributed.fsdp.fully_sharded_data_parallel", groups.fsdp1)
        self._watch("FSDP2", "torch.distributed.fsdp._fully_shard._fsdp_common", groups.fsdp2)
        of_megatron: dict[str, Installer] = {  # each may be of a shape that is not known
            megatron_state.STATE: lambda module: megatron_state.watch_order(module, hooks),
            megatron_state.OPTIMIZERS: lambda module: megatron_state.watch_optimizers(module, hooks, session),
            megatron_state.GRADIENTS: lambda module: megatron_state.watch_gradients(module, hooks, session),
            megatron_core.SCHEDULES: lambda module: megatron_core.MegatronHooks(module, hooks, works, session),
            recompute.MEGATRON: lambda module: recompute.watch_function(module, hooks, session),
        }
        for name, install in of_megatron.items():
            self._watch(name, name, install, "megatron-core")
        for name in dualpipe.MODULES:
            self._watch(name, name, lambda module: dualpipe.DualPipeHooks(module, hooks, works, session), "dualpipe")
        of_deepspeed = deepspeed_pipe.DeepSpeedHooks
        self._watch(
            "deepspeed",
            deepspeed_pipe.ENGINE,
            lambda module: of_deepspeed(module, hooks, works, session, calls.axes),
            "deepspeed",
        )

    def remove(self) -> None:
        """Take all hooks out."""
        self.imports.remove()
        self.hooks.remove()

    def facts(self) -> Mapping[str, object]:
        """Facts of the hooks for the trace's metadata: versions, what was reported, calls that raised, groups by name."""
        calls = self.calls
        return {
            "hooks": dict(self.hooks.installed),
            "notes": list(self.hooks.lines),
            "failed_calls": [list(call) for call in self._marks.failed_calls],
            "groups": {} if calls is None else dict(_facts_of_groups(calls)),
        }

    def _watch_calls(self, observers: Sequence[CallObserver], logs: Sequence[CallObserver]) -> DistributedCalls:
        self._works = Works(self.hooks)
        return DistributedCalls(self.hooks, self._works, [*observers, self._marks], logs)

    def _watch(self, name: str, module: str, install: Installer, package: str = "") -> None:
        """Install the hooks of a part of torch, or of another package, when the script imports it."""

        def installer(loaded: ModuleType) -> None:
            self._try(name, version_of(package) if package else torch.__version__, lambda: install(loaded))

        self.imports.when_imported(module, installer)

    def _name_framework(self, name: str) -> None:
        self.framework = name

    def _try(self, name: str, version: str, install: Callable[[], _T]) -> _T | None:
        """Install the hooks of a package; one of a shape that is not known runs without, with a line: then None."""
        try:
            installed = install()
        except (AttributeError, KeyError, TypeError, ValueError, ImportError) as err:
            self.hooks.say(f"{name} {version} is not a version that pptrace knows ({err}); it runs without hooks")
            return None
        self.hooks.installed[name] = version
        return installed


def _facts_of_groups(calls: DistributedCalls) -> Iterator[tuple[str, dict[str, object]]]:
    for name, group in calls.groups.items():
        facts: dict[str, object] = {
            "ranks": list(group.ranks),
            "axis": calls.axes.get(name, group.axis),
            "description": group.description,
            **({"dimensions": calls.dimensions[name]} if name in calls.dimensions else {}),
        }
        yield "_".join(name.split()) or "-", facts | ({"reducer": True} if name in calls.reducers else {})


def version_of(package: str) -> str:
    """The version of an installed package; "unknown" where nothing says it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
