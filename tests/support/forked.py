"""Python programs as forks of a process that has imported torch: starting a run of two ranks takes 7 s of CPU time otherwise.

:func:`start_python` is ``subprocess.Popen`` of a command line of Python's, or of ``pptrace``'s. What is started, its process
group, streams, environment, signals and exit code are real; only the interpreter is not a new one. The processes that torch's
launcher starts in it, the ranks, are forked in the same way, and are the launcher's children. What Python does before its first
line (``-P``, what an import of torch reads from the environment) is not tried by this: tests with ``subprocess.Popen`` do that.

Each worker of pytest has one server. No fork of a process that has asked for its GPUs can use them, and importing torch's parts
may ask: where there is a GPU, everything is started anew.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import io
import os
import pickle
import runpy
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(Path(sys.executable).parent / "pptrace")
PRELOADED = (
    *("torch", "torch._dynamo", "torch.distributed.run", "torch.profiler", "instrument.examples.train_gpt"),
    *("torch._inductor.compile_fx", "torch.distributed.checkpoint"),  # a second of what megatron-core imports
    *(
        "instrument.launch.launcher",
        "instrument.launch.worker",
        "instrument.launch.recording.traced",
        "instrument.launch.nsys",
    ),
    *(
        "instrument.launch.recording.profiler",
        "instrument.launch.watch.hang_watch",
        "instrument.launch.watch.python_motion",
    ),
    *("pptrace.cli.main", "pptrace.cli.run", "pptrace.cli.analyze", "pptrace.workflow.load"),
    *("tests.ingest.nsight_files", "tests.support.synthetic", "tests.support.pool"),
    *("tests.instrument.pipeline.cases.training", "tests.instrument.models.cases.mixes"),
    "tests.instrument.tensor.cases.layers",
)
LAUNCHERS = (PROGRAM, "pptrace.cli", "torch.distributed.run", "instrument.launch.nsys", "/nsys", "/delayed_ops.py")
PR_SET_CHILD_SUBREAPER = 36
MAX_REQUEST = 1 << 17
_FLAGS = ("-P", "-u")


@dataclass(frozen=True, slots=True)
class Job:
    """Job of a fork; its three streams come with it."""

    arguments: tuple[str, ...]
    """Those of the interpreter, from its options on."""
    environ: dict[str, str]
    cwd: str
    own_session: bool
    own_group: bool
    num_children: int
    """Number of processes that a launcher starts in its turn; 0 where the program is none."""


def start_python(command: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
    """``subprocess.Popen(command, **options)`` of ``sys.executable``, or of the installed ``pptrace``."""
    arguments = [str(part) for part in command]
    return _Forked(arguments, **options) if _can_fork() else subprocess.Popen(arguments, **options)


@cache
def _can_fork() -> bool:
    import torch

    # a torch for GPUs starts threads where it is imported, GPU or not
    return sys.platform == "linux" and torch.version.cuda is None and torch.version.hip is None


@cache
def _server() -> socket.socket:
    """A process that waits for jobs. It ends with this one, which inherits the forks, as if it had started them."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Importing torch's compiler starts processes that compile, where nobody says otherwise.
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TORCH_WARM_POOL": "0"}
    command = [sys.executable, "-c", f"from tests.support.forked import main; main({theirs.fileno()})"]
    with theirs:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environ, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )

    def stop() -> None:
        ours.close()
        process.wait()

    atexit.register(stop)
    return ours


class _Forked(subprocess.Popen[Any]):
    """A process that the server forks."""

    def _execute_child(
        self,
        args: list[str],
        executable: object,
        preexec_fn: object,
        close_fds: bool,
        pass_fds: object,
        cwd: str | Path | None,
        env: Mapping[str, str] | None,
        startupinfo: object,
        creationflags: int,
        shell: bool,
        p2cread: int,
        p2cwrite: int,
        c2pread: int,
        c2pwrite: int,
        errread: int,
        errwrite: int,
        restore_signals: bool,
        gid: object,
        gids: object,
        uid: object,
        umask: int,
        start_new_session: bool,
        process_group: int,
    ) -> None:
        arguments = None if shell or executable or preexec_fn or pass_fds else _python_arguments(args)
        if arguments is None or not self._can_fork():
            super()._execute_child(
                *(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell),
                *(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask),
                *(start_new_session, process_group),
            )
            return
        environ = dict(os.environ if env is None else env)
        in_group = process_group == 0
        job = Job(arguments, environ, str(cwd or Path.cwd()), start_new_session, in_group, _num_children(arguments))
        streams = [fd if fd != -1 else n for n, fd in enumerate((p2cread, c2pwrite, errwrite))]
        try:
            self.pid = self._fork(job, streams)
            self._child_created = True
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _can_fork(self) -> bool:
        return True

    def _fork(self, job: Job, streams: list[int]) -> int:
        server = _server()
        _send(server, job, streams)
        answer = server.recv(32)
        assert answer, "the process that forks has ended; what it wrote on stderr says why"
        return int(answer)


def _python_arguments(command: Sequence[str | Path]) -> tuple[str, ...] | None:
    """Arguments of the interpreter for a command that is a Python program, else None."""
    program, *rest = map(str, command)
    if program == sys.executable:
        return tuple(rest)
    with contextlib.suppress(OSError), Path(program).open("rb") as file:
        if file.readline().strip() == f"#!{sys.executable}".encode():
            return (program, *rest)
    return None


def _num_children(arguments: Sequence[str]) -> int:
    """Number of ranks that ``pptrace run`` or torchrun is to start; two for those that do not say it."""
    is_launcher = arguments[:3] == ("-m", "pptrace", "run") or any(
        name in argument for argument in arguments[:4] for name in LAUNCHERS
    )
    if not is_launcher:
        return 0
    return next((int(value) for option, value in pairwise(arguments) if option in ("-n", "--nproc-per-node")), 2)


def _send(to: socket.socket, job: Job, streams: Sequence[int]) -> None:
    request = pickle.dumps(job)
    assert len(request) <= MAX_REQUEST
    socket.send_fds(to, [request], streams)


def _receive(source: socket.socket) -> tuple[Job, list[int]] | None:
    request, streams, _, _ = socket.recv_fds(source, MAX_REQUEST, 3)
    return (pickle.loads(request), streams) if request else None


def _serve(source: socket.socket) -> tuple[Job, list[int]] | None:
    """Fork for each job; returns in the fork, with its job, and at the end without one."""
    for name in PRELOADED:
        importlib.import_module(name)
    _name_no_methods()
    assert len([*Path("/proc/self/task").iterdir()]) == 1, "a process with threads cannot be forked"
    gc.collect()
    gc.freeze()
    while received := _receive(source):
        if _is_child(source):
            source.close()
            return received
        for fd in received[1]:
            os.close(fd)
    return None


def _name_no_methods() -> None:
    """Let torch's launcher not look up which of its methods speaks in its log: half a second of CPU time in each run."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    dynamic_rendezvous.get_method_name = lambda depth=2: "method"


def _is_child(source: socket.socket) -> bool:
    """Fork twice: a process whose parent has ended becomes a child of the process that runs the tests."""
    read_fd, write_fd = os.pipe()
    if os.fork() == 0:
        between = os.getpid()
        if child := os.fork():
            os.write(write_fd, str(child).encode())
            os._exit(0)
        os.close(read_fd)
        os.close(write_fd)
        while os.getppid() == between:
            time.sleep(0.001)
        return True
    os.close(write_fd)
    os.wait()
    source.send(os.read(read_fd, 32))
    os.close(read_fd)
    return False


class _Children:
    """Processes forked while this one has no threads, each of which becomes a program that this one starts."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, socket.socket]] = []

    def prepare(self, count: int, streams: Sequence[int]) -> tuple[Job, list[int]] | None:
        """Fork them; returns in a fork, with its job, once it has one. ``streams`` are this process's, and no child's."""
        for _ in range(count):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
            if pid == 0:
                for fd in streams:
                    os.close(fd)
                for end in (ours, *(other for _, other in self._waiting)):
                    end.close()
                with theirs:
                    received = _receive(theirs)
                if received is None:  # the parent has ended
                    os._exit(0)
                return received
            theirs.close()
            self._waiting.append((pid, ours))
        return None

    def replace_popen(self) -> None:
        """Give these to whoever starts a Python program."""
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        waiting = self._waiting

        class ForkedChild(_Forked):
            def _can_fork(self) -> bool:
                return bool(waiting)

            def _fork(self, job: Job, streams: list[int]) -> int:
                pid, child = waiting.pop(0)
                with child:
                    _send(child, job, streams)
                return pid

        subprocess.Popen = subprocess_handler.Popen = ForkedChild


def _become(job: Job, streams: list[int]) -> None:
    """Do what the system does between a fork and the first line of the program."""
    if job.own_session:
        os.setsid()
    elif job.own_group:
        os.setpgid(0, 0)
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
    for fd in streams:
        os.close(fd)
    os.chdir(job.cwd)
    os.environ.clear()
    os.environ.update(job.environ)
    if (threads := job.environ.get("OMP_NUM_THREADS", "1")) != "1":
        import torch

        torch.set_num_threads(int(threads))
    is_direct = "-u" in job.arguments[:2] or bool(job.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = os.fdopen(0, closefd=False)
    raw = os.fdopen(1, "wb", 0 if is_direct else -1, closefd=False)
    sys.stdout = io.TextIOWrapper(raw, write_through=is_direct, line_buffering=os.isatty(1))
    sys.stderr = os.fdopen(2, "w", closefd=False, errors="backslashreplace", buffering=1)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    sys.excepthook = _print_script_part


def _run(arguments: Sequence[str]) -> None:
    """``python ARGUMENTS``, up to the end of its ``__main__``."""
    num_flags = next(n for n, argument in enumerate(arguments) if argument not in _FLAGS)
    is_safe, (first, *rest) = "-P" in arguments[:num_flags], arguments[num_flags:]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    sys.path[:] = [path for path in sys.path if path not in ("", str(ROOT))]
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if first == "-m":
        sys.modules.pop(rest[0], None)
        sys.path[:0] = [] if is_safe else [str(Path.cwd())]
        sys.argv = rest
        runpy._run_module_as_main(rest[0])
        return
    if first == "-c":
        sys.path[:0] = [] if is_safe else [""]
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec", dont_inherit=True), vars(main))
        return
    sys.path[:0] = [] if is_safe else [str(Path(first).resolve().parent)]
    sys.argv = [first, *rest]
    main.__file__ = first
    exec(compile(Path(first).read_text(), first, "exec", dont_inherit=True), vars(main))


def _print_script_part(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """Print an error that nothing caught as Python does, without the frames that lead to the script."""
    script = trace
    while trace is not None:
        script = trace.tb_next if trace.tb_frame.f_code.co_filename == __file__ else script
        trace = trace.tb_next
    traceback.print_exception(kind, error, script)


def _end(code: int | str | None) -> NoReturn:
    """End as Python would, but for taking apart what was imported, which takes longer than most programs of tests."""
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def main(fd: int) -> None:
    """The server, and each of its forks."""
    received = _serve(socket.socket(fileno=fd))
    if received is None:
        return
    job, streams = received
    children = _Children()
    while job.num_children and (inherited := children.prepare(job.num_children, streams)):  # goes on in the child
        (job, streams), children = inherited, _Children()
    _become(job, streams)
    if job.num_children:
        children.replace_popen()
    try:
        _run(job.arguments)
    except SystemExit as ended:
        _end(ended.code)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        _end(1)
    _end(None)
