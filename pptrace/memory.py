"""Freed memory that the C library keeps for reuse, in place of giving it back to the system, which clears each page anew."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from ctypes import CDLL

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
"""Parameters of glibc's mallopt (``malloc.h``)."""
_MOST_KEPT_BYTES = 2**31 - 1
_LARGE_BYTES = 2**20
_JEMALLOC = "_RJEM_MALLOC_CONF"
"""The variable that polars' allocator takes its settings from (jemalloc, as tikv-jemallocator builds it)."""
_AT_ONCE = "dirty_decay_ms:0,muzzy_decay_ms:0"


def keep_freed_memory() -> None:
    """Reuse what this process frees: large tables come and go, and new pages are a fifth of the processor time.

    Nothing changes where the C library is not GNU's. For commands that end soon: others would keep the most that they needed.
    Call it before polars is imported, whose allocator shares nothing with the C library: what that frees is not needed again
    after reading, and is given back at once.
    """
    _set_allocators({_MMAP_MAX: 0, _TRIM_THRESHOLD: _MOST_KEPT_BYTES})


def return_large_memory() -> None:
    """Let the system have each large table of this process again as soon as it is freed, for programs that go on for long.

    The C library would else, once such a table was freed, put the next ones of up to 32 MB between small objects, where what is
    freed cannot be returned. Call it before polars is imported.
    """
    _set_allocators({_MMAP_THRESHOLD: _LARGE_BYTES})


def give_back_freed_memory() -> None:
    """Give what is kept back to the system, as before other processes need memory too."""
    library = _c_library()
    if library is not None and hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def _set_allocators(parameters: Mapping[int, int]) -> None:
    os.environ.setdefault(_JEMALLOC, _AT_ONCE)
    library = _c_library()
    if library is not None and hasattr(library, "mallopt"):
        for parameter, value in parameters.items():
            library.mallopt(parameter, value)


def _c_library() -> CDLL | None:
    return CDLL(None) if sys.platform == "linux" else None
