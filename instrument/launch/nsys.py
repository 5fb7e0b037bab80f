"""``pptrace run --profiler nsys``: the launcher of a node runs as the child of ``nsys profile``.

    pptrace run ─► nsys profile ─► python -m instrument.launch.nsys CONTROL ─► the ranks

One report holds all ranks of a node. Recording begins with the first rank that enters the chosen steps and ends with the last one
that leaves them (cudaProfilerStart and -Stop). nsys exports the report itself, or that is done here where it finds no importer;
what each rank said about itself is put into the export, so that the file alone can be analysed.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from instrument.launch.launcher import RunResult, handled_signals, launch
from instrument.launch.options import RunOptions, make_directory
from instrument.launch.output import Terminal
from instrument.launch.record import RankRecord, write_json
from pptrace.errors import PptraceError, TraceError
from pptrace.marks import METADATA_TABLE
from pptrace.nsys import exported_report

_PAUSES_S = (0.5, 2.0)
"""Waits before nsys is tried again, s: several that start at once on one machine race for its shared memory and
sockets, and one of them ends before it has started anything."""


def profile_command(nsys: str, options: RunOptions, control_dir: Path, *, has_cuda: bool) -> list[str]:
    """The whole command. Without CUDA nothing could start the capture, so all steps are recorded."""
    window = []
    if has_cuda and not options.window.whole_run:
        window = ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
    return [
        nsys,
        "profile",
        "--trace=cuda,nvtx" if has_cuda else "--trace=nvtx",
        "--sample=none",
        "--cpuctxsw=none",
        *(["--cuda-graph-trace=node"] if has_cuda else []),
        *(["--cuda-memory-usage=true"] if has_cuda and options.memory else []),
        *window,
        "--export=sqlite",
        "--force-overwrite=true",
        f"--output={options.run_dir.absolute() / report_stem(options)}",
        sys.executable,
        "-P",
        "-m",
        "instrument.launch.nsys",
        str(control_dir),
    ]


def report_stem(options: RunOptions) -> str:
    return f"node{options.node_rank}"


def launch_under_nsys(options: RunOptions) -> RunResult:
    """Launch like :func:`instrument.launch.launcher.launch`, with nsys around it; the ranks' traces are one file for the node.

    Raises:
        PptraceError: nsys ended before the ranks could be started.
    """
    nsys = shutil.which("nsys")
    if nsys is None:
        raise PptraceError("--profiler nsys: there is no 'nsys' on PATH")
    make_directory(options.run_dir)
    for pause_s in (*_PAUSES_S, None):
        attempt = _attempt(nsys, options)
        if attempt.started_launcher or attempt.signalled or pause_s is None:
            break
        print(
            f"pptrace: 'nsys profile' ended with code {attempt.code} before it started the script; trying again",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(pause_s)
    if attempt.outcome is None:
        reached = "before the ranks did" if attempt.started_launcher else "before it started the script"
        raise PptraceError(f"'nsys profile' ended with code {attempt.code} {reached}; its own lines say why")
    if isinstance(attempt.outcome, PptraceError):
        raise attempt.outcome
    return _with_report(attempt.outcome, options, nsys)


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One call of nsys: its exit code, and what the launcher inside it left."""

    code: int
    started_launcher: bool
    signalled: bool
    """The user or the job's manager asked it to end."""
    outcome: RunResult | PptraceError | None


def _attempt(nsys: str, options: RunOptions) -> _Attempt:
    with tempfile.TemporaryDirectory(prefix="pptrace-") as folder:
        control_dir = Path(folder)
        (control_dir / "options").write_bytes(pickle.dumps(options))
        command = profile_command(nsys, options, control_dir, has_cuda=torch.cuda.is_available())
        code, signalled = _run_and_forward(command, control_dir / "pid")
        outcome = None
        with suppress(OSError, pickle.UnpicklingError, EOFError):
            outcome = pickle.loads((control_dir / "result").read_bytes())
        return _Attempt(code, (control_dir / "pid").exists(), signalled, outcome)


def _run_and_forward(command: Sequence[str], pid_file: Path) -> tuple[int, bool]:
    """Run nsys in a process group of its own: signals go to the launcher inside, so that nsys outlives it and writes.

    Returns:
        its exit code, and whether a signal came.
    """
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    signals: list[int] = []

    def forward(signum: int, _frame: FrameType | None) -> None:
        signals.append(signum)
        try:
            os.kill(int(pid_file.read_text()), signum)
        except (OSError, ValueError):
            process.send_signal(signum)

    with handled_signals(forward):
        return process.wait(), bool(signals)


def _with_report(result: RunResult, options: RunOptions, nsys: str) -> RunResult:
    """The result with the node's file as the trace of each rank that recorded, also in run.json."""
    facts = [_take_facts(options.run_dir / record.trace) for record in result.ranks if record.trace is not None]
    report, lost = None, "nsys wrote no report; its own lines say why"
    try:
        report = exported_report(nsys, options.run_dir / report_stem(options))
    except TraceError as err:
        lost = str(err)
    if report is not None:
        add_facts(report, [(int(item["pid"]), item["facts"]) for item in facts if item is not None])

    def settled(record: RankRecord) -> RankRecord:
        if record.trace is None:
            return record
        return replace(record, trace=report.name) if report else replace(record, trace=None, note=record.note or lost)

    ranks = tuple(map(settled, result.ranks))
    _rewrite_run_file(options, ranks)
    return replace(result, ranks=ranks)


def _take_facts(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    path.unlink(missing_ok=True)
    return content if isinstance(content, dict) else None


def add_facts(export: Path, facts: Sequence[tuple[int, object]]) -> None:
    """Put the facts of the ranks, by pid, into an export of nsys."""
    connection = sqlite3.connect(export)
    try:
        with connection:
            connection.execute(f"CREATE TABLE IF NOT EXISTS {METADATA_TABLE} (pid INTEGER, facts TEXT)")
            rows = [(pid, json.dumps(item)) for pid, item in facts]
            connection.executemany(f"INSERT INTO {METADATA_TABLE} VALUES (?, ?)", rows)
    except sqlite3.Error as err:
        raise PptraceError(
            f"{export}: the export of nsys cannot be completed ({err}); its report is in the same directory"
        ) from err
    finally:
        connection.close()


def _rewrite_run_file(options: RunOptions, ranks: Sequence[RankRecord]) -> None:
    path = options.run_file
    with suppress(OSError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        settled = {record.rank: record for record in ranks}
        for entry in content["ranks"]:
            if (record := settled.get(entry["rank"])) is not None:
                entry |= {"trace": record.trace, "note": record.note}
        write_json(path, content)


def main() -> None:
    """The launcher inside nsys: reads its options, leaves its result, and exits as the run did."""
    control_dir = Path(sys.argv[1])
    (control_dir / "pid").write_text(str(os.getpid()))
    options = pickle.loads((control_dir / "options").read_bytes())
    outcome: RunResult | PptraceError
    try:
        outcome = launch(options, Terminal())
    except PptraceError as err:
        outcome = err
    (control_dir / "result").write_bytes(pickle.dumps(outcome))
    sys.exit(outcome.end.exit_code if isinstance(outcome, RunResult) else outcome.exit_code)


if __name__ == "__main__":
    main()
