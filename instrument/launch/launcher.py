"""Starts the ranks of one node with torch's elastic launcher, and waits for them."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from instrument.launch.options import RunOptions
from instrument.launch.output import RankPipes, Terminal
from instrument.launch.record import RankRecord, State
from instrument.launch.rundir import RunDirectory, RunEnd, Status, collect_records
from instrument.launch.watch.monitor import Monitor
from instrument.launch.worker import WorkerConfig
from pptrace.errors import PptraceError

_RENDEZVOUS_S = 300
_BRIEF = 120
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, slots=True)
class RunResult:
    """Result of a run: how it ended, and what is known of each rank of this node."""

    run_dir: Path
    end: RunEnd
    ranks: tuple[RankRecord, ...]
    causes: tuple[int, ...]
    """The ranks whose failures were shown, and ended the run."""

    @property
    def traces(self) -> tuple[Path, ...]:
        names = dict.fromkeys(record.trace for record in self.ranks if record.trace is not None)
        return tuple(self.run_dir / name for name in names)

    @property
    def script_traces(self) -> tuple[Path, ...]:
        """Traces of the script's own profiler, which are all there is where pptrace recorded none."""
        return tuple(self.run_dir / record.script_trace for record in self.ranks if record.script_trace is not None)


def launch(options: RunOptions, terminal: Terminal) -> RunResult:
    """Run the script on this node's ranks until all have ended; nothing is left running then.

    ``options`` must have passed :func:`instrument.launch.options.check_options`. Call it in the main thread.

    Raises:
        PptraceError: the ranks could not be started at all.
    """
    directory = RunDirectory(options)
    directory.begin()
    control_dir = Path(tempfile.mkdtemp(prefix="pptrace-"))
    pipes = RankPipes(terminal)
    monitor = Monitor(options, control_dir, pipes, terminal)
    exit_codes: Mapping[int, int] = {}
    end = RunEnd(Status.FAILED, 1)
    try:
        # SIGTERM ends a run as Ctrl-C does, also before and after torch's launcher handles signals itself.
        with handled_signals(_raise), _environment(_rank_environ(options, control_dir)), _quiet_torch():
            monitor.start()
            try:
                end, exit_codes = _run(options, pipes)
            finally:
                monitor.stop()
                pipes.close()
        if end.status is Status.FAILED:
            monitor.explain_end(exit_codes)
        end = RunEnd(Status.TIMEOUT, 124) if monitor.timed_out else end
    finally:
        codes = {**monitor.exit_codes, **exit_codes}
        records = collect_records(options.run_dir, control_dir, pipes.ranks, codes, monitor.forced)
        shutil.rmtree(control_dir, ignore_errors=True)
        directory.finish(end, records, monitor.hang)
    return RunResult(options.run_dir, end, tuple(records), monitor.causes)


def _run(options: RunOptions, pipes: RankPipes) -> tuple[RunEnd, Mapping[int, int]]:
    command = ["-P", "-m", "instrument.launch.rank", *options.command]
    try:
        elastic_launch(_launch_config(options, pipes), sys.executable)(*command)
    except ChildFailedError as err:
        return RunEnd(Status.FAILED, 1), {rank: failure.exitcode for rank, failure in err.failures.items()}
    except SignalException as err:
        return RunEnd(Status.INTERRUPTED, 128 + err.sigval), {}
    except KeyboardInterrupt:
        return RunEnd(Status.INTERRUPTED, 128 + signal.SIGINT), {}
    except Exception as err:
        reason = str(err).strip().splitlines()[0] if str(err).strip() else type(err).__name__
        raise PptraceError(f"the ranks could not be started: {reason}") from err
    return RunEnd(Status.OK, 0), {}


def _launch_config(options: RunOptions, pipes: RankPipes) -> LaunchConfig:
    """One node: a rendezvous on a free port of its own. Several: one at the first node, torchrun's "static"."""
    alone = options.nnodes == 1
    return LaunchConfig(
        min_nodes=options.nnodes,
        max_nodes=options.nnodes,
        nproc_per_node=options.nproc,
        run_id=uuid.uuid4().hex if alone else "pptrace",
        rdzv_backend="c10d" if alone else "static",
        rdzv_endpoint="localhost:0" if alone else str(options.rdzv_endpoint),
        rdzv_configs={"timeout": _RENDEZVOUS_S} | ({} if alone else {"rank": options.node_rank}),
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=pipes,
        # A host's own name need not resolve, as on a machine without a network; ranks would then wait for the rendezvous.
        local_addr="localhost" if alone else None,
    )


def _rank_environ(options: RunOptions, control_dir: Path) -> dict[str, str]:
    environ = WorkerConfig(replace(options, run_dir=options.run_dir.absolute()), control_dir).hand_over()
    if "OMP_NUM_THREADS" not in os.environ:  # torch would take all cores in every rank
        environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // options.nproc))
    return environ


@contextmanager
def _environment(extra: Mapping[str, str]) -> Iterator[None]:
    """The ranks inherit the environment; it is put back afterwards."""
    before = dict(os.environ)
    os.environ.update(extra)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def handled_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle what ends a run, but for signals that are ignored."""
    before = {signum: signal.getsignal(signum) for signum in _HANDLED}
    for signum in _HANDLED:
        if before[signum] is not signal.SIG_IGN:
            signal.signal(signum, handler)
    try:
        yield
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)


def _raise(signum: int, _frame: FrameType | None) -> None:
    raise SignalException(f"got signal {signum}", signal.Signals(signum))


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Torch's launcher logs what the monitor already says, several lines for each rank that ends."""
    logger = logging.getLogger("torch.distributed.elastic")
    handler, propagate = logging.NullHandler(), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = propagate
        logger.removeHandler(handler)


def describe_ranks(result: RunResult) -> list[str]:
    """Describe how the ranks ended, for a person: nothing of those that simply finished with a trace."""
    elsewhere = {record.error for record in result.ranks if record.rank not in result.causes}
    same: dict[str, list[int]] = {}
    for record in result.ranks:
        if record.state is not State.OK:
            count = record.steps_seen
            kept = "its trace is kept" if record.trace else "no trace"
            is_in_cause = record.rank in result.causes and record.error not in elsewhere
            reason = f": {_brief(record.error)}" if record.error and not is_in_cause else ""
            story = f" {record.state}{reason} ({count} {'step' if count == 1 else 'steps'}; {kept})"
            same.setdefault(story, []).append(record.rank)
        elif record.note:
            same.setdefault(f": {record.note}", []).append(record.rank)
    return [*(f"{_ranks_text(ranks)}{story}" for story, ranks in same.items()), *_memory_held(result.ranks)]


def _memory_held(records: Sequence[RankRecord]) -> list[str]:
    """Memory that each rank held, where one ran out of it; nothing elsewhere."""
    if not any(record.facts.get("out_of_memory") for record in records):
        return []
    held = []
    for record in records:
        memory = record.facts.get("memory") or {}
        on_device = memory.get("device_bytes")
        num_bytes = on_device or memory.get("process_bytes")
        if num_bytes is not None:
            kind = "allocated" if on_device else "resident"
            held.append(f"rank {record.rank} {num_bytes / 1e9:,.2f} GB {kind} (step {memory['step']})")
    return [f"peak memory when it ran out: {', '.join(held)}"] if held else []


def _brief(error: str) -> str:
    """The first sentence of an error, without the source path of torch's own that gloo's errors begin with."""
    text = re.sub(r"\[[^\[\]]*\.(?:cc|cpp|h):\d+\] ", "", error).split(". ")[0]
    return text if len(text) <= _BRIEF else f"{text[:_BRIEF]}…"


def _ranks_text(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
