"""The example trains, and tells a mistake in one line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from instrument.examples.train_gpt import main

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--layers", "4", "--hidden", "16", "--heads", "2", "--seq", "16", "--microbatches", "4"]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def losses(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss +([\d.]+)", output)]


def test_one_process_trains_and_the_loss_falls(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--steps", "8", "--lr", "0.01"]) == 0
    seen = losses(capsys.readouterr().out)
    assert len(seen) == 8
    assert seen[-1] < seen[0] - 0.5


def test_two_ranks_train_as_one_does(capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += ["instrument/examples/train_gpt.py", *SMALL, "--steps", "3", "--tied"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert main([*SMALL, "--steps", "3", "--tied"]) == 0
    assert losses(done.stdout) == pytest.approx(losses(capsys.readouterr().out), abs=2e-4)


@pytest.mark.parametrize(
    ("arguments", "world", "message"),
    [
        (["--pp", "3"], 4, "pp=3 does not divide the world of 4 ranks; choose sizes whose product is 4"),
        (["--layers", "3"], 4, "4 stages need at least 4 layers and the model has 3"),
        (["--hidden", "97"], 4, "hidden size 97 does not divide into 4 heads"),
        (["--schedule", "nosuch"], 4, "schedule 'nosuch' is not known"),
        (["--split", "3,x"], 2, "--split is '3,x'; expected layers per stage, such as 3,2,2,1"),
        (["--split", "3,3"], 2, "split 3,3 has 6 layers"),
        (["--steps", "0"], 1, "--steps is 0"),
        (["--microbatches", "0"], 1, "0"),
        (["--sleep-forward", "-1"], 1, "--sleep-forward and --sleep-backward take milliseconds from 0 up"),
        (["--schedule", "interleaved-1f1b", "--microbatches", "3"], 4, "interleaved-1f1b"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_two(
    arguments: list[str],
    world: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in (("RANK", 0), ("WORLD_SIZE", world), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", world)):
        monkeypatch.setenv(name, str(value))
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_only_rank_zero_tells_the_mistake(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("RANK", 1), ("WORLD_SIZE", 4), ("LOCAL_RANK", 1), ("LOCAL_WORLD_SIZE", 4)):
        monkeypatch.setenv(name, str(value))
    assert main(["--pp", "3"]) == 2
    assert capsys.readouterr().err == ""
