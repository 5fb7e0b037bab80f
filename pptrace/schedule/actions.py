"""Actions, the elements of plans.

Text form, as torch.distributed.pipelining writes it:

    action  = stage kind [microbatch] | "(" action ";" action ")" "OVERLAP_F_B"
    kind    = "F" | "B" | "I" | "W" | "SEND_F" | "RECV_F" | "SEND_B" | "RECV_B" | "UNSHARD" | "RESHARD" | "REDUCE_GRAD"

Only UNSHARD, RESHARD and REDUCE_GRAD have no microbatch.

A cell of a pipeline is one microbatch in one stage: most actions are of one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import NamedTuple

from pptrace.errors import ScheduleError


class Kind(StrEnum):
    """The kind of an action. The values are torch's; ``code`` stands for a kind in columns: its index among all kinds."""

    code: int
    is_compute: bool
    __hash__ = str.__hash__  # an enum's own is a function in Python, called for each look-up of a key

    F = "F"
    B = "B"  # full backward: I and W in one
    I = "I"  # gradient of the input
    W = "W"  # gradient of the weights
    OVERLAP_F_B = "OVERLAP_F_B"  # one forward and one backward run together (DualPipe)
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"

    @property
    def is_send(self) -> bool:
        return self is Kind.SEND_F or self is Kind.SEND_B

    @property
    def is_recv(self) -> bool:
        return self is Kind.RECV_F or self is Kind.RECV_B

    @property
    def is_p2p(self) -> bool:
        return self in _P2P


KINDS = tuple(Kind)
"""The kinds by their codes."""
_COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.OVERLAP_F_B})
_P2P = frozenset({Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B})
_WITHOUT_MICROBATCH = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD})

for _code, _kind in enumerate(KINDS):
    _kind.code = _code
    _kind.is_compute = _kind in _COMPUTE


class Phase(StrEnum):
    """The phase of an action (Megatron's terms); ``code`` stands for it in columns: its index among the phases."""

    code: int
    __hash__ = str.__hash__

    WARMUP = "warmup"
    STEADY = "steady"
    COOLDOWN = "cooldown"


for _code, _phase in enumerate(Phase):
    _phase.code = _code


Key = tuple[Kind, int, int | None]
"""(kind, stage, microbatch): unique within a plan."""


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a plan.

    ``chunk`` is the position of ``stage`` among the stages of its rank (Megatron's model chunk). ``phase`` is the builder's
    tag; a send or receive has that of the compute action it serves. ``parts`` holds the two halves of an OVERLAP_F_B, whose
    ``stage`` and ``microbatch`` are those of the forward half.
    """

    kind: Kind
    stage: int
    microbatch: int | None
    chunk: int = 0
    phase: Phase = Phase.STEADY
    parts: tuple[Action, ...] = ()

    def __init__(
        self,
        kind: Kind,
        stage: int,
        microbatch: int | None,
        chunk: int = 0,
        phase: Phase = Phase.STEADY,
        parts: tuple[Action, ...] = (),
    ) -> None:
        # As a frozen dataclass does it, without six look-ups by name: large plans have half a million actions.
        _set_kind(self, kind)
        _set_stage(self, stage)
        _set_microbatch(self, microbatch)
        _set_chunk(self, chunk)
        _set_phase(self, phase)
        _set_parts(self, parts)

    @property
    def key(self) -> Key:
        return (self.kind, self.stage, self.microbatch)

    @property
    def halves(self) -> tuple[Action, ...]:
        """The simple actions of this one: its parts, or itself."""
        return self.parts or (self,)

    def later(self, microbatches: int) -> Action:
        """The same of a microbatch that comes so many after this one's."""
        if not microbatches:
            return self
        parts = tuple(part.later(microbatches) for part in self.parts)
        return replace(
            self, microbatch=None if self.microbatch is None else self.microbatch + microbatches, parts=parts
        )

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


_set_kind, _set_stage, _set_microbatch, _set_chunk, _set_phase, _set_parts = (
    Action.__dict__[field.name].__set__ for field in fields(Action)
)


_SIMPLE = re.compile(r"(\d{1,9})(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD|F|B|I|W)(\d{0,9})", re.ASCII)
_OVERLAP = re.compile(r"\(([^();]*);([^();]*)\)OVERLAP_F_B", re.ASCII)

_MOST_QUOTED = 40
"""Characters of a text that is no action which an error quotes."""


def parse_action(text: str) -> Action:
    """Read one action; the whole text must match, so ``1F0xyz`` is an error.

    Raises:
        ScheduleError: the text is not an action.
    """
    if match := _SIMPLE.fullmatch(text):
        kind = Kind(match[2])
        if bool(match[3]) == (kind in _WITHOUT_MICROBATCH):
            problem = (
                f"takes no microbatch, such as '0{kind}'" if match[3] else f"needs a microbatch, such as '0{kind}0'"
            )
            raise ScheduleError(f"{text!r} is not an action: {kind} {problem}")
        return Action(kind, int(match[1]), int(match[3]) if match[3] else None)
    if match := _OVERLAP.fullmatch(text):
        parts = (parse_action(match[1].strip()), parse_action(match[2].strip()))
        if parts[0].kind is not Kind.F or parts[1].kind not in (Kind.B, Kind.I):
            raise ScheduleError(f"{text!r} is not an action: OVERLAP_F_B takes a forward and then a backward")
        return Action(Kind.OVERLAP_F_B, parts[0].stage, parts[0].microbatch, parts=parts)
    quoted = repr(text if len(text) <= _MOST_QUOTED else f"{text[:_MOST_QUOTED]}…")
    raise ScheduleError(f"{quoted} is not an action; expected stage, kind, microbatch, such as '2F0' or '3SEND_B1'")


def iter_halves(actions: tuple[Action, ...]) -> Iterator[Action]:
    """Every simple action, overlapped pairs taken apart."""
    for action in actions:
        yield from action.halves


class Cell(NamedTuple):
    """One microbatch in one stage."""

    stage: int
    microbatch: int


def cell_of(action: Action) -> Cell:
    """The cell of an action on one microbatch.

    Raises:
        ScheduleError: it has none.
    """
    if action.microbatch is None:
        raise ScheduleError(f"{action} needs a microbatch")
    return Cell(action.stage, action.microbatch)
