"""megatron-core, DeepSpeed and DualPipe, training on CPUs over gloo under ``pptrace run``, where they are installed."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest

from pptrace.schedule import registry
from pptrace.workflow.load import load
from tests.support.programs import pptrace

pytestmark = pytest.mark.processes
HERE = Path(__file__).parent
MEGATRON, DEEPSPEED, DUALPIPE = (HERE / f"{name}_program.py" for name in ("megatron", "deepspeed", "dualpipe"))
needs_megatron = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
needs_dualpipe = pytest.mark.skipif(find_spec("dualpipe") is None, reason="DualPipe is not installed")
KINDS = {("send", "F"): "SEND_F", ("recv", "F"): "RECV_F", ("send", "B"): "SEND_B", ("recv", "B"): "RECV_B"}
Seen = tuple[str, int, int]


def losses(out: str) -> list[str]:
    return sorted(line.partition("loss of")[2] for line in out.splitlines() if "loss of" in line)


def run(program: Path, folder: Path, *arguments: str, num_ranks: int = 2) -> str:
    """Run a program that writes its truth beside its traces; what it printed."""
    ended = pptrace(
        "run", "-n", str(num_ranks), "--steps", "1:3", "--no-analyze", "-o", folder / "run",
        program, f"truth={folder / 'truth'}", *arguments, timeout_s=120, forked=True,
    )  # fmt: skip
    assert ended.code == 0, ended.out + ended.err
    assert "is not a version" not in ended.err
    return ended.out


def in_order(table: pd.DataFrame, rank: int, step: int) -> pd.DataFrame:
    return table[(table["rank"] == rank) & (table["step"] == step)].sort_values("start_ns", kind="stable")


def ops_of(ops: pd.DataFrame, rank: int, step: int) -> list[Seen]:
    rows = in_order(ops[ops["kind"].isin(("F", "B"))], rank, step)
    return list(zip(rows["kind"], rows["stage"], rows["microbatch"], strict=True))


def messages_of(comms: pd.DataFrame, rank: int, step: int) -> list[Seen]:
    rows = in_order(comms[comms["direction"].isin(("F", "B"))], rank, step)
    kinds = [KINDS[pair] for pair in zip(rows["kind"], rows["direction"], strict=True)]
    return list(zip(kinds, rows["stage"], rows["microbatch"], strict=True))


def check_against_truth(folder: Path, num_ranks: int = 2) -> None:
    """Every op, and every message of a kind, is what the script saw, in that order; each message has met its other end."""
    analysis = load([folder / "run"])
    for rank in range(num_ranks):
        steps = json.loads((folder / "truth" / f"rank{rank}.json").read_text())
        for step in (1, 2):
            truth = [(str(kind), int(stage), int(mb)) for kind, stage, mb in steps[step]]
            assert ops_of(analysis.data.ops, rank, step) == [item for item in truth if item[0] in ("F", "B")]
            got = messages_of(analysis.data.comms, rank, step)
            for kind in KINDS.values():
                assert [item for item in got if item[0] == kind] == [item for item in truth if item[0] == kind]
    named = analysis.data.comms[analysis.data.comms["direction"].isin(("F", "B"))]
    assert len(named) > 0
    assert (named["match"] >= 0).all()


def check_bits(folder: Path, program: Path, hooked: str, *arguments: str, num_ranks: int = 2) -> None:
    """The same program without hooks has the same losses, bit for bit."""
    options = ("-n", str(num_ranks), "--no-hooks", "--no-analyze", "-o", folder / "plain")
    ended = pptrace("run", *options, program, *arguments, forked=True)
    assert len(losses(hooked)) >= 3
    assert losses(hooked) == losses(ended.out)


@needs_megatron
@pytest.mark.parametrize("arguments", [("ddp=1", "eval=1"), ("v=2", "overlap=1")])
def test_megatron_core_is_read_as_it_ran_and_trains_to_the_same_bits(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    hooked = run(MEGATRON, tmp_path, *arguments)
    check_against_truth(tmp_path)
    report = load([tmp_path / "run"]).report
    assert report.framework == "megatron-lm"
    assert report.schedule.name == ("interleaved-1f1b" if "v=2" in arguments else "1f1b")
    assert report.schedule.mismatches == ()
    assert (report.mesh.pp, report.mesh.vpp, report.mesh.dp) == (2, 2 if "v=2" in arguments else 1, 1)
    if "v=2" in arguments:
        check_bits(tmp_path, MEGATRON, hooked, *arguments)


@needs_deepspeed
@pytest.mark.parametrize("arguments", [("zero=1", "groups=2", "eval=1"), ("tensors=2",)])
def test_deepspeed_is_read_as_it_ran_and_trains_to_the_same_bits(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    hooked = run(DEEPSPEED, tmp_path, *arguments)
    check_against_truth(tmp_path)
    report = load([tmp_path / "run"]).report
    assert (report.framework, report.schedule.name, report.schedule.mismatches) == ("deepspeed", "1f1b", ())
    assert (report.mesh.pp, report.mesh.dp) == (2, 1)
    if "eval=1" in arguments:
        check_bits(tmp_path, DEEPSPEED, hooked, *arguments)


@needs_dualpipe
@pytest.mark.parametrize(
    "arguments", [("v=0", "overlap=1", "eval=1"), ("v=0", "mapping=2,0,3,1"), ("v=1", "overlap=1"), ("v=1",)]
)
def test_dualpipe_is_read_as_it_ran_and_trains_to_the_same_bits(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """Ops of pairs, one range, are those of the plan's halves; all others are as the stages saw them."""
    hooked = run(DUALPIPE, tmp_path, *arguments, num_ranks=4)
    analysis = load([tmp_path / "run"])
    report, ops, comms = analysis.report, analysis.data.ops, analysis.data.comms
    name = "dualpipe-v" if "v=1" in arguments else "dualpipe"
    assert (report.framework, report.schedule.name, report.schedule.mismatches) == ("deepseek", name, ())
    assert (report.mesh.pp, report.mesh.vpp, report.mesh.dp) == (4, 2, 1)
    plan = registry.build(name, 4, 10, 2)
    for rank in range(4):
        place = [2, 0, 3, 1][rank] if "mapping=2,0,3,1" in arguments else rank
        for step in (1, 2):
            planned = plan.compute_actions(place)
            truth = json.loads((tmp_path / "truth" / f"rank{rank}.json").read_text())[step]
            assert truth == [
                [str(half.kind), half.stage, half.microbatch] for action in planned for half in action.halves
            ]
            measured = in_order(ops[ops["kind"].isin(("F", "B", "I", "W", "OVERLAP_F_B"))], rank, step)
            assert list(zip(measured["kind"], measured["stage"], measured["microbatch"], strict=True)) == [
                (str(action.kind), action.stage, action.microbatch) for action in planned
            ]
    named = comms[comms["direction"].isin(("F", "B"))]
    assert len(named) > 0
    assert (named["match"] >= 0).all()
    if arguments == ("v=1",):
        check_bits(tmp_path, DUALPIPE, hooked, *arguments, num_ranks=4)
