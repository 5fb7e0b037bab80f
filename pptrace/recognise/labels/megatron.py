"""Megatron-LM and what is built on it (NeMo): phases and messages with --nvtx-ranges, timers as ranges.

    megatron.core.pipeline_parallel.schedules.forward_backward_pipelining_with_interleaving.{phase}
    [megatron.core.pipeline_parallel.schedules.](forward_step|backward_step)
    megatron.core.pipeline_parallel.p2p_communication.[P2PCommunicator.]{function}
    forward-compute, backward-compute, forward-recv, forward-send-backward-recv, …

Sources: ``megatron/core/pipeline_parallel/{schedules,p2p_communication}.py`` and ``megatron/training/training.py``. None of
them has ids, so the k-th is that of microbatch k. The timers are host timers of Megatron and of veScale's ndtimeline; they are
in a trace where someone made ranges of them. ``layer_0f`` and ``moe_dispatch forward`` (overlapped experts) are parts of an op.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from pptrace.marks import P2P
from pptrace.recognise.labels.label import Label, LabelledAction, fixed, rule
from pptrace.schedule.actions import Kind, Phase

MEGATRON = "megatron-lm"
_P2P = r"megatron\.core\.pipeline_parallel\.p2p_communication\.(?:P2PCommunicator\.)?"
_SCHEDULES = r"megatron\.core\.pipeline_parallel\.schedules\."
_WORDS = {("send", "forward"): Kind.SEND_F, ("send", "backward"): Kind.SEND_B}
_WORDS |= {("recv", "forward"): Kind.RECV_F, ("recv", "backward"): Kind.RECV_B}


def messages_of_function(match: re.Match[str]) -> Label | None:
    """``send_forward_backward_recv_forward_backward`` → its four messages."""
    kinds: list[Kind] = []
    way = ""
    for word in match["words"].split("_"):
        if word in P2P:
            way = word
        elif (way, word) in _WORDS:
            kinds.append(_WORDS[way, word])
        else:
            return None
    return Label(MEGATRON, tuple(map(LabelledAction, kinds))) if kinds else None


def calls_wait(labels: Iterable[Label]) -> bool:
    """Return whether Megatron's functions of messages return when these have come.

    They do but in its interleaved schedule with --overlap-p2p-communication, which sends and receives forwards and backwards in
    calls of their own where it otherwise has one call for all four.
    """
    kinds = {frozenset(action.kind for action in label.actions) for label in labels if label.framework == MEGATRON}
    messages = {of_label for of_label in kinds if of_label and all(kind.is_p2p for kind in of_label)}
    return bool(messages) and (frozenset(_WORDS.values()) in messages or {Kind.SEND_F, Kind.RECV_F} not in messages)


def _timer(match: re.Match[str]) -> Label | None:
    """``forward-backward-send-forward-backward-recv`` → its four messages: directions stand before their way."""
    kinds: list[Kind] = []
    directions: list[str] = []
    for word in match[0].split("-"):
        if word in P2P:
            if not directions:
                return None
            kinds += [_WORDS[word, direction] for direction in directions]
            directions = []
        else:
            directions.append(word)
    return Label(MEGATRON, tuple(map(LabelledAction, kinds))) if kinds and not directions else None


def _phase(match: re.Match[str]) -> Label:
    return Label(MEGATRON, phase=next((phase for phase in Phase if phase == match["phase"]), None))


RULES = (
    rule(_P2P + r"(?P<words>(?:send|recv)\w+)", messages_of_function),
    rule(_SCHEDULES + r"forward_backward_\w+\.(?P<phase>\w+)", _phase),
    fixed(rf"(?:{_SCHEDULES})?forward_step", Label(MEGATRON, (LabelledAction(Kind.F),))),
    fixed(rf"(?:{_SCHEDULES})?backward_step", Label(MEGATRON, (LabelledAction(Kind.B),))),
    fixed(r"megatron\.core\.transformer\.\w+\.\w+\.\w+", Label(MEGATRON)),
    fixed(r"layer_\d+f(?:-layer_\d+b)?|layer_\d+b|moe_(?:dispatch|combine) (?:forward|backward)", Label(MEGATRON)),
    fixed(r"forward-compute", Label(MEGATRON, (LabelledAction(Kind.F),))),
    fixed(r"backward-compute", Label(MEGATRON, (LabelledAction(Kind.B),))),
    rule(r"(?:forward|backward)-(?:(?:forward|backward|send|recv)-?)+", _timer),
    fixed(r"all-grads-sync", Label(MEGATRON, span="GRAD_SYNC")),
    fixed(r"optimizer", Label("", span="OPTIMIZER")),
)
