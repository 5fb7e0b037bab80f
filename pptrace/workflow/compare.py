"""Runs to compare: from the path of one to what is compared of it."""

from __future__ import annotations

from pathlib import Path

from pptrace.analysis.compare.facts import core_wait_of, facts_of
from pptrace.analysis.compare.figures import figures_of
from pptrace.analysis.compare.recording import recording_of
from pptrace.analysis.compare.side import ComparedRun
from pptrace.analysis.compare.undisturbed import op_times, steadiness_of
from pptrace.analysis.matrix.step_matrix import usual_plan
from pptrace.errors import TraceError
from pptrace.ingest import OnProgress
from pptrace.ingest.inputs.several import runs_at
from pptrace.model.wording import counted
from pptrace.workflow.analyse import Analysis
from pptrace.workflow.load import load
from pptrace.workflow.unrecorded import measured_steps


def compared_run(analysis: Analysis, path: object) -> ComparedRun:
    """Reduce an analysis to what is compared of it.

    Args:
        analysis: of the run.
        path: where it was read, for the error.

    Raises:
        TraceError: it has no whole step; the message is one line.
    """
    report = analysis.report
    figures = figures_of(report, analysis.data)
    if not figures.num_steps:
        found = counted(report.mesh.num_ranks, "rank")
        raise TraceError(
            f"{path}: no whole step in the traces of {found}; expected steps of a pipeline or marked steps, since runs are "
            "compared step by step; record some with pptrace run --steps 2:52, or mark them with pptrace.mark"
        )
    facts = facts_of(report, analysis.facts, analysis.run)
    core_wait, costs = core_wait_of(analysis.facts), usual_plan(analysis.costs)
    return ComparedRun(
        figures,
        report.schedule.name,
        report.mesh.num_ranks,
        facts,
        report.warnings,
        core_wait,
        op_times(costs),
        recording_of(
            report.recording,
            [info.format for info in report.inputs],
            measured_steps(analysis, report.recording.settings if report.recording else {}).lengths,
            report.steps,
            analysis.costs,
        ),
        str(path),
        (min(step.start_ns for step in report.steps), max(step.end_ns for step in report.steps)),
        steadiness_of(costs, figures.lengths),
    )


def read_side(
    path: Path,
    jobs: int | None = 1,
    on_progress: OnProgress | None = None,
    cache: bool = True,
    as_recorded: bool = False,
) -> list[ComparedRun]:
    """Read the run at a path, or each of the runs in it.

    Raises:
        PptraceError: as :func:`read_compared`, or it is not clear whether a directory holds one run or several.
    """
    return [read_compared(run, jobs, on_progress, cache, as_recorded) for run in runs_at(path)]


def read_compared(
    path: Path,
    jobs: int | None = 1,
    on_progress: OnProgress | None = None,
    cache: bool = True,
    as_recorded: bool = False,
) -> ComparedRun:
    """Read and analyse a run, and keep of it what is compared; its tables are let go. Without ``as_recorded`` that is of the run
    without its recording, where its report is.

    Raises:
        PptraceError: nothing can be read, or it has no whole step; the message is one line.
    """
    return compared_run(load([path], jobs=jobs, on_progress=on_progress, cache=cache, as_recorded=as_recorded), path)
