"""A builder of a rank's actions, for schedules that are rules such as "next forward of this stage"."""

from __future__ import annotations

from collections import Counter, deque

from pptrace.schedule.actions import Action, Kind, Phase


class Row:
    """Appends actions; microbatches of each stage come in order, forwards and backwards counted separately.

    ``chunk_of`` maps the rank's stages to their chunks. ``phase`` is the tag of the actions appended next. ``first`` maps a stage
    to its first microbatch where that is not 0 (DualPipe feeds half of them from each end).
    """

    def __init__(self, chunk_of: dict[int, int], first: dict[int, int] | None = None) -> None:
        self.actions: list[Action] = []
        self.phase = Phase.WARMUP
        self._chunk_of = chunk_of
        self._forwards: Counter[int] = Counter(first or {})
        self._backwards: Counter[int] = Counter(first or {})
        self._pending_weight_grads: deque[Action] = deque()

    def forward(self, stage: int) -> None:
        self.actions.append(self._next(Kind.F, stage))

    def backward(self, stage: int) -> None:
        """Append a full backward."""
        self.actions.append(self._next(Kind.B, stage))

    def input_grad(self, stage: int) -> None:
        """Append an I; its W is pending."""
        action = self._next(Kind.I, stage)
        self.actions.append(action)
        self._pending_weight_grads.append(action)

    def weight_grad(self, stage: int | None = None) -> None:
        """Append the W (of ``stage``) that has been pending for longest; nothing if none is."""
        for index, pending in enumerate(self._pending_weight_grads):
            if stage is None or pending.stage == stage:
                del self._pending_weight_grads[index]
                self.actions.append(Action(Kind.W, pending.stage, pending.microbatch, pending.chunk, self.phase))
                return

    def overlapped(self, forward_stage: int, backward_stage: int) -> None:
        """Append a forward and a full backward as one action."""
        parts = (self._next(Kind.F, forward_stage), self._next(Kind.B, backward_stage))
        first = parts[0]
        self.actions.append(Action(Kind.OVERLAP_F_B, first.stage, first.microbatch, first.chunk, self.phase, parts))

    def _next(self, kind: Kind, stage: int) -> Action:
        counts = self._forwards if kind is Kind.F else self._backwards
        microbatch = counts[stage]
        counts[stage] += 1
        return Action(kind, stage, microbatch, self._chunk_of[stage], self.phase)
