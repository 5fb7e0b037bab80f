"""The run without its recording: what recording cost is judged from its steps, taken out, and the run analysed again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from msgspec import Struct
from msgspec.structs import replace

from pptrace.analysis.audit import audit_clock, audit_events, audit_report
from pptrace.analysis.recording import UnrecordedSteps, unrecorded_steps
from pptrace.analysis.report import KERNELS_MISSING, RecordingReport
from pptrace.ingest.inputs.resolve import ranks_of_run
from pptrace.intervals import Int64, lengths_within, union
from pptrace.model.damage import CLOCK_KINDS, Damage, RankDamage
from pptrace.model.tables import COMPUTE_KINDS
from pptrace.recognise.recording.graph import RankGraph
from pptrace.recognise.recording.rank import STEP_TIMES, RankRecording
from pptrace.recognise.recording.replay import Correction, Corrections, RunGraph, join_graphs
from pptrace.slices import rows_among, rows_where
from pptrace.workflow.analyse import Analysis

_MOST_LOST = 0.25
"""Part of the steps in which kernels may be missing: the others tell what a step takes."""
_LEAST_CHANGE = 0.02
"""A step that is shorter by less without its recording is shown as it was recorded."""
_SCALES = (0.1, 0.25, 0.5, 0.75, 1.0, 1.35, 1.8, 2.5, 4.0)
"""Costs of recording that are tried, over the one that the trace alone shows."""
_DEVIATION_OF_SCALE = 0.35
"""Standard deviation of the logarithm of the true one."""
_LEAST_DEVIATION = 0.01
"""Least error of a measured step."""
_DOUBT, _DOUBT_OF_TRACE = 0.02, 0.05
"""Error of the replay (90 %): with a cost that fits measured steps, and with one that the trace alone shows."""


_MOST_APART = 1.1
"""Largest ratio of steps by their marks and by their ops: marks that hold more have the start of a recorder in them, and a host
that runs ahead ends them early.
"""
_MARKS_APART = (
    "marks of steps are not as long as the steps by their ops: they hold the start of a recorder, or the host runs ahead; record "
    "more steps"
)
_NO_COST = (
    "the traces do not tell what recording an event costs: fewer than 200 operators inside operators, times in whole "
    "microseconds, or no host events"
)


def undo_recording(
    analysis: Analysis, recordings: Mapping[int, RankRecording], why_recorded: str = ""
) -> tuple[RecordingReport, Corrections | None]:
    """Find what recording did to a run that was analysed as it was recorded, as which it stays if ``why_recorded`` says why.

    Returns:
        The block of the report, and what corrects the traces; None where figures stay as recorded.
    """
    block, corrections = _undone(analysis, recordings, why_recorded)
    settings = {rank: recording.settings for rank, recording in recordings.items()}
    damage = {rank: recording.damage for rank, recording in recordings.items() if len(recording.damage)}
    for rank, work in analysis.data.work.items():
        known = damage.get(rank, RankDamage())
        if work.missing_device_events and not known.has(Damage.NO_DEVICE_EVENTS, *CLOCK_KINDS):
            damage[rank] = RankDamage.joined((known, RankDamage.counted(Damage.NO_DEVICE_EVENTS, 1)))
    clock = analysis.data.clock
    for rank, ends in clock.early_ends.items():
        damage[rank] = RankDamage.joined((damage.get(rank, RankDamage()), RankDamage.of(Damage.EARLY_ENDS, ends)))
    audit = (
        *audit_events(damage, analysis.data.ops, clock),
        *audit_clock(clock),
        *audit_report(analysis.report, settings, block.slowdown, block.slowed_after, analysis.lacking),
    )
    return replace(block, audit=audit), corrections


def _undone(
    analysis: Analysis, recordings: Mapping[int, RankRecording], why_recorded: str
) -> tuple[RecordingReport, Corrections | None]:
    settings = next((rank.settings for rank in recordings.values() if rank.settings), {})
    measured = measured_steps(analysis, settings)
    block = RecordingReport(
        unrecorded_step_ns=measured.typical_ns, slowed_after=measured.slowed_after, settings=dict(settings)
    )
    steps = _steps_of_ranks(analysis)
    lost = frozenset[int]().union(*analysis.data.lost_steps.values())
    recorded = _typical(steps, lost)
    typical = analysis.report.typical_step
    length = None if typical is None else typical.length_ns
    every = frozenset[int]().union(*(of_rank.steps.tolist() for of_rank in steps.values()))
    is_missing = any(work.missing_device_events for work in analysis.data.work.values())
    if every and (is_missing or len(every & lost) > _MOST_LOST * len(every)):
        block = block if length is None else _slowed(block, measured, length)
        return replace(block, reason=KERNELS_MISSING), None
    if recorded is None:
        return replace(block, reason="no step begins and ends in the traces"), None
    known = {rank: recording for rank, recording in recordings.items() if recording.cost.is_known and rank in steps}
    prediction = _Prediction.of(analysis, known, steps, lost) if known and not why_recorded else None
    recorded = recorded if prediction is None else prediction.recorded_step
    if length is not None and not length <= _MOST_APART * recorded <= _MOST_APART**2 * length:
        return replace(block, reason=_MARKS_APART), None
    measured = measured.like(recorded)
    block = _slowed(block, measured, recorded)
    if prediction is None:
        return replace(block, reason=why_recorded or _NO_COST), None
    return prediction.undone(block, measured)


def _slowed(block: RecordingReport, measured: UnrecordedSteps, recorded: int) -> RecordingReport:
    """The block with the recorded step and by how much it is longer than the unrecorded ones, ns."""
    slowdown = recorded / measured.typical_ns if measured.typical_ns else None
    return replace(block, unrecorded_step_ns=measured.typical_ns, recorded_step_ns=recorded, slowdown=slowdown)


def measured_steps(analysis: Analysis, settings: Mapping[str, Any]) -> UnrecordedSteps:
    """The steps of a run that were timed without being recorded, as ranks wrote into run.json at their end, else into traces."""
    of_run, of_traces = (
        [facts[STEP_TIMES] for facts in of_ranks if isinstance(facts.get(STEP_TIMES), Mapping)]
        for of_ranks in (ranks_of_run(analysis.run), analysis.facts.values())
    )
    return unrecorded_steps(of_run or of_traces, is_detached=settings.get("cupti_teardown") is True)


class _RankSteps(Struct, frozen=True, eq=False):
    """Begins of the steps of a rank, in order of their numbers, and when the last one's range ends, ns on the common clock.

    ``usual`` is the index of the step that begins as long after its range (``marked_ns``) as is usual. Not ``is_marked``: there
    are no ranges, and the last step ends with its last op. ``on_device``: they are times of its work, such as replays of a graph.
    """

    steps: Int64
    begin_ns: Int64
    usual: int
    marked_ns: int
    end_ns: int
    is_marked: bool
    on_device: bool = False

    @property
    def over_ns(self) -> int:
        """Begin of the step that would follow: as long after the last one's end as steps begin after their ranges do."""
        return self.end_ns + max(int(self.begin_ns[self.usual]) - self.marked_ns, 0)


def _steps_of_ranks(analysis: Analysis) -> dict[int, _RankSteps]:
    """The steps of each rank, as the periods of the report are: from their first op, or without a pipeline their mark, to the end
    of the last range in them. Ops that a device ran are no moments of its host: there the marks are what there is.
    """
    ops = analysis.data.ops
    is_compute, marks = rows_among(ops["kind"], COMPUTE_KINDS), rows_among(ops["kind"], ("STEP",))
    by_ops = is_compute.any() and not (marks.any() and rows_among(ops["clock"], ("device",)).any())
    begins = rows_where(ops, is_compute if by_ops else marks).groupby(["rank", "step"])["start_ns"].min()
    ranges = rows_where(ops, marks if marks.any() else is_compute).groupby(["rank", "step"])
    found = {"begin": begins, "marked": ranges["start_ns"].min(), "end": ranges["end_ns"].max()}
    bounds = pd.DataFrame(found).dropna().astype("int64").reset_index()
    of_device = set() if by_ops else set(ops["rank"][marks & rows_among(ops["clock"], ("device",))])
    steps = {}
    for rank, of_rank in bounds.groupby("rank"):
        begin, marked = of_rank["begin"].to_numpy(), of_rank["marked"].to_numpy()
        first = min(1, len(begin) - 1)  # a recorder may have started in the first one
        leads = np.argsort((begin - marked)[first:], kind="stable")
        usual = first + int(leads[(len(leads) - 1) // 2])
        end, is_marked = int(of_rank["end"].iloc[-1]), bool(marks.any())
        at, number = int(marked[usual]), of_rank["step"].to_numpy()
        steps[int(str(rank))] = _RankSteps(number, begin, usual, at, end, is_marked, on_device=rank in of_device)
    return steps


def _typical(steps: Mapping[int, _RankSteps], lost: frozenset[int] = frozenset()) -> int | None:
    """The median time from the start of a step to that of the next one, of an even number the lower one, as the periods of a
    report are: a step begins where it first does, and the last one ends where the rank ends it that began it. ``lost`` are the
    steps that do not count, as kernels are missing in them.
    """
    first: dict[int, tuple[int, int]] = {}
    for of_rank in steps.values():
        for step, begin in zip(of_rank.steps.tolist(), of_rank.begin_ns.tolist(), strict=True):
            first[step] = min((begin, of_rank.over_ns), first.get(step, (begin, of_rank.over_ns)))
    if not first:
        return None
    follows = any(step + 1 in first for step in first)
    if not follows or all(of_rank.is_marked for of_rank in steps.values()):
        first[max(first) + 1] = first[max(first)][1], 0
    lengths = sorted(
        first[step + 1][0] - begin for step, (begin, _) in first.items() if step + 1 in first and step not in lost
    )
    return lengths[(len(lengths) - 1) // 2] if lengths else None


class _Prediction(Struct, frozen=True):
    """The joined graph of a run with the nodes at which the steps of each rank begin, and the last one ends.

    ``lost`` are the steps in which kernels are missing.
    """

    graph: RunGraph
    recordings: Mapping[int, RankRecording]
    bounds: Mapping[int, _StepNodes]
    lost: frozenset[int]
    analysis: Analysis

    @classmethod
    def of(
        cls,
        analysis: Analysis,
        recordings: Mapping[int, RankRecording],
        steps: Mapping[int, _RankSteps],
        lost: frozenset[int],
    ) -> _Prediction:
        clock, comms = analysis.data.clock, analysis.data.comms
        related = comms["rank"].isin([rank for rank in recordings if rank not in clock.unrelated])
        graphs = {rank: recording.graph for rank, recording in recordings.items()}
        costs = {rank: recording.cost.value_ns for rank, recording in recordings.items()}
        graph = join_graphs(graphs, costs, rows_where(comms, related.to_numpy()), clock)
        bounds = {rank: _StepNodes.of(graph, graphs[rank], graph.position[rank], steps[rank]) for rank in recordings}
        return cls(graph, recordings, bounds, lost, analysis)

    @property
    def recorded_step(self) -> int:
        """The typical step as it was recorded, to the end of the device's work, ns."""
        return self._step(self.graph.time_ns)

    def undone(self, block: RecordingReport, measured: UnrecordedSteps) -> tuple[RecordingReport, Corrections | None]:
        """The block with the prediction, and the corrections where the step is another than the recorded one."""
        recorded, unrecorded = self.recorded_step, measured.typical_ns
        scale = 1.0 if unrecorded is None else self._scale_for(measured, unrecorded)
        comes = self.graph.replay(scale)
        predicted = self._step(comes)
        low, high = self._interval(predicted, measured)
        cost = float(np.mean([recording.cost.value_ns for recording in self.recordings.values()])) * scale
        block = replace(
            block,
            recorded_step_ns=recorded,
            predicted_step_ns=predicted,
            low_ns=low,
            high_ns=high,
            error=None if unrecorded is None else predicted / unrecorded - 1,
            slowdown=recorded / (unrecorded or predicted),
            cost_per_event_ns=cost,
            cost_source="trace" if unrecorded is None else "measured",
            events_per_step=self._events_per_step(),
            device_idle_share=self._idle_share(comes),
        )
        if recorded - predicted <= max(high - predicted, round(_LEAST_CHANGE * recorded)):
            return block, None
        return replace(block, figures="unrecorded"), self._corrections(comes, scale)

    def _scale_for(self, measured: UnrecordedSteps, unrecorded: int) -> float:
        """The most likely scale of the cost: step as measured, cost as the trace shows it, each as far as it is certain."""
        steps = [self._step(self.graph.replay(scale)) for scale in _SCALES]
        scales = np.geomspace(_SCALES[0], _SCALES[-1], 1_000)
        off = np.interp(np.log(scales), np.log(_SCALES), steps) / unrecorded - 1
        deviation = max(measured.doubt_ns / unrecorded, _LEAST_DEVIATION)
        return float(scales[np.argmin((off / deviation) ** 2 + (np.log(scales) / _DEVIATION_OF_SCALE) ** 2)])

    def _interval(self, predicted: int, measured: UnrecordedSteps) -> tuple[int, int]:
        """The 90 % interval of the predicted step: from the steps that were measured, else from the cost that the trace shows.

        Measured ones may differ by more than events cost at most: then other things made them differ than recording.
        """
        doubt = round((_DOUBT_OF_TRACE if measured.typical_ns is None else _DOUBT) * predicted)
        if measured.typical_ns is not None:
            apart = max(abs(predicted - measured.typical_ns), measured.doubt_ns)
            off = min(apart, max(predicted - self._step(self.graph.replay(_SCALES[-1])), 0)) + doubt
            return predicted - off, predicted + off
        costs = [rank.cost for rank in self.recordings.values()]
        most, least = (
            float(np.mean([getattr(cost, name) / cost.value_ns for cost in costs])) for name in ("high_ns", "low_ns")
        )
        return self._step(self.graph.replay(most)) - doubt, self._step(self.graph.replay(least)) + doubt

    def _step(self, comes: Int64) -> int:
        """The typical step where the nodes come at these times, ns."""
        typical = _typical({rank: bounds.steps_at(comes) for rank, bounds in self.bounds.items()}, self.lost)
        assert typical is not None
        return typical

    def _events_per_step(self) -> int:
        """Recorded host events of a rank in a step, mean over ranks and steps."""
        counts = []
        for rank, bounds in self.bounds.items():
            host = self.recordings[rank].graph.host
            times = self.graph.time_ns[self.graph.position[rank][: len(host)]]
            begin, end = self.graph.time_ns[bounds.host[[0, -1]]]
            counts.append(int(host["events"][(times > begin) & (times <= end)].sum()) / len(bounds.steps))
        return round(float(np.mean(counts)))

    def _idle_share(self, comes: Int64) -> float | None:
        """The part of a step in which a device does nothing: median of steps, mean over ranks with a device; None without."""
        shares = []
        for rank, bounds in self.bounds.items():
            _, start, end = self.recordings[rank].graph.split(comes[self.graph.position[rank]])
            if len(start):
                times = np.maximum.accumulate(bounds.times_at(comes))
                busy = lengths_within(union(start, end), times[:-1], times[1:])
                shares.append(float(np.median(1 - busy / np.maximum(np.diff(times), 1))))
        return float(np.mean(shares)) if shares else None

    def _corrections(self, comes: Int64, scale: float) -> Corrections:
        clock = self.analysis.data.clock
        return Corrections(
            {
                (recording.file, recording.file_rank): Correction.of(
                    recording.graph,
                    clock.times_on_rank_clock(rank, comes[self.graph.position[rank]]),
                    recording.cost.value_ns * scale,
                )
                for rank, recording in self.recordings.items()
            }
        )


class _StepNodes(Struct, frozen=True, eq=False):
    """Nodes at which the steps of a rank begin, and the last one ends: those of the host, or of the device where steps are of its
    work, and the ends of the work that the device had to do until then (−1 for none). A step begins when both have come, as an
    event of CUDA would show. ``marked`` is the node at which the range of the ``usual`` step begins.
    """

    steps: Int64
    host: Int64
    device: Int64
    usual: int
    marked: int
    is_marked: bool

    @classmethod
    def of(cls, graph: RunGraph, of_rank: RankGraph, position: Int64, steps: _RankSteps) -> _StepNodes:
        host, starts, ends = of_rank.split(position)
        if steps.on_device and len(of_rank.start_ns):
            # They begin where work of the device does, and the last one ends where work does.
            starts, ends = (part[np.argsort(graph.time_ns[part], kind="stable")] for part in (starts, ends))
            begin = np.minimum(np.searchsorted(graph.time_ns[starts], steps.begin_ns), len(starts) - 1)
            over = max(int(np.searchsorted(graph.time_ns[ends], steps.end_ns, side="right")) - 1, 0)
            bounds = np.append(starts[begin], ends[over])
            none = np.full(len(bounds), -1)
            return cls(steps.steps, bounds, none, steps.usual, int(bounds[steps.usual]), steps.is_marked)
        times = np.append(steps.begin_ns, steps.end_ns)
        host = host[np.argsort(graph.time_ns[host], kind="stable")]
        at = np.searchsorted(graph.time_ns[host], np.append(times, steps.marked_ns), side="right") - 1
        *nodes, marked = host[np.maximum(at, 0)]
        last_work = _last_work(graph, of_rank, position, ends, times)
        return cls(steps.steps, np.array(nodes), last_work, steps.usual, int(marked), steps.is_marked)

    def times_at(self, comes: Int64) -> Int64:
        """The times of all bounds where the nodes come at these."""
        return np.maximum(comes[self.host], np.where(self.device >= 0, comes[self.device], np.iinfo(np.int64).min))

    def steps_at(self, comes: Int64) -> _RankSteps:
        times = self.times_at(comes)
        marked = min(int(comes[self.marked]), int(times[self.usual]))
        return _RankSteps(self.steps, times[:-1], self.usual, marked, int(times[-1]), self.is_marked)


def _last_work(graph: RunGraph, of_rank: RankGraph, position: Int64, ends: Int64, times: Int64) -> Int64:
    """The end, among ``ends``, of what ended last of the work launched before each time; −1 where nothing was."""
    launch, work = of_rank.launches
    if not len(work):
        return np.full(len(times), -1)
    launched, end = graph.time_ns[position[launch]], ends[work]
    order = np.argsort(launched, kind="stable")
    launched, end = launched[order], end[order]
    done = graph.time_ns[end]
    latest = np.maximum.accumulate(np.where(done == np.maximum.accumulate(done), np.arange(len(done)), 0))
    at = np.searchsorted(launched, times) - 1
    return np.where(at >= 0, end[latest[np.maximum(at, 0)]], -1)
