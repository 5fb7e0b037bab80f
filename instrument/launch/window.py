"""Window of the steps that are profiled.

Grammar of ``--steps``:

    window = first ":" stop | "all"      first inclusive, stop exclusive, both counted from 0, first < stop
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pptrace.errors import UsageError


@dataclass(frozen=True, slots=True)
class StepWindow:
    """The steps ``first`` … ``stop`` − 1; without an end where ``stop`` is None."""

    first: int
    stop: int | None
    is_default: bool = False
    """Nobody asked for these steps: a shorter run has others recorded."""

    def within(self, num_steps: int) -> StepWindow:
        """The window of a run that has announced so many steps: one that nobody asked for is moved into it, and leaves a step
        that is not recorded at the end.
        """
        if not self.is_default or self.stop is None or num_steps > self.stop:
            return self
        first = min(self.first, max(num_steps // 3, min(1, num_steps - 1)))
        return StepWindow(first, min(first + self.stop - self.first, max(num_steps - 1, first + 1)), is_default=True)

    @property
    def whole_run(self) -> bool:
        """Return whether everything from the start of the script to its end is profiled, not only steps."""
        return self.stop is None

    def __contains__(self, step: int) -> bool:
        return self.first <= step and (self.stop is None or step < self.stop)

    def __str__(self) -> str:
        return "all" if self.stop is None else f"{self.first}:{self.stop}"


DEFAULT_WINDOW = StepWindow(4, 14, is_default=True)
"""Skips two warm-up steps, which pay for connections, allocators and whatever else is made on first use, one that is timed
without a profiler, and one in which the profiler is prepared.
"""


def parse_ranks(text: str) -> frozenset[int] | None:
    """Read the ranks that are recorded: numbers and ranges with commas between them, such as ``0,4,8-11``; None for "all".

    Raises:
        UsageError: the text is neither.
    """
    if text == "all":
        return None
    ranks: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise UsageError(
                f"--profile-ranks {text!r}: expected ranks such as '0,4,8-11', 'all', or (of `pptrace run`) 'auto'"
            )
        ranks.update(range(first, last + 1))
    return frozenset(ranks)


def chosen_window(steps: str | None, *, hooks: bool) -> StepWindow:
    """The window that ``steps`` asks for; of a run that nothing asks for one the default, without hooks all of it.

    Raises:
        UsageError: as :func:`parse_steps` says.
    """
    return parse_steps(steps or "all") if steps or not hooks else DEFAULT_WINDOW


def parse_steps(text: str) -> StepWindow:
    """Read a step window; the whole text must match.

    Raises:
        UsageError: the text is no window, or an empty one.
    """
    if text == "all":
        return StepWindow(0, None)
    match = re.fullmatch(r"(\d+):(\d+)", text, re.ASCII)
    if match is None:
        raise UsageError(f"--steps {text!r}: expected FIRST:STOP, such as '2:5', or 'all'")
    window = StepWindow(int(match[1]), int(match[2]))
    if window.stop is not None and window.first >= window.stop:
        raise UsageError(
            f"--steps {text!r} holds no step: the second number is the first step not profiled; "
            f"did you mean '{window.first}:{window.first + 1}'?"
        )
    return window
