"""Causal probes of real runs: ``probes.py [--write FILE.md] [--folder DIR]``.

Every run is the training example on processes of this machine that talk by gloo, with ops that sleep. Every second step is
probed, and the slope of each target is what ``pptrace analyze`` reports.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pptrace.analysis.whole_run import ProbedTarget
from pptrace.schedule.probe import steps_for
from pptrace.workflow.load import load
from tests.support.programs import EXAMPLE, pptrace

_WARMUP_STEPS = 2
_TIMES = 8


@dataclass(frozen=True, slots=True)
class Setting:
    """A run: layers of each stage, each of which sleeps ``layer_ms`` in its forward and twice as much in its backward."""

    schedule: str
    split: tuple[int, ...]
    microbatches: int
    layer_ms: float
    probes: tuple[str, ...]
    pp: int

    @property
    def name(self) -> str:
        return f"{self.schedule}-{'-'.join(map(str, self.split))}-m{self.microbatches}"

    @property
    def words(self) -> str:
        return f"{self.schedule}, layers {','.join(map(str, self.split))}, {self.microbatches} microbatches"


SETTINGS = [
    Setting("1f1b", (2, 2), 4, 50.0, ("F:0.2", "B:0.2"), 2),
    Setting("zb-h1", (2, 2), 4, 50.0, ("F:0.2", "I:0.2", "W:0.2"), 2),
    Setting("interleaved-1f1b", (1, 1, 1, 1), 4, 60.0, ("F:0.2", "B:0.2"), 2),
    Setting("gpipe", (1, 1, 1, 1), 6, 60.0, ("F:0.2", "B:0.2"), 4),
    Setting("1f1b", (5, 2, 2, 2), 6, 25.0, ("stage=0:0.2", "F:0.2"), 4),
    Setting("1f1b", (1, 1, 3, 1), 6, 40.0, ("stage=2:0.2", "B:0.2"), 4),
]


def run(folder: Path, setting: Setting) -> Path:
    """Run a setting, if its folder is not there yet."""
    where = folder / setting.name
    if not where.exists():
        steps = _WARMUP_STEPS + steps_for(len(setting.probes), _TIMES)
        profiled = ("--steps", f"{_WARMUP_STEPS}:{steps}", "--no-analyze", "-o", where)
        probes = [word for probe in setting.probes for word in ("--probe", probe)]
        sizes = ("--pp", setting.pp, "--microbatches", setting.microbatches, "--schedule", setting.schedule)
        model = ("--hidden", "8", "--heads", "2", "--seq", "4", "--microbatch-size", "1")
        layers = ("--layers", sum(setting.split), "--split", ",".join(map(str, setting.split)), "--sleep-per-layer")
        sleeps = ("--sleep-forward", setting.layer_ms, "--sleep-backward", 2 * setting.layer_ms)
        script = (EXAMPLE, "--steps", steps, *sizes, *model, *layers, *sleeps)
        began = time.monotonic()
        ended = pptrace("run", "-n", str(setting.pp), *probes, *profiled, *map(str, script), forked=True)
        if ended.code:
            raise RuntimeError(f"{setting.name}: {ended.err}")
        print(f"{setting.name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    return where


Row = tuple[Setting, ProbedTarget]


def rows_of(settings: Sequence[Setting], folder: Path) -> list[Row]:
    return [(setting, probe) for setting in settings for probe in load([run(folder, setting)]).report.probes]


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The lines of the table, and one about all of it."""
    yield "| ranks | run | target | others delayed | steps | slope | 95 % interval | share of the path | off | replayed |"
    yield "|---:|---|---|---:|---:|---:|---|---:|---:|---:|"
    offs, replays = [], []
    for setting, probe in rows:
        head = f"| {setting.pp} | {setting.words} | {probe.target} | {probe.epsilon:.0%} | {len(probe.steps)}"
        if probe.slope is None or probe.slope_low is None or probe.slope_high is None or not probe.critical_path_share:
            yield f"{head} | {probe.reason} | | | | |"
            continue
        offs.append(probe.slope / probe.critical_path_share - 1)
        replays.append(probe.slope / (probe.replayed_slope or 1) - 1)
        interval = f"{probe.slope_low:.1%} to {probe.slope_high:.1%}"
        shares = f"{probe.critical_path_share:.1%} | {offs[-1]:+.1%} | {probe.replayed_slope or 0:.1%}"
        yield f"{head} | {probe.slope:.1%} | {interval} | {shares} |"
    yield ""
    near, as_replayed = (sum(abs(off) <= 0.1 for off in of_all) for of_all in (offs, replays))
    yield f"The slope is within 10 % of the share in {near} of {len(rows)}, and of the replayed slope in {as_replayed}."


_PAGE = """\
# Causal probes of real runs

Written by `{command}`: in every second step of each run, all ops but the target's
are delayed by a part of their duration, which imitates a faster target ([how](hooks.md#causal-probes)). *Slope*: how much of what
the target gets shorter the step gets shorter, as measured. *Share of the path*: of the critical path of the steps between, in
which nothing was delayed. *Replayed*: the slope that replays of these steps say, which is less than the share where another path
takes over before the target is as much faster as the probe imitates. Each run is this project's training example with layers that
sleep, on processes of one machine with two cores that talk by gloo.

"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where runs are kept, and taken from where they are there")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="write the table there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        text = "\n".join(table(rows_of(SETTINGS, options.folder or Path(temporary))))
    print(text)
    if options.write is not None:
        page = _PAGE.format(command="python tools/probes.py --write docs/probes.md")
        options.write.write_text(f"{page}{text}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
