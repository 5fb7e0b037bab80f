"""pptrace's own spans in the traces of runtimes that it only watches: where steps and their optimizers begin and end.

pp1:STEP step=3, pp1:OPTIMIZER step=3
"""

from __future__ import annotations

from pptrace.recognise.catalogues.label import Label, rule

RULES = (
    rule(
        r"pp1:(?P<span>STEP|OPTIMIZER) step=(?P<step>\d{1,9})", lambda m: Label("", span=m["span"], step=int(m["step"]))
    ),
)
