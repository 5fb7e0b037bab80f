"""mlc-ai/pith-train (``pithtrain/dualpipe/dualpipev.py``): DualPipeV, whose two phases are the two chunks of a V.

    forward chunk {i} (phase{c}) [backward chunk {j} (phase{d})]     both: one overlapped pair
    backward chunk {j} (phase{d})
    weight chunk                                                     the oldest weight gradient that has not run

Microbatches are counted per phase.
"""

from __future__ import annotations

import re

from pptrace.recognise.labels.label import Label, fixed, in_order, placeholder_stage, rule
from pptrace.schedule.actions import Action, Kind

PITH_TRAIN = "pith-train"
_HALF = r"{} chunk (\d{{1,9}}) \(phase([01])\)"
_FORWARD, _BACKWARD = _HALF.format("forward"), _HALF.format("backward")


def _forward(match: re.Match[str]) -> Label:
    return Label(PITH_TRAIN, (Action(Kind.F, placeholder_stage(int(match[2])), int(match[1])),))


def _backward(match: re.Match[str]) -> Label:
    return Label(PITH_TRAIN, (Action(Kind.B, placeholder_stage(int(match[2])), int(match[1])),))


def _pair(match: re.Match[str]) -> Label:
    forward = Action(Kind.F, placeholder_stage(int(match[2])), int(match[1]))
    backward = Action(Kind.B, placeholder_stage(int(match[4])), int(match[3]))
    pair = Action(Kind.OVERLAP_F_B, forward.stage, forward.microbatch, parts=(forward, backward))
    return Label(PITH_TRAIN, (pair,))


RULES = (
    rule(_FORWARD, _forward),
    rule(_BACKWARD, _backward),
    rule(f"{_FORWARD} {_BACKWARD}", _pair),
    fixed(r"weight chunk", Label(PITH_TRAIN, (in_order(Kind.W),))),
)
