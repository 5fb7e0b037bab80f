"""The table of the what-if study: what slows the steps down, if the rest cost what is typical."""

from __future__ import annotations

from pptrace.analysis.stragglers.slowdowns import LEAST_SLOWDOWN
from pptrace.analysis.whole_run import Stragglers
from pptrace.report import units
from pptrace.report.tables.table import MAX_ROWS, MORE, Amount, ReportTable


def stragglers_table(stragglers: Stragglers, amount: Amount) -> ReportTable:
    """The stages, workers and kinds with a slowdown of their own, the largest of each first."""
    groups = (
        [("stage", str(entry.stage), entry.slowdown) for entry in stragglers.stages],
        [("worker", f"rank {entry.rank}", entry.slowdown) for entry in stragglers.workers],
        [("kind", entry.kind, entry.slowdown) for entry in stragglers.op_kinds],
    )
    rows, notes = [], [_shares(stragglers)]
    for group in groups:
        slow = sorted((entry for entry in group if entry[2] >= LEAST_SLOWDOWN), key=lambda entry: -entry[2])
        shown = slow if amount is Amount.WHOLE else slow[: MAX_ROWS // len(groups)]
        rows += [(what, name, f"{slowdown:.3f}") for what, name, slowdown in shown]
        if len(slow) > len(shown):
            notes.append(f"{slow[0][0]}s: {MORE.format(len(slow) - len(shown))}")
    columns = ("alone as measured", "", "slowdown")
    return ReportTable("stragglers", "Stragglers", columns, tuple(rows), tuple(notes), num_labels=2)


def _shares(stragglers: Stragglers) -> str:
    """One sentence with the slowdown and its shares."""
    verb = "takes" if stragglers.num_steps == 1 else "take"
    line = (
        f"{units.counted(stragglers.num_steps, 'step')} replayed {verb} {stragglers.slowdown:.3f} times as long as with every op "
        "and message at its kind's typical cost"
    )
    shares = {"slowest 3 % of workers": stragglers.m_w, "last stage": stragglers.m_s}
    known = [f"{share:.1%} of that goes with the {name}" for name, share in shares.items() if share is not None]
    return "; ".join((line, *known))
