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
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

from tests.support.oracle import partition  # noqa: E402


@dataclass(frozen=True, slots=True)
class Injected:
    """A ``--fault`` of the example, or another option of the run, and what has to be found of it.

    ``finding`` is a part of a finding's evidence, or of the verdict on a hang.
    """

    option: str
    finding: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    name: str
    about: str
    ranks: int
    arguments: tuple[str, ...]
    steps: str = "3:5"
    faults: tuple[Injected, ...] = ()
    hang: Injected | None = None

    @property
    def command(self) -> list[str]:
        return [
            *("pptrace", "run", "-n", str(self.ranks), "--steps", self.steps),
            *(("--hang-timeout", "5") if self.hang else ()),
            *("-o", f"sample_traces/{self.name}"),
            "instrument/examples/train_gpt.py",
            *self.arguments,
            *(part for injected in self.injected for part in injected.option.split()),
        ]

    @property
    def injected(self) -> tuple[Injected, ...]:
        return (*self.faults, *((self.hang,) if self.hang else ()))


_TIMED_OUT = 124
"""Exit code of ``pptrace run`` after a hang."""

_SMALL = ("--layers", "4", "--steps", "5", "--seq", "64")
_TINY = ("--hidden", "8", "--heads", "2", "--seq", "4")
_SLEEPING = ("--sleep-forward", "10", "--sleep-backward", "20")
_SLEEPING_LONG = ("--sleep-forward", "100", "--sleep-backward", "200")
_OPS_SLEEP = "ops sleep, so that 2 cores keep time for"
SAMPLES = (
    Sample("1f1b_p2", "1F1B on two ranks, 4 microbatches", 2, (*_SMALL, "--microbatches", "4")),
    Sample("1f1b_p4", "1F1B on four ranks, 8 microbatches", 4, (*_SMALL, "--microbatches", "8")),
    Sample(
        "mesh_pp2_tp2_cp2_dp2",
        f"1F1B on 16 ranks, pp 2 × tp 2 × cp 2 × dp 2, 4 microbatches; {_OPS_SLEEP} 16 ranks",
        16,
        (
            *("--hidden", "8", "--heads", "2", "--seq", "8", "--layers", "2", "--microbatches", "4", "--steps", "4"),
            *_SLEEPING_LONG,
            *("--pp", "2", "--tp", "2", "--cp", "2", "--dp", "2"),
        ),
        steps="2:4",
    ),
    Sample(
        "faults_pp2_dp2",
        f"1F1B on two ranks in two replicas, 4 microbatches, with two faults; {_OPS_SLEEP} 4 ranks",
        4,
        (
            *(*_TINY, "--layers", "2", "--microbatches", "4", "--steps", "7", "--dp", "2"),
            *_SLEEPING_LONG,
        ),
        steps="2:7",
        faults=(
            Injected("--fault slow:ranks=1,times=1.5", {"cause": "straggler", "where": {"rank": 1}}),
            Injected(
                "--fault late:ranks=3,ms=800",
                {"cause": "host", "where": {"rank": 3}, "reason": "late start"},
            ),
        ),
    ),
    Sample(
        "experts_pp2_ep2",
        "1F1B on two ranks in two replicas that share four experts, one of them hot, 4 microbatches; experts sleep for "
        "each of their rows, so that 2 cores keep time for 4 ranks",
        4,
        (
            *(*_TINY, "--microbatch-size", "1", "--layers", "2", "--microbatches", "4", "--steps", "5"),
            *("--pp", "2", "--dp", "2", "--experts", "4", "--ep", "2", "--sleep-rows", "8"),
        ),
        steps="2:5",
        faults=(
            Injected(
                "--force-routes hot",
                {"cause": "imbalance", "where": {"axis": "ep", "rank": 0}, "reason": "unequal routes"},
            ),
        ),
    ),
    Sample(
        "hang_p4",
        f"1F1B on four ranks, 4 microbatches, that hangs in step 5, after the recorded ones; {_OPS_SLEEP} 4 ranks",
        4,
        (*_TINY, "--layers", "4", "--microbatches", "4", "--steps", "7", *_SLEEPING),
        steps="2:4",
        hang=Injected(
            "--fault crossed:ranks=1+2,since=5",
            {"verdict": "cycle", "ranks": [1, 2], "waits": [[0, [1]], [1, [2]], [2, [1]], [3, [2]]]},
        ),
    ),
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
    Sample(
        "head_p4",
        "1F1B on four ranks, 8 microbatches, with the head and loss of a large vocabulary on the last stage; layers sleep, and "
        "the head sleeps as three of them (GPT-2 345M: V/(12h + 2s) = 3.1), so that 2 cores keep time for 4 ranks",
        4,
        (*(*_TINY, "--steps", "7", *_SLEEPING, "--sleep-per-layer", "--layers", "8", "--microbatches", "8"),),
        steps="2:7",
        faults=(Injected("--vocabulary 50304 --sleep-head 3", {"cause": "imbalance", "where": {"stage": 3}}),),
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
    ended = subprocess.run([str(program), *sample.command[1:]], cwd=ROOT, check=False, timeout=300)
    if ended.returncode != (_TIMED_OUT if sample.hang else 0):
        sys.exit(f"make.py: {sample.name} ended with code {ended.returncode}")
    forget_host(directory)
    expected: dict[str, Any] = partition(directory)
    if sample.faults:
        expected["findings"] = [injected.finding for injected in sample.faults]
    if sample.hang:
        expected["hang"] = sample.hang.finding
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
            f"Command: `{shlex.join(sample.command)}`",
            "",
            f"Machine: {os.cpu_count()} {platform.machine()} CPU cores, no GPU, gloo on loopback. "
            f"Python {platform.python_version()}, torch {metadata.version('torch')}, nvtx {metadata.version('nvtx')}.",
            f"The ranks' threads waited for a core for {_core_wait(HERE / sample.name):.0%} of the time, all together.",
            "",
            "Expected (`expected.json`, by an independent reading of the marks, `tests/support/oracle.py`), sums over the ranks:",
            "",
            "| step | span ms | compute ms | exposed comm ms | bubble ms | bubble ratio |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            *_of_faults(sample),
        )
    )


def _core_wait(directory: Path) -> float:
    """For which part of the recorded time the threads of a rank waited for a core, mean over the ranks."""
    shares = []
    for file in directory.glob("rank*.json.gz"):
        waited = json.loads(gzip.decompress(file.read_bytes()))["pptrace"]["core_wait"]
        shares.append(waited["wait_ns"] / waited["elapsed_ns"])
    return sum(shares) / len(shares)


def _of_faults(sample: Sample) -> list[str]:
    if not sample.injected:
        return []
    return [
        f"The faults, and what {_finder(sample)}:",
        "",
        "| fault | finding |",
        "|---|---|",
        *(f"| `{injected.option}` | `{json.dumps(injected.finding)}` |" for injected in sample.injected),
        "",
    ]


def _finder(sample: Sample) -> str:
    return "`pptrace hang` says" if sample.hang else "findings say"


def _total(step: dict[str, list[dict[str, int]]], name: str) -> int:
    return sum(rank[name] for rank in step["ranks"])


if __name__ == "__main__":
    main(sys.argv[1:])
