"""One rank's trace → what is found in it. Its events, which are many, are not needed afterwards."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pandas as pd

from pptrace.recognise.devices import DeviceWork, device_work
from pptrace.recognise.from_labels import tables_from_labels
from pptrace.recognise.from_marks import tables_from_marks
from pptrace.tables import COMMS, OPS, Trace, TraceInfo, empty_table


@dataclass(frozen=True, slots=True)
class RankFound:
    """What the trace of one rank holds, on its own clock.

    The ``rank`` column of the tables is -1: which rank it is may be known only later. ``framework`` is whose labels the ops
    come from, "" without ops. ``warnings`` are lines about this rank that do not name it.
    """

    info: TraceInfo
    framework: str
    ops: pd.DataFrame
    comms: pd.DataFrame
    memory: pd.DataFrame
    work: DeviceWork
    warnings: tuple[str, ...] = ()

    @property
    def number(self) -> int:
        assert self.info.rank is not None
        return self.info.rank

    def with_info(self, info: TraceInfo) -> RankFound:
        return replace(self, info=info)


def recognise_rank(trace: Trace) -> RankFound:
    """Find the ops, the communication and the device work of one rank."""
    work = device_work(trace.events)
    tables = tables_from_marks(trace, work) or tables_from_labels(trace, work)
    if tables is None:
        return RankFound(trace.info, "", empty_table(OPS), empty_table(COMMS), trace.memory, work)
    return RankFound(trace.info, tables.framework, tables.ops, tables.comms, trace.memory, work, tables.warnings)
