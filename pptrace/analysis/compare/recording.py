"""Recordings of runs: parts that differ by what was recorded, and how far lengths of steps may be off by what it cost.

What recording costs is judged for each run by itself, and known within an interval. Of two runs that were recorded alike most of
that error is the same: the program is as much longer than predicted in both, and nothing of it is in the ratio of their steps.
Recorded alike are runs of the same recorder and settings with about as many events a step, whose cost comes from their traces.
There an error of the cost counts as far as the lengths depend on it differently, and by how much the costs that the two traces
show differ, since the true one is the same. Of all others the errors are independent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import hypot, log, sqrt
from typing import Any

import numpy as np
from msgspec import Struct

from pptrace.analysis.compare.bootstrap import FEWEST_STEPS
from pptrace.analysis.compare.figures import BUBBLE, CAUSE, COMPUTE, EXPOSED, WINDOW, Place
from pptrace.analysis.compare.result import RecordingOfSide, Recordings
from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.report import RecordingReport
from pptrace.analysis.result import StepReport
from pptrace.model.tables import Int64
from pptrace.model.traces import InputFormat
from pptrace.model.wording import listed

_MOST_APART = 0.01
"""Difference of the shares of known transfers from which on it changes what is bubble."""
_WITH_WAITS = ("communication", "host", "unexplained")
"""Causes that have in them what is not known of messages, on devices too."""


_NORMAL_90 = 1.645
"""Half of a 90 % interval of a normal distribution over its deviation."""
_MOST_EVENTS_RATIO = 1.1
"""Ratio of events a step up to which two runs are recorded alike."""
_RECORDERS = {
    InputFormat.KINETO: "torch.profiler",
    InputFormat.NSYS_SQLITE: "Nsight Systems",
    InputFormat.ASCEND: "the Ascend profiler",
    InputFormat.ROCPD: "rocprofv3",
    InputFormat.XPLANE: "JAX's profiler",
}
_SETTINGS = {
    "record_shapes": "shapes",
    "with_stack": "stacks",
    "profile_memory": "memory",
    "with_modules": "modules",
    "with_flops": "flops",
}

_VARIOUS = "various settings"
"""Settings of the runs of one side, which then are alike none of the other."""


class Recording(Struct, frozen=True, eq=False):
    """Recording of a run, and what of its cost is in the lengths of its steps.

    ``known_transfers`` is the share of messages between stages whose transfer is known, None where the plan has none or is not
    known; ``has_devices`` says whether times are those of device work, None where nothing tells it.
    ``settings`` in words, "" of tables. ``is_unrecorded``: steps are those without the recording; ``measured`` are the lengths of
    unrecorded steps, ns, where these are known well enough to be compared. ``deviation`` is that of the logarithm of a step's
    length by what is not known of the cost, None where nothing of it is known.
    """

    settings: str = ""
    is_unrecorded: bool = False
    measured: Int64 | None = None
    deviation: float | None = None
    recorded_ns: int | None = None
    predicted_ns: int | None = None
    events_per_step: int = 0
    cost_per_event_ns: float = 0.0
    is_of_trace: bool = False
    known_transfers: float | None = None
    has_devices: bool | None = None

    @property
    def of_side(self) -> RecordingOfSide:
        source = None
        if self.is_unrecorded:
            source = "predicted" if self.measured is None else "measured"
        return RecordingOfSide(
            "unrecorded" if self.is_unrecorded else "recorded", source, self.recorded_ns, self.settings
        )


NOT_KNOWN = Recording()


def recording_of(
    block: RecordingReport | None,
    formats: Sequence[str],
    measured: Int64,
    steps: Sequence[StepReport] = (),
    plans: Sequence[StepMatrix] = (),
) -> Recording:
    """The recording of a run.

    Args:
        block: the report's one on it.
        formats: of its files.
        measured: lengths of steps that were not recorded, ns.
        steps: those that are compared.
        plans: the costs of all whole steps.
    """
    total = sum(costs.transfers.size for costs in plans)
    known = sum(int((costs.transfers >= 0).sum()) for costs in plans)
    share = known / total if total else None
    has_devices = any(step.has_devices for step in steps) if steps else None
    if block is None:
        return Recording(_in_words(formats, {}), known_transfers=share, has_devices=has_devices)
    is_unrecorded = block.figures == "unrecorded"
    is_measured = is_unrecorded and len(measured) >= FEWEST_STEPS
    return Recording(
        _in_words(formats, block.settings),
        is_unrecorded,
        measured if is_measured else None,
        0.0 if is_measured else _deviation(block),
        block.recorded_step_ns,
        block.predicted_step_ns,
        block.events_per_step or 0,
        block.cost_per_event_ns or 0.0,
        block.cost_source == "trace",
        share,
        has_devices,
    )


def _deviation(block: RecordingReport) -> float | None:
    """Deviation of a predicted step, from its interval; of a recorded one as much as it may be longer than without recording."""
    recorded, predicted = block.recorded_step_ns, block.predicted_step_ns
    if not predicted or not recorded or not block.low_ns or not block.high_ns or block.low_ns <= 0:
        return None
    if block.figures == "unrecorded":
        return log(block.high_ns / block.low_ns) / 2 / _NORMAL_90
    return max(log(recorded / predicted), 0.0)


def _in_words(formats: Sequence[str], settings: Mapping[str, Any]) -> str:
    """The recorder and what it recorded: "torch.profiler with shapes"; "" of tables."""
    recorders = listed(name for of_format, name in _RECORDERS.items() if str(of_format) in formats)
    more = [word for name, word in _SETTINGS.items() if settings.get(name) is True]
    light = ", light" if settings.get("level") == "light" else ""
    return f"{recorders}{light}{f' with {listed(more)}' if more else ''}" if recorders else ""


def of_runs(costs: Sequence[Recording]) -> Recording:
    """The recording of the runs of a side: figures as means over them, lengths are measured where those of all are."""
    first = costs[0]
    known = [cost.deviation for cost in costs if cost.deviation is not None]
    shares = [cost.known_transfers for cost in costs if cost.known_transfers is not None]
    devices = [cost.has_devices for cost in costs]
    return Recording(
        first.settings if all(cost.settings == first.settings for cost in costs) else _VARIOUS,
        any(cost.is_unrecorded for cost in costs),
        first.measured if all(cost.measured is not None for cost in costs) else None,
        float(np.mean(known)) if known else None,
        _mean([cost.recorded_ns for cost in costs]),
        _mean([cost.predicted_ns for cost in costs]),
        round(float(np.mean([cost.events_per_step for cost in costs]))),
        float(np.mean([cost.cost_per_event_ns for cost in costs])),
        all(cost.is_of_trace and cost.is_unrecorded == first.is_unrecorded for cost in costs),
        float(np.mean(shares)) if shares else None,
        any(devices) if None not in devices else None,
    )


def _mean(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return round(float(np.mean(known))) if known else None


class RecordedBoth(Struct, frozen=True):
    """The recordings of both sides."""

    a: Recording
    b: Recording

    @property
    def deviation(self) -> float:
        """Standard deviation of the logarithm of b / a by what is not known of the cost of recording."""
        of_a, of_b = self.a.deviation or 0.0, self.b.deviation or 0.0
        a, b = self.a, self.b
        is_same = a.settings == b.settings and a.settings not in ("", _VARIOUS) and a.is_unrecorded == b.is_unrecorded
        events = sorted((a.events_per_step, b.events_per_step))
        if not (is_same and a.is_of_trace and b.is_of_trace and 0 < events[1] <= _MOST_EVENTS_RATIO * events[0]):
            return hypot(of_a, of_b)
        return hypot(of_a - of_b, self._costs_apart)

    @property
    def recordings(self) -> Recordings:
        return Recordings(self.a.of_side, self.b.of_side, self.deviation)

    @property
    def _costs_apart(self) -> float:
        """The part of a step by which two predictions would differ if each had the cost that the other's trace shows."""
        a, b = self.a, self.b
        if not a.is_unrecorded or not a.predicted_ns or not b.predicted_ns:
            return 0.0
        events = sqrt(a.events_per_step * b.events_per_step)
        return events * abs(a.cost_per_event_ns - b.cost_per_event_ns) / sqrt(a.predicted_ns * b.predicted_ns)

    @property
    def _devices_differ(self) -> bool:
        known = {self.a.has_devices, self.b.has_devices}
        return len(known) > 1 and None not in known

    @property
    def _messages_differ(self) -> bool:
        of_a, of_b = self.a.known_transfers, self.b.known_transfers
        return of_a is not None and of_b is not None and abs(of_a - of_b) > _MOST_APART

    def hides(self, name: str, place: Place) -> bool:
        """Return whether a part may differ by the recording alone."""
        if self._devices_differ:
            return name in (COMPUTE, BUBBLE, EXPOSED, CAUSE, WINDOW)
        if not self._messages_differ:
            return False
        if self.a.has_devices:
            return name == BUBBLE or (name == CAUSE and dict(place)["cause"] in _WITH_WAITS)
        return name in (COMPUTE, BUBBLE, CAUSE)

    def lines(self) -> Iterator[str]:
        """Reasons for which it is not known whether parts differ, and a line where the recordings differ in their settings."""
        a, b = self.a, self.b
        if self._devices_differ:
            with_devices, without = ("A", "B") if a.has_devices else ("B", "A")
            yield (
                f"times are those of device work in {with_devices} and of the host in {without}: whether compute, "
                "communication, and what is neither differ is not known (significant is null); record both in the same way"
            )
        elif self._messages_differ:
            what = "bubble and what causes have of waits" if a.has_devices else "compute, bubble and causes"
            yield (
                f"transfers are known of {a.known_transfers:.0%} of the messages between stages in A and of "
                f"{b.known_transfers:.0%} in B: whether {what} differ is not known (significant is null), as waits for "
                "other messages count to them; record both in the same way"
            )
        if not a.settings or not b.settings or a.settings == b.settings != _VARIOUS:
            return
        what = "the change may be that of the recording alone"
        if a.deviation is not None and b.deviation is not None:
            is_out = a.is_unrecorded or b.is_unrecorded
            what = (
                "what that is has been taken out, and its error is in the interval"
                if is_out
                else "which is allowed for"
            )
        yield (
            f"the recordings differ: {a.settings} in A, {b.settings} in B, which make steps longer by different times; {what}; "
            "record both alike"
        )
