"""One rank's trace → what is found in it. Its events, which are many, are not needed afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pandas as pd

from pptrace.recognise.collectives import CALLS, find_calls
from pptrace.recognise.devices import DeviceWork, device_work
from pptrace.recognise.from_labels import tables_from_labels
from pptrace.recognise.from_marks import tables_from_marks
from pptrace.recognise.from_tables import tables_from_trace
from pptrace.recognise.host_order import HOST_ORDER, find_host_order
from pptrace.tables import COMMS, OPS, Trace, TraceInfo, empty_table, stacked


@dataclass(frozen=True, slots=True)
class RankFound:
    """What the trace of one rank holds, on its own clock.

    The ``rank`` column of the tables is -1: which rank it is may be known only later. ``framework`` is whose labels the ops
    come from, "" without ops. ``calls`` is communication that neither marks nor ready tables tell (schema
    :data:`~pptrace.recognise.collectives.CALLS`), ``host`` what the thread of its pipeline did where no label tells the ops
    (schema :data:`~pptrace.recognise.host_order.HOST_ORDER`). ``warnings`` are lines about this rank that do not name it.
    """

    info: TraceInfo
    framework: str
    ops: pd.DataFrame
    comms: pd.DataFrame
    memory: pd.DataFrame
    work: DeviceWork
    warnings: tuple[str, ...] = ()
    calls: pd.DataFrame = field(default_factory=lambda: empty_table(CALLS))
    host: pd.DataFrame = field(default_factory=lambda: empty_table(HOST_ORDER))

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
    work = device_work(trace.events, str(trace.distributed.get("backend", "")))
    tables = tables_from_trace(trace) or tables_from_marks(trace, work)
    told = tables is not None and (tables.framework == "pptrace" or trace.ops is not None)
    calls = empty_table(CALLS) if told else find_calls(trace.events)
    host = empty_table(HOST_ORDER)
    if tables is None:
        tables, host = tables_from_labels(trace, work, calls), find_host_order(trace.events)
    if tables is None:
        return RankFound(
            trace.info, "", empty_table(OPS), empty_table(COMMS), trace.memory, work, calls=calls, host=host
        )
    return RankFound(
        trace.info, tables.framework, tables.ops, tables.comms, trace.memory, work, tables.warnings, calls, host
    )
