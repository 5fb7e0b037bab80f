"""The table of receives that held up other calls and ops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pptrace.analysis.early_receives.types import HeldCall
from pptrace.model import units
from pptrace.model.report_table import Amount, Columns, ReportTable, table_of

if TYPE_CHECKING:
    from pptrace.analysis.questions import Rows
    from pptrace.analysis.report import Report

_BRIEF = 5
_COLUMNS: Columns[HeldCall] = {
    "rank": lambda pair: str(pair.rank),
    "receive": lambda pair: pair.receive,
    "from": lambda pair: f"rank {pair.source}",
    "held up": lambda pair: pair.held,
    "count": lambda pair: str(pair.count),
    "ms a step": lambda pair: units.milliseconds(pair.held_ns),
    "longest ms": lambda pair: units.milliseconds(pair.longest_ns),
}


def tables(report: Report, amount: Amount) -> list[ReportTable]:
    """The table of receives that held up something; none where none did."""
    early = report.early_receives
    if early is None or not early.pairs or (amount is Amount.BRIEF and not early.gain_ns):
        return []
    shown = early.pairs if amount is not Amount.BRIEF else early.pairs[:_BRIEF]
    of_ranks = ", ".join(f"rank {one.rank}: {units.milliseconds(one.held_ns)}" for one in early.ranks[:_BRIEF])
    runs = (
        "the rank waits in each call" if early.where == "host" else "a stream of the device runs calls in their order"
    )
    left = early.num_pairs - len(shown)
    if early.gain_ns:
        gain = f"posted later, a mean step would take {units.milliseconds(early.gain_ns)} ms less: pptrace whatif --repair-order"
    else:
        gain = f"no gain is known: {early.gain_reason}"
    notes = (
        *([f"{units.counted(left, 'more pair')}: --all shows them"] if left > 0 else []),
        f"held up, ms in a mean step, on {of_ranks}; {runs}",
        gain,
    )
    title = "Receives posted before their sender could send, and what they held up"
    return [table_of("early-receives", title, shown, _COLUMNS, notes, 4, (6, 2))]


FILES: Mapping[str, Rows] = {
    "early-receives": (
        lambda report: () if report.early_receives is None else report.early_receives.pairs,
        "receives posted before their sender could send, and what they held up",
    ),
}
