"""Plans as a readable grid, one row per rank: in order of execution, or in time."""

from __future__ import annotations

from collections.abc import Collection
from itertools import zip_longest
from typing import TYPE_CHECKING

from pptrace.schedule.replay import replay

if TYPE_CHECKING:
    from pptrace.schedule.plan import Plan


def draw(plan: Plan, marked: Collection[tuple[int, int]] = ()) -> str:
    """The plan as a grid, one row per rank, in order of execution; ``marked`` (rank, index) cells get ``>…<``."""
    cells = [
        [f">{action}<" if (rank, index) in marked else str(action) for index, action in enumerate(row)]
        for rank, row in enumerate(plan.ranks)
    ]
    return grid(cells)


def draw_in_time(plan: Plan) -> str:
    """The plan on a grid of ticks, one tick per action, gaps left open; in order of execution where it has messages or blocks."""
    timeline = replay(plan) if not plan.has_comms else None
    if timeline is None or timeline.blocked:
        return draw(plan)
    cells = []
    for row in timeline.ranks:
        line = [""] * timeline.makespan
        for timed in row:
            line[timed.start] = str(timed.action)
        cells.append(line)
    return grid(cells)


def grid(cells: list[list[str]]) -> str:
    """Cells in columns, a row per rank, each line headed by its rank."""
    widths = [max(map(len, column)) for column in zip_longest(*cells, fillvalue="")]
    head = len(f"rank {len(cells) - 1}")
    lines = []
    for rank, row in enumerate(cells):
        body = " ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        lines.append(f"{f'rank {rank}'.ljust(head)} | {body}".rstrip())
    return "\n".join(lines)
