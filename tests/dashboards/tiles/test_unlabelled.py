"""Ranks without ops of a pipeline: their compute is drawn, with what their device waited for, and steps can be chosen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dashboards.app import create_app
from pptrace.report.tiles.cut import Range
from pptrace.report.tiles.details import details
from pptrace.report.tiles.measured import BACK, BUBBLES, OPS
from pptrace.report.tiles.timeline import Timeline
from pptrace.workflow.load import load
from tests.support.kineto import event_row, write_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two profiler steps of one GPU, µs: in each a kernel of 30 and, launched 40 later, one of 20."""
    events = []
    for step in (1, 2):
        first = 1000.0 * step
        events.append(event_row("user_annotation", f"ProfilerStep#{step}", first, 900))
        for number, (launched, length) in enumerate(((10, 30), (80, 20))):
            link = 10 * step + number
            events.append(event_row("cuda_runtime", "cudaLaunchKernel", first + launched, 2, link))
            events.append(event_row("kernel", "gemm", first + launched + 4, length, link, stream=7, device=0))
    path = tmp_path_factory.mktemp("unlabelled") / "rank0.json"
    return write_rows(path, events, distributedInfo={"rank": 0, "world_size": 1}).parent


@pytest.fixture(scope="module")
def timeline(folder: Path) -> Timeline:
    return Timeline(load([folder]))


def test_compute_of_a_rank_without_microbatches_is_drawn(timeline: Timeline) -> None:
    table = timeline.measured[OPS]
    is_compute = np.repeat(table.tracks.lane == 0, np.diff(table.tracks.ptr))
    assert table.tracks.length[is_compute].tolist() == [30_000, 20_000] * 2
    assert details(timeline, "measured", 0, OPS, int(np.flatnonzero(is_compute)[0]))[0] == ("", "Compute")
    assert timeline.tile("measured", 0, "stage", 0, Range(13, 0))


def test_between_its_kernels_it_is_said_whether_the_next_was_launched(timeline: Timeline) -> None:
    table = timeline.measured[BACK]
    tracks = table.tracks
    is_idle = np.repeat(tracks.lane == BUBBLES, np.diff(tracks.ptr))
    assert tracks.start[is_idle].min() >= 30_000, "nothing before the first kernel"
    states = [table.texts["bubbles"][group] for group in tracks.group[is_idle].tolist()]
    lengths = dict.fromkeys(states, 0)
    for state, ns in zip(states, tracks.length[is_idle].tolist(), strict=True):
        lengths[state] += ns
    assert lengths["not launched"] > 0
    assert states.count("not launched") == 3
    assert sum(lengths.values()) == (1_090 - 100) * 1_000, "from the first kernel to the last one"


def test_its_steps_can_be_chosen_and_have_no_critical_path(folder: Path) -> None:
    client = create_app([folder]).server.test_client()
    about = client.get("/timeline-data/about").get_json()
    assert [step for step, *_ in about["steps"]] == [1, 2]
    assert not about["hasPipeline"]
    reason = client.get(f"/timeline-data/critical/{about['token']}/1").get_json()["reason"]
    assert reason == "not known: these are no steps of a pipeline"
