"""Parts of the ranks' windows in a step whose causes are not known: for the sentence about it, and for comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from pptrace.analysis.findings.plain import communicating_ns
from pptrace.analysis.part_words import IDLE_WORDS, NOT_HIDDEN
from pptrace.analysis.result import RankStep, StepReport
from pptrace.model.known import sum_of

COMPUTE, EXPOSED = "compute", "exposed communication"
WAITING_FOR_LAUNCHES = "devices waiting for launches"
BETWEEN_OPERATORS = "between operators"
WITH_WAITING = f"{NOT_HIDDEN}, with the waiting in it"
NOT_SEPARATED = "waiting and exposed communication"
_LAUNCHED = "devices idle though work was launched"
_GAPS = "copies and gaps between kernels"


class WindowParts(Struct, frozen=True):
    """Parts of the windows of the ranks whose compute is known, ns: ``named`` by name, and what they leave of ``window_ns``,
    which has the name ``rest``. What is known to be nothing is 0. ``is_of_all``: as much is known of every rank of the step.
    """

    window_ns: int
    named: Mapping[str, int]
    rest: str
    rest_ns: int
    is_of_all: bool

    @property
    def parts(self) -> dict[str, int]:
        """All parts, ns, which sum to ``window_ns``."""
        return {**self.named, self.rest: self.rest_ns}


def window_parts(step: StepReport, num_ranks: int) -> WindowParts | None:
    """The parts of a step of a run of so many ranks; None where compute is known of none that has a trace."""
    ranks = [rank for rank in step.ranks if rank.compute_ns is not None]
    window_ns = sum(rank.window_ns for rank in ranks)
    if not window_ns:
        return None
    exposed, bubble = (sum_of(getattr(rank, name) for rank in ranks) for name in ("exposed_comm_ns", "bubble_ns"))
    named = {COMPUTE: sum_of(rank.compute_ns for rank in ranks) or 0}
    if exposed is not None and bubble is not None:
        named[EXPOSED] = exposed
        of_rest, rest = ({}, "bubble") if step.has_pipeline else _of_rest(step, ranks, bubble, num_ranks)
    else:
        communicating = sum_of(map(communicating_ns, ranks))
        named |= {} if communicating is None else {WITH_WAITING: communicating}
        bubble = window_ns - sum(named.values())
        of_rest, rest = _of_hosts(step, ranks, bubble), NOT_SEPARATED
        if communicating is not None:
            of_rest, rest = of_rest | _idle_though_launched(ranks, bubble - sum(of_rest.values()), num_ranks), _GAPS
    known = {
        (rank.exposed_comm_ns is None, rank.host is None, rank.idle_spans is None, rank.between_operators_ns is None)
        for rank in ranks
    }
    is_of_all = len(known) == 1 and len(ranks) == len(step.ranks)
    return WindowParts(window_ns, named | of_rest, rest, bubble - sum(of_rest.values()), is_of_all)


def _of_rest(step: StepReport, ranks: Sequence[RankStep], bubble_ns: int, num_ranks: int) -> tuple[dict[str, int], str]:
    """(parts of what is neither compute nor exposed communication, the name of what they leave), without a pipeline."""
    parts = _of_hosts(step, ranks, bubble_ns)
    parts |= _idle_though_launched(ranks, bubble_ns - sum(parts.values()), num_ranks)
    if not step.has_devices and BETWEEN_OPERATORS in parts:
        return parts, "waiting for other ranks"
    if num_ranks > 1:
        return parts, "waiting for other ranks, input and Python"
    return parts, _GAPS if step.has_devices else "waiting for input and Python"


def _idle_though_launched(ranks: Sequence[RankStep], rest_ns: int, num_ranks: int) -> dict[str, int]:
    """The part of ``rest_ns`` in which devices of several ranks did nothing with work launched, ns; {} if not known."""
    hosts = [rank.host for rank in ranks if rank.host is not None]
    is_known = num_ranks > 1 and len(hosts) == len(ranks)
    return {_LAUNCHED: min(sum(host.dependency_ns for host in hosts), rest_ns)} if is_known else {}


def _of_hosts(step: StepReport, ranks: Sequence[RankStep], rest_ns: int) -> dict[str, int]:
    """Parts of ``rest_ns`` in which ranks had nothing to do, by what their hosts did, ns; {} if that is not known."""
    hosts = [rank.host for rank in ranks if rank.host is not None]
    known = [rank for rank in ranks if rank.host is not None or not step.has_devices]
    spans = [rank.idle_spans for rank in known if rank.idle_spans is not None]
    parts = {words.phrase: sum(of.get(kind, 0) for of in spans) for kind, words in IDLE_WORDS.items()} if spans else {}
    between = sum_of(rank.between_operators_ns for rank in known)
    if known and between is not None:
        parts[BETWEEN_OPERATORS] = max(between - sum(parts.values()), 0)
    if hosts:
        starved, named = sum(host.launch_starved_ns for host in hosts), sum(parts.values())
        parts[WAITING_FOR_LAUNCHES] = min(max(starved - named, 0), rest_ns - named)
    return parts
