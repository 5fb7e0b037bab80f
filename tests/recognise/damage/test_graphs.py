"""Kernels that are missing within one replay of a CUDA graph, in traces made up of replays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pptrace.model.damage import Damage
from pptrace.workflow.load import load
from tests.support.kineto import event_row, write_rows

NUM_NODES, REPLAYS = 40, range(8)


def trace(folder: Path, lost: dict[int, int], *, other: tuple[int, ...] = ()) -> Path:
    """Replays of one graph, of which some have lost a number of kernels; ``other`` are of a graph with another kernel."""
    events: list[dict[str, Any]] = []
    for replay in REPLAYS:
        start, number = 1_000.0 * replay, replay + 1
        events.append(event_row("cuda_runtime", "cudaGraphLaunch", start, 5, number))
        for node in range(NUM_NODES - lost.get(replay, 0)):
            name = "tail" if replay in other and node == 0 else f"kernel{node % 7}"
            events.append(event_row("kernel", name, start + 20 + 10 * node, 8, number, stream=7))
    return write_rows(folder / "rank0.json", events)


@pytest.mark.parametrize(
    ("lost", "other", "count"),
    [({}, (), 0), ({3: 2}, (), 2), ({3: 2, 5: 1}, (), 3), ({3: 20}, (), 0), ({}, (3,), 0), ({3: 2, 4: 2}, (), 0)],
    ids=["whole", "two", "two replays", "a smaller graph", "another graph", "a graph of two replays"],
)
def test_what_one_replay_lacks_of_a_graph_is_lost(
    tmp_path: Path, lost: dict[int, int], other: tuple[int, ...], count: int
) -> None:
    report = load([trace(tmp_path, lost, other=other)], cache=False, as_recorded=True).report
    audit = {entry.kind: entry.count for entry in report.recording.audit} if report.recording is not None else {}
    assert audit.get(Damage.LOST_KERNELS, 0) == count
