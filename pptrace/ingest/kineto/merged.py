"""Divide a file that the traces of several ranks were merged into, as scripts for viewers do, by the processes of its events.

process = name of the process, or its id, that names a rank or its coordinates: "RANK 3 - GPU", "PP rank 1, TP rank 0"
        | id that begins as those of one rank and no other do: "[TP00-PP01] 1234"
        | id of a process that ran operators, with the device of which it alone can have launched all work
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from pptrace.errors import TraceError
from pptrace.ingest.common.json_texts import Scalar
from pptrace.ingest.common.rank_names import coordinates_of_label, natural_order, rank_of_labels
from pptrace.ingest.common.sort_events import EventColumns
from pptrace.ingest.kineto.event_columns import Collected
from pptrace.ingest.kineto.event_types import Event, Skipped
from pptrace.model.traces import Category

_NUMBERED = re.compile(r"(.*?)\W*\d+")
_LONGEST = 64  # id of a process
_STRAY = 0.1
"""Part of the operators of the process with most up to which another's are no rank's: their process is damaged."""


def is_merged(collected: Collected) -> bool:
    """Return whether several ranks are among the processes: by their names, or since several of them ran operators."""
    named = {_name_in([label]) for label in collected.labels} - {""}
    few = _STRAY * max(collected.hosts.values(), default=0)
    hosts = {
        pid: _NUMBERED.fullmatch(str(pid)[:_LONGEST])
        for pid, count in collected.hosts.items()
        if count > few and pid != -1
    }
    return len(named) > 1 or len({match[1] or match[0] for match in hosts.values() if match}) > 1


def ranks_in(path: Path, batches: Iterable[list[Event]]) -> list[Collected]:
    """The events of each rank, its number among the labels where it is known, in order of what names it.

    Raises:
        TraceError: nothing tells of which rank the events of a process are, or none are what a profiler records.
    """
    parts: dict[Scalar, Collected] = {}
    for events in batches:
        by_process: dict[Scalar, list[Event]] = {}
        for event in events:
            if not isinstance(event, Skipped):
                by_process.setdefault(getattr(event, "pid", None), []).append(event)
        for pid, own in by_process.items():
            parts.setdefault(pid, Collected()).add(own)
    parts = {pid: part for pid, part in parts.items() if part.has_work}
    if not parts:
        raise TraceError(
            f"{path}: several ranks in one file, without operators or device work, as in a picture for a viewer; expected the "
            "file of each rank, from which this one was made"
        )
    names = {pid: _name_of(pid, part) for pid, part in parts.items()}
    of_devices = _hosts_of({pid: part for pid, part in parts.items() if part.hosts or not names[pid]})
    ranks: dict[str, Collected] = {}
    for pid, part in parts.items():
        if not (name := names[pid] or names.get(of_devices.get(pid), "")):
            raise TraceError(
                f"{path}: several ranks in one file, and nothing tells of which of them the events of process {str(pid)[:40]!r} "
                "are; expected the file of each rank, from which this one was made"
            )
        whole = ranks.setdefault(name, Collected())
        whole.extend(part)
        whole.labels = {name}
    return [ranks[name] for name in sorted(ranks, key=natural_order)]


def _name_of(pid: Scalar, part: Collected) -> str:
    """The name of the rank of a process; "" of a device that has none."""
    match = _NUMBERED.fullmatch(str(pid)[:_LONGEST])
    return _name_in([*part.labels, str(pid)]) or (match[1] or (match[0] if part.hosts else "") if match else "")


def _hosts_of(parts: Mapping[Scalar, Collected]) -> dict[Scalar, Scalar]:
    """The process that launched the work of each device, where no other can have: each launched that of one."""
    hosts = [pid for pid, part in parts.items() if part.hosts]
    possible = {
        pid: {host for host in hosts if _launched(parts[host].columns, part.columns)}
        for pid, part in parts.items()
        if not part.hosts
    }
    found: dict[Scalar, Scalar] = {}
    while certain := [(pid, *of) for pid, of in possible.items() if len(of) == 1]:
        device, host = certain[0]
        found[device] = host
        possible = {pid: of - {host} for pid, of in possible.items() if pid != device}
    return found


def _launched(calls: EventColumns, work: EventColumns) -> bool:
    """Return whether a process made a call for each piece of work, before that began."""
    call = np.flatnonzero((calls.category == Category.RUNTIME) & (calls.correlation >= 0))
    piece = np.flatnonzero(np.isin(work.category, (Category.KERNEL, Category.MEMCPY, Category.MEMSET)))
    call = call[np.argsort(calls.correlation[call], kind="stable")]
    if not len(call):
        return False
    at = call[np.minimum(np.searchsorted(calls.correlation[call], work.correlation[piece]), len(call) - 1)]
    is_launched = (calls.correlation[at] == work.correlation[piece]) & (calls.start_ns[at] <= work.start_ns[piece])
    return bool(is_launched.all())


def _name_in(labels: Sequence[str]) -> str:
    """The name that the labels of one process give its rank; "" where they give none."""
    if coordinates := coordinates_of_label(", ".join(labels)):
        return " ".join(f"{axis} {coordinate}" for axis, coordinate in sorted(coordinates.items()))
    number = rank_of_labels(labels)
    return "" if number is None else f"rank {number}"
