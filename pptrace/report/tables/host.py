"""Tables of why devices were idle: those of a step and of whole traces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pptrace.analysis.report import Report
from pptrace.analysis.result import RankDevice, RankStep, StepReport
from pptrace.model import units
from pptrace.model.report_table import Amount, ReportTable, mean, mean_and_extremes, share
from pptrace.report.recording import as_recorded

_COLUMNS = ("rank", "idle ms", "not launched ms", "blocked ms", "dependency ms", "not launched, share")
_MEANING = (
    "not launched: the host had not launched the next work; blocked: it was waiting for communication; dependency: the next work "
    "was launched and waited for another rank, stream or kernel"
)
_MOST_CALLS = 3


@dataclass(frozen=True, slots=True)
class _Entry:
    """One rank's device: its window, ns, and why it was idle in it."""

    rank: int
    window_ns: int
    of: RankStep | RankDevice

    def parts(self) -> tuple[int | None, ...]:
        """Idle time and its parts, ns."""
        host = self.of.host
        device = self.of.device if isinstance(self.of, RankStep) else self.of.breakdown
        if host is None:
            return (device.idle_ns, None, None, None)
        return (device.idle_ns, host.launch_starved_ns, host.blocking_ns, host.dependency_ns)


def host_table(step: StepReport, amount: Amount) -> ReportTable:
    """Idle time of the devices in a step by cause."""
    entries = [_Entry(rank.rank, rank.window_ns, rank) for rank in step.ranks if rank.device.idle_ns is not None]
    return _table("host", "Device idle time", entries, amount)


def device_host_table(report: Report, amount: Amount) -> ReportTable:
    """Idle time of the devices by cause, from their first work to their last."""
    entries = [
        _Entry(entry.rank, (entry.breakdown.busy_ns or 0) + entry.breakdown.idle_ns, entry)
        for entry in report.device
        if entry.breakdown.idle_ns is not None
    ]
    return _table("device-host", f"Device idle time, whole trace{as_recorded(report)}", entries, amount)


def _table(key: str, title: str, entries: Sequence[_Entry], amount: Amount) -> ReportTable:
    labelled = mean_and_extremes(entries, amount, lambda entry: entry.rank, lambda entry: entry.parts()[1] or 0)
    notes = [_MEANING]
    if labelled and labelled[0][0] == "mean":
        extremes = "those that waited for launches least and most"
        notes.append(f"the mean of {len(entries)} ranks, and {extremes}; --all lists them")
    rows = []
    for label, group in labelled:
        means = [mean(values) for values in zip(*(entry.parts() for entry in group), strict=True)]
        window = mean(entry.window_ns for entry in group)
        rows.append((label, *map(units.milliseconds, means), units.percent(share(means[1], window))))
    notes += _costly_calls(entries)
    return ReportTable(key, title, _COLUMNS, tuple(rows), tuple(notes), leave_out=(5, 3))


def _costly_calls(entries: Iterable[_Entry]) -> list[str]:
    """A line on the synchronisations for which devices ran dry; none without any."""
    syncs = [(entry.rank, sync) for entry in entries for sync in entry.of.synchronisations or () if sync.drained_ns]
    if not syncs:
        return []
    syncs.sort(key=lambda entry: -entry[1].drained_ns)
    calls = []
    for rank, sync in syncs[:_MOST_CALLS]:
        where = f" in {sync.operator}" if sync.operator else ""
        before = "" if sync.longest_op is None else f", the longest before {sync.longest_op}"
        idle = f"device idle {units.milliseconds(sync.drained_ns)} ms"
        calls.append(f"rank {rank}: {units.counted(sync.count, 'call')} of {sync.call}{where}, {idle}{before}")
    left = f"; and {len(syncs) - _MOST_CALLS} more" if len(syncs) > _MOST_CALLS else ""
    return [f"synchronisations that let a device run dry: {'; '.join(calls)}{left}"]
