"""The table of memory: measured peaks, microbatches in flight, and predicted parts, by rank or by stage."""

from __future__ import annotations

from collections.abc import Sequence

from pptrace.analysis.whole_run import MemoryReport, RankMemory
from pptrace.model.step_memory import MemoryKind
from pptrace.report import units
from pptrace.report.tables.table import FEW_RANKS, MAX_ROWS, Amount, Columns, ReportTable, largest, more, rows_of

_KINDS = {
    MemoryKind.DEVICE_ALLOCATED: "tensors on the device",
    MemoryKind.DEVICE_RESERVED: "reserved from the device's driver",
    MemoryKind.HOST_ALLOCATED: "tensors on the host, made since recording began (gradients and activations, not weights)",
    MemoryKind.ALLOCATED: "allocated since recording began",
    MemoryKind.PROCESS_RESIDENT: "resident memory of the process, interpreter and libraries too",
}
_COLUMNS: Columns[RankMemory] = {
    "rank": lambda rank: str(rank.rank),
    "stage": lambda rank: ", ".join(map(str, rank.stages)) or "–",
    "peak": lambda rank: units.num_bytes(rank.peak_bytes),
    "at start": lambda rank: units.num_bytes(rank.start_bytes),
    "in flight": lambda rank: units.text(rank.in_flight.measured),
    "planned": lambda rank: units.text(rank.in_flight.planned),
    "predicted": lambda rank: units.num_bytes(None if rank.predicted is None else rank.predicted.total_bytes),
    "weights": lambda rank: units.num_bytes(None if rank.predicted is None else rank.predicted.weights_bytes),
    "gradients": lambda rank: units.num_bytes(None if rank.predicted is None else rank.predicted.gradients_bytes),
    "optimizer": lambda rank: units.num_bytes(None if rank.predicted is None else rank.predicted.optimizer_bytes),
    "activations": lambda rank: units.num_bytes(None if rank.predicted is None else rank.predicted.activations_bytes),
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
    shown, title = list(memory.ranks), "Memory"
    notes = [f"peak: {kinds}"] if (kinds := measured_kinds(memory.ranks)) else []
    if amount is Amount.BRIEF and len(shown) > FEW_RANKS:
        shown, title = fullest_of_stages(shown), "Memory, the rank of each stage with the highest peak"
    if amount is Amount.BRIEF:
        notes += more(len(shown) - MAX_ROWS)
        shown = largest(shown, MAX_ROWS, lambda rank: rank.peak_bytes or 0)
    prefix = "activations_bytes and total_bytes: "
    unpredicted = [reason.removeprefix(prefix) for reason in memory.reasons if reason.startswith(prefix)]
    notes += [f"not predicted: activations, and so the sum of all parts: {reason}" for reason in unpredicted]
    if any(rank.predicted is not None for rank in shown):
        notes.append(
            "predicted: without temporaries of ops, messages in transit, workspaces of cuBLAS and what the allocator rounds up"
        )
    always = ("rank", "stage", "peak")
    filled = {
        name: cell for name, cell in _COLUMNS.items() if name in always or any(cell(rank) != "–" for rank in shown)
    }
    columns, rows = tuple(filled), rows_of(shown, filled)
    parts = [columns.index(name) for name in ("optimizer", "gradients", "weights", "at start") if name in columns]
    return ReportTable("memory", title, columns, rows, tuple(notes), num_labels=2, leave_out=tuple(parts))


def fullest_of_stages(ranks: Sequence[RankMemory]) -> list[RankMemory]:
    """The rank with the highest peak of each set of stages."""
    fullest: dict[tuple[int, ...], RankMemory] = {}
    for rank in ranks:
        if rank.stages not in fullest or (rank.peak_bytes or 0) > (fullest[rank.stages].peak_bytes or 0):
            fullest[rank.stages] = rank
    return [rank for _, rank in sorted(fullest.items())]
