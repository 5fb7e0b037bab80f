"""Clocks without messages: of ranks on one host, by readings of it or its name, else from the order of a pipeline's ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from pptrace.clock.bounds import Matrix, Pairs, is_bounded, offset_ranges
from pptrace.clock.offsets import from_bounds
from pptrace.clock.result import READING_NS, Clock, ClockMethod
from pptrace.model.traces import BOOT_NS, HOST_NAME
from pptrace.slices import rows_among


def from_op_order(
    ranks: Sequence[int], low: Matrix, ops: pd.DataFrame, pipelines: Sequence[Sequence[int]]
) -> Clock | None:
    """Offsets from messages and the order of ops; None where these do not bound all ranks or contradict each other.

    An op that includes its own waiting for a message begins before that message is sent: where starts contradict, ends alone
    count. Clocks that no bound speaks against are left as they are.
    """
    pairs = _op_pairs(ops, pipelines)
    columns = ("start_ns", "end_ns") if (pairs["clock_after"] == "device").all() else ("end_ns",)
    for column in columns:
        both = _with_pairs(low, ranks, pairs, column)
        by_rank = offset_ranges(both)
        if not all(is_bounded(*bounds) for bounds in by_rank):
            return None
        if any(lower > upper for lower, upper in by_rank):
            continue
        if both.max() <= 0:
            widest = max(max(-lower, upper) for lower, upper in by_rank)
            return Clock(ClockMethod.OP_ORDER, dict.fromkeys(ranks, 0), widest)
        clock = from_bounds(ranks, both, {})
        return Clock(ClockMethod.OP_ORDER, clock.offsets_ns, clock.uncertainty_ns)
    return None


def with_op_ends(low: Matrix, ranks: Sequence[int], ops: pd.DataFrame, pipelines: Sequence[Sequence[int]]) -> Matrix:
    """The bounds of messages with those of the ends of ops: of two that follow each other, the second ends later."""
    return _with_pairs(low, ranks, _op_pairs(ops, pipelines), "end_ns")


def _with_pairs(low: Matrix, ranks: Sequence[int], pairs: pd.DataFrame, column: str) -> Matrix:
    both = low.copy()
    source, target = (np.searchsorted(np.asarray(ranks), pairs[name].to_numpy()) for name in ("rank", "rank_after"))
    np.maximum.at(both, (source, target), (pairs["end_ns"] - pairs[f"{column}_after"]).to_numpy(dtype=np.int64))
    np.fill_diagonal(both, 0)
    return both


def _op_pairs(ops: pd.DataFrame, pipelines: Sequence[Sequence[int]]) -> pd.DataFrame:
    """Ops of the recorded stages next to each other, of which the second begins after the first has ended: its columns end in
    ``_after``. Stages between them may have no trace.
    """
    known = ops[rows_among(ops["kind"], ("F", "B", "I")) & (ops["stage"] >= 0) & (ops["microbatch"] >= 0)]
    forward = known["kind"] == "F"
    known = known.assign(forward=forward, place=np.where(forward, known["stage"], -known["stage"]))
    pipeline_of = {rank: number for number, pipeline in enumerate(pipelines) for rank in pipeline}
    known = known.assign(pipeline=known["rank"].map(pipeline_of)).dropna(subset=["pipeline"])
    way = ["pipeline", "step", "forward", "microbatch"]
    known = known[~known.duplicated([*way, "stage"], keep=False)].sort_values([*way, "place"])
    travels = known.groupby(way).ngroup().to_numpy()
    (first,) = np.nonzero(travels[:-1] == travels[1:])
    columns = known[["rank", "start_ns", "end_ns", "clock"]]
    before, after = (columns.iloc[rows].reset_index(drop=True) for rows in (first, first + 1))
    return before.join(after.add_suffix("_after"))


_ANY_HOST = frozenset({"", "localhost", "localhost.localdomain", "(none)", "none", "unknown"})
"""Names of hosts without a name of their own."""


def same_host_spread(ranks: Sequence[int], facts: Mapping[int, Mapping[str, object]]) -> int | None:
    """Spread of the ranks' (wall − monotonic), ns, when all ran on one host; None otherwise."""
    hosts = {str(facts.get(rank, {}).get("host")) for rank in ranks}
    if len(hosts) != 1 or "None" in hosts:
        return None
    differences = [wall - monotonic for rank in ranks for wall, monotonic in readings_of(facts.get(rank, {}))]
    return max(differences) - min(differences) if differences else None


def readings_of(facts: Mapping[str, object]) -> list[tuple[int, int]]:
    """(wall, monotonic) clock, ns, of each reading that a rank's recorder took; its fact is damaged where one lacks."""
    clock = facts.get("clock")  # {"start": {"time_ns": …, "monotonic_ns": …}, "stop": …}
    readings = [each for each in clock.values() if isinstance(each, Mapping)] if isinstance(clock, Mapping) else []
    pairs = ((each.get("time_ns"), each.get("monotonic_ns")) for each in readings)
    return [(wall, monotonic) for wall, monotonic in pairs if isinstance(wall, int) and isinstance(monotonic, int)]


def pairs_of_same_host_name(ranks: Sequence[int], facts: Mapping[int, Mapping[str, object]]) -> Pairs:
    """Pairs of ranks on hosts of one name, as their traces say, or that started at one time; a recorder's own fact about the
    host outweighs the name.
    """
    names = [host_name(facts.get(rank, {})) for rank in ranks]
    boots = [facts.get(rank, {}).get(BOOT_NS) for rank in ranks]
    boot_ns = np.array([boot if isinstance(boot, int) else _UNKNOWN for boot in boots], dtype=np.int64)
    pairs: Pairs = np.array([[name is not None and name == other for other in names] for name in names], dtype=np.bool_)
    pairs |= (np.abs(boot_ns[:, None] - boot_ns) <= _ONE_BOOT_NS) & (boot_ns != _UNKNOWN)
    return pairs


_UNKNOWN = -1
_ONE_BOOT_NS = 20_000
"""Two clocks read one after the other are some µs apart; hosts that start at one time are not so close."""


def drop_contradicted(
    named: Pairs,
    low: Matrix,
    ranks: Sequence[int],
    comms: pd.DataFrame,
    ops: pd.DataFrame,
    pipelines: Sequence[Sequence[int]],
) -> Pairs:
    """The pairs with one host name that share a clock: neither messages nor the order of ops contradict it.

    Containers and hosts may share a name. Where messages do not relate the ranks, their traces have to cover a common time.

    Args:
        low: what messages tell (:func:`~pptrace.clock.bounds.lower_bounds`).
        comms, ops: in each rank's own time.
    """
    same = named.copy()
    labelled = ops[ops["source"] == "label"]
    bounds = with_op_ends(low, ranks, labelled, pipelines) if len(labelled) else low
    rows = pd.concat([table[["rank", "start_ns", "end_ns"]] for table in (comms, ops)])
    extents = rows.groupby("rank").agg(begin=("start_ns", "min"), end=("end_ns", "max"))
    spans = {int(str(rank)): (int(begin), int(end)) for rank, begin, end in extents.itertuples()}
    for members in {tuple(np.flatnonzero(row).tolist()) for row in named if row.any()}:
        inside = np.ix_(members, members)
        related = all(is_bounded(*bound) for bound in offset_ranges(low[inside]))
        begins, lasts = zip(*(spans.get(ranks[index], _ANY_TIME) for index in members), strict=True)
        if bounds[inside].max() > READING_NS or not (related or max(begins) <= min(lasts)):
            same[inside] = False
    return same


def host_name(facts: Mapping[str, object]) -> str | None:
    """The name of the host, as the trace has it; None where it is that of any host, or the recorder says more."""
    name = facts.get(HOST_NAME)
    is_name = isinstance(name, str) and name.strip().lower() not in _ANY_HOST
    return str(name) if is_name and facts.get("host") is None else None


_ANY_TIME = (np.iinfo(np.int64).min, np.iinfo(np.int64).max)
