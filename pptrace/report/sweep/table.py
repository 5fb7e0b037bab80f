"""A sweep for the terminal: bubbles as a table, and what was refused."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from pptrace.model import units
from pptrace.model.report_table import ReportTable
from pptrace.model.wording import counted
from pptrace.report.sweep.layout import COSTS, Axis, M, N, P, cost_axes, row_name, varying
from pptrace.report.text_table import Stripped, render_table
from pptrace.simulator.sweep.grid import CostsOf
from pptrace.simulator.sweep.run import Sweep, SweptPoint

_MOST_COLUMNS = 10
_MOST_ROWS = 40
_MOST_REASONS = 6
_MOST_SIZES = 4
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
    return [_best(sweep, pp) for pp in numbers] if len(numbers) <= _MOST_SIZES else []


def _best(sweep: Sweep, pp: int) -> str:
    of_pp = [(swept, swept.step) for swept in sweep.simulated if swept.step and swept.point.pp == pp]
    swept, step = min(of_pp, key=lambda found: (found[1].bubble_ratio, found[1].peak_activations))
    return (
        f"p={pp}: smallest bubble {units.ratio(step.bubble_ratio)} ({units.percent(step.bubble_share)} of the step), "
        f"{row_name(swept)}, m={swept.point.num_microbatches}, which holds {step.peak_activations:g}"
    )


def costs_line(sweep: Sweep) -> str:
    """Costs of the sweep, and what they are of."""
    several = cost_axes(sweep)
    texts = [f"{axis.name.removesuffix(' ms')} {_cost(axis, sweep)}" for axis in COSTS if axis not in several]
    texts += [f"{axis.name.removesuffix(' ms')} as below" for axis in several]
    return f"costs {_COSTS_OF[sweep.grid.costs_of]}: {', '.join(texts)}"


def _cost(axis: Axis, sweep: Sweep) -> str:
    values = {axis.text(swept) for swept in sweep.points}
    return f"{values.pop()} ms" if len(values) == 1 else "half of B"


_COSTS_OF = {
    CostsOf.RANK: "of one microbatch in all layers of a rank, divided over its chunks",
    CostsOf.MODEL: "of one microbatch in the whole model, divided over its stages",
    CostsOf.ACTION: "of one action",
}


def sweep_tables(sweep: Sweep, every_row: bool = False) -> list[ReportTable]:
    """Bubble ratios: a row for each schedule and what else varies, a column for each value of the longest axis."""
    if not sweep.simulated:
        return []
    columns = _column_axis(sweep)
    others = [axis for axis in (P, *cost_axes(sweep), N, M) if axis in _varying(sweep) and axis is not columns]
    values = sorted({columns.value(swept) for swept in sweep.points})
    shown = values if every_row else _evenly(values, _MOST_COLUMNS)
    texts = {columns.value(swept): columns.label(swept) for swept in sweep.points}
    rows = _rows(sweep, columns, others, shown)
    kept = rows if every_row else rows[:_MOST_ROWS]
    notes = []
    if len(shown) < len(values):
        notes.append(f"{len(shown)} of {len(values)} values of {columns.name}: --csv and --html have all")
    if len(kept) < len(rows):
        notes.append(f"… {len(rows) - len(kept)} more rows: --csv and --html have all")
    heads = ("schedule", "v", *(axis.name for axis in others), "holds", *(texts[value] for value in shown))
    notes.append(_LEGEND)
    return [ReportTable("sweep", "Bubble ratio", heads, tuple(kept), tuple(notes), num_labels=2 + len(others))]


def _varying(sweep: Sweep) -> list[Axis]:
    return [*varying(sweep, (P, N, M)), *cost_axes(sweep)]


def _column_axis(sweep: Sweep) -> Axis:
    """The axis with most values; m where there is none."""
    axes = [M, P, *cost_axes(sweep)]
    return max(axes, key=lambda axis: len({axis.value(swept) for swept in sweep.points}))


def _rows(sweep: Sweep, columns: Axis, others: Sequence[Axis], shown: Sequence[object]) -> list[tuple[str, ...]]:
    """A row for each schedule, number of chunks and value of the other axes of which something was simulated."""
    groups: dict[tuple[object, ...], list[SweptPoint]] = {}
    for swept in sweep.points:
        groups.setdefault((*(axis.value(swept) for axis in others), row_name(swept)), []).append(swept)
    kept = [members for members in groups.values() if any(swept.step for swept in members)]
    schedules = {name: number for number, name in enumerate(sweep.grid.schedules)}
    kept.sort(
        key=lambda members: (
            *(_sortable(axis.value(members[0])) for axis in others),
            schedules[members[0].point.schedule],
            members[0].num_chunks,
        )
    )
    return [_row(members, columns, others, shown) for members in kept]


def _sortable(value: object) -> tuple[bool, object]:
    return (value is not None, value)


def _row(
    members: Sequence[SweptPoint], columns: Axis, others: Sequence[Axis], shown: Sequence[object]
) -> tuple[str, ...]:
    first = members[0]
    steps = {columns.value(swept): swept.step for swept in members}
    ratios = [steps.get(value) for value in shown]
    holds = max(swept.step.peak_activations for swept in members if swept.step)
    return (
        first.point.schedule,
        str(first.num_chunks),
        *(axis.text(first) for axis in others),
        f"{holds:g}",
        *(units.ratio(None if step is None else step.bubble_ratio) for step in ratios),
    )


def _evenly(values: Sequence[object], most: int) -> list[object]:
    """At most so many of the values, the first and the last among them, at even distances."""
    if len(values) <= most:
        return list(values)
    return [values[index * (len(values) - 1) // (most - 1)] for index in range(most)]


def refused_lines(sweep: Sweep) -> list[str]:
    """Each reason for which combinations were refused, with how many and an example; numbers apart, reasons are one."""
    groups: dict[str, list[SweptPoint]] = {}
    for swept in sweep.refused:
        groups.setdefault(re.sub(r"\d+", "#", swept.refused), []).append(swept)
    ordered = sorted(groups.values(), key=len, reverse=True)
    lines = [
        f"refused: {len(members)} of {_sizes(members)}, such as {members[0].refused}"
        for members in ordered[:_MOST_REASONS]
    ]
    left_out = len(ordered) - len(lines)
    return lines + ([f"… {counted(left_out, 'more reason')}: --csv and --json have all"] if left_out else [])


def _sizes(members: Sequence[SweptPoint]) -> str:
    """The values of p, m and v among points: ``p=4,8 m=8…64 v=2``."""
    numbers = {
        "p": {swept.point.pp for swept in members},
        "m": {swept.point.num_microbatches for swept in members},
        "v": {swept.num_chunks for swept in members},
    }
    return " ".join(f"{name}={_few(sorted(values))}" for name, values in numbers.items())


def _few(values: Sequence[int]) -> str:
    return ",".join(map(str, values)) if len(values) <= _MOST_SIZES else f"{values[0]}…{values[-1]}"
