"""What the ranges of other frameworks say about themselves: one row of the table per form of a name.

A name that says less than an op has (no stage, no microbatch) gives a label with −1 there, and order says the rest
(:mod:`pptrace.recognise.from_labels`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from pptrace.errors import ScheduleError
from pptrace.schedule.actions import Action, Kind, parse_action


@dataclass(frozen=True, slots=True)
class Label:
    """One range: of an op or a message (``action``), or of something else in a step (``span``, a kind of the ops table).

    ``action`` has stage −1 where the name tells none.
    """

    framework: str
    action: Action | None = None
    span: str = ""
    step: int = -1


TORCH = "torch.distributed.pipelining"
_EMIT_NVTX = re.compile(r", (?:seq = -?\d+|op_id = \d+|sizes = \[.*|input_op_ids = \[.*)")
"""What ``emit_nvtx`` adds to every name."""


def _torch_action(match: re.Match[str]) -> Label | None:
    """torch ≥ 2.10, every multi-stage schedule; 2.9 DualPipeV and plans from CSV."""
    try:
        action = parse_action(match["action"])
    except ScheduleError:
        return None
    if action.kind is Kind.REDUCE_GRAD:
        return Label(TORCH, span="GRAD_SYNC")
    return Label(TORCH, action) if action.kind.is_compute or action.kind.is_p2p else None


def _torch_microbatch(match: re.Match[str]) -> Label:
    """torch ≥ 2.3, ScheduleGPipe; the range holds the wait for its input as well."""
    return Label(TORCH, Action(Kind(match["kind"][0]), -1, int(match["microbatch"])))


_CATALOGUE: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Label | None]], ...] = (
    (re.compile(r"PP:(?P<action>[(\d].*)", re.ASCII), _torch_action),
    (re.compile(r"(?P<kind>Forward|Backward) (?P<microbatch>\d{1,9})", re.ASCII), _torch_microbatch),
    (re.compile(r"ProfilerStep#(?P<step>\d{1,9})", re.ASCII), lambda m: Label("", span="STEP", step=int(m["step"]))),
    (re.compile(r"Optimizer\.step#\w+\.step", re.ASCII), lambda _: Label("", span="OPTIMIZER")),
)


def read_label(name: str) -> Label | None:
    """What a range's name says; None when it is in no catalogue."""
    for pattern, read in _CATALOGUE:
        if match := pattern.fullmatch(_EMIT_NVTX.split(name, maxsplit=1)[0]):
            return read(match)
    return None
