"""One line on what recording did to a run."""

from __future__ import annotations

from pptrace.analysis.recording_parts import KERNELS_MISSING, RecordingReport
from pptrace.analysis.result import Report
from pptrace.report import units

_SLOWED = 1.05


def recording_line(recording: RecordingReport | None) -> str:
    """The step as it was recorded and without its recording, and whose figures a report has; "" where nothing is known."""
    if recording is not None and recording.reason == KERNELS_MISSING:
        return f"recording: figures are as recorded; what it cost is not known ({KERNELS_MISSING})"
    if recording is None or recording.recorded_step_ns is None:
        return ""
    without = []
    if recording.unrecorded_step_ns is not None:
        without.append(f"{units.milliseconds(recording.unrecorded_step_ns)} measured without")
    if recording.predicted_step_ns is not None and recording.low_ns is not None and recording.high_ns is not None:
        predicted, low, high = map(
            units.milliseconds, (recording.predicted_step_ns, recording.low_ns, recording.high_ns)
        )
        without.append(f"{predicted} predicted without ({low} to {high})")
    if not without:
        return ""
    line = f"recording: {units.milliseconds(recording.recorded_step_ns)} ms a step while recorded, {', '.join(without)}"
    if recording.cost_per_event_ns is not None:
        source = "as measured" if recording.cost_source == "measured" else "judged from the trace"
        cost = f"{recording.cost_per_event_ns / 1000:.1f} µs each, {source}"
        line += f": {recording.events_per_step:,} host events a step at {cost}"
    if recording.differs_otherwise:
        line += "; the measured ones differ by more than recording can cost: by other work on the machine, or by what they do"
    if (recording.slowed_after or 1.0) > _SLOWED:
        line += f"; steps after it took {recording.slowed_after:.2f} times as long as those before"
    if recording.figures == "unrecorded":
        line += "; figures are of the run without it (--as-recorded: of the recording)"
    return line


def as_recorded(report: Report) -> str:
    """Words behind the title of a table that has the recording's figures in a report of the run without it; else ""."""
    recording = report.recording
    return ", as recorded" if recording is not None and recording.figures == "unrecorded" else ""
