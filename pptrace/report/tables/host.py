"""Tables of why devices were idle: those of a step and of whole traces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pptrace.analysis.result import RankDevice, RankStep, Report, StepReport
from pptrace.model import units
from pptrace.model.device_idle import SyncSummary
from pptrace.model.report_table import FEW_RANKS, Amount, ReportTable, mean, share
from pptrace.report.recording.line import as_recorded

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
    labelled = [(str(entry.rank), [entry]) for entry in entries]
    notes = [_MEANING]
    if amount is Amount.BRIEF and len(entries) > FEW_RANKS:
        by_starved = sorted(entries, key=lambda entry: entry.parts()[1] or 0)
        labelled = [("mean", list(entries)), *((str(entry.rank), [entry]) for entry in (by_starved[0], by_starved[-1]))]
        notes.append(
            f"the mean of {len(entries)} ranks, and those that waited for launches least and most; --all lists them"
        )
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
    more = f"; and {len(syncs) - _MOST_CALLS} more" if len(syncs) > _MOST_CALLS else ""
    listed = "; ".join(_call(rank, sync) for rank, sync in syncs[:_MOST_CALLS])
    return [f"synchronisations that let a device run dry: {listed}{more}"]


def _call(rank: int, sync: SyncSummary) -> str:
    where = f" in {sync.operator}" if sync.operator else ""
    before = "" if sync.longest_op is None else f", the longest before {sync.longest_op}"
    return (
        f"rank {rank}: {units.counted(sync.count, 'call')} of {sync.call}{where}, device idle "
        f"{units.milliseconds(sync.drained_ns)} ms{before}"
    )
