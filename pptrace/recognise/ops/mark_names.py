"""The names of marks read by columns: one shape at a time, by the grammar of :mod:`pptrace.marks`.

In a shape's text every number is replaced by a *tag*, a number that says its column. The mark which that text reads as has tags
for numbers, so that each of its fields says which column it is: the grammar is in one place, and costs nothing per name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pptrace.marks import PREFIX, VERSION, Mark, UnknownMark, format_mark, is_mark, parse_mark
from pptrace.model.tables import Int64
from pptrace.recognise.ops.name_shapes import MOST_DIGITS, NameLines, NameShape, shapes_of
from pptrace.slices import distinct_rows

_SHORT, _WIDE = 10**8, 10**17
"""The tag of column 0; a grammar that reads it reads every number of so many digits or fewer in its stead."""
_SHORT_DIGITS = 9
_P2P = re.compile("pp0:p0p ")
_TAGS = re.compile(r"1(?:0{9})?000\d{5}")

Texts = npt.NDArray[np.object_]


@dataclass(frozen=True, slots=True)
class MarkShape:
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


@dataclass(frozen=True, slots=True)
class MarkNames:
    """The names that are marks: shapes of those that can be read, and by their index those that cannot."""

    shapes: Sequence[MarkShape]
    unreadable: Mapping[int, UnknownMark]

    def equal_marks(self, num_names: int, kinds: Any) -> Int64:
        """Number of each name, the same for equal marks of some types; −1 for the others."""
        numbers = np.full(num_names, -1)
        by_text: dict[str, list[MarkShape]] = {}
        for shape in self.shapes:
            if isinstance(shape.mark, kinds):
                by_text.setdefault(shape.canonical()[0], []).append(shape)
        first = 0
        for shapes in by_text.values():
            names = np.concatenate([shape.names for shape in shapes])
            if len(shapes) == 1 and shapes[0].are_names_distinct_marks():
                numbers[names] = first + np.arange(len(names))
            else:
                values = np.concatenate([shape.canonical()[1] for shape in shapes])
                numbers[names] = first + distinct_rows(values)[1]
            first += len(names)
        return numbers


def read_marks(names: Sequence[str]) -> MarkNames:
    """Read those names of a trace that are marks."""
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
            if mark is None or (part.widths > MOST_DIGITS).any():
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
    return MarkNames(shapes, unreadable)


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
    mark = parse_mark(_with_words(shape.text, words))
    return None if isinstance(mark, UnknownMark) else mark


def _with_words(text: str, words: Sequence[str]) -> str:
    """A shape's text with words for its zeros."""
    following = iter(words)
    return re.sub("0", lambda _: next(following), text)


def _column(tag: int) -> int:
    return tag - (_WIDE if tag >= _WIDE else _SHORT)


def _columns(tagged: str) -> list[int]:
    return [_column(int(tag)) for tag in _TAGS.findall(tagged)]
