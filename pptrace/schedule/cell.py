"""Cells of a pipeline."""

from __future__ import annotations

from typing import NamedTuple

from pptrace.errors import ScheduleError
from pptrace.schedule.actions import Action


class Cell(NamedTuple):
    """One microbatch in one stage."""

    stage: int
    microbatch: int


def cell_of(action: Action) -> Cell:
    """The cell of an action on one microbatch.

    Raises:
        ScheduleError: it has none.
    """
    if action.microbatch is None:
        raise ScheduleError(f"{action} needs a microbatch")
    return Cell(action.stage, action.microbatch)
