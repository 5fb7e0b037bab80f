"""Steps in which kernels of a rank are missing from its trace, so that when it computed in them is not known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pandas as pd

from pptrace.model.device import DeviceWork
from pptrace.model.wording import counted, numbered
from pptrace.recognise.device.lost_work import is_much
from pptrace.slices import slices_by_int

_FEW = 8
"""Ranks that a warning names, each with its steps."""


def lost_steps(ops: pd.DataFrame, work: Mapping[int, DeviceWork]) -> dict[int, frozenset[int]]:
    """The steps of each rank that lost much, from the start of its first op or range to the end of its last; ranks that lost
    little have none. ``ops`` are on the ranks' own clocks, as ``work`` is.
    """
    losing = {rank: of_rank.lost.start_ns for rank, of_rank in work.items() if is_much(of_rank.lost)}
    if not losing:
        return {}
    rows = slices_by_int(ops[ops["rank"].isin(losing)], "rank", ("step", "start_ns", "end_ns"))
    steps = {}
    for rank, lost_ns in losing.items():
        of_rank = rows.get(rank)
        if of_rank is None:
            continue
        found = []
        for step in np.unique(of_rank["step"][of_rank["step"] >= 0]).tolist():
            inside = of_rank["step"] == step
            first, last = int(of_rank["start_ns"][inside].min()), int(of_rank["end_ns"][inside].max())
            if np.searchsorted(lost_ns, first) < np.searchsorted(lost_ns, last):
                found.append(step)
        steps[rank] = frozenset(found)
    return {rank: of_rank for rank, of_rank in steps.items() if of_rank}


def lines_of_lost_work(work: Mapping[int, DeviceWork], steps: Mapping[int, frozenset[int]]) -> Iterator[str]:
    """Warnings of ranks that lost kernels: how many, in which steps, and what that makes unknown."""
    losing = {rank: of_rank for rank, of_rank in sorted(work.items()) if len(of_rank.lost)}
    much = {rank: of_rank for rank, of_rank in losing.items() if steps.get(rank)}
    for rank, of_rank in list(much.items())[:_FEW]:
        lost, affected = of_rank.lost, sorted(steps[rank])
        of_steps = "step" if len(affected) == 1 else "steps"
        yield (
            f"rank {rank}: {len(lost):,} of {lost.num_launches:,} launched kernels are not in the trace: its compute, bubbles "
            f"and transfers, and why its device was idle, are not known in {of_steps} {numbered(affected)}; the profiler lost "
            "them: record fewer steps or fewer activities, and warm it up for a step"
        )
    if len(much) > _FEW:
        yield f"kernels of {counted(len(much) - _FEW, 'more rank')} are not in the traces"
    if little := {rank: of_rank for rank, of_rank in losing.items() if rank not in much}:
        total = sum(len(of_rank.lost) for of_rank in little.values())
        yield (
            f"{counted(total, 'launched kernel')} of rank {numbered(sorted(little))} "
            f"{'is' if total == 1 else 'are'} not in the traces, outside of all steps or too few to change a figure"
        )
