"""Match collectives without a group on aligned clocks.

The kernels of one collective end at the same time on all of its ranks.
What runs after a rank's last op of a step joins ranks that were in different places of the pipeline: the norm of the gradients,
the gradients of embeddings that the first and the last stage share. A rank that comes early waits inside of it.

Inside ops they are matched by the ops that they are in, since replicas of a stage run the same ops. Which ranks take part in an
exchange of experts or a sum of tensor parallelism is not recorded where the backend writes no arguments (gloo, without shapes).
The ranks that have the same stage in other pipelines have as many of a kind in each op, and none of them is over before the last
one has begun: then they are the same collectives. Labelled ops are left alone, since labels name groups too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.clock.bounds import ALL_TO_ALL
from pptrace.clock.result import READING_NS, Clock
from pptrace.intervals import find_interval
from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import COMPUTE_KINDS, Int64
from pptrace.recognise.groups.topology import UNKNOWN
from pptrace.slices import Slice, distinct_of, reduce_groups, rows_among, slice_of

_DISTINCT = 2
"""Any other call of the kind in that step has to end so many times as far away."""
_KEY = ("step", "kind", "stage", "microbatch")
"""Columns that name an op among those of its rank."""
_TOGETHER = 0.95
"""Share of the collectives inside ops in which all members have to have begun before any is over."""


def match_by_end_times(
    comms: pd.DataFrame, ops: pd.DataFrame, mesh: MeshInfo, clock: Clock
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Match collectives of unknown groups after the last ops of steps by their end times; with a warning about them.

    The last k of a kind in a step are the same collectives on a set of ranks if they end together on all of them, as near as the
    clocks tell, in every step. Sets are all ranks, those of a pipeline, and its two ends where the ranks between them have no
    other. What is of no set stays as it is.

    Args:
        comms, ops: all ranks (schemas COMMS, OPS) on the common clock.
    """
    unmatched = _after_ops(comms, ops)
    tolerance_ns = max(clock.uncertainty_ns or 0, READING_NS)
    numbers: dict[int, int] = {}
    first = int(comms["match"].max()) + 1 if len(comms) else 0
    counts: dict[tuple[int, ...], int] = {}
    # Candidate sets of ranks, largest first, each with the ranks between its members that then have no collective.
    of_all = [(ranks, ()) for ranks in (tuple(range(mesh.num_ranks)), *mesh.pipelines)]
    of_ends = [((ranks[0], ranks[-1]), ranks[1:-1]) for ranks in mesh.pipelines if len(ranks) > 2]
    present = set(unmatched["rank"].tolist())
    for ranks, between in dict.fromkeys([*of_all, *of_ends]):
        if len(ranks) < 2 or not present.issuperset(ranks):
            continue
        for kind in sorted(set(unmatched["kind"])) if clock.relates(ranks) else ():
            rows = unmatched[(unmatched["kind"] == kind) & ~unmatched.index.isin(list(numbers))]
            if rows["rank"].isin(between).any():
                continue
            rows = rows[rows["group_size"].isin((-1, len(ranks)))]
            for members in _common(rows, ops, ranks, tolerance_ns):
                numbers |= dict.fromkeys(members, first + sum(counts.values()))
                counts[ranks] = counts.get(ranks, 0) + 1
    if not numbers:
        return comms, ()
    matched = comms.copy()
    matched.loc[list(numbers), "match"] = list(numbers.values())
    listed = [f"{count} on ranks {', '.join(map(str, ranks))}" for ranks, count in counts.items()]
    more = f" and {len(listed) - 2} more sets of ranks" if len(listed) > 2 else ""
    line = (
        "collectives after the ops of a step whose group was not recorded are matched where they end together in every "
        f"step, and the time before the last rank's call counts as waiting: {'; '.join(listed[:2])}{more}"
    )
    return matched, (line,)


def _after_ops(comms: pd.DataFrame, ops: pd.DataFrame) -> pd.DataFrame:
    """The kernels of collectives without a group between the ops of two steps of their rank, with the step that they follow."""
    unnamed = rows_among(comms["kind"], ALL_TO_ALL) & (comms["axis"] == UNKNOWN) & (comms["match"] < 0)
    rows = comms[unnamed & (comms["clock"] == "device")]
    if rows.empty:
        return rows
    compute = ops[rows_among(ops["kind"], COMPUTE_KINDS) & (ops["step"] >= 0)]
    spans = compute.groupby(["rank", "step"]).agg(begin=("start_ns", "min"), over=("end_ns", "max"))
    parts: list[pd.DataFrame] = [rows.iloc[:0]]
    for rank, rank_rows in rows.groupby("rank"):
        steps = spans[spans.index.get_level_values("rank") == rank].sort_values("over")
        index = np.searchsorted(steps["over"].to_numpy(), rank_rows["start_ns"].to_numpy(), side="right") - 1
        following = np.append(steps["begin"].to_numpy()[1:], np.iinfo(np.int64).max)
        inside = (index >= 0) & (rank_rows["start_ns"].to_numpy() < following[index])
        parts.append(rank_rows[inside].assign(step=steps.index.get_level_values("step").to_numpy()[index[inside]]))
    with_steps: pd.DataFrame = pd.concat(parts)
    return with_steps.sort_values("end_ns", kind="stable")


def _common(rows: pd.DataFrame, ops: pd.DataFrame, ranks: Sequence[int], tolerance_ns: int) -> Iterator[list[int]]:
    """The rows of each collective of these ranks: the last ones of each step, as many as end together in all steps."""
    rank_rows = rows[rows["rank"].isin(ranks)]
    calls = {
        (int(str(step)), int(str(rank))): part["end_ns"] for (step, rank), part in rank_rows.groupby(["step", "rank"])
    }
    compute = ops[rows_among(ops["kind"], COMPUTE_KINDS) & ops["rank"].isin(ranks) & (ops["step"] >= 0)]
    by_step = [[calls.get((step, rank)) for rank in ranks] for step in sorted(compute["step"].unique().tolist())]
    complete = [[ends for ends in step if ends is not None] for step in by_step]
    if any(len(step) < len(ranks) for step in complete):
        return
    count = min((_num_common([ends.to_numpy() for ends in step], tolerance_ns) for step in complete), default=0)
    for step in complete:
        for from_end in range(1, count + 1):
            yield [int(ends.index[-from_end]) for ends in step]


def _num_common(sides: Sequence[Int64], tolerance_ns: int) -> int:
    """Count the calls, from the last one back, that end together on all sides, and near no other. Each side has its ends in
    order.
    """
    count = 0
    for from_end in range(1, min(map(len, sides)) + 1):
        ends = [int(side[-from_end]) for side in sides]
        low, high = min(ends), max(ends)
        gaps = [low - int(side[-from_end - 1]) for side in sides if len(side) > from_end]
        gaps += [int(side[-from_end + 1]) - high for side in sides if from_end > 1]
        if high - low > tolerance_ns or min(gaps, default=tolerance_ns) <= _DISTINCT * (high - low):
            break
        count = from_end
    return count


def match_inside_ops(comms: pd.DataFrame, ops: pd.DataFrame, mesh: MeshInfo, clock: Clock) -> pd.DataFrame:
    """The comms table with the collectives matched that replicas have in the same ops.

    Args:
        comms, ops: all ranks (schemas COMMS, OPS) on the common clock.
    """
    unnamed = rows_among(comms["kind"], ALL_TO_ALL) & (comms["axis"] == UNKNOWN) & (comms["match"] < 0)
    if len(mesh.pipelines) < 2 or not unnamed.any():
        return comms
    rows = slice_of(comms[unnamed].assign(row=np.flatnonzero(unnamed))).by("rank")
    is_inferred = rows_among(ops["kind"], COMPUTE_KINDS) & (ops["step"] >= 0) & (ops["source"] == "inferred")
    compute = slice_of(ops[is_inferred]).by("rank")
    match, first = comms["match"].to_numpy(copy=True), int(comms["match"].max()) + 1
    tolerance_ns = max(clock.uncertainty_ns or 0, READING_NS)
    for ranks in zip(*mesh.pipelines, strict=True):
        if not all(rank in rows and rank in compute for rank in ranks) or not clock.relates(ranks):
            continue
        number = _numbers([_inside(rows[rank], compute[rank]) for rank in ranks], tolerance_ns)
        if number is not None:
            index, of_row = number
            match[index] = first + of_row
            first += int(of_row.max()) + 1
    return comms.assign(match=match)


def _inside(calls: Slice, ops: Slice) -> Slice:
    """The calls of a rank that begin inside one of its ops, in order of start, with the key of the op and their kind."""
    calls, ops = calls.in_order_of("start_ns"), ops.in_order_of("start_ns")
    op = find_interval(ops["start_ns"], ops["end_ns"], calls["start_ns"])
    calls, op = calls.where(op >= 0), op[op >= 0]
    key = {f"of_{name}": ops[name][op] for name in _KEY}
    return Slice({**{name: calls[name] for name in ("row", "kind", "start_ns", "end_ns")}, **key})


def _numbers(sides: Sequence[Slice], tolerance_ns: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
    """(rows of all sides, the number of the collective that each is); None where they are not the same ones."""
    columns = Slice.joined(sides)
    of_side = np.repeat(np.arange(len(sides)), [len(side) for side in sides])
    names = [columns["kind"], *(columns[f"of_{name}"] for name in _KEY)]
    of_op, _ = distinct_of((of_side, *names))
    nth = pd.Series(of_op).groupby(of_op).cumcount().to_numpy()
    number, first = distinct_of((*names, nth))
    if not len(first) or (np.bincount(number) != len(sides)).any():
        return None
    last_start = reduce_groups(np.maximum, columns["start_ns"], number, len(first))
    first_end = reduce_groups(np.minimum, columns["end_ns"], number, len(first))
    if (first_end + tolerance_ns >= last_start).mean() < _TOGETHER:
        return None
    return columns["row"], number
