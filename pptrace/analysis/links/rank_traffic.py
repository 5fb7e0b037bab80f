"""Communication of one rank by the other side: what the links of a run are joined from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pptrace.analysis.aligned import AlignedRun, StepsOfRank
from pptrace.intervals import Int64
from pptrace.marks import P2P
from pptrace.slices import Slice, distinct_of
from pptrace.timeline.windows import StepWindow


@dataclass(frozen=True, slots=True, eq=False)
class RankTraffic:
    """Sums over one rank's matched communication in the steps of a report, ns.

    ``messages`` has a row for each ``axis``, ``kind`` (send or recv), ``peer`` and size (``bytes``, −1 unknown): ``count``, the
    sums ``transfer`` and ``wait``, the transfer ``fast``, below which a tenth of them are, and ``slack``: the time for which
    messages might have been under way before the rank asked for them. ``collectives`` has one for each ``axis`` and ``kind``:
    ``count``, ``num_last`` (calls that the rank was the last to enter) and ``wait``. ``on_device``: all of it was timed on the
    device.
    """

    rank: int
    messages: Slice
    collectives: Slice
    on_device: bool = False


_FAST = 10


def comparable_steps(windows: Iterable[StepWindow], data: AlignedRun) -> dict[int, list[int]]:
    """The steps of each rank in which the times of its window's ranks compare."""
    return steps_of_ranks(window for window in windows if data.is_comparable(window))


def steps_of_ranks(windows: Iterable[StepWindow]) -> dict[int, list[int]]:
    """The steps of each rank."""
    steps: dict[int, list[int]] = {}
    for window in windows:
        for rank in window.ranks:
            steps.setdefault(rank, []).append(window.step)
    return steps


def of_rank(rank: int, steps: StepsOfRank, data: AlignedRun) -> RankTraffic | None:
    """The traffic of a rank in its comparable steps; None of a rank without any, or whose device was not recorded."""
    if not steps.comparable or data.work[rank].missing_device_events:
        return None
    return traffic_of(rank, _in_steps(data.rows.of_rank(rank).comms, steps.comparable))


def _in_steps(comms: Slice, steps: Sequence[int]) -> Slice:
    """The rows, which are in order of step, of some steps."""
    first, last = np.searchsorted(comms["step"], (min(steps), max(steps) + 1))
    inside = comms.where(slice(first, last))
    return inside if len(steps) == max(steps) - min(steps) + 1 else inside.where(np.isin(inside["step"], steps))


def traffic_of(rank: int, comms: Slice) -> RankTraffic:
    """Sum up a rank's rows (schema COMMS) with transfers filled; rows without a match are left out."""
    comms = comms.only(_COLUMNS).where(comms["match"] >= 0)
    is_message = comms.among("kind", P2P)
    on_device = bool((comms["clock"] == "device").all()) and len(comms) > 0
    return RankTraffic(rank, _messages(comms.where(is_message)), _collectives(comms.where(~is_message)), on_device)


_COLUMNS = (
    *("axis", "kind", "peer", "bytes", "group_size", "clock"),
    *("start_ns", "asked_ns", "end_ns", "transfer_start_ns", "transfer_end_ns"),
)


def _messages(rows: Slice) -> Slice:
    transfer = rows["transfer_end_ns"] - rows["transfer_start_ns"]
    slack = np.where(rows["kind"] == "recv", np.maximum(rows["asked_ns"] - rows["transfer_start_ns"], 0), 0)
    keys, group, first = _grouped(rows, ("axis", "kind"), ("peer", "bytes"))
    return Slice(
        {
            **keys,
            "count": np.bincount(group, minlength=len(first)),
            "transfer": _sums(transfer, group, len(first)),
            "wait": _sums(rows["end_ns"] - rows["start_ns"] - transfer, group, len(first)),
            "slack": _sums(slack, group, len(first)),
            "fast": _fast(transfer, group, len(first)),
        }
    )


def _collectives(rows: Slice) -> Slice:
    rows = rows.where(rows["group_size"] > 1)
    wait = rows["end_ns"] - rows["start_ns"] - (rows["transfer_end_ns"] - rows["transfer_start_ns"])
    keys, group, first = _grouped(rows, ("axis", "kind"), ())
    is_last = rows["transfer_start_ns"] <= rows["start_ns"]
    return Slice(
        {
            **keys,
            "count": np.bincount(group, minlength=len(first)),
            "num_last": np.bincount(group[is_last], minlength=len(first)),
            "wait": _sums(wait, group, len(first)),
        }
    )


def _grouped(
    rows: Slice, texts: tuple[str, ...], numbers: tuple[str, ...]
) -> tuple[Mapping[str, npt.NDArray[np.generic]], Int64, Int64]:
    """(values of the columns in each group, the group of each row, the first row of each group)."""
    codes = {name: rows.codes(name) for name in texts}
    group, first = distinct_of([*(code for code, _ in codes.values()), *(rows[name] for name in numbers)])
    values: dict[str, npt.NDArray[np.generic]] = {
        name: np.array(of_code, dtype=object)[code[first]] for name, (code, of_code) in codes.items()
    }
    return values | {name: rows[name][first] for name in numbers}, group, first


def _fast(values: Int64, group: Int64, num_groups: int) -> Int64:
    """The value of each group that a tenth of its values is below."""
    order = np.lexsort((values, group))
    counts = np.bincount(group, minlength=num_groups)
    fast: Int64 = values[order][np.cumsum(counts) - counts + (counts - 1) // _FAST]
    return fast


def _sums(values: Int64, group: Int64, num_groups: int) -> Int64:
    sums = np.zeros(num_groups, dtype=np.int64)
    np.add.at(sums, group, values)
    return sums
