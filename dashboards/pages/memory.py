"""The memory page: measured peaks, what a model of its sizes should take, and microbatches in flight."""

from __future__ import annotations

from dash import html

from dashboards.components import Node
from dashboards.parts import chart, data_table, empty, guarded, reasons_panel
from dashboards.store import Loaded
from pptrace.analysis.memory.show import measured_kinds, memory_table
from pptrace.model.report_table import Amount
from pptrace.report.charts.memory import (
    MOST_RANKS,
    in_flight_chart,
    memory_chart,
    memory_over_time,
    shown_ranks,
    unseen_parts,
)

_NEITHER = "Neither measured nor predicted; the reasons are below."
_NOT_TIMED = "Not recorded: pptrace run --memory records every allocation."


def layout(loaded: Loaded, *_: object) -> Node:
    return html.Div(guarded(lambda: body(loaded), "Memory", "memory-failed"), id="memory-body")


def body(loaded: Loaded) -> list[Node]:
    """The page; it is of all steps: of each rank that with its highest peak."""
    assert loaded.analysis is not None
    memory = loaded.analysis.report.memory
    over_time = memory_over_time(loaded.analysis.data.memory)
    timed = chart("Memory over time", over_time, "memory-over-time", _NOT_TIMED)
    if memory is None:
        reason = "Memory is known step by step, and these traces have no steps."
        nothing = empty("No memory", reason, "no-memory", "pptrace run records the peak of every step.")
        return [nothing if over_time is None else timed]
    grouped = len(shown_ranks(memory)) < len(memory.ranks)
    many = f"of more than {MOST_RANKS} ranks, that of each stage with the highest peak"
    note = many if grouped else "each rank's highest step"
    measured = f"; measured: {kinds}" if (kinds := measured_kinds(memory.ranks)) else ""
    unseen = f"; too small to be seen: {', '.join(names)}" if (names := unseen_parts(memory)) else ""
    table = memory_table(memory, Amount.BRIEF if grouped else Amount.WHOLE)
    return [
        chart(
            "Peak and predicted parts", memory_chart(memory), "memory-peaks", _NEITHER, note=f"{note}{measured}{unseen}"
        ),
        chart(
            "Microbatches in flight",
            in_flight_chart(memory),
            "memory-in-flight",
            "Not known: there is no plan, or a step has forwards without backwards.",
            note="forwards whose backward has not run, at most",
        ),
        timed,
        data_table(table, "memory"),
        *reasons_panel([*map(_in_words, memory.reasons)], "memory-reasons"),
    ]


_COLUMNS = {
    "peak_bytes": "peak",
    "activations_bytes": "activations",
    "total_bytes": "the sum of all parts",
    "in_flight.planned": "microbatches in flight, planned",
    "in_flight.measured": "microbatches in flight, measured",
}


def _in_words(reason: str) -> str:
    """A reason of the report, with words for the names of its JSON."""
    for name, words in _COLUMNS.items():
        reason = reason.replace(name, words)
    return reason
