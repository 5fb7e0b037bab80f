"""Read JAX's profiles: XPlane files (``*.xplane.pb``) of GPUs and TPUs; every device of the host is a rank.

    /device:GPU:N    lines "Stream #S(…)": kernels and copies, each with the correlation of the call that launched it
    /device:TPU:N    lines "XLA Ops" and "Async XLA Ops": operations of the compiler; "XLA Modules", "Steps"
    /host:CPU        lines of threads: calls of the driver, Python, and ranges of JAX and of the program

Other planes and lines are sums over these, or no events. A step is a range with a ``step_num`` (``StepTraceAnnotation``), on
TPUs an event of the line "Steps".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pptrace.errors import TraceError
from pptrace.ingest.common.byte_source import ByteSource
from pptrace.ingest.common.exact_numbers import LIMIT_NS
from pptrace.ingest.common.sort_events import sorted_events
from pptrace.ingest.nsight.event_names import Names
from pptrace.ingest.sniff import XPLANE_SUFFIX
from pptrace.ingest.xplane.planes import NO_STAT, Line, Plane, Space, read_space
from pptrace.model.damage import Damage, RankDamage
from pptrace.model.tables import MEMORY, Int64, empty_table
from pptrace.model.traces import HOST_NAME, ONE_CLOCK, SESSION, Category, InputFormat, Trace
from pptrace.model.wording import counted

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
    """Read a trace for each device with work, else one of the host.

    Raises:
        TraceError: the file cannot be read, is no XPlane file, or has no event of a host or a device.
    """
    with ByteSource(path) as source:
        data = bytearray()
        while piece := source.read():
            data += piece
        damage = source.damage
    space = read_space(bytes(data), _STATS)
    damage = damage or space.damage
    host = _host_rows(space)
    devices = dict(sorted(_devices(space), key=lambda device: device[0]))
    if not devices and not len(host):
        reason = (
            "empty" if not data else damage or f"{counted(len(space.planes), 'plane')} without events of host or device"
        )
        raise TraceError(f"{path}: {reason}; {_EXPECTED}")
    warnings = []
    if damage:
        kept = counted(len(space.planes), "plane")
        warnings.append(f"{damage}; kept the {kept} before it, so that devices or the host may be missing")
    begins = [plane.stats.get(_BEGIN, 0) for plane in space.planes if plane.name == _ENVIRONMENT]
    base = next((begin for begin in begins if 0 < begin <= LIMIT_NS), 0)
    traces = [
        _trace(path, number, rows, host, space, base, tuple(warnings) if index == 0 else (), len(devices))
        for index, (number, rows) in enumerate(devices.items() or [(None, host)])
    ]
    if not any(trace.num_events for trace in traces):
        raise TraceError(f"{path}: no event has a usable time; {_EXPECTED}")
    return tuple(traces)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Events as the columns of :class:`pptrace.ingest.common.sort_events.Columns`, and their names."""

    columns: tuple[npt.NDArray[Any], ...]
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.category)

    @property
    def category(self) -> npt.NDArray[np.int8]:
        return self.columns[0]

    @property
    def name(self) -> npt.NDArray[np.int32]:
        return self.columns[1]

    @property
    def correlation(self) -> Int64:
        return self.columns[6]

    def select(self, rows: npt.NDArray[Any]) -> _Rows:
        return _Rows(tuple(column[rows] for column in self.columns), self.names)


class _Sorted:
    """Rows as columns for sorting."""

    def __init__(self, parts: Sequence[_Rows]) -> None:
        self._names = Names()
        self._parts = parts
        self._recoded = [
            np.array([self._names[name] for name in part.names], dtype=np.int32)[part.name]
            if len(part.name)
            else part.name
            for part in parts
        ]

    def take(self, column: int) -> npt.NDArray[Any]:
        return np.concatenate(self._recoded if column == 1 else [part.columns[column] for part in self._parts])

    def names(self) -> Sequence[str]:
        return list(self._names)


def _trace(
    path: Path,
    number: int | None,
    rows: _Rows,
    host: _Rows,
    space: Space,
    base: int,
    warnings: tuple[str, ...],
    num_devices: int,
) -> Trace:
    parts = [rows] if number is None else [rows, _host_of(host, rows, num_devices)]
    ordered = sorted_events(_Sorted(parts), base)
    facts: dict[str, Any] = {HOST_NAME: space.hosts[0]} if space.hosts and space.hosts[0] else {}
    if num_devices > 1:
        facts[ONE_CLOCK] = f"{SESSION}{path}"
    is_cut = RankDamage.counted(Damage.CUT_FILE, int(bool(warnings)))
    return Trace(
        path=str(path),
        format=InputFormat.XPLANE,
        rank=number,
        producer="JAX (XPlane)",
        events=ordered.without_comm_args,
        memory=empty_table(MEMORY),
        metadata=facts,
        warnings=(*warnings, *ordered.warnings),
        damage=RankDamage.joined((ordered.damage, is_cut)),
    )


def _host_of(host: _Rows, device: _Rows, num_devices: int) -> _Rows:
    """The host's events for one of its devices: all where it has no other; else its launches and steps, and ranges."""
    if num_devices == 1:
        return host if not _has_steps(device) else host.select(~_are_steps(host))
    is_call = host.category == Category.RUNTIME
    is_its = ~is_call | (np.isin(host.correlation, device.correlation) & (host.correlation > 0))
    is_its &= host.category != Category.PYTHON
    return host.select(is_its & ~_are_steps(host) if _has_steps(device) else is_its)


def _are_steps(rows: _Rows) -> npt.NDArray[np.bool_]:
    codes = [code for code, name in enumerate(rows.names) if name.startswith("ProfilerStep#")]
    return np.isin(rows.name, codes)


def _has_steps(rows: _Rows) -> bool:
    return bool(_are_steps(rows).any())


def _devices(space: Space) -> Iterator[tuple[int, _Rows]]:
    """The work of each device, by its number on the host."""
    for plane in space.planes:
        if match := _DEVICE.fullmatch(plane.name):
            number = int(match["number"])
            read = _gpu_lines if match["kind"] == "GPU" else _tpu_lines
            if rows := _joined(list(read(plane)), number):
                yield number, rows


Lane = tuple[Line, npt.NDArray[np.int8], int, Mapping[int, str]]
"""A line, categories of its events, its lane, and names of its events by key."""


def _gpu_lines(plane: Plane) -> Iterator[Lane]:
    """The streams of a GPU; what else is there are sums over them."""
    for line in plane.lines:
        if match := _STREAM.match(line.name):
            yield line, _kinds_of_work(line, plane.event_names), int(match[1]), plane.event_names


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
            numbered = {key: f"ProfilerStep#{name}" for key, name in plane.event_names.items() if name.isdecimal()}
            yield line, np.full(len(line), Category.ANNOTATION, dtype=np.int8), lane, {**plane.event_names, **numbered}


def _innermost(line: Line) -> Line:
    """The events of a line in which no other one lies."""
    order = np.lexsort((-line.dur_ns, line.start_ns))
    start, end = line.start_ns[order], (line.start_ns + line.dur_ns)[order]
    encloses = np.zeros(len(order), dtype=np.bool_)
    encloses[:-1] = (start[1:] < end[:-1]) & (end[1:] <= end[:-1])
    rows = order[~encloses]
    stats = {name: values[rows] for name, values in line.stats.items()}
    return Line(line.id, line.name, line.names[rows], line.start_ns[rows], line.dur_ns[rows], stats)


def _joined(lanes: Sequence[Lane], device: int | None) -> _Rows | None:
    """The events of several lines; None where there are none."""
    if not any(len(line) for line, *_ in lanes):
        return None
    names = Names()
    columns: list[tuple[npt.NDArray[Any], ...]] = []
    for line, category, lane, texts in lanes:
        used, inverse = np.unique(line.names, return_inverse=True)
        code = np.array(
            [names[texts.get(key, "").removesuffix(_SUFFIX_OF_KERNEL) or "unnamed"] for key in used.tolist()],
            dtype=np.int32,
        )
        on_device = category > Category.HOST_LIMIT
        numbers = line.stats.get(_CORRELATION, np.full(len(line), NO_STAT))
        may_launch = on_device | (category == Category.RUNTIME)
        columns.append(
            (
                category,
                code[inverse] if len(used) else np.zeros(0, dtype=np.int32),
                line.start_ns,
                line.dur_ns,
                np.where(on_device, -1 if device is None else device, -1).astype(np.int32),
                np.full(len(line), lane, dtype=np.int64),
                np.where(may_launch & (numbers > 0), numbers, -1),
            )
        )
    return _Rows(tuple(np.concatenate(parts) for parts in zip(*columns, strict=True)), list(names))


def _host_rows(space: Space) -> _Rows:
    """The events of the host's threads."""
    lanes: list[Lane] = []
    for plane in space.planes:
        if plane.name == _HOST:
            lanes += [_host_lane(plane, line, number) for number, line in enumerate(plane.lines, _FIRST_THREAD)]
    none = np.zeros(0, dtype=np.int64)
    return _joined(lanes, None) or _Rows((none.astype(np.int8), none.astype(np.int32), *[none] * 5), [])


def _host_lane(plane: Plane, line: Line, number: int) -> Lane:
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
