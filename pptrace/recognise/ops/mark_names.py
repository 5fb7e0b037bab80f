"""The names of marks read by columns: one shape at a time, by the grammar of :mod:`pptrace.marks`.

A trace has a name for each mark, but few shapes of names, which differ in their numbers alone:

    pp1:2F3 chunk=0 phase=steady step=7        shape pp0:0F0 chunk=0 phase=steady step=0, numbers 1 2 3 0 7

In a shape's text every number is replaced by a *tag*, a number that says its column. The mark which that text reads as has tags
for numbers, so that each of its fields says which column it is: the grammar is in one place, and costs nothing per name.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from pptrace.marks import PREFIX, VERSION, Mark, UnknownMark, format_mark, is_mark, parse_mark
from pptrace.model.tables import Bool, Int64
from pptrace.slices import distinct_rows, places_of_each

_MOST_DIGITS = 18
"""Digits of a number that fits int64."""
_ZERO, _NEWLINE = ord("0"), ord("\n")
_DIGITS = re.compile(rb"[0-9]+")
_ZEROS = bytes.maketrans(b"0123456789", b"0" * 10)


class NameShape(Struct, frozen=True):
    """Names of one shape: ``text`` with "0" for each number of theirs.

    ``names`` are their indices; ``numbers`` and ``widths`` have a row per name and a column per number: its value, and how many
    digits it is written with.
    """

    text: str
    names: Int64
    numbers: Int64
    widths: Int64

    def where(self, chosen: Bool) -> NameShape:
        return NameShape(self.text, self.names[chosen], self.numbers[chosen], self.widths[chosen])


class NameLines(Struct, frozen=True):
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

    def beginning_with(self, prefix: str) -> Bool:
        begins = np.ones(len(self.starts), dtype=np.bool_)
        for position, code in enumerate(prefix.encode()):
            begins &= self.text.take(self.starts + position, mode="clip") == code  # a line break ends a shorter name
        return begins

    def where(self, chosen: Bool) -> NameLines:
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
    by_shape = list(places_of_each(shape_of_line).values())
    row_of_line = np.empty(len(shape_of_line), dtype=np.int64)
    row_of_line[np.concatenate(by_shape)] = np.concatenate([np.arange(len(of_shape)) for of_shape in by_shape])
    parts = [
        NameShape(
            text.decode("utf-8", "surrogatepass"),
            lines.names[of_shape],
            *(np.empty((len(of_shape), text.count(b"0")), dtype=np.int64) for _ in range(2)),  # filled below
        )
        for text, of_shape in zip(shapes, by_shape, strict=True)
    ]
    for layout, text, of_layout in zip(layouts, texts, places_of_each(layout_of_line).values(), strict=True):
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


def _numbers_at(text: npt.NDArray[np.uint8], starts: Int64, width: int) -> Int64:
    """The numbers of one width that begin at some places, of their first digits where they have more than fit."""
    values = (text[starts] - np.uint8(_ZERO)).astype(np.int64)
    for digit in range(1, min(width, _MOST_DIGITS)):
        values *= 10
        values += text[starts + digit] - np.uint8(_ZERO)
    return values


_SHORT, _WIDE = 10**8, 10**17
"""The tag of column 0; a grammar that reads it reads every number of so many digits or fewer in its stead."""
_SHORT_DIGITS = 9
_P2P = re.compile("pp0:p0p ")
_TAGS = re.compile(r"1(?:0{9})?000\d{5}")

Texts = npt.NDArray[np.object_]


class MarkShape(Struct, frozen=True):
    """Marks of one shape: ``mark`` has tags for numbers. ``names`` are their indices among the names that were read."""

    mark: Mark
    _shape: NameShape

    @property
    def names(self) -> Int64:
        return self._shape.names

    def column(self, tag: int | None) -> Int64:
        """The numbers of a field; −1 where the shape has none."""
        return np.full(len(self.names), -1) if tag is None else self._shape.numbers[:, _column(tag)]

    def texts(self, tagged: str, with_zeros: bool) -> Texts:
        """The texts of a field; ``with_zeros`` in front of numbers, as they are written."""
        tags = _columns(tagged)
        pieces = _TAGS.split(tagged)
        numbers, widths = self._shape.numbers[:, tags], self._shape.widths[:, tags] * with_zeros
        rows, row_of = distinct_rows(np.hstack((numbers, widths)))
        distinct = np.empty(len(rows), dtype=object)
        for index, row in enumerate(rows):
            words = (f"{number:0{width}d}" for number, width in zip(row[: len(tags)], row[len(tags) :], strict=True))
            distinct[index] = pieces[0] + "".join(map(str.__add__, words, pieces[1:]))
        return distinct[row_of]

    def canonical(self) -> tuple[str, Int64]:
        """(a text, numbers by name): two marks are equal where both are."""
        text = format_mark(self.mark)
        return _TAGS.sub("0", text), self._shape.numbers[:, _columns(text)]

    def are_names_distinct_marks(self) -> bool:
        """Return whether different names of the shape are different marks for sure: no number has zeros in front, or is not
        read.
        """
        numbers, widths = self._shape.numbers, self._shape.widths
        is_padded = (widths > 1) & (numbers < 10 ** (widths - 1))
        unread = sorted(set(range(numbers.shape[1])).difference(_columns(format_mark(self.mark))))
        return not is_padded.any() and bool((numbers[:, unread] == numbers[:1, unread]).all())


def equal_marks(shapes: Sequence[MarkShape], num_names: int, kinds: Any) -> Int64:
    """Number of each name, the same for equal marks of some types; −1 for the others."""
    numbers = np.full(num_names, -1)
    by_text: dict[str, list[MarkShape]] = {}
    for shape in shapes:
        if isinstance(shape.mark, kinds):
            by_text.setdefault(shape.canonical()[0], []).append(shape)
    first = 0
    for alike in by_text.values():
        names = np.concatenate([shape.names for shape in alike])
        if len(alike) == 1 and alike[0].are_names_distinct_marks():
            numbers[names] = first + np.arange(len(names))
        else:
            values = np.concatenate([shape.canonical()[1] for shape in alike])
            numbers[names] = first + distinct_rows(values)[1]
        first += len(names)
    return numbers


def read_marks(names: Sequence[str]) -> tuple[list[MarkShape], dict[int, UnknownMark]]:
    """(the shapes of those names of a trace that are marks and can be read, by their index those that cannot)."""
    lines = NameLines.of(names)
    is_plain = lines.beginning_with(PREFIX)
    is_line = np.zeros(len(names), dtype=np.bool_)
    is_line[lines.names] = True
    maybe = np.append(np.flatnonzero(~is_line), lines.names[lines.beginning_with("pp") & ~is_plain])
    alone = [index for index in maybe.tolist() if is_mark(names[index])]
    shapes: list[MarkShape] = []
    for shape in shapes_of(lines.where(is_plain)):
        for part, is_wide in _by_widths(shape):
            mark = _tagged_mark(part, is_wide)
            if mark is None or (part.widths > _MOST_DIGITS).any():
                alone += part.names.tolist()
            else:
                shapes.append(MarkShape(mark, part))
    marks = {index: parse_mark(names[index]) for index in sorted(alone)}
    unreadable = {index: mark for index, mark in marks.items() if isinstance(mark, UnknownMark)}
    canonical = {
        index: format_mark(mark)
        for index, mark in marks.items()
        if mark is not None and not isinstance(mark, UnknownMark)
    }
    index_of = np.array(list(canonical), dtype=np.int64)
    for shape in shapes_of(NameLines.of(list(canonical.values()))):
        for part, is_wide in _by_widths(replace(shape, names=index_of[shape.names])):
            mark = _tagged_mark(part, is_wide)
            assert mark is not None, part.text
            shapes.append(MarkShape(mark, part))
    return shapes, unreadable


def _by_widths(shape: NameShape) -> Iterator[tuple[NameShape, Sequence[bool]]]:
    """The names of a shape by which of their numbers have more digits than a short tag."""
    is_wide = shape.widths > _SHORT_DIGITS
    if not is_wide.any():
        yield shape, [False] * is_wide.shape[1]
        return
    for pattern in np.unique(is_wide, axis=0):
        yield shape.where((is_wide == pattern).all(axis=1)), pattern.tolist()


def _tagged_mark(shape: NameShape, is_wide: Sequence[bool]) -> Mark | None:
    """The mark of a shape whose names begin with :data:`PREFIX`, with tags for numbers; None where it does not read as one.

    The digit in the word ``p2p`` is no number.
    """
    words = [str((_WIDE if wide else _SHORT) + column) for column, wide in enumerate(is_wide)]
    words[0] = str(VERSION)
    if _P2P.match(shape.text) and (shape.numbers[:, 1] == 2).all():
        words[1] = "2"
    following = iter(words)
    mark = parse_mark(re.sub("0", lambda _: next(following), shape.text))
    return None if isinstance(mark, UnknownMark) else mark


def _column(tag: int) -> int:
    return tag - (_WIDE if tag >= _WIDE else _SHORT)


def _columns(tagged: str) -> list[int]:
    return [_column(int(tag)) for tag in _TAGS.findall(tagged)]
