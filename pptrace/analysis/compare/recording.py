"""Recordings of runs, as far as their parts depend on them: another recording of the same run has other parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pptrace.analysis.compare.figures import BUBBLE, CAUSE, COMPUTE, EXPOSED, Place
from pptrace.analysis.matrix.step_matrix import StepMatrix
from pptrace.analysis.result import StepReport

_MOST_APART = 0.01
"""Difference of the shares of known transfers from which on it changes what is bubble."""
_WITH_WAITS = ("communication", "host", "unexplained")
"""Causes that have in them what is not known of messages, on devices too."""


@dataclass(frozen=True, slots=True)
class Recording:
    """``known_transfers`` is the share of messages between stages whose transfer is known, None where the plan has none or is
    not known; ``has_devices`` says whether times are those of device work.
    """

    known_transfers: float | None
    has_devices: bool


@dataclass(frozen=True, slots=True)
class RecordedApart:
    """Two recordings whose parts differ by what was recorded."""

    a: Recording
    b: Recording

    def lines(self) -> Iterator[str]:
        """Reasons, a line each, for which it is not known whether parts differ."""
        if self._devices_differ:
            with_devices, without = ("A", "B") if self.a.has_devices else ("B", "A")
            yield (
                f"times are those of device work in {with_devices} and of the host in {without}: whether compute, bubble, "
                "communication and causes differ is not known (significant is null); record both in the same way"
            )
        elif self._messages_differ:
            what = "bubble and what causes have of waits" if self.a.has_devices else "compute, bubble and causes"
            yield (
                f"transfers are known of {self.a.known_transfers:.0%} of the messages between stages in A and of "
                f"{self.b.known_transfers:.0%} in B: whether {what} differ is not known (significant is null), as waits for "
                "other messages count to them; record both in the same way"
            )

    def hides(self, name: str, place: Place) -> bool:
        """Return whether a part may differ by the recording alone."""
        if self._devices_differ:
            return name in (COMPUTE, BUBBLE, EXPOSED, CAUSE)
        if not self._messages_differ:
            return False
        if self.a.has_devices:
            return name == BUBBLE or (name == CAUSE and dict(place)["cause"] in _WITH_WAITS)
        return name in (COMPUTE, BUBBLE, CAUSE)

    @property
    def _devices_differ(self) -> bool:
        return self.a.has_devices != self.b.has_devices

    @property
    def _messages_differ(self) -> bool:
        of_a, of_b = self.a.known_transfers, self.b.known_transfers
        return of_a is not None and of_b is not None and abs(of_a - of_b) > _MOST_APART


def recording_of(steps: Sequence[StepReport], plans: Sequence[StepMatrix]) -> Recording:
    """The recording of a run.

    Args:
        steps: those that are compared.
        plans: the costs of all whole steps.
    """
    total = sum(costs.transfers.size for costs in plans)
    known = sum(int((costs.transfers >= 0).sum()) for costs in plans)
    return Recording(known / total if total else None, any(step.has_devices for step in steps))
