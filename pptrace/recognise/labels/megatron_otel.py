"""Megatron-LM's OpenTelemetry spans (``megatron/core/telemetry``, 2026), on the host alone.

    megatron.microbatch.{forward,backward}                        ops, the k-th of a step being that of microbatch k
    megatron.p2p.{recv,send}_{forward,backward}                   messages that are posted alone; combined ones have no span
    megatron.train.iteration, megatron.train_step                 a step, with its number
    megatron.train.iteration.forward_backward, …                  its forwards and backwards
    megatron.train.iteration.optimizer, megatron.optimizer_step
    megatron.grad_sync.{start,finish}
    megatron.evaluate, megatron.evaluate.step                     forwards inside are of no training step

Sources: ``megatron/core/pipeline_parallel/{schedules,p2p_communication}.py``, ``megatron/core/distributed/
distributed_data_parallel.py``, ``megatron/training/training.py`` at d98e8a6, ``docs/user-guide/observability/span-groups.md``.
``megatron.microbatch_id`` is documented but not set there. The reader writes attributes behind the name: ``name [iteration=3]``.
A stage without a neighbour on that side has a span of its message all the same, and nothing moves.
"""

from __future__ import annotations

import re

from msgspec.structs import replace

from pptrace.recognise.labels.label import EVALUATION, Label, LabelledAction, rule
from pptrace.recognise.labels.megatron import MEGATRON, messages_of_function
from pptrace.schedule.actions import Kind

_ATTRIBUTES = r"(?: \[(?P<attributes>[^\]]*)\])?"
_KINDS = {"forward": Kind.F, "backward": Kind.B}


def _number(match: re.Match[str], word: str) -> int | None:
    """A whole number among the attributes; None where it is not there."""
    for pair in (match["attributes"] or "").split(","):
        name, _, value = pair.partition("=")
        if name == word and value.isdecimal() and len(value) < 10:
            return int(value)
    return None


def _op(match: re.Match[str]) -> Label:
    chunk = _number(match, "chunk") or 0
    microbatch = _number(match, "microbatch")
    return Label(MEGATRON, (LabelledAction(_KINDS[match["kind"]], microbatch=microbatch, chunk=chunk),))


def _messages(match: re.Match[str]) -> Label | None:
    label = messages_of_function(match)
    return None if label is None else replace(label, adjacent=True)


RULES = (
    rule(rf"megatron\.microbatch\.(?P<kind>forward|backward){_ATTRIBUTES}", _op),
    rule(rf"megatron\.p2p\.(?P<words>(?:send|recv)_[a-z_]+){_ATTRIBUTES}", _messages),
    rule(
        rf"megatron\.(?:train\.iteration|train_step){_ATTRIBUTES}",
        lambda m: Label(MEGATRON, span="STEP", step=_number(m, "iteration")),
    ),
    rule(
        rf"megatron\.(?:train\.iteration\.)?forward_backward{_ATTRIBUTES}",
        lambda _: Label(MEGATRON, span="STEP", inferred=True),
    ),
    rule(
        rf"megatron\.(?:train\.iteration\.optimizer|optimizer_step){_ATTRIBUTES}",
        lambda _: Label(MEGATRON, span="OPTIMIZER"),
    ),
    rule(rf"megatron\.grad_sync\.(?:start|finish){_ATTRIBUTES}", lambda _: Label(MEGATRON, span="GRAD_SYNC")),
    rule(rf"megatron\.evaluate(?:\.step)?{_ATTRIBUTES}", lambda _: Label(MEGATRON, span=EVALUATION)),
)
