"""What the ranges of other frameworks say about themselves: one file per framework, in it one rule per form of a name.

A rule reads a whole name. What comes first in :data:`_RULES` is asked first; a name in no catalogue says nothing.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import chain

from pptrace.recognise.labels import (
    common,
    deepseek,
    deepspeed,
    megatron,
    megatron_otel,
    nanotron,
    pith_train,
    pptrace_marks,
    torch_pipelining,
    user_marks,
    vescale,
    zero_bubble,
)
from pptrace.recognise.labels.label import Label, placeholder_stage

__all__ = ["Label", "placeholder_stage", "read_label"]

_EMIT_NVTX = re.compile(r", (?:seq = -?\d+|op_id = \d+|sizes = \[.*|input_op_ids = \[.*)")
"""What ``emit_nvtx`` adds to every name."""
_RULES = tuple(
    chain(
        pptrace_marks.RULES,
        user_marks.RULES,
        torch_pipelining.RULES,
        zero_bubble.RULES,
        pith_train.RULES,
        deepseek.RULES,
        deepspeed.RULES,
        nanotron.RULES,
        vescale.RULES,
        megatron.RULES,
        megatron_otel.RULES,
        common.RULES,
    )
)
_LONGEST = 2000
"""Characters of the longest name that is asked about; fused messages of many chunks are a few hundred."""


def read_label(name: str) -> Label | None:
    """What a range's name says; None when it is in no catalogue."""
    return _read(_EMIT_NVTX.split(name[:_LONGEST], maxsplit=1)[0])


@lru_cache(maxsize=1 << 14)
def _read(own: str) -> Label | None:
    """What a name says without its suffix: these are few, however many ranges have a suffix of their own."""
    for pattern, read in _RULES:
        if match := pattern.fullmatch(own):
            return read(match)
    return None
