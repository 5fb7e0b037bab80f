"""Settings that a run records: a list of names, and nothing else of the environment."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from instrument.launch.facts import read_backend, read_device_id, read_network_ports
from instrument.launch.recording.core_wait import CoreWait
from pptrace.environment import read_environment
from pptrace.workflow.load import load
from tests.support.programs import pptrace

SECRET = "hunter2-in-the-environment"


def test_settings_of_the_list_are_recorded_with_their_values() -> None:
    environ = {"NCCL_ALGO": "Ring", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_P2P_DISABLE": "1"}
    assert read_environment(environ) == environ


def test_other_variables_are_not_and_other_settings_of_nccl_only_by_name() -> None:
    environ = {"HF_TOKEN": SECRET, "PATH": "/usr/bin", "MY_NCCL_ALGO": "x", "CUDA_VISIBLE_DEVICES": "3"}
    assert read_environment(environ) == {}
    assert read_environment({"NCCL_AUTH_TOKEN": SECRET, "NCCL_TOPO_FILE": "/home/me"}) == {
        "NCCL_AUTH_TOKEN": "set",
        "NCCL_TOPO_FILE": "set",
    }


def test_waiting_for_a_core_is_counted_over_threads() -> None:
    before = CoreWait.now()
    assert before.until(before) is None
    waited = before.until(CoreWait.now())
    assert waited is None or 0 <= waited["wait_ns"] < 1e12
    assert CoreWait(5, 100).until(CoreWait(25, 200)) == {"wait_ns": 20, "elapsed_ns": 100}
    assert CoreWait(25, 100).until(CoreWait(5, 200)) == {"wait_ns": 0, "elapsed_ns": 100}
    assert CoreWait(None, 100).until(CoreWait(5, 200)) is None


SCRIPT = """
import os
os.environ["NCCL_PROTO"] = "LL"  # as a launcher script would
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


@pytest.mark.processes
def test_a_run_writes_them_into_run_json_and_its_traces_and_no_secret_anywhere(tmp_path: Path) -> None:
    script, run = tmp_path / "script.py", tmp_path / "run"
    script.write_text(SCRIPT, encoding="utf-8")
    environ = {"NCCL_ALGO": "Ring", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_COMM_ID": SECRET, "HF_TOKEN": SECRET}
    ended = pptrace("run", "--no-analyze", "--steps", "1:3", "-o", run, script, environ=environ, forked=True)
    assert ended.code == 0, ended.err
    expected = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_ALGO": "Ring", "NCCL_COMM_ID": "set", "NCCL_PROTO": "LL"}
    assert json.loads((run / "run.json").read_text(encoding="utf-8"))["environment"] == expected
    facts = load([run]).facts[0]
    assert facts["environment"] == expected
    assert facts["core_wait"]["elapsed_ns"] > 0
    for file in run.rglob("*"):
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        assert SECRET.encode() not in content, file


def test_active_ports_of_network_cards_are_read_as_linux_writes_them(tmp_path: Path) -> None:
    assert read_network_ports(tmp_path / "none") == {}
    for card, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN"), ("mlx5_2", "4: ACTIVE")):
        port = tmp_path / card / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        if card != "mlx5_2":
            (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    assert read_network_ports(tmp_path) == {"mlx5_0/1": "400 Gb/sec (4X NDR)"}


@pytest.mark.parametrize(
    ("name", "in_use", "is_known"),
    [("NVIDIA H200", True, True), ("NVIDIA H200 MIG 1g.18gb", True, False), ("NVIDIA H200", False, False)],
)
def test_ranks_have_equal_ids_of_gpus_exactly_if_they_share_one(
    monkeypatch: pytest.MonkeyPatch, name: str, in_use: bool, is_known: bool
) -> None:
    """Unless it is a part of one, or not used; before torch 2.4 none is known."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name=name, uuid=index))
    ids = []
    for index in (0, 1, 0):
        monkeypatch.setattr(torch.cuda, "current_device", lambda index=index: index)
        ids.append(read_device_id())
    assert (ids[0] == ids[2] != ids[1]) == is_known
    assert [each is not None and len(each) == 8 for each in ids] == [is_known] * 3
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name=name))
    assert read_device_id() is None


@pytest.mark.parametrize(
    ("has_cuda", "named", "backend"), [(False, "undefined", "gloo"), (True, "undefined", "nccl"), (True, "mpi", "mpi")]
)
def test_a_backend_that_the_script_did_not_name_is_that_of_its_device(
    monkeypatch: pytest.MonkeyPatch, has_cuda: bool, named: str, backend: str
) -> None:
    """``init_process_group()`` without one has a backend for each type of device, and torch calls them together undefined."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: named)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    assert read_backend() == backend
