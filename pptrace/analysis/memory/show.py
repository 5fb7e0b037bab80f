"""The table of memory: measured peaks, microbatches in flight, and predicted parts, by rank or by stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pptrace.analysis.memory.types import MemoryReport, RankMemory
from pptrace.model import units
from pptrace.model.report_table import FEW_RANKS, MAX_ROWS, MORE, Amount, ReportTable

if TYPE_CHECKING:
    from pptrace.analysis.questions import Rows
    from pptrace.analysis.result import Report
from pptrace.model.step_memory import MemoryKind

_KINDS = {
    MemoryKind.DEVICE_ALLOCATED: "tensors on the device",
    MemoryKind.DEVICE_RESERVED: "reserved from the device's driver",
    MemoryKind.HOST_ALLOCATED: "tensors on the host, made since recording began (gradients and activations, not weights)",
    MemoryKind.ALLOCATED: "allocated since recording began",
    MemoryKind.PROCESS_RESIDENT: "resident memory of the process, interpreter and libraries too",
}
_COLUMNS = (
    *("rank", "stage", "peak", "at start", "in flight", "planned"),
    *("predicted", "weights", "gradients", "optimizer", "activations"),
)


def tables(report: Report, amount: Amount) -> list[ReportTable]:
    """The table of memory, where there is anything to show."""
    memory = report.memory
    return [memory_table(memory, amount)] if memory is not None and has_memory(memory) else []


FILES: Mapping[str, Rows] = {
    "memory": (
        lambda report: () if report.memory is None else report.memory.ranks,
        "memory of each rank: measured peak and predicted parts, microbatches in flight",
    )
}


def has_memory(memory: MemoryReport | None) -> bool:
    """Return whether there is anything to show: a peak, or a prediction."""
    return memory is not None and any(
        rank.peak_bytes is not None or rank.predicted is not None for rank in memory.ranks
    )


def measured_kinds(ranks: Sequence[RankMemory]) -> str:
    """Kinds of memory that the peaks of some ranks are of; "" where nothing was measured."""
    kinds = dict.fromkeys(rank.kind for rank in ranks if rank.kind is not None)
    return "; ".join(_KINDS[MemoryKind(kind)] for kind in kinds)


def memory_table(memory: MemoryReport, amount: Amount) -> ReportTable:
    """A row per rank; brief and of many, the rank of each stage with the highest peak."""
    shown, title, notes = list(memory.ranks), "Memory", [_kinds_note(memory.ranks)]
    if amount is Amount.BRIEF and len(shown) > FEW_RANKS:
        shown, title = fullest_of_stages(shown), "Memory, the rank of each stage with the highest peak"
    if amount is Amount.BRIEF and len(shown) > MAX_ROWS:
        notes.append(MORE.format(len(shown) - MAX_ROWS))
        by_peak = sorted(shown, key=lambda rank: -(rank.peak_bytes or 0))[:MAX_ROWS]
        shown = [rank for rank in shown if rank in by_peak]
    notes += [f"not predicted: {reason}" for reason in _unpredicted(memory)]
    if any(rank.predicted is not None for rank in shown):
        notes.append(
            "predicted: without temporaries of ops, messages in transit, workspaces of cuBLAS and what the allocator rounds up"
        )
    rows = [_row(rank) for rank in shown]
    is_filled = [index < 3 or any(row[index] != "–" for row in rows) for index in range(len(_COLUMNS))]
    columns = tuple(name for name, filled in zip(_COLUMNS, is_filled, strict=True) if filled)
    kept = tuple(tuple(cell for cell, filled in zip(row, is_filled, strict=True) if filled) for row in rows)
    parts = [columns.index(name) for name in ("optimizer", "gradients", "weights", "at start") if name in columns]
    return ReportTable("memory", title, columns, kept, tuple(filter(None, notes)), num_labels=2, leave_out=tuple(parts))


def _unpredicted(memory: MemoryReport) -> list[str]:
    """Reasons why activations have no prediction, where other parts have one."""
    prefix = "activations_bytes and total_bytes: "
    reasons = [reason.removeprefix(prefix) for reason in memory.reasons if reason.startswith(prefix)]
    return [f"activations, and so the sum of all parts: {reason}" for reason in reasons]


def fullest_of_stages(ranks: Sequence[RankMemory]) -> list[RankMemory]:
    """The rank with the highest peak of each set of stages."""
    fullest: dict[tuple[int, ...], RankMemory] = {}
    for rank in ranks:
        if rank.stages not in fullest or (rank.peak_bytes or 0) > (fullest[rank.stages].peak_bytes or 0):
            fullest[rank.stages] = rank
    return [rank for _, rank in sorted(fullest.items())]


def _kinds_note(ranks: Sequence[RankMemory]) -> str:
    return f"peak: {kinds}" if (kinds := measured_kinds(ranks)) else ""


def _row(rank: RankMemory) -> tuple[str, ...]:
    predicted = rank.predicted
    parts = (
        (None,) * 5
        if predicted is None
        else (
            predicted.total_bytes,
            predicted.weights_bytes,
            predicted.gradients_bytes,
            predicted.optimizer_bytes,
            predicted.activations_bytes,
        )
    )
    return (
        str(rank.rank),
        ", ".join(map(str, rank.stages)) or "–",
        units.num_bytes(rank.peak_bytes),
        units.num_bytes(rank.start_bytes),
        _count(rank.in_flight.measured),
        _count(rank.in_flight.planned),
        *map(units.num_bytes, parts),
    )


def _count(number: int | None) -> str:
    return "–" if number is None else str(number)
