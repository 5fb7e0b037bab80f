"""Delay ops of a training and time its steps: what each delayed op costs a step, beside what the critical path says.

    python instrument/examples/delayed_ops.py --ranks 2 --delay F:10 --delay stage=1:10 [OPTIONS of train_gpt.py]…

    delay  = target ":" milliseconds
    target = "F" | "B" | "I" | "W" | "stage=" stage

A causal experiment, as Coz does them for threads (Curtsinger and Berger, SOSP 2015): no analysis is trusted, the program is made
slower and timed. The GPT of ``train_gpt.py`` trains on processes of this machine. In every second step each op of one target
sleeps at its end, inside its range and before its output is sent; several targets take turns, and nothing that is computed
changes. A step that gets longer by eight delays waits for eight of the delayed ops. The critical path of the steps between, which
``pptrace`` finds in the same recording, has as many of these ops on it, unless a delay makes another path the longest: then the
step loses more.

Ops of a GPU are not delayed by a host that sleeps: the example runs on CPUs. Pairs of overlapped ops are no target.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import TracebackType

import pandas as pd

import pptrace
from instrument.examples import train_gpt
from instrument.recorder import Range, Recorder
from pptrace.errors import PptraceError, UsageError
from pptrace.schedule.actions import Action, Kind

WARMUP_STEPS = 2
TIMES = 6
"""Steps in which each target is delayed."""
_DELAY = re.compile(r"(?:([FBIW])|stage=(\d{1,9})):(\d+(?:\.\d+)?)", re.ASCII)
_COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W)


@dataclass(frozen=True, slots=True)
class Delay:
    """``target`` is a kind of op or the number of a stage."""

    target: Kind | int
    milliseconds: float

    @classmethod
    def read(cls, text: str) -> Delay:
        """Raises UsageError: the text is no delay."""
        match = _DELAY.fullmatch(text)
        if match is None or not float(match[3]):
            raise UsageError(f"--delay {text}: expected F, B, I, W or stage=N, and milliseconds above 0, such as F:10")
        return cls(Kind(match[1]) if match[1] else int(match[2]), float(match[3]))

    def __str__(self) -> str:
        return f"stage={self.target}" if isinstance(self.target, int) else self.target.value

    def is_of(self, action: Action) -> bool:
        return action.kind in _COMPUTE and self.target in (action.kind, action.stage)

    def ops_of(self, ops: pd.DataFrame) -> pd.DataFrame:
        """The rows of the target's ops."""
        return ops[ops["kind"].isin(_COMPUTE) & ((ops["kind"] == self.target) | (ops["stage"] == self.target))]


def delay_of(delays: Sequence[Delay], step: int) -> Delay | None:
    """The delay of a step: none in even steps, in odd ones each in turn."""
    return delays[step // 2 % len(delays)] if step % 2 else None


def num_steps(delays: Sequence[Delay]) -> int:
    """Steps of a run that ends with one without a delay."""
    return WARMUP_STEPS + 2 * len(delays) * TIMES + 1


def install(delays: Sequence[Delay]) -> None:
    """Delay the ops of this process from now on."""
    range_of = Recorder.op

    def op(self: Recorder, action: Action, step: int) -> Range:
        delay, opened = delay_of(delays, step), range_of(self, action, step)
        return opened if delay is None or not delay.is_of(action) else _DelayedRange(opened, delay.milliseconds / 1e3)

    Recorder.op = op  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True)
class _DelayedRange:
    """The range of an op that is followed by a sleep, unless it raised."""

    opened: Range
    seconds: float

    def __enter__(self) -> None:
        self.opened.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            time.sleep(self.seconds)
        self.opened.__exit__(kind, error, trace)


@dataclass(frozen=True, slots=True)
class Loss:
    """Loss of a step by a delay: ``measured`` has one value for each delayed step, in delays; ``on_path`` is the mean number of
    the target's ops on the critical path of a step without a delay, of ``num_ops`` in all.
    """

    delay: Delay
    num_ops: float
    measured: tuple[float, ...]
    on_path: float

    def __str__(self) -> str:
        low, middle, high = min(self.measured), median(self.measured), max(self.measured)
        return (
            f"{self.delay!s:10} {self.delay.milliseconds:8g} ms {self.num_ops:9.1f} {middle * self.delay.milliseconds:12.1f} ms"
            f" {middle:10.1f} ({low:.1f} to {high:.1f}) {self.on_path:14.1f}"
        )


HEADING = f"{'delayed':10} {'by':>11} {'ops':>9} {'step longer':>15} {'in delays, measured':>22} {'critical path':>14}"


def losses_of(delays: Sequence[Delay], ops: pd.DataFrame, steps: pd.DataFrame) -> list[Loss]:
    """The loss by each delay.

    Args:
        ops: ``step``, ``kind``, ``stage`` and ``on_critical_path`` of each op (:attr:`pptrace.api.run.Run.ops`).
        steps: ``step`` and ``span_ns`` of each step, the first and the last of which have no delay.

    Raises:
        PptraceError: a delay has no ops.
    """
    spans = dict(zip(steps["step"].tolist(), steps["span_ns"].tolist(), strict=True))
    plain = [step for step in spans if delay_of(delays, step) is None]
    return [
        _loss_of(delay, [step for step in spans if delay_of(delays, step) is delay], ops, spans, plain)
        for delay in delays
    ]


def _loss_of(
    delay: Delay, delayed: Sequence[int], ops: pd.DataFrame, spans: dict[int, int], plain: Sequence[int]
) -> Loss:
    chosen = delay.ops_of(ops[ops["step"].isin(plain)])
    if not len(chosen):
        raise PptraceError(f"--delay {delay}: no op of the run is of this target")
    longer = [spans[step] - (spans[step - 1] + spans[step + 1]) / 2 for step in delayed]
    measured = tuple(length / (1e6 * delay.milliseconds) for length in longer)
    on_path = int(chosen["on_critical_path"].fillna(value=False).sum())
    return Loss(delay, len(chosen) / len(plain), measured, on_path / len(plain))


def record(ranks: int, folder: Path, arguments: Sequence[str], steps: int) -> None:
    """Run this file on so many ranks under ``pptrace run``, with these arguments."""
    command = [sys.executable, "-m", "pptrace", "run", "-n", str(ranks), "--steps", f"{WARMUP_STEPS}:{steps}"]
    subprocess.run([*command, "--no-analyze", "-o", str(folder), __file__, *arguments], check=True)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="delayed_ops.py", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes to train on")
    parser.add_argument("--delay", action="append", required=True, metavar="TARGET:MS", help="may be repeated")
    parser.add_argument("-o", "--output", type=Path, help="a new folder for the run; left out: it is not kept")
    options, of_training = parser.parse_known_args(arguments)
    try:
        delays = [Delay.read(text) for text in options.delay]
        steps = num_steps(delays)
        if "RANK" in os.environ:  # one of the processes that record() starts
            install(delays)
            return train_gpt.main(["--backend", "gloo", *of_training, "--steps", str(steps)])
        with tempfile.TemporaryDirectory() as temporary:
            folder = options.output or Path(temporary) / "run"
            record(options.ranks, folder, arguments, steps)
            run = pptrace.load(folder).as_recorded()
        print(HEADING, *losses_of(delays, run.ops, run.steps), sep="\n")
    except PptraceError as err:
        print(f"delayed_ops: {err}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as err:
        return int(err.returncode)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
