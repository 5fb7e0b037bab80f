"""veScale's ndtimeline (``legacy/vescale/ndtimeline/predefined.py``).

Its ops and messages have the names of Megatron's timers; these are its own. ``model_chunk`` is always 0 there.
"""

from __future__ import annotations

from pptrace.recognise.labels.label import Label, fixed

VESCALE = "vescale"
RULES = (
    fixed(r"cross-mesh-(?:recv|send)|unshard-all-gather", Label(VESCALE)),
    fixed(r"grad-reduce-scatter|grad-all-reduce", Label(VESCALE, span="GRAD_SYNC")),
)
