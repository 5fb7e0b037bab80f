"""Tables of one rank, and the device work launched inside a host range."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.intervals import reduce_ranges
from pptrace.model.device import DeviceWork
from pptrace.model.join_tables import concat_tables
from pptrace.model.tables import Int64


@dataclass(frozen=True, slots=True)
class RankTables:
    """Ops and communication of one rank (schemas OPS and COMMS, rank -1), unmatched, on its own clock; labels are those of
    ``framework``.

    ``by_gaps``: the ops are what lies between messages (:mod:`pptrace.recognise.ops.infer_between_messages`).
    """

    framework: str
    ops: pd.DataFrame
    comms: pd.DataFrame
    warnings: tuple[str, ...] = ()
    by_gaps: bool = False

    def joined_with(self, others: RankTables | None) -> RankTables:
        """Add the ops and messages of other tables, and their spans of kinds that these lack."""
        if others is None:
            return self
        extra = others.ops[~others.ops["kind"].isin(set(self.ops["kind"]))]
        return RankTables(
            self.framework or others.framework,
            concat_tables([self.ops, extra]),
            concat_tables([self.comms, others.comms]),
            (*self.warnings, *others.warnings),
            others.by_gaps,
        )


@dataclass(frozen=True, slots=True)
class LaunchedWork:
    """Device work launched in each of several host ranges: from the first start to the last end, and the stream of
    what was launched first. The numbers mean something only where any was ``launched``.
    """

    launched: npt.NDArray[np.bool_]
    start_ns: Int64
    end_ns: Int64
    stream: Int64


class LaunchIndex:
    """Finds the device work that was launched inside host ranges, by any thread of the process."""

    def __init__(self, work: DeviceWork) -> None:
        launched = np.flatnonzero(work.launch_ns >= 0)
        rows = launched[np.argsort(work.launch_ns[launched], kind="stable")]
        self._work = work
        self._rows = {True: rows[work.is_communication[rows]], False: rows[work.is_compute[rows]]}
        self._launches = {kind: work.launch_ns[rows_of_kind] for kind, rows_of_kind in self._rows.items()}

    def spans(self, starts_ns: Int64, ends_ns: Int64, communication: bool) -> LaunchedWork:
        """Work launched in each of several ranges."""
        launches, rows = self._launches[communication], self._rows[communication]
        low, high = np.searchsorted(launches, starts_ns), np.searchsorted(launches, ends_ns)
        launched = low < high
        start, end, stream = (np.zeros(len(low), dtype=np.int64) for _ in range(3))
        if launched.any():
            first, behind = low[launched], high[launched]
            start[launched] = reduce_ranges(np.minimum, self._work.start_ns[rows], first, behind)
            end[launched] = reduce_ranges(np.maximum, self._work.end_ns[rows], first, behind)
            stream[launched] = self._work.stream[rows[first]]
        return LaunchedWork(launched, start, end, stream)

    def compute_around(self, starts_ns: Int64, ends_ns: Int64) -> tuple[Int64, Int64, npt.NDArray[np.bool_]]:
        """(last end of the compute launched before each range, 0 without any; first start of that launched from its end on;
        whether there is any).
        """
        launches, rows = self._launches[False], self._rows[False]
        ended = np.append(0, np.maximum.accumulate(self._work.end_ns[rows]))
        began = np.append(np.minimum.accumulate(self._work.start_ns[rows][::-1])[::-1], 0)
        following = np.searchsorted(launches, ends_ns)
        return ended[np.searchsorted(launches, starts_ns)], began[following], following < len(launches)
