"""The content of a label."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from pptrace.schedule.actions import Action, Kind, Phase

EVALUATION = "EVALUATION"
"""The ``span`` of a range whose ops are of no training step."""


@dataclass(frozen=True, slots=True)
class Label:
    """One range: an op or its messages (``actions``), or something else in a step (``span``, a kind of the ops table).

    Without a stage in the name an action has stage −1 − chunk (:func:`placeholder_stage`), and without a microbatch None:
    the k-th in order is that of microbatch k. ``flushes`` marks a range that holds every weight gradient of its chunk that is
    still outstanding. ``step`` is −1 where the name does not number it; ``leads`` says that a step may begin before its range.
    ``sequence`` is the part of a split sequence. ``adjacent`` marks messages of which others have no range: the op next to one is
    its own, not the k-th (:mod:`pptrace.recognise.messages.match_by_adjacent_ops`). ``inferred`` marks what no name told,
    ``marked`` a span that
    pptrace's launcher wrote. ``phase`` is that of everything inside the range. A label with nothing in it but the framework
    tells that one.
    """

    framework: str
    actions: tuple[Action, ...] = ()
    span: str = ""
    step: int = -1
    may_start_before_range: bool = False
    flushes_weight_grads: bool = False
    sequence: int = 0
    inferred: bool = False
    adjacent: bool = False
    phase: Phase | None = None
    marked: bool = False

    @property
    def action(self) -> Action | None:
        """The op, or the first message."""
        return self.actions[0] if self.actions else None

    @property
    def is_op(self) -> bool:
        return bool(self.actions) and self.actions[0].kind.is_compute


Rule = tuple[re.Pattern[str], Callable[[re.Match[str]], "Label | None"]]
"""A pattern for the whole name, and its meaning; None where the name turns out to have none."""


def rule(pattern: str, read: Callable[[re.Match[str]], Label | None]) -> Rule:
    return re.compile(pattern, re.ASCII), read


def fixed(pattern: str, label: Label) -> Rule:
    """A rule whose label is always the same."""
    return rule(pattern, lambda _: label)


def placeholder_stage(chunk: int) -> int:
    """Placeholder for the stage of a rank's ``chunk`` until the ranks are joined: −1 for its first, −2 for its second, …"""
    return -1 - chunk


def in_order(kind: Kind) -> Action:
    """An op or message known by its kind only; order gives its microbatch."""
    return Action(kind, placeholder_stage(0), None)
