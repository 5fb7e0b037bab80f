"""Traces in, :class:`~pptrace.api.run.Run` out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Literal

from pptrace.api.files import FilePaths, as_inputs
from pptrace.api.options import require_type, require_whole
from pptrace.api.run import Run
from pptrace.errors import UsageError
from pptrace.workflow.dask_cluster import open_dask
from pptrace.workflow.load import load as load_analysis


def load(
    paths: FilePaths,
    *,
    schedule: str | None = None,
    step: int | None = None,
    jobs: int | None = 1,
    progress: Callable[[float, int], None] | None = None,
    cache: bool = True,
    engine: Literal["local", "dask"] = "local",
    scheduler: str | None = None,
    as_recorded: bool = False,
) -> Run:
    """Read and analyse the traces of a run: what ``pptrace analyze`` shows.

        >>> import pptrace
        >>> run = pptrace.load("sample_traces/1f1b_p4")
        >>> run
        <pptrace.Run: pptrace, 4 ranks, 1f1b, steps 3 and 4>
        >>> round(run.report.typical_step.bubble.ratio, 3)
        0.999

    Args:
        paths: one path or several: trace files, a directory with one trace per rank, or a run directory of ``pptrace run``;
            URLs (``s3://…``) need ``pip install 'pptrace[urls]'``.
        schedule: compare with this schedule (a key of ``pptrace.schedules``) instead of the recognised one.
        step: report only this step.
        jobs: processes that read, and explain the steps of long runs; None takes one per core. Where they cannot be forked
            (another thread runs, as in a notebook, or another system than Linux), those that read are spawned, so a script that
            asks for more than one has to be guarded by ``if __name__ == "__main__"``, and this process alone explains.
        progress: called with how many traces have been read (a float: parts count) and how many there are.
        cache: whether to keep what was recognised in large files on disk, for the next time.
        engine: "local" reads in ``jobs`` processes of this machine; "dask" on the workers of a dask.distributed cluster, which
            needs ``pip install 'pptrace[dask]'``, files under the same paths on all machines, and a script that is guarded by
            ``if __name__ == "__main__"``. The report is the same.
        as_recorded: whether the figures are those of the recording; else what recording cost is taken out where it made a
            difference (``report.recording``).
        scheduler: the address of a running dask scheduler; None starts ``jobs`` workers on this machine and ends them.

    Raises:
        PptraceError: nothing can be read, or there is no such step or schedule; the message is one line.
    """
    if jobs is not None:
        require_whole("jobs", jobs, 1)
    if step is not None:
        require_whole("step", step)
    require_type("as_recorded", as_recorded, bool, "True or False")
    require_type("schedule", schedule, (str, type(None)), "a key of pptrace.schedules, or None")
    if progress is not None and not callable(progress):
        raise UsageError(f"progress is {progress!r}; expected a function of two numbers, or None")
    if engine not in ("local", "dask"):
        raise UsageError(f"engine is {engine!r}; expected 'local' or 'dask'")
    if scheduler is not None and engine != "dask":
        raise UsageError("scheduler is given, which only engine='dask' has; add engine='dask'")
    on_progress = None if progress is None else lambda status: progress(status.files_read, status.num_files)
    given = as_inputs(paths)
    with open_dask(scheduler, jobs) if engine == "dask" else nullcontext() as dask_engine:
        options = (schedule, step, jobs, on_progress, cache, dask_engine)
        analysis = load_analysis(given, *options, as_recorded=as_recorded)
    again = partial(load_analysis, given, schedule, step, jobs, cache=cache, as_recorded=True)
    return Run(analysis, again)
