"""pptrace's own spans in the traces of runtimes that it only watches: where steps and optimizers begin and end, and evaluations.

pp1:STEP step=3, pp1:OPTIMIZER step=3, pp1:EVAL step=3
"""

from __future__ import annotations

import re

from pptrace.recognise.labels.label import EVALUATION, Label, rule


def _span(match: re.Match[str]) -> Label:
    span = EVALUATION if match["span"] == "EVAL" else match["span"]
    return Label("", span=span, step=int(match["step"]), marked=True)


RULES = (rule(r"pp1:(?P<span>STEP|OPTIMIZER|EVAL) step=(?P<step>\d{1,9})", _span),)
