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
