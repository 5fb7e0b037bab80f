"""A sweep for the terminal: bubbles as a table, and what was refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.text import Text

from pptrace.model import units
from pptrace.model.report_table import ReportTable
from pptrace.model.wording import counted
from pptrace.report.sweep.layout import COSTS, Axis, M, N, P, cost_axes, row_name, varying
from pptrace.report.text_table import Stripped, render_table
from pptrace.simulator.sweep.run import CostsOf, Sweep, SweptPoint

T = TypeVar("T")
_MOST_COLUMNS = 10
_MOST_ROWS = 40
_MOST_REASONS = 6
_MOST_SIZES = 4
_COSTS_OF = {
    CostsOf.RANK: "of one microbatch in all layers of a rank, divided over its chunks",
    CostsOf.MODEL: "of one microbatch in the whole model, divided over its stages",
    CostsOf.ACTION: "of one action",
}
_LEGEND = "bubble / compute; holds: the most that a rank keeps, in activations of a microbatch in 1/p of the model; –: refused"


def sweep_text(sweep: Sweep, width: int) -> RenderableType:
    """The whole answer in at most ``width`` columns of text."""
    lines = [
        Text(sweep_headline(sweep), style="bold"),
        *map(Text, best_lines(sweep)),
        Text(costs_line(sweep), style="dim"),
    ]
    tables = [render_table(table, width) for table in sweep_tables(sweep)]
    refused = [Text(line, style="yellow") for line in refused_lines(sweep)]
    return Stripped(Group(*lines, *tables, *refused))


def sweep_headline(sweep: Sweep) -> str:
    """Number of combinations, and of those that no schedule has."""
    refused = f", {len(sweep.refused)} refused" if sweep.refused else ""
    return f"{counted(len(sweep.points), 'combination')}: {len(sweep.simulated)} simulated{refused}"


def best_lines(sweep: Sweep) -> list[str]:
    """The smallest bubble of each p, of few p's."""
    numbers = sorted({swept.point.pp for swept in sweep.simulated})
    lines = []
    for pp in numbers if len(numbers) <= _MOST_SIZES else ():
        of_pp = [(swept, swept.step) for swept in sweep.simulated if swept.step and swept.point.pp == pp]
        swept, step = min(of_pp, key=lambda found: (found[1].bubble_ratio, found[1].peak_activations))
        lines.append(
            f"p={pp}: smallest bubble {units.ratio(step.bubble_ratio)} ({units.percent(step.bubble_share)} of the step), "
            f"{row_name(swept)}, m={swept.point.num_microbatches}, which holds {step.peak_activations:g}"
        )
    return lines


def costs_line(sweep: Sweep) -> str:
    """Costs of the sweep, and what they are of."""
    several = cost_axes(sweep)
    texts = []
    for axis in (axis for axis in COSTS if axis not in several):
        values = {axis.text(swept) for swept in sweep.points}
        texts.append(f"{axis.name.removesuffix(' ms')} {f'{values.pop()} ms' if len(values) == 1 else 'half of B'}")
    texts += [f"{axis.name.removesuffix(' ms')} as below" for axis in several]
    return f"costs {_COSTS_OF[sweep.grid.costs_of]}: {', '.join(texts)}"


def sweep_tables(sweep: Sweep, every_row: bool = False) -> list[ReportTable]:
    """Bubble ratios: a row for each schedule and what else varies, a column for each value of the longest axis."""
    if not sweep.simulated:
        return []
    costs = cost_axes(sweep)
    longest = max([M, P, *costs], key=lambda axis: len({axis.value(swept) for swept in sweep.points}))
    several = [*varying(sweep, (P, N, M)), *costs]
    others = [axis for axis in (P, *costs, N, M) if axis in several and axis is not longest]
    texts = {longest.value(swept): longest.label(swept) for swept in sweep.points}
    values = sorted(texts)
    shown = values
    if not every_row and len(values) > _MOST_COLUMNS:  # the first and the last among them
        shown = [values[index * (len(values) - 1) // (_MOST_COLUMNS - 1)] for index in range(_MOST_COLUMNS)]
    rows = _rows(sweep, longest, others, shown)
    kept = rows if every_row else rows[:_MOST_ROWS]
    notes = []
    if len(shown) < len(values):
        notes.append(f"{len(shown)} of {len(values)} values of {longest.name}: --csv and --html have all")
    if len(kept) < len(rows):
        notes.append(f"… {len(rows) - len(kept)} more rows: --csv and --html have all")
    heads = ("schedule", "v", *(axis.name for axis in others), "holds", *(texts[value] for value in shown))
    notes.append(_LEGEND)
    return [ReportTable("sweep", "Bubble ratio", heads, tuple(kept), tuple(notes), num_labels=2 + len(others))]


def _rows(sweep: Sweep, columns: Axis, others: Sequence[Axis], shown: Sequence[object]) -> list[tuple[str, ...]]:
    """A row for each schedule, number of chunks and value of the other axes of which something was simulated."""
    groups: dict[tuple[object, ...], list[SweptPoint]] = {}
    for swept in sweep.points:
        groups.setdefault((*(axis.value(swept) for axis in others), row_name(swept)), []).append(swept)
    kept = [members for members in groups.values() if any(swept.step for swept in members)]
    schedules = {name: number for number, name in enumerate(sweep.grid.schedules)}
    kept.sort(
        key=lambda members: (
            *((value is not None, value) for value in (axis.value(members[0]) for axis in others)),
            schedules[members[0].point.schedule],
            members[0].num_chunks,
        )
    )
    rows = []
    for members in kept:
        first = members[0]
        steps = {columns.value(swept): swept.step for swept in members}
        ratios = [None if (step := steps.get(value)) is None else step.bubble_ratio for value in shown]
        holds = max(swept.step.peak_activations for swept in members if swept.step)
        of_others = (axis.text(first) for axis in others)
        rows.append((first.point.schedule, str(first.num_chunks), *of_others, f"{holds:g}", *map(units.ratio, ratios)))
    return rows


def refused_lines(sweep: Sweep) -> list[str]:
    """Each reason for which combinations were refused, with how many and an example; numbers apart, reasons are one."""
    ordered = by_reason(sweep.refused, lambda swept: swept.refused)
    lines = [
        f"refused: {len(members)} of {_sizes(members)}, such as {members[0].refused}"
        for members in ordered[:_MOST_REASONS]
    ]
    left_out = len(ordered) - len(lines)
    return lines + ([f"… {counted(left_out, 'more reason')}: --csv and --json have all"] if left_out else [])


def by_reason(items: Iterable[T], reason: Callable[[T], str]) -> list[list[T]]:
    """Groups of one reason each, numbers in it apart, the largest first."""
    groups: dict[str, list[T]] = {}
    for item in items:
        groups.setdefault(re.sub(r"\d+", "#", reason(item)), []).append(item)
    return sorted(groups.values(), key=len, reverse=True)


def _sizes(members: Sequence[SweptPoint]) -> str:
    """The values of p, m and v among points: ``p=4,8 m=8…64 v=2``."""
    numbers = {
        "p": {swept.point.pp for swept in members},
        "m": {swept.point.num_microbatches for swept in members},
        "v": {swept.num_chunks for swept in members},
    }
    texts = []
    for name, values in numbers.items():
        every = sorted(values)
        few = ",".join(map(str, every)) if len(every) <= _MOST_SIZES else f"{every[0]}…{every[-1]}"
        texts.append(f"{name}={few}")
    return " ".join(texts)
