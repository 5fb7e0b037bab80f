"""Options of a question from the texts and numbers of a form or of an address, and as options of a command."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import Any

from pptrace.api.options import Option, Value, read_bytes
from pptrace.errors import UsageError
from pptrace.schedule.layout import read_split

_MOST_NUMBER = 1e12
_MOST_LAYERS = 2_000
"""More are not divided while a page waits."""


def values_of(options: Mapping[str, Option], form: Mapping[str, object]) -> dict[str, Any]:
    """The values of the fields that are not empty, by the names of their options in Python; ``options`` are by those of fields.

    Raises:
        UsageError: a field is no number, no size, or no layers of stages.
    """
    return {
        one.name: _READ[one.takes](name, value)
        for name, one in options.items()
        if (value := form.get(name)) not in (None, "")
    }


def words_of(options: Mapping[str, Option], form: Mapping[str, object]) -> str:
    """The same as options of a command."""
    words: list[str] = []
    for name, one in options.items():
        if (value := form.get(name)) in (None, ""):
            continue
        if one.takes is Value.FLAG:
            words.append(f"--{one.flag}")
            continue
        parts = str(value).split(",") if one.takes is Value.NAMES else [str(value)]
        words += [f"--{one.flag} {shlex.quote(part)}" for part in parts]
    return " ".join(words)


def number(name: str, value: object) -> float:
    """A number.

    Raises:
        UsageError: it is none.
    """
    try:
        return float(str(value))
    except ValueError:
        raise UsageError(f"{name} is {str(value)[:40]!r}; expected a number") from None


def _whole(name: str, value: object) -> int:
    found = number(name, value)
    if not found.is_integer() or abs(found) > _MOST_NUMBER:
        raise UsageError(f"{name} is {found:g}; expected a whole number")
    return int(found)


def _split(name: str, value: object) -> tuple[int, ...]:
    numbers = read_split(str(value), name)
    if sum(numbers) > _MOST_LAYERS:
        raise UsageError(f"{name} has {sum(numbers):,} layers; expected at most {_MOST_LAYERS:,}")
    return numbers


_READ: Mapping[Value, Callable[[str, object], Any]] = {
    Value.TEXT: lambda _, value: str(value),
    Value.NAMES: lambda _, value: tuple(str(value).split(",")),
    Value.WHOLE: _whole,
    Value.DEPTH: _whole,
    Value.TIMES: number,
    Value.SHARE: number,
    Value.MILLISECONDS: number,
    Value.SIZE: lambda name, value: read_bytes(name, str(value)[:40]),
    Value.SPLIT: _split,
    Value.FLAG: lambda _, value: bool(value),
}
