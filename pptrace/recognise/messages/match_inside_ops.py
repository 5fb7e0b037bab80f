"""Match collectives without a group inside ops, by the ops that they are in: replicas of a stage run the same ops.

Which ranks take part in an exchange of experts or a sum of tensor parallelism inside an op is not recorded where the backend
writes no arguments (gloo, without shapes). The ranks that have the same stage in other pipelines have as many of a kind in each
op, and none of them is over before the last one has begun: then they are the same collectives. Labelled ops are left alone,
since labels name groups too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.clock.bounds import ALL_TO_ALL
from pptrace.clock.result import READING_NS, Clock
from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import COMPUTE_KINDS
from pptrace.recognise.groups.topology import UNKNOWN
from pptrace.slices import Slice, distinct_of, slice_of

_KEY = ("step", "kind", "stage", "microbatch")
"""Columns that name an op among those of its rank."""
_TOGETHER = 0.95
"""Share of the collectives in which all members have to have begun before any is over."""


def match_inside_ops(comms: pd.DataFrame, ops: pd.DataFrame, mesh: MeshInfo, clock: Clock) -> pd.DataFrame:
    """The comms table with the collectives matched that replicas have in the same ops.

    Args:
        comms, ops: all ranks (schemas COMMS, OPS) on the common clock.
    """
    unnamed = comms["kind"].isin(ALL_TO_ALL) & (comms["axis"] == UNKNOWN) & (comms["match"] < 0)
    if len(mesh.pipelines) < 2 or not unnamed.any():
        return comms
    rows = slice_of(comms[unnamed].assign(row=np.flatnonzero(unnamed))).by("rank")
    is_inferred = ops["kind"].isin(COMPUTE_KINDS) & (ops["step"] >= 0) & (ops["source"] == "inferred")
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
    op = np.searchsorted(ops["start_ns"], calls["start_ns"], side="right") - 1
    is_inside = (op >= 0) & (calls["start_ns"] < ops["end_ns"][np.maximum(op, 0)])
    calls, op = calls.where(is_inside), op[is_inside]
    key = {f"of_{name}": ops[name][op] for name in _KEY}
    return Slice({**{name: calls[name] for name in ("row", "kind", "start_ns", "end_ns")}, **key})


def _numbers(sides: Sequence[Slice], tolerance_ns: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
    """(rows of all sides, the number of the collective that each is); None where they are not the same ones."""
    columns = {name: np.concatenate([side[name] for side in sides]) for name in sides[0].columns}
    of_side = np.repeat(np.arange(len(sides)), [len(side) for side in sides])
    names = [columns["kind"], *(columns[f"of_{name}"] for name in _KEY)]
    of_op, _ = distinct_of((of_side, *names))
    order = np.argsort(of_op, kind="stable")
    firsts = np.searchsorted(of_op[order], of_op[order])
    nth = np.empty(len(of_op), dtype=np.int64)
    nth[order] = np.arange(len(of_op)) - firsts
    number, first = distinct_of((*names, nth))
    if not len(first) or (np.bincount(number) != len(sides)).any():
        return None
    last_start = np.full(len(first), np.iinfo(np.int64).min)
    first_end = np.full(len(first), np.iinfo(np.int64).max)
    np.maximum.at(last_start, number, columns["start_ns"])
    np.minimum.at(first_end, number, columns["end_ns"])
    if (first_end + tolerance_ns >= last_start).mean() < _TOGETHER:
        return None
    return columns["row"], number
