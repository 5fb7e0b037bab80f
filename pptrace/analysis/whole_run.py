"""Figures of a run over all its steps, as types; each field is the JSON field of the same name, and None is its ``null``."""

from __future__ import annotations

from dataclasses import dataclass

from pptrace.analysis.step_parts import BlamedOp, Cause


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
    """Lengths of a run's training steps, ns: percentiles, the outliers, the longest first, and where the level changes.

    ``evaluations`` are the numbers of the steps without backwards, which are left out. Lengths are periods where those of all
    steps are known, else spans (``measure``).
    """

    num_steps: int
    min_ns: int
    p10_ns: int
    median_ns: int
    p90_ns: int
    max_ns: int
    outliers: tuple[StepOutlier, ...]
    changes: tuple[StepChange, ...]
    evaluations: tuple[int, ...] = ()
    measure: str = "period"


@dataclass(frozen=True, slots=True)
class Link:
    """Messages from one rank to another on an axis, in all steps of the report, ns.

    For ``late_sender_ns`` the receiver waited, for ``late_receiver_ns`` the sender. ``slack_ns`` is how long messages might have
    been under way before they were asked for, and ``required_gbps`` the bandwidth (GB/s) that would hide them in it.
    ``latency_ns`` and ``bandwidth_gbps`` describe fast transfers as latency + bytes / bandwidth; ``fit_reason`` says why they
    are None. ``peak_gbps`` is the reference peak of the devices' links, per direction, and ``share_of_peak`` what
    ``algbw_gbps`` is of it.
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
    fit_reason: str | None = None


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
    """Bus bandwidth of all collectives of one kind on an axis, timed on devices, over all ranks and steps, GB/s.

    ``ports`` is how many times the rate of a port of the network it can reach where its groups are on several hosts
    (:func:`pptrace.analysis.links.network.ports_reached`), None where they are not.
    """

    axis: str
    kind: str
    is_same_host: bool | None
    busbw_gbps: float
    peak_gbps: float | None
    share_of_peak: float | None
    ports: float | None = None


@dataclass(frozen=True, slots=True)
class Interconnect:
    """Peaks of the links between devices, and the rates that collectives reach; ``reasons`` why peaks are None, a line each."""

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
class InFlight:
    """Most microbatches of one chunk whose activations are held at once, by the plan and as measured."""

    planned: int | None
    measured: int | None


@dataclass(frozen=True, slots=True)
class StageActivations:
    """Activations that one microbatch keeps of a stage of the plan, bytes, from its forward to its backward."""

    stage: int
    bytes_per_microbatch: int


@dataclass(frozen=True, slots=True)
class PredictedMemory:
    """Memory that the run's sizes and options come to (:mod:`pptrace.model.predicted`)."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int | None
    total_bytes: int | None
    stages: tuple[StageActivations, ...]


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The step with a rank's highest peak; ``kind`` as in :class:`pptrace.model.step_memory.MemoryKind`."""

    rank: int
    pp_rank: int | None
    stages: tuple[int, ...]
    step: int | None
    peak_bytes: int | None
    kind: str | None
    start_bytes: int | None
    reserved_bytes: int | None
    in_flight: InFlight
    predicted: PredictedMemory | None


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """``reasons`` say why figures are null."""

    ranks: tuple[RankMemory, ...]
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CoreWait:
    """For which share of the recorded time the threads of a rank were ready to run and had no processor core, all together.

    With several threads that wait it may be more than 1.
    """

    rank: int
    share: float


@dataclass(frozen=True, slots=True)
class RootCause:
    """Cause of several findings: their evidence has its ``name`` as ``follows_from``; ``ranks`` are those concerned.

    ``title`` says what it is, ``detail`` what it does, ``advice`` what to do about it; ``gain`` why no gain is known, ""
    where the gains of its findings tell.
    """

    name: str
    ranks: tuple[int, ...]
    title: str
    detail: str
    advice: str
    gain: str = ""
