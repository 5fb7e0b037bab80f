"""A run that was read and analysed: its report, the tables behind it, pictures and exports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import pandas as pd
from msgspec import structs

from pptrace.analysis.experts.types import NO_PAIRS
from pptrace.analysis.report import Report
from pptrace.analysis.result import StepReport
from pptrace.analysis.whole_run import Waterfall
from pptrace.api.comms_table import CommsTable
from pptrace.api.copies import CopiedTable
from pptrace.api.files import ExportsOps, FilePath, TimelinePicture, as_path, reason, text_or_file
from pptrace.api.options import method_takes_options, require_whole
from pptrace.api.wishes import Wishes
from pptrace.errors import PptraceError, UsageError
from pptrace.model.tables import COMMS, MEMORY, OPS, SLACK, Schema, empty_table, without_categories
from pptrace.workflow.analyse import Analysis

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from pptrace.api.whatif import Predictions

FigureKind = Literal["waterfall", "overview"]


@dataclass(frozen=True, eq=False)
class Run(ExportsOps):
    """Result of :func:`pptrace.load`. A notebook shows it as a summary: figures of the typical step, findings, steps.

    Times are int64 nanoseconds on the clock to which the ranks were aligned (``report.clock``); bytes are int64. In ``ops``,
    ``comms`` and ``memory`` an unknown number is -1 and an unknown text "", as in the files of ``pptrace analyze --csv``.
    """

    analysis: Analysis
    """The report with the tables and windows behind it, as the dashboard uses them; its types may change."""
    _read_as_recorded: Callable[[], Analysis] | None = field(default=None, repr=False, compare=False)

    def as_recorded(self) -> Run:
        """This run with the figures of its recording: itself if it has them, else its files read again.

        Raises:
            PptraceError: the files are no longer there.
        """
        recording = self.report.recording
        if self._read_as_recorded is None or recording is None or recording.figures == "recorded":
            return self
        return Run(self._read_as_recorded())

    @property
    def report(self) -> Report:
        """The report; each field is that of the JSON report, None where that has null."""
        return self.analysis.report

    @CopiedTable
    def ops(self) -> pd.DataFrame:
        """One row per op: forwards, backwards, and the ranges around them.

        ``rank`` (global), ``step``, ``kind`` (F forward, B full backward, I input gradient, W weight gradient, OVERLAP_F_B,
        OPTIMIZER, GRAD_SYNC, STEP, …), ``stage``, ``chunk`` (of the rank's stages, from 0), ``microbatch``, ``phase`` (warmup,
        steady, cooldown), ``start_ns``, ``end_ns``, ``clock`` (device or host: which of them timed it), ``source`` (label or
        inferred), ``pair`` (of an OVERLAP_F_B, whose other columns are its forward's: both halves as text); ``slack_ns`` (how
        much longer it could have taken, all else as measured, without its pipeline's step ending later) and
        ``on_critical_path`` (of that step; nullable), which are found when the table is first asked for.

            >>> import pptrace
            >>> ops = pptrace.load("sample_traces/1f1b_p4").ops
            >>> ops.query("step == 4 and rank == 0 and kind == 'F'").phase.value_counts().to_dict()
            {'steady': 5, 'warmup': 3}
        """
        return _table(self.analysis.ops_with_slack, {**OPS, **SLACK})

    @CopiedTable
    def comms(self) -> pd.DataFrame:
        """One row per send, receive or collective, on each rank that takes part.

        ``rank``, ``step``, ``kind`` (send, recv, all_reduce, …), ``axis`` (pp, tp, cp, dp, …), ``peer`` (the other global rank of
        a send or receive), ``group_size``, ``bytes``, ``direction`` (F or B of a pipeline's messages), ``stage``,
        ``chunk`` (where a label names one in place of the stage), ``microbatch``; ``start_ns`` (this side is ready),
        ``posted_ns`` (posted ahead: the call let go of the host), ``asked_ns`` (from here to ``end_ns`` this side waits
        for it), ``end_ns`` (this side is done), ``transfer_start_ns`` (all sides are ready: what is before it is
        waiting), ``transfer_end_ns``; ``stream``, ``match`` (the same number on both ends of a message and on all members
        of a collective), ``clock`` (device or host; none where only the length is known); of an all-to-all of uneven parts
        ``received_bytes`` (``bytes`` is what it hands in) and ``splits`` (rows sent to each member, ">", rows received);
        ``algorithm`` and protocol in the name of NCCL's kernel (RING_LL).
        """
        return CommsTable(_table(self.analysis.data.comms, COMMS))

    @CopiedTable
    def memory(self) -> pd.DataFrame:
        """One row per memory event: ``rank``, ``t_ns``, ``allocated_bytes``, ``reserved_bytes``; no rows in traces without."""
        return _table(self.analysis.data.memory, MEMORY)

    @CopiedTable
    def steps(self) -> pd.DataFrame:
        """One row per step of the report: ``step``, ``start_ns``, ``end_ns``, ``period_ns`` (to the start of the next
        step), ``span_ns``, the bubble and the waterfall.

        ``bubble_ratio`` is bubble over compute, ``bubble_share`` bubble over window, ``ideal_…`` those of the plan with F = I = W
        and free messages; ``compute_ns`` … ``unexplained_ns`` are the waterfall, which sums to ``span_ns``. Unknown is <NA>.
        """
        rows: list[dict[str, Any]] = []
        for step in self.report.steps:
            bubble, parts = step.bubble, step.bubble.waterfall_ns
            row = {name: getattr(step, name) for name in ("step", "start_ns", "end_ns", "period_ns", "span_ns")}
            row |= {"bubble_ratio": bubble.ratio, "ideal_ratio": bubble.ideal_ratio}
            row |= {"bubble_share": bubble.share, "ideal_share": bubble.ideal_share}
            row |= {
                f"{name}_ns": None if parts is None else getattr(parts, name) for name in Waterfall.__struct_fields__
            }
            rows.append(row)
        return _nullable(rows, _STEP_COLUMNS)

    @CopiedTable
    def ranks(self) -> pd.DataFrame:
        """One row per step and rank: its window, which is compute + exposed communication + bubble to the nanosecond.

        ``step``, ``rank``, ``pp_rank``, ``stage``, ``window_ns``, ``compute_ns``, ``exposed_comm_ns``, ``bubble_ns``,
        ``not_compute_ns`` (bubble and exposed communication together), ``bubble_low_ns`` and ``bubble_high_ns`` (bounds where the
        other sides of messages have no trace), ``peak_memory_bytes``. Unknown is <NA>.
        """
        names = [name for name in _RANK_COLUMNS if name != "step"]
        rows = [
            {"step": step.step, **{name: getattr(rank, name) for name in names}}
            for step in self.report.steps
            for rank in step.ranks
        ]
        return _nullable(rows, _RANK_COLUMNS)

    @CopiedTable
    def stages(self) -> pd.DataFrame:
        """One row per stage and kind of op: how much an op computes, over all microbatches, steps and replicas.

        ``stage``, ``kind``, ``count``; ``mean_ns``, ``p10_ns``, ``median_ns``, ``p90_ns``, ``max_ns`` of the ops (percentiles);
        ``num_ranks``, ``slowest_rank`` (that with the largest median) and ``slowest_ns`` (that median).

            >>> import pptrace
            >>> stages = pptrace.load("sample_traces/uneven_p4").stages
            >>> stages.query("kind == 'F'").set_index("stage").median_ns.round(-6).div(1e6).to_dict()
            {0: 44.0, 1: 22.0, 2: 12.0, 3: 12.0}
        """
        from pptrace.analysis.op_costs import OpCost, op_costs

        rows = [structs.asdict(cost) for cost in op_costs(self.analysis.data)]
        types = {name: "object" if name == "kind" else "int64" for name in OpCost.__struct_fields__}
        return pd.DataFrame(rows, columns=list(types)).astype(types)

    @property
    def stage_work(self) -> pd.DataFrame:
        """One row per stage, kind of op and kind of work or part of the model: ``ns`` of all ``count`` ops.

        ``what`` is ``class`` (matmul, attention, …) or ``part`` (modules or ranges that the program named); of an op the rows of
        either sum to its compute. Empty where no trace tells what ops did.

            >>> import pptrace
            >>> work = pptrace.load("sample_traces/1f1b_p2").stage_work
            >>> work.query("what == 'class'").groupby(["stage", "kind"]).ns.sum().gt(0).all().item()
            True
        """
        stages = self.analysis.report.stages
        rows = [
            (ops.stage, ops.kind, ops.count, what, part.name, part.ns)
            for ops in (() if stages is None else stages.ops)
            for what, parts in (("class", ops.classes), ("part", ops.parts))
            for part in parts
        ]
        names = ("stage", "kind", "count", "what", "name", "ns")
        types = {name: "int64" if name in ("stage", "count", "ns") else "object" for name in names}
        return pd.DataFrame(rows, columns=list(names)).astype(types)

    @CopiedTable
    def expert_traffic(self) -> pd.DataFrame:
        """One row per rank and member of its group of expert parallelism, itself included: the rows that go from the tokens of
        ``source`` to experts of ``target`` in all forwards of the report.

        ``source``, ``target`` (global ranks), ``rows``, ``bytes`` (<NA> where unknown). No rows where neither splits of calls nor
        counts of routes tell: ``report.experts.reasons`` says why.

            >>> import pptrace
            >>> traffic = pptrace.load("sample_traces/experts_pp2_ep2").expert_traffic
            >>> traffic.query("source != target").groupby("target").rows.sum().to_dict()
            {0: 72, 1: 24, 2: 72, 3: 24}
        """
        return (self.analysis.expert_traffic or NO_PAIRS).table()

    def timeline(self, step: int | None = None) -> TimelinePicture:
        """Every op, wait and transfer in time, as a notebook shows it; it begins with a step, by default the typical one.

        Raises:
            UsageError: there is no such step, or nothing to draw.
        """
        from pptrace.report.html import timeline_page
        from pptrace.report.tiles.inline import inline_run

        chosen = self._step(step)
        timeline = inline_run(self.analysis, chosen.step)
        if timeline is None:
            raise UsageError("there is no op to draw; report.warnings says why")
        title = f"step {chosen.step}"
        return TimelinePicture(title, timeline_page(title, timeline))

    def figure(self, step: int | None = None, kind: FigureKind = "overview") -> go.Figure:
        """A plotly figure of a step, by default of the typical one (the median by span). Its times are ms.

        Args:
            step: the number of the step.
            kind: ``overview`` (each rank's compute, exposed communication and bubble) or ``waterfall`` (why the step took as long
                as it did).

        Raises:
            UsageError: there is no such step or kind.
        """
        from pptrace.report.summary_figures import STEP_FIGURES

        if kind not in list(STEP_FIGURES):  # a list: what is given may have no hash
            raise UsageError(f"figure kind {kind!r} is not known; expected one of {', '.join(STEP_FIGURES)}")
        return STEP_FIGURES[kind](self._step(step))

    def _step(self, step: int | None) -> StepReport:
        """The step of a number, by default the typical one.

        Raises:
            UsageError: there is none.
        """
        steps = self.report.steps
        chosen = self.report.typical_step if step is None else next((one for one in steps if one.step == step), None)
        if chosen is None:
            present = ", ".join(str(one.step) for one in steps)
            missing = "there is no step to draw" if step is None else f"step {step}: there is no such step"
            raise UsageError(f"{missing}; {f'the report has {present}' if present else 'report.warnings says why'}")
        return chosen

    @method_takes_options(Wishes)
    def whatif(self, wishes: Wishes) -> Predictions:
        """Predict the typical step with changes, from the measured costs of ops and messages: what ``pptrace whatif`` shows.

        All that is given is one scenario, for each schedule one; without any, all sensible changes are tried.

            >>> import pptrace
            >>> run = pptrace.load("sample_traces/1f1b_p2")
            >>> run.whatif("zb-h1").scenarios.loc[0, "num_microbatches"].item()
            4

        Raises:
            PptraceError: the run has no whole step, or a change does not fit it; the message is one line.
        """
        from pptrace.api.whatif import predict_changes

        return predict_changes(self.analysis, wishes)

    def _json_object(self, with_ops: bool) -> dict[str, Any]:
        from pptrace.report.to_json import report_in_parts

        return report_in_parts(self.report, with_ops)

    def _page(self) -> str:
        from pptrace.report.html import report_page

        return report_page(self.analysis)

    @overload
    def to_perfetto(self, path: None = None) -> str: ...
    @overload
    def to_perfetto(self, path: FilePath) -> None: ...
    def to_perfetto(self, path: FilePath | None = None) -> str | None:
        """A trace for ui.perfetto.dev as text, or written to a file.

        Raises:
            PptraceError: the file cannot be written.
        """
        from pptrace.report.perfetto import perfetto_object
        from pptrace.report.to_json import parts_of

        return text_or_file(parts_of(perfetto_object(self.analysis)), path)

    def to_csv(self, directory: FilePath) -> None:
        """Write ops.csv, comms.csv and, where there are memory events, memory.csv into a directory, which is made; of a run
        with experts expert_traffic.csv too, where it is known.

        Raises:
            PptraceError: the directory cannot be written.
        """
        from pptrace.report.to_files import write_csv

        self._write_tables(write_csv, directory)

    def to_parquet(self, directory: FilePath) -> None:
        """Write ops.parquet and, where they have rows, comms.parquet and memory.parquet into a directory, which is made: the
        columns of the CSV files, for DuckDB, polars and pandas; pptrace reads them again.

        Raises:
            PptraceError: the directory cannot be written.
        """
        from pptrace.report.to_files import write_parquet

        self._write_tables(write_parquet, directory)

    def _write_tables(self, write: Callable[[Analysis, Path], None], directory: FilePath) -> None:
        folder = as_path(directory)
        try:
            write(self.analysis, folder)
        except (FileExistsError, NotADirectoryError):
            raise PptraceError(
                f"{directory}: there is a file of that name; expected a directory, for one file per table; give another name"
            ) from None
        except (OSError, ValueError) as err:  # ValueError: a null character in its name
            raise PptraceError(f"{directory}: cannot be written ({reason(err)}); give another directory") from None

    def to_text(self, width: int = 140, *, everything: bool = False) -> str:
        """The report that ``pptrace analyze`` prints, in lines of at most ``width`` characters; with ``everything`` that of
        ``--all``: every step, rank and warning.
        """
        from io import StringIO

        from rich.console import Console

        from pptrace.model.report_table import Amount
        from pptrace.report.text import print_report

        require_whole("width", width, 1, 10_000)
        text = StringIO()
        console = Console(file=text, width=width, highlight=False, color_system=None)
        print_report(self.report, console, Amount.WHOLE if everything else Amount.BRIEF)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"

    def __repr__(self) -> str:
        from pptrace.api.summary import run_line

        return f"<pptrace.Run: {run_line(self.report)}>"

    def _repr_html_(self) -> str:
        from pptrace.api.summary import run_summary

        return run_summary(self.report)


def _table(table: pd.DataFrame, schema: Schema) -> pd.DataFrame:
    """A table of the analysis as users see it: texts in place of categories, rows counted from 0."""
    return without_categories(table.reset_index(drop=True)) if len(table) else empty_table(schema)


_STEP_COLUMNS: Schema = {
    **dict.fromkeys(("step", "start_ns", "end_ns", "period_ns", "span_ns"), "Int64"),
    **dict.fromkeys(("bubble_ratio", "ideal_ratio", "bubble_share", "ideal_share"), "Float64"),
    **{f"{name}_ns": "Int64" for name in Waterfall.__struct_fields__},
}
_RANK_TIMES = (
    "window_ns",
    "compute_ns",
    "exposed_comm_ns",
    "bubble_ns",
    "not_compute_ns",
    "bubble_low_ns",
    "bubble_high_ns",
)
_RANK_COLUMNS: Schema = {
    **dict.fromkeys(("step", "rank", "pp_rank", "stage", *_RANK_TIMES), "Int64"),
    **dict.fromkeys(("peak_memory_bytes", "start_memory_bytes", "peak_reserved_bytes", "peak_in_flight"), "Int64"),
    "peak_memory_kind": "string",
}


def _nullable(rows: Sequence[Mapping[str, Any]], columns: Schema) -> pd.DataFrame:
    """Rows with None for what is unknown, as columns of pandas' nullable types."""
    return pd.DataFrame({name: [row[name] for row in rows] for name in columns}, dtype="object").astype(dict(columns))
