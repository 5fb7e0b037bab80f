"""Pair calls of a trace with entries of the same rank's flight-recorder dump: by order, anchored in time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pandas as pd

from pptrace.ingest.flight_recorder.dump import Dump, DumpCall
from pptrace.marks import P2P
from pptrace.model.tables import Int64

_FUSED = "send_recv"
_FAR_NS = 5_000_000
"""A call is recorded within this of its beginning on the host: tracebacks are gathered first."""
_DISTINCT = 2
"""Any other pairing has to be this many times as far off in time."""
_LEAST_PAIRS = 3
_WALL_CLOCK_NS = 10**18  # before 2001 no profiler ran: such times count from a beginning of their own

Launch = Sequence[DumpCall]
"""The calls that the host launched together; one, but for batches of messages."""


def is_wall_clock(calls: pd.DataFrame) -> bool:
    return bool((calls["host_ns"] > _WALL_CLOCK_NS).all())


@dataclass(frozen=True, slots=True)
class Side:
    """The calls of a kind in a trace, as rows in the order of the host, and what the dump has of it: launch by launch.

    ``anchored``: both have their times by the wall clock.
    """

    kind: str
    rows: pd.DataFrame
    launches: Sequence[Launch]
    anchored: bool

    def pairs(self) -> Iterator[tuple[int, Launch]]:
        """The index of each row with the launch that it is; none where there is not just one way to pair them."""
        shift = self._shift()
        if shift is not None:
            for index, launch in zip(
                self.rows.index.tolist()[max(0, -shift) :], self.launches[max(0, shift) :], strict=False
            ):
                yield int(index), launch

    def _shift(self) -> int | None:
        """Number of launches that the dump has before the trace's first."""
        called = self.rows["host_ns"].to_numpy()
        recorded = np.array([launch[-1].created_ns for launch in self.launches], dtype=np.int64)
        least = min(_LEAST_PAIRS, len(called), len(recorded))
        shifts = range(least - len(called), len(recorded) - least + 1)
        if not self.anchored:
            if len(called) != len(recorded) or len(called) < _LEAST_PAIRS:
                return None
            called, shifts = called + int(np.median(recorded - called)), range(1)
        by_distance = sorted((_largest_distance(called, recorded, shift), shift) for shift in shifts)
        plausible = [
            (distance, shift)
            for distance, shift in by_distance
            if distance <= _DISTINCT * _FAR_NS and self._is_consistent(shift)
        ]
        if (
            not plausible
            or plausible[0][0] > _FAR_NS
            or (len(plausible) > 1 and plausible[1][0] <= _DISTINCT * plausible[0][0])
        ):
            return None
        return plausible[0][1]

    def _is_consistent(self, shift: int) -> bool:
        """Return whether nothing in the trace contradicts the dump."""
        rows = self.rows.iloc[max(0, -shift) :].to_dict("records")
        launches = self.launches[max(0, shift) :]
        return self.kind == _FUSED or all(_agrees(row, launch[0]) for row, launch in zip(rows, launches, strict=False))


def sides_of(calls: pd.DataFrame, dump: Dump) -> Iterator[Side]:
    """The kinds of calls that both the trace and the dump have.

    Args:
        calls: those of the rank (schema ``CALLS``), in the order of the host. Where none of them is known to be sent or received,
            kernels that may be either are held against the launches of messages.
    """
    recorded = [call for call in dump.calls if call.created_ns >= 0]
    kinds = set(calls["kind"].tolist())
    for kind in sorted(kinds):
        rows = calls[calls["kind"] == kind]
        launches: list[Launch] = [[call] for call in recorded if call.kind == kind]
        if kind == _FUSED and not kinds & set(P2P):
            rows = rows[rows["hint"] != "tp"]
            possible = [
                call for call in recorded if call.kind in P2P or (call.kind == "all_to_all" and call.kind not in kinds)
            ]
            launches = [list(launch_calls) for _, launch_calls in groupby(possible, key=lambda call: call.launch)]
        if len(rows) and launches:
            yield Side(kind, rows, launches, is_wall_clock(calls))


def _largest_distance(called: Int64, recorded: Int64, shift: int) -> int:
    """The most by which two calls of a pair are apart in time, ns."""
    first, last = max(0, -shift), min(len(called), len(recorded) - shift)
    return int(np.abs(recorded[first + shift : last + shift] - called[first:last]).max())


def _agrees(row: Mapping[Any, Any], call: DumpCall) -> bool:
    size, is_p2p = len(call.group.ranks), call.kind in P2P
    return bool(
        (not row["group_id"] or not call.group.id or row["group_id"] == call.group.id)
        and (row["group_size"] < 0 or not size or row["group_size"] == size)
        and (not is_p2p or row["local_peer"] < 0 or row["local_peer"] == call.local_peer)
        and (not is_p2p or row["peer"] < 0 or not size or row["peer"] == call.peer)
        and (not is_p2p or -1 in (row["bytes"], call.bytes) or row["bytes"] == call.bytes)
    )
