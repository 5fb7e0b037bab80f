"""One rank of a run: installs the session, then runs the script as ``__main__``."""

from __future__ import annotations

import atexit
import builtins
import faulthandler
import importlib.machinery
import io
import os
import pickle
import runpy
import signal
import sys
import time
import traceback
import types
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from instrument.launch.ending import Ending, Terminated, keep_until_exit
from instrument.launch.facts import host_name
from instrument.launch.options import RunOptions
from instrument.launch.record import AgreedStart, MadeOptimizers, RankRecord, RecordWriter, State, StepCounter
from instrument.launch.watch.stacks import stacks_path

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from instrument.launch.recording.profiler import Profiler
    from instrument.launch.recording.traced import TracedSession


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Settings of a rank: the options of the run, with an absolute ``run_dir``, and its launcher's own directory."""

    options: RunOptions
    control_dir: Path
    record_dir: Path | None = None
    """Folder of the rank's record; None: the run directory."""

    def hand_over(self) -> dict[str, str]:
        """Write it down for the ranks; the variables by which they find it."""
        (self.control_dir / _CONFIG).write_bytes(pickle.dumps(self))
        return {"PPTRACE_RUN_DIR": str(self.options.run_dir), "PPTRACE_CONTROL_DIR": str(self.control_dir)}

    @staticmethod
    def from_environ(environ: Mapping[str, str]) -> WorkerConfig:
        """The one that was handed over."""
        config: WorkerConfig = pickle.loads((Path(environ["PPTRACE_CONTROL_DIR"]) / _CONFIG).read_bytes())
        return config


_CONFIG = "config"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of the script."""

    state: State
    exit_code: int
    error: str | None = None
    traceback: str | None = None


RecordStarted = Callable[[WorkerConfig, "BaseProcess", int], bool]
"""Record a process that is about to be started, with its number among these; whether that is possible."""


class Rank:
    """This process, from its first line to its exit code."""

    def __init__(
        self,
        config: WorkerConfig,
        rank: int,
        local_rank: int,
        world_size: int,
        *,
        launched: bool = True,
        record_started: RecordStarted | None = None,
    ) -> None:
        """``launched`` says that our launcher started it, without which it cannot go on; ``record_started`` records processes
        that the script starts, as ranks.
        """
        self._config = config
        self._local_rank = local_rank
        self._world_size = world_size
        self._record_started = record_started
        record = RankRecord(rank, local_rank, host_name(), os.getpid())
        self._writer = RecordWriter(config.options.run_dir, record, config.record_dir)
        self._session: TracedSession | None = None
        self._error: BaseException | None = None
        """Keeps the script's frames, and so its loop over steps, as they were until the trace is saved."""
        self._ending = Ending(self._save_blocked, lambda: self._writer.update(saving=True), with_parent=launched)

    @property
    def record(self) -> RankRecord:
        """Record of this rank."""
        return self._writer.record

    @property
    def error(self) -> BaseException | None:
        """Error that the script raised."""
        return self._error

    def print_error(self) -> None:
        """Print the script's error as Python would have when it ended the process."""
        error = self._error
        if isinstance(error, SystemExit):
            if error.code is not None and not isinstance(error.code, int):
                print(error.code, file=sys.stderr)
        elif error is not None:
            traceback.print_exception(type(error), error, _script_part(error.__traceback__))

    def run(self, command: Sequence[str]) -> int:
        """Run the script; its exit code."""
        return self.call(partial(_run_script, command))

    def call(self, script: Callable[[], object]) -> int:
        """Call what stands for the script; its exit code."""
        with stacks_path(self._config.control_dir, self._local_rank).open("w") as stacks:
            faulthandler.enable()
            faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
            self._ending.watch()
            try:
                outcome = self._attempt(script)
            except (KeyboardInterrupt, Terminated) as err:  # came while another error was on its way up
                outcome = _outcome_of(err.__context__ or err)
            if os.getpid() != self._writer.record.pid:
                self.print_error()
                _end_child(outcome.exit_code)
            self._ending.settle()
            self._settle(outcome)
            faulthandler.unregister(signal.SIGUSR2)
        return outcome.exit_code

    def _attempt(self, script: Callable[[], object]) -> Outcome:
        try:
            self._session = self._make_session()
            script()
        except BaseException as err:
            self._ending.settle()
            self._error = err
            keep_until_exit(err)
            if self._session is not None:
                self._session.note_error(err)
            return _outcome_of(err)
        self._ending.settle()
        return Outcome(State.OK, 0)

    def _settle(self, outcome: Outcome) -> None:
        """Report first, so that the error is shown while the trace is still being written."""
        if outcome.state is not State.OK:
            failed_at_ns = time.time_ns() if outcome.state is State.FAILED else None
            self._writer.update(
                state=outcome.state,
                saving=True,
                exit_code=outcome.exit_code,
                error=outcome.error,
                traceback=outcome.traceback,
                failed_at_ns=failed_at_ns,
            )
        if self._session is not None:
            if outcome.state is State.STOPPED:
                self._session.stop_started()
            self._session.close(clean=outcome.state is State.OK)
        self._writer.update(state=outcome.state, saving=False, exit_code=outcome.exit_code)

    def _save_blocked(self) -> None:
        state = self._writer.record.state
        self._writer.update(state=State.STOPPED if state is State.RUNNING else state, saving=True)
        if self._session is not None:
            self._session.save(blocked=True)
            self._writer.update(steps_seen=self._session.num_steps)
        self._writer.update(saving=False)

    def _make_profiler(self) -> Profiler | None:
        options, rank = self._config.options, self._writer.record.rank
        if options.ranks is not None and rank not in options.ranks:
            return None
        if options.profiler == "torch":
            from instrument.launch.recording.profiler import TraceProfiler

            path, shapes = options.run_dir / f"rank{rank}.json.gz", not options.hooks or options.level == "shapes"
            return TraceProfiler(path, memory=options.memory, shapes=shapes, operators=self._needs_operators)
        if options.profiler == "nsys":
            from instrument.launch.recording.nsys_profiler import FACTS_SUFFIX, NsysProfiler

            path, num_local = options.run_dir / f"rank{rank}{FACTS_SUFFIX}", int(os.environ["LOCAL_WORLD_SIZE"])
            return NsysProfiler(path, self._config.control_dir, self._local_rank, num_local)
        return None

    def _needs_operators(self) -> bool:
        """Return whether operators are recorded: unless that is said, where no runtime of a pipeline has described itself, whose
        ops are ranges.
        """
        options = self._config.options
        if options.level != "auto":
            return options.level != "light"
        return options.memory or not options.hooks or not self._writer.record.facts.get("framework")

    def _make_session(self) -> TracedSession:
        from instrument import session
        from instrument.launch.recording.traced import TracedSession
        from instrument.launch.watch.call_log import CallLog, call_log_path
        from instrument.launch.watch.python_motion import PythonMotion

        record = self._writer.record
        config, options = self._config, self._config.options
        profiler = self._make_profiler()
        counter = StepCounter(config.control_dir, record.local_rank)
        writer, hold = self._writer, self._ending.hold
        choice = None
        if options.budget:
            from instrument.launch.recording.chosen_ranks import RankChoice

            per_host = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            choice = RankChoice(options.run_dir, record.rank, self._world_size, per_host, options.budget)
        calls: CallLog | None = None
        try:
            calls = CallLog(call_log_path(config.control_dir, record.local_rank))
        except OSError as err:
            line = f"pptrace: no calls are noted, should the run hang: their file cannot be made ({err.strerror})"
            print(line, file=sys.stderr, flush=True)
        traced = TracedSession(
            options,
            self._world_size,
            profiler,
            writer,
            counter,
            hold,
            logs=() if calls is None else (calls,),
            agreed=AgreedStart(config.control_dir),
            made=MadeOptimizers(config.control_dir, record.rank),
            choice=choice,
        )
        session.install(traced)
        traced.open()
        if self._world_size == 1 and self._record_started is not None:
            traced.record_started(partial(self._record_started, config))
        if options.hooks and calls is not None:
            PythonMotion(calls).start()
        return traced


def _end_child(code: int) -> NoReturn:
    """End a child that the script forked as Python would have, but for C++'s destructors: Kineto's would join threads that
    only the parent has.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def _run_script(command: Sequence[str]) -> None:
    """Run a script or a module as Python itself would: same ``__main__``, ``sys.argv`` and ``sys.path[0]``.

    What it leaves in its globals lives until Python ends, as it would without us. Taken apart earlier, a DDP model that holds the
    last reference to its process group can wait for ever: for a thread of gloo's, which waits for the interpreter lock.
    """
    if command[0] == "-m":
        sys.argv = list(command[1:])
        sys.path.insert(0, str(Path.cwd()))
        keep_until_exit(runpy.run_module(command[1], run_name="__main__", alter_sys=True))
        return
    sys.argv = list(command)
    sys.path.insert(0, str(Path(command[0]).resolve().parent))
    script = Path(command[0])
    if script.is_file() and script.suffix != ".pyc" and not zipfile.is_zipfile(script):
        _run_file(script.absolute())
    else:
        keep_until_exit(runpy.run_path(command[0], run_name="__main__"))


def _run_file(script: Path) -> None:
    """Run a file of source as ``__main__``: ``runpy`` would make ``sys.argv[0]`` absolute as well as ``__file__``."""
    with io.open_code(str(script)) as file:
        code = compile(file.read(), str(script), "exec", dont_inherit=True)
    module = types.ModuleType("__main__")
    module.__file__ = str(script)
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", str(script))
    vars(module).update(__builtins__=builtins, __cached__=None)
    keep_until_exit(sys.modules["__main__"])
    sys.modules["__main__"] = module
    exec(code, vars(module))


def _outcome_of(err: BaseException) -> Outcome:
    if isinstance(err, Terminated):
        return Outcome(State.STOPPED, int(str(err.code)))
    if isinstance(err, KeyboardInterrupt):
        return Outcome(State.STOPPED, 128 + signal.SIGINT)
    return _exit_outcome(err) if isinstance(err, SystemExit) else _error_outcome(err)


def _exit_outcome(err: SystemExit) -> Outcome:
    if err.code is None or err.code == 0:
        return Outcome(State.OK, 0)
    if isinstance(err.code, int):
        return Outcome(State.FAILED, err.code, f"the script exited with code {err.code}")
    return Outcome(State.FAILED, 1, f"the script exited: {err.code}")


def _error_outcome(err: BaseException) -> Outcome:
    trace = _script_part(err.__traceback__)
    text = "".join(traceback.format_exception(type(err), err, trace))
    line = traceback.format_exception_only(type(err), err)[-1].strip().splitlines()
    first = line[0] if line else type(err).__name__
    if first.endswith(": ") and len(line) > 1:  # torch's spawn: what failed is in the last line
        first += line[-1].strip()
    return Outcome(State.FAILED, 1, first, text)


def _script_part(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames that lead from this file to the script."""
    ours = {__file__, runpy.__file__, "<frozen runpy>"}
    rest = trace
    while rest is not None and rest.tb_frame.f_code.co_filename in ours:
        rest = rest.tb_next
    return rest if rest is not None else trace
