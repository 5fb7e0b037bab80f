"""Measures what recording costs, and how well that is taken out.

    python tools/observer_table.py [--rounds N] [--observed DIR] [--write FILE.md]

Every run is a pipeline of two processes of this machine that talk by gloo, with small layers and so much Python, whose steps are
timed without a profiler before and after the recorded ones. Its traces are analysed without these times, so that the cost of
recording is judged from the trace alone. ``--observed`` is a folder of runs on a GPU with the steps of the same programs without
a profiler beside them (``NAME.SETTING.json.gz`` and ``walls_ms.json``).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pptrace.analysis.report import RecordingReport
from pptrace.workflow.load import load
from tests.support.programs import EXAMPLE, pptrace, sizes, torchrun
from tools.marked_tables import MarkedTable

_ARGUMENTS = ("--steps", "40", *sizes(layers=8, hidden=32, heads=2, seq=32, microbatches=8))
_LEVELS = {"pptrace run --record light": ("--record", "light"), "pptrace run --record full": ("--record", "full")}
_SETTINGS = {
    "torch.profiler": "",
    "torch.profiler, record_shapes": "record_shapes",
    "torch.profiler, profile_memory": "profile_memory",
    "torch.profiler, with_stack": "with_stack",
}
_BEGIN = "<!-- observer table: made by tools/observer_table.py -->"
_END = "<!-- end of the observer table -->"

PLAIN = """
import json, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.profiler import ProfilerActivity, profile, record_function

folder, setting = sys.argv[1], sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
layers = [nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True) for _ in range(6)]
stage = PipelineStage(nn.Sequential(*layers), rank, size, torch.device("cpu"))
schedule = Schedule1F1B(stage, 4, loss_fn=lambda output, target: (output - target).square().mean())
optimizer = torch.optim.AdamW(stage.submod.parameters(), foreach=False)
x, lengths, profiler = torch.randn(8, 16, 32), [], None
for step in range(40):
    if step == 20:
        profiler = profile(activities=[ProfilerActivity.CPU], **({setting: True} if setting else {}))
        profiler.start()
    if step == 25:
        profiler.stop()
        profiler.export_chrome_trace(f"{folder}/rank{rank}.json")
    dist.barrier()
    begin = time.perf_counter()
    with record_function(f"ProfilerStep#{step}"):
        optimizer.zero_grad()
        schedule.step(x) if rank == 0 else schedule.step(target=x)
        optimizer.step()
        dist.barrier()
    lengths.append(time.perf_counter() - begin)
json.dump(lengths, open(f"{folder}/lengths{rank}.times", "w"))
dist.destroy_process_group()
"""


@dataclass(frozen=True, slots=True)
class Row:
    """A recorded run: its step without a profiler as timed, ms, and what its trace alone says."""

    how: str
    unrecorded_ms: float
    recording: RecordingReport
    num_bytes: int

    @property
    def slowdown(self) -> float:
        return (self.recording.recorded_step_ns or 0) / 1e6 / self.unrecorded_ms

    @property
    def error(self) -> float:
        """Predicted step over the timed one, less 1."""
        return (self.recording.predicted_step_ns or 0) / 1e6 / self.unrecorded_ms - 1

    @property
    def is_held(self) -> bool:
        low, high = self.recording.low_ns or 0, self.recording.high_ns or 0
        return low <= self.unrecorded_ms * 1e6 <= high


def runs_of_pptrace(folder: Path, rounds: int) -> Iterator[Row]:
    """Runs of ``pptrace run``, whose own times of unrecorded steps are the truth, and taken out of what is analysed."""
    for number in range(rounds):
        for how, options in _LEVELS.items():
            run = folder / f"{options[1]}{number}"
            ended = pptrace(
                "run", "-n", "2", "--no-analyze", "--steps", "20:25", "-o", run, *options, EXAMPLE, *_ARGUMENTS
            )
            assert ended.code == 0, ended.err
            facts = json.loads((run / "run.json").read_text())
            times = facts["ranks"][0]["step_times"]
            yield _row(how, run, _length(times["start_ns"], times["end_ns"]))


def _length(start: list[int], end: list[int]) -> float:
    """The median of the unrecorded steps beside the recorded ones, ms."""
    lengths = [(ended - begun) / 1e6 for begun, ended in zip(start, end, strict=True)]
    return median(lengths[8:19] + lengths[26:38])


def runs_of_torch(folder: Path, rounds: int) -> Iterator[Row]:
    """Runs of a script with a profiler of its own, that times its steps itself."""
    script = folder / "plain.py"
    script.write_text(PLAIN)
    for number in range(rounds):
        for how, setting in _SETTINGS.items():
            run = folder / f"plain-{setting}{number}"
            run.mkdir()
            ended = torchrun(2, script, run, setting)
            assert ended.code == 0, ended.err
            lengths = json.loads((run / "lengths0.times").read_text())
            yield _row(how, run, 1e3 * median(lengths[8:20] + lengths[26:38]))


def _row(how: str, run: Path, unrecorded_ms: float) -> Row:
    traces = sorted(run.glob("rank*.json*"))
    alone = run / "alone"  # traces without run.json, and so without the times of unrecorded steps
    alone.mkdir()
    for trace in traces:
        trace.rename(alone / trace.name)
    (run / "run.json").unlink(missing_ok=True)
    recording = _without_times(alone)
    return Row(how, unrecorded_ms, recording, sum(trace.stat().st_size for trace in alone.iterdir()))


def _without_times(folder: Path) -> RecordingReport:
    from pptrace.workflow import unrecorded

    unrecorded._step_times = lambda _: []  # type: ignore[assignment]
    recording = load(sorted(folder.iterdir()), cache=False).report.recording
    assert recording is not None
    return recording


def runs_observed(folder: Path) -> Iterator[Row]:
    """Runs of others on a GPU."""
    walls = json.loads((folder / "walls_ms.json").read_text())
    for trace in sorted(folder.glob("*.json.gz")):
        program, setting = trace.name.removesuffix(".json.gz").split(".")
        recording = load([trace], cache=False).report.recording
        assert recording is not None
        truth = median(walls[f"{program}.none"][10:15])
        yield Row(f"H200, GPT-2 {program}, {setting}", truth, recording, trace.stat().st_size)


def table(rows: list[Row]) -> str:
    """A row of Markdown for each way of recording: medians over its runs, and how many intervals hold the truth."""
    lines = [
        "| recorded by | unrecorded step, ms | recorded over unrecorded | events a step | predicted from the trace alone | "
        "farthest off | interval holds | bytes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for how in dict.fromkeys(row.how for row in rows):
        of_how = [row for row in rows if row.how == how]
        errors = [row.error for row in of_how]
        worst = max(errors, key=abs)
        lines.append(
            f"| {how} | {median(row.unrecorded_ms for row in of_how):.1f} | {median(row.slowdown for row in of_how):.2f} | "
            f"{median(row.recording.events_per_step or 0 for row in of_how):,.0f} | {median(errors):+.1%} | {worst:+.1%} | "
            f"{sum(row.is_held for row in of_how)} of {len(of_how)} | {median(row.num_bytes for row in of_how) / 1e6:.2f} MB |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--observed", type=Path)
    parser.add_argument("--write", type=Path, metavar="FILE.md")
    options = parser.parse_args()
    marked = MarkedTable(options.write, _BEGIN, _END)
    marked.require_markers()
    with tempfile.TemporaryDirectory() as folder:
        rows = [*runs_of_pptrace(Path(folder), options.rounds), *runs_of_torch(Path(folder), options.rounds)]
        rows += runs_observed(options.observed) if options.observed else []
    marked.write(table(rows))


if __name__ == "__main__":
    main()
