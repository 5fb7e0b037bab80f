"""DeepSeek's published profiles (deepseek-ai/profile-data, ``train.json``): one overlapped forward and backward of DualPipe.

    1F1B                                    the pair; nothing says of which microbatches
    attn(F), mlp(B), dispatch(F), …         parts of it

DualPipe itself (deepseek-ai/DualPipe) writes no labels.
"""

from __future__ import annotations

from pptrace.recognise.labels.label import Label, fixed, in_order
from pptrace.schedule.actions import Action, Kind

DEEPSEEK = "deepseek"
_HALVES = (in_order(Kind.F), in_order(Kind.B))
RULES = (
    fixed(r"1F1B", Label(DEEPSEEK, (Action(Kind.OVERLAP_F_B, _HALVES[0].stage, None, parts=_HALVES),))),
    fixed(r"(?:attn|mlp|dispatch|combine)\((?:F|B|W)\)", Label(DEEPSEEK)),
)
