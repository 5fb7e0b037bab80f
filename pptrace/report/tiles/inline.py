"""A timeline as one text that a page holds, so that no server is asked: its facts, and the tiles that there is room for.

The coarsest tile of each block of ranks, which has all time, is always there. Finer ones are there for whole steps, the one to
begin with first, until every bar is by itself; a tile that has every bar has no finer ones. Memory has tiles of its own, down to
each event, and shares of groups have a few levels, as far as the bars leave room.

A simulated step has bars of its ops, of its phases, and of why its ranks are idle.
"""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from msgspec import Struct

from pptrace.intervals import Int64, clip, subtract, union
from pptrace.model.tables import COMMS as COMMS_SCHEMA
from pptrace.model.tables import empty_table
from pptrace.model.units import milliseconds
from pptrace.model.wording import as_ranges
from pptrace.report.tiles.about import describe
from pptrace.report.tiles.bubbles import IDLE, MEANINGS, OTHER_ORDER
from pptrace.report.tiles.cut import NUM_BUCKETS, SEEN_BUCKETS, Range
from pptrace.report.tiles.encode import DETAILS, group_tile, memory_samples_tile, rank_tile
from pptrace.report.tiles.kept import Bars
from pptrace.report.tiles.layout import Layout, RankRow
from pptrace.report.tiles.measured import (
    BACK,
    BUBBLES,
    COMMS,
    OPS,
    PHASES,
    back_table,
    comms_table,
    ops_table,
    phases_of,
)
from pptrace.report.tiles.timeline import MEASURED, Timeline, stages_of_ranks
from pptrace.report.tiles.tracks import Array
from pptrace.simulator import IdleCause, IdlePart, Simulation, idle_parts
from pptrace.slices import slice_of
from pptrace.workflow.analyse import Analysis

_STATE_OF: Mapping[IdleCause, str] = {
    IdleCause.FILL: "fill",
    IdleCause.DRAIN: "drain",
    IdleCause.ORDER: OTHER_ORDER,
    IdleCause.MESSAGE: "late message",
}
"""States of idle ranks by their cause; in all others they wait as the schedule has it."""


def bars_of_simulation(simulation: Simulation) -> Bars:
    """The bars of a simulated step, from its start on."""
    ops = simulation.ops()
    ranks = range(simulation.plan.pp)
    position = {rank: rank for rank in ranks}
    step, begin, end = (np.array([value]) for value in (int(ops["step"].iloc[0]), 0, simulation.makespan_ns))
    parts: list[tuple[int, int, int, Array, Array]] = []
    for rank, idle in enumerate(_idle(simulation, ops)):
        phases = phases_of(slice_of(ops[ops["rank"] == rank]), step, begin, end)
        parts += [(rank, PHASES, code, *edges.T) for code, edges in phases.items()]
        parts += [(rank, BUBBLES, list(MEANINGS).index(state), *edges.T) for state, edges in idle.items()]
    tables = {
        OPS: ops_table(ops, position, 0),
        COMMS: comms_table(empty_table(COMMS_SCHEMA), position, 0),
        BACK: back_table(parts),
    }
    stages = stages_of_ranks(ops)
    layout = Layout(tuple(RankRow(rank, 0, rank, stages.get(rank, ())) for rank in ranks))
    return Bars(0, layout, tables, {}, {})


def _idle(simulation: Simulation, ops: pd.DataFrame) -> list[dict[str, Int64]]:
    """The idle time of each rank by state; of messages with rules of their own nothing tells why a rank waits for one."""
    if simulation.costs is not None:
        return [_by_state(parts) for parts in idle_parts(simulation)]
    of_ranks = []
    for rank in range(simulation.plan.pp):
        own = ops[ops["rank"] == rank]
        idle = subtract(union([0], [simulation.makespan_ns]), union(own["start_ns"], own["end_ns"]))
        first, last = int(own["start_ns"].min()), int(own["end_ns"].max())
        edges = {"fill": (0, first), IDLE: (first, last), "drain": (last, simulation.makespan_ns)}
        of_ranks.append({state: clip(idle, low, high) for state, (low, high) in edges.items()})
    return of_ranks


def _by_state(parts: Sequence[IdlePart]) -> dict[str, Int64]:
    times: dict[str, list[tuple[int, int]]] = {}
    for part in parts:
        times.setdefault(_STATE_OF.get(part.cause, IDLE), []).append((part.start_ns, part.end_ns))
    return {state: np.array(of_state, dtype=np.int64) for state, of_state in times.items()}


MOST_CHARACTERS = 12_000_000
"""Room for tiles in a page: a browser opens so much at once."""
_FINER_BITS = 2
"""A tile has 2^2 finer ones."""
_FINEST_GROUPS = 6
"""Bits by which tiles of groups, which are shares of time alone, are finer than the coarsest, at most."""
_LEVEL = 6
"""Level of gzip: 9 takes five times as long for files that are 1 % smaller."""
_ORDER = "stage"
"""The order whose blocks of ranks the tiles have."""
_MOST_SINGLE = 16
"""Ranks up to which the browser does not group rows by stage."""
_BARS, _MEMORY, _GROUPS = f"tile/{MEASURED}/0", "memory", f"groups/{MEASURED}/0"
"""Kinds of tiles, as their paths begin; what is first has the room first."""
_MOST_OF_KIND = {_BARS: MOST_CHARACTERS, _MEMORY: 4_000_000, _GROUPS: 1_000_000}
"""Room for finer tiles of each kind: bars are what a timeline is for."""


class InlineTimeline(Struct, frozen=True):
    """The text that the browser reads, and which bars it lacks ("" for none)."""

    data: str
    lacks: str


def inline_run(analysis: Analysis, step: int | None = None, most: int = MOST_CHARACTERS) -> InlineTimeline | None:
    """The timeline of a measured run, which begins with a step, by default the typical one; None of a run without ops."""
    timeline = Timeline(analysis)
    if not timeline.layout.rows:
        return None
    first_step = timeline.first_step if step is None else step
    return _inline(timeline.bars, timeline.spans, first_step, bool(timeline.windows), most)


def inline_simulation(
    simulation: Simulation, extent_ns: int = 0, most: int = MOST_CHARACTERS, name: str = ""
) -> InlineTimeline:
    """The timeline of a simulated step, which is called ``name``, by default the simulated step of its plan.

    It has room for ``extent_ns`` of time, so that two pictures can be compared.
    """
    bars = bars_of_simulation(simulation)
    extent_ns = max(extent_ns, simulation.makespan_ns)
    name = name or f"simulated step of {simulation.plan.name}"
    return _inline(bars, {0: (0, simulation.makespan_ns)}, 0, True, most, extent_ns, name)


def _inline(
    bars: Bars,
    spans: Mapping[int, tuple[int, int]],
    first_step: int | None,
    has_pipeline: bool,
    most: int,
    extent_ns: int = 0,
    step_name: str = "",
) -> InlineTimeline:
    about = describe(bars, spans, first_step, has_pipeline=has_pipeline)
    about["span"] = max(about["span"], extent_ns)
    about["tileOrder"] = _ORDER
    about["stepName"] = step_name  # of the only step, which has no number
    about["tables"][OPS]["texts"] = bars.measured[OPS].texts  # those of pairs too
    tiles = _Tiles(bars, about["span"], most)
    parts = _parts(about["steps"], about["span"])
    begin_with = list(parts).index(first_step) if first_step in parts else 0
    nearest = sorted(parts, key=lambda step: abs(list(parts).index(step) - begin_with))
    whole = dict.fromkeys(tiles.series, 0)  # parts of the run of which all finer tiles of a kind have room
    for kind in whole:
        while whole[kind] < len(nearest) and tiles.add(kind, *parts[nearest[whole[kind]]], partly=whole[kind] == 0):
            whole[kind] += 1
    data = {"about": about, "tiles": tiles.kept, "shift": tiles.root.shift, "partial": tiles.partial}
    return InlineTimeline(json.dumps(data, separators=(",", ":")), _lacks(tiles, nearest[: whole[_BARS]], len(parts)))


def _parts(steps: list[tuple[int, int, int]], span: int) -> dict[int | None, tuple[int, int]]:
    """The run's time cut where steps begin, by step; all of it where there are none."""
    if not steps:
        return {None: (0, span)}
    begins = [0, *(begin for _, begin, _ in steps[1:]), span]
    return {step: (begins[index], begins[index + 1]) for index, (step, _, _) in enumerate(steps)}


def _lacks(tiles: _Tiles, whole: list[int | None], num_parts: int) -> str:
    if len(whole) == num_parts:
        return ""
    least = milliseconds(SEEN_BUCKETS << tiles.root.shift)
    numbers = as_ranges(sorted(step for step in whole if step is not None))
    steps = f"every bar of step{'s' if len(whole) > 1 else ''} {numbers}. Elsewhere it holds " if whole else ""
    return (
        f"This page holds {steps}bars of {least} ms or more and draws shorter ones as shares of time. "
        "pptrace dashboard draws every bar."
    )


class _Tiles:
    """The tiles of a page, as text by their paths."""

    def __init__(self, bars: Bars, span: int, most: int) -> None:
        """Make the coarsest tiles, which have all time up to ``span``."""
        self.kept: dict[str, str] = {}
        self.root = Range((max(span - 1, 0) // NUM_BUCKETS).bit_length(), 0)
        self._bars = bars
        self._blocks = bars.layout.blocks(_ORDER)
        self._is_whole: dict[str, bool] = {}
        orders = bars.layout.orders
        are_grouped = len(bars.layout.rows) > _MOST_SINGLE or len(orders) > 2 or len(orders["pipeline"]) > 1
        self._orders = orders if are_grouped else {"pipeline": orders["pipeline"]}
        blocks = [str(block) for block in range(len(self._blocks))]
        # by kind, the blocks or orders that have tiles of it
        self.series = {_BARS: blocks, _MEMORY: blocks if bars.memory else [], _GROUPS: list(self._orders)}
        for kind, names in self.series.items():
            self.kept |= {self._path(kind, name, self.root): self._made(kind, name, self.root) for name in names}
        if not are_grouped:
            self.series[_GROUPS] = []  # those of the whole run alone are drawn
        self._room, self._room_of = most - sum(map(len, self.kept.values())), dict(_MOST_OF_KIND)

    def add(self, kind: str, begin: int, end: int, *, partly: bool) -> bool:
        """Add all finer tiles of a kind in a range of time, if there is room; ``partly``: else some levels of them."""
        level = [(name, self.root) for name in self.series[kind]]
        added: dict[str, str] = {}
        room = min(self._room, self._room_of[kind])
        while level := [
            (name, finer)
            for name, time in level
            if not self._is_whole[self._path(kind, name, time)]
            for finer in _finer(time, begin, end)
        ]:
            of_level: dict[str, str] = {}
            for name, time in level:
                if (path := self._path(kind, name, time)) in self._is_whole:
                    continue
                of_level[path] = self._made(kind, name, time)
                room -= len(of_level[path])
                if room < 0:
                    if partly:
                        self._keep(kind, added)
                    return False
            added |= of_level
        self._keep(kind, added)
        return True

    @property
    def partial(self) -> list[str]:
        """The paths of kept tiles that do not have each bar by itself."""
        return [path for path in self.kept if path.startswith(_BARS) and not self._is_whole[path]]

    def _keep(self, kind: str, added: Mapping[str, str]) -> None:
        self.kept |= added
        size = sum(map(len, added.values()))
        self._room -= size
        self._room_of[kind] -= size

    def _path(self, kind: str, name: str, time: Range) -> str:
        place = f"{name}/{time.shift}/{time.index}"
        return f"{kind}/{_ORDER}/{place}" if kind != _GROUPS else f"{kind}/{place}"

    def _made(self, kind: str, name: str, time: Range) -> str:
        """The text of a tile; whether it has all that finer ones could tell is kept."""
        bars = self._bars
        if kind == _GROUPS:
            tile = group_tile(bars.measured, self._orders[name], time)
            is_whole = self.root.shift - time.shift >= _FINEST_GROUPS
        elif kind == _MEMORY:
            tile, is_whole = memory_samples_tile(bars.memory, self._blocks[int(name)], time)
        else:
            tile, is_whole = rank_tile(bars.measured, self._blocks[int(name)], time, DETAILS)
        self._is_whole[self._path(kind, name, time)] = is_whole
        return b64encode(gzip.compress(tile, _LEVEL, mtime=0)).decode()


def _finer(time: Range, begin: int, end: int) -> list[Range]:
    """The tiles one level finer in a range of time."""
    bits = min(time.shift, _FINER_BITS)
    finer = [Range(time.shift - bits, (time.index << bits) + index) for index in range(1 << bits)] if bits else []
    return [one for one in finer if one.begin < end and one.end > begin]
