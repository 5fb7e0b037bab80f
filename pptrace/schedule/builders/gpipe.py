"""GPipe: all forwards, then all backwards (also called all-forward-all-backward, FthenB).

Source: Huang et al., GPipe (arXiv 1811.06965); torch.distributed.pipelining.ScheduleGPipe.
"""

from __future__ import annotations

from pptrace.schedule.actions import Action, Kind, Phase
from pptrace.schedule.plan import Plan, make_plan
from pptrace.schedule.shape import Shape, require_one_chunk

NAME = "gpipe"


def build(shape: Shape) -> Plan:
    """m forwards, then m backwards on every rank. The forwards are the warmup, the backwards the cooldown."""
    require_one_chunk(NAME, shape)
    microbatches = range(shape.num_microbatches)
    rows = (
        [Action(Kind.F, rank, mb, phase=Phase.WARMUP) for mb in microbatches]
        + [Action(Kind.B, rank, mb, phase=Phase.COOLDOWN) for mb in microbatches]
        for rank in range(shape.pp)
    )
    return make_plan(NAME, rows)
