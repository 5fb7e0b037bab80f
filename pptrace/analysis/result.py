"""The report as types; each field is the JSON field of the same name, and None is its ``null``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import groupby
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from pptrace.analysis.whole_run import INTERACTION, OUTSIDE, Blame, Bubble, Cause, CriticalPath, OutsidePart
from pptrace.model.device import DeviceBreakdown, HostIdle, SyncSummary


class InputInfo(Struct, frozen=True):
    """A file that was read."""

    path: str  #: file as it was given or found
    #: ``kineto``, ``nsys-sqlite``, ``chrome``, ``oplog``, ``otlp``, ``ascend``, ``rocpd``, ``xplane``, ``nccl-inspector`` or
    #: ``run``
    format: str
    rank: int | None  #: global rank; null where neither the trace nor run.json has it
    num_events: int  #: events, or rows of a table, that were read
    producer: str  #: writer of the file, with its version where it says one; empty where it does not say
    warnings: tuple[str, ...]  #: losses and oddities of this file; empty where there are none


class ScheduleCandidate(Struct, frozen=True):
    """A schedule that fits what the ranks with a trace show."""

    name: str  #: name of the catalogue
    pp: int  #: ranks of its pipeline
    num_microbatches: int  #: microbatches in a step
    num_stages: int  #: stages of all ranks
    num_chunks: int  #: stages of each rank
    #: pipeline rank, in this schedule, of each global rank with a trace, by the global rank as text
    pp_ranks: Mapping[str, int]


class ScheduleSummary(Struct, frozen=True):
    """The plan that a run followed."""

    name: str  #: name of the catalogue, ``custom`` for a plan that is none of them, ``unknown`` for no plan
    #: microbatches in most steps, if all ``candidates`` have as many; null where they differ, or there is no plan
    num_microbatches: int | None
    num_stages: int | None  #: stages of all ranks, likewise; null as ``num_microbatches``
    num_chunks: int | None  #: stages of each rank, likewise; null as ``num_microbatches``
    #: ``metadata`` (the run's own facts), ``recognised`` (from the order of the ops), ``option`` (``--schedule``) or ``none``
    source: str
    mismatches: tuple[str, ...]  #: differences between the run and the plan, in words; empty where there are none
    #: every schedule that may have run, where ranks without a trace leave that open; empty where all ranks have a trace, or one
    #: plan is certain
    candidates: tuple[ScheduleCandidate, ...] = ()
    #: names of the schedules that most steps run one after another, where steps run several, as with gradients accumulated over
    #: calls of a schedule: ``name`` is ``custom`` then; empty where each step runs one
    runs: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The name, or those of the runs with how often they follow each other: ``1f1b, 2 times a step``."""
        names = [(name, len(list(times))) for name, times in groupby(self.runs)]
        if not names:
            return self.name
        if len(names) == 1 and len(self.runs) > 1:
            return f"{names[0][0]}, {names[0][1]} times a step"
        return ", then ".join(name if times == 1 else f"{name} {times} times" for name, times in names)


class ClockSummary(Struct, frozen=True):
    """Relation of the ranks' clocks."""

    #: ``single-rank``, ``same-host``, ``one-file``, ``same-session``, ``message-bounds``, ``op-order`` or ``none``
    method: str
    #: time that was added to those of each rank, by global rank as text: 0 where nothing contradicts the recorded clock, else as
    #: far as messages demand; of clocks that drift, at the middle of the recording
    offsets_ns: Mapping[str, int]
    #: most that an offset may be off within the bounds of messages: by so much times of a rank and the first one may be off
    #: against each other; null where nothing bounds it
    uncertainty_ns: int | None


class PhaseSummary(Struct, frozen=True):
    """A phase of a rank in a step: ``warmup``, ``steady`` or ``cooldown``. The three cover the window without overlap: it is
    cut at the start of the first steady op and at the end of the last one.
    """

    start_ns: int  #: start of the phase
    end_ns: int  #: end of the phase
    num_forward: int  #: forwards in it; an overlapped pair counts as one
    num_backward: int  #: backwards in it: B or I, and overlapped pairs
    bubble_ns: int | None  #: bubble of the rank in it; null as the rank's ``bubble_ns``


class CommSummary(Struct, frozen=True):
    """All communication of one kind on one axis by one rank in one step. Bandwidths are in GB/s (10⁹ bytes)."""

    #: ``pp``, ``tp``, ``cp``, ``dp``, ``ep``, several joined by ``-`` (``dp-cp``), ``embd``, ``mirror``, ``world`` or ``unknown``
    axis: str
    #: ``send``, ``recv``, ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast``, …
    kind: str
    count: int  #: calls; 0 where communication was predicted and none was seen
    #: sizes of all calls: of a collective the larger of input and output, of an all-to-all what is handed in; null where a call
    #: does not tell its size
    bytes: int | None
    #: sum over the calls from this side ready to this side done: wait and transfer; null where the device that communicated was
    #: not recorded
    total_ns: int | None
    #: time in which this side was ready and another was not; counted as bubble; null where another side has no trace or is not
    #: known, where clocks do not compare, and as ``total_ns``
    wait_ns: int | None
    hidden_ns: int | None  #: transfer overlapped with compute; null as ``wait_ns``, and where compute is not known
    exposed_ns: int | None  #: transfer that no compute overlapped; null as ``hidden_ns``
    overlap_ratio: float | None  #: hidden / (hidden + exposed); null as ``hidden_ns``, and where there was no transfer
    algbw_gbps: float | None  #: bytes / transfer time; null as ``wait_ns``, without transfer, and where ``bytes`` is
    #: the same times nccl-tests' factor: all-reduce 2(n−1)/n, all-gather, reduce-scatter and all-to-all (n−1)/n, others 1; null
    #: as ``algbw_gbps``, in a group of one, and where an all-to-all has uneven parts, for which there is no such factor
    busbw_gbps: float | None
    #: bytes that the run's sizes and options come to by the papers' formulas (:mod:`pptrace.model.predicted`); null where the
    #: trace has none
    predicted_bytes: int | None = None
    #: part of ``exposed_ns`` behind the rank's last op, while its pipeline goes on: it costs the step nothing; 0 of ``pp``; null
    #: as ``hidden_ns``, and without a pipeline
    free_ns: int | None = None


class OpPart(Struct, frozen=True):
    """One half of an overlapped pair."""

    kind: str  #: ``F`` or ``B``
    stage: int | None  #: virtual stage; null where it is not known
    chunk: int | None  #: number among the rank's stages; null where it is not known
    microbatch: int | None  #: number within the step; null where it is not known


class OpSummary(Struct, frozen=True):
    """An op; of an overlapped pair ``stage``, ``chunk`` and ``microbatch`` are its forward's."""

    kind: str  #: ``F``, ``B`` (full backward), ``I`` (input gradient), ``W`` (weight gradient) or ``OVERLAP_F_B``
    stage: int | None  #: virtual stage; null where it is not known
    chunk: int | None  #: number among the rank's stages; null where it is not known
    microbatch: int | None  #: number within the step; null where it is not known
    phase: str | None  #: ``warmup``, ``steady`` or ``cooldown``; null where it is not known
    start_ns: int  #: start on the common clock
    end_ns: int  #: end on the common clock
    parts: tuple[OpPart, ...] = ()  #: forward and backward of an ``OVERLAP_F_B``; left out of other kinds


class RankIdeal(Struct, frozen=True):
    """The bubble of one pipeline rank of the plan with F = I = W and free messages."""

    ratio: float  #: bubble / compute, within the pipeline's window
    share: float  #: bubble / window, within the pipeline's window
    #: bubble / compute within the rank's own window, from its first op to its last: what a trace of one rank alone can be
    #: compared with
    own_ratio: float
    own_share: float  #: bubble / window within the rank's own window
    warmup_ratio: float  #: length of the warmup / compute
    steady_ratio: float  #: length of the steady phase / compute
    cooldown_ratio: float  #: length of the cooldown / compute


class RankStep(Struct, frozen=True):
    """One rank in a step: ``window_ns`` = ``compute_ns`` + ``exposed_comm_ns`` + ``bubble_ns``, to the nanosecond, wherever
    none of them is null.
    """

    rank: int  #: global rank
    #: lowest virtual stage that the rank ran in this step; null where stages are not known, and without a pipeline
    stage: int | None
    window_ns: int  #: the pipeline's window; where ranks do not compare, or without a pipeline, the rank's own
    #: union of compute kernels in the window; without device events, of F/B/I/W ops minus communication nested in them; null
    #: where the run computes on a device that was not recorded, or of which kernels are missing there; in steps of which the
    #: rank's trace lacks ops of the plan that other ranks have, whose time would count as bubble; without a pipeline where
    #: neither operators nor kernels were recorded
    compute_ns: int | None
    #: transfers that no compute overlapped, while the rank posted them or waited for them; null where the other side of
    #: communication has no trace, so that waiting cannot be distinguished from transfer; where clocks do not compare; as
    #: ``compute_ns``
    exposed_comm_ns: int | None
    #: rest of the window: waiting, and all that is neither compute nor exposed transfer; null as ``exposed_comm_ns``
    bubble_ns: int | None
    #: warmup, steady and cooldown; empty, in the JSON null, without a pipeline, or where the schedules that fit disagree about
    #: the phases
    phases: Mapping[str, PhaseSummary]
    comms: tuple[CommSummary, ...]  #: communication by axis and kind; empty where there is none
    #: time of the step's other ranges by kind: ``STEP``, ``OPTIMIZER``, ``GRAD_SYNC``, ``DATA``, ``EVAL``, ``GC`` (garbage
    #: collections of generation 1 and up), …; empty without such ranges
    spans: Mapping[str, int]
    device: DeviceBreakdown  #: device time in the window
    #: most memory during the rank's step range (without one, the window), of the kind ``peak_memory_kind``; null where nothing
    #: measured it: no ``pptrace run``, and no memory events in the range
    peak_memory_bytes: int | None
    ops: Sequence[OpSummary]  #: every op; left out without ``--ops``, and empty without a pipeline
    pp_rank: int | None = None  #: rank in the pipeline; null where it is unknown, and without a pipeline
    #: window without compute: bubble and exposed communication together, known even where neither is; null where ``compute_ns``
    #: is, and without a pipeline
    not_compute_ns: int | None = None
    #: least that the bubble can be; ``bubble_ns`` where that is known; null as ``not_compute_ns``
    bubble_low_ns: int | None = None
    bubble_high_ns: int | None = None  #: most that the bubble can be; likewise; null as ``not_compute_ns``
    #: this rank's ideal bubble; null without a plan or ``pp_rank``, or where the step has other ops than the plan
    ideal: RankIdeal | None = None
    #: reasons why the device was idle in the window; null without device events, or where launches that it needs were not
    #: recorded
    host: HostIdle | None = None
    #: calls that waited for the device and returned in the window, by call and operator, at most ten; null without device events
    #: or recorded calls; empty where none did
    synchronisations: tuple[SyncSummary, ...] | None = None
    #: kind of bytes that the peak counts (:class:`pptrace.model.step_memory.MemoryKind`), such as ``device_allocated``; null as
    #: ``peak_memory_bytes``
    peak_memory_kind: str | None = None
    #: the same memory at the start of the step; null as ``peak_memory_bytes``, and where no event comes before the step
    start_memory_bytes: int | None = None
    #: most that the device's allocator had got from the driver in the step; null on hosts, and where it was not recorded
    peak_reserved_bytes: int | None = None
    #: most microbatches of one chunk whose activations the rank held at once: from a forward to its B, or to its W where the
    #: backward is split; null where a step has a forward without its backward (evaluation) or the other way around, and without a
    #: pipeline
    peak_in_flight: int | None = None
    #: part of the bubble in which a host without a device ran no operator on any thread, but for those of ``idle_spans``, and
    #: neither posted nor waited for communication: Python, input, sleeps; the rest is waiting for other ranks. With a device it
    #: is the part of ``launch_starved_ns`` in which its host ran no operator and made no call of the runtime for a millisecond or
    #: more, or was in one of ``idle_spans``; null with a pipeline, without operators, and with a device where ``host`` is
    between_operators_ns: int | None = None
    #: time in which all other members of a collective had come and asked for its result, and this rank alone was missing (more
    #: than twice the clocks' uncertainty each time): what the others get back if it comes when the next one does; null with a
    #: pipeline, without matched collectives in the step, and where ranks do not compare
    late_ns: int | None = None
    #: part of ``late_ns`` in which another collective of the rank was being transferred: exposed communication of the others,
    #: which the finding on communication leaves out; null as ``late_ns``
    late_in_transfer_ns: int | None = None
    #: part of the bubble in which the rank had nothing to do while a range of its host says why, by the kind of the range
    #: (``DATA``, ``CHECKPOINT``, ``LOGGING``, ``GC``): with a device a part of ``launch_starved_ns``, without one of
    #: ``between_operators_ns``; null with a device where ``host`` is, without one in a pipeline or without operators; empty
    #: without such ranges
    idle_spans: Mapping[str, int] | None = None
    #: part of ``between_operators_ns`` in pauses of a millisecond or more that no ``idle_spans`` has, by the innermost range
    #: around them, ``backward`` between two nodes of autograd; empty with a pipeline, and without such pauses
    paused_in: Mapping[str, int] = field(default_factory=dict)


_CAUSES = ("structural", "imbalance", "straggler", "jitter", "communication", "host")
_LAST = (INTERACTION, "unexplained")
_RARE = ("straggler", "host", INTERACTION)
"""Causes that are left out where a step has none of them."""


class StepReport(Struct, frozen=True, kw_only=True):
    """A training step."""

    step: int  #: number of the training step
    start_ns: int  #: earliest start over all pipelines (without a pipeline, of the ranks' step ranges)
    end_ns: int  #: latest end over the same
    #: time from the step's start to the start of the next one, which is what counts for throughput; null where no next step and
    #: no mark of the step's end was recorded
    period_ns: int | None = None
    #: length of the pipeline's window; of several pipelines, the longest; without a pipeline, the longest of the ranks' windows;
    #: null where nothing relates the clocks of a pipeline's ranks, or only by more than half a step, or a device's work was not
    #: recorded
    span_ns: int | None
    bubble: Bubble  #: bubble and waterfall of the step
    ranks: tuple[RankStep, ...]  #: one entry per rank, in order of ranks
    critical_path: CriticalPath | None = None  #: chain that ends with the last op; null as ``ideal_ns``
    #: bubble by what caused it; null where the step's bubble is, or the step lacks ops of the plan
    blame: Blame | None = None
    #: usual compute of the step, spread evenly over the ranks; null as the bubble's ``waterfall_ns``
    ideal_ns: int | None = None
    #: parts by which the span is longer; they sum to ``span_ns`` − ``ideal_ns`` exactly, the largest first; null as ``ideal_ns``
    causes: tuple[Cause, ...] | None = None
    #: parts of the period outside the pipeline; they sum to ``period_ns`` − ``span_ns`` exactly; null where either is, and
    #: without a pipeline
    outside: tuple[OutsidePart, ...] | None = None

    @property
    def length_ns(self) -> int | None:
        """The step as it counts for throughput: its period where that is known, else its span."""
        return self.span_ns if self.period_ns is None else self.period_ns

    @property
    def parts(self) -> dict[str, int] | None:
        """Parts of the step, ns: those of the span, and what is outside the pipeline, by name; they sum to ``length_ns``. None
        where they are not known.
        """
        parts = self.span_parts
        return None if parts is None else parts | self._parts_outside()

    @property
    def parts_by_cause(self) -> dict[str, int]:
        """The same without reasons: each in the part of its cause; {} where they are not known."""
        sums: dict[str, int] = {} if self.causes is None else {"compute": self.ideal_ns or 0}
        for cause in self.causes or ():
            sums[cause.cause] = sums.get(cause.cause, 0) + cause.ns
        return sums and sums | self._parts_outside()

    def _parts_outside(self) -> dict[str, int]:
        sums: dict[str, int] = {}
        if self.period_ns is not None:
            for part in self.outside or ():
                name = f"{OUTSIDE}{part.part}"
                sums[name] = sums.get(name, 0) + part.ns
        return sums

    @property
    def span_parts(self) -> dict[str, int] | None:
        """Parts of the span, ns: the compute spread evenly, and each cause at all its places, what has a reason apart by its
        name; None where they are not known.
        """
        if self.causes is None or self.ideal_ns is None or self.span_ns is None:
            return None
        sums: dict[str, int] = {}
        for cause in self.causes:
            sums[cause.name] = sums.get(cause.name, 0) + cause.ns
        reasons = (name for name in sums if name not in _CAUSES and name not in _LAST)
        named = (name for name in (*_CAUSES, *reasons, *_LAST) if name in sums or name not in _RARE)
        return {"compute": self.ideal_ns} | {name: sums.get(name, 0) for name in named}

    @property
    def has_devices(self) -> bool:
        """Return whether a device was recorded; else ``host`` among the causes is time between ops."""
        return any(rank.host is not None or rank.device.busy_ns is not None for rank in self.ranks)

    @property
    def has_pipeline(self) -> bool:
        """Return whether these are ops of a pipeline; else each rank's window is its own STEP range."""
        return any(rank.ops or rank.phases for rank in self.ranks)

    @property
    def num_forwards(self) -> int:
        """Forwards of all ranks: of one model, how much work the step is."""
        return sum(phase.num_forward for rank in self.ranks for phase in rank.phases.values())

    @property
    def is_evaluation(self) -> bool:
        """Return whether it has forwards and no backward: it trains nothing."""
        phases = [phase for rank in self.ranks for phase in rank.phases.values()]
        has_forwards = any(phase.num_forward for phase in phases)
        return has_forwards and all(rank.phases for rank in self.ranks) and not any(p.num_backward for p in phases)


def typical_of(steps: Sequence[StepReport]) -> StepReport | None:
    """The median by length of some steps, chosen as :attr:`pptrace.analysis.report.Report.typical_step` is; None of no steps."""
    training = [step for step in steps if not step.is_evaluation] or list(steps)
    known = [step for step in training if step.bubble.ratio is not None] or training
    with_spans = [step for step in known if step.span_ns is not None]
    known = [step for step in known if step.period_ns is not None] or with_spans or known
    return sorted(known, key=lambda step: step.length_ns or 0)[(len(known) - 1) // 2] if known else None


def alike_steps(steps: Sequence[StepReport]) -> list[StepReport]:
    """The steps whose span is known, so that their lengths compare: without periods where one of them is not known."""
    known = [step for step in steps if step.span_ns is not None]
    if all(step.period_ns is not None for step in known):
        return known
    return [replace(step, period_ns=None, outside=None) for step in known]


class CommTotal(Struct, frozen=True):
    """All communication of one kind on one axis by one rank in its whole trace, pipeline or not. Bandwidths are in GB/s."""

    axis: str  #: axis, as in a step's ``comms``
    kind: str  #: kind, as in a step's ``comms``
    group_size: int | None  #: ranks of the group; null where it is not known, or groups of several sizes were used
    #: calls, without kernels of those made before the recording began, of which nothing tells group or size
    count: int
    bytes: int | None  #: sizes of all calls; null where a call does not tell its size
    total_ns: int  #: sum of the calls or kernels, waiting for others included
    busy_ns: int | None  #: union of them; null where the times at which they ran are unknown
    #: part of the union that compute overlapped; null for calls on the host, and where ``busy_ns`` is
    overlap_ratio: float | None
    #: ``bytes`` / ``total_ns``, with the waiting: at least that; null for calls on the host, and where ``bytes`` is
    algbw_gbps: float | None
    #: the same times nccl-tests' factor; null as ``algbw_gbps``, where ``group_size`` is or is 1, and for all-to-alls of uneven
    #: parts
    busbw_gbps: float | None
    #: part of ``total_ns`` in which they waited for other ranks; null where there are steps, which have it, where a call has no
    #: match, and where ranks do not compare
    wait_ns: int | None = None


class HostWindow(Struct, frozen=True):
    """Time of a host without a device, on its own clock; the three parts sum to its length."""

    first_ns: int  #: start of its first operator or communication
    last_ns: int  #: end of its last one
    compute_ns: int  #: operators that compute
    communication_ns: int  #: communication that it posted or waited for meanwhile (waiting for others too)
    rest_ns: int  #: neither of them: Python and input between operators


class RankDevice(Struct, frozen=True):
    """The whole trace of a rank, on its own clock, so that a trace without any pipeline still gets an answer."""

    rank: int  #: global rank
    breakdown: DeviceBreakdown  #: device time from the first device event (``first_ns``) to the last (``last_ns``)
    comms: tuple[CommTotal, ...] = ()  #: one entry per axis and kind; empty without communication
    #: reasons why the device was idle; null without device events, or where launches that it needs were not recorded
    host: HostIdle | None = None
    #: calls that waited for the device; null without device events or recorded calls; empty where none did
    synchronisations: tuple[SyncSummary, ...] | None = None
    #: time of a host without a device; null with device events, with labelled ops, and without operators
    on_host: HostWindow | None = None


class MarkedStep(Struct, frozen=True):
    """A training step as its mark shows it on one rank, whether there is a pipeline or not."""

    rank: int  #: global rank
    step: int  #: number of the training step
    start_ns: int  #: start of its mark
    end_ns: int  #: end of its mark
    spans: Mapping[str, int]  #: time of the other marked ranges in it, by kind; empty where there are none


class Severity(StrEnum):
    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


class Finding(Struct, frozen=True):
    """Fact that a person should know about a run."""

    #: ``info`` (what the schedule itself costs; a long step that may have been the only one), ``warning`` (time to win back) or
    #: ``critical`` (the run does not follow its plan)
    severity: Severity
    title: str  #: headline, and how much of the step it is
    detail: str  #: meaning of it, or what to do
    gain_ns: int | None = None  #: time that a step would get back, mean over the steps; null where that is not known
    evidence: Mapping[str, Any] = field(default_factory=dict)  #: figures behind it; empty where there are none
    #: lower end of the gain's 90 % interval; null as ``gain_ns``, and of a single step, which says nothing of others
    gain_low_ns: int | None = None
    gain_high_ns: int | None = None  #: upper end of it; null as ``gain_low_ns``


def behind_critical(findings: Sequence[Finding], further: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings with further ones, behind those that are critical and ahead of those that have a gain."""
    first = sum(finding.severity is Severity.CRITICAL for finding in findings)
    return (*findings[:first], *further, *findings[first:])


class MissingEvidence(Struct, frozen=True):
    """Kinds of findings for which the run is too short, or has nothing to compare with: that there is no such finding says
    nothing about them.
    """

    findings: tuple[str, ...]  #: kinds of findings
    reason: str  #: reason, in words
