"""Freed memory that the C library keeps for reuse, in place of giving it back to the system, which clears each page anew."""

from __future__ import annotations

import os
import sys
from ctypes import CDLL

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Parameters of glibc's mallopt (``malloc.h``)."""
_MOST_KEPT_BYTES = 2**31 - 1
_JEMALLOC = "_RJEM_MALLOC_CONF"
"""The variable that polars' allocator takes its settings from (jemalloc, as tikv-jemallocator builds it)."""


def keep_freed_memory() -> None:
    """Reuse what this process frees: large tables come and go, and new pages are a fifth of the processor time.

    Nothing changes where the C library is not GNU's. For commands that end soon: others would keep the most that they needed.
    Call it before polars is imported, whose allocator shares nothing with the C library: what that frees is not needed again
    after reading, and is given back at once.
    """
    os.environ.setdefault(_JEMALLOC, "dirty_decay_ms:0,muzzy_decay_ms:0")
    library = _c_library()
    if library is not None and hasattr(library, "mallopt"):
        library.mallopt(_MMAP_MAX, 0)
        library.mallopt(_TRIM_THRESHOLD, _MOST_KEPT_BYTES)


def give_back_freed_memory() -> None:
    """Give what is kept back to the system, as before other processes need memory too."""
    library = _c_library()
    if library is not None and hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def _c_library() -> CDLL | None:
    return CDLL(None) if sys.platform == "linux" else None
