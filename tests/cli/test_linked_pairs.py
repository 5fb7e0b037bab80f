"""Pipelines by hand over groups of two ranks, next to replicas of DDP in groups of two: every op is what the script did."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pptrace.model.tables import COMPUTE_KINDS
from pptrace.recognise.run import RecognisedRun
from tests.support.analysed import recognise
from tests.support.programs import ROOT, run_command
from tests.support.read import read_kineto

pytestmark = pytest.mark.processes
LIMIT_S = 120
SCRIPT = """
import json, sys, time, torch, torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
how, folder = sys.argv[1:]
dist.init_process_group("gloo")
rank, stage, replica = dist.get_rank(), dist.get_rank() // 2, dist.get_rank() % 2
link = [dist.new_group([0, 2]), dist.new_group([1, 3])][replica]
replicas = [dist.new_group([0, 1]), dist.new_group([2, 3])][stage]
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
model = DistributedDataParallel(model, process_group=replicas)
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, process_group=replicas, lr=1e-3)
seen = []
def send(tensor):
    if how == "send":
        dist.send(tensor, (rank + 2) % 4, group=link)
    else:
        dist.broadcast(tensor, rank, group=link)
def recv():
    tensor = torch.empty(8, 64)
    if how == "send":
        dist.recv(tensor, (rank + 2) % 4, group=link)
    else:
        dist.broadcast(tensor, (rank + 2) % 4, group=link)
    return tensor
def op(kind, microbatch, function):
    start = time.time_ns()
    result = function()
    seen.append((kind, microbatch, start, time.time_ns()))
    return result
def forward(x):
    y = model(x)
    return y.square().mean() if stage else y
for step in range(3):
    kept = []
    with model.no_sync():
        for microbatch in range(3):
            x = recv().requires_grad_() if stage else torch.randn(8, 64)
            kept.append((x, op("F", microbatch, lambda: forward(x))))
            if not stage:
                send(kept[-1][1].detach())
        for microbatch, (x, y) in enumerate(kept):
            gradient = None if stage else recv()
            op("B", microbatch, lambda: y.backward(gradient))
            if stage:
                send(x.grad)
    optimizer.step()
    optimizer.zero_grad()
with open(f"{folder}/seen{rank}.txt", "w") as file:
    json.dump(seen, file)
dist.destroy_process_group()
"""


def recorded(folder: Path, how: str) -> RecognisedRun:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    launch = ("pptrace", "run", "-n", "4", "--steps", "all", "--timeout", str(LIMIT_S), "-o", str(folder / "run"))
    command = [sys.executable, "-m", *launch, str(script), how, str(folder)]
    ended = run_command(command, LIMIT_S + 30, ROOT, {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, forked=True)
    assert ended.code == 0, ended
    return recognise([read_kineto(folder / "run" / f"rank{rank}.json.gz") for rank in range(4)])


@pytest.mark.parametrize("how", ["send", "broadcast"])
def test_each_op_of_a_pipeline_next_to_replicas_is_what_the_script_did_then(tmp_path: Path, how: str) -> None:
    run = recorded(tmp_path, how)
    assert (run.schedule.name, run.mesh.pp, run.mesh.dp) == ("gpipe", 2, 2)
    assert run.mesh.pipelines == ((0, 2), (1, 3))
    ops = run.ops[run.ops["kind"].isin(COMPUTE_KINDS)].sort_values("start_ns")
    for rank in range(4):
        seen = json.loads((tmp_path / f"seen{rank}.txt").read_text())
        rank_ops = ops[ops["rank"] == rank]
        assert set(rank_ops["stage"]) == {rank // 2}
        for op, (kind, microbatch, start, end) in zip(rank_ops.itertuples(), seen, strict=True):
            assert (op.kind, op.microbatch) == (kind, microbatch)
            assert min(op.end_ns, end) > max(op.start_ns, start)
    messages = run.comms[run.comms["axis"] == "pp"]
    assert messages.groupby(["rank", "kind"]).size().tolist() == [9] * 8
    assert set(messages["kind"]) == {"send", "recv"}
    assert (messages["match"] >= 0).all()
    copies = run.comms[(run.comms["kind"] == "broadcast") & (run.comms["step"] >= 0)]  # of the optimizer
    assert set(copies["axis"]) == {"dp"}
