"""Hooks: functions of other packages wrapped so that their calls are seen, without a change in what they do.

A hook never breaks the script. What its own code raises takes that hook out, with one line that says so; the wrapped function
runs as it would without it. Inside ``torch.compile`` the wrapper is not there at all: the compiler sees the function itself.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from types import ModuleType
from typing import Any

import torch

_is_compiling = torch.compiler.is_compiling


_INHERITED = object()


Watch = Generator[None, Any, None]
Hook = Callable[[tuple[Any, ...], dict[str, Any]], Watch]
"""Watches one call, given its arguments. The function runs at the ``yield``, which gives what it returned; where it raises, the
generator is closed there. One that ends before it has yielded does not watch that call.
"""


class Hooks:
    """All hooks of this process.

    ``report`` takes one line for a person: a hook that was taken out, a version that is not known.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._pid = os.getpid()
        self.active = True
        self.lines: list[str] = []
        """Lines that were reported, for the trace's metadata."""
        self.installed: dict[str, str] = {}
        """Version of each package that is hooked."""
        self._undo: list[Callable[[], None]] = []
        os.register_at_fork(after_in_child=self._leave_child)

    def say(self, line: str) -> None:
        """Report a line once."""
        if line not in self.lines:
            self.lines.append(line)
            self._report(line)

    def wrap(self, owner: Any, name: str, hook: Hook) -> Callable[..., Any]:
        """Replace ``owner.name`` by a function that does the same and is watched by ``hook``; the replacement.

        Raises:
            AttributeError: the owner has no such function: another version than the ones that are known.
        """
        wrapper = self.watched(getattr(owner, name), hook)
        self.replace(owner, name, wrapper)
        return wrapper

    def watched(self, original: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
        """A function that does what ``original`` does, watched by ``hook``."""
        alive = True

        def give_up(err: Exception) -> None:
            nonlocal alive
            alive = False
            name = getattr(original, "__qualname__", getattr(original, "__name__", "?"))
            self.say(
                f"the hook of {name} raised {type(err).__name__}: {err}; it is taken out, the script goes on without it"
            )

        @functools.wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            if _is_compiling() or not alive or not self.active:
                return original(*args, **kwargs)
            try:
                watch = hook(args, kwargs)
                next(watch, None)
            except Exception as err:
                give_up(err)
                return original(*args, **kwargs)
            try:
                result = original(*args, **kwargs)
            except BaseException:
                try:
                    watch.close()
                except Exception as err:
                    give_up(err)
                raise
            try:
                watch.send(result)
            except StopIteration:
                pass
            except Exception as err:
                give_up(err)
            return result

        return observed

    def replace(self, owner: Any, name: str, replacement: object) -> None:
        """Put a replacement for an attribute."""
        original = vars(owner).get(
            name, _INHERITED
        )  # of a class, what reading it from there would make another thing of
        setattr(owner, name, replacement)
        self._undo.append(
            functools.partial(delattr, owner, name)
            if original is _INHERITED
            else functools.partial(setattr, owner, name, original)
        )

    def replace_item(self, table: dict[Any, Any], key: Any, replacement: object) -> None:
        """Put a replacement into a table of functions."""
        original = table[key]
        table[key] = replacement
        self._undo.append(lambda: table.__setitem__(key, original))

    def replace_everywhere(self, name: str, original: object, replacement: object) -> None:
        """Put a replacement also where modules of the original's package that are imported already have taken it by name."""
        package = str(original.__module__).partition(".")[0]
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType) and module.__name__.partition(".")[0] == package:
                known = vars(module).get(name)
                if known is original:
                    setattr(module, name, replacement)
                    self._undo.append(functools.partial(setattr, module, name, original))

    def remove(self) -> None:
        """Put everything back."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self.active = False

    def _leave_child(self) -> None:
        """A forked child, such as a data loader's worker, is no rank of the run."""
        self.active = False


def require(owner: Any, names: Iterable[str]) -> None:
    """Check that a package is of a known shape.

    Raises:
        AttributeError: it lacks one of the names.
    """
    for name in names:
        if not hasattr(owner, name):
            raise AttributeError(f"{getattr(owner, '__name__', owner)} has no {name!r}")


def arguments_of(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any]:
    """Arguments of a call by name, however they were passed."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def require_parameters(owner: Any, name: str, parameters: Iterable[str]) -> None:
    """Check that a function is of a known shape.

    Raises:
        AttributeError: it is missing, or lacks a parameter.
    """
    require(owner, (name,))
    lacking = set(parameters) - set(inspect.signature(getattr(owner, name)).parameters)
    if lacking:
        raise AttributeError(f"{name} of {owner.__name__} has no parameter {min(lacking)!r}")
