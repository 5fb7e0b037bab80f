"""Memory of real runs over gloo: peaks of steps, every allocation with ``--memory``, and a snapshot when memory runs out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import pptrace as pptrace_api
from pptrace.workflow.load import load
from tests.support.programs import EXAMPLE, pptrace

pytestmark = pytest.mark.processes

MIB = 2**20
UNEVEN = """
import resource, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.Adam(model.parameters())
for step in range(7):
    if step == 3 and dist.get_rank() == 1:
        torch.ones(200 * 2**20, dtype=torch.uint8)
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    hidden = model(torch.ones(1000, 64))
    loss = hidden.relu().sum()
    if step == 5 and dist.get_rank() == 1:
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >= most
        held = torch.zeros(30 * 2**20, dtype=torch.uint8)
        torch.empty(2**46)
    dist.all_reduce(torch.ones(1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_rank_that_runs_out_of_memory_leaves_its_peaks_and_what_was_alive(tmp_path: Path) -> None:
    script, run_dir = tmp_path / "uneven.py", tmp_path / "run"
    script.write_text(UNEVEN)
    ended = pptrace(
        "run", "-n", "2", "--steps", "2:5", "--no-analyze", "-o", run_dir, script, timeout_s=120, forked=True
    )
    assert ended.code == 1
    (line,) = [line for line in ended.err.splitlines() if "pptrace: out of memory" in line]
    assert "in step 5" in line
    assert str(run_dir / "rank1.memory.json") in line
    (held,) = [line for line in ended.err.splitlines() if "peak memory when it ran out" in line]
    assert "rank 0 " in held
    assert "rank 1 " in held
    assert held.count("(step 5)") == 2

    snapshot = json.loads((run_dir / "rank1.memory.json").read_text())
    assert not (run_dir / "rank0.memory.json").exists()
    assert (snapshot["step"], snapshot["tensors"][0]["bytes"]) == (5, 30 * MIB)
    sums = {entry["what"]: entry["bytes"] for entry in snapshot["by_what"]}
    parameters = 4 * (64 * 64 + 64)
    assert sums["parameter"] == parameters
    assert 2 * parameters <= sums["optimizer state"] <= 2 * parameters + 64
    by_op = {entry["op"]: entry["bytes"] for entry in snapshot["by_op"]}
    assert (by_op["ReluBackward0"], by_op["AddmmBackward0"]) == (
        256_000,
        512_000,
    )  # its result; its input and its output
    assert snapshot["total_bytes"] == sum(sums.values())
    ranks = json.loads((run_dir / "run.json").read_text())["ranks"]
    assert [rank["out_of_memory"] for rank in ranks] == [None, "rank1.memory.json"]

    peaks = {
        (rank.rank, step.step): (rank.peak_memory_bytes, rank.peak_memory_kind)
        for step in load([run_dir]).report.steps
        for rank in step.ranks
    }
    assert {kind for _, kind in peaks.values()} == {"process_resident"}
    of_rank = {step: peak for (rank, step), (peak, _) in peaks.items() if rank == 1}
    assert sorted(of_rank) == [2, 3, 4]
    assert of_rank[3] - max(of_rank[2], of_rank[4]) > 150 * MIB
    assert max(peak for (rank, _), (peak, _) in peaks.items() if rank == 0) < of_rank[3] - 100 * MIB


def test_what_the_runtime_allocates_is_what_is_predicted_and_the_temporaries_of_ops(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    model = ("--hidden", "128", "--seq", "128", "--layers", "4", "--microbatch-size", "2")
    arguments = ("--schedule", "1f1b", "--pp", "2", "--microbatches", "4", "--steps", "5", *model)
    ended = pptrace("run", "-n", "2", "--memory", "-o", run_dir, EXAMPLE, *arguments, timeout_s=120, forked=True)
    assert ended.code == 0, ended.err
    assert "Memory" in ended.out
    assert "tensors on the host, made since recording began" in ended.out
    analysis = load([run_dir])
    memory = analysis.report.memory
    assert memory.reasons == ()
    assert [(rank.in_flight.planned, rank.in_flight.measured) for rank in memory.ranks] == [(2, 2), (1, 1)]
    for rank in memory.ranks:
        assert rank.kind == "host_allocated"
        made = rank.predicted.activations_bytes + rank.predicted.gradients_bytes
        assert made < rank.peak_bytes < 1.3 * made
    assert len(analysis.data.memory) > 1000
    sizes = {"hidden": 128, "sequence": 128, "layers": 4, "microbatch_size": 2, "heads": 4, "vocabulary": 256}
    before = pptrace_api.estimate("1f1b", pp=2, microbatches=4, number_bytes=4, **sizes).estimate.ranks
    for rank, estimated in zip(memory.ranks, before, strict=True):
        assert rank.predicted.activations_bytes == estimated.activations_bytes
        assert rank.predicted.gradients_bytes == estimated.gradients_bytes
