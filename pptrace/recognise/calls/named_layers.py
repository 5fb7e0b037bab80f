"""Axes that the ranges around calls name: operators and annotations of layers that exchange tokens or heads.

    ep   FusedDispatch, FusedCombine, HybridEPDispatch, …        Megatron-LM ``fused_a2a.py``
         moe_dispatch forward, moe_combine backward, …           its overlapped schedule
         dispatch(F), combine(B), …                              DeepSeek's profiles
    cp   _SeqAllToAll, SeqAllToAll4D, …                          DeepSpeed-Ulysses ``sequence/layer.py``, USP ``all_to_all.py``

Autograd names a function's backward after its class, with ``Backward`` behind it. ``_AllToAll`` is left out: it is a layer of
experts in DeepSpeed, of sequences in others.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from pptrace.model.tables import Int64
from pptrace.model.traces import Category, Events
from pptrace.recognise.calls.thread_activity import are_within

_NAMES = {
    "ep": re.compile(
        r"(?:Fused|HybridEP)(?:Dispatch|Combine)(?:Backward)?|moe_(?:dispatch|combine) (?:forward|backward)"
        r"|(?:dispatch|combine)\([FB]\)"
    ),
    "cp": re.compile(r"_?SeqAllToAll\w*"),
}


def axes_of_ranges(events: Events, threads: Int64, times_ns: Int64) -> npt.NDArray[np.object_]:
    """The axis that a range around each call names; "" where none does."""
    axes = np.full(len(threads), "", dtype=object)
    for axis, pattern in _NAMES.items():
        named = np.array([bool(pattern.fullmatch(name)) for name in events.names], dtype=np.bool_)
        if not named.any():
            continue
        on_host = (events.category == Category.CPU_OP) | (events.category == Category.ANNOTATION)
        axes[are_within(events, np.flatnonzero(on_host & named[events.name_id]), threads, times_ns)] = axis
    return axes
