"""One line on what recording did to a run."""

from __future__ import annotations

from pptrace.analysis.recording_parts import KERNELS_MISSING, RecordingReport
from pptrace.analysis.result import Report
from pptrace.model import units

_SLOWED = 1.05


def recording_line(recording: RecordingReport | None) -> str:
    """The step as it was recorded and without its recording, and whose figures a report has; "" where nothing is known."""
    if recording is not None and recording.reason == KERNELS_MISSING:
        return f"recording: figures are as recorded; what it cost is not known ({KERNELS_MISSING})"
    if recording is None or recording.recorded_step_ns is None:
        return ""
    without = _without(recording)
    if not without:
        return ""
    recorded = f"recording: {units.milliseconds(recording.recorded_step_ns)} ms a step while recorded"
    whose = ""
    if recording.figures == "unrecorded":
        whose = "; figures are of the run without it (--as-recorded: of the recording)"
    slowed = ""
    if (recording.slowed_after or 1.0) > _SLOWED:
        slowed = f"; steps after it took {recording.slowed_after:.2f} times as long as those before"
    otherwise = ""
    if recording.differs_otherwise:
        otherwise = "; the measured ones differ by more than recording can cost: by other work on the machine, or by what they do"
    return f"{recorded}, {without}{_cost(recording)}{otherwise}{slowed}{whose}"


def _without(recording: RecordingReport) -> str:
    measured, predicted = recording.unrecorded_step_ns, recording.predicted_step_ns
    parts = []
    if measured is not None:
        parts.append(f"{units.milliseconds(measured)} measured without")
    if predicted is not None and recording.low_ns is not None and recording.high_ns is not None:
        low, high = (units.milliseconds(ns) for ns in (recording.low_ns, recording.high_ns))
        parts.append(f"{units.milliseconds(predicted)} predicted without ({low} to {high})")
    return ", ".join(parts)


def _cost(recording: RecordingReport) -> str:
    if recording.cost_per_event_ns is None:
        return ""
    source = "as measured" if recording.cost_source == "measured" else "judged from the trace"
    return f": {recording.events_per_step:,} host events a step at {recording.cost_per_event_ns / 1000:.1f} µs each, {source}"


def as_recorded(report: Report) -> str:
    """Words behind the title of a table that has the recording's figures in a report of the run without it; else ""."""
    recording = report.recording
    return ", as recorded" if recording is not None and recording.figures == "unrecorded" else ""
