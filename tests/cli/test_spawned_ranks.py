"""Scripts that start their ranks by themselves, with ``torch.multiprocessing.spawn``: as they run without a launcher."""

from __future__ import annotations

import json
import multiprocessing
import pickle
from pathlib import Path

import pytest

from instrument.launch.options import RunOptions
from instrument.launch.rank import _with_a_port_of_its_own
from instrument.launch.record import spawned_dir
from instrument.launch.spawned import SpawnedRank, record_as_rank
from instrument.launch.window import parse_steps
from instrument.launch.worker import WorkerConfig
from pptrace.workflow.load import load
from tests.support.extent import ALL
from tests.support.programs import pptrace

SCRIPT = """
import os, socket, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
SIZE, MICROBATCHES = 2, 4

def train(index, port):
    rank = SIZE - 1 - index  # not in the order in which they are started
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=SIZE)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        kept = []
        for _ in range(MICROBATCHES):
            inputs = torch.randn(32, 64, requires_grad=rank > 0)
            if rank > 0:
                with torch.no_grad():
                    dist.recv(inputs, rank - 1)
            outputs = model(inputs)
            if rank < SIZE - 1:
                dist.send(outputs.detach(), rank + 1)
            kept.append((inputs, outputs))
        for inputs, outputs in kept:
            if rank < SIZE - 1:
                gradient = torch.empty_like(outputs)
                dist.recv(gradient, rank + 1)
                outputs.backward(gradient)
            else:
                outputs.pow(2).mean().backward()
            if rank > 0:
                dist.send(inputs.grad, rank - 1)
        if step == 5 and rank == 1 and "fail" in sys.argv:
            raise ValueError("bad batch")
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()

if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    mp.spawn(train, args=(port,), nprocs=SIZE)
"""


@pytest.mark.processes
@pytest.mark.parametrize("fate", ["well", "fail"] if ALL else ["well"])
def test_ranks_that_a_script_spawns_are_those_of_the_run(fate: str, tmp_path: Path) -> None:
    script, run_dir = tmp_path / "spawn.py", tmp_path / "run"
    script.write_text(SCRIPT)
    ended = pptrace("run", "--steps", "2:5", "--no-analyze", "-o", run_dir, script, fate, timeout_s=120)
    run = json.loads((run_dir / "run.json").read_text())
    assert run["world_size"] == 2
    assert [(rank["rank"], rank["trace"]) for rank in run["ranks"]] == [(0, "rank0.json.gz"), (1, "rank1.json.gz")]
    assert sorted(path.name for path in run_dir.iterdir()) == ["rank0.json.gz", "rank1.json.gz", "run.json"]
    if fate == "fail":
        assert (ended.code, run["status"]) == (1, "failed")
        assert run["ranks"][1]["status"] == "failed"  # the first one needs nothing of it any more
        assert str(run["ranks"][1]["error"]).endswith("ValueError: bad batch")
        assert "pptrace: rank 1 failed" in ended.err
        return
    assert (ended.code, run["status"]) == (0, "ok"), ended.err
    assert [(rank["status"], rank["steps_seen"]) for rank in run["ranks"]] == [("ok", 6)] * 2
    report = load([run_dir]).report
    assert report.mesh.pp == 2
    assert (report.schedule.name, report.schedule.num_microbatches) == ("gpipe", 4)
    assert [step.step for step in report.steps] == [2, 3, 4]
    assert {rank.rank: rank.stage for rank in report.steps[0].ranks} == {0: 0, 1: 1}


def config_of(folder: Path, profiler: str = "torch") -> WorkerConfig:
    options = RunOptions(("train.py",), folder / "run", profiler=profiler, window=parse_steps("2:5"))
    return WorkerConfig(options, folder)


def test_a_spawned_process_is_recorded_with_what_its_launcher_was_told(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=print)
    assert record_as_rank(config_of(tmp_path), process, 3)
    rank = pickle.loads(pickle.dumps(vars(process)["_target"]))
    assert isinstance(rank, SpawnedRank)
    assert (rank.target, rank.index) == (print, 3)
    assert rank.config.options == config_of(tmp_path).options
    assert rank.config.record_dir == rank.config.control_dir == spawned_dir(tmp_path)


def test_a_forked_process_and_one_under_nsys_stay_as_they_are(tmp_path: Path) -> None:
    forked = multiprocessing.get_context("fork").Process(target=print)
    assert not record_as_rank(config_of(tmp_path), forked, 0)
    spawned = multiprocessing.get_context("spawn").Process(target=print)
    assert not record_as_rank(config_of(tmp_path, "nsys"), spawned, 0)
    assert vars(forked)["_target"] is vars(spawned)["_target"] is print
    assert not spawned_dir(tmp_path).exists()


def test_one_rank_holds_its_own_store_and_several_share_the_launchers() -> None:
    several = {"WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": "1"}
    before = dict(several)
    _with_a_port_of_its_own(several)
    assert several == before
    alone = before | {"WORLD_SIZE": "1"}
    _with_a_port_of_its_own(alone)
    assert "TORCHELASTIC_USE_AGENT_STORE" not in alone
    assert int(alone["MASTER_PORT"]) > 1023
