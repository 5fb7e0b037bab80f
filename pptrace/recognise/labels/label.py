"""The content of a label, how rules are made, and the rules for ranges that torch writes for every program (torch 2.x,
``torch/profiler/profiler.py``, ``torch/optim/optimizer.py``).

A label may name a chunk of its rank and no stage; the stage follows when the ranks are joined and their places in the pipeline
are known. Until then the column ``stage`` of OPS and COMMS is :data:`UNKNOWN`, the column ``chunk`` says which of its rank's
stages it is (:data:`UNKNOWN` where the rank may have one alone), and its text begins with a question mark::

    op = ( stage | "?" chunk ) kind [ microbatch ]
"""

from __future__ import annotations

import re
from collections.abc import Callable

from msgspec import Struct

from pptrace.model.tables import UNKNOWN
from pptrace.schedule.actions import Action, Kind, Phase

_CHUNK = re.compile(r"\?(\d+)", re.ASCII)


def stage_text(stage: int | None, chunk: int) -> str:
    """The beginning of an op's text."""
    return f"?{max(chunk, 0)}" if stage is None or stage == UNKNOWN else str(stage)


def with_stage_of_chunk(text: str, stage_of: Callable[[int], int]) -> str:
    """The text of an op or an overlapped pair with stages in place of chunks."""
    return _CHUNK.sub(lambda match: str(stage_of(int(match[1]))), text)


def chunks_in(text: str) -> tuple[int, ...]:
    """The chunks that the halves of an overlapped pair name in place of stages."""
    return tuple(map(int, _CHUNK.findall(text)))


EVALUATION = "EVALUATION"
"""The ``span`` of a range whose ops are of no training step."""


class LabelledAction(Struct, frozen=True):
    """An op or message as a label names it; None is what it does not name.

    Without a ``stage``, ``chunk`` says which of its rank's stages it is (0 where the name says nothing: the only one); the
    stage follows when the ranks are joined. Without a ``microbatch`` the k-th in order is that of microbatch k. ``parts`` are
    the halves of an overlapped pair.
    """

    kind: Kind
    stage: int | None = None
    microbatch: int | None = None
    chunk: int = 0
    parts: tuple[LabelledAction, ...] = ()

    @classmethod
    def of(cls, action: Action) -> LabelledAction:
        """An action of a plan, whose stage is known."""
        return cls(action.kind, action.stage, action.microbatch, parts=tuple(map(cls.of, action.parts)))

    @classmethod
    def pair(cls, forward: LabelledAction, backward: LabelledAction) -> LabelledAction:
        """A forward and a backward that run together, with the stage and microbatch of the forward."""
        return cls(Kind.OVERLAP_F_B, forward.stage, forward.microbatch, forward.chunk, (forward, backward))

    @property
    def halves(self) -> tuple[LabelledAction, ...]:
        """The simple actions of this one: its parts, or itself."""
        return self.parts or (self,)

    def __str__(self) -> str:
        """The text of the ``pair`` column."""
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        return f"{stage_text(self.stage, self.chunk)}{self.kind}{'' if self.microbatch is None else self.microbatch}"


class Label(Struct, frozen=True):
    """One range: an op or its messages (``actions``), or something else in a step (``span``, a kind of the ops table).

    ``flushes_weight_grads`` marks a range that holds every weight gradient of its chunk that is still outstanding. ``step`` is
    None where the name does not number it; ``may_start_before_range``: the ops of a step may begin before its range.
    ``sequence`` is the part of a split sequence. ``adjacent`` marks messages of which others have no range: such a message
    belongs to the op next to it, not to the k-th (:mod:`pptrace.recognise.messages.messages_from_plan`). ``inferred`` marks
    what is in no name, ``marked`` a span that pptrace's launcher wrote. ``phase`` is that of everything inside the range. A
    label that has nothing but its framework names that one.
    """

    framework: str
    actions: tuple[LabelledAction, ...] = ()
    span: str = ""
    step: int | None = None
    may_start_before_range: bool = False
    flushes_weight_grads: bool = False
    sequence: int = 0
    inferred: bool = False
    adjacent: bool = False
    phase: Phase | None = None
    marked: bool = False


Rule = tuple[re.Pattern[str], Callable[[re.Match[str]], "Label | None"]]
"""A pattern for the whole name, and its meaning; None where the name turns out to have none."""


def rule(pattern: str, read: Callable[[re.Match[str]], Label | None]) -> Rule:
    return re.compile(pattern, re.ASCII), read


def fixed(pattern: str, label: Label) -> Rule:
    """A rule whose label is always the same."""
    return rule(pattern, lambda _: label)


RULES = (
    rule(r"ProfilerStep#(?P<step>\d{1,9})", lambda m: Label("", span="STEP", step=int(m["step"]))),
    fixed(r"Optimizer\.step#\w+\.step", Label("", span="OPTIMIZER")),
)
