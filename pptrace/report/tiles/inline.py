"""A timeline as one text that a page holds, so that no server is asked: its facts, and the tiles that there is room for.

The coarsest tile of each block of ranks, which has all time, is always there. Finer ones are there for whole steps, the one to
begin with first, until every bar is by itself; a tile that has every bar has no finer ones.
"""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass

from pptrace.model.units import milliseconds
from pptrace.model.wording import as_ranges
from pptrace.report.tiles.about import describe
from pptrace.report.tiles.cut import NUM_BUCKETS, SEEN_BUCKETS, Range
from pptrace.report.tiles.encode import DETAILS, group_tile, memory_tile, rank_tile
from pptrace.report.tiles.kept import Bars
from pptrace.report.tiles.measured import OPS
from pptrace.report.tiles.simulated import bars_of_simulation
from pptrace.report.tiles.timeline import MEASURED, Timeline
from pptrace.simulator import Simulation
from pptrace.workflow.analyse import Analysis

MOST_CHARACTERS = 12_000_000
"""Room for tiles in a page: a browser opens so much at once."""
_FINER_BITS = 2
"""A tile has 2^2 finer ones."""
_FINEST_GROUPS = 4
"""Bits by which tiles of groups, which are shares of time alone, are finer than the coarsest, at most."""
_LEVEL = 6
"""Level of gzip: 9 takes five times as long for files that are 1 % smaller."""
_ORDER = "stage"
"""The order whose blocks of ranks the tiles have."""
_MOST_SINGLE = 16
"""Ranks up to which the browser does not group rows by stage."""
_Place = tuple[Range, int]
"""The time of a tile, and its block of ranks."""


@dataclass(frozen=True, slots=True)
class InlineTimeline:
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


def inline_simulation(simulation: Simulation, extent_ns: int = 0, most: int = MOST_CHARACTERS) -> InlineTimeline:
    """The timeline of a simulated step, with room for ``extent_ns`` of time, so that two pictures can be compared."""
    bars = bars_of_simulation(simulation)
    extent_ns = max(extent_ns, simulation.makespan_ns)
    return _inline(bars, {0: (0, simulation.makespan_ns)}, 0, True, most, extent_ns)


def _inline(
    bars: Bars,
    spans: Mapping[int, tuple[int, int]],
    first_step: int | None,
    has_pipeline: bool,
    most: int,
    extent_ns: int = 0,
) -> InlineTimeline:
    about = describe(bars, spans, first_step, has_pipeline=has_pipeline)
    about["span"] = max(about["span"], extent_ns)
    about["tileOrder"] = _ORDER
    about["tables"][OPS]["texts"] = bars.measured.tables[OPS].texts  # those of pairs too
    tiles = _Tiles(bars, about["span"], most)
    parts = _parts(about["steps"], about["span"])
    begin_with = list(parts).index(first_step) if first_step in parts else 0
    nearest = sorted(parts, key=lambda step: abs(list(parts).index(step) - begin_with))
    whole: list[int | None] = []
    for step in nearest:
        if not tiles.add(*parts[step], partly=not whole):
            break
        whole.append(step)
    data = {"about": about, "tiles": tiles.kept, "shift": tiles.root.shift}
    return InlineTimeline(json.dumps(data, separators=(",", ":")), _lacks(tiles, whole, len(parts)))


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
    held = f"every bar of step{'s' if len(whole) > 1 else ''} {numbers}, and of all time" if whole else "of all time"
    return f"Drawn: {held} those of {least} ms or more; shorter ones are shares of time. pptrace dashboard draws all of them."


class _Tiles:
    """The tiles of a page, as text by their paths."""

    def __init__(self, bars: Bars, span: int, most: int) -> None:
        """Make the coarsest tiles, which have all time up to ``span``."""
        self.kept: dict[str, str] = {}
        self.root = Range((max(span - 1, 0) // NUM_BUCKETS).bit_length(), 0)
        self._bars, self._most = bars, most
        self._blocks = bars.layout.blocks(_ORDER)
        self._is_whole: dict[_Place, bool] = {}
        orders = bars.layout.orders
        are_grouped = len(bars.layout.rows) > _MOST_SINGLE or len(orders) > 2 or len(orders["pipeline"]) > 1
        self._orders = orders if are_grouped else {"pipeline": orders["pipeline"]}
        for block in range(len(self._blocks)):
            self.kept |= self._made(self.root, block, self.kept)

    def add(self, begin: int, end: int, *, partly: bool) -> bool:
        """Add all finer tiles of a range of time, if there is room; ``partly``: else as many levels as there is room for."""
        level: list[_Place] = [(self.root, block) for block in range(len(self._blocks))]
        added: dict[str, str] = {}
        while level := [
            (finer, block)
            for time, block in level
            if not self._is_whole[time, block]
            for finer in _finer(time, begin, end)
        ]:
            of_level: dict[str, str] = {}
            for time, block in level:
                if (time, block) not in self._is_whole:
                    of_level |= self._made(time, block, of_level)
                if sum(len(text) for texts in (self.kept, added, of_level) for text in texts.values()) > self._most:
                    self.kept |= added if partly else {}
                    return False
            added |= of_level
        self.kept |= added
        return True

    def _made(self, time: Range, block: int, known: Mapping[str, str]) -> dict[str, str]:
        """The tiles of a block of ranks in a range of time, and those of groups that are not known."""
        bars, ranks, place = self._bars, self._blocks[block], f"{time.shift}/{time.index}"
        tile, self._is_whole[time, block] = rank_tile(bars.measured, ranks, time, DETAILS)
        made = {f"tile/{MEASURED}/0/{_ORDER}/{block}/{place}": _text(tile)}
        if bars.memory:
            made[f"memory/{_ORDER}/{block}/{place}"] = _text(memory_tile(bars.memory, ranks, time))
        for order, groups in self._orders.items() if self.root.shift - time.shift <= _FINEST_GROUPS else ():
            if (path := f"groups/{MEASURED}/0/{order}/{place}") not in known:
                made[path] = _text(group_tile(bars.measured, groups, time))
        return made


def _finer(time: Range, begin: int, end: int) -> list[Range]:
    """The tiles one level finer in a range of time."""
    bits = min(time.shift, _FINER_BITS)
    finer = [Range(time.shift - bits, (time.index << bits) + index) for index in range(1 << bits)] if bits else []
    return [one for one in finer if one.begin < end and one.end > begin]


def _text(tile: bytes) -> str:
    return b64encode(gzip.compress(tile, _LEVEL, mtime=0)).decode()
