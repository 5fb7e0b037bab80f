"""Words on what recording did to a run, and on what it got wrong: lines of reports, and the audit of ``pptrace doctor``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from pptrace.analysis.audit import MISSING_RANGES, SHIFTED_TIMES, UNMATCHED_MESSAGES
from pptrace.analysis.report import KERNELS_MISSING, AuditEntry, RecordingReport, Report
from pptrace.model import units
from pptrace.model.damage import Damage
from pptrace.model.traces import InputFormat
from pptrace.model.wording import as_ranges, counted

_SLOWED = 1.05
"""Steps after the recording that take so many times as long as those before are reported as slowed."""
_HARMLESS = frozenset((Damage.WORK_BEFORE_RECORDING, Damage.BUFFER_REQUESTS))
"""Kinds that a recording may have and be whole."""
_MAKES_NULL = frozenset((*Damage, MISSING_RANGES, SHIFTED_TIMES, UNMATCHED_MESSAGES)) - _HARMLESS


def name_of(entry: AuditEntry) -> str:
    """The name of a kind of damage in a sentence."""
    return entry.kind.replace("_", " ")


def damage_in(recording: RecordingReport | None) -> list[AuditEntry]:
    """The kinds of damage that make figures null or wrong."""
    return [] if recording is None else [entry for entry in recording.audit if entry.kind in _MAKES_NULL]


def audit_line(recording: RecordingReport | None) -> str:
    """The kinds of damage of a recording in one line; "" of a recording that is whole."""
    damage = damage_in(recording)
    if not damage:
        return ""
    kinds = ", ".join(f"{name_of(entry)} ({entry.count:,})" for entry in damage)
    return f"the recording is damaged: {kinds}; pptrace doctor PATH says what that affects and what cures it"


def place_of(entry: AuditEntry) -> str:
    """The ranks and steps that damage is in."""
    ranks = f"{'rank' if len(entry.ranks) == 1 else 'ranks'} {as_ranges(entry.ranks)}" if entry.ranks else ""
    steps = f"{'step' if len(entry.steps) == 1 else 'steps'} {as_ranges(entry.steps)}" if entry.steps else ""
    return ", ".join(part for part in (ranks, steps) if part)


def audit_of(report: Report) -> tuple[AuditEntry, ...] | None:
    """The audit; None where the inputs are tables of ops and dumps alone, which do not say what a recorder got wrong."""
    if report.recording is None or all(info.format == InputFormat.OPLOG for info in report.inputs):
        return None
    return report.recording.audit


def audit_text(report: Report, warnings: Sequence[str]) -> RenderableType:
    """The whole audit: what is damaged, what it affects, what cures it; then the ``warnings`` of the report."""
    audit = audit_of(report)
    num_files = len({entry.path for entry in report.inputs})
    ranks = f"{counted(num_files, 'file')} of {counted(report.mesh.num_ranks, 'rank')}"
    head = Text(f"{ranks}, {counted(len(report.steps), 'step')}", style="dim")
    if audit is None:
        return Group(head, Text("not audited: tables of ops and dumps do not say what a recorder got wrong"))
    damage, others = damage_in(report.recording), [entry for entry in audit if entry.kind not in _MAKES_NULL]
    title = f"Damaged: {counted(len(damage), 'kind')} of damage" if damage else "Nothing of the recording is damaged"
    parts = [head, Text(title, style="bold yellow" if damage else "bold green"), *_entries(damage)]
    if others:
        parts += [Text("Good to know", style="bold"), *_entries(others)]
    if warnings:
        lines = (Padding(Text(line), (0, 0, 0, 2)) for line in warnings)
        parts += [Text("Warnings of the report", style="bold"), *lines]
    return Group(*parts)


def _entries(entries: Sequence[AuditEntry]) -> Iterator[RenderableType]:
    for entry in entries:
        place = place_of(entry)
        yield Padding(Text(f"{name_of(entry)}: {entry.count:,}{f' ({place})' if place else ''}"), (0, 0, 0, 2))
        for label, text in (("affects", entry.affects), ("cure", entry.cure)):
            yield Padding(Text(f"{label}: {text}", style="dim"), (0, 0, 0, 4))


def recording_line(recording: RecordingReport | None) -> str:
    """The step as it was recorded and without its recording, and whose figures a report has; "" where nothing is known."""
    if recording is not None and recording.reason == KERNELS_MISSING:
        steps = ""
        if recording.recorded_step_ns is not None and recording.unrecorded_step_ns is not None:
            recorded, unrecorded = map(units.milliseconds, (recording.recorded_step_ns, recording.unrecorded_step_ns))
            steps = f"{recorded} ms a step while recorded, {unrecorded} measured without; "
        return f"recording: {steps}figures are as recorded; how much of them is the recorder's is not known ({KERNELS_MISSING})"
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
