"""The experiment with delayed ops: what it measures in a real run is known by hand, and what it refuses is one line."""

from __future__ import annotations

import pandas as pd
import pytest

from instrument.examples.delayed_ops import TIMES, WARMUP_STEPS, Delay, delay_of, losses_of, main, num_steps
from instrument.recorder import null_range
from pptrace.errors import PptraceError, UsageError
from pptrace.schedule.actions import Kind, parse_action
from tests.support.programs import ROOT, script, sizes

SCRIPT = ROOT / "instrument" / "examples" / "delayed_ops.py"
MS = 1_000_000


@pytest.mark.parametrize(
    ("text", "delay"), [("F:10", Delay(Kind.F, 10)), ("W:0.5", Delay(Kind.W, 0.5)), ("stage=12:3", Delay(12, 3))]
)
def test_a_delay_is_of_a_kind_or_a_stage(text: str, delay: Delay) -> None:
    assert Delay.read(text) == delay


@pytest.mark.parametrize("text", ["", "F", "F:0", "F:-1", "G:1", "stage:1", "stage=:1", "OPTIMIZER:1", "F:1ms"])
def test_what_is_no_delay_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--delay [^\n]*: expected F, B, I, W or stage=N[^\n]+$"):
        Delay.read(text)


def test_a_wrong_delay_ends_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--delay", "X:1"]) == 2
    assert capsys.readouterr().err.startswith("delayed_ops: --delay X:1: expected")


def test_every_second_step_has_a_delay_and_all_delays_come_equally_often() -> None:
    delays = [Delay(Kind.F, 1), Delay(Kind.B, 1), Delay(0, 1)]
    found = [delay_of(delays, step) for step in range(WARMUP_STEPS, num_steps(delays))]
    assert found[::2] == [None] * (3 * TIMES + 1)
    assert [found.count(delay) for delay in delays] == [TIMES] * 3


def test_ops_are_of_a_target_by_kind_or_stage_and_pairs_are_of_no_kind() -> None:
    ops = [parse_action(text) for text in ("0F1", "1F1", "1B0", "(1F2;1B0)OVERLAP_F_B")]
    assert [Delay(Kind.F, 1).is_of(op) for op in ops] == [True, True, False, False]
    assert [Delay(1, 1).is_of(op) for op in ops] == [False, True, True, False]


def test_a_loss_is_counted_in_delays_against_the_steps_before_and_after() -> None:
    """Steps of 100, 110, 120 … ms without a delay; in those between, F delays 2 ms three times."""
    delays = [Delay(Kind.F, 2)]
    steps = pd.DataFrame({"step": range(2, 9), "span_ns": [(100 + 5 * i + 6 * (i % 2)) * MS for i in range(7)]})
    rows = [
        (step, kind, 0, kind == "F" and microbatch < 3)
        for step in range(2, 9)
        for kind in "FB"
        for microbatch in range(4)
    ]
    ops = pd.DataFrame(rows, columns=["step", "kind", "stage", "on_critical_path"])
    (loss,) = losses_of(delays, ops, steps)
    assert (loss.measured, loss.on_path, loss.num_ops) == ((3.0, 3.0, 3.0), 3.0, 4.0)
    with pytest.raises(PptraceError, match="--delay W: no op of the run is of this target"):
        losses_of([Delay(Kind.W, 2)], ops, steps)


@pytest.mark.processes
def test_a_balanced_1f1b_loses_as_many_delays_as_its_plan_says() -> None:
    """Of p = 2 ranks and m = 4 microbatches the path has p + m − 1 forwards."""
    model = sizes(layers=4, hidden=16, heads=2, seq=8, microbatches=4)
    sleeps = ("--sleep-forward", "10", "--sleep-backward", "20")
    ended = script(SCRIPT, "--ranks", "2", "--delay", "F:20", *model, *sleeps)
    assert ended.code == 0, ended.err
    of_forwards = ended.out.splitlines()[-1].split()
    assert of_forwards[:4] == ["F", "20", "ms", "8.0"]
    assert float(of_forwards[6]) == pytest.approx(5, abs=0.8)  # a busy machine
    assert float(of_forwards[-1]) == pytest.approx(5, abs=0.5)


def test_an_op_that_raises_is_not_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    from instrument.examples import delayed_ops

    slept: list[float] = []
    monkeypatch.setattr(delayed_ops.time, "sleep", slept.append)
    with delayed_ops._DelayedRange(null_range(), 0.5):
        assert not slept
    with pytest.raises(ZeroDivisionError), delayed_ops._DelayedRange(null_range(), 0.5):
        raise ZeroDivisionError
    assert slept == [0.5]
