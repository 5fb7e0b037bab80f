"""One rank's trace → what is found in it. Its events, which are many, are not needed afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pandas as pd

from pptrace.ingest.otlp_facts import DEVICE
from pptrace.recognise.collectives import find_calls
from pptrace.recognise.devices import DeviceWork, device_work
from pptrace.recognise.from_labels import tables_from_labels
from pptrace.recognise.from_marks import tables_from_marks
from pptrace.recognise.from_tables import tables_from_trace
from pptrace.tables import CALLS, COMMS, OPS, InputFormat, Trace, TraceInfo, empty_table, stacked


@dataclass(frozen=True, slots=True)
class RankFound:
    """What the trace of one rank holds, on its own clock.

    The ``rank`` column of the tables is -1: which rank it is may be known only later. ``framework`` is whose labels the ops
    come from, "" without ops. ``calls`` is communication that neither marks nor ready tables tell (schema
    :data:`~pptrace.tables.CALLS`). ``warnings`` are lines about this rank that do not name it.
    """

    info: TraceInfo
    framework: str
    ops: pd.DataFrame
    comms: pd.DataFrame
    memory: pd.DataFrame
    work: DeviceWork
    warnings: tuple[str, ...] = ()
    calls: pd.DataFrame = field(default_factory=lambda: empty_table(CALLS))

    @property
    def number(self) -> int:
        assert self.info.rank is not None
        return self.info.rank

    def with_info(self, info: TraceInfo) -> RankFound:
        return replace(self, info=info)

    def with_more(self, later: RankFound) -> RankFound:
        """This rank with the tables of another trace of it as well; what both say of themselves, this one says."""
        info = replace(
            self.info,
            num_events=self.info.num_events + later.info.num_events,
            metadata={**later.info.metadata, **self.info.metadata},
            warnings=(*self.info.warnings, *later.info.warnings),
        )
        return replace(
            self,
            info=info,
            ops=stacked([self.ops, later.ops]),
            comms=stacked([self.comms, later.comms]),
            memory=stacked([self.memory, later.memory]),
            warnings=(*self.warnings, *later.warnings),
        )


def recognise_rank(trace: Trace) -> RankFound:
    """Find the ops, the communication and the device work of one rank."""
    if trace.calls is not None:
        none = (empty_table(OPS), empty_table(COMMS))
        return RankFound(trace.info, "", *none, trace.memory, device_work(trace.events, ""), calls=trace.calls)
    work = device_work(trace.events, str(trace.distributed.get("backend", "")))
    if trace.format is InputFormat.OTLP and (device := trace.distributed.get(DEVICE)):
        work = replace(work, unseen=str(device))
    tables = tables_from_trace(trace) or tables_from_marks(trace, work)
    told = tables is not None and (tables.framework == "pptrace" or trace.ops is not None)
    calls = empty_table(CALLS) if told else find_calls(trace.events)
    if tables is None:
        tables = tables_from_labels(trace, work, calls)
    if tables is None:
        return RankFound(
            trace.info, trace.framework, empty_table(OPS), empty_table(COMMS), trace.memory, work, calls=calls
        )
    return RankFound(trace.info, tables.framework, tables.ops, tables.comms, trace.memory, work, tables.warnings, calls)
