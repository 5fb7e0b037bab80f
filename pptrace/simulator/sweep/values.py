"""Values of a sweep as text.

    values = item {"," item}
    item   = value | low ".." high [":" step | ":x" factor]

``8..64:8`` is 8, 16, …, 64; ``8..64:x2`` is 8, 16, 32, 64; without a step it is 1. A number of microbatches may depend on p:
``p``, ``p-1``, ``4p``, ``2p+1``. Costs may have decimals: ``0..1:0.25``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation

from msgspec import Struct

from pptrace.errors import UsageError

MOST_VALUES = 10_000
"""Most values of one argument: more are a slip of the keyboard."""

SIZES = "whole numbers with commas between them or a range, such as 2,4,8, 8..64:8 or 8..64:x2"
MICROBATCHES = f"{SIZES}, or multiples of p such as p-1 or 4p"
COSTS = "milliseconds with commas between them or a range, such as 0,0.5,1 or 0..1:0.25"

_RANGE = re.compile(r"(?P<low>[^:]+?)\.\.(?P<high>[^:]+?)(?::(?P<times>x?)(?P<step>[^:]+))?")
_OF_P = re.compile(r"(\d{0,9})p(?:([+-])(\d{1,9}))?", re.ASCII)


class Microbatches(Struct, frozen=True, order=True):
    """A number of microbatches that may depend on p: ``times_p`` · p + ``plus``."""

    times_p: int
    plus: int

    def of(self, pp: int) -> int:
        """The number for p ranks."""
        return self.times_p * pp + self.plus

    def __str__(self) -> str:
        if not self.times_p:
            return str(self.plus)
        multiple = f"{'' if self.times_p == 1 else self.times_p}p"
        return multiple if not self.plus else f"{multiple}{'−' if self.plus < 0 else '+'}{abs(self.plus)}"


def read_sizes(name: str, given: object) -> tuple[int, ...]:
    """Whole numbers: one, several, or a text of them; in the order given, each once.

    Raises:
        UsageError: a part is none; the message quotes it.
    """
    return tuple(dict.fromkeys(size for part in _parts(given) for size in _whole(name, part, SIZES)))


def read_microbatches(name: str, given: object) -> tuple[Microbatches, ...]:
    """Numbers of microbatches, as :func:`read_sizes`, or multiples of p.

    Raises:
        UsageError: a part is neither.
    """
    return tuple(dict.fromkeys(number for part in _parts(given) for number in _microbatches(name, part)))


def read_costs(name: str, given: object) -> tuple[float, ...]:
    """Numbers with or without decimals, as :func:`read_sizes`.

    Raises:
        UsageError: a part is none.
    """
    return tuple(dict.fromkeys(float(cost) for part in _parts(given) for cost in _range(name, part, COSTS)))


def _parts(given: object) -> Iterable[object]:
    if isinstance(given, str):
        return [part.strip() for part in given.split(",")]
    return given if isinstance(given, Iterable) else [given]


def _whole(name: str, part: object, expected: str) -> list[int]:
    values = _range(name, part, expected)
    if any(value != value.to_integral_value() for value in values):
        raise _wrong(name, part, expected)
    return [int(value) for value in values]


def _microbatches(name: str, part: object) -> list[Microbatches]:
    if isinstance(part, str) and (match := _OF_P.fullmatch(part.replace("−", "-"))):
        sign = -1 if match[2] == "-" else 1
        return [Microbatches(int(match[1] or 1), sign * int(match[3] or 0))]
    return [Microbatches(0, number) for number in _whole(name, part, MICROBATCHES)]


def _range(name: str, part: object, expected: str) -> list[Decimal]:
    match = _RANGE.fullmatch(part) if isinstance(part, str) else None
    if match is None:
        return [_number(name, part, expected)]
    low, high = (_number(name, match[which], expected, part) for which in ("low", "high"))
    step = Decimal(1) if match["step"] is None else _number(name, match["step"], expected, part)
    factor = step if match["times"] else None
    if high < low or step <= 0 or (factor is not None and (factor <= 1 or low <= 0)):
        raise _wrong(name, part, f"{expected}; a range runs upwards")
    num_values = (
        math.floor((high - low) / step) + 1 if factor is None else math.floor((high / low).ln() / step.ln()) + 2
    )
    if num_values > MOST_VALUES:
        raise _wrong(name, part, f"at most {MOST_VALUES:,} values")
    values = (low + index * step if factor is None else low * factor**index for index in range(num_values))
    return [value for value in values if value <= high]


def _number(name: str, value: object, expected: str, part: object = None) -> Decimal:
    try:
        if isinstance(value, bool) or "_" in (text := str(value)) or not text.isascii():  # Decimal takes 1_0 for 10
            raise TypeError
        number = Decimal(text)
    except (InvalidOperation, TypeError):
        raise _wrong(name, value if part is None else part, expected) from None
    if not number.is_finite():
        raise _wrong(name, value if part is None else part, expected)
    return number


def _wrong(name: str, part: object, expected: str) -> UsageError:
    text = str(part)
    return UsageError(f"{name} has {text[:60]!r}; expected {expected}")
