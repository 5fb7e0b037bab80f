"""From Parquet tables to the whole report, at more and more ops: time and peak memory for each op, and how they grow.

    python tools/bench/bench_tables.py [--ops N]… [--no-messages] [--keep DIR]

The tables are a simulated step of 1F1B (8 stages, 64 microbatches) for every data-parallel replica and step, with a send and a
receive for each message. Each size runs in a process of its own, imports included, through the command line.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pptrace.schedule.actions import Kind
from pptrace.schedule.registry import build
from pptrace.simulator import simulate
from pptrace.simulator.simulation import uniform

PP, MICROBATCHES, DP = 8, 64, 16
OPS_PER_STEP = PP * MICROBATCHES * 2 * DP
OP_NS, MESSAGE_NS = 1_000_000, 20_000
LIMIT_S, LIMIT_BYTES, LIMIT_OPS = 60.0, 4 * 2**30, 10_000_000
MOST_GROWTH = 1.5
LOOK_S = 0.2


def pipeline_step(schedule: str = "1f1b") -> tuple[pd.DataFrame, pd.DataFrame]:
    """(ops, messages) of one step of one pipeline, in time from 0; each message as a send and a receive."""
    plan = build(schedule, pp=PP, num_microbatches=MICROBATCHES)
    ops = simulate(plan, uniform(OP_NS, 2 * OP_NS, p2p_ns=MESSAGE_NS)).ops()
    ops = ops[["rank", "kind", "stage", "microbatch", "start_ns", "end_ns"]]
    is_forward = (ops["kind"] == str(Kind.F)).to_numpy()
    target = ops["stage"].to_numpy() + np.where(is_forward, 1, -1)
    sends = ops[(target >= 0) & (target < PP)]
    direction = np.where(sends["kind"] == "F", "F", "B")
    shift = np.where(sends["kind"] == "F", 1, -1)
    common = {"microbatch": sends["microbatch"], "direction": direction, "start_ns": sends["end_ns"]}
    common |= {"end_ns": sends["end_ns"] + MESSAGE_NS, "bytes": 1 << 20, "axis": "pp"}
    peer = sends["rank"] + shift
    send = pd.DataFrame({"rank": sends["rank"], "kind": "send", "stage": sends["stage"], "peer": peer, **common})
    receive = pd.DataFrame(
        {"rank": peer, "kind": "recv", "stage": sends["stage"] + shift, "peer": sends["rank"], **common}
    )
    return ops, pd.concat([send, receive], ignore_index=True)


def write_tables(folder: Path, num_steps: int, *, messages: bool, dp: int = DP) -> int:
    """Write ops.parquet and comms.parquet of so many steps.

    Returns:
        the number of ops.
    """
    import polars

    ops, comms = pipeline_step()
    step_ns = int(ops["end_ns"].max()) + OP_NS
    rng = np.random.default_rng(1)
    for name, table in (("ops", ops), ("comms", comms)):
        if name == "comms" and not messages:
            continue
        copies = num_steps * dp
        rows = {
            column: np.tile(table[column].to_numpy(), copies) for column in table if table[column].dtype.kind in "iu"
        }
        of_copy = np.repeat(np.arange(copies), len(table))
        rows["step"] = of_copy // dp
        offset = (of_copy % dp) * PP
        for column in ("rank", "peer"):
            if column in rows:
                rows[column] += offset
        begin = rows["step"] * step_ns + 10**15
        rows["start_ns"] += begin
        rows["end_ns"] += begin
        if name == "ops":
            rows["end_ns"] -= rng.integers(0, OP_NS // 20, len(of_copy))
        frame = polars.DataFrame(rows)
        texts = [column for column in table if column not in rows]
        frame = frame.with_columns(
            polars.Series(column, np.tile(pd.factorize(table[column])[0], copies)).replace_strict(
                dict(enumerate(pd.factorize(table[column])[1])), return_dtype=polars.String
            )
            for column in texts
        )
        frame.write_parquet(folder / f"{name}.parquet")
    return len(ops) * num_steps * dp


def measure(folder: Path, *arguments: str) -> tuple[float, float, int]:
    """(seconds, CPU seconds, peak bytes) of ``pptrace analyze`` of a folder, imports included.

    The peak is the most that all its processes had together, looked at five times a second: what several share counts once.
    """
    command = [sys.executable, "-m", "pptrace", "analyze", str(folder), "--json", os.devnull, "--no-cache", *arguments]
    begin, peak = time.perf_counter(), 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
            peak = max(peak, _all_bytes(process.pid))
            time.sleep(min(LOOK_S, (time.perf_counter() - begin) / 20))
        seconds = time.perf_counter() - begin
        _, status, usage = ended
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return seconds, usage.ru_utime + usage.ru_stime, peak


def _all_bytes(pid: int) -> int:
    """Memory of a process and those that it has begun, at least the most that it had itself.

    Libraries that other programs use at the time count in part in the sum. What ``getrusage`` says of a child begins with its
    parent's.
    """
    together = sum(_kilobytes(process, "smaps_rollup", "Pss") for process in _with_children(pid))
    return max(together, _kilobytes(pid, "status", "VmHWM")) * 1024


def _with_children(pid: int) -> list[int]:
    found = [pid]
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [process for child in _text(listed).split() for process in _with_children(int(child))]
    return found


def _kilobytes(pid: int, file: str, name: str) -> int:
    """A figure of a process; 0 of one that has ended."""
    found = re.search(rf"^{name}:\s+(\d+) kB", _text(Path(f"/proc/{pid}/{file}")), re.MULTILINE)
    return int(found[1]) if found else 0


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError:  # the process ended meanwhile
        return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", type=float, action="append", help="about so many ops (default: 16,384 to 10 million)")
    parser.add_argument("--no-messages", action="store_true")
    parser.add_argument("--keep", type=Path, help="write the tables here and keep them")
    options = parser.parse_args()
    previous, is_good = None, True
    for wanted in options.ops or [2**14, 2**17, 2**20, 10**7]:
        num_steps = max(round(wanted / OPS_PER_STEP), 1)
        with tempfile.TemporaryDirectory() as temporary:
            folder = options.keep or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            num_ops = write_tables(folder, num_steps, messages=not options.no_messages)
            seconds, cpu_s, peak = measure(folder)
        growth = (
            ""
            if previous is None
            else f"; {(seconds - previous[1]) / (num_ops - previous[0]) * 1e6:5.2f} µs per further op"
        )
        is_beyond = num_ops > 0.9 * LIMIT_OPS and (seconds > LIMIT_S or peak > LIMIT_BYTES)
        is_good &= not is_beyond
        print(
            f"{num_ops:>12,} ops on {PP * DP} ranks, {num_steps} steps: {seconds:6.2f} s ({cpu_s:.2f} s CPU), "
            f"{peak / 2**20:,.0f} MiB; {seconds / num_ops * 1e6:6.2f} µs and {peak / num_ops:,.0f} bytes an op{growth}"
            f"{f'   BEYOND {LIMIT_S:.0f} s or {LIMIT_BYTES / 2**30:.0f} GiB' if is_beyond else ''}",
            flush=True,
        )
        previous = num_ops, seconds
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
