"""Names that differ in their numbers alone, read by columns: a trace has a name for each mark, but few shapes of names.

pp1:2F3 chunk=0 phase=steady step=7        shape pp0:0F0 chunk=0 phase=steady step=0, numbers 1 2 3 0 7
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pptrace.model.tables import Int64

MOST_DIGITS = 18
"""Digits of a number that fits int64."""
_ZERO, _NEWLINE = ord("0"), ord("\n")
_DIGITS = re.compile(rb"[0-9]+")
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
    layout_of_line, layouts = _layouts_of(lines.text)
    texts = [_DIGITS.sub(b"0", layout) for layout in layouts]
    shapes = {text: index for index, text in enumerate(dict.fromkeys(texts))}
    shape_of_line = np.array([shapes[text] for text in texts])[layout_of_line]
    order, counts = np.argsort(shape_of_line, kind="stable"), np.bincount(shape_of_line)
    firsts = np.cumsum(counts) - counts
    row_of_line = np.empty_like(order)
    row_of_line[order] = np.arange(len(order)) - np.repeat(firsts, counts)
    parts = [
        NameShape(text.decode("utf-8", "surrogatepass"), lines.names[of_shape], *_columns_for(text, len(of_shape)))
        for text, of_shape in zip(shapes, np.split(order, firsts[1:]), strict=True)
    ]
    by_layout = np.split(np.argsort(layout_of_line, kind="stable"), np.cumsum(np.bincount(layout_of_line))[:-1])
    for layout, text, of_layout in zip(layouts, texts, by_layout, strict=True):
        part, rows, starts = parts[shapes[text]], row_of_line[of_layout], lines.starts[of_layout]
        for column, digits in enumerate(_DIGITS.finditer(layout)):
            part.widths[rows, column] = digits.end() - digits.start()
            part.numbers[rows, column] = _numbers_at(lines.text, starts + digits.start(), digits.end() - digits.start())
    return parts


def _layouts_of(text: npt.NDArray[np.uint8]) -> tuple[Int64, list[bytes]]:
    """(index of each line's layout, the layouts): what lines are with "0" for each digit."""
    lines = text.tobytes().translate(_ZEROS).split(b"\n")
    lines.pop()  # behind the last line break
    number: defaultdict[bytes, int] = defaultdict()
    number.default_factory = number.__len__
    return np.fromiter(map(number.__getitem__, lines), np.int64, len(lines)), list(number)


def _columns_for(text: bytes, num_names: int) -> tuple[Int64, Int64]:
    """(numbers, widths) of a shape, to be filled."""
    shape = num_names, text.count(b"0")
    return np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)


def _numbers_at(text: npt.NDArray[np.uint8], starts: Int64, width: int) -> Int64:
    """The numbers of one width that begin at some places, of their first digits where they have more than fit."""
    values = (text[starts] - np.uint8(_ZERO)).astype(np.int64)
    for digit in range(1, min(width, MOST_DIGITS)):
        values *= 10
        values += text[starts + digit] - np.uint8(_ZERO)
    return values
