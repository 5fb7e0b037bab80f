"""The part of the report on receives that held up other calls and ops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pptrace.analysis.early_receives.of_rank import of_rank as of_rank
from pptrace.analysis.early_receives.repair import RepairedOrder
from pptrace.analysis.early_receives.run import EarlyOfRun
from pptrace.analysis.early_receives.types import EarlyReceives, HeldCall, HeldRank
from pptrace.schedule.actions import KINDS, Action
from pptrace.slices import Slice, distinct_of, reduce_groups

if TYPE_CHECKING:
    from pptrace.analysis.questions import QuestionInputs

_MOST_PAIRS = 1_000


def answer(inputs: QuestionInputs) -> Mapping[str, Any]:
    """The receives of a run that held up something, those with most time first."""
    early = inputs.early
    return {} if early is None else {"early_receives": early_receives(early)}


def early_receives(early: EarlyOfRun) -> EarlyReceives:
    """The report's part from what is known of a run."""
    if early.reason is not None:
        return EarlyReceives(reason=early.reason)
    order, steps = early.order, max(early.num_steps, 1)
    ranks = [
        HeldRank(rank, count, total // steps, longest) for (rank,), count, total, longest in _by(early.holds, ("rank",))
    ]
    pairs = []
    for (rank, kind, stage, microbatch, peer, name, at, of), count, total, longest in _by(early.holds, _PAIR):
        receive, what = str(Action(KINDS[kind], stage, microbatch)), early.names[name]
        held = what if " " in what else f"{at}{what}{of}"
        pairs.append(HeldCall(rank, receive, stage, microbatch, peer, held, count, total // steps, longest))
    return EarlyReceives(
        early.where,
        early.num_steps,
        int(early.holds["ns"].sum()) // steps,
        order.gain if isinstance(order, RepairedOrder) else None if order else 0,
        order if isinstance(order, str) else None,
        tuple(sorted(ranks, key=lambda one: (-one.held_ns, one.rank))),
        tuple(sorted(pairs, key=lambda one: (-one.held_ns, one.rank, one.receive))[:_MOST_PAIRS]),
        len(pairs),
    )


_PAIR = ("rank", "kind", "stage", "microbatch", "peer", "name", "at", "of")


def _by(holds: Slice, names: tuple[str, ...]) -> Iterator[tuple[list[int], int, int, int]]:
    """(values of the columns, count, sum and longest of ``ns``) of each group of holds."""
    if not len(holds):
        return
    group, first = distinct_of([holds[name] for name in names])
    total, longest = (reduce_groups(of_all, holds["ns"], group, len(first)) for of_all in (np.add, np.maximum))
    counts = np.bincount(group, minlength=len(first))
    for row, count, ns, most in zip(first.tolist(), counts.tolist(), total.tolist(), longest.tolist(), strict=True):
        yield [int(holds[name][row]) for name in names], count, ns, most
