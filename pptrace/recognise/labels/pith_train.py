"""mlc-ai/pith-train (``pithtrain/dualpipe/dualpipev.py``): DualPipeV, whose two phases are the two chunks of a V.

    forward chunk {i} (phase{c}) [backward chunk {j} (phase{d})]     both: one overlapped pair
    backward chunk {j} (phase{d})
    weight chunk                                                     the oldest weight gradient that has not run

Microbatches are counted per phase.
"""

from __future__ import annotations

from pptrace.recognise.labels.label import Label, LabelledAction, fixed, rule
from pptrace.schedule.actions import Kind

PITH_TRAIN = "pith-train"
_HALF = r"{} chunk (\d{{1,9}}) \(phase([01])\)"
_FORWARD, _BACKWARD = _HALF.format("forward"), _HALF.format("backward")


def _half(kind: Kind, microbatch: str, phase: str) -> LabelledAction:
    return LabelledAction(kind, microbatch=int(microbatch), chunk=int(phase))


RULES = (
    rule(_FORWARD, lambda m: Label(PITH_TRAIN, (_half(Kind.F, m[1], m[2]),))),
    rule(_BACKWARD, lambda m: Label(PITH_TRAIN, (_half(Kind.B, m[1], m[2]),))),
    rule(
        f"{_FORWARD} {_BACKWARD}",
        lambda m: Label(PITH_TRAIN, (LabelledAction.pair(_half(Kind.F, m[1], m[2]), _half(Kind.B, m[3], m[4])),)),
    ),
    fixed(r"weight chunk", Label(PITH_TRAIN, (LabelledAction(Kind.W),))),
)
