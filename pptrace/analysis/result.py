"""The report as types; each field is the JSON field of the same name, and None is its ``null``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from pptrace.analysis.whole_run import INTERACTION, OUTSIDE, Blame, Bubble, Cause, CriticalPath, OutsidePart
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
    sizes and options come to (:mod:`pptrace.model.predicted`), None where they are not known. ``free_ns`` is the part of
    ``exposed_ns`` that costs the step nothing: of collectives behind the rank's last op, while its pipeline goes on.
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
    free_ns: int | None = None


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
    ``warmup_ratio``, ``steady_ratio`` and ``cooldown_ratio`` are the lengths of the phases over compute.
    """

    ratio: float
    share: float
    own_ratio: float
    own_share: float
    warmup_ratio: float
    steady_ratio: float
    cooldown_ratio: float


@dataclass(frozen=True, slots=True)
class RankStep:
    """``not_compute_ns`` is the window without compute: bubble and exposed communication together. ``bubble_low_ns`` and
    ``bubble_high_ns`` bound the bubble in it, where the other sides of messages have no trace.

    Of steps without a pipeline ``between_operators_ns`` is the part of the bubble in which a host without a device ran no
    operator and neither posted nor waited for communication, ``late_ns`` the time in which the others waited for this rank alone,
    ``late_in_transfer_ns`` of it that in which another collective was transferred, which is exposed communication of the others.
    ``idle_spans`` is by kind the part of its bubble in which a range says what its host did (``DATA``, ``CHECKPOINT``,
    ``LOGGING``, ``GC``): of a device a part of ``launch_starved_ns``, of a host without one of ``between_operators_ns``.

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
    between_operators_ns: int | None = None
    late_ns: int | None = None
    late_in_transfer_ns: int | None = None
    idle_spans: Mapping[str, int] | None = None


_CAUSES = ("structural", "imbalance", "straggler", "jitter", "communication", "host")
_LAST = (INTERACTION, "unexplained")
_RARE = ("straggler", "host", INTERACTION)
"""Causes that are left out where a step has none of them."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """``span_ns``, the pipeline's span, is None, and so is the bubble, where the ranks' times could not be compared.
    ``period_ns`` is from the step's start to the next one's; what of it is ``outside`` the span sums to the difference.

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
    period_ns: int | None = None
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


def with_periods_known(steps: Sequence[StepReport]) -> list[StepReport]:
    """The steps whose period is known; where it is of none, those whose span is."""
    return [step for step in steps if step.period_ns is not None] or [
        step for step in steps if step.span_ns is not None
    ]


def typical_of(steps: Sequence[StepReport]) -> StepReport | None:
    """The median by length of some steps, chosen as :attr:`pptrace.analysis.report.Report.typical_step` is; None of no steps."""
    training = [step for step in steps if not step.is_evaluation] or list(steps)
    known = [step for step in training if step.bubble.ratio is not None] or training
    known = with_periods_known(known) or known
    return sorted(known, key=lambda step: step.length_ns or 0)[(len(known) - 1) // 2] if known else None


def alike_steps(steps: Sequence[StepReport]) -> list[StepReport]:
    """The steps whose span is known, so that their lengths compare: without periods where one of them is not known."""
    known = [step for step in steps if step.span_ns is not None]
    if all(step.period_ns is not None for step in known):
        return known
    return [replace(step, period_ns=None, outside=None) for step in known]


@dataclass(frozen=True, slots=True)
class CommTotal:
    """All communication of one kind on one axis by one rank in its whole trace, pipeline or not. Bandwidths are in GB/s.

    Times are those of the calls or kernels, waiting for the others included. ``busy_ns`` is their union, ``overlap_ratio`` the
    part of it that compute overlaps; None where these are calls on the host, both None where nothing tells when they ran.
    ``bytes`` is None where a call does not tell its size. The bandwidths are what ``bytes`` over ``total_ns`` comes to on a
    device: with the waiting, so at least that.
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
class HostWindow:
    """Time of a host without a device from its first operator or communication to its last, on its own clock, ns: operators that
    compute, communication that it posted or waited for meanwhile (waiting for others too), and neither of them.
    """

    first_ns: int
    last_ns: int
    compute_ns: int
    communication_ns: int
    rest_ns: int


@dataclass(frozen=True, slots=True)
class RankDevice:
    """``on_host`` is None with device events, with labelled ops and without operators."""

    rank: int
    breakdown: DeviceBreakdown
    comms: tuple[CommTotal, ...] = ()
    host: HostIdle | None = None
    synchronisations: tuple[SyncSummary, ...] | None = None
    on_host: HostWindow | None = None


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

    ``gain_low_ns`` to ``gain_high_ns`` is its 90 % interval from how the steps vary, None of a single step.
    """

    severity: Severity
    title: str
    detail: str
    gain_ns: int | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    gain_low_ns: int | None = None
    gain_high_ns: int | None = None


@dataclass(frozen=True, slots=True)
class MissingEvidence:
    """Kinds of ``findings`` for which the run has too little evidence, and the ``reason``."""

    findings: tuple[str, ...]
    reason: str
