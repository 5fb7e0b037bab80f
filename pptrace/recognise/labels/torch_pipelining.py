"""torch.distributed.pipelining (torch 2.13, ``torch/distributed/pipelining/schedules.py``), and torchtitan, which runs it.

    PP:{action}                   every multi-stage schedule of torch ≥ 2.10; DualPipeV and plans from CSV of 2.9
    Forward {i}, Backward {i}     ScheduleGPipe of torch ≥ 2.3; the range holds the wait for its input as well

Schedule1F1B writes nothing.
"""

from __future__ import annotations

import re

from pptrace.errors import ScheduleError
from pptrace.recognise.labels.label import Label, LabelledAction, rule
from pptrace.schedule.actions import Kind, parse_action

TORCH = "torch.distributed.pipelining"


def _action(match: re.Match[str]) -> Label | None:
    try:
        action = parse_action(match["action"])
    except ScheduleError:
        return None
    if action.kind is Kind.REDUCE_GRAD:
        return Label(TORCH, span="GRAD_SYNC")
    return Label(TORCH, (LabelledAction.of(action),)) if action.kind.is_compute or action.kind.is_p2p else None


RULES = (
    rule(r"PP:(?P<action>[(\d].*)", _action),
    rule(
        r"(?P<kind>Forward|Backward) (?P<microbatch>\d{1,9})",
        lambda m: Label(TORCH, (LabelledAction(Kind(m["kind"][0]), microbatch=int(m["microbatch"])),)),
    ),
)
