"""Freed memory is kept, and given back. Each program runs in a process of its own, whose settings die with it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from pptrace.memory import give_back_freed_memory

_PROGRAM = """
import sys
import time
from pptrace.memory import give_back_freed_memory, keep_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

if sys.argv[1] != "default":
    keep_freed_memory()
if sys.argv[1] == "polars":
    import polars
    polars.Series([1.5]) + 1  # starts what it needs for any sum
before = resident()
if sys.argv[1] == "polars":
    table = polars.zeros(25 << 20, polars.Float64, eager=True) + 1
else:
    table = bytearray(200 << 20)
    table[::4096] = b"1" * len(table[::4096])
del table
for _ in range(40):  # polars frees it on another thread
    freed = resident() - before
    if sys.argv[1] != "polars" or freed < 20 << 20:
        break
    time.sleep(0.05)
give_back_freed_memory()
print(freed >> 20, (resident() - before) >> 20)
"""


_BETWEEN_SMALL_ONES = """
import sys
from pptrace.memory import return_large_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

if sys.argv[1] == "return":
    return_large_memory()
table = bytearray(20 << 20)
del table
before = resident()
tables, small = [], []
for _ in range(50):
    tables.append(b"1" * (2 << 20))
    small.append(b"1" * 100_000)
del tables
print(resident() - before >> 20)
"""


def resident_mib(option: str, program: str = _PROGRAM) -> list[int]:
    """MiB resident after tables were freed, and with the first program after they were given back.

    The allocator is as it comes: dask.distributed leaves a setting of it in the environment of who starts workers.
    """
    command = [sys.executable, "-c", program, option]
    root = Path(__file__).resolve().parents[1]
    environ = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    done = subprocess.run(command, cwd=root, env=environ, capture_output=True, text=True, timeout=60, check=True)
    return [int(word) for word in done.stdout.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps its own way")
def test_a_freed_table_stays_until_it_is_given_back() -> None:
    kept, given_back = resident_mib("keep")
    assert kept >= 190
    assert given_back < 20
    assert max(resident_mib("default")) < 20


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps its own way")
def test_freed_tables_between_small_objects_are_returned() -> None:
    assert resident_mib("default", _BETWEEN_SMALL_ONES)[0] > 50, "else the C library does it by itself"
    assert resident_mib("return", _BETWEEN_SMALL_ONES)[0] < 20


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere polars has another allocator")
def test_what_polars_frees_is_given_back_at_once() -> None:
    assert resident_mib("polars")[0] < 20


def test_other_systems_have_nothing_to_give_back(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[object] = []
    monkeypatch.setattr("pptrace.memory.CDLL", loaded.append)
    monkeypatch.setattr(sys, "platform", "darwin")
    give_back_freed_memory()
    assert loaded == []
    monkeypatch.setattr(sys, "platform", "linux")
    give_back_freed_memory()
    assert loaded == [None]
