"""Kernels, operators and calls below a rank: their lanes, tiles, search and sums."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dashboards.app import create_app
from pptrace.model.tables import COMMS
from pptrace.model.traces import Category, Events
from pptrace.report.tiles import sums
from pptrace.report.tiles.bars import Place, bar_at
from pptrace.report.tiles.cut import Range
from pptrace.report.tiles.details import details
from pptrace.report.tiles.events import EVENTS, describe_lanes, events_table, events_tile
from pptrace.report.tiles.measured import comms_table
from pptrace.report.tiles.search import search
from pptrace.report.tiles.sums import sums_of
from pptrace.report.tiles.timeline import MEASURED, Timeline
from pptrace.workflow.events import events_of_rank, has_events
from pptrace.workflow.load import load
from tests.support.programs import SAMPLES
from tests.support.tables import table_of
from tests.support.tile import sections_of


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return Timeline(load([SAMPLES / "gpu_nccl_1f1b_p4"]))


def events_at(*rows: tuple[Category, str, int, int, int, int]) -> Events:
    """Events of (category, name, stream or thread, device, start, length), by start."""
    ordered = sorted(rows, key=lambda row: (row[4], -row[5]))
    names = tuple(sorted({row[1] for row in rows}))
    on_device = [row[0] >= Category.HOST_LIMIT for row in ordered]
    place = [row[2] for row in ordered]

    def column(values: list[int], dtype: str = "int64") -> Any:
        return np.array(values, dtype=dtype)

    return Events(
        category=column([row[0] for row in ordered], "int8"),
        name_id=column([names.index(row[1]) for row in ordered], "int32"),
        start_ns=column([row[4] for row in ordered]),
        dur_ns=column([row[5] for row in ordered]),
        device=column([row[3] for row in ordered], "int32"),
        stream=column([at if device else -1 for at, device in zip(place, on_device, strict=True)]),
        thread=column([-1 if device else at for at, device in zip(place, on_device, strict=True)]),
        correlation=column([-1] * len(rows)),
        names=names,
    )


def test_each_stream_and_thread_has_a_lane_and_calls_lie_below_what_calls_them() -> None:
    operator, python, kernel = Category.CPU_OP, Category.PYTHON, Category.KERNEL
    table = events_table(
        events_at(
            (operator, "outer", 9, -1, 0, 100),
            (operator, "inner", 9, -1, 10, 20),
            (operator, "inner", 9, -1, 40, 20),
            (Category.RUNTIME, "launch", 9, -1, 12, 3),
            (python, "step", 9, -1, 0, 200),
            (operator, "alone", 5, -1, 0, 5),
            (kernel, "gemm", 7, 0, 15, 50),
            (kernel, "ncclDevKernel_AllReduce", 20, 1, 15, 50),
            (Category.DEVICE_ANNOTATION, "range", 7, 0, 10, 60),
            (Category.OTHER, "profiler", -1, -1, 0, 500),
        ),
        at=3,
        origin_ns=-5,
    )
    tracks = table.tracks
    lanes = ("GPU 0 stream 7", "GPU 0 stream 7 ranges", "GPU 1 stream 20", "thread 9", "thread 9 Python", "thread 5")
    assert table.lanes == lanes, "the busiest thread first, and nothing of what names no thread"
    assert [tracks.depths[lane] for lane in range(len(lanes))] == [1, 1, 1, 3, 1, 1]
    of_track = {
        (table.lanes[tracks.lane[track]], int(tracks.depth[track])): [
            table.texts["name"][name] for name in tracks.columns["name"][tracks.ptr[track] : tracks.ptr[track + 1]]
        ]
        for track in range(len(tracks.rank))
    }
    assert of_track["thread 9", 1] == ["inner", "inner"]
    assert of_track["thread 9", 2] == ["launch"]
    assert tracks.start.min() == 5
    assert set(tracks.rank.tolist()) == {3}


def test_the_lanes_of_a_rank_hold_its_events_on_the_clock_of_its_ops(timeline: Timeline) -> None:
    """The first kernel of an op begins with it, and the tile of all its time has every event as a bar or in a cell."""
    events = timeline.events.of(0)
    assert [lane["name"] for lane in describe_lanes(events)["lanes"]][:2] == ["stream 7", "stream 7 ranges"]
    tracks = events.tracks
    ops = timeline.measured["ops"].tracks
    first = ops.ptr[ops.of_rank[0][0]]
    of_stream = tracks.lane[np.searchsorted(tracks.ptr, np.arange(len(tracks)), side="right") - 1] == 0
    assert np.abs(tracks.start[of_stream] - ops.start[first]).min() <= 1
    inside = (tracks.start >= 0) & (tracks.start < Range(24, 0).end)
    assert sections_of(events_tile(events, Range(24, 0)))[EVENTS]["count"] == inside.sum()


def test_events_are_moved_like_the_ops_whose_recording_was_taken_out() -> None:
    analysis = load([SAMPLES / "1f1b_p4"])
    assert analysis.corrections is not None
    events = events_of_rank(analysis, 2)
    ops = analysis.data.rows.of_rank(2).ops
    marked = [name for name, text in enumerate(events.names) if ":2F0 " in text or ":2B0 " in text]
    starts = np.sort(events.start_ns[np.isin(events.name_id, marked)])
    expected = ops["start_ns"][ops["microbatch"] == 0]
    assert np.abs(starts[:, None] - expected).min(axis=0).max() <= 1
    assert (np.diff(events.start_ns) >= 0).all()


def test_tables_of_ops_have_no_events(tmp_path: Path) -> None:
    (tmp_path / "ops.csv").write_text("rank,kind,stage,microbatch,start_ns,end_ns\n0,F,0,0,0,10\n0,B,0,0,10,30\n")
    analysis = load([tmp_path])
    assert has_events(analysis) == frozenset()
    assert events_of_rank(analysis, 0) is None
    with pytest.raises(LookupError):
        Timeline(analysis).events.of(0)


def test_an_event_is_found_by_a_part_of_its_name_and_tells_where_it_ran(timeline: Timeline) -> None:
    assert search(timeline, "fmha_cutlassF")["unknown"] == ["fmha_cutlassf"], "no rank's events are open"
    found = search(timeline, "fmha_cutlassF", (0, 1))
    assert found["total"] > 0
    at, start, length, table, lane, depth, microbatch = found["found"][0]
    assert (table, depth, microbatch) == (EVENTS, 0, -1)
    bar = bar_at(timeline, Place(MEASURED, 0, EVENTS, timeline.layout.rows[at].rank, lane, start))
    assert bar["length"] == length
    lines = dict(bar["lines"])
    assert lines[""].startswith("fmha_cutlassF")
    assert (lines["on"], lines["kind"]) == ("stream 7", "kernel")
    assert dict(details(timeline, MEASURED, 0, EVENTS, bar["row"], at)) == lines
    of_rank = search(timeline, "fmha_cutlassF rank 1", (0, 1))
    assert {hit[0] for hit in of_rank["found"]} == {1}


@pytest.mark.parametrize(
    ("words", "table"),
    [
        *(("exposed transfer", "back"), ("fill, drain rank 1", "back"), ("receives", "comms"), ("stream 7", EVENTS)),
        *(("Transfer", "comms"), ("warmup step 3", "back"), ("kernel", EVENTS), ("exposed transfer pp step 3", "back")),
    ],
)
def test_words_of_the_legend_and_names_of_lanes_are_found(timeline: Timeline, words: str, table: str) -> None:
    found = search(timeline, words, (0,))
    assert found["total"] > 0
    assert table in {hit[3] for hit in found["found"]}
    assert found["unknown"] == []


def test_a_search_goes_on_from_the_view_and_begins_again(timeline: Timeline) -> None:
    every = search(timeline, "receives")
    starts = [hit[1] for hit in every["found"]]
    later = search(timeline, "receives", from_ns=starts[5])
    assert [hit[1] for hit in later["found"]] == starts[5:] + starts[:5]
    assert (every["first"], later["first"]) == (0, 5)


def test_sums_of_a_range_are_the_parts_of_bars_in_it(timeline: Timeline) -> None:
    """Cut in two, a range has the same sums; a rank's states with its ops, but for pale parts in these, are all its time."""
    begin, end = (time - timeline.origin_ns for time in timeline.spans[3])
    middle = (2 * begin + end) // 3
    whole, *halves = (
        {
            (section["title"], row["name"]): row["ns"]
            for section in sums_of(timeline, MEASURED, 0, (1,), (1,), *edges)
            for row in section["rows"]
        }
        for edges in ((begin, end), (begin, middle), (middle, end))
    )
    titles = ["Ops", "Without compute in an op", "Communication", "Kernels and copies"]
    assert list(dict.fromkeys(title for title, _ in whole))[:4] == titles
    for name, ns in whole.items():
        parts = [half.get(name, 0) for half in halves]
        if name[0] in titles[:3] or all(parts):  # of others only the largest names are listed
            assert sum(parts) == pytest.approx(ns, abs=2), name
    back = timeline.measured["back"]
    gaps = sum(
        int(
            np.clip(back.tracks.start[rows] + back.tracks.length[rows], begin, end).sum()
            - np.clip(back.tracks.start[rows], begin, end).sum()
        )
        for track in back.tracks.of_rank[1].tolist()
        if back.lanes[back.tracks.lane[track]] == "gaps"
        for rows in [slice(*back.tracks.ptr[track : track + 2].tolist())]
    )
    assert sums_of(timeline, MEASURED, 0, (1,), (0, 1), begin, end) == sums_of(
        timeline, MEASURED, 0, (1,), (1,), begin, end
    )
    with pytest.raises(LookupError):
        sums_of(timeline, "nothing", 0, (1,), (1,), begin, end)
    of_ops = sum(whole.get(("Ops", name), 0) for name in ("Forward", "Backward"))
    states = sum(ns for (title, _), ns in whole.items() if title == titles[1])
    assert of_ops + states - gaps == pytest.approx(end - begin, abs=2)


def test_more_names_than_are_listed_are_counted(timeline: Timeline, monkeypatch: pytest.MonkeyPatch) -> None:
    edges = [time - timeline.origin_ns for time in timeline.spans[3]]
    counts = [len(section["rows"]) for section in sums_of(timeline, MEASURED, 0, (1,), (), *edges)]
    monkeypatch.setattr(sums, "_MOST_NAMES", 2)
    few = [(len(section["rows"]), section["more"]) for section in sums_of(timeline, MEASURED, 0, (1,), (), *edges)]
    assert few == [(min(count, 2), max(count - 2, 0)) for count in counts]
    assert {more > 0 for _, more in few} == {False, True}


def test_what_is_no_transfer_of_a_matched_call_is_waiting() -> None:
    """From 10 to 60, of which 30 to 50 move; the same of a call whose other side is not known."""
    times = {"start_ns": 10, "end_ns": 60, "transfer_start_ns": 30, "transfer_end_ns": 50}
    of_both = [
        {"rank": 0, "step": 0, "kind": "send", "axis": axis, "match": match} for axis, match in (("pp", 0), ("cp", -1))
    ]
    table = comms_table(table_of(COMMS, [of_one | times for of_one in of_both]), {0: 0}, 0)
    for begin, end, ns, waits_ns in ((0, 100, 50, 30), (20, 45, 25, 10), (12, 20, 8, 8)):
        found = sums._of_comms(table, (0,), begin, end).set_index("name")
        assert found["ns"].to_dict() == {"send (pp)": ns, "send (cp)": ns}
        assert found["waits_ns"].to_dict() == {"send (pp)": waits_ns, "send (cp)": 0}


def test_a_thread_may_have_the_number_0_and_events_of_none_are_not_drawn() -> None:
    rows = [(Category.CPU_OP, "here", 0, -1, 5, 2), (Category.CPU_OP, "nowhere", -1, -1, 6, 2)]
    assert events_table(events_at(*rows), 0, 0).tracks.start.tolist() == [5]


def test_the_routes_answer_for_ranks_with_events_alone() -> None:
    client = create_app([SAMPLES / "gpu_nccl_1f1b_p4"]).server.test_client()
    about = client.get("/timeline-data/about").get_json()
    token = about["token"]
    assert about["haveEvents"] == [0, 1, 2, 3]
    lanes = client.get(f"/timeline-data/lanes/{token}/1").get_json()["lanes"]
    assert lanes[0]["name"] == "stream 7"
    assert client.get(f"/timeline-data/events/{token}/1/20/-1").status_code == 200, "before the first op"
    assert client.get(f"/timeline-data/lanes/{token}/4").status_code == 404
    answer = client.get(f"/timeline-data/sums/{token}/measured/0/0/2000000000?ranks=0.2&events=0.9").get_json()
    assert [section["title"] for section in answer][:3] == ["Ops", "Without compute in an op", "Communication"]
    counts = [len(depths) for depths in about["tables"]["comms"]["depthsOfRanks"]]
    assert counts == [len(about["tables"]["comms"]["lanes"])] * 4


def test_ranges_that_overlap_without_nesting_are_put_where_there_is_room() -> None:
    """Streams may overlap: a bar begins in the first track that is free, not in one for each that is open."""
    kernel = Category.KERNEL
    rows = [(kernel, f"k{at}", 7, 0, start, 10) for at, start in enumerate((0, 5, 12, 20))]
    tracks = events_table(events_at(*rows), at=0, origin_ns=0).tracks
    by_start = tracks.depth[np.searchsorted(tracks.ptr, np.argsort(tracks.start), side="right") - 1]
    assert by_start.tolist() == [0, 1, 0, 1]
    for low, high in pairwise(tracks.ptr.tolist()):
        ends = tracks.start[low:high] + tracks.length[low:high]
        assert (tracks.start[low + 1 : high] >= ends[:-1]).all()
