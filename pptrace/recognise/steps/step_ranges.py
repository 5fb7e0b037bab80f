"""Steps from ranges that a script numbers itself, where nothing else marks them: ``iteration_3``, ``train_step 4``, ``Step#5``.

Their name alone does not tell, as a loop inside of a step may have such ranges. The numbers of steps rise by one throughout the
trace, their ranges follow each other and fill most of the time, and each holds an update and a backward, where any were recorded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
from msgspec.structs import replace

from pptrace.marks import PREFIX
from pptrace.model.device import Rows
from pptrace.model.traces import Category, Events
from pptrace.recognise.labels import read_label
from pptrace.recognise.ops.infer_from_operators import ENGINE

_NUMBERED = re.compile(
    r"((?:(?:train(?:ing)?|global)[ _-]?)?(?:step|iter(?:ation)?)[ _#:=-]*)(\d{1,9})", re.IGNORECASE | re.ASCII
)
_TRAINS = (re.compile(r"^Optimizer\.step#"), re.compile(f"^{ENGINE}"))


def with_step_ranges(events: Events) -> tuple[Events, str]:
    """The events with such ranges named as torch's profiler names steps, and the first and last name; "" where there are none."""
    numbers: dict[str, dict[int, int]] = {}
    for code, name in enumerate(events.names):
        if not name.startswith(PREFIX) and (match := _NUMBERED.fullmatch(name)):
            numbers.setdefault(match[1], {})[code] = int(match[2])
    if not numbers or any((label := read_label(name)) and label.span == "STEP" for name in events.names):
        return events, ""
    rows = max(
        (_in_sequence(events, of_name) for of_name in numbers.values()), key=lambda rows: events.dur_ns[rows].sum()
    )
    if not len(rows):
        return events, ""
    names, codes = list(events.names), events.name_id[rows].tolist()
    for code in codes:
        names[code] = re.sub(r"\D+", "ProfilerStep#", names[code])
    return replace(events, names=tuple(names)), f"{events.names[codes[0]]!r} to {events.names[codes[-1]]!r}"


def _in_sequence(events: Events, numbers: Mapping[int, int]) -> Rows:
    """The rows of the ranges with these numbers, by the code of their name, if they may be steps; else none."""
    rows = np.flatnonzero((events.category == Category.ANNOTATION) & np.isin(events.name_id, list(numbers)))
    starts, ends = events.start_ns[rows], events.ends_of(rows)
    number = np.array([numbers[code] for code in events.name_id[rows].tolist()])
    follows = (np.diff(number) == 1) & (starts[1:] >= ends[:-1])
    if len(rows) < 2 or not follows.all() or 2 * (ends - starts).sum() < ends[-1] - starts[0]:
        return rows[:0]
    for pattern in _TRAINS:
        begins = events.start_ns[events.rows_named(pattern)]
        if len(begins) and (np.searchsorted(begins, starts) == np.searchsorted(begins, ends)).any():
            return rows[:0]
    return rows
