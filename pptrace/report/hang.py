"""A hang as a table and as a graph: who waits in which call for whom. Takes the JSON field ``hang``.

The verdict on a run that hung, as text and as JSON, ``pptrace.hang/1``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import Any

from pptrace.hang_diagnosis.calls import lines, rank_text
from pptrace.model.units import text
from pptrace.report.colours import FONT, IDEAL, PART_COLOURS
from pptrace.workflow.find_hang import HangResult

EDGE_COLUMNS = ("who waits", "in", "of group", "number", "for")

_MOST_ROWS = 60
_MOST_NODES = 16
_CIRCLE = 120
_GAP = 21
"""From the middle of a rank to its arrows, px."""
_HEAD = 10
"""Length and width of the head of an arrow, px."""
_LINE = "var(--soft, #626b78)"


def edge_rows(hang: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The cells below :data:`EDGE_COLUMNS`: one row for all ranks that wait in one call, most ranks first."""
    ranks_by_call: dict[tuple[Any, ...], list[int]] = {}
    for edge in hang["edges"]:
        key = (edge["call"], edge["group"], edge["seq"], tuple(edge["waits_for"]))
        ranks_by_call.setdefault(key, []).append(edge["rank"])
    ordered = sorted(ranks_by_call.items(), key=lambda item: -len(item[1]))
    rows: list[tuple[str, ...]] = [
        (rank_text(ranks), *map(text, (call, group, seq)), rank_text(others) if others else "–")
        for (call, group, seq, others), ranks in ordered[:_MOST_ROWS]
    ]
    left = len(ordered) - len(rows)
    return [*rows, (f"{left} more", "", "", "", "")] if left else rows


def wait_graph(hang: Mapping[str, Any]) -> str | None:
    """Ranks on a circle with an arrow from each to those it waits for, the guilty ones red, as SVG in the colours of the page.

    None for too many ranks.
    """
    arrows = {(edge["rank"], other) for edge in hang["edges"] for other in edge["waits_for"] if other != edge["rank"]}
    ranks = sorted({rank for arrow in arrows for rank in arrow} | set(hang["ranks"]))
    if not arrows or len(ranks) > _MOST_NODES:
        return None
    turn = 2 * math.pi / len(ranks)
    place = {
        rank: (_CIRCLE * math.sin(turn * index), -_CIRCLE * math.cos(turn * index)) for index, rank in enumerate(ranks)
    }
    drawn = [_arrow(waiting, other, place[waiting], place[other]) for waiting, other in sorted(arrows)]
    drawn += [_node(rank, place[rank], is_guilty=rank in hang["ranks"]) for rank in ranks]
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="-150 -150 300 300" role="img" aria-label="who waits for whom" '
        f'font-family="{FONT}" font-size="14">{"".join(drawn)}</svg>'
    )


def _arrow(waiting: int, other: int, start: tuple[float, float], end: tuple[float, float]) -> str:
    """An arrow between two ranks, that leaves room for both."""
    length = math.dist(start, end)
    along = ((end[0] - start[0]) / length, (end[1] - start[1]) / length)

    def point(distance: float, aside: float = 0) -> str:
        x, y = (start[axis] + distance * along[axis] for axis in (0, 1))
        return f"{x - aside * along[1]:.1f} {y + aside * along[0]:.1f}"

    tip, base = length - _GAP, length - _GAP - _HEAD
    line = f'<path d="M{point(_GAP)}L{point(base)}" stroke="{_LINE}" stroke-width="1.5"/>'
    head = f'<path d="M{point(tip)}L{point(base, _HEAD / 2)}L{point(base, -_HEAD / 2)}z" fill="{_LINE}"/>'
    return f"<g><title>{escape(f'rank {waiting} waits for rank {other}')}</title>{line}{head}</g>"


def _node(rank: int, place: tuple[float, float], *, is_guilty: bool) -> str:
    x, y = (f"{at:.1f}" for at in place)
    ring = 'stroke="var(--text, #1c2128)" stroke-width="3"' if is_guilty else f'stroke="{_LINE}"'
    circle = f'<circle cx="{x}" cy="{y}" r="17" fill="{IDEAL if is_guilty else PART_COLOURS["host"]}" {ring}/>'
    text = f'<text x="{x}" y="{y}" dy="5" text-anchor="middle" fill="#ffffff">{escape(str(rank))}</text>'
    return f"<g><title>{escape(f'rank {rank}: ' + ('to blame' if is_guilty else 'waits'))}</title>{circle}{text}</g>"


HANG_SCHEMA = "pptrace.hang/1"


def hang_text(report: HangResult) -> str:
    """The verdict in one sentence, and lines of who waits in which call."""
    if report.hang is None:
        read = set(report.ranks) - set(report.unreadable)
        unread = f"; no dump of {rank_text(report.unreadable)} can be read" if report.unreadable else ""
        return f"no hang found: {report.reason}" + (f" (read {rank_text(read)}{unread})" if read else "")
    return "\n".join([str(report.hang["detail"]), *(f"  {line}" for line in lines(report.hang))])


def hang_object(report: HangResult) -> dict[str, Any]:
    """The verdict as a JSON object."""
    return {
        "schema": HANG_SCHEMA,
        "hang": report.hang,
        "reason": report.reason or None,
        "ranks": list(report.ranks),
        "warnings": list(report.warnings),
    }
