"""Split a text into its JSON values: one per line, each over several lines, or between lines of a log.

    text  = { line }
    value = line                               compact: JSON lines, or a whole document
          | line { line }                      indented: until its brackets are closed
    any other line is skipped

A truncated or damaged value can be closed after its last complete element (:func:`close_brackets`).

Numbers become int64 exactly: times digit by digit. float64 resolves only a quarter of a microsecond at today's epoch (1.7e15 µs),
so no timestamp is converted through it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from decimal import ROUND_HALF_EVEN, Context, Decimal, Overflow
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.errors import TraceError
from pptrace.ingest.common.byte_source import ByteSource, unreadable
from pptrace.model.tables import Int64
from pptrace.regular import read_regular

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]')
_CLOSING = {b"{": b"}", b"[": b"]"}
_CONTINUES = (b",", b"[", b":", b"{")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LONG_BYTES = 1 << 16
"""A longer line that ends with a closing bracket is taken as one value: indented JSON has no lines of this length."""


def opens_json(start: bytes) -> bool:
    """Return whether a file that begins with these bytes may be an object or a list in JSON."""
    return start.removeprefix(_BYTE_ORDER_MARK).lstrip()[:1] in (b"{", b"[")


def object_of(text: object) -> dict[str, Any]:
    """The object that a text in JSON is; {} of anything else."""
    with suppress(ValueError, RecursionError):
        value = json.loads(text) if isinstance(text, str | bytes) else None
        return value if isinstance(value, dict) else {}
    return {}


def object_in(path: Path) -> dict[str, Any]:
    """The object in a file of JSON; {} where there is none."""
    with suppress(OSError, ValueError):
        return object_of(read_regular(path))
    return {}


def document_in(path: Path, expected: str) -> Any:
    """The value in a file of JSON.

    Raises:
        TraceError: it cannot be read, or is damaged; ``expected`` is what the line says then.
    """
    try:
        return json.loads(read_regular(path))
    except OSError as err:
        raise unreadable(path, err) from err
    except (ValueError, RecursionError) as err:
        raise TraceError(f"{path}: damaged JSON ({err}); expected a complete {expected}") from err


def split_values(source: ByteSource) -> Iterator[tuple[bytes, bool]]:
    """Yield (text, whether its brackets are closed) of the values in a file, in order; other lines are skipped."""
    pending: list[bytes] = []
    depth = 0
    for line in _lines(source):
        # An unindented brace begins another value, where the one before was truncated.
        is_next = line[:1] == b"{" and (len(line) > 1 or not (pending and pending[-1].rstrip().endswith(_CONTINUES)))
        if pending and pending[0][:1] == b"{" and is_next:
            yield b"\n".join(pending), False
            pending, depth = [], 0
        if not pending and line[:1] not in (b"{", b"["):
            continue
        pending.append(line)
        looks_closed = len(pending) == 1 and len(line) > 1 and line[-1:] == _CLOSING[line[:1]]
        if not looks_closed or (len(line) <= _LONG_BYTES and _num_open(line) != 0):
            depth += _num_open(_STRING.sub(b"", line) if b'"' in line else line)  # no string of JSON spans lines
        if depth <= 0:
            yield b"\n".join(pending), True
            pending, depth = [], 0
    if pending:
        yield b"\n".join(pending), False


def _num_open(line: bytes) -> int:
    return line.count(b"{") + line.count(b"[") - line.count(b"}") - line.count(b"]")


def _lines(source: ByteSource) -> Iterator[bytes]:
    """Yield the lines of a file without line ends; the last one may be truncated."""
    partial: list[bytes] = []
    is_first = True
    while piece := source.read():
        if is_first:
            piece, is_first = piece.removeprefix(_BYTE_ORDER_MARK), False
        first, *others = piece.split(b"\n")
        partial.append(first)
        if not others:
            continue
        yield b"".join(partial).rstrip()
        yield from (line.rstrip() for line in others[:-1])
        partial = [others[-1]]
    if last := b"".join(partial).rstrip():
        yield last


def close_brackets(text: bytes) -> bytes | None:
    """Cut ``text`` after its last complete object or list and close the open brackets; None where it has none.

    The text from an unmatched closing bracket on is dropped.
    """
    stack: list[bytes] = []
    last_complete: tuple[int, tuple[bytes, ...]] | None = None
    for token in _TOKEN.finditer(text):
        bracket = token[0]
        if bracket in _CLOSING:
            stack.append(bracket)
        elif bracket[:1] != b'"':
            if not stack or _CLOSING[stack[-1]] != bracket:
                break
            stack.pop()
            last_complete = token.end(), tuple(stack)
            if not stack:
                break
    if last_complete is None:
        return None
    end, open_brackets = last_complete
    return text[:end] + b"".join(_CLOSING[bracket] for bracket in reversed(open_brackets))


Scalar: TypeAlias = int | float | str | None

MISSING = int(np.iinfo(np.int64).min)
"""Sentinel of a missing or malformed number."""
ABSURD = MISSING + 1
"""Sentinel of a number beyond every clock's range."""
LIMIT_NS = 4 * 10**18
"""Largest time, absolute or before a base is added (the year 2096); the sum of two still fits int64."""

_FAST_CHARACTERS = b"0123456789.,-"
_NUMBERS = re.compile(rb"-?\d+(?:\.\d+)?(?:,-?\d+(?:\.\d+)?)*")
_MAX_WIDTH = 20  # longer numbers may not fit int64
_COMMA, _MINUS, _POINT = b",-."
_POWERS = np.array([10**exponent for exponent in range(19)], dtype=np.int64)
_WIDE = Context(prec=80)
_NUMBER_AT_END = re.compile(r"(?:^|\D)(\d{1,18})$", re.ASCII)


def nanoseconds(numbers: Sequence[bytes]) -> Int64:
    """Convert times in µs, each as its JSON text (quoted or not), to ns.

    Exact to the last digit; below a nanosecond rounds half to even. :data:`MISSING` where a text is no number, :data:`ABSURD`
    where it is beyond :data:`LIMIT_NS`.
    """
    if not numbers:
        return np.zeros(0, dtype=np.int64)
    text = b",".join(numbers)
    if b'"' in text:
        text = text.replace(b'"', b"")
        plain = _NUMBERS.fullmatch(text) is not None
    else:
        plain = not text.translate(None, _FAST_CHARACTERS)
    fast = _plain_nanoseconds(text) if plain else None
    if fast is None or len(fast) != len(numbers):
        return np.array([exact_nanoseconds(number) for number in numbers], dtype=np.int64)
    return fast


def _plain_nanoseconds(text: bytes) -> Int64 | None:
    """Convert plain decimal numbers vectorised; None where some need :func:`exact_nanoseconds`."""
    codes = np.frombuffer(text, dtype=np.uint8)
    ends = np.append(np.flatnonzero(codes == _COMMA), len(codes))
    widths = ends[1:] - ends[:-1] - 1
    if ends[0] < 1 or ends[0] > _MAX_WIDTH or (len(widths) and (widths.min() < 1 or widths.max() > _MAX_WIDTH)):
        return None
    points = np.flatnonzero(codes == _POINT)
    if len(points) == len(ends) and np.array_equal(points, ends - 4) and b"-" not in text:  # as Kineto writes them
        result: Int64 = np.fromstring(text.replace(b".", b""), dtype=np.int64, sep=",")
        return None if (result > LIMIT_NS).any() else result
    owner = np.searchsorted(ends, points)
    minuses = np.flatnonzero(codes[1:] == _MINUS)
    if (owner[1:] == owner[:-1]).any() or (len(minuses) and (codes[minuses] != _COMMA).any()):
        return None
    try:
        mantissa: Int64 = np.fromstring(text.replace(b".", b""), dtype=np.int64, sep=",")
    except ValueError:  # a sign or a point alone
        return None
    decimals = np.zeros(len(ends), dtype=np.int64)
    decimals[owner] = ends[owner] - points - 1
    scale = _POWERS[np.maximum(3 - decimals, 0)]
    limit = LIMIT_NS // scale
    if ((mantissa > limit) | (mantissa < -limit)).any():  # not by abs(): overflowed values are at int64's limits
        return None
    result = mantissa * scale
    finer = np.flatnonzero(decimals > 3)
    if len(finer):
        divisors = _POWERS[decimals[finer] - 3]
        quotient, remainder = np.divmod(mantissa[finer], divisors)
        half = divisors // 2  # of a power of ten, so this is exact; half rounds to even
        result[finer] = quotient + ((remainder > half) | ((remainder == half) & (quotient % 2 == 1)))
    return result


def exact_nanoseconds(number: bytes | str, power: int = 3) -> int:
    """Convert one number through Decimal: exponents, many digits, quoted text, null. Its unit is 10**power ns."""
    text = number if isinstance(number, str) else bytes(number).strip(b'"').decode("ascii", "replace")
    try:
        value = Decimal(text.strip())
        if not value.is_finite():
            return MISSING
        if _WIDE.abs(value) > LIMIT_NS // 10**power:
            return ABSURD
        return int(value.scaleb(power, _WIDE).to_integral_value(ROUND_HALF_EVEN, _WIDE))
    except Overflow:
        return ABSURD
    except (ArithmeticError, ValueError):
        return MISSING


UNITS = {"ns": 0, "us": 3, "ms": 6, "s": 9}
"""Power of ten between a unit and ns."""


def to_ns(column: pd.Series[Any], unit: str) -> tuple[Int64, npt.NDArray[np.bool_]]:
    """Convert a column in any unit to (ns, is_valid), shape (n,) each; an invalid value or one beyond int64 becomes 0.

    Integers are multiplied, text is converted digit by digit. Binary floats, as in Parquet files, are split into an integer part
    and a fraction, so that the result is the ns nearest to the float's value.
    """
    power = UNITS[unit]
    limit = LIMIT_NS // 10**power
    if pd.api.types.is_integer_dtype(column.dtype) and not column.isna().any():
        values = column.to_numpy()
        is_valid = (values <= limit) & (values >= -limit) if values.dtype.kind == "i" else values <= limit
        return np.where(is_valid, values, 0).astype(np.int64) * 10**power, is_valid
    if pd.api.types.is_float_dtype(column.dtype):
        floats = column.to_numpy(dtype=np.float64, na_value=np.nan)
        is_valid = np.isfinite(floats) & (np.abs(floats) <= LIMIT_NS / 10**power)
        fraction, integer = np.modf(np.where(is_valid, floats, 0.0))
        return integer.astype(np.int64) * 10**power + np.rint(fraction * 10**power).astype(np.int64), is_valid
    times = np.array([exact_nanoseconds(str(value), power) for value in column.tolist()], dtype=np.int64)
    is_valid = times > ABSURD
    return np.where(is_valid, times, 0), is_valid


class Integers(dict[Scalar, int]):
    """The int64 of a process, thread, device or stream id as producers write it: ``7``, ``"7"``, ``"stream 7"``; else -1.

    Caches results, since ids repeat.
    """

    def __call__(self, values: Sequence[Scalar]) -> Int64:
        try:
            return np.array(values, dtype=np.int64)
        except (TypeError, ValueError, OverflowError):
            return np.fromiter(map(self.__getitem__, values), np.int64, len(values))

    def __missing__(self, value: Scalar) -> int:
        number = -1
        if isinstance(value, str):
            match = _NUMBER_AT_END.search(value.strip())
            number = int(match[1]) if match else -1
        elif isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
            number = int(value)
        number = number if -(2**63) <= number < 2**63 else -1
        self[value] = number
        return number
