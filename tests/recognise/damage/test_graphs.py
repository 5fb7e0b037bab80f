"""Kernels that are missing within one replay of a CUDA graph, in traces made up of replays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pptrace.model.damage import Damage
from pptrace.workflow.load import load

NUM_NODES, REPLAYS = 40, range(8)


def trace(folder: Path, lost: dict[int, int], *, other: tuple[int, ...] = ()) -> Path:
    """Replays of one graph, of which some have lost a number of kernels; ``other`` are of a graph with another kernel."""
    events: list[dict[str, Any]] = []
    for replay in REPLAYS:
        start, number = 1_000.0 * replay, {"correlation": replay + 1}
        call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "pid": 1, "tid": 1, "args": number}
        events.append(call | {"ts": start, "dur": 5})
        for node in range(NUM_NODES - lost.get(replay, 0)):
            name = "tail" if replay in other and node == 0 else f"kernel{node % 7}"
            kernel = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "args": {**number, "stream": 7}}
            events.append(kernel | {"ts": start + 20 + 10 * node, "dur": 8})
    path = folder / "rank0.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}), encoding="utf-8")
    return path


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
