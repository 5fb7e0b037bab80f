"""The comparison in a sentence, and parts and places in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pptrace.analysis.compare.figures import CAUSE
from pptrace.analysis.compare.result import ChangeVerdict, MeanChange, PartChange, SpanChange, Work
from pptrace.model.device import IDLE_REASONS
from pptrace.model.wording import milliseconds, signed_milliseconds


def verdict_of(span: SpanChange | MeanChange) -> ChangeVerdict:
    """The verdict on a change: none without an interval, or where 0 is in it."""
    if span.low is None or span.high is None or span.low <= 0 <= span.high:
        return ChangeVerdict.NO_DIFFERENCE
    return ChangeVerdict.SLOWER if span.low > 0 else ChangeVerdict.FASTER


def sentence_of(span: SpanChange, mean: MeanChange | None, parts: Sequence[PartChange], runs: str, work: Work) -> str:
    """The verdict in a sentence; ``runs`` is how many runs there are, "" with one of each. Unless they do the same work it is one
    on the lengths of steps.
    """
    verdict, about_work = verdict_of(span), _ABOUT_WORK[work.is_same].format(work.detail)
    step = "an undisturbed step" if span.is_undisturbed else "a typical step"
    lengths = f"{step} takes {_lengths_of_both(span, runs)}"
    if span.low is None or span.high is None:
        return f"{about_work}Too few steps to tell a difference{' of their lengths' * bool(about_work)}: {lengths}"
    other = mean if mean is not None and mean.is_otherwise else None
    if other is not None:
        lengths += f", but the mean one, which counts for throughput, {_lengths_of_both(other)}"
    if verdict is ChangeVerdict.NO_DIFFERENCE:
        of_steps = "of typical steps " if other is not None else "of their lengths " if about_work else ""
        return f"{about_work}No difference {of_steps}found: {lengths}"
    along = (part for part in parts if part.significant and part.change_ns * (span.b_ns - span.a_ns) > 0)
    adds_up = any(part.adds_up for part in parts)
    largest = next((part for part in along if part.name != CAUSE and part.adds_up is adds_up), None)
    most = (
        ""
        if largest is None
        else f"; of its parts {part_label(largest)} changed most, {signed_milliseconds(largest.change_ns)} ms"
    )
    of_mean = verdict if other is None else verdict_of(other)
    is_otherwise, is_sure = of_mean is not verdict, of_mean is not ChangeVerdict.NO_DIFFERENCE
    if about_work:
        on_average = f", on average {_OF_LENGTHS[of_mean]}" * is_otherwise
        return f"{about_work}Steps of B are {_OF_LENGTHS[verdict]}{on_average}: {lengths}{most}"
    by_which = f" by typical steps{f' and {of_mean} on average' * is_sure}" * is_otherwise
    return f"B is {verdict}{by_which}: {lengths}{most}"


_ABOUT_WORK = {
    True: "",
    False: "A and B do different work ({}), so that no length of a step says which is faster. ",
    None: "Nothing says whether A and B do the same work in a step ({}), and so which is faster. ",
}
_OF_LENGTHS = {
    ChangeVerdict.SLOWER: "longer",
    ChangeVerdict.FASTER: "shorter",
    ChangeVerdict.NO_DIFFERENCE: "about as long",
}


def _lengths_of_both(of: SpanChange | MeanChange, runs: str = "") -> str:
    """Lengths of a step of both and the change: "20.00 ms in A and 22.00 ms in B (+10.00%, 95 % interval +9.00% to +11.00%)"."""
    lengths = f"{milliseconds(of.a_ns)} ms in A and {milliseconds(of.b_ns)} ms in B"
    if of.change is None:
        return lengths
    interval = "" if of.low is None or of.high is None else f", 95 % interval {of.low:+.2%} to {of.high:+.2%}"
    return f"{lengths} ({of.change:+.2%}{interval}{f', {runs}' if runs else ''})"


def part_label(part: PartChange) -> str:
    """A part and its place in words: "compute B, stage 2"."""
    return f"{part.name} {place_label(part.where)}".strip()


def place_label(where: Mapping[str, int | str]) -> str:
    """A place in words: "B, stage 2"."""
    return ", ".join(
        IDLE_REASONS.get(str(value), str(value)) if name in _PLAIN else f"{name} {value}"
        for name, value in where.items()
    )


_PLAIN = ("kind", "cause", "reason", "phase")
"""Coordinates whose values say by themselves what they are."""
