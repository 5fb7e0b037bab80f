"""Re-makes every sample: runs the training, keeps its traces, and writes down what is expected of them.

    .venv/bin/python sample_traces/make.py            all samples
    .venv/bin/python sample_traces/make.py 1f1b_p2    one of them

The expectation comes from tests/support/oracle.py, which shares no code with pptrace.
"""

from __future__ import annotations

import gzip
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

from tests.support.oracle import partition  # noqa: E402


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    about: str
    ranks: int
    arguments: tuple[str, ...]
    steps: str = "3:5"

    @property
    def command(self) -> list[str]:
        return [
            *("pptrace", "run", "-n", str(self.ranks), "--steps", self.steps, "-o", f"sample_traces/{self.name}"),
            "instrument/examples/train_gpt.py",
            *self.arguments,
        ]


_SMALL = ("--layers", "4", "--steps", "5", "--seq", "64")
_TINY = ("--hidden", "8", "--heads", "2", "--seq", "4")
_SLEEPING = ("--sleep-forward", "10", "--sleep-backward", "20")
SAMPLES = (
    Sample("1f1b_p2", "1F1B on two ranks, 4 microbatches", 2, (*_SMALL, "--microbatches", "4")),
    Sample("1f1b_p4", "1F1B on four ranks, 8 microbatches", 4, (*_SMALL, "--microbatches", "8")),
    Sample(
        "uneven_p4",
        "1F1B on four ranks, 4 microbatches, 8 layers divided unevenly; each sleeps, so that 2 cores keep time for 4 ranks",
        4,
        (
            *_TINY,
            "--steps",
            "7",
            *_SLEEPING,
            "--sleep-per-layer",
            "--layers",
            "8",
            "--split",
            "4,2,1,1",
            "--microbatches",
            "4",
        ),
        steps="2:7",
    ),
    *(
        Sample(
            f"{schedule}_p4",
            f"{title} on four ranks with two stages each, 8 microbatches; ops sleep, so that 2 cores keep time for 4 ranks",
            4,
            (*_TINY, "--steps", "4", *_SLEEPING, "--layers", "8", "--microbatches", "8", "--schedule", schedule),
            steps="2:4",
        )
        for schedule, title in (
            ("interleaved-1f1b", "Interleaved 1F1B"),
            ("zbv", "Zero-bubble V"),
            ("dualpipe", "DualPipe"),
        )
    ),
)


def main(names: list[str]) -> None:
    unknown = set(names) - {sample.name for sample in SAMPLES}
    if unknown:
        sys.exit(f"make.py: no sample {sorted(unknown)}; expected some of {[sample.name for sample in SAMPLES]}")
    for sample in SAMPLES:
        if not names or sample.name in names:
            make(sample)


def make(sample: Sample) -> None:
    directory = HERE / sample.name
    shutil.rmtree(directory, ignore_errors=True)
    program = Path(sys.executable).parent / "pptrace"
    subprocess.run([str(program), *sample.command[1:]], cwd=ROOT, check=True, timeout=300)
    forget_host(directory)
    expected = partition(directory)
    (directory / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")
    (directory / "README.md").write_text(_readme(sample, expected), encoding="utf-8")


def forget_host(directory: Path) -> None:
    """The name of the machine is nobody's business: it becomes "host" wherever it stands."""
    name = socket.gethostname().encode()
    for file in directory.glob("rank*.json.gz"):
        file.write_bytes(gzip.compress(gzip.decompress(file.read_bytes()).replace(name, b"host"), mtime=0))
    run = directory / "run.json"
    run.write_bytes(run.read_bytes().replace(name, b"host"))


def _readme(sample: Sample, expected: dict[str, object]) -> str:
    steps = expected["steps"]
    assert isinstance(steps, list)
    rows = [
        f"| {step['step']} | {step['span_ns'] / 1e6:.3f} | {_total(step, 'compute_ns') / 1e6:.3f} "
        f"| {_total(step, 'exposed_comm_ns') / 1e6:.3f} | {_total(step, 'bubble_ns') / 1e6:.3f} "
        f"| {_total(step, 'bubble_ns') / _total(step, 'compute_ns'):.3f} |"
        for step in steps
    ]
    return "\n".join(
        (
            f"# {sample.about}",
            "",
            f"Command: `{' '.join(sample.command)}`",
            "",
            f"Machine: {os.cpu_count()} {platform.machine()} CPU cores, no GPU, gloo on loopback. "
            f"Python {platform.python_version()}, torch {metadata.version('torch')}, nvtx {metadata.version('nvtx')}.",
            "",
            "Expected (`expected.json`, by an independent reading of the marks, `tests/support/oracle.py`), sums over the ranks:",
            "",
            "| step | span ms | compute ms | exposed comm ms | bubble ms | bubble ratio |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        )
    )


def _total(step: dict[str, list[dict[str, int]]], name: str) -> int:
    return sum(rank[name] for rank in step["ranks"])


if __name__ == "__main__":
    main(sys.argv[1:])
