"""Traces that hold ready tables of ops and communication: op tables, dumps of schedules, Chrome B/E with ids."""

from __future__ import annotations

from pptrace.model.tables import COMMS, OPS, empty_table
from pptrace.model.traces import Trace
from pptrace.recognise.ops.tables import RankTables


def tables_from_trace(trace: Trace) -> RankTables | None:
    """The tables made by the format's reader; None if it made none, so that events have to be recognised."""
    if trace.ops is None and trace.comms is None:
        return None
    ops = empty_table(OPS) if trace.ops is None else trace.ops
    comms = empty_table(COMMS) if trace.comms is None else trace.comms
    return RankTables(trace.framework, ops.assign(rank=-1), comms.assign(rank=-1))
