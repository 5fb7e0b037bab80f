"""Facts about a timeline that the browser has before its tiles: rows, lanes, steps, colours and words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pptrace.report.colours import COMMUNICATION, COMPUTE, KIND_COLOURS, MEMORY, OTHER, ink, shade
from pptrace.report.tiles.bubbles import MEANINGS
from pptrace.report.tiles.cut import NUM_BUCKETS
from pptrace.report.tiles.details import OP_NAMES
from pptrace.report.tiles.events import CLASS_NAMES
from pptrace.report.tiles.kept import Bars
from pptrace.report.tiles.layout import BLOCK
from pptrace.report.tiles.measured import BACK, BUBBLES, COMMS, GAPS, OP_CLASSES, OPS, PHASES, TABLES, Picture
from pptrace.report.tiles.memory import most_bytes
from pptrace.report.tiles.timeline import MEASURED
from pptrace.report.tiles.unlabelled import COMPUTE as UNLABELLED

_EVENT_COLOURS = ("#5B84B1", "#9C8ABF", "#C2A14D", "#8C97A6", COMPUTE, COMMUNICATION, "#C0736B", "#7A4FA3", "#B9BEC6")
"""Colours of events, by their class; those of kernels are those of compute and transfers, which they are."""


def describe(
    bars: Bars, spans: Mapping[int, tuple[int, int]], first_step: int | None, *, has_pipeline: bool
) -> dict[str, Any]:
    """Describe bars to the browser; ``spans`` are start and end of each step on the run's clock, ns."""
    layout, tables = bars.layout, bars.measured
    steps = [(step, low - bars.origin_ns, high - bars.origin_ns) for step, (low, high) in sorted(spans.items())]
    return {
        "span": bars.span_ns,
        "numBars": {name: len(tables[name].tracks) for name in TABLES},
        "ranks": [{"rank": row.rank, "stages": row.stages} for row in layout.rows],
        "orders": {name: [[label, at] for label, at in groups] for name, groups in layout.orders.items()},
        "block": BLOCK,
        "buckets": NUM_BUCKETS,
        "steps": steps,
        "firstStep": first_step,
        "tables": {name: _lanes(bars, name) for name in TABLES},
        "sources": [MEASURED],
        "palette": _palette(bars.measured),
        "opClasses": OP_CLASSES,
        "phases": _seen(bars.measured, "phases", (PHASES,)),
        "causes": _seen(bars.measured, "bubbles", (BUBBLES, GAPS)),
        "colours": {"transfer": COMMUNICATION, "either": OTHER, "other": OTHER, "memory": MEMORY},
        "kindNames": OP_NAMES,
        "states": MEANINGS,
        "hasPipeline": has_pipeline,
        "mostBytes": most_bytes(bars.memory),
        "haveMemory": list(bars.memory),
        "haveEvents": [],
        "eventClasses": [
            [name, [(fill, ink(fill)) for fill in (shade(colour, index, 4) for index in range(3))]]
            for name, colour in zip(CLASS_NAMES, _EVENT_COLOURS, strict=True)
        ],
        "hasUnmatched": bool((tables[COMMS].tracks.columns["match"] < 0).any()),
        "schedules": [],
        "noWhatif": "",
    }


def _lanes(bars: Bars, name: str) -> dict[str, Any]:
    """The lanes of a table, how many tracks of each overlap, and the texts of its codes."""
    table, num_ranks = bars.measured[name], len(bars.layout.rows)
    return {
        "lanes": table.lanes,
        "depths": {table.lanes[lane]: depth for lane, depth in table.tracks.depths.items()},
        "depthsOfRanks": table.tracks.depths_of_ranks(num_ranks, len(table.lanes)).tolist(),
        "texts": {key: texts for key, texts in table.texts.items() if key != "pair"},
    }


def _seen(picture: Picture, name: str, lanes: tuple[int, ...]) -> list[str]:
    """The phases, or the states of ranks that compute in no op, that the run has."""
    table = picture[BACK]
    is_meant = np.repeat(np.isin(table.tracks.lane, lanes), np.diff(table.tracks.ptr))
    return [table.texts[name][code] for code in np.unique(table.tracks.group[is_meant]).tolist()]


def _palette(picture: Picture) -> dict[str, list[tuple[str, str]]]:
    """(fill, ink on it) of each kind of op, for each chunk."""
    chunks = picture[OPS].tracks.columns["chunk"]
    num_chunks = max(int(chunks.max()) + 1 if len(chunks) else 1, 1)
    seen = picture[OPS].texts["kind"]
    colours = {**dict.fromkeys(seen, OTHER), **KIND_COLOURS}
    if UNLABELLED in seen:
        colours |= {UNLABELLED: COMPUTE, OP_CLASSES[-1]: COMPUTE}
    fills = {
        kind: [shade(colour, chunk, num_chunks) for chunk in range(num_chunks)] for kind, colour in colours.items()
    }
    return {kind: [(fill, ink(fill)) for fill in of_kind] for kind, of_kind in fills.items()}
