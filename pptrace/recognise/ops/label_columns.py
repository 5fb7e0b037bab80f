"""Labelled ranges by columns: what a name says is read once, however often it occurs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from pptrace.model.tables import Int64
from pptrace.recognise.labels import Label, LabelledAction
from pptrace.schedule.actions import Kind
from pptrace.slices import Slice

Bool = npt.NDArray[np.bool_]
NONE = -1
"""Code of what a name does not give: a stage, a microbatch, a second half, a number of a step, a phase."""

KINDS = tuple(Kind)
IS_COMPUTE = np.array([kind.is_compute for kind in Kind] + [False])
IS_MESSAGE = np.array([kind.is_p2p for kind in Kind] + [False])
"""True for messages, by the code of a kind; the last is that of :data:`NONE`."""
_HALVES = ("kind", "stage", "chunk", "microbatch")
ACTION_COLUMNS = (*_HALVES, *(f"second_{name}" for name in _HALVES))


@dataclass(frozen=True, slots=True)
class Range:
    """A stretch of the host's time that is an op, the posting of messages, or a span of a step, as inference makes and takes
    them where no label tells the ops.
    """

    label: Label
    start_ns: int
    end_ns: int
    thread: int

    @property
    def kind(self) -> Kind | None:
        return self.label.actions[0].kind if self.label.actions else None


@dataclass(frozen=True)
class LabelTable:
    """Labels as columns: one entry per label in each array, and ``actions`` one row per action of theirs.

    A simple action has no second half (kind :data:`NONE`). A pair has the kind OVERLAP_F_B; its other columns are those of its
    forward, which is its first half.
    """

    labels: tuple[Label, ...]

    def of(self, read: Callable[[Label], Any], dtype: Any) -> npt.NDArray[Any]:
        """Gather a property of each label."""
        return np.array([read(label) for label in self.labels], dtype=dtype)

    @cached_property
    def num_actions(self) -> Int64:
        return self.of(lambda label: len(label.actions), np.int64)

    @cached_property
    def kind(self) -> Int64:
        """The code of the first action's kind."""
        return self.of(lambda label: label.actions[0].kind.code if label.actions else NONE, np.int64)

    @cached_property
    def span(self) -> npt.NDArray[np.object_]:
        return self.of(lambda label: label.span, object)

    @cached_property
    def step(self) -> Int64:
        return self.of(lambda label: NONE if label.step is None else label.step, np.int64)

    @cached_property
    def phase(self) -> Int64:
        return self.of(lambda label: NONE if label.phase is None else label.phase.code, np.int64)

    @cached_property
    def leads(self) -> Bool:
        """Return whether the ops of a step may begin before its range."""
        return self.of(lambda label: label.may_start_before_range, np.bool_)

    @cached_property
    def first_action(self) -> Int64:
        """The row of each label's first action."""
        return np.append(0, np.cumsum(self.num_actions))[:-1]

    @cached_property
    def actions(self) -> Slice:
        rows = [_columns_of(action) for label in self.labels for action in label.actions]
        table = np.array(rows, dtype=np.int64).reshape(len(rows), len(ACTION_COLUMNS))
        return Slice(dict(zip(ACTION_COLUMNS, table.T.copy(), strict=True)))

    @cached_property
    def names_microbatch(self) -> Bool:
        """Return whether the first action has a microbatch."""
        return np.append(self.actions["microbatch"], NONE)[np.where(self.num_actions > 0, self.first_action, -1)] >= 0


def _columns_of(action: LabelledAction) -> tuple[int, ...]:
    halves = [
        (NONE if half.stage is None else half.stage, half.chunk, NONE if half.microbatch is None else half.microbatch)
        for half in action.halves
    ]
    second = (action.parts[1].kind.code, *halves[1]) if action.parts else (NONE,) * len(_HALVES)
    return (action.kind.code, *halves[0], *second)


@dataclass(frozen=True, slots=True)
class Ranges:
    """Ranges as columns; ``label`` is the index into the table of labels."""

    table: LabelTable
    label: Int64
    start_ns: Int64
    end_ns: Int64
    thread: Int64

    @classmethod
    def of(cls, ranges: Iterable[Range]) -> Ranges:
        rows = list(ranges)
        index: dict[Label, int] = {}
        label = [index.setdefault(entry.label, len(index)) for entry in rows]
        times = ([getattr(entry, name) for entry in rows] for name in ("start_ns", "end_ns", "thread"))
        columns = (np.array(column, dtype=np.int64) for column in (label, *times))
        return cls(LabelTable(tuple(index)), *columns)

    @classmethod
    def joined(cls, parts: Sequence[Ranges]) -> Ranges:
        """Concatenate the ranges of several."""
        present = [part for part in parts if len(part)] or list(parts[:1])
        if all(part.table is present[0].table for part in present):
            table, moves = present[0].table, [0] * len(present)
        else:
            table = LabelTable(tuple(label for part in present for label in part.table.labels))
            moves = np.append(0, np.cumsum([len(part.table.labels) for part in present])).tolist()
        label = np.concatenate([part.label + move for part, move in zip(present, moves, strict=False)])
        names = ("start_ns", "end_ns", "thread")
        return cls(table, label, *(np.concatenate([getattr(part, name) for part in present]) for name in names))

    def __len__(self) -> int:
        return len(self.start_ns)

    def where(self, chosen: npt.NDArray[Any]) -> Ranges:
        columns = (self.label, self.start_ns, self.end_ns, self.thread)
        return Ranges(self.table, *(column[chosen] for column in columns))

    def in_time_order(self) -> Ranges:
        return self.where(np.argsort(self.start_ns, kind="stable"))

    def objects(self) -> list[Range]:
        rows = zip(*(getattr(self, name).tolist() for name in ("label", "start_ns", "end_ns", "thread")), strict=True)
        return [Range(self.table.labels[label], start, end, thread) for label, start, end, thread in rows]

    def present(self) -> list[Label]:
        """The labels that any of the ranges has."""
        return [self.table.labels[label] for label in np.flatnonzero(np.bincount(self.label)).tolist()]

    @property
    def kind(self) -> Int64:
        return self.table.kind[self.label]

    @property
    def has_actions(self) -> Bool:
        return self.kind >= 0

    @property
    def is_op(self) -> Bool:
        return IS_COMPUTE[self.kind]

    @property
    def is_message(self) -> Bool:
        return IS_MESSAGE[self.kind]

    @property
    def names_microbatch(self) -> Bool:
        return self.table.names_microbatch[self.label]

    def has_span(self, *spans: str) -> Bool:
        """Mark the ranges that are spans of one of some kinds; of any kind, without one."""
        if not len(self.table.labels):
            return np.zeros(0, dtype=np.bool_)
        is_span = np.isin(self.table.span.astype(str), spans) if spans else self.table.span != ""
        return is_span.astype(np.bool_)[self.label]

    def actions(self) -> Slice:
        """The actions of all ranges, in their order; ``range`` is the row of the range."""
        counts = self.table.num_actions[self.label]
        row = np.repeat(np.arange(len(self)), counts)
        position = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        index = self.table.first_action[self.label[row]] + position
        return Slice({"range": row, **self.table.actions.where(index).columns})
