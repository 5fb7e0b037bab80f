"""A dask.distributed cluster: worker processes of this machine, or the workers of a running scheduler.

dask is an optional extra: it is imported here and in :mod:`pptrace.workflow.dask_engine` alone, when a cluster is asked for.
"""

from __future__ import annotations

import logging
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

from pptrace.errors import PptraceError, UsageError
from pptrace.processes import num_cpus
from pptrace.workflow.dask_engine import DaskEngine

if TYPE_CHECKING:
    from distributed import Client

NOT_INSTALLED = "--engine dask: dask.distributed is not installed; pip install 'pptrace[dask]', or use --engine local"
_CONNECT_S = 10.0
_EXPECTED = "expected the address that `dask scheduler` prints, such as tcp://10.0.0.1:8786"


@contextmanager
def open_dask(scheduler: str | None = None, jobs: int | None = None) -> Iterator[DaskEngine]:
    """Connect to the workers of a scheduler, or start ``jobs`` on this machine (None: one per core) and end them.

    Raises:
        UsageError: dask.distributed is not installed.
        PptraceError: there is no such scheduler, it has no workers, or they run another version of pptrace or Python.
    """
    try:
        import distributed
    except ImportError:
        raise UsageError(NOT_INSTALLED) from None
    with ExitStack() as stack:
        stack.enter_context(_quiet())
        if scheduler is None:
            client, name = stack.enter_context(_local_cluster(distributed, jobs)), "the local dask cluster"
        else:
            client, name = stack.enter_context(_connected(distributed, scheduler)), f"--scheduler {scheduler}"
        engine = DaskEngine(client, name)
        if scheduler is not None:
            _require_same_code(engine)
        yield engine


@contextmanager
def _local_cluster(distributed: Any, jobs: int | None) -> Iterator[Client]:
    """Worker processes on this machine, on free ports of the loopback interface alone."""
    import dask

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pptrace-dask-"))
        stack.enter_context(dask.config.set({"temporary-directory": folder}))
        with _interrupts_held_back():
            cluster = stack.enter_context(
                distributed.LocalCluster(
                    n_workers=jobs or num_cpus(),
                    threads_per_worker=1,
                    processes=True,
                    host="127.0.0.1",
                    dashboard_address=None,
                    scheduler_kwargs={"dashboard_address": "127.0.0.1:0"},  # it listens without a dashboard too
                    local_directory=folder,
                    silence_logs=logging.CRITICAL,
                )
            )
        yield stack.enter_context(distributed.Client(cluster, set_as_default=False))


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Ctrl-C reaches this program at the end of the block, and never the processes that threads begun in it start: it ends them.

    A terminal interrupts all processes of a command, and each would show where it was.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # which would let interrupts through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _connected(distributed: Any, scheduler: str) -> Iterator[Client]:
    try:
        distributed.comm.get_address_host_port(scheduler)
    except ValueError:  # a client would try for 20 s, and show where it was
        raise PptraceError(f"--scheduler {scheduler}: is not an address; {_EXPECTED}") from None
    try:
        client = distributed.Client(scheduler, timeout=_CONNECT_S, set_as_default=False)
    except (OSError, TimeoutError, ValueError, TypeError) as err:
        raise PptraceError(
            f"--scheduler {scheduler}: no dask scheduler answers within {_CONNECT_S:.0f} s ({type(err).__name__}); {_EXPECTED}"
        ) from None
    with client:
        try:
            client.wait_for_workers(1, timeout=_CONNECT_S)
        except TimeoutError:
            raise PptraceError(
                f"--scheduler {scheduler}: has no workers; start some with `dask worker {scheduler}`"
            ) from None
        yield client


def _require_same_code(engine: DaskEngine) -> None:
    """Refuse workers whose results may differ from those of this program."""
    python = python_version()
    for address, facts in sorted(engine.client.get_versions()["workers"].items()):
        theirs = ".".join(str(facts["host"]["python"]).split(".")[:3])
        if theirs.rpartition(".")[0] != python.rpartition(".")[0]:  # a patch release reads the same pickles
            raise _other(engine, address, f"Python {theirs}", f"Python {python}")
    expected = _code()()
    assert expected is not None
    version, _ = expected
    for address, code in sorted(engine.client.run(_code()).items()):
        if code is None:
            raise PptraceError(
                f"{engine.name}: worker {address} has no pptrace; "
                f"install pptrace {version} in the environment of every worker"
            )
        if code != expected:
            detail = " with other sources" if code[0] == version else ""
            raise _other(engine, address, f"pptrace {code[0]}{detail}", f"pptrace {version}")


def _code() -> Callable[[], tuple[str, str] | None]:
    """A function that tells the version of pptrace and a digest of its sources, None without pptrace.

    It is made here, so that it is sent as it is: a worker without pptrace has nowhere to import it from.
    """

    def version_and_digest() -> tuple[str, str] | None:
        try:
            import pptrace
            from pptrace.version import __version__
        except ImportError:
            return None
        import hashlib
        from pathlib import Path

        folder, digest = Path(pptrace.__file__).parent, hashlib.sha256()
        for source in sorted(folder.rglob("*.py")):
            digest.update(source.relative_to(folder).as_posix().encode() + source.read_bytes())
        return __version__, digest.hexdigest()

    return version_and_digest


def python_version() -> str:
    return ".".join(map(str, sys.version_info[:3]))


def _other(engine: DaskEngine, address: str, theirs: str, expected: str) -> PptraceError:
    return PptraceError(
        f"{engine.name}: worker {address} runs {theirs} and this program {expected}; "
        "expected one version of both everywhere: install it in the environment of every worker"
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence dask's log, in which a worker that dies and is replaced is an error, and its own warnings about versions."""
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith("distributed")]
    levels = [logger.level for logger in loggers]  # dask sets some of each its own
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
