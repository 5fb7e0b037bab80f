"""Tiles: nothing is dropped at any zoom, what is long is never hidden, and shares are those of the time."""

from __future__ import annotations

import numpy as np
import pytest

from pptrace.report.tiles import cut as cutting
from pptrace.report.tiles import pyramid
from pptrace.report.tiles.cut import NUM_BUCKETS, Range, cut, cut_together
from pptrace.report.tiles.pyramid import make_pyramid
from pptrace.report.tiles.tracks import NUM_CLASSES, Tracks, make_tracks

SEEDS = range(6)


def random_tracks(seed: int, count: int = 3_000) -> Tracks:
    """Bars of five ranks of lengths from 1 to 10^6 ns, some one over another, with a part that waits."""
    rng = np.random.default_rng(seed)
    length = np.exp(rng.uniform(0, 13, count)).astype(np.int64)
    rank, lane = rng.integers(0, 5, count), rng.integers(0, 2, count)
    start = rng.integers(0, 40_000_000, count)
    return make_tracks(rank, lane, start, length, rng.integers(1, NUM_CLASSES, count), second=length // 3)


def all_tiles(tracks: Tracks, shift: int) -> list[Range]:
    last = int((tracks.start + tracks.length).max())
    return [Range(shift, index) for index in range((last >> shift) // NUM_BUCKETS + 1)]


@pytest.fixture(params=["bars", "pyramid"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Cells from bars, or from mipmaps, as in runs of millions of bars."""
    monkeypatch.setattr(cutting, "_ALWAYS_BARS", 50)
    if request.param == "pyramid":
        monkeypatch.setattr(cutting, "_MOST_ROWS", 0)
        monkeypatch.setattr(pyramid, "_FEWEST_BUCKETS", 4)
        monkeypatch.setattr(pyramid, "_BARS_PER_CELL", 1 / 512)  # so that its finest level is finer than the tiles
    return str(request.param)


@pytest.mark.parametrize("shift", [8, 13, 16, 20])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_counts_of_all_tiles_are_the_rows(seed: int, shift: int, way: str) -> None:
    tracks = random_tracks(seed)
    levels = make_pyramid(tracks)
    assert (way == "pyramid") == bool(levels)
    wanted = tracks.tracks_of([0, 2, 3])
    rows = int((tracks.ptr[wanted + 1] - tracks.ptr[wanted]).sum())
    assert sum(cut(tracks, levels, wanted, time).count for time in all_tiles(tracks, shift)) == rows > 0


@pytest.mark.parametrize("shift", [10, 14, 17])
def test_a_bar_that_can_be_seen_is_in_every_tile_that_it_reaches(shift: int, way: str) -> None:
    tracks = random_tracks(1)
    levels, wanted = make_pyramid(tracks), tracks.tracks_of(range(5))
    for time in all_tiles(tracks, shift):
        tile = cut(tracks, levels, wanted, time)
        end = tracks.start + tracks.length
        reaches = (tracks.start < time.end) & (end > time.begin) & (tracks.length >= 2 << shift)
        assert set(np.flatnonzero(reaches)) <= set(tile.rows.tolist())
        drawn = tile.rows[: tile.num_earlier]
        assert ((tracks.start[drawn] < time.begin) & (end[drawn] > time.begin)).all()
        of_track = np.searchsorted(tracks.ptr, tile.rows, side="right") - 1
        assert (wanted[tile.track] == of_track).all()


def test_a_cell_has_the_longest_of_its_bars_and_the_shares_of_their_time(way: str) -> None:
    count = 2_000
    start = np.arange(count, dtype=np.int64) * 64
    length = np.where(np.arange(count) % 4 == 1, 48, 16)
    none = np.zeros(count, np.int64)
    tracks = make_tracks(none, none, start, length, np.where(length == 48, 1, 2))
    tile = cut(tracks, make_pyramid(tracks), tracks.tracks_of([0]), Range(8, 0))
    full = slice(0, count * 64 // 256)
    assert tile.cell_count[full].tolist() == [4] * 500
    assert (tracks.length[tile.cell_longest] == 48).all()
    assert tile.cell_shares[0].tolist() == [0, 255 * 48 // 256, 255 * 48 // 256, *[0] * 6]


@pytest.mark.parametrize("shift", [9, 15, 19])
def test_ranks_drawn_as_one_row_have_all_their_time(shift: int) -> None:
    tracks = random_tracks(3)
    wanted = tracks.tracks_of(range(5))
    tiles = [cut_together(tracks, (), wanted, time) for time in all_tiles(tracks, shift)]
    of_class = sum(busy.sum(axis=0) for busy in tiles)
    waits = int(tracks.second.sum())
    assert of_class[0] == pytest.approx(waits)
    for number in range(1, NUM_CLASSES):
        chosen = tracks.group == number
        assert of_class[number] == pytest.approx(int(tracks.length[chosen].sum() - tracks.second[chosen].sum()))
