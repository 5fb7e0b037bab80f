"""Options of a run, checked before anything starts. Needs no torch.

So are plans among a script's arguments: a broken one would hang all ranks.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from instrument.launch.window import DEFAULT_WINDOW, StepWindow
from pptrace.errors import ScheduleError, UsageError
from pptrace.schedule.actions import parse_action
from pptrace.schedule.validate import read_sound_csv

_MOST_BYTES = 64 * 2**20


def check_plan_files(arguments: Sequence[str]) -> None:
    """Check every argument that names a CSV file most of whose cells are actions, in torch's exchange format.

    Raises:
        ScheduleError: a plan that lacks actions or cannot run to its end, with the place and the reason.
    """
    for path in _csv_files(arguments):
        if _looks_like_a_plan(path):
            read_sound_csv(path)


def _csv_files(arguments: Sequence[str]) -> Iterator[Path]:
    for argument in arguments:
        name = argument.partition("=")[2] if argument.startswith("-") else argument
        if name.endswith(".csv") and Path(name).is_file() and Path(name).stat().st_size < _MOST_BYTES:
            yield Path(name)


def _looks_like_a_plan(path: Path) -> bool:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return False
    cells = [cell.strip() for line in text.splitlines() for cell in line.split(",") if cell.strip()]
    return bool(cells) and 2 * sum(map(_is_action, cells)) > len(cells)


def _is_action(cell: str) -> bool:
    try:
        parse_action(cell)
    except ScheduleError:
        return False
    return True


PROFILERS = ("torch", "nsys", "none")
LEVELS = ("auto", "full", "light", "shapes")
"""Levels of torch's profiler: operators, ranges and the device (full), or all but the operators (light); auto: light where a
pipeline's runtime names its ops.
"""
DEFAULT_PARENT = Path("pptrace_runs")
_MOST_SHOWN = 120


@dataclass(frozen=True, slots=True)
class RunOptions:
    """``command`` is a script and its arguments, or ``-m``, a module and its arguments."""

    command: tuple[str, ...]
    run_dir: Path
    nproc: int = 1
    nnodes: int = 1
    node_rank: int = 0
    rdzv_endpoint: str | None = None
    profiler: str = "torch"
    window: StepWindow = DEFAULT_WINDOW
    timeout_s: float | None = None
    hooks: bool = True
    """True if the runtimes that the script imports are watched."""
    hang_timeout_s: float | None = None
    memory: bool = False
    """Record every allocation of the recorded steps."""
    live: bool = False
    """Write a record of every step while the run goes on."""
    level: str = LEVELS[0]
    ranks: frozenset[int] | None = None
    """Ranks that are recorded; None: all."""
    budget: int = 0
    """Bytes of traces, and of memory on a host, within which ranks are chosen; 0: ``ranks`` says which."""

    @property
    def script_name(self) -> str:
        """The script's file name, or the module's name."""
        return self.command[1] if self.command[0] == "-m" else Path(self.command[0]).name

    @property
    def run_file(self) -> Path:
        """File that describes the ranks of this node."""
        return self.run_dir / ("run.json" if self.node_rank == 0 else f"run.node{self.node_rank}.json")


def check_options(options: RunOptions) -> None:
    """Find what would fail later.

    Raises:
        UsageError: with what is wrong and what to do.
        ScheduleError: a plan among the script's arguments is broken.
    """
    _check_counts(options)
    _check_command(options.command)
    check_plan_files(options.command)
    _check_profiler(options.profiler)
    _check_level(options)
    if options.memory and options.profiler == "none":
        raise UsageError(
            "--memory: allocations are recorded by a profiler, and --profiler none has none: leave one of them out"
        )
    with refused_directory(options.run_dir):
        _require_place(options.run_dir, shared=options.nnodes > 1)


def _check_level(options: RunOptions) -> None:
    if options.level not in LEVELS:
        raise UsageError(f"--record {options.level!r}: expected one of {', '.join(LEVELS)}")
    if options.level == "light":
        for option, given in (
            ("--memory", options.memory),
            ("--no-hooks", not options.hooks),
            (f"--profiler {options.profiler}", options.profiler != "torch"),
        ):
            if given:
                raise UsageError(f"--record light: records the hooks' ranges without operators; leave out {option}")
    if options.budget and (options.profiler != "torch" or options.window.whole_run):
        raise UsageError("--profile-ranks auto: it records a step on trial: expected --profiler torch, and --steps A:B")
    num_ranks = options.nnodes * options.nproc
    if beyond := sorted(rank for rank in options.ranks or () if rank >= num_ranks):
        raise UsageError(
            f"--profile-ranks: {', '.join(map(str, beyond))}: expected ranks of the run, 0 to {num_ranks - 1}"
        )


def default_run_dir(command: Sequence[str]) -> Path:
    """A directory that does not exist yet, named by the time and the script."""
    name = command[1] if command[0] == "-m" and len(command) > 1 else Path(command[0]).stem
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{re.sub(r'[^A-Za-z0-9_.-]+', '_', name)}"
    path, number = DEFAULT_PARENT / stem, 2
    while path.exists():
        path, number = DEFAULT_PARENT / f"{stem}-{number}", number + 1
    return path


def _check_counts(options: RunOptions) -> None:
    if options.nproc < 1:
        raise UsageError(f"-n {options.nproc}: expected the number of ranks on this node, at least 1")
    if options.nnodes < 1:
        raise UsageError(f"--nnodes {options.nnodes}: expected the number of nodes, at least 1")
    if not 0 <= options.node_rank < options.nnodes:
        raise UsageError(
            f"--node-rank {options.node_rank}: expected 0 to {options.nnodes - 1} with --nnodes {options.nnodes}"
        )
    for name, seconds in (("--timeout", options.timeout_s), ("--hang-timeout", options.hang_timeout_s)):
        if seconds is not None and not 0 < seconds < math.inf:
            raise UsageError(f"{name} {seconds:g}: expected a number of seconds above 0")
    if options.nnodes > 1:
        _check_endpoint(options.rdzv_endpoint)
    elif options.rdzv_endpoint is not None:
        raise UsageError(
            f"--rdzv-endpoint {options.rdzv_endpoint!r} is for several nodes: add --nnodes and --node-rank"
        )


def _check_endpoint(endpoint: str | None) -> None:
    if endpoint is None:
        raise UsageError("--nnodes: the nodes must find each other: add --rdzv-endpoint HOST:PORT of the first node")
    match = re.fullmatch(r"(\[[^\]]+\]|[^:\s]+):(\d{1,5})", endpoint, re.ASCII)
    if match is None or not 0 < int(match[2]) < 65536:
        raise UsageError(f"--rdzv-endpoint {endpoint!r}: expected HOST:PORT with a port of 1 to 65535")


def _check_command(command: Sequence[str]) -> None:
    if command[0] == "-m":
        if len(command) < 2:
            raise UsageError("-m: expected the name of a module after it")
        _check_module(command[1])
        return
    script = Path(command[0])
    if script.is_dir():
        raise UsageError(f"{command[0]!r} is a directory: expected a Python script, or -m and a module")
    if not script.is_file():
        raise UsageError(f"no script {command[0]!r} here: expected a Python file, or -m and a module")


def _check_module(name: str) -> None:
    parent = name.partition(".")[0]
    if (Path(parent).is_dir() or Path(f"{parent}.py").is_file()) and "." not in name:
        return  # found in the current directory, where the ranks look first
    try:
        is_present = importlib.util.find_spec(parent) is not None or Path(parent).is_dir()
    except (ImportError, ValueError):
        is_present = False
    if not is_present:
        raise UsageError(f"-m {name}: there is no such module here or among the installed packages")


def _check_profiler(profiler: str) -> None:
    if profiler not in PROFILERS:
        raise UsageError(f"--profiler {profiler!r}: expected one of {', '.join(PROFILERS)}")
    if profiler != "nsys":
        return
    if shutil.which("nsys") is None:
        raise UsageError(
            "--profiler nsys: there is no 'nsys' on PATH: install NVIDIA Nsight Systems, or use --profiler torch"
        )


def make_directory(path: Path) -> None:
    """Make the directory of a run, where it does not exist.

    Raises:
        UsageError: it cannot be made.
    """
    with refused_directory(path):
        path.mkdir(parents=True, exist_ok=True)


@contextmanager
def refused_directory(path: Path) -> Iterator[None]:
    """Turn what the system says about the directory of a run into one line.

    Raises:
        UsageError: with the system's reason.
    """
    try:
        yield
    except OSError as err:
        why = os.strerror(err.errno) if err.errno else str(err)
        shown = repr(str(path))
        brief = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}…"
        raise UsageError(f"-o {brief}: cannot be made or written ({why}); give another directory") from None


def _require_place(path: Path, *, shared: bool) -> None:
    if path.exists() and not path.is_dir():
        raise UsageError(f"-o {str(path)!r} is a file: expected a directory that is empty or does not exist yet")
    # A run.json alone is that of a run that recorded nothing: the next attempt replaces it.
    if path.is_dir() and not shared and any(file.name != "run.json" for file in path.iterdir()):
        raise UsageError(f"-o {str(path)!r} is not empty: give each run a directory of its own")
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(
            f"-o {str(path)!r}: cannot write into {str(existing)!r}; give a directory that you may write to"
        )
