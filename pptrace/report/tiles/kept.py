"""Bars of a run as an entry of the cache, with their mipmaps: see :mod:`pptrace.workflow.reopen`."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from pptrace.ingest.job.disk_cache import Packed
from pptrace.ingest.job.packing import pack, unpack
from pptrace.report.tiles.layout import Layout
from pptrace.report.tiles.measured import TABLES, Picture
from pptrace.report.tiles.memory import MemoryTracks
from pptrace.report.tiles.pyramid import Level

ENTRY = "timeline, sources of ops"


class Bars(Struct, frozen=True):
    """Tracks that are made of an analysis for its timeline, once: times are ns from ``origin_ns``.

    ``message_ns`` is what the messages of each step took (:func:`pptrace.report.tiles.timeline.message_times`).
    """

    origin_ns: int
    layout: Layout
    measured: Picture
    memory: MemoryTracks
    message_ns: Mapping[int, int]

    @property
    def span_ns(self) -> int:
        """Time from the first bar's start to the last one's end."""
        tracks = [table.tracks for table in self.measured.values() if len(table.tracks)]
        return max(
            (int((part.start[part.ptr[1:] - 1] + part.length[part.ptr[1:] - 1]).max()) for part in tracks), default=1
        )


class _KeptBars(Struct, frozen=True):
    """Bars, and the mipmaps of each table."""

    bars: Bars
    levels: Mapping[str, tuple[Level, ...]]


def pack_bars(bars: Bars) -> Packed:
    """Pack the bars with their mipmaps, which are made for it where they are not there."""
    return pack(_KeptBars(bars, {name: table.levels for name, table in bars.measured.items()}))


def unpack_bars(packed: Packed) -> Bars:
    """Restore the bars.

    Raises:
        LookupError, TypeError, ValueError, ... (those of ``DAMAGE``): the entry is damaged.
    """
    kept = unpack(packed, _KeptBars)
    for name in TABLES:
        vars(kept.bars.measured[name])["levels"] = kept.levels[name]
    return kept.bars
