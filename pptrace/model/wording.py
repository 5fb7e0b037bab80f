"""Numbers and lists in sentences."""

from __future__ import annotations

from collections.abc import Iterable


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """ "1 rank", "4 ranks"."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def listed(items: Iterable[object], most: int | None = None, *, count: int | None = None) -> str:
    """ "0, 3, 5 and 4 more": at most so many by name; ``count`` is how many there are, where ``items`` are not all."""
    texts = list(map(str, items))
    total = len(texts) if count is None else count
    shown = texts if most is None else texts[:most]
    return ", ".join(shown) + (f" and {total - len(shown)} more" if total > len(shown) else "")


def as_ranges(numbers: Iterable[int], most: int = 8) -> str:
    """ "0, 3, 5 to 9 and 4 more": numbers in order, neighbours as one part; parts beyond so many are counted."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if not runs or number != runs[-1][-1] + 1:
            runs.append([])
        runs[-1].append(number)
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs[:most]]
    rest = sum(map(len, runs[most:]))
    return ", ".join(parts) + (f" and {rest} more" if rest else "")


def milliseconds(ns: float | None) -> str:
    """A time in ms, without its unit: whole ones from a second on, and down to microseconds below a tenth of one."""
    if ns is None:
        return "–"
    size = abs(ns)
    digits = 0 if size >= 1e9 else 2 if size >= 1e5 or size == 0 else 3
    return f"{round(ns / 1e6, digits) + 0.0:,.{digits}f}"  # a sum of 0.0 is no -0.0


def signed_milliseconds(ns: float) -> str:
    """A difference of times as :func:`milliseconds` has it, with its sign."""
    text = milliseconds(ns)
    return text if text.startswith("-") else f"+{text}"
