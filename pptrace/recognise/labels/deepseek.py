"""DeepSeek's published profiles (deepseek-ai/profile-data, ``train.json``): one overlapped forward and backward of DualPipe.

    1F1B                                    the pair; nothing says of which microbatches
    attn(F), mlp(B), dispatch(F), …         parts of it

DualPipe itself (deepseek-ai/DualPipe) writes no labels.
"""

from __future__ import annotations

from pptrace.recognise.labels.label import Label, LabelledAction, fixed
from pptrace.schedule.actions import Kind

DEEPSEEK = "deepseek"
_PAIR = LabelledAction.pair(LabelledAction(Kind.F), LabelledAction(Kind.B))
RULES = (
    fixed(r"1F1B", Label(DEEPSEEK, (_PAIR,))),
    fixed(r"(?:attn|mlp|dispatch|combine)\((?:F|B|W)\)", Label(DEEPSEEK)),
)
