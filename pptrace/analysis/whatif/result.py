"""The types of what ``pptrace whatif`` says; each field is the JSON field of the same name, and None is its ``null``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Scenario:
    """A change and what the typical step would take with it, ns.

    ``low_ns`` to ``high_ns`` is a 90 % interval of ``span_ns``, and ``gain_ns`` what the same work would take less than it does
    now. ``bubble_ratio`` is all that is not compute over compute, of all ranks together. ``peak_inflight`` is the largest number
    of activations of one chunk and microbatch that a rank holds, ``peak_memory_bytes`` the largest predicted peak of a rank.
    ``over_limit_bytes`` is what that is over the limit that was given, None without a limit or where the peak is not known.
    ``on_pareto_front``: no other scenario takes less time and no more memory (in flight, where bytes are not known).
    ``paste`` has the options that make the change, by framework; {} where none do. ``period_ns`` is the step from its start to
    the next one's, None where that of the run is not known.
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

    @property
    def is_outside(self) -> bool:
        """Return whether it changes what is outside the pipeline, whose span stays."""
        return any(name.startswith("outside=") for name in self.ideal)

    @property
    def length_ns(self) -> int:
        """Length of what it makes shorter: the pipeline's span, or the period."""
        return self.period_ns if self.is_outside and self.period_ns is not None else self.span_ns

    @property
    def is_choice(self) -> bool:
        """Return whether it can be had: it is no ideal and does not need more memory than there is."""
        return not self.ideal and not self.over_limit_bytes

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


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Result of the study of a run: ``scenarios``, the best first; none where the replay of the run itself is over 5 % off.

    ``replay_span_ns`` is what the typical step takes in the replay of the run as it was, ``replay_error`` how far from
    ``measured_span_ns`` that is, as a part of it. ``today`` is the run as it was in the terms of a scenario.
    """

    measured_span_ns: int
    replay_span_ns: int
    replay_error: float
    scenarios: tuple[Scenario, ...]
    today: Scenario | None = None
    num_steps: int = 0
    warnings: tuple[str, ...] = field(default=())
    measured_period_ns: int | None = None

    @property
    def advice(self) -> Scenario | None:
        """The change that gains most, of those that gain for sure if there are any, else the best ideal; None where none gains.

        What needs more memory than there is counts only where nothing else was tried.
        """
        fitting = [one for one in self.scenarios if not one.over_limit_bytes]
        choices = [one for one in fitting if one.is_choice] or fitting or list(self.scenarios)
        sure = next((one for one in choices if one.high_ns < one.same_work_ns), None)
        best = sure or next(iter(choices), None)
        return None if best is None or best.gain_ns <= 0 else best
