"""The ops of a rank's step, made when they are asked for: a run has millions, and most reports show none of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pptrace.analysis.result import OpPart, OpSummary
from pptrace.errors import ScheduleError
from pptrace.schedule.actions import parse_action
from pptrace.slices import Slice


class OpRows(Sequence[OpSummary]):
    """Rows of an ops table as :class:`OpSummary`, in their order."""

    __slots__ = ("_first", "_last", "_rows")

    def __init__(self, rows: Slice, first: int, last: int) -> None:
        """The rows from ``first`` to before ``last``."""
        self._rows, self._first, self._last = rows, first, last

    @property
    def rows(self) -> Slice:
        """The table that these rows are part of."""
        return self._rows

    @property
    def place(self) -> tuple[int, int]:
        """Place of these rows in the table: the first, and that after the last."""
        return self._first, self._last

    def within(self, rows: Slice) -> OpRows:
        """The rows in the same places of a table that has the same in them."""
        return OpRows(rows, self._first, self._last)

    def __len__(self) -> int:
        return self._last - self._first

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def __iter__(self) -> Iterator[OpSummary]:
        ops = self._rows.where(slice(self._first, self._last))
        named = ("stage", "chunk", "microbatch")
        columns = [
            [None if value < 0 else value for value in ops[name].tolist()]
            if name in named
            else [value if value != "" else None for value in ops[name].tolist()]
            for name in ("kind", *named, "phase", "start_ns", "end_ns")
        ]
        chunk_of = dict(zip(columns[1], columns[2], strict=True))
        parts = (_parts(text, chunk_of) if text else () for text in ops["pair"].tolist())
        return map(OpSummary, *columns, parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpRows | tuple) and len(self) == len(other) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"<{len(self)} ops>"


def _parts(pair: str, chunk_of: Mapping[int | None, int | None]) -> tuple[OpPart, ...]:
    """The halves of an overlapped pair, as far as they are known: ``pair`` is the whole action as text."""
    try:
        halves = parse_action(pair).parts
    except ScheduleError:  # its microbatches are not known
        return tuple(OpPart(kind, None, None, None) for kind in _KINDS_OF_PAIR)
    return tuple(OpPart(str(half.kind), half.stage, chunk_of.get(half.stage), half.microbatch) for half in halves)


_KINDS_OF_PAIR = ("F", "B")
