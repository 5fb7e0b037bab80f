"""Events of one rank, read from its file when they are asked for: an analysis does not keep them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from msgspec.structs import replace

from pptrace.ingest import read_file
from pptrace.model.traces import Events, InputFormat
from pptrace.workflow.analyse import Analysis

EVENT_FORMATS = (
    InputFormat.KINETO,
    InputFormat.NSYS_SQLITE,
    InputFormat.ASCEND,
    InputFormat.ROCPD,
    InputFormat.XPLANE,
    InputFormat.CHROME,
)


def has_events(analysis: Analysis) -> frozenset[int]:
    """The ranks whose files list events: kernels, operators and calls. Files that list ops or communication have none."""
    return frozenset(
        entry.rank for entry in analysis.report.inputs if entry.rank is not None and entry.format in EVENT_FORMATS
    )


def events_of_rank(analysis: Analysis, rank: int) -> Events | None:
    """The events of a rank on the clock of the analysis, without what recording cost where its times are; None without any.

    Raises:
        TraceError: the file can no longer be read.
    """
    inputs = (entry for entry in analysis.report.inputs if entry.rank == rank and entry.format in EVENT_FORMATS)
    if (given := next(inputs, None)) is None:
        return None
    traces = read_file(Path(given.path), InputFormat(given.format))
    trace = next((trace for trace in traces if trace.rank == rank), traces[0])
    if not len(trace.events):
        return None
    if analysis.corrections is not None:
        trace = analysis.corrections.corrected(trace)
    events = trace.events
    start = analysis.data.clock.to_common_clock(rank, events.start_ns)
    return replace(events, start_ns=start, dur_ns=np.maximum(events.dur_ns, 0))
