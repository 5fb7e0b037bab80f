"""Replay of many timings of one plan at once: level by level over a matrix with a row per step or scenario.

This is the one engine behind validation (does it end?), lowering (in which order do messages travel?), the simulator and the
attribution of measured steps. It runs programs (:mod:`pptrace.schedule.replay_program`): those of tables, and those in which
messages are nodes as well (:mod:`pptrace.schedule.message_graph`). In a table's, an action starts as soon as its rank has ended
the action before it and its inputs have arrived; sends and receives are edges with a latency, not actions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from pptrace.schedule.plan_table import NONE, PlanTable
from pptrace.schedule.replay_program import Program

Times = npt.NDArray[Any]
"""Integers of one unit; of Python's integers where those of 64 bits would overflow."""

Mask = npt.NDArray[np.bool_]

_CHUNK = 1 << 18
"""Times in one pass over the levels: what a level reads is then still in a cache."""
_PADDING, _POWER_OF_TWO = 16, 256
_MOST_OF_32, _MOST = 1 << 31, 1 << 62


@dataclass(frozen=True, slots=True, eq=False)
class Replays:
    """Starts and ends, of the shape of the durations; −1 for actions that never run (a valid plan has none)."""

    start: Times
    end: Times


def replay_table(table: PlanTable, durations: npt.ArrayLike, latencies: npt.ArrayLike = 0) -> Replays:
    """Replay a plan with durations of its rows, of shape (…, rows): whatever comes before the last index counts replays.

    ``latencies`` are the times from the end of a producer until another rank may use its output: one for all, or one for each
    message (as ``dep_message`` of the table numbers them) with shape (…, messages). Both are broadcast to the same replays.
    """
    batch = _batch(table, durations, latencies)
    end = batch.ends(len(table))
    start = end - batch.durations
    if not table.is_runnable:
        start[:, table.level < 0] = end[:, table.level < 0] = NONE
    shape = (*batch.shape, len(table))
    return Replays(start.reshape(shape), end.reshape(shape))


def makespans(table: PlanTable, durations: npt.ArrayLike, latencies: npt.ArrayLike = 0) -> Times:
    """The makespans of the replays that :func:`replay_table` describes."""
    batch = _batch(table, durations, latencies)
    longest = np.zeros(batch.size, batch.wide)
    if len(last := batch.program.last):
        for replays in batch.chunks():
            longest[replays] = batch.run(replays)[last].max(axis=0)
    return longest.reshape(batch.shape)


def ends_of_nodes(program: Program, num_nodes: int, times: Times, latencies: Times | None = None) -> Times:
    """The ends of the first nodes of a program, shape (replays, nodes), by what they take, shape (replays, all nodes)."""
    known = [part for part in (times, latencies) if part is not None]
    dtype = _narrowest(len(program.levels), *known) if times.dtype.kind == "i" else times.dtype
    taken, *late = (part.astype(dtype, copy=False) for part in known)
    return _Batch(program, taken, late[0] if late else None, (len(times),)).ends(num_nodes)


def rank_ends(table: PlanTable, durations: npt.ArrayLike, latencies: npt.ArrayLike = 0) -> Times:
    """Times at which each rank has run all its rows in the replays that :func:`replay_table` describes, shape (…, pp)."""
    batch = _batch(table, durations, latencies)
    ends = np.zeros((batch.size, table.pp), batch.wide)
    if len(last := batch.program.last):
        rank = table.rank[batch.program.rows[last]]
        for replays in batch.chunks():
            ends[replays, rank] = batch.run(replays)[last].T
    return ends.reshape((*batch.shape, table.pp))


def rank_ends_of_mixtures(
    table: PlanTable, measured: tuple[Times, Times], other: tuple[Times, Times], mixtures: Sequence[tuple[Mask, Mask]]
) -> list[Times]:
    """The :func:`rank_ends` of replays in which some rows and messages take what was measured, all else other times.

    Args:
        measured: durations and latencies of shapes (replays, rows) and (replays, messages).
        other: the same of shapes (rows,) and (messages,), for every replay.
        mixtures: masks of these shapes, of the rows and messages that take what was measured: one pair for each result.
    """
    batch = _batch(table, *(np.vstack(both) for both in zip(measured, other, strict=True)))
    program, last, every = batch.program, batch.program.last, len(measured[0])
    results = [np.zeros((every, table.pp), batch.wide) for _ in mixtures]
    if not len(last):
        return results
    rank, others = table.rank[program.rows[last]], batch.columns(slice(every, None))
    masks = [[rows[program.rows], *(messages[part.latency] for part in program.inputs)] for rows, messages in mixtures]
    for replays in batch.chunks(every):
        columns = batch.columns(replays)
        for ends, mask in zip(results, masks, strict=True):
            durations, *latencies = (
                None if ours is None or theirs is None else np.where(chosen[:, np.newaxis], ours, theirs)
                for chosen, ours, theirs in zip(mask, columns, others, strict=True)
            )
            assert durations is not None
            ends[replays, rank] = _run(program, durations, latencies)[last].T
    return results


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Durations (replays, rows) and latencies (replays or 1, messages; None: all 0); ``shape`` is that of the replays."""

    program: Program
    durations: Times
    latencies: Times | None
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.durations)

    @property
    def wide(self) -> np.dtype[Any]:
        """The type of what is returned: of 64 bits, even where the replays need 32."""
        return np.promote_types(self.durations.dtype, np.int64)

    def chunks(self, size: int | None = None) -> Iterator[slice]:
        """The replays, or the first ones, in parts."""
        most, size = max(1, _CHUNK // max(1, len(self.program.rows))), self.size if size is None else size
        return (slice(begin, min(begin + most, size)) for begin in range(0, size, most))

    def columns(self, replays: slice) -> tuple[Times, *tuple[Times | None, ...]]:
        """(durations in the program's order, latencies of each of its inputs), a column per replay."""
        durations, inputs = _transposed(self.durations[replays]).take(self.program.rows, axis=0), self.program.inputs
        if self.latencies is None:
            return durations, *(None for _ in inputs)
        latencies = _transposed(self.latencies if len(self.latencies) == 1 else self.latencies[replays])
        return durations, *(_chosen(latencies, of_input.latency) for of_input in inputs)

    def run(self, replays: slice) -> Times:
        """The ends of rows in the program's order, a column per replay, and a last row of zeros."""
        durations, *latencies = self.columns(replays)
        if durations.shape[1] != 1:
            return _run(self.program, durations, latencies)
        of_one = [None if column is None else column[:, 0] for column in latencies]
        return _run(self.program, durations[:, 0], of_one)[:, np.newaxis]

    def ends(self, num_nodes: int) -> Times:
        """The ends of the first nodes, shape (replays, nodes)."""
        ends, index = np.empty((self.size, num_nodes), self.wide), self.program.index[:num_nodes]
        for replays in self.chunks():
            ends[replays] = self.run(replays).take(index, axis=0).T
        return ends


def _transposed(matrix: Times) -> Times:
    """The columns of a matrix as the rows of another, each in one piece.

    Values a power of two apart would take each other's places in the cache: they are read from a copy with longer rows.
    """
    if matrix.strides[0] % _POWER_OF_TWO:
        return np.ascontiguousarray(matrix.T)
    copy = np.empty((len(matrix), matrix.shape[1] + _PADDING), matrix.dtype)[:, : matrix.shape[1]]
    copy[:] = matrix
    return np.ascontiguousarray(copy.T)


def _chosen(latencies: Times, number: npt.NDArray[Any]) -> Times:
    """Latencies by their numbers, 0 where there is none."""
    chosen = latencies.take(number, axis=0)
    if (number < 0).any():
        chosen[number < 0] = 0
    return chosen


def _run(program: Program, durations: Times, latencies: list[Times | None]) -> Times:
    """Time all levels, one after the other."""
    width = durations.shape[1:]
    ends = np.zeros((len(durations) + 1, *width), durations.dtype)
    starts, arrivals = (np.empty((program.most_rows, *width), durations.dtype) for _ in range(2))
    inputs = list(zip(program.inputs, latencies, strict=True))
    for number, (rows, before) in enumerate(zip(program.levels, program.before, strict=True)):
        start = starts[: rows.stop - rows.start]
        ends.take(before, 0, start, "clip")
        for of_row, latency in inputs:
            begin, end = of_row.pointer[number], of_row.pointer[number + 1]
            if begin == end:
                break
            arrival, reader = arrivals[: end - begin], start[: end - begin]
            ends.take(of_row.source[number], 0, arrival, "clip")
            if latency is not None:
                np.add(arrival, latency[begin:end], out=arrival)
            np.maximum(reader, arrival, out=reader)
        np.add(start, durations[rows], out=ends[rows])
    return ends


def _batch(table: PlanTable, durations: npt.ArrayLike, latencies: npt.ArrayLike) -> _Batch:
    taken, late = _integers(durations), _integers(latencies)
    if taken.shape[-1:] != (len(table),):
        raise ValueError(f"durations have shape {taken.shape}; expected (…, {len(table)}), one per row of the table")
    if late.ndim and late.shape[-1] != table.num_messages:
        raise ValueError(f"latencies have shape {late.shape}; expected (…, {table.num_messages}), one per message")
    dtype, latest = _narrowest(table.num_levels, taken, late), _largest(late)
    shape = np.broadcast_shapes(taken.shape[:-1], late.shape[:-1])
    program = table.full_program if taken.size and taken.min() < 0 else table.program
    if latest == 0:
        of_messages = None
    elif late.ndim < 2:
        of_messages = np.broadcast_to(late, (1, table.num_messages)).astype(dtype)
    else:
        of_messages = _flattened(late, shape).astype(dtype, copy=False)
    return _Batch(program, _flattened(taken, shape).astype(dtype, copy=False), of_messages, shape)


def _narrowest(num_levels: int, *taken: Times) -> np.dtype[Any]:
    """The type that has the longest sum of integers along so many levels."""
    longest = num_levels * sum(map(_largest, taken))
    return np.dtype(np.int32 if longest < _MOST_OF_32 else np.int64 if longest < _MOST else object)


def _largest(values: Times) -> int:
    return max(abs(int(values.min())), abs(int(values.max()))) if values.size else 0


def _integers(values: npt.ArrayLike) -> Times:
    array = np.asarray(values)
    if array.dtype in (object, np.uint64):
        return array.astype(object)
    if array.dtype.kind == "i":
        return array
    return array.astype(np.int64, casting="same_kind" if array.size else "unsafe", copy=False)


def _flattened(values: Times, shape: tuple[int, ...]) -> Times:
    return np.broadcast_to(values, (*shape, values.shape[-1])).reshape(prod(shape), values.shape[-1])
