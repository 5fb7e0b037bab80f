"""NVTX domains for tools that record them, with any version of nvtx. Imports no torch.

    nvtx ≥ 0.2.12   a domain with ranges; a dummy unless the tool reports the domain as enabled
    nvtx ≥ 0.2.8    module-level functions, which reach any tool

nvtx asks an extension of NVTX whether a domain is enabled. Tools before 2025 lack it (Nsight Systems 2022.4 does): they record
ranges, but nvtx returns a dummy. If a tool is injected nevertheless, the domain is made without that check.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import nvtx

INJECTED = "NVTX_INJECTION64_PATH"
"""The variable by which NVTX finds the library of a tool; nsys sets it for every process it traces NVTX of."""


class Domain(Protocol):
    """A domain to push ranges to. The attributes of an event are opaque: what the domain makes of its message."""

    def get_event_attributes(self, message: str) -> Any: ...

    def push_range(self, attributes: Any, /) -> object: ...

    def pop_range(self) -> object: ...


def open_domain(name: str) -> Domain | None:
    """Open the domain; None while no tool has been injected into this process."""
    if hasattr(nvtx, "get_domain") and hasattr(getattr(nvtx, "Domain", None), "push_range"):
        domain: Domain = nvtx.get_domain(name)
        if type(domain).__name__ != "DummyDomain":
            return domain
        return _unchecked_domain(name) or _torch_ranges() if is_injected() else None
    if not is_injected():
        return None
    return _Functions(partial(nvtx.push_range, domain=name), partial(nvtx.pop_range, domain=name))


def is_injected() -> bool:
    """Return whether a tool that records NVTX ranges is injected into this process, and NVTX is not disabled."""
    return bool(os.environ.get(INJECTED)) and not os.environ.get("NVTX_DISABLE")


def _unchecked_domain(name: str) -> Domain | None:
    """Make a domain without asking whether it is enabled; None where this nvtx makes domains in another way."""
    try:
        from nvtx._lib import lib

        domain: Any = object.__new__(nvtx.Domain)
        domain.handle = lib.DomainHandle(name)
        domain.__init__(name)
        domain.get_event_attributes(message=name)
    except Exception:  # the inside of another package, whatever it has become
        return None
    opened: Domain = domain
    return opened


def _torch_ranges() -> Domain | None:
    """The ranges of a torch that was built with CUDA; they have no domain."""
    try:
        from torch._C import _nvtx
    except ImportError:
        return None
    return _Functions(_nvtx.rangePushA, _nvtx.rangePop)


class _Functions:
    """Functions that push and pop ranges; those of nvtx before 0.2.12 cache what they register themselves."""

    def __init__(self, push: Callable[[str], object], pop: Callable[[], object]) -> None:
        self.push_range = push
        self.pop_range = pop

    def get_event_attributes(self, message: str) -> str:
        return message
