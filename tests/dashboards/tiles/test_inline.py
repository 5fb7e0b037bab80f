"""Timelines that pages hold: every bar where there is room, shares elsewhere; simulated steps as bars."""

from __future__ import annotations

import gzip
import json
from base64 import b64decode
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from msgspec import structs

from pptrace.report.tiles.bubbles import MEANINGS
from pptrace.report.tiles.inline import InlineTimeline, bars_of_simulation, inline_run, inline_simulation
from pptrace.report.tiles.measured import BACK, BUBBLES, OPS, PHASES
from pptrace.report.tiles.timeline import Timeline
from pptrace.schedule.registry import build
from pptrace.simulator import Simulation, simulate, uniform
from pptrace.workflow.analyse import Analysis
from pptrace.workflow.load import load
from tests.dashboards.synthetic import write_run
from tests.support.programs import SAMPLES
from tests.support.tile import sections_of

MS = 1_000_000


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    """16,000 ops of two ranks in five steps."""
    return load([write_run(tmp_path_factory.mktemp("long"), "1f1b", pp=2, num_microbatches=800, num_steps=5)])


def tiles_of(timeline: InlineTimeline) -> dict[str, dict[str, Any]]:
    """Sections of each tile by path."""
    tiles = json.loads(timeline.data)["tiles"]
    return {path: sections_of(gzip.decompress(b64decode(text))) for path, text in tiles.items()}


def drawn_rows(timeline: InlineTimeline, begin: float, end: float) -> list[int]:
    """The rows of ops between two times that some tile has as a bar of their own."""
    rows: set[int] = set()
    for path, tile in tiles_of(timeline).items():
        if path.startswith("tile/"):
            start = tile[OPS]["start"]
            rows |= set(tile[OPS]["row"][(start >= begin) & (start < end)].tolist())
    return sorted(rows)


def test_a_short_run_is_one_tile_with_every_bar(run_p4: Path) -> None:
    analysis = load([run_p4])
    timeline = inline_run(analysis)
    paths = list(json.loads(timeline.data)["tiles"])
    assert [path.split("/")[0] for path in paths] == ["tile", "groups"]
    assert timeline.lacks == ""
    assert drawn_rows(timeline, 0, np.inf) == list(range(len(analysis.data.ops)))


def test_of_a_long_run_every_bar_is_there_where_there_is_room(long_run: Analysis) -> None:
    timeline = inline_run(long_run)
    root = json.loads(timeline.data)["shift"]
    assert len({path.split("/")[-2] for path in tiles_of(timeline)}) > 1, "finer ones than the coarsest"
    assert timeline.lacks == ""
    assert drawn_rows(timeline, 0, np.inf) == list(range(len(long_run.data.ops)))
    assert f"tile/measured/0/stage/0/{root}/0" in tiles_of(timeline)


def test_without_room_for_all_the_step_to_begin_with_has_every_bar(long_run: Analysis) -> None:
    whole = inline_run(long_run)
    most = sum(map(len, json.loads(whole.data)["tiles"].values())) // 2
    for first in (2, 6):
        timeline = inline_run(long_run, first, most)
        data = json.loads(timeline.data)
        assert sum(map(len, data["tiles"].values())) <= most
        assert timeline.lacks.startswith("This page holds every bar of step")
        assert data["partial"]
        assert set(data["partial"]) < set(data["tiles"])
        steps = {step: (begin, end) for step, begin, end in data["about"]["steps"]}
        bars = Timeline(long_run).bars.measured[OPS].tracks
        for step, is_whole in ((first, True), (8 - first, False)):
            begin, end = steps[step]
            own = np.flatnonzero((bars.start >= begin) & (bars.start < end)).tolist()
            assert (set(own) <= set(drawn_rows(timeline, begin, end))) == is_whole, step


def test_with_no_room_at_all_the_coarsest_tiles_are_there(long_run: Analysis) -> None:
    timeline = inline_run(long_run, most=0)
    assert {path.split("/")[-2] for path in tiles_of(timeline)} == {str(json.loads(timeline.data)["shift"])}
    assert timeline.lacks.startswith("This page holds bars of ")


def with_memory(analysis: Analysis, times: Any, allocated: Any) -> Analysis:
    """A run whose rank 0 has memory events at some times, ns from its first op's start."""
    origin = int(analysis.data.ops["start_ns"].min())
    columns = {"rank": 0, "t_ns": origin + times, "allocated_bytes": allocated, "reserved_bytes": allocated}
    return replace(analysis, data=structs.replace(analysis.data, memory=pd.DataFrame(columns)))


@pytest.mark.parametrize("num_events", [100, 20_000])
def test_each_event_of_memory_is_in_a_tile_however_few_the_ops_are(run_p4: Path, num_events: int) -> None:
    analysis = load([run_p4])
    span = json.loads(inline_run(analysis).data)["about"]["span"]
    times = np.sort(np.random.default_rng(0).choice(span, num_events, replace=False))
    timeline = inline_run(with_memory(analysis, times, np.arange(num_events)))
    tiles = [tile for path, tile in tiles_of(timeline).items() if path.startswith("memory/")]
    assert (len(tiles) == 1) == (num_events == 100), "as few as have all"
    sampled = [tile["memory"] for tile in tiles if "held" in tile["memory"]]
    events = set(zip(*(np.concatenate([each[name] for each in sampled]) for name in ("start", "held")), strict=True))
    assert events == set(zip(times, range(num_events), strict=True))
    without = inline_run(with_memory(analysis, times, np.arange(num_events)), most=0)
    assert not without.lacks, "which speaks of bars"


def test_shares_of_groups_are_finer_where_the_ranks_have_one_tile_alone() -> None:
    timeline = inline_run(load([SAMPLES / "mesh_pp2_tp2_cp2_dp2"]))
    root = json.loads(timeline.data)["shift"]
    shifts: dict[str, set[int]] = {}
    for path in tiles_of(timeline):
        kind, *_, name, shift, _ = path.split("/")
        shifts.setdefault(name if kind == "groups" else "ranks", set()).add(int(shift))
    assert shifts.pop("ranks") == {root}
    assert set(shifts) >= {"pipeline", "stage", "tp"}
    assert all(levels == {root, root - 2, root - 4, root - 6} for levels in shifts.values())


def test_bars_have_the_details_that_a_server_would_be_asked_for(run_p4: Path) -> None:
    data = json.loads(inline_run(load([run_p4])).data)
    texts = data["about"]["tables"][OPS]["texts"]
    assert (texts["source"], texts["clock"]) == (["label"], ["host"])
    assert {"fill", "drain"} <= set(data["about"]["states"])


def simulated(name: str = "interleaved-1f1b", v: int | None = 2) -> Simulation:
    return simulate(build(name, 4, 8, v), uniform(2 * MS, 4 * MS))


def intervals(simulation: Simulation, rank: int, lane: int) -> dict[str, list[tuple[int, int]]]:
    """(start, end) of a rank's phases or idle states by name."""
    table = bars_of_simulation(simulation).measured[BACK]
    found: dict[str, list[tuple[int, int]]] = {}
    for track in table.tracks.tracks_of([rank]).tolist():
        if table.tracks.lane[track] == lane:
            for row in range(int(table.tracks.ptr[track]), int(table.tracks.ptr[track + 1])):
                name = table.texts[table.lanes[lane]][int(table.tracks.group[row])]
                start = int(table.tracks.start[row])
                found.setdefault(name, []).append((start, start + int(table.tracks.length[row])))
    return found


def test_a_simulated_rank_waits_for_a_message_only_where_one_is_late() -> None:
    free = simulate(build("1f1b", 4, 8), uniform(2 * MS, 4 * MS))
    assert set(intervals(free, 0, BUBBLES)) == {"idle"}, "the first rank waits as the schedule has it"
    slow = simulate(build("1f1b", 4, 8), uniform(2 * MS, 4 * MS, p2p_ns=MS))
    assert "late message" in intervals(slow, 0, BUBBLES)


@pytest.mark.parametrize("name", ["gpipe", "interleaved-1f1b", "zb-h1", "dualpipe-v"])
def test_idle_time_of_a_simulated_rank_is_exactly_what_its_ops_leave(name: str) -> None:
    simulation = simulated(name, 2 if name in ("interleaved-1f1b", "dualpipe-v") else None)
    without_costs = Simulation(simulation.replayed)
    for rank in simulation.ranks:
        for one in (simulation, without_costs):
            idle = intervals(one, rank.rank, BUBBLES)
            assert set(idle) <= set(MEANINGS)
            assert sum(end - start for times in idle.values() for start, end in times) == rank.bubble_ns
    assert "fill" in intervals(without_costs, 3, BUBBLES)
    assert "late message" not in intervals(without_costs, 3, BUBBLES), "which nothing tells"


def test_phases_of_a_simulated_rank_follow_each_other() -> None:
    simulation = simulated()
    for rank in range(4):
        spans = sorted(span for spans in intervals(simulation, rank, PHASES).values() for span in spans)
        assert spans[0][0] == 0
        assert spans[-1][1] == simulation.makespan_ns
        assert all(before[1] == after[0] for before, after in pairwise(spans))


def test_two_simulated_steps_can_be_compared_on_one_scale() -> None:
    simulation = simulated()
    about = json.loads(inline_simulation(simulation, 10 * simulation.makespan_ns).data)["about"]
    assert about["span"] == 10 * simulation.makespan_ns
    assert about["steps"] == [[0, 0, simulation.makespan_ns]]
