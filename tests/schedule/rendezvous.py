"""A machine that runs lowered plans with blocking messages, as slowly and plainly as can be.

It knows cells of text only, so it shares no code with the package under test.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_CELL = re.compile(r"(\d+)(SEND|RECV)_([FB])(\d+)")


class StuckError(Exception):
    """No rank can go on."""


def _message(cell: str) -> tuple[str, int, int] | None:
    """(direction, sending stage, microbatch) of a transfer: the same at both ends."""
    match = _CELL.fullmatch(cell)
    if match is None:
        return None
    stage, way, direction, mb = int(match[1]), match[2], match[3], int(match[4])
    if way == "RECV":
        stage += -1 if direction == "F" else 1
    return (direction, stage, mb)


def run(rows: Sequence[Sequence[str]], one_at_a_time: bool) -> int:
    """Run to the end; a send ends when its receive is posted too, and the other way round. Returns the number of messages.

    Args:
        rows: the cells of each rank.
        one_at_a_time: each transfer is a blocking call of its own; otherwise neighbouring transfers are posted together.

    Raises:
        StuckError: a deadlock, with what each rank is stuck in.
    """
    queues = [_calls(row, one_at_a_time) for row in rows]
    num_messages = 0
    while any(queues):
        heads = [queue[0] if queue else [] for queue in queues]
        posted = [message for head in heads for cell in head if (message := _message(cell))]
        progressed = False
        for queue, head in zip(queues, heads, strict=True):
            if not head:
                continue
            rest = [cell for cell in head if (message := _message(cell)) and posted.count(message) < 2]
            num_messages += sum(_message(cell) is not None for cell in head) - len(rest)
            if len(rest) < len(head):
                progressed = True
                if rest:
                    queue[0] = rest
                else:
                    queue.pop(0)
        if not progressed:
            raise StuckError("; ".join(" ".join(head) or "done" for head in heads))
    return num_messages // 2


def _calls(row: Sequence[str], one_at_a_time: bool) -> list[list[str]]:
    calls: list[list[str]] = []
    for cell in row:
        joins = not one_at_a_time and calls and _message(cell) and _message(calls[-1][-1])
        if joins:
            calls[-1].append(cell)
        else:
            calls.append([cell])
    return calls
