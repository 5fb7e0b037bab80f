"""Programs that a script starts: torch's launcher is noticed, and everything is started as it would be."""

from __future__ import annotations

import subprocess
import sys
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

from instrument.launch.started_processes import StartedProcesses


@pytest.mark.parametrize(
    ("command", "is_launcher"),
    [
        (["torchrun", "--nproc-per-node", "2", "train.py"], True),
        ("cd there && /usr/bin/torchrun train.py", True),
        (("-m", "torch.distributed.run", "train.py"), True),
        ([b"-m", b"torch.distributed.launch"], True),
        ("torchrun --nproc-per-node 2 -m instrument.launch -o run train.py", False),
        (["cat", "torchrun.log", "my-torchrun", "logs/torchrun/0", "torch.distributed.runner"], False),
    ],
)
def test_torch_s_launcher_is_noticed(monkeypatch: pytest.MonkeyPatch, command: Any, is_launcher: bool) -> None:
    given: list[object] = []
    monkeypatch.setattr(subprocess.Popen, "__init__", lambda self, args, shell=False: given.append((args, shell)))
    monkeypatch.setattr(BaseProcess, "start", BaseProcess.start)
    started = StartedProcesses()
    started.watch()
    subprocess.Popen(args=command, shell=True)
    assert started.has_torchrun is is_launcher
    subprocess.Popen([sys.executable])
    assert started.has_torchrun is is_launcher
    assert given == [(command, True), ([sys.executable], False)]
