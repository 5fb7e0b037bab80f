"""Peaks of steps: of this process, of an imitation of CUDA's allocator, and of a GPU where there is one."""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from instrument.launch.recording import step_memory
from instrument.launch.recording.profiler import record_device_history
from instrument.launch.recording.step_memory import DevicePeaks, Level, ProcessPeak, StepMemory, keep_maxrss
from pptrace.model.step_memory import MemoryKind, read_recorded_memory

MIB = 2**20


def touch(num_bytes: int) -> None:
    """Take memory from the system and give it back."""
    with mmap.mmap(-1, num_bytes) as pages:
        for offset in range(0, num_bytes, mmap.PAGESIZE):
            pages[offset] = 1


@pytest.fixture
def getrusage() -> Iterator[Any]:
    original = resource.getrusage
    yield original
    resource.getrusage = original


def test_the_peak_of_a_process_is_that_since_the_step_began() -> None:
    process = ProcessPeak()
    assert process.reason is None
    touch(200 * MIB)
    process.begin()
    quiet: Any = process.level()
    process.begin()
    touch(100 * MIB)
    full: Any = process.level()
    assert quiet.peak - quiet.start < 20 * MIB
    assert 90 * MIB < full.peak - full.start < 140 * MIB


def test_the_script_still_reads_the_peak_of_the_whole_process(getrusage: Any) -> None:
    process = ProcessPeak()
    touch(300 * MIB)
    most = getrusage(resource.RUSAGE_SELF).ru_maxrss
    keep_maxrss(process)
    process.begin()
    assert getrusage(resource.RUSAGE_SELF).ru_maxrss < most - 250 * 1024
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss == most
    assert resource.getrusage(resource.RUSAGE_CHILDREN) == getrusage(resource.RUSAGE_CHILDREN)


def test_a_forked_child_measures_and_resets_nothing(monkeypatch: pytest.MonkeyPatch, getrusage: Any) -> None:
    process = ProcessPeak()
    keep_maxrss(process)
    touch(100 * MIB)
    process.begin()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert process.level() is None
    touch(100 * MIB)
    process.begin()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss == getrusage(resource.RUSAGE_SELF).ru_maxrss
    monkeypatch.undo()
    level: Any = process.level()
    assert level.peak - level.start > 80 * MIB


def test_without_a_way_to_reset_the_peak_it_is_not_measured(tmp_path: Path, getrusage: Any) -> None:
    (tmp_path / "status").write_text("VmHWM:\t 10 kB\nVmRSS:\t 5 kB\n")
    process = ProcessPeak(tmp_path)
    assert process.level() is None
    assert "clear_refs" in process.reason
    keep_maxrss(process)
    assert resource.getrusage is getrusage
    memory = StepMemory(process, DevicePeaks())
    memory.begin(2)
    memory.end(keep=True)
    facts = memory.facts()
    assert facts["notes"] == [process.reason]
    assert read_recorded_memory(facts).process_of(2) is None


class Allocator:
    """Counts as torch's allocator does, with the two functions through which torch.cuda reads and resets it."""

    def __init__(self) -> None:
        self.current = self.peak = 0

    def take(self, num_bytes: int) -> None:
        self.current += num_bytes
        self.peak = max(self.peak, self.current)

    def statistics(self, device: int) -> dict[str, Any]:
        assert device == 0
        counts = {"all": {"current": self.current, "peak": self.peak, "allocated": 0, "freed": 0}}
        reserved = {"all": {"current": 2 * self.peak, "peak": 2 * self.peak, "allocated": 0, "freed": 0}}
        return {"allocated_bytes": counts, "reserved_bytes": reserved, "num_ooms": 0}

    def reset(self, device: int) -> None:
        assert device == 0
        self.peak = self.current


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    imitation = Allocator()
    for module in (torch.cuda, torch.cuda.memory):
        monkeypatch.setattr(module, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda.memory, "_get_device_index", lambda *_, **__: 0)
    monkeypatch.setattr(torch._C, "_cuda_memoryStats", imitation.statistics, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_resetPeakMemoryStats", imitation.reset, raising=False)
    return imitation


def test_the_peak_of_a_device_is_that_of_the_step(allocator: Allocator) -> None:
    memory = StepMemory(ProcessPeak(), DevicePeaks())
    for step, most in enumerate((50, 30)):
        allocator.take(10)
        memory.begin(step)
        allocator.take(most)
        allocator.take(-most)
        memory.end(keep=True)
    recorded: Any = read_recorded_memory(memory.facts() or {})
    first, second = (recorded.device_of(step) for step in (0, 1))
    assert (first.kind, first.start, first.peak) == (MemoryKind.DEVICE_ALLOCATED, 10, 60)
    assert (second.start, second.peak, second.reserved_peak) == (20, 50, 100)
    summary: Any = memory.summary(running=False)
    assert (summary["device_bytes"], summary["most_device_bytes"]) == (50, 60)


def test_the_script_reads_its_own_peaks_of_a_device(allocator: Allocator) -> None:
    device = DevicePeaks()
    allocator.take(70)
    allocator.take(-60)
    device.begin()
    assert torch.cuda.max_memory_allocated() == 70
    allocator.take(5)
    assert device.level() == Level(10, 15, 30)
    device.begin()
    device.begin()
    assert torch.cuda.max_memory_allocated() == 70
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 15
    allocator.take(-15)
    device.begin()
    assert torch.cuda.max_memory_allocated() == 15
    assert device.level() == Level(0, 0, 0)


def test_a_reset_by_the_script_hides_no_peak(allocator: Allocator) -> None:
    device = DevicePeaks()
    device.begin()
    allocator.take(40)
    allocator.take(-40)
    torch.cuda.reset_peak_memory_stats()
    allocator.take(3)
    level: Any = device.level()
    assert level.peak == 40
    assert torch.cuda.max_memory_allocated() == 3
    device.begin()
    level = device.level()
    assert (level.start, level.peak) == (3, 3)


def test_an_allocator_without_statistics_is_left_alone(allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.\nmore")

    monkeypatch.setattr(torch._C, "_cuda_memoryStats", refuse)
    device = DevicePeaks()
    device.begin()
    assert device.level() is None
    assert device.reason == (
        "the allocator of the device has no statistics (CUDAPluggableAllocator does not yet support getDeviceStats.)"
    )
    assert allocator.peak == 0


def test_another_current_device_at_the_end_of_a_step_is_not_measured(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = DevicePeaks()
    device.begin()
    allocator.take(1)
    assert device.level() is not None
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert device.level() is None


def test_short_steps_that_are_not_recorded_are_measured_together(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    monkeypatch.setattr(
        torch._C, "_cuda_memoryStats", lambda device: (reads.append(device), allocator.statistics(0))[1]
    )
    now = [1_000_000_000]
    monkeypatch.setattr(step_memory.time, "perf_counter_ns", lambda: now[0])
    memory = StepMemory(ProcessPeak(), DevicePeaks())

    def step(number: int, most: int, *, recorded: bool = False) -> None:
        memory.begin(number, is_recorded=recorded)
        allocator.take(most)
        allocator.take(-most)
        now[0] += 10_000_000
        memory.end(keep=recorded)

    for number in range(50):
        step(number, 70 if number == 7 else 5)
    assert len(reads) <= 4
    for number in (50, 51):
        step(number, number, recorded=True)
    step(52, 3)
    recorded: Any = read_recorded_memory(memory.facts() or {})
    assert [recorded.device_of(number).peak for number in (50, 51)] == [50, 51]
    summary: Any = memory.summary(running=False)
    assert (summary["step"], summary["device_bytes"], summary["most_device_bytes"]) == (52, 3, 70)


def test_a_device_that_a_step_begins_to_use_is_measured_from_the_next_one_on(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_used = [False]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_used[0])
    memory = StepMemory(ProcessPeak(), DevicePeaks())
    for number in range(3):
        memory.begin(number, is_recorded=False)
        is_used[0] = True
        allocator.take(10)
        memory.end(keep=False)
    assert memory.summary(running=False)["device_bytes"] == 30


def test_only_recorded_steps_are_kept() -> None:
    memory = StepMemory()
    assert memory.facts() is None
    assert memory.summary(running=True) is None
    for step in range(4):
        memory.begin(step)
        memory.end(keep=step in (1, 2))
    memory.begin(4)
    facts: Any = memory.facts()
    assert facts["steps"] == [1, 2]
    assert "device" not in facts
    last: Any = memory.summary(running=False)
    running: Any = memory.summary(running=True)
    assert (last["step"], running["step"]) == (3, 4)


def test_the_devices_history_is_kept_only_of_a_device_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    record_device_history(on=True)
    assert not calls
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    record_device_history(on=True)
    record_device_history(on=False)
    assert calls == [{"max_entries": 100_000}, {"enabled": None}]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_peak_of_a_gpu_is_that_of_the_step_and_the_script_reads_its_own() -> None:
    torch.cuda.init()
    before = torch.cuda.memory_allocated()  # workspaces of earlier tests
    device = DevicePeaks()
    first = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    del first
    device.begin()
    second = torch.ones(16 * MIB, dtype=torch.uint8, device="cuda")
    del second
    level = device.level()
    assert level.peak - level.start == 16 * MIB
    assert torch.cuda.max_memory_allocated() >= before + 64 * MIB
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() < before + 64 * MIB
