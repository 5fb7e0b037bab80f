"""Labels that a script gives its own loop with ``pptrace.mark`` (instrument/launch/recording/user_marks.py writes it).

name = "pptrace.mark " kind [" stage=" n] [" microbatch=" n]
kind = "F" | "B" | "I" | "W"
"""

from __future__ import annotations

import re

from pptrace.recognise.labels.label import Label, LabelledAction, rule
from pptrace.schedule.actions import Kind


def _op(match: re.Match[str]) -> Label:
    stage = None if match["stage"] is None else int(match["stage"])
    microbatch = None if match["microbatch"] is None else int(match["microbatch"])
    return Label("pptrace.mark", (LabelledAction(Kind(match["kind"]), stage, microbatch),))


RULES = (
    rule(r"pptrace\.mark (?P<kind>[FBIW])(?: stage=(?P<stage>\d{1,6}))?(?: microbatch=(?P<microbatch>\d{1,9}))?", _op),
)
