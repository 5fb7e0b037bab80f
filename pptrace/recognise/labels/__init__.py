"""Labels of frameworks: one file per framework, in it one rule per form of a range's name.

A rule reads a whole name. What comes first in :data:`_RULES` is asked first; a name in no catalogue says nothing.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import chain

from pptrace.recognise.labels import (
    deepseek,
    deepspeed,
    label,
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
from pptrace.recognise.labels.label import Label, LabelledAction

__all__ = ["Label", "LabelledAction", "read_label"]

_EMIT_NVTX = re.compile(r", (?:seq = -?\d+|op_id = \d+|sizes = \[.*|input_op_ids = \[.*)")
"""Suffix that ``emit_nvtx`` adds to every name."""
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
        label.RULES,
    )
)
_LONGEST = 2000
"""Characters of a name that are read; fused messages of many chunks are a few hundred."""


def read_label(name: str) -> Label | None:
    """The label of a range's name; None where no rule matches."""
    return _read(_EMIT_NVTX.split(name[:_LONGEST], maxsplit=1)[0])


@lru_cache(maxsize=1 << 14)
def _read(name: str) -> Label | None:
    """The label of a name without suffix: these are few, even if every range has a suffix of its own."""
    for pattern, read in _RULES:
        if match := pattern.fullmatch(name):
            return read(match)
    return None
