"""Reading large Kineto traces, and the whole ``pptrace analyze``: speed and memory beside orjson and HTA, in one run.

    python tools/bench/bench_ingest.py [TRACE] [--megabytes N]… [--rounds N] [--ranks N] [--other-python PATH]

TRACE (default: a small made-up one) is replicated, its times and numbers shifted, until the file is large enough. Each side runs
in a process of its own, in turns; the best of N rounds by wall time, beside the processor time of the process and its children.
``--other-python`` is an interpreter that has orjson and HolisticTraceAnalysis, where this one has not. MB are 10^6 bytes of JSON
text, also for the gzip file; memory is the peak of the process, and its limit 250 MB + 130 bytes per event. Last a directory of
``--ranks`` ranks of 20 MB, analysed by as many processes as there are cores: the peaks of the first process and of the largest
of the others, beside what the ranks' events would take together.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NUMBER = re.compile(rb'"(ts|id|correlation|External id)": ?(\d+)')
_SHIFT_US = 10_000_000
_RANK_BYTES = 20 * 10**6
_LIMIT_BYTES, _LIMIT_BYTES_PER_EVENT = 250 * 10**6, 130

_TELL = """
import json, re, resource, sys, time
from pathlib import Path
path = Path(sys.argv[1])
def tell(begin, wall, **more):
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\\s+(\\d+) kB", status.read_text()) if status.exists() else None
    spent = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(json.dumps({"cpu_s": spent - begin, "wall_s": time.perf_counter() - wall,
                      "peak_bytes": int(found[1]) * 1024 if found else 0, **more}), flush=True)
def now():
    return sum(resource.getrusage(resource.RUSAGE_SELF)[:2]), time.perf_counter()
"""
_READ = (
    _TELL
    + """
from pptrace.ingest.kineto.reader import read_ranks
begin = now()
(trace,) = read_ranks(path, int(sys.argv[2]))
tell(*begin, events=len(trace.events))
"""
)
_ANALYZE = (
    _TELL
    + """
import contextlib, io
begin = (0.0, time.perf_counter())
sys.argv = ["pptrace", "analyze", str(path), *sys.argv[2:]]
from pptrace.cli.main import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main()
tell(*begin)
"""
)
_DIRECTORY = (
    _TELL
    + """
import contextlib, io
from pptrace.cli.main import main
begin = (0.0, time.perf_counter())
sys.argv = ["pptrace", "analyze", str(path), "--no-cache"]
if __name__ == "__main__":
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main()
    tell(*begin, child_bytes=resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""
)
_ORJSON = (
    _TELL
    + """
import orjson, os
begin = now()
document = orjson.loads(path.read_bytes())
tell(*begin)
os._exit(0)
"""
)
_HTA = (
    _TELL
    + """
import contextlib, io, logging, os
logging.disable(logging.CRITICAL)
begin = (0.0, time.perf_counter())
with contextlib.redirect_stdout(io.StringIO()):
    from hta.trace_analysis import TraceAnalysis
    analysis = TraceAnalysis(trace_files={0: str(path)}, trace_dir="")
    analysis.get_idle_time_breakdown(ranks=[0], visualize=False)
    analysis.get_comm_comp_overlap(visualize=False)
tell(*begin)
os._exit(0)
"""
)


@dataclass(frozen=True, slots=True)
class Side:
    """A program to measure: what it is called, its interpreter, its text, the file and further arguments."""

    name: str
    python: str
    program: str
    path: Path
    arguments: tuple[str, ...] = ()

    def measure(self, cache: Path) -> dict[str, Any] | None:
        """Run it, and return what it prints of itself; None where it cannot run."""
        if self.name.endswith("first"):
            shutil.rmtree(cache, ignore_errors=True)
        command = [self.python, "-c", self.program, str(self.path), *self.arguments]
        environment = os.environ | {"PPTRACE_CACHE_DIR": str(cache)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode or not done.stdout.strip():
            lines = done.stderr.strip().splitlines() or ["no output"]
            print(f"{self.name:28} left out: {lines[-1][:90]}")
            return None
        measured: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return measured


def _sample() -> bytes:
    """A trace in Kineto's layout: host ops, launches, kernels and flows."""
    events: list[dict[str, Any]] = []
    for index in range(2000):
        ts = 4458676522690.655 + index * 20
        shapes = {
            "External id": index,
            "Record function id": 0,
            "Input Dims": [[64, 1024], [1024, 4096]],
            "Ev Idx": index,
        }
        device = {
            "device": 0,
            "context": 1,
            "stream": 7,
            "correlation": index,
            "grid": [512, 1, 1],
            "block": [128, 1, 1],
        }
        common = {"pid": 2910249, "tid": 2919752, "ts": ts, "dur": 12.345}
        events += [
            {"ph": "X", "cat": "cpu_op", "name": "aten::addmm", **common, "args": shapes},
            {
                "ph": "X",
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                **common,
                "args": {"cbid": 211, "correlation": index},
            },
            {"ph": "s", "id": index, **common, "cat": "ac2g", "name": "ac2g"},
            {"ph": "X", "cat": "kernel", "name": "ampere_sgemm_128x64_tn", **common, "args": device},
        ]
    body = ",\n  ".join(re.sub(r"\n", "\n  ", json.dumps(event, indent=2)) for event in events)
    return ('{\n  "schemaVersion": 1,\n  "traceEvents": [\n  ' + body + '\n  ],\n  "traceName": "sample"\n}\n').encode()


def replicate(text: bytes, num_bytes: int) -> bytes:
    """The trace over and over with later times and numbers of its own, until it is at least this long."""
    bracket = text.index(b"[", text.index(b'"traceEvents"'))
    begin = text.index(b"{", bracket)
    end = json.JSONDecoder(strict=False).raw_decode(text.decode("latin-1"), bracket)[1] - 1
    events = text[begin:end].rstrip()
    numbers = {int(found[2]) for found in _NUMBER.finditer(events) if found[1] != b"ts"}
    shifts = dict.fromkeys((b"id", b"correlation", b"External id"), max(numbers, default=0) + 1) | {b"ts": _SHIFT_US}

    def shifted(found: re.Match[bytes]) -> bytes:
        return b'"%s": %d' % (found[1], int(found[2]) + len(copies) * shifts[found[1]])

    copies = [events]
    while sum(map(len, copies)) < num_bytes:
        copies.append(_NUMBER.sub(shifted, events))
    return text[:begin] + b",\n  ".join(copies) + text[end:]


def _sides(plain: Path, packed: Path, two: tuple[Path, Path], other: str) -> list[Side]:
    own, cores = sys.executable, str(os.cpu_count() or 1)
    return [
        Side("read_kineto, one core", own, _READ, plain, ("1",)),
        Side("read_kineto", own, _READ, plain, (cores,)),
        Side("read_kineto, gzip", own, _READ, packed, (cores,)),
        Side("orjson.loads", other, _ORJSON, plain),
        Side("pptrace analyze --no-cache", own, _ANALYZE, plain, ("--no-cache",)),
        Side("the same, gzip", own, _ANALYZE, packed, ("--no-cache",)),
        Side("the same, one core", own, _ANALYZE, plain, ("--no-cache", "--jobs", "1")),
        Side("the same, two ranks", own, _ANALYZE, two[0], (str(two[1]), "--no-cache")),
        Side("pptrace analyze, first", own, _ANALYZE, plain),
        Side("pptrace analyze, again", own, _ANALYZE, plain),
        Side("HTA, parse and breakdown", other, _HTA, packed),
    ]


def _measure(sides: Sequence[Side], rounds: int, cache: Path) -> dict[str, dict[str, Any]]:
    """The best of each side by wall time; what cannot run is asked once."""
    best: dict[str, dict[str, Any]] = {}
    failed: set[str] = set()
    for _ in range(rounds):
        for side in sides:
            measured = None if side.name in failed else side.measure(cache)
            if measured is None:
                failed.add(side.name)
            elif side.name not in best or measured["wall_s"] < best[side.name]["wall_s"]:
                best[side.name] = measured
    return best


def _print(best: dict[str, dict[str, Any]], size: int) -> None:
    base = best.get("orjson.loads")
    events = best["read_kineto, one core"]["events"]
    limit = _LIMIT_BYTES + _LIMIT_BYTES_PER_EVENT * events
    ratios = ("wall_s", "cpu_s")
    print(f"{'':28} {'cpu s':>7} {'wall s':>7} {'MB/s':>6} {'M ev/s':>6} {'peak MB':>8} {'× orjson, wall, cpu':>20}")
    for name, measured in best.items():
        wall = measured["wall_s"]
        by = [f"{base[kind] / measured[kind]:9.2f}" if base else f"{'–':>9}" for kind in ratios]
        print(
            f"{name:28} {measured['cpu_s']:7.2f} {wall:7.2f} {size / wall / 1e6:6.0f} {events / wall / 1e6:6.2f} "
            f"{measured['peak_bytes'] / 1e6:8.0f} {' '.join(by):>20}"
        )
    print(f"limit of memory for {events:,} events: {limit / 1e6:.0f} MB")


def _report_directory(text: bytes, num_ranks: int) -> None:
    """A run of many ranks: what the processes hold at most."""
    with tempfile.TemporaryDirectory() as folder:
        replicated = replicate(text, _RANK_BYTES)
        for rank in range(num_ranks):
            own = replicated.replace(
                b"{", b'{"distributedInfo": {"rank": %d, "world_size": %d},' % (rank, num_ranks), 1
            )
            (Path(folder) / f"rank{rank}.json").write_bytes(own)
        program = Path(folder) / "program.py"  # processes that it starts read it again
        program.write_text(_DIRECTORY)
        done = subprocess.run([sys.executable, str(program), folder], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"the directory of {num_ranks} ranks: {done.stderr.strip().splitlines()[-1]}")
        measured = json.loads(done.stdout.strip().splitlines()[-1])
    events = replicated.count(b'"ph": "X"') * num_ranks
    print(
        f"{num_ranks} ranks of {len(replicated) / 1e6:.0f} MB: {measured['wall_s']:.1f} s, "
        f"peak {measured['peak_bytes'] / 1e6:.0f} MB, of the largest other process "
        f"{measured['child_bytes'] / 1e6:.0f} MB; {events:,} events of 45 bytes would be {events * 45 / 1e6:.0f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--megabytes", type=int, action="append")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--other-python", default=sys.executable)
    options = parser.parse_args()
    text = options.trace.read_bytes() if options.trace else _sample()
    text = gzip.decompress(text) if text.startswith(b"\x1f\x8b") else text
    for megabytes in options.megabytes or [50, 200]:
        with tempfile.TemporaryDirectory() as folder:
            plain, packed, second = (Path(folder) / name for name in ("rank0.json", "rank0.json.gz", "rank1.json"))
            plain.write_bytes(replicate(text, megabytes * 10**6))
            packed.write_bytes(gzip.compress(plain.read_bytes(), 1))
            second.hardlink_to(plain)
            size = plain.stat().st_size
            print(
                f"{size / 1e6:.0f} MB of JSON, {packed.stat().st_size / 1e6:.0f} MB of gzip, best of {options.rounds}"
            )
            cache = Path(folder) / "cache"
            sides = _sides(plain, packed, (plain, second), options.other_python)
            _print(_measure(sides, options.rounds, cache), size)
    if options.ranks:
        _report_directory(text, options.ranks)


if __name__ == "__main__":
    main()
