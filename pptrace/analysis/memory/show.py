"""The table of memory: measured peaks, microbatches in flight, and predicted parts, by rank or by stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from pptrace.analysis.memory.types import MemoryReport, RankMemory
from pptrace.model import units
from pptrace.model.report_table import FEW_RANKS, MAX_ROWS, Amount, Columns, ReportTable, largest, more, table_of

if TYPE_CHECKING:
    from pptrace.analysis.questions import Rows
    from pptrace.analysis.report import Report
from pptrace.model.step_memory import MemoryKind

_KINDS = {
    MemoryKind.DEVICE_ALLOCATED: "tensors on the device",
    MemoryKind.DEVICE_RESERVED: "reserved from the device's driver",
    MemoryKind.HOST_ALLOCATED: "tensors on the host, made since recording began (gradients and activations, not weights)",
    MemoryKind.ALLOCATED: "allocated since recording began",
    MemoryKind.PROCESS_RESIDENT: "resident memory of the process, interpreter and libraries too",
}


def _predicted(name: str) -> Callable[[RankMemory], str]:
    return lambda rank: units.num_bytes(None if rank.predicted is None else getattr(rank.predicted, f"{name}_bytes"))


_COLUMNS: Columns[RankMemory] = {
    "rank": lambda rank: str(rank.rank),
    "stage": lambda rank: ", ".join(map(str, rank.stages)) or "–",
    "peak": lambda rank: units.num_bytes(rank.peak_bytes),
    "at start": lambda rank: units.num_bytes(rank.start_bytes),
    "in flight": lambda rank: units.text(rank.in_flight.measured),
    "planned": lambda rank: units.text(rank.in_flight.planned),
    "predicted": _predicted("total"),
    **{name: _predicted(name) for name in ("weights", "gradients", "optimizer", "activations")},
}


def tables(report: Report, amount: Amount) -> list[ReportTable]:
    """The table of memory, where there is anything to show."""
    memory = report.memory
    is_known = memory and any(rank.peak_bytes is not None or rank.predicted is not None for rank in memory.ranks)
    return [memory_table(memory, amount)] if memory and is_known else []


FILES: Mapping[str, Rows] = {
    "memory": (
        lambda report: () if report.memory is None else report.memory.ranks,
        "memory of each rank: measured peak and predicted parts, microbatches in flight",
    )
}


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
    columns = {
        name: cell
        for number, (name, cell) in enumerate(_COLUMNS.items())
        if number < 3 or any(cell(rank) != "–" for rank in shown)
    }
    order = [*columns]
    narrow = tuple(order.index(name) for name in ("optimizer", "gradients", "weights", "at start") if name in columns)
    return table_of("memory", title, shown, columns, notes, 2, narrow)


def fullest_of_stages(ranks: Sequence[RankMemory]) -> list[RankMemory]:
    """The rank with the highest peak of each set of stages."""
    fullest: dict[tuple[int, ...], RankMemory] = {}
    for rank in ranks:
        if rank.stages not in fullest or (rank.peak_bytes or 0) > (fullest[rank.stages].peak_bytes or 0):
            fullest[rank.stages] = rank
    return [rank for _, rank in sorted(fullest.items())]
