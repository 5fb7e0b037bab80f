"""Names that differ in their numbers alone, read by columns: a trace has a name for each mark, but few shapes of names.

pp1:2F3 chunk=0 phase=steady step=7        shape pp0:0F0 chunk=0 phase=steady step=0, numbers 1 2 3 0 7
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pptrace.model.tables import Int64

MOST_DIGITS = 18
"""Digits of a number that fits int64."""
_ZERO, _NEWLINE = ord("0"), ord("\n")
_ZEROS = bytes.maketrans(b"0123456789", b"0" * 10)


@dataclass(frozen=True, slots=True)
class NameShape:
    """Names of one shape: ``text`` with "0" for each number of theirs.

    ``names`` are their indices; ``numbers`` and ``widths`` have a row per name and a column per number: its value, and how many
    digits it is written with.
    """

    text: str
    names: Int64
    numbers: Int64
    widths: Int64

    def where(self, chosen: npt.NDArray[np.bool_]) -> NameShape:
        return NameShape(self.text, self.names[chosen], self.numbers[chosen], self.widths[chosen])


@dataclass(frozen=True, slots=True)
class NameLines:
    """Names as the bytes of one text, a line for each, of those without line breaks; ``names`` are their indices."""

    text: npt.NDArray[np.uint8]
    starts: Int64
    names: Int64

    @classmethod
    def of(cls, names: Sequence[str]) -> NameLines:
        text = "\n".join(names)
        if text.count("\n") >= max(len(names), 1):
            plain = [index for index, name in enumerate(names) if "\n" not in name]
            lines = cls.of([names[index] for index in plain])
            return cls(lines.text, lines.starts, np.array(plain, dtype=np.int64))
        ends = "\n" if names else ""
        codes = np.frombuffer(f"{text}{ends}".encode("utf-8", "surrogatepass"), dtype=np.uint8)
        starts = np.append(0, np.flatnonzero(codes == _NEWLINE) + 1)[:-1]
        return cls(codes, starts, np.arange(len(names)))

    def beginning_with(self, prefix: str) -> npt.NDArray[np.bool_]:
        begins = np.ones(len(self.starts), dtype=np.bool_)
        for position, code in enumerate(prefix.encode()):
            begins &= self.text.take(self.starts + position, mode="clip") == code  # a line break ends a shorter name
        return begins

    def where(self, chosen: npt.NDArray[np.bool_]) -> NameLines:
        lengths = np.diff(np.append(self.starts, len(self.text)))
        text = self.text if chosen.all() else self.text[np.repeat(chosen, lengths)]
        starts = np.cumsum(lengths[chosen]) - lengths[chosen]
        return NameLines(text, starts, self.names[chosen])


def shapes_of(lines: NameLines) -> list[NameShape]:
    """Names by their shapes. Of numbers with more digits than fit int64 the first ones count."""
    if not len(lines.names):
        return []
    text = lines.text
    is_digit = (text - np.uint8(_ZERO)) <= 9
    changes = np.flatnonzero(np.diff(is_digit, prepend=False, append=False))
    starts, ends = changes[::2].copy(), changes[1::2].copy()
    codes, shapes = _codes_of_shapes(text, is_digit, starts)
    first_number = np.searchsorted(starts, lines.starts)
    values, widths = _values(text, starts, ends), ends - starts
    order = np.argsort(codes, kind="stable")
    groups = np.split(order, np.cumsum(np.bincount(codes, minlength=len(shapes)))[:-1])
    parts = []
    for shape, rows in zip(shapes, groups, strict=True):
        index = first_number[rows][:, None] + np.arange(shape.count("0"))
        parts.append(NameShape(shape, lines.names[rows], values[index], widths[index]))
    return parts


def _codes_of_shapes(
    text: npt.NDArray[np.uint8], is_digit: npt.NDArray[np.bool_], starts: Int64
) -> tuple[Int64, list[str]]:
    """(index of each line's shape, the shapes)."""
    kept = ~is_digit
    kept[starts] = True
    lines = text[kept].tobytes().translate(_ZEROS).split(b"\n")
    lines.pop()  # behind the last line break
    number: defaultdict[bytes, int] = defaultdict()
    number.default_factory = number.__len__
    codes = np.fromiter(map(number.__getitem__, lines), np.int64, len(lines))
    return codes, [shape.decode("utf-8", "surrogatepass") for shape in number]


def _values(text: npt.NDArray[np.uint8], starts: Int64, ends: Int64) -> Int64:
    """The numbers that runs of digits are, of their first digits where they have more than fit."""
    values = (text[starts] - np.uint8(_ZERO)).astype(np.int64)
    at = np.flatnonzero(ends - starts > 1)
    for digit in range(1, MOST_DIGITS):
        if not len(at):
            break
        values[at] = values[at] * 10 + (text[starts[at] + digit] - np.uint8(_ZERO))
        at = at[ends[at] - starts[at] > digit + 1]
    return values
