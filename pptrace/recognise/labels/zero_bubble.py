"""sail-sg/zero-bubble-pipeline-parallelism (``megatron/core/pipeline_parallel/zerobubble/runtime.py``, 39f2c186), with --profile.

    op        = ("F" | "B" | "W" | "R") id            R recomputes a forward: part of the backward after it
    flush     = "W_clear." chunk "." split            every W of the chunk that has not run yet
    messages  = message { "_" message }               posted as one batch
    message   = ("SEND" | "RECV") "_" ("FORWARD" | "BACKWARD") "." id
    id        = microbatch "." chunk "." split        split: part of a sequence, 0 without sequence splits
    step      = "iter_" rank "_" number               ops before post-validation lie before it

A send names the chunk that made it, a receive the chunk that reads it. "B" is the gradient of the input where the trace has W,
else the whole backward. "F" and "B" alone are the functions around them (``schedules.py``), which carry no ids.
"""

from __future__ import annotations

import re

from pptrace.recognise.labels.label import Label, LabelledAction, fixed, rule
from pptrace.schedule.actions import Kind

ZERO_BUBBLE = "zero-bubble"
_ID = r"(\d{1,9})\.(\d{1,3})\.(\d{1,4})"
_MESSAGE = rf"(?:SEND|RECV)_(?:FORWARD|BACKWARD)\.{_ID}"
_ONE = re.compile(rf"(SEND|RECV)_(FORWARD|BACKWARD)\.{_ID}", re.ASCII)


def _op(match: re.Match[str]) -> Label:
    action = LabelledAction(Kind(match[1]), microbatch=int(match[2]), chunk=int(match[3]))
    return Label(ZERO_BUBBLE, (action,), sequence=int(match[4]))


def _messages(match: re.Match[str]) -> Label:
    messages = _ONE.findall(match[0])
    actions = [
        LabelledAction(Kind(f"{way}_{direction[0]}"), microbatch=int(microbatch), chunk=int(chunk))
        for way, direction, microbatch, chunk, _ in messages
    ]
    return Label(ZERO_BUBBLE, tuple(actions), sequence=int(messages[0][-1]))


def _flush(match: re.Match[str]) -> Label:
    return Label(
        ZERO_BUBBLE,
        (LabelledAction(Kind.W, chunk=int(match[1])),),
        flushes_weight_grads=True,
        sequence=int(match[2]),
    )


RULES = (
    rule(rf"([FBW]){_ID}", _op),
    rule(rf"{_MESSAGE}(?:_{_MESSAGE})*", _messages),
    rule(r"W_clear\.(\d{1,3})\.(\d{1,4})", _flush),
    rule(
        r"iter_\d+_(?P<step>\d{1,9})",
        lambda m: Label(ZERO_BUBBLE, span="STEP", step=int(m["step"]), may_start_before_range=True),
    ),
    fixed(r"Optimizer", Label("", span="OPTIMIZER")),
    fixed(r"F|forward_step_func", Label(ZERO_BUBBLE, (LabelledAction(Kind.F),))),
    fixed(r"B|backward_step_func", Label(ZERO_BUBBLE, (LabelledAction(Kind.B),))),
)
