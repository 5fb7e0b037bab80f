"""Memory of a rank's steps: what its recorder measured, and which memory a number is of."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum
from typing import Annotated, TypeVar

import numpy as np
from msgspec import Meta, MsgspecError, Struct, convert

from pptrace.model.tables import Int64

UNKNOWN = -1
_Count = Annotated[int, Meta(ge=0, lt=2**62)]
_Value = TypeVar("_Value")


class MemoryKind(StrEnum):
    """Kind of bytes that are counted."""

    DEVICE_ALLOCATED = "device_allocated"  # by tensors on the accelerator, as the framework's allocator counts
    DEVICE_RESERVED = "device_reserved"  # by the process on the accelerator: what its allocator got from the driver
    HOST_ALLOCATED = "host_allocated"  # by tensors on the host since recording began, without what was there before
    ALLOCATED = "allocated_since_start"  # the same of tensors on either, or from the driver (Nsight Systems)
    PROCESS_RESIDENT = "process_resident"  # by the whole process on the host, interpreter and libraries too


class PeakMemory(Struct, frozen=True):
    """The most memory in a time range and what there was at its start, bytes; None where unknown."""

    kind: MemoryKind
    peak: int
    start: int | None = None
    reserved_peak: int | None = None


class Levels(Struct, frozen=True):
    """Memory of one kind, per step, bytes; -1 where unknown."""

    peak: Int64
    start: Int64
    reserved_peak: Int64


class RecordedMemory(Struct, frozen=True):
    """Memory that ``pptrace run`` measured of a rank's steps (:mod:`instrument.launch.recording.step_memory`)."""

    index_of: Mapping[int, int]
    """Step → index into the columns."""
    process: Levels | None
    device: Levels | None

    def device_of(self, step: int) -> PeakMemory | None:
        return self._of(self.device, MemoryKind.DEVICE_ALLOCATED, step)

    def process_of(self, step: int) -> PeakMemory | None:
        return self._of(self.process, MemoryKind.PROCESS_RESIDENT, step)

    def _of(self, levels: Levels | None, kind: MemoryKind, step: int) -> PeakMemory | None:
        index = self.index_of.get(step)
        if levels is None or index is None or levels.peak[index] < 0:
            return None
        start, reserved = int(levels.start[index]), int(levels.reserved_peak[index])
        return PeakMemory(
            kind, int(levels.peak[index]), start if start >= 0 else None, reserved if reserved >= 0 else None
        )


def read_recorded_memory(facts: object) -> RecordedMemory | None:
    """The ``memory`` object of a trace's facts; None where there is none, or it is damaged."""
    if not isinstance(facts, Mapping) or not (steps := _read(facts.get("steps"), list[_Count])):
        return None
    process, device = (_read_levels(facts.get(name), len(steps)) for name in ("process", "device"))
    if device is not None and device.peak.max(initial=0) <= 0:  # there is a device, and the script does not use it
        device = None
    return RecordedMemory({step: index for index, step in enumerate(steps)}, process, device)


def _read_levels(facts: object, num_steps: int) -> Levels | None:
    if not isinstance(facts, Mapping):
        return None
    names = ("peak_bytes", "start_bytes", "reserved_peak_bytes")
    columns = [_read(facts.get(name), list[_Count | None]) or [] for name in names]
    if len(columns[0]) != num_steps:
        return None
    none = [None] * num_steps
    values = [column if len(column) == num_steps else none for column in columns]
    return Levels(*np.array([[UNKNOWN if value is None else value for value in column] for column in values]))


def _read(value: object, kind: type[_Value]) -> _Value | None:
    """A value of a type; None where it is of another."""
    with suppress(MsgspecError):
        return convert(value, kind)
    return None


def kind_of_events(allocated: Int64, reserved: Int64) -> MemoryKind:
    """Kind of memory that the events of a rank are of: accelerators have caches, of which the allocator tells the size."""
    if (reserved < 0).any():
        return MemoryKind.ALLOCATED
    if not reserved.any():
        return MemoryKind.HOST_ALLOCATED
    return MemoryKind.DEVICE_RESERVED if np.array_equal(allocated, reserved) else MemoryKind.DEVICE_ALLOCATED
