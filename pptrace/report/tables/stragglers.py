"""The table of the what-if study: what slows the steps down, if the rest cost what is typical."""

from __future__ import annotations

from pptrace.analysis.stragglers.slowdowns import LEAST_SLOWDOWN
from pptrace.analysis.whole_run import Stragglers
from pptrace.report import units
from pptrace.report.tables.table import Amount, ReportTable, more

_THREE_PER_CENT = 34
"""Number of workers below which 3 % of them are one."""
_MEANING = (
    "slowdown: of all steps, with this alone as measured and all else typical; slowdowns overlap, what a change gains is in the "
    "findings"
)


def has_slowdown(stragglers: Stragglers | None) -> bool:
    """Return whether the table has anything to say."""
    return stragglers is not None and stragglers.slowdown >= LEAST_SLOWDOWN


def stragglers_table(stragglers: Stragglers, amount: Amount) -> ReportTable:
    """The stages, workers and kinds with a slowdown of their own, the largest of each first; of a brief table that alone."""
    groups = (
        [("stage", str(entry.stage), entry.slowdown) for entry in stragglers.stages],
        [("worker", f"rank {entry.rank}", entry.slowdown) for entry in stragglers.workers],
        [("kind", entry.kind, entry.slowdown) for entry in stragglers.op_kinds],
    )
    rows, num_more = [], 0
    for group in groups:
        slow = sorted((entry for entry in group if entry[2] >= LEAST_SLOWDOWN), key=lambda entry: -entry[2])
        shown = slow if amount is Amount.WHOLE else slow[:1]
        rows += [(what, name, f"{slowdown:.3f}") for what, name, slowdown in shown]
        num_more += len(slow) - len(shown)
    verb = "takes" if stragglers.num_steps == 1 else "take"
    shares = [
        f"{units.counted(stragglers.num_steps, 'step')} replayed {verb} {stragglers.slowdown:.3f} times as long as with every op "
        "and message at its kind's typical cost"
    ]
    slowest = "slowest worker" if len(stragglers.workers) < _THREE_PER_CENT else "slowest 3 % of workers"
    for name, share in ((slowest, stragglers.m_w), ("last stage", stragglers.m_s)):
        if share is not None:
            shares.append(f"the {name} explains {_share_words(share)} of it")
    notes = (*more(num_more), "; ".join(shares), _MEANING)
    columns = ("alone as measured", "", "slowdown")
    return ReportTable("stragglers", "Stragglers", columns, tuple(rows), notes, num_labels=2)


def _share_words(share: float) -> str:
    """The share in words: replays in which the slowest cost what is typical may take less time than those in which all do (all
    of it, and more), or more than the measured ones (none).
    """
    return "none" if share < 0 else "all" if share > 1 else f"{share:.1%}"
