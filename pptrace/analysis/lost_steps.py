"""Steps in which kernels of a rank are missing from its trace, so that when it computed in them is not known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from pptrace.model.device import DeviceWork, LostKernels
from pptrace.model.tables import COMPUTE_KINDS, UNKNOWN, Bool
from pptrace.model.wording import as_ranges, counted
from pptrace.recognise.device.work import is_much
from pptrace.slices import Slice, reduce_groups, rows_among, slices_by_rank

_FEW = 8
"""Ranks that a warning names, each with its steps."""


def lost_steps(ops: pd.DataFrame, work: Mapping[int, DeviceWork]) -> dict[int, frozenset[int]]:
    """The steps of each rank that lost much, or ran an op by work that no call launched; ranks that lost little have none.
    ``ops`` and ``work`` are on the ranks' own clocks.

    A step is from its first op on the device to the first one of the next step: what is lost may be its last ops. The last step
    goes on for a tenth of its length: behind that, a step was cut off. Without ops of a pipeline a step is the host's range.
    Where steps are not in their order, what was lost has moved others: then all of the rank's steps are.
    """
    losing = {rank: of_rank.lost for rank, of_rank in work.items() if is_much(of_rank.lost)}
    unlaunched = {
        rank: int(of_rank.start_ns[of_rank.launch_ns < 0].max(initial=-_LATEST))
        for rank, of_rank in work.items()
        if rank not in losing and (of_rank.launch_ns < 0).any()
    }
    if not losing and not unlaunched:
        return {}
    chosen = ops[ops["rank"].isin([*losing, *unlaunched]) & (ops["step"] >= 0)]
    on_device = (chosen["clock"] == "device").to_numpy()
    bare = ~on_device & rows_among(chosen["kind"], COMPUTE_KINDS)
    whole = (chosen["kind"] == "STEP").to_numpy()
    marks = {"on_device": on_device, "bare": bare, "whole": whole}
    chosen = chosen.assign(**{name: mark.astype(np.int64) for name, mark in marks.items()})
    rows = slices_by_rank(chosen, ("step", "start_ns", "end_ns", *marks))
    found = {rank: _steps_with(lost, rows[rank]) for rank, lost in losing.items() if rank in rows}
    found |= {rank: _steps_before(last, rows[rank]) for rank, last in unlaunched.items() if rank in rows}
    return {rank: steps for rank, steps in found.items() if steps}


def _steps_with(lost: LostKernels, ops: Slice) -> frozenset[int]:
    """The steps of one rank in which something may have been lost, and those that have ops of which nothing ran on the device."""
    every, is_chosen = np.unique(ops["step"]), ops["on_device"] == 1
    bare = np.unique(ops["step"][ops["bare"] == 1])
    if not is_chosen.any() and not len(bare):
        is_chosen = ops["whole"] == 1
    if not is_chosen.any():
        return frozenset(every.tolist())  # of no op is it known when the device ran it
    steps, number = np.unique(ops["step"][is_chosen], return_inverse=True)
    first = reduce_groups(np.minimum, ops["start_ns"][is_chosen], number, len(steps))
    last = reduce_groups(np.maximum, ops["end_ns"][is_chosen], number, len(steps))
    if (np.diff(first) <= 0).any() or (last[:-2] > first[2:]).any():
        return frozenset(every.tolist())
    begin = np.concatenate(([-_LATEST], first[1:]))
    behind = last[-1] + (last[-1] - first[-1]) // 10 + 1
    end = np.append(first[1:], behind)
    has_lost = np.searchsorted(lost.start_ns, end) > np.searchsorted(lost.end_ns, begin, side="right")
    return frozenset([*steps[has_lost].tolist(), *np.setdiff1d(every, steps).tolist(), *bare.tolist()])


def _steps_before(last: int, ops: Slice) -> frozenset[int]:
    """The steps of one rank with ops of which nothing ran on the device, before the ``last`` work that no call launched began.

    That work may be theirs: their launches were not recorded.
    """
    if not (ops["on_device"] == 1).any():
        return frozenset()
    is_bare = (ops["bare"] == 1) & (ops["start_ns"] < last)
    return frozenset(np.unique(ops["step"][is_bare]).tolist())


_LATEST = np.iinfo(np.int64).max


def outside_lost(table: pd.DataFrame, lost: Mapping[int, frozenset[int]]) -> Bool:
    """Mark the rows that are neither in a step in which their rank lost kernels, nor, of such a rank, in no step."""
    outside = np.ones(len(table), dtype=np.bool_)
    for rank, steps in lost.items():
        outside &= ((table["rank"] != rank) | ~table["step"].isin([*steps, UNKNOWN])).to_numpy()
    return outside


def without_unknown_times(
    comms: pd.DataFrame, without: Sequence[int], lost: Mapping[int, frozenset[int]]
) -> pd.DataFrame:
    """The communication, unmatched where one side of it ran on a device at a time that is not known: what the other sides waited
    for is not known then either. ``without`` are the ranks whose device was not recorded, ``lost`` as :func:`lost_steps` has it.
    """
    if not without and not lost:
        return comms
    is_unknown = comms["rank"].isin(without).to_numpy(copy=True)
    for rank, steps in lost.items():
        is_unknown |= ((comms["rank"] == rank) & comms["step"].isin(steps)).to_numpy()
    match = comms["match"].to_numpy()
    of_unknown = np.unique(match[is_unknown & (match >= 0) & (comms["clock"] != "device").to_numpy()])
    return comms.assign(match=np.where(np.isin(match, of_unknown), -1, match)) if len(of_unknown) else comms


def lines_of_lost_work(work: Mapping[int, DeviceWork], steps: Mapping[int, frozenset[int]]) -> Iterator[str]:
    """Warnings of ranks that lost kernels: how many, in which steps, and what that makes unknown."""
    losing = {rank: of_rank for rank, of_rank in sorted(work.items()) if len(of_rank.lost)}
    much = {rank: of_rank for rank, of_rank in losing.items() if steps.get(rank)}
    for rank, of_rank in list(much.items())[:_FEW]:
        lost, affected = of_rank.lost, sorted(steps[rank])
        of_steps = "step" if len(affected) == 1 else "steps"
        yield (
            f"rank {rank}: {_words(lost)}: its compute, bubbles "
            f"and transfers, and why its device was idle, are not known in {of_steps} {as_ranges(affected)}; the profiler lost "
            "them, or wrote no times that can be: record fewer steps or fewer activities, and warm it up for a step"
        )
    if len(much) > _FEW:
        yield f"kernels of {counted(len(much) - _FEW, 'more rank')} are not in the traces"
    for rank in sorted(steps.keys() - losing.keys())[:_FEW]:
        yield (
            f"rank {rank}: ops of step {as_ranges(sorted(steps[rank]))} have no work on the device, and there is work that no "
            "recorded call launched: its compute, bubbles and transfers, and why its device was idle, are not known there; "
            "record from before the first step on"
        )
    if little := {rank: of_rank.lost for rank, of_rank in losing.items() if rank not in much}:
        missing = sum(lost.num_missing for lost in little.values())
        unrelated = sum(lost.num_unrelated for lost in little.values())
        are = "is" if missing == 1 else "are"
        parts = [f"{counted(missing, 'launched kernel')} {are} not in the traces"] if missing else []
        parts += [f"what launched {counted(unrelated, 'kernel')} is not known"] if unrelated else []
        yield f"rank {as_ranges(sorted(little))}: {' and '.join(parts)}, outside of all steps, or fewer than one in a thousand"


def _words(lost: LostKernels) -> str:
    missing, unrelated = lost.num_missing, lost.num_unrelated
    parts = [f"{missing:,} of {lost.num_launches:,} launched kernels are not in the trace"] if missing else []
    parts += [f"what launched {unrelated:,} kernels of the trace is not known"] if unrelated else []
    return " and ".join(parts)
