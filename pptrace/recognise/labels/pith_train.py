"""mlc-ai/pith-train (``pithtrain/dualpipe/dualpipev.py``): DualPipeV, whose two phases are the two chunks of a V.

    forward chunk {i} (phase{c}) [backward chunk {j} (phase{d})]     both: one overlapped pair
    backward chunk {j} (phase{d})
    weight chunk                                                     the oldest weight gradient that has not run

Microbatches are counted per phase.
"""

from __future__ import annotations

import re

from pptrace.recognise.labels.label import Label, LabelledAction, fixed, rule
from pptrace.schedule.actions import Kind

PITH_TRAIN = "pith-train"
_HALF = r"{} chunk (\d{{1,9}}) \(phase([01])\)"
_FORWARD, _BACKWARD = _HALF.format("forward"), _HALF.format("backward")


def _half(kind: Kind, microbatch: str, phase: str) -> LabelledAction:
    return LabelledAction(kind, microbatch=int(microbatch), chunk=int(phase))


def _forward(match: re.Match[str]) -> Label:
    return Label(PITH_TRAIN, (_half(Kind.F, match[1], match[2]),))


def _backward(match: re.Match[str]) -> Label:
    return Label(PITH_TRAIN, (_half(Kind.B, match[1], match[2]),))


def _pair(match: re.Match[str]) -> Label:
    forward, backward = _half(Kind.F, match[1], match[2]), _half(Kind.B, match[3], match[4])
    return Label(PITH_TRAIN, (LabelledAction.pair(forward, backward),))


RULES = (
    rule(_FORWARD, _forward),
    rule(_BACKWARD, _backward),
    rule(f"{_FORWARD} {_BACKWARD}", _pair),
    fixed(r"weight chunk", Label(PITH_TRAIN, (LabelledAction(Kind.W),))),
)
