"""The types of what ``pptrace whatif`` says; each field is the JSON field of the same name, and None is its ``null``."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct, field

from pptrace.model.wording import counted


class Standing(StrEnum):
    """Worth of a change to who reads it, the best first."""

    SURE = "sure"  # its whole interval is shorter than what the same work takes now
    UNSURE = "not sure"
    NO_GAIN = "no gain"
    LACKING = "not in the framework"  # the framework of the run has no such plan
    OVER_LIMIT = "over the memory limit"
    IDEAL = "ideal"  # nobody can choose it: something costs less than it does


class Scenario(Struct, frozen=True):
    """A change and what the typical step would take with it, ns.

    ``span_ns`` is that of the pipeline, and ``low_ns`` to ``high_ns`` its 90 % interval. ``period_ns`` is the step from its start
    to the next one's, with ``period_low_ns`` to ``period_high_ns``: None where that of the run is not known. ``gain_ns`` is what
    the same work would take less than it does now, of the period where it is known, else of the span. ``bubble_ratio`` is all
    that is not compute over compute, of all ranks together. ``peak_inflight`` is the largest number of activations of one chunk
    and microbatch that a rank holds, ``peak_memory_bytes`` the largest predicted peak of a rank.
    ``over_limit_bytes`` is what that is over the limit that was given, None without a limit or where the peak is not known.
    ``on_pareto_front``: no other scenario takes less time and no more memory (in flight, where bytes are not known).
    ``paste`` has the options that make the change, by framework; {} where none do. ``link_speed`` is how many times as fast
    messages are, ``collective_speeds`` by axis how many times as fast collectives inside ops are. ``doubt`` is why a change whose
    whole interval is shorter is not sure to help, "" where nothing is in its way.
    """

    name: str
    schedule: str
    num_chunks: int
    num_microbatches: int
    split: tuple[int, ...] | None
    ideal: tuple[str, ...]
    span_ns: int
    low_ns: int
    high_ns: int
    gain_ns: int
    bubble_ratio: float
    peak_inflight: int
    peak_memory_bytes: int | None
    verified_span_ns: int | None
    note: str
    microbatch_size: float = 1.0
    over_limit_bytes: int | None = None
    on_pareto_front: bool = False
    paste: Mapping[str, str] = field(default_factory=dict)
    period_ns: int | None = None
    period_low_ns: int | None = None
    period_high_ns: int | None = None
    link_speed: float = 1.0
    collective_speeds: Mapping[str, float] = field(default_factory=dict)
    standing: Standing = Standing.UNSURE
    doubt: str = ""

    @property
    def length_ns(self) -> int:
        """The step as it counts for throughput: its period where that is known, else the pipeline's span."""
        return self.span_ns if self.period_ns is None else self.period_ns

    @property
    def length_low_ns(self) -> int:
        """Lower end of the 90 % interval of the length."""
        return self.low_ns if self.period_low_ns is None else self.period_low_ns

    @property
    def length_high_ns(self) -> int:
        """Upper end of the 90 % interval of the length."""
        return self.high_ns if self.period_high_ns is None else self.period_high_ns

    @property
    def verified_ns(self) -> int | None:
        """The length with the pipeline that was run in real processes; None where none was."""
        return None if self.verified_span_ns is None else self.verified_span_ns + self.length_ns - self.span_ns

    @property
    def is_shorter(self) -> bool:
        """Return whether its whole interval is shorter than what the same work takes now."""
        return self.length_high_ns < self.same_work_ns

    @property
    def is_choice(self) -> bool:
        """Return whether it can be had: it is no ideal, the framework has it and it needs no more memory than there is."""
        return self.standing in (Standing.SURE, Standing.UNSURE, Standing.NO_GAIN)

    @property
    def same_work_ns(self) -> int:
        """Time that as much work as a step then does takes now, ns: that of a step of today, where it does as much."""
        return self.length_ns + self.gain_ns

    @property
    def gain_share(self) -> float:
        """The gain as a part of what the same work takes now."""
        return self.gain_ns / self.same_work_ns if self.same_work_ns else 0.0

    @property
    def activations(self) -> float:
        """Most activations that a rank holds, of a microbatch of the run in 1/p of the model."""
        return self.peak_inflight / self.num_chunks * self.microbatch_size


class WhatIf(Struct, frozen=True):
    """Result of the study of a run: ``scenarios`` by their standing and gain, the best first; none where the replay of the run
    itself is over 5 % off.

    ``measured_span_ns`` is the typical span of the pipeline, ``replay_span_ns`` what it takes in the replay of the run as it was,
    and ``replay_error`` how far from ``measured_span_ns`` that is, as a part of it. ``measured_period_ns`` is the typical step of
    the report, from its start to the next one's, ``replay_period_ns`` the replay with what is outside the pipeline; None where
    that is not known. ``today`` is the run as it was in the terms of a scenario. ``framework`` is the name of that of the run, ""
    where what it can run is not known. ``doubts`` are those of the ``warnings`` that all costs hang on, which stand first.
    """

    measured_span_ns: int
    replay_span_ns: int
    replay_error: float
    scenarios: tuple[Scenario, ...]
    today: Scenario | None = None
    num_steps: int = 0
    warnings: tuple[str, ...] = field(default=())
    measured_period_ns: int | None = None
    replay_period_ns: int | None = None
    framework: str = ""
    doubts: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """The step and how many changes there are, without their fields."""
        return f"<WhatIf: {counted(len(self.scenarios), 'scenario')}, measured {self.measured_ns} ns, replay {self.replay_ns} ns>"

    @property
    def measured_ns(self) -> int:
        """The measured step as it counts for throughput: its period where that is known, else the pipeline's span."""
        return self.measured_span_ns if self.measured_period_ns is None else self.measured_period_ns

    @property
    def replay_ns(self) -> int:
        """The same of the replay of the run as it was."""
        return self.replay_span_ns if self.replay_period_ns is None else self.replay_period_ns

    @property
    def advice(self) -> Scenario | None:
        """The change that gains most of those that are sure to help; None where none is."""
        best = next(iter(self.scenarios), None)
        return best if best is not None and best.standing is Standing.SURE else None
