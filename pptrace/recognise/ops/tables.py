"""Tables of one rank, and the device work launched inside a host range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from pptrace.model.device import DeviceWork
from pptrace.model.tables import Schema, concat_tables, make_table


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


def table_of(schema: Schema, rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """A table of rows that have at least the schema's columns."""
    return make_table(schema, {name: [row[name] for row in rows] for name in schema})


class LaunchIndex:
    """Finds the device work that was launched inside a host range, by any thread of the process."""

    def __init__(self, work: DeviceWork) -> None:
        launched = np.flatnonzero(work.launch_ns >= 0)
        self._rows = launched[np.argsort(work.launch_ns[launched], kind="stable")]
        self._launch = work.launch_ns[self._rows]
        self._work = work

    def span(self, start_ns: int, end_ns: int, communication: bool) -> tuple[int, int, int] | None:
        """(start, end, stream) from the first to the last kernel launched in [start_ns, end_ns); None without any."""
        low, high = np.searchsorted(self._launch, (start_ns, end_ns))
        rows = self._rows[low:high]
        rows = rows[self._work.is_communication[rows] if communication else self._work.is_compute[rows]]
        if not len(rows):
            return None
        return (
            int(self._work.start_ns[rows].min()),
            int(self._work.end_ns[rows].max()),
            int(self._work.stream[rows[0]]),
        )
