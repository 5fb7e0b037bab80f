"""Two launchers that meet over loopback, as those of two nodes do: together, and where one is lost on the way."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

import pptrace
from tests.cli.test_run import Run

pytestmark = pytest.mark.processes

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from instrument import session
dist.init_process_group("gloo")
for step in session.current().steps(int(sys.argv[1])):
    dist.all_reduce(torch.ones(8))
    if step == 3:
        print("three")
dist.destroy_process_group()
"""

Nodes = list[tuple[Path, list[str]]]


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    """Of each node its directory, which the other one does not see, and its options."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = []
    for node in (0, 1):
        directory = tmp_path / f"node{node}"
        directory.mkdir()
        (directory / "train.py").write_text(SCRIPT)
        meeting = ["--nnodes", "2", "--node-rank", str(node), "--rdzv-endpoint", f"127.0.0.1:{port}"]
        found.append((directory, [*meeting, "-n", "1"]))
    return found


def started(nodes: Nodes, *steps: str, num_steps: int) -> list[Run]:
    return [Run(directory, *options, *steps, "train.py", str(num_steps)) for directory, options in nodes]


def test_traces_of_both_nodes_are_one_run(nodes: Nodes) -> None:
    runs = started(nodes, "--steps", "1:4", num_steps=5)
    try:
        ended = [run.end() for run in runs]
    finally:
        for run in runs:
            run.clean_up()
    assert [one.code for one in ended] == [0, 0], [one.err for one in ended]
    report = pptrace.load([one.run_dir for one in ended]).report
    assert sorted(entry.rank for entry in report.inputs if entry.rank is not None) == [0, 1]
    assert report.mesh.num_ranks == 2
    assert {step.step for step in report.steps} == {1, 2, 3}


def test_a_node_that_is_lost_ends_the_other_one_which_keeps_its_trace(nodes: Nodes) -> None:
    runs = started(nodes, "--steps", "1:1000000", num_steps=1_000_000)
    try:
        runs[0].wait_for_output("three")
        os.killpg(runs[1].process.pid, signal.SIGKILL)
        for pid in runs[1].rank_pids():
            os.kill(pid, signal.SIGKILL)
        ended = runs[0].end()
    finally:
        for run in runs:
            run.clean_up()
    assert ended.code == 1
    assert ended.err.startswith("pptrace: rank 0 failed: ")
    assert ended.tail_s < 60
    assert ended.facts["status"] == "failed"
    assert (ended.run_dir / "rank0.json.gz").is_file()
