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


def numbered(numbers: Iterable[int], most: int = 8) -> str:
    """ "0, 3, 5 to 9 and 4 more": numbers in order, neighbours as one part; parts beyond so many are counted."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if not runs or number != runs[-1][-1] + 1:
            runs.append([])
        runs[-1].append(number)
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs[:most]]
    rest = sum(map(len, runs[most:]))
    return ", ".join(parts) + (f" and {rest} more" if rest else "")
