"""The report as types; each field is the JSON field of the same name, and None is its ``null``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from pptrace.analysis.memory.result import MemoryReport
from pptrace.model.device import DeviceBreakdown
from pptrace.model.device_idle import HostIdle, SyncSummary


@dataclass(frozen=True, slots=True)
class InputInfo:
    path: str
    format: str
    rank: int | None
    num_events: int
    producer: str
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MeshSizes:
    num_ranks: int
    pp: int | None
    vpp: int | None
    tp: int | None
    cp: int | None
    dp: int | None
    ep: int | None

    @property
    def axes(self) -> dict[str, int | None]:
        """The size of each axis, and the chunks per rank."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "num_ranks"}


@dataclass(frozen=True, slots=True)
class ScheduleCandidate:
    """A schedule that fits what the ranks with a trace show; ``pp_ranks`` are their pipeline ranks in it, by global rank."""

    name: str
    pp: int
    num_microbatches: int
    num_stages: int
    num_chunks: int
    pp_ranks: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ScheduleSummary:
    """``candidates`` are all schedules that may have run, where some ranks alone have a trace; their common sizes are known."""

    name: str
    num_microbatches: int | None
    num_stages: int | None
    num_chunks: int | None
    source: str
    mismatches: tuple[str, ...]
    candidates: tuple[ScheduleCandidate, ...] = ()


@dataclass(frozen=True, slots=True)
class ClockSummary:
    method: str
    offsets_ns: Mapping[str, int]
    uncertainty_ns: int | None


@dataclass(frozen=True, slots=True)
class Waterfall:
    """Parts of a step's span, ns; they sum to it exactly. ``host`` is None where the trace cannot tell it apart."""

    compute: int
    structural: int
    imbalance: int
    jitter: int
    communication: int
    host: int | None
    unexplained: int


@dataclass(frozen=True, slots=True)
class Bubble:
    """``ratio`` is bubble over compute, ``share`` bubble over window; the ideals are those of the plan with F = I = W."""

    ratio: float | None
    share: float | None
    ideal_ratio: float | None
    ideal_share: float | None
    waterfall_ns: Waterfall | None


@dataclass(frozen=True, slots=True)
class Cause:
    """A part of a step beyond its compute spread evenly; ``where`` names a stage, rank, kind or axis, or nothing."""

    cause: str
    where: Mapping[str, int | str]
    ns: int


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The chain of ops, transfers and idle times that ends with a step's last op. ``parts`` by kind sum to the span."""

    span_ns: int
    parts: Mapping[str, int]
    by_stage: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class BlamedOp:
    rank: int
    kind: str
    stage: int
    microbatch: int
    ns: int


@dataclass(frozen=True, slots=True)
class Blame:
    """The bubble of all ranks by what caused it; each mapping sums to the total. ``ops`` are those with the largest charges."""

    total_ns: int
    by_rank: Mapping[int, int]
    by_stage: Mapping[int, int]
    by_kind: Mapping[str, int]
    ops: tuple[BlamedOp, ...]


@dataclass(frozen=True, slots=True)
class PhaseSummary:
    start_ns: int
    end_ns: int
    num_forward: int
    num_backward: int
    bubble_ns: int | None


@dataclass(frozen=True, slots=True)
class CommSummary:
    """All communication of one kind on one axis by one rank in one step. Bandwidths are in GB/s (10⁹ bytes).

    What depends on telling waiting from transfer is None where the other side is not in the traces, every time where the device
    that communicated was not recorded, and ``bytes`` where a call does not tell its size. ``predicted_bytes`` is what the run's
    sizes and options come to (:mod:`pptrace.analysis.volume.step`), None where they are not known.
    """

    axis: str
    kind: str
    count: int
    bytes: int | None
    total_ns: int | None
    wait_ns: int | None
    hidden_ns: int | None
    exposed_ns: int | None
    overlap_ratio: float | None
    algbw_gbps: float | None
    busbw_gbps: float | None
    predicted_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class OpPart:
    """One half of an overlapped pair."""

    kind: str
    stage: int | None
    chunk: int | None
    microbatch: int | None


@dataclass(frozen=True, slots=True)
class OpSummary:
    """``parts`` are the two halves of an overlapped pair, whose own stage, chunk and microbatch are the first one's; else ()."""

    kind: str
    stage: int | None
    chunk: int | None
    microbatch: int | None
    phase: str | None
    start_ns: int
    end_ns: int
    parts: tuple[OpPart, ...] = ()


@dataclass(frozen=True, slots=True)
class RankIdeal:
    """The bubble of one pipeline rank of the plan with F = I = W and free messages: ratio is over compute, share over the window.

    ``own_`` is within the rank's own window, from its first op to its last; the others are within the pipeline's.
    """

    ratio: float
    share: float
    own_ratio: float
    own_share: float


@dataclass(frozen=True, slots=True)
class RankStep:
    """``not_compute_ns`` is the window without compute: bubble and exposed communication together. ``bubble_low_ns`` and
    ``bubble_high_ns`` bound the bubble in it, where the other sides of messages have no trace.

    ``phases`` are {} where the schedules that fit disagree about them. ``host`` is None without a device, or where launches that
    it needs were not recorded; ``synchronisations`` None where no launches were.
    ``peak_memory_kind`` says what bytes
    ``peak_memory_bytes`` counts (:class:`pptrace.model.step_memory.MemoryKind`), ``start_memory_bytes`` is their level at the
    step's start, ``peak_reserved_bytes`` what the device's allocator had got from the driver. ``peak_in_flight`` counts
    microbatches of one chunk whose activations were held at once.
    """

    rank: int
    stage: int | None
    window_ns: int
    compute_ns: int | None
    exposed_comm_ns: int | None
    bubble_ns: int | None
    phases: Mapping[str, PhaseSummary]
    comms: tuple[CommSummary, ...]
    spans: Mapping[str, int]  # time of the step's other ranges: OPTIMIZER, GRAD_SYNC, …
    device: DeviceBreakdown
    peak_memory_bytes: int | None
    ops: Sequence[OpSummary]
    pp_rank: int | None = None
    not_compute_ns: int | None = None
    bubble_low_ns: int | None = None
    bubble_high_ns: int | None = None
    ideal: RankIdeal | None = None
    host: HostIdle | None = None
    synchronisations: tuple[SyncSummary, ...] | None = None
    peak_memory_kind: str | None = None
    start_memory_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_in_flight: int | None = None


_CAUSES = ("structural", "imbalance", "straggler", "jitter", "communication", "host", "unexplained")
_RARE = ("straggler", "host")
"""Causes that are left out where a step has none of them."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """``span_ns`` is None, and so is the bubble, where the ranks' times could not be compared.

    ``causes`` sum to the span minus ``ideal_ns``, the usual compute spread evenly over the ranks. They and the critical path
    are None where an op of the plan is not in the trace, ``blame`` where a rank's bubble is not known.
    """

    step: int
    start_ns: int
    end_ns: int
    span_ns: int | None
    bubble: Bubble
    ranks: tuple[RankStep, ...]
    ideal_ns: int | None = None
    causes: tuple[Cause, ...] | None = None
    critical_path: CriticalPath | None = None
    blame: Blame | None = None

    @property
    def span_parts(self) -> dict[str, int] | None:
        """Parts of the span, ns: the compute spread evenly, and each cause at all its places; None where it is not known.

        Where causes are not known the parts are those of the waterfall.
        """
        if self.causes is None or self.ideal_ns is None or self.span_ns is None:
            waterfall = self.bubble.waterfall_ns
            return None if waterfall is None else {name: ns for name, ns in asdict(waterfall).items() if ns is not None}
        named = {cause.cause for cause in self.causes}
        parts = {"compute": self.ideal_ns} | {name: 0 for name in _CAUSES if name in named or name not in _RARE}
        for cause in self.causes:
            parts[cause.cause] += cause.ns
        return parts

    @property
    def has_pipeline(self) -> bool:
        """Return whether these are ops of a pipeline; else each rank's window is its own STEP range."""
        return any(rank.ops or rank.phases for rank in self.ranks)


@dataclass(frozen=True, slots=True)
class StepOutlier:
    """A step far above the usual length: ``usual_step`` is the typical one of its time, with ``usual_ns``.

    ``differences`` are what it has more of, by cause and place, and sum to ``excess_ns``; None where a step is not explained.
    ``ops`` has the op that is to blame for most of its bubble, if one is.
    """

    step: int
    span_ns: int
    usual_step: int
    usual_ns: int
    differences: tuple[Cause, ...] | None
    ops: tuple[BlamedOp, ...]

    @property
    def excess_ns(self) -> int:
        return self.span_ns - self.usual_ns


@dataclass(frozen=True, slots=True)
class StepChange:
    """From ``step`` on, steps take as long as ``after_step``; until then as long as ``before_step``.

    ``differences`` are what they have more or less of, by cause and place; None where a step is not explained.
    """

    step: int
    before_step: int
    before_ns: int
    after_step: int
    after_ns: int
    differences: tuple[Cause, ...] | None


@dataclass(frozen=True, slots=True)
class StepSeries:
    """Lengths of a run's steps, ns: percentiles, the outliers, the longest first, and where the level changes."""

    num_steps: int
    min_ns: int
    p10_ns: int
    median_ns: int
    p90_ns: int
    max_ns: int
    outliers: tuple[StepOutlier, ...]
    changes: tuple[StepChange, ...]


@dataclass(frozen=True, slots=True)
class Link:
    """Messages from one rank to another on an axis, in all steps of the report, ns.

    For ``late_sender_ns`` the receiver waited, for ``late_receiver_ns`` the sender. ``slack_ns`` is how long messages might have
    been under way before they were asked for, and ``required_gbps`` the bandwidth (GB/s) that would hide them in it.
    ``latency_ns`` and ``bandwidth_gbps`` describe the shortest transfers as latency + bytes / bandwidth. ``peak_gbps`` is the
    reference peak of the devices' links, per direction, and ``share_of_peak`` what ``algbw_gbps`` is of it.
    """

    axis: str
    source: int
    target: int
    is_same_host: bool | None
    count: int
    bytes: int | None
    transfer_ns: int
    late_sender_ns: int
    late_receiver_ns: int
    slack_ns: int
    required_gbps: float | None
    algbw_gbps: float | None
    latency_ns: int | None
    bandwidth_gbps: float | None
    peak_gbps: float | None = None
    share_of_peak: float | None = None


@dataclass(frozen=True, slots=True)
class DevicePeak:
    """The reference peak of a rank's device: ``peak_gbps`` in GB/s per direction, over ``link`` (``nvlink``, ``pcie``).

    Both are None where :mod:`pptrace.analysis.links.peaks` has none.
    """

    rank: int
    device: str | None
    link: str | None
    peak_gbps: float | None


@dataclass(frozen=True, slots=True)
class CollectiveRate:
    """Bus bandwidth of all collectives of one kind on an axis, timed on devices, over all ranks and steps, GB/s."""

    axis: str
    kind: str
    is_same_host: bool | None
    busbw_gbps: float
    peak_gbps: float | None
    share_of_peak: float | None


@dataclass(frozen=True, slots=True)
class Interconnect:
    """What the links between devices can do at most, and what collectives reach; ``reasons`` why peaks are None, a line each."""

    devices: tuple[DevicePeak, ...]
    collectives: tuple[CollectiveRate, ...]
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LateRank:
    """Collectives of one rank, of one kind on an axis, in all steps of the report.

    It was the last of its group to enter ``num_last`` of ``count``, and waited ``wait_ns`` for others in the rest.
    """

    axis: str
    kind: str
    rank: int
    count: int
    num_last: int
    wait_ns: int


@dataclass(frozen=True, slots=True)
class CommTotal:
    """All communication of one kind on one axis by one rank in its whole trace, pipeline or not. Bandwidths are in GB/s.

    Times are those of the calls or kernels, waiting for the others included. ``busy_ns`` is their union, ``overlap_ratio`` the
    part of it beside compute; None where these are calls on the host, both None where nothing tells when they ran. ``bytes`` is
    None where a call does not tell its size. The bandwidths are what ``bytes`` over ``total_ns`` comes to on a device: with the
    waiting, so at least that.
    """

    axis: str
    kind: str
    group_size: int | None
    count: int
    bytes: int | None
    total_ns: int
    busy_ns: int | None
    overlap_ratio: float | None
    algbw_gbps: float | None
    busbw_gbps: float | None


@dataclass(frozen=True, slots=True)
class RankDevice:
    rank: int
    breakdown: DeviceBreakdown
    comms: tuple[CommTotal, ...] = ()
    host: HostIdle | None = None
    synchronisations: tuple[SyncSummary, ...] | None = None


@dataclass(frozen=True, slots=True)
class MarkedStep:
    """A training step as its mark shows it on one rank, pipeline or not; ``spans`` is the time of the ranges inside it, ns."""

    rank: int
    step: int
    start_ns: int
    end_ns: int
    spans: Mapping[str, int]


class Severity(StrEnum):
    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True)
class Finding:
    """Finding about a run: ``gain_ns`` is what a step would get back, None where that is not known.

    ``gain_low_ns`` to ``gain_high_ns`` is its 90 % interval from how the steps vary.
    """

    severity: Severity
    title: str
    detail: str
    gain_ns: int | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    gain_low_ns: int | None = None
    gain_high_ns: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerSlowdown:
    rank: int
    slowdown: float


@dataclass(frozen=True, slots=True)
class StageSlowdown:
    stage: int
    slowdown: float


@dataclass(frozen=True, slots=True)
class KindSlowdown:
    kind: str
    slowdown: float


@dataclass(frozen=True, slots=True)
class Stragglers:
    """The what-if study of all whole steps (:mod:`pptrace.analysis.stragglers.slowdowns`).

    ``m_w`` and ``m_s`` are None where the slowdown is too small to divide by. ``num_steps`` is how many steps were replayed;
    ``covers`` is ``step`` where that is with what ranks do before and after their ops, else ``pipeline``.
    """

    slowdown: float
    m_w: float | None
    m_s: float | None
    workers: tuple[WorkerSlowdown, ...]
    stages: tuple[StageSlowdown, ...]
    op_kinds: tuple[KindSlowdown, ...]
    num_steps: int
    covers: str


@dataclass(frozen=True, slots=True)
class Report:
    pptrace_version: str
    inputs: tuple[InputInfo, ...]
    framework: str
    mesh: MeshSizes
    schedule: ScheduleSummary
    clock: ClockSummary
    steps: tuple[StepReport, ...]
    marked_steps: tuple[MarkedStep, ...]
    device: tuple[RankDevice, ...]
    findings: tuple[Finding, ...]
    warnings: tuple[str, ...]
    verdict: str = ""
    """The report in one sentence (:mod:`pptrace.analysis.verdict`)."""
    memory: MemoryReport | None = None
    hang: Mapping[str, Any] | None = None
    """Diagnosis of a run that hung, as :func:`pptrace.hang_diagnosis.words.as_json` writes it."""
    step_series: StepSeries | None = None
    links: tuple[Link, ...] = ()
    late_ranks: tuple[LateRank, ...] = ()
    stragglers: Stragglers | None = None
    interconnect: Interconnect | None = None

    @property
    def typical_step(self) -> StepReport | None:
        """The step to show first: the median by span, of two the faster, of those whose bubble is known, else of all."""
        known = [step for step in self.steps if step.bubble.ratio is not None] or list(self.steps)
        return sorted(known, key=lambda step: step.span_ns or 0)[(len(known) - 1) // 2] if known else None
