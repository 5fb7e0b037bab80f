"""The timeline of a run: the plan beside what was measured, a microbatch's journey, search, details, and its bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from pptrace.intervals import intersect
from pptrace.model.mesh import MeshInfo
from pptrace.report.tiles.bubbles import STATES
from pptrace.report.tiles.cut import Range
from pptrace.report.tiles.details import details
from pptrace.report.tiles.journey import journey
from pptrace.report.tiles.layout import layout_of
from pptrace.report.tiles.search import search
from pptrace.report.tiles.timeline import MEASURED, MOST_KEPT_OPS, PLANNED, SIMULATED, Timeline, without_tables
from pptrace.schedule.registry import build
from pptrace.simulator import simulate, uniform
from pptrace.workflow.load import load
from tests.dashboards.synthetic import TRANSFER_NS
from tests.support.programs import SAMPLES
from tests.support.tile import sections_of


@pytest.fixture(scope="module")
def timeline(run_p4: Path) -> Timeline:
    return Timeline(load([run_p4]))


def test_a_tile_says_of_each_bar_what_the_table_has(timeline: Timeline, run_p4: Path) -> None:
    ops = load([run_p4]).data.ops
    section = sections_of(timeline.tile(MEASURED, 0, "stage", 0, Range(20, 0)))["ops"]
    assert section["count"] == len(ops)
    kinds = section["kinds"]
    shown = sorted(
        zip(
            np.array(section["rank"])[section["track"]].tolist(),
            (section["start"].astype(np.int64) + timeline.origin_ns).tolist(),
            section["length"].tolist(),
            [kinds[code] for code in section["kind"]],
            section["microbatch"].tolist(),
            strict=True,
        )
    )
    length = ops["end_ns"] - ops["start_ns"]
    assert shown == sorted(
        zip(ops["rank"], ops["start_ns"], length, map(str, ops["kind"]), ops["microbatch"], strict=True)
    )


def test_the_plan_in_time_is_the_closed_form(timeline: Timeline) -> None:
    """Means over stages of which one is 1.3 times as slow; 1F1B takes (m + p − 1)(f + b)."""
    picture = timeline.picture(PLANNED, 2)
    tracks = picture["ops"].tracks
    forward, backward = round(4_000_000 * (1 + 0.3 / 4)), round(8_000_000 * (1 + 0.3 / 4))
    expected = simulate(build("1f1b", 4, 8), uniform(forward, backward))
    start = timeline.windows_of(2)[0].start_ns - timeline.origin_ns
    assert int(tracks.start.min()) == start
    assert int((tracks.start + tracks.length).max()) - start == expected.makespan_ns == 11 * (forward + backward)
    assert timeline.picture(PLANNED, 99) is None


def test_the_simulated_step_has_each_stages_cost_and_messages(timeline: Timeline) -> None:
    picture = timeline.picture(SIMULATED, 3)
    tracks = picture["ops"].tracks
    of_rank = np.repeat(tracks.rank, np.diff(tracks.ptr))
    assert set(tracks.length[of_rank == 1].tolist()) == {round(4e6 * 1.2 * 1.3), round(8e6 * 1.2 * 1.3)}
    assert set(tracks.length[of_rank == 0].tolist()) == {round(4e6 * 1.2), round(8e6 * 1.2)}
    measured = timeline.windows_of(3)[0].span_ns
    span = int((tracks.start + tracks.length).max() - tracks.start.min())
    assert 0.98 * measured < span < measured, "the run was made with these costs, by ranks that waited for their sends"


def test_the_journey_of_each_microbatch_has_every_op_and_message_in_order(timeline: Timeline) -> None:
    down = [hop for stage in range(3) for hop in (("F", stage), ("send", stage), ("recv", stage + 1))]
    up = [hop for stage in (3, 2, 1) for hop in (("B", stage), ("send", stage), ("recv", stage - 1))]
    expected = [*down, ("F", 3), *up, ("B", 0)]
    for microbatch in range(8):
        hops = journey(timeline, MEASURED, 4, rank=2, microbatch=microbatch)
        assert [(hop["what"], hop["rank"]) for hop in hops] == expected
        planned = {(hop["what"], hop["rank"]): hop for hop in journey(timeline, PLANNED, 4, 2, microbatch)}
        for hop in hops:
            if hop["what"] in "FB":
                of_plan = planned[hop["what"], hop["rank"]]
                assert hop["late_ns"] == hop["start_ns"] - of_plan["start_ns"]
                assert of_plan["late_ns"] == of_plan["longer_ns"] == 0
            else:
                assert hop["late_ns"] is not None
                assert hop["transfer_ns"] == hop["end_ns"] - hop["start_ns"] - hop["wait_ns"] == TRANSFER_NS
    assert journey(timeline, MEASURED, 4, 2, 99) == []


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved-1f1b", "zb-h1", "zbv", "dualpipe", "dualpipe-v"])
def test_the_journey_has_the_ops_of_every_schedule(schedule: str, tmp_path: Path) -> None:
    plan = build(schedule, pp=4, num_microbatches=8)
    simulation = simulate(plan, uniform(1_000_000, 2_000_000))
    timeline = Timeline(load([to_tables(tmp_path, simulation.ops())]))
    actions = [part for row in plan.ranks for action in row for part in (action.parts or (action,))]
    computing = [part for part in actions if part.kind.is_compute]
    for microbatch in (0, 5):
        hops = journey(timeline, MEASURED, 0, 0, microbatch)
        expected = sorted((str(part.kind), part.stage) for part in computing if part.microbatch == microbatch)
        assert sorted((hop["what"], hop["stage"]) for hop in hops) == expected
        assert [hop["start_ns"] for hop in hops] == sorted(hop["start_ns"] for hop in hops)


def to_tables(folder: Path, ops: pd.DataFrame) -> Path:
    ops.to_csv(folder / "ops.csv", index=False)
    return folder / "ops.csv"


@pytest.mark.parametrize(
    ("text", "total"),
    [
        ("step 2", 4 * (2 * 8 + 1) + 3 * 2 * 2 * 8),  # ops of four ranks, and sends and receives between them
        *(("rank 1 F", 24), ("2B7", 3), ("F 3 step 4", 4), ("mb 7 backward rank 0", 3), ("send rank 3", 24)),
    ],
)
def test_a_search_finds_what_the_words_say(text: str, total: int, timeline: Timeline) -> None:
    answer = search(timeline, text)
    assert (answer["total"], answer["unknown"]) == (total, [])
    starts = [bar[1] for bar in answer["found"]]
    assert starts == sorted(starts)


def test_a_search_sorts_by_length_and_says_what_it_does_not_know(timeline: Timeline) -> None:
    lengths = [bar[2] for bar in search(timeline, "longest B")["found"]]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 8_000_000 * 1.3 * 1.4
    assert search(timeline, "nonsense 4") == {"total": 0, "found": [], "unknown": ["nonsense"], "first": 0}
    assert search(timeline, "") == {"total": 0, "found": [], "unknown": [], "first": 0}


def test_a_search_finds_nothing_that_is_not_drawn() -> None:
    """Ranges of whole steps have no lane: the longest bar would be one that nobody sees."""
    timeline = Timeline(load([SAMPLES / "experts_pp2_ep2"]))
    ops = timeline.measured["ops"]
    steps = ops.lanes.index("steps")
    assert steps in ops.tracks.lane, "there are some"
    found = search(timeline, "longest")["found"]
    assert found[0][2] > 0
    assert not any(name == "ops" and lane == steps for _, _, _, name, lane, *_ in found)


def test_an_op_of_a_device_says_how_long_it_did_not_compute_in_it_and_why() -> None:
    """The rest is its compute, which the page Stages has."""
    analysis = load([SAMPLES / "gpu_1f1b_p4"])
    own = Timeline(analysis)
    tracks = own.measured["ops"].tracks
    compute = analysis.data.lanes[0].compute
    starved = 0.0
    for row in range(tracks.ptr[0], tracks.ptr[1]):
        begin = own.origin_ns + int(tracks.start[row])
        end = begin + int(tracks.length[row])
        texts = dict(details(own, MEASURED, 3, "ops", row))
        gaps = {name: float(texts.get(f"in it, {name}", "0 ms").split()[0]) for name in STATES}
        starved += gaps["not launched"]
        busy = intersect(compute, np.array([[begin, end]]))
        assert sum(gaps.values()) == pytest.approx((end - begin - int(np.diff(busy).sum())) / 1e6, abs=0.031)
        ops = own.work_of_op(0, int(tracks.start[row]), int(tracks.start[row] + tracks.length[row]))
        assert sum(part.ns for part in ops.classes) == ops.compute_ns == int(np.diff(busy).sum())
        assert texts[f"in it, {ops.classes[0].name}"].endswith("FLOP/s")
    assert starved > 0


def test_the_details_of_a_bar_are_texts(timeline: Timeline) -> None:
    hops = journey(timeline, MEASURED, 2, 0, 3)
    shown = dict(details(timeline, MEASURED, 2, "ops", hops[0]["row"]))
    assert shown[""] == "Forward of microbatch 3"
    assert (shown["rank"], shown["stage"], shown["step"]) == ("0", "0", "2")
    assert "later" in shown["than in the plan"]
    assert shown.get("critical path") or shown.get("slack")
    message = dict(details(timeline, MEASURED, 2, "comms", hops[1]["row"]))
    assert (message[""], message["carries"], message["transfers"]) == ("Send to rank 1", "activations", "0.40 ms")
    with pytest.raises(LookupError):
        details(timeline, MEASURED, 2, "ops", 10**9)


def test_an_op_says_for_how_much_of_the_bubble_it_is_blamed(timeline: Timeline) -> None:
    step = next(step for step in timeline.report.steps if step.step == 2)
    expected = {}
    for op in step.blame.ops:
        title = f"{'Forward' if op.kind == 'F' else 'Backward'} of microbatch {op.microbatch}"
        expected[title, str(op.rank), str(op.stage)] = f"{op.ns / 1e6:.2f} ms of bubbles"
    assert expected
    rows = range(len(timeline.measured["ops"].tracks))
    texts = [dict(details(timeline, MEASURED, 2, "ops", row)) for row in rows]
    found = {(text[""], text["rank"], text.get("stage")): text for text in texts if text.get("step") == "2"}
    assert {op: text["blamed for"] for op, text in found.items() if "blamed for" in text} == expected


def test_a_report_keeps_ops_that_overlap_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracks part them, so that their order is not that of the report."""
    ops = simulate(build("1f1b", 2, 4), uniform(1_000_000, 2_000_000)).ops()
    ops.loc[ops.index[0], "end_ns"] += 1_500_000
    analysis = load([to_tables(tmp_path, ops)])
    monkeypatch.setattr("pptrace.report.tiles.timeline.MOST_KEPT_OPS", 1)
    timeline = Timeline(analysis)
    assert timeline.measured["ops"].tracks.depths[0] == 2
    assert timeline.report == analysis.report
    rows = timeline.report.steps[0].ranks[0].ops
    assert rows.rows["stage"].dtype == np.int8


def test_a_large_run_keeps_its_tracks_and_report_alone(run_p4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    analysis = load([run_p4])
    monkeypatch.setattr("pptrace.report.tiles.timeline.MOST_KEPT_OPS", 10)
    timeline = Timeline(analysis)
    assert MOST_KEPT_OPS > 10
    assert timeline.slack(2) is None
    light = without_tables(analysis, timeline.report)
    assert light.report == analysis.report == timeline.report
    columns = timeline.measured["ops"].tracks.columns
    for rank in timeline.report.steps[1].ranks:
        rows = rank.ops
        assert np.shares_memory(rows.rows["microbatch"], columns["microbatch"]), "nothing is kept twice"
    assert (len(light.data.ops), len(light.data.comms)) == (0, 0)


def test_ranks_are_grouped_by_stage_and_by_pipeline(tmp_path: Path) -> None:
    ops = simulate(build("1f1b", 2, 2), uniform(1_000_000, 2_000_000)).ops()
    both = pd.concat([ops, ops.assign(rank=ops["rank"] + 2)])
    layout = Timeline(load([to_tables(tmp_path, both)])).layout
    assert layout.orders["stage"] == (("stage 0", (0, 2)), ("stage 1", (1, 3)))
    assert layout.orders["pipeline"] == (("pipeline 0", (0, 1)), ("pipeline 1", (2, 3)))
    assert layout.blocks("stage") == ((0, 2, 1, 3),)


def test_ranks_are_grouped_by_their_coordinate_on_each_axis_on_which_they_differ() -> None:
    """Megatron's order, tp fastest: rank = tp + 2 · (cp + 2 · (dp + 2 · pp)); axes that group as others do are left out."""
    pipelines = tuple((rank, rank + 8) for rank in range(8))
    mesh = MeshInfo(16, 2, 1, 2, 2, 2, None, pipelines=pipelines)
    orders = layout_of(range(16), mesh, {}).orders
    assert list(orders) == ["stage", "pipeline", "replica", "tp", "cp"]
    assert orders["replica"] == (("replica 0", (0, 1, 2, 3, 8, 9, 10, 11)), ("replica 1", (4, 5, 6, 7, 12, 13, 14, 15)))
    assert [at for _, at in orders["tp"]] == [tuple(range(first, 16, 2)) for first in (0, 1)]
    assert [at[:4] for _, at in orders["cp"]] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    two = MeshInfo(4, 2, 1, 1, 1, 2, None, pipelines=((0, 2), (1, 3)))
    assert list(layout_of(range(4), two, {}).orders) == ["stage", "pipeline"]


def test_what_is_found_names_its_microbatch(timeline: Timeline) -> None:
    assert {bar[6] for bar in search(timeline, "rank 3 B 5")["found"]} == {5}
    assert {bar[6] for bar in search(timeline, "step 2 F")["found"]} == set(range(8))
