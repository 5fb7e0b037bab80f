"""``--engine dask`` against local on the same run, one file per rank: same JSON, time, and the peak memory of each process.

    python tools/bench/bench_dask.py [--ranks N]… [--steps N] [--workers N] [--keep DIR]

The run is simulated: 1F1B on 8 stages with 64 microbatches, data-parallel copies of it with op times of their own, and a send and
a receive for each message and an all-reduce of each step's gradients, written as a Parquet table for each rank.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.bench.bench_tables import OP_NS, PP, pipeline_step

POLL_S = 0.05
ALL_REDUCE_NS = 100_000


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run of ``pptrace analyze``: seconds, of them processor time of all processes, and the peak bytes of the program and
    of each process that it started.
    """

    wall_s: float
    cpu_s: float
    program_bytes: int
    worker_bytes: tuple[int, ...]


def write_ranks(folder: Path, num_ranks: int, num_steps: int) -> int:
    """Write the table of each rank.

    Returns:
        the number of ops and of ends of messages, of all ranks.
    """
    import polars

    ops, comms = pipeline_step()
    last = ops.groupby("rank", as_index=False).agg(stage=("stage", "first"), start_ns=("end_ns", "max"))
    reduced = last.assign(
        kind="all_reduce", axis="dp", end_ns=last["start_ns"] + ALL_REDUCE_NS, group_size=num_ranks // PP, bytes=1 << 26
    )
    step_ns = int(ops["end_ns"].max()) + OP_NS
    rng = np.random.default_rng(1)
    num_rows = 0
    for rank in range(num_ranks):
        of_stage = [table[table["rank"] == rank % PP] for table in (ops, comms, reduced.drop(columns="stage"))]
        one = pd.concat(of_stage, ignore_index=True).sort_values("start_ns", kind="stable")
        one = (
            one.fillna({"direction": "", "axis": ""}).fillna(-1).astype({"stage": int, "microbatch": int, "bytes": int})
        )
        rows = pd.concat([one.assign(step=step) for step in range(num_steps)], ignore_index=True)
        begin = rows["step"] * step_ns + 10**15
        is_op = rows["axis"] == ""
        peer = np.where(rows["peer"] >= 0, rows["peer"] + rank - rank % PP, -1).astype(np.int64)
        rows = rows.assign(
            rank=rank,
            peer=peer,
            start_ns=rows["start_ns"] + begin,
            end_ns=rows["end_ns"] + begin - np.where(is_op, rng.integers(0, OP_NS // 20, len(rows)), 0),
        )
        frame = polars.DataFrame({name: rows[name].tolist() for name in rows}, strict=False)
        frame.write_parquet(folder / f"rank{rank}.parquet")
        num_rows += len(rows)
    return num_rows


def measure(folder: Path, report: Path, *options: str) -> Figures:
    """Run ``pptrace analyze`` in a process of its own, imports included."""
    command = [sys.executable, "-m", "pptrace", "analyze", str(folder), "--json", str(report), "--no-cache", *options]
    peaks: dict[int, int] = {}
    cpu_s: dict[int, float] = {}
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            for pid in (process.pid, *_descendants(process.pid)):
                peaks[pid] = max(peaks.get(pid, 0), _peak_bytes(pid))
                cpu_s[pid] = max(cpu_s.get(pid, 0), _cpu_s(pid))
            time.sleep(POLL_S)
    wall_s = time.perf_counter() - begin
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    program = peaks.pop(process.pid, 0)
    return Figures(wall_s, sum(cpu_s.values()), program, tuple(sorted((peak for peak in peaks.values()), reverse=True)))


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        for path in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                children = [int(child) for child in path.read_text().split()]
            except OSError:  # ended meanwhile
                continue
            found += children
            waiting += children
    return found


def _peak_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, action="append", help="of the run [64, 256, 1024]")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--keep", type=Path, help="write the tables here and keep them")
    options = parser.parse_args()
    is_same = True
    for num_ranks in options.ranks or [64, 256, 1024]:
        with tempfile.TemporaryDirectory() as temporary:
            folder = (options.keep or Path(temporary)) / f"{num_ranks}_ranks"
            folder.mkdir(parents=True, exist_ok=True)
            num_rows = write_ranks(folder, num_ranks, options.steps)
            reports = [Path(temporary) / f"{engine}.json" for engine in ("local", "dask")]
            local = measure(folder, reports[0])
            workers = ("--engine", "dask", "--jobs", str(options.workers))
            dask = measure(folder, reports[1], *workers)
            same = filecmp.cmp(*reports, shallow=False)
            is_same = is_same and same
        print(f"{num_ranks} ranks, {options.steps} steps, {num_rows / 1e6:.2f} million rows: ", end="")
        print("same JSON" if same else "ANOTHER JSON")
        print(f"  local {local.wall_s:6.1f} s, {local.cpu_s:6.1f} s of processors, peak {_mib(local.program_bytes)}")
        of_workers = ", ".join(map(_mib, dask.worker_bytes[: options.workers]))
        print(
            f"  dask  {dask.wall_s:6.1f} s, {dask.cpu_s:6.1f} s of processors, peak {_mib(dask.program_bytes)}, ",
            end="",
        )
        print(f"of the workers {of_workers}", flush=True)
    return 0 if is_same else 1


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"


if __name__ == "__main__":
    sys.exit(main())
