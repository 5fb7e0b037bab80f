"""Hand-made plans for tests of the runtime: rows of cells, one per rank. They are legal, not good."""

from __future__ import annotations

from collections.abc import Sequence

from pptrace.schedule.actions import Kind
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build

Rows = tuple[str, ...]


def split_rows(plan: Plan, delay: int) -> Rows:
    """A plan with every B as I, and W ``delay`` backwards later."""
    rows = []
    for row in plan.ranks:
        cells: list[str] = []
        waiting: list[str] = []
        for action in row:
            if action.kind is not Kind.B:
                cells.append(str(action))
                continue
            cells.append(f"{action.stage}I{action.microbatch}")
            waiting.append(f"{action.stage}W{action.microbatch}")
            if len(waiting) > delay:
                cells.append(waiting.pop(0))
        rows.append(" ".join(cells + waiting))
    return tuple(rows)


def split_1f1b(pp: int, microbatches: int, delay: int) -> Rows:
    return split_rows(build("1f1b", pp, microbatches, 1), delay)


def mixed_1f1b(pp: int, microbatches: int) -> Rows:
    """1F1B with odd microbatches split and even ones whole."""
    rows = []
    for row in build("1f1b", pp, microbatches, 1).ranks:
        cells = []
        for action in row:
            split = action.kind is Kind.B and action.microbatch is not None and action.microbatch % 2
            index = f"{action.stage}{{}}{action.microbatch}"
            cells += [index.format("I"), index.format("W")] if split else [str(action)]
        rows.append(" ".join(cells))
    return tuple(rows)


def v_shaped(pp: int, microbatches: int, backward: Sequence[str] = ("B",)) -> Rows:
    """Two chunks on a V (stage k and 2p−1−k on rank k): all forwards, then all backwards, stage by stage."""
    rows = []
    for rank in range(pp):
        down, up = rank, 2 * pp - 1 - rank
        cells = [f"{stage}F{mb}" for stage in (down, up) for mb in range(microbatches)]
        cells += [f"{stage}{kind}{mb}" for stage in (up, down) for mb in range(microbatches) for kind in backward]
        rows.append(" ".join(cells))
    return tuple(rows)


def overlapped(pp: int, microbatches: int, backward: str = "B") -> Rows:
    """1F1B whose backward and the forward after it are one op; with ``backward`` I, W follows each op."""
    rows = []
    for row in build("1f1b", pp, microbatches, 1).ranks:
        cells: list[str] = []
        index = 0
        while index < len(row):
            action = row[index]
            if action.kind is Kind.F:
                cells.append(str(action))
                index += 1
                continue
            half = f"{action.stage}{backward}{action.microbatch}"
            has_pair = index + 1 < len(row) and row[index + 1].kind is Kind.F
            cells.append(f"({row[index + 1]};{half})OVERLAP_F_B" if has_pair else half)
            if backward == "I":
                cells.append(f"{action.stage}W{action.microbatch}")
            index += 1 + has_pair
        rows.append(" ".join(cells))
    return tuple(rows)
