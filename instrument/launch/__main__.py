"""Records one rank that another launcher starts: torchrun, srun, or nothing at all.

    torchrun --nproc-per-node 4 -m instrument.launch [OPTIONS] (SCRIPT | -m MODULE) [ARGS]…
    srun python -m instrument.launch [OPTIONS] SCRIPT [ARGS]…

Every rank writes its trace into the same directory, for ``pptrace analyze DIR``. Output, exit codes and signals are the script's.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from instrument.launch.options import DEFAULT_PARENT, LEVELS, RunOptions, make_directory, refused_directory
from instrument.launch.slurm import torchrun_environ
from instrument.launch.spawned import record_as_rank
from instrument.launch.window import DEFAULT_WINDOW, chosen_window, parse_ranks
from instrument.launch.worker import Rank, WorkerConfig
from pptrace.errors import UsageError
from pptrace.live_records.file import live_path

_RANK_NAMES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_SIZE_NAMES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_LOCAL_NAMES = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the script under the profiler; ends as the script does."""
    parser = _parser()
    options = parser.parse_args(arguments)
    command = list(options.command)
    if not command:
        parser.error("expected a SCRIPT")
    if options.module:
        command.insert(0, "-m")
    os.environ.update(torchrun_environ(os.environ))
    rank, local_rank, size = (_number(os.environ, names) for names in (_RANK_NAMES, _LOCAL_NAMES, _SIZE_NAMES))
    try:
        run_options = RunOptions(
            tuple(command),
            _run_dir(options.output, command, rank),
            profiler=options.profiler,
            window=chosen_window(options.steps, hooks=not options.no_hooks),
            hooks=not options.no_hooks,
            memory=options.memory,
            live=options.live,
            level=options.record,
            ranks=parse_ranks(options.profile_ranks),
        )
    except (UsageError, OSError) as err:
        print(f"pptrace: {err}", file=sys.stderr)
        sys.exit(2)
    if not sys.flags.safe_path:
        del sys.path[0]  # the current directory, which `-m` put there; the script's own comes instead
    control_dir = Path(tempfile.mkdtemp(prefix="pptrace-"))
    try:
        config = WorkerConfig(run_options, control_dir)
        worker = Rank(config, rank, local_rank, max(1, size), launched=False, record_started=record_as_rank)
        code = worker.run(command)
    finally:
        shutil.rmtree(control_dir, ignore_errors=True)
    _end(worker, code, run_options.run_dir)


def _end(worker: Rank, code: int, run_dir: Path) -> NoReturn:
    """End as Python would have ended: with the script's error, its exit code, or by the signal that ended it."""
    error, record = worker.error, worker.record
    worker.print_error()
    for line in filter(None, (record.note, None if record.trace else f"no trace of this rank in {run_dir}")):
        print(f"pptrace: rank {record.rank}: {line}", file=sys.stderr)
    if record.rank == 0 and record.trace:
        print(f"pptrace: when all ranks have ended: pptrace analyze {run_dir}", file=sys.stderr)
    (run_dir / f"rank{record.rank}.facts.json").unlink(missing_ok=True)
    for signum in (signal.SIGTERM, signal.SIGINT):
        if code == 128 + signum and isinstance(error, BaseException) and not isinstance(error, Exception):
            sys.stdout.flush()
            sys.stderr.flush()
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
    sys.exit(code)


def _run_dir(output: Path | None, command: Sequence[str], rank: int) -> Path:
    """The directory of the run, the same for all its ranks; made where it does not exist.

    Raises:
        UsageError: it holds a trace of this rank already or cannot be made, or the ranks of several nodes have no name for it
            in common.
    """
    given = output or (Path(os.environ["PPTRACE_RUN_DIR"]) if os.environ.get("PPTRACE_RUN_DIR") else None)
    run_dir = given or DEFAULT_PARENT / _common_name(command)
    with refused_directory(run_dir):
        is_taken = (run_dir / f"rank{rank}.json.gz").exists() or live_path(run_dir, rank).exists()
    if is_taken:
        raise UsageError(
            f"-o {str(run_dir)!r} holds a trace of rank {rank} already: give each run a directory of its own"
        )
    make_directory(run_dir)
    return run_dir


def _common_name(command: Sequence[str]) -> str:
    """A name that all ranks of this run find by themselves."""
    environ = os.environ
    script = command[1] if command[0] == "-m" else Path(command[0]).stem
    script = re.sub(r"[^A-Za-z0-9_.-]+", "_", script)
    if "SLURM_JOB_ID" in environ and "SLURM_PROCID" in environ:
        return f"slurm{environ['SLURM_JOB_ID']}.{environ.get('SLURM_STEP_ID', '0')}-{script}"
    run_id = environ.get("TORCHELASTIC_RUN_ID", "none")
    size, local_size = environ.get("WORLD_SIZE", "1"), environ.get("LOCAL_WORLD_SIZE", "1")
    if size == local_size:  # one node: all ranks have the same parent
        return f"{script}-{_process_name(os.getppid() if size != '1' else os.getpid())}"
    if run_id in ("none", ""):
        raise UsageError("several nodes: say with -o DIR (or PPTRACE_RUN_DIR) where the ranks are to write")
    return f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', run_id)}-{script}"


def _process_name(pid: int) -> str:
    """A process's number and when it began, in clock ticks since the boot: no other process has both."""
    try:
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return str(pid)
    return f"{pid}-{ticks}"


def _number(environ: Mapping[str, str], names: Sequence[str]) -> int:
    return next((int(environ[name]) for name in names if environ.get(name, "").isdigit()), 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m instrument.launch",
        description="Record a rank that torchrun or srun starts.",
        allow_abbrev=False,
    )
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="where all ranks write; also PPTRACE_RUN_DIR")
    parser.add_argument(
        "--steps", metavar="A:B", help=f"steps A to B-1 are profiled, or 'all' (default {DEFAULT_WINDOW})"
    )
    parser.add_argument("--profiler", choices=("torch", "none"), default="torch", help="what records")
    parser.add_argument("--record", choices=LEVELS, default=LEVELS[0], help="how much is recorded")
    parser.add_argument(
        "--profile-ranks", metavar="R,R-R,…", default="all", help="ranks that are recorded (default all)"
    )
    parser.add_argument("--no-hooks", action="store_true", help="watch nothing that the script imports")
    parser.add_argument("--memory", action="store_true", help="record every allocation of tensors")
    parser.add_argument("--live", action="store_true", help="write a small record of every step while the run goes on")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGS]")
    return parser


if __name__ == "__main__":
    main()
