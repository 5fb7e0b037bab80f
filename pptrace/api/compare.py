"""Comparison of two runs."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import chain
from typing import Any, Literal

import pandas as pd

from pptrace.analysis.compare.compare import compare_sides
from pptrace.analysis.compare.result import Comparison, MeanChange, OfBoth, SpanChange, Work
from pptrace.analysis.compare.side import ComparedRun
from pptrace.api.files import ExportsJson, ExportsPage, FilePath, as_input
from pptrace.api.options import require_type, require_whole
from pptrace.api.run import Run
from pptrace.errors import UsageError
from pptrace.ingest import OnProgress
from pptrace.ingest.inputs.resolve import require_path
from pptrace.workflow.compare import compared_run, read_side

_WIDTH = 140
"""Columns of the text."""


@dataclass(frozen=True, slots=True)
class RunComparison(ExportsJson, ExportsPage):
    """Result of :func:`pptrace.compare`; printed, it is the output of ``pptrace compare``."""

    result: Comparison

    @property
    def verdict(self) -> Literal["slower", "faster", "no difference"]:
        """The verdict on steps of B against those of A: B is as much slower or faster where their ``work`` is the same."""
        return self.result.verdict.value

    @property
    def detail(self) -> str:
        """The verdict in a sentence."""
        return self.result.detail

    @property
    def span(self) -> SpanChange:
        """The typical step of both runs, ``a_ns`` and ``b_ns``, and its ``change``, b / a − 1, with its 95 % interval, ``low`` to
        ``high``.
        """
        return self.result.span

    @property
    def mean(self) -> MeanChange | None:
        """The same of the mean step, which counts for throughput, and whether that changes otherwise than the typical one
        (``is_otherwise``); None where the time from step to step is not known.
        """
        return self.result.mean

    @property
    def work(self) -> Work:
        """The work of a step of both runs: ``is_same``, None where nothing tells, and in ``detail`` by what that is known."""
        return self.result.work

    @property
    def num_runs(self) -> OfBoth[int]:
        """The number of runs of A and of B."""
        return self.result.num_runs

    @property
    def run_to_run(self) -> OfBoth[float | None]:
        """The standard deviation of the step from one run of A, and of B, to another, as a share of it; None with one run."""
        return self.result.run_to_run

    @property
    def parts(self) -> pd.DataFrame:
        """Parts of the step, largest change first: ``name``, ``where`` (a dict), ``a_ns``, ``b_ns``, ``change_ns``,
        ``significant`` (<NA> with too few steps, or where what was recorded differs) and ``adds_up`` (those that do sum to the
        step).
        """
        parts = self.result.parts
        return pd.DataFrame(
            {
                "name": pd.Series([part.name for part in parts], dtype="object"),
                "where": pd.Series([dict(part.where) for part in parts], dtype="object"),
                **{
                    name: pd.array([getattr(part, name) for part in parts], dtype="int64")
                    for name in ("a_ns", "b_ns", "change_ns")
                },
                "significant": pd.array([part.significant for part in parts], dtype="boolean"),
                "adds_up": pd.array([part.adds_up for part in parts], dtype="bool"),
            }
        )

    @property
    def facts(self) -> pd.DataFrame:
        """Facts in which the runs differ: ``name``, ``a`` and ``b`` as text, None where a run does not tell it."""
        facts = self.result.facts
        columns = {name: [getattr(fact, name) for fact in facts] for name in ("name", "a", "b")}
        return pd.DataFrame({name: pd.Series(values, dtype="object") for name, values in columns.items()})

    @property
    def warnings(self) -> tuple[str, ...]:
        """Lines about what is not compared, and about the runs."""
        return self.result.warnings

    def _json_object(self) -> dict[str, Any]:
        from pptrace.report.to_json import comparison_object

        return comparison_object(self.result)

    def _page(self) -> str:
        from pptrace.report.html import comparison_page

        return comparison_page(self.result)

    def __str__(self) -> str:
        from rich.console import Console

        from pptrace.report.text import print_comparison

        text = io.StringIO()
        print_comparison(self.result, Console(file=text, width=_WIDTH, highlight=False))
        return text.getvalue().rstrip("\n")

    def __repr__(self) -> str:
        return f"<pptrace.RunComparison: {self.detail}>"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def compare(
    a: OneRun | Sequence[OneRun],
    b: OneRun | Sequence[OneRun],
    *,
    jobs: int | None = 1,
    progress: Callable[[float, int], None] | None = None,
    cache: bool = True,
    as_recorded: bool = False,
) -> RunComparison:
    """Say whether B is slower than A, by how much, and in which parts of the step: what ``pptrace compare`` shows.

        >>> import pptrace
        >>> both = pptrace.compare("sample_traces/1f1b_p2", "sample_traces/1f1b_p4")
        >>> both.verdict
        'slower'
        >>> both.span.a_ns, both.span.b_ns  # without their recordings
        (24712227, 78156585)

    Args:
        a: a trace file, a directory with one trace per rank, a run directory, a directory of several runs of one program, or a
            run that was loaded; or several of these, each a run or a directory of runs.
        b: the same of the run, or runs, that it is compared with.
        jobs: processes that read; None takes one per core, as in :func:`pptrace.load`.
        progress: called with how many traces of a run have been read (a float: parts count) and how many there are.
        cache: whether to keep what was recognised in large files on disk, for the next time.
        as_recorded: whether recordings are compared; else the runs without them, where their reports are of those.

    Raises:
        PptraceError: nothing can be read, a run has no whole step, or those of a side are of different programs; the message is
            one line.
    """
    if jobs is not None:
        require_whole("jobs", jobs, 1)
    require_type("as_recorded", as_recorded, bool, "True or False")
    on_progress = None if progress is None else lambda status: progress(status.files_read, status.num_files)
    sides = _runs_of(a), _runs_of(b)
    for run in chain(*sides):
        if not isinstance(run, Run):
            require_path(as_input(run))  # rather than after minutes
    read = partial(_read, jobs=jobs, on_progress=on_progress, cache=cache, as_recorded=as_recorded)
    of_a, of_b = (list(chain.from_iterable(map(read, runs))) for runs in sides)
    return RunComparison(compare_sides(of_a, of_b))


OneRun = FilePath | Run
"""A path of a run or of several, or a run that was loaded."""


def _runs_of(side: OneRun | Sequence[OneRun]) -> Sequence[OneRun]:
    """The runs of a side.

    Raises:
        UsageError: there is none.
    """
    if isinstance(side, str | os.PathLike | Run) or not isinstance(side, Sequence):
        return [side]
    if not side:
        raise UsageError("no run is given; expected a path or a loaded run, or several")
    return side


def _read(
    run: OneRun, jobs: int | None, on_progress: OnProgress | None, cache: bool, as_recorded: bool
) -> list[ComparedRun]:
    if isinstance(run, Run):
        return [compared_run((run.as_recorded() if as_recorded else run).analysis, "the loaded run")]
    return read_side(as_input(run), jobs, on_progress, cache, as_recorded)
