"""Read JAX's profiles: XPlane files (``*.xplane.pb``) of GPUs and TPUs; every device of the host with work is a rank.

    /device:GPU:N    lines "Stream #S(…)": kernels and copies, each with the correlation of the call that launched it
    /device:TPU:N    lines "XLA Ops" and "Async XLA Ops": operations of the compiler; "XLA Modules", "Steps"
    /host:CPU        lines of threads: calls of the driver, Python, and ranges of JAX and of the program

Other planes and lines are sums over these, or no events. A step is a range with a ``step_num`` (``StepTraceAnnotation``), on
TPUs an event of the line "Steps".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pptrace.errors import TraceError
from pptrace.ingest.common.byte_source import ByteSource
from pptrace.ingest.common.codes import Codes
from pptrace.ingest.common.json_texts import LIMIT_NS
from pptrace.ingest.common.sort_events import EventColumns, joined_columns, sorted_events
from pptrace.ingest.formats import XPLANE_SUFFIX
from pptrace.ingest.xplane.planes import NO_STAT, Line, Plane, Space, read_space
from pptrace.model.traces import HOST_NAME, ONE_CLOCK, SESSION, Category, InputFormat, Trace
from pptrace.model.wording import as_ranges, counted

_EXPECTED = (
    f"expected the *{XPLANE_SUFFIX} that jax.profiler.trace writes; copy it anew as a binary file, or record again"
)
_DEVICE = re.compile(r"/device:(?P<kind>GPU|TPU):(?P<number>\d{1,6})")
_STREAM = re.compile(r"Stream #(\d{1,18})")
_HOST, _ENVIRONMENT, _BEGIN = "/host:CPU", "Task Environment", "profile_start_time"
_OPERATIONS, _ASYNC, _MODULES, _STEPS = "XLA Ops", "Async XLA Ops", "XLA Modules", "Steps"
_CORRELATION, _STEP, _GROUP, _COPY, _FILL, _HLO = (
    *("correlation_id", "step_num", "group_id"),
    *("memcpy_details", "memset_details", "hlo_op"),
)
_STATS = frozenset({_CORRELATION, _STEP, _GROUP, _COPY, _FILL, _HLO})
_CALL = re.compile(r"(?:cuda|hip|cu)[A-Z]")
_COPIES, _FILLS = re.compile(r"Memcpy|(?:async-)?(?:copy|slice|dynamic-slice)-(?:start|done)"), re.compile(r"Memset")
_SUFFIX_OF_KERNEL = ".kd"
_FIRST_THREAD = 1_000_000
"""Numbers of the host's threads; those below are of lines of devices."""


def read_xplane(path: Path) -> tuple[Trace, ...]:
    """Read a trace for each device with work, their ranks in the order of their numbers, else one of the host.

    Raises:
        TraceError: the file cannot be read, is no XPlane file, or has no event of a host or a device.
    """
    with ByteSource(path) as source:
        data = b"".join(iter(source.read, b""))
        damage = source.damage
    space = read_space(data, _STATS)
    damage = damage or space.damage
    names = Codes()
    planes = (plane for plane in space.planes if plane.name == _HOST)
    threads = [_host_lane(plane, *thread) for plane in planes for thread in enumerate(plane.lines, _FIRST_THREAD)]
    host = _joined(threads, -1, names)
    devices = dict(sorted(_devices(space, names), key=lambda device: device[0]))
    if not devices and not len(host):
        reason = (
            "empty" if not data else damage or f"{counted(len(space.planes), 'plane')} without events of host or device"
        )
        raise TraceError(f"{path}: {reason}; {_EXPECTED}")
    warnings = []
    if damage:
        kept = counted(len(space.planes), "plane")
        warnings.append(f"{damage}; kept the {kept} before it, so that devices or the host may be missing")
    listed_devices = {int(match["number"]) for plane in space.planes if (match := _DEVICE.fullmatch(plane.name))}
    if devices and (idle := sorted(listed_devices - set(devices))):
        warnings.append(f"no work of device {as_ranges(idle)}, none done or none recorded: no rank")
    begins = [plane.stats.get(_BEGIN, 0) for plane in space.planes if plane.name == _ENVIRONMENT]
    base = next((begin for begin in begins if 0 < begin <= LIMIT_NS), 0)
    steps = [code for code, name in enumerate(names.texts) if name.startswith("ProfilerStep#")]
    parts = [[events, _host_of(host, events, len(devices), steps)] for events in devices.values()]
    facts: dict[str, Any] = {HOST_NAME: space.hosts[0]} if space.hosts and space.hosts[0] else {}
    if len(devices) > 1:
        facts[ONE_CLOCK] = f"{SESSION}{path}"
    traces: list[Trace] = []
    for rank, events in enumerate(parts or [[host]]):
        ordered = sorted_events(events, names.texts, base)
        is_first = rank == 0
        traces.append(
            Trace(
                path=str(path),
                format=InputFormat.XPLANE,
                rank=rank if parts else None,
                producer="JAX (XPlane)",
                events=ordered.without_comm_args,
                metadata=facts,
                warnings=(*(warnings if is_first else ()), *ordered.warnings),
                damage=ordered.damage_with(is_cut=bool(damage) and is_first),
            )
        )
    if not any(len(trace.events) for trace in traces):
        raise TraceError(f"{path}: no event has a usable time; {_EXPECTED}")
    return tuple(traces)


def _host_of(host: EventColumns, device: EventColumns, num_devices: int, steps: Sequence[int]) -> EventColumns:
    """The host's events for one of its devices: all where it has no other; else its launches and steps, and ranges."""
    is_its = np.ones(len(host), dtype=np.bool_)
    if num_devices > 1:
        is_its = (host.category != Category.RUNTIME) | (
            np.isin(host.correlation, device.correlation) & (host.correlation > 0)
        )
        is_its &= host.category != Category.PYTHON
    if np.isin(device.name, steps).any():
        is_its &= ~np.isin(host.name, steps)
    return host.select(is_its)


def _devices(space: Space, names: Codes) -> Iterator[tuple[int, EventColumns]]:
    """The work of each device, by its number on the host."""
    for plane in space.planes:
        if match := _DEVICE.fullmatch(plane.name):
            number = int(match["number"])
            lanes: list[Lane]
            if match["kind"] == "GPU":  # its streams; what else is there are sums over them
                streams = ((line, _STREAM.match(line.name)) for line in plane.lines)
                names_of = plane.event_names
                lanes = [(line, _kinds_of_work(line, names_of), int(on[1]), names_of) for line, on in streams if on]
            else:
                lanes = list(_tpu_lines(plane))
            if any(len(line) for line, *_ in lanes):
                yield number, _joined(lanes, number, names)


Lane = tuple[Line, npt.NDArray[np.int8], int, Mapping[int, str]]
"""A line, categories of its events, its lane, and names of its events by key."""


def _kinds_of_work(line: Line, names: Mapping[int, str]) -> npt.NDArray[np.int8]:
    category = np.full(len(line), Category.KERNEL, dtype=np.int8)
    for pattern, kind in ((_COPIES, Category.MEMCPY), (_FILLS, Category.MEMSET)):
        codes = [key for key, name in names.items() if pattern.match(name)]
        category[np.isin(line.names, codes)] = kind
    for stat, kind in ((_COPY, Category.MEMCPY), (_FILL, Category.MEMSET)):
        if stat in line.stats:
            category[line.stats[stat] != NO_STAT] = kind
    return category


def _tpu_lines(plane: Plane) -> Iterator[Lane]:
    """The operations of a TPU core, its modules and steps. Loops and calls enclose the operations that they run."""
    for lane, line in enumerate(plane.lines):
        if line.name in (_OPERATIONS, _ASYNC):
            work = _innermost(line) if line.name == _OPERATIONS else line
            yield work, _kinds_of_work(work, plane.event_names), lane, plane.event_names
        elif line.name == _MODULES:
            yield line, np.full(len(line), Category.DEVICE_ANNOTATION, dtype=np.int8), lane, plane.event_names
        elif line.name == _STEPS:
            steps = {key: f"ProfilerStep#{name}" for key, name in plane.event_names.items() if name.isdecimal()}
            yield line, np.full(len(line), Category.ANNOTATION, dtype=np.int8), lane, {**plane.event_names, **steps}


def _innermost(line: Line) -> Line:
    """The events of a line in which no other one lies."""
    order = np.lexsort((-line.dur_ns, line.start_ns))
    start, end = line.start_ns[order], (line.start_ns + line.dur_ns)[order]
    encloses = np.zeros(len(order), dtype=np.bool_)
    encloses[:-1] = (start[1:] < end[:-1]) & (end[1:] <= end[:-1])
    rows = order[~encloses]
    stats = {name: values[rows] for name, values in line.stats.items()}
    return Line(line.id, line.name, line.names[rows], line.start_ns[rows], line.dur_ns[rows], stats)


def _joined(lanes: Sequence[Lane], device: int, names: Codes) -> EventColumns:
    """The events of several lines."""
    parts = []
    for line, category, lane, texts in lanes:
        used, inverse = np.unique(line.names, return_inverse=True)
        codes = names.of(texts.get(key, "").removesuffix(_SUFFIX_OF_KERNEL) or "unnamed" for key in used.tolist())
        on_device = category > Category.HOST_LIMIT
        numbers = line.stats.get(_CORRELATION, np.full(len(line), NO_STAT))
        may_launch = on_device | (category == Category.RUNTIME)
        parts.append(
            EventColumns(
                category,
                codes[inverse],
                line.start_ns,
                line.dur_ns,
                np.where(on_device, device, -1).astype(np.int32),
                np.full(len(line), lane, dtype=np.int64),
                np.where(may_launch & (numbers > 0), numbers, -1),
            )
        )
    return joined_columns(parts)


def _host_lane(plane: Plane, number: int, line: Line) -> Lane:
    """A thread: calls of the driver and of Python by their names, operators by what they run, steps by their number."""
    category = np.full(len(line), Category.ANNOTATION, dtype=np.int8)
    calls = [key for key, name in plane.event_names.items() if _CALL.match(name)]
    python = [key for key, name in plane.event_names.items() if name.startswith("$")]
    category[np.isin(line.names, python)] = Category.PYTHON
    if _HLO in line.stats:
        category[line.stats[_HLO] != NO_STAT] = Category.CPU_OP
    category[np.isin(line.names, calls)] = Category.RUNTIME
    names = dict(plane.event_names)
    keys = line.names
    if _STEP in line.stats and (marked := np.flatnonzero(line.stats[_STEP] >= 0)).size:
        first_free = max(names, default=0) + 1
        numbers, inverse = np.unique(line.stats[_STEP][marked], return_inverse=True)
        names |= {first_free + index: f"ProfilerStep#{step}" for index, step in enumerate(numbers.tolist())}
        keys = keys.copy()
        keys[marked] = first_free + inverse
    return Line(line.id, line.name, keys, line.start_ns, line.dur_ns, line.stats), category, number, names
