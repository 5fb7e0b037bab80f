"""Runs something when a module is imported, so that a package is hooked only if the script uses it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

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
