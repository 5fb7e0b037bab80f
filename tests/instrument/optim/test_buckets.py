"""Gradients leave in buckets, each as soon as the plan has no more to add to it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ProfilerActivity, profile

from instrument.backward_split.gradients_of import gradient_of
from instrument.optim.buckets import make_buckets
from instrument.optim.gradient_sync import Finish, finishing_actions
from instrument.recorder import Recorder
from pptrace.errors import PptraceError
from pptrace.marks import Axis, CollectiveMark, OpMark, SpanKind, SpanMark, parse_mark
from pptrace.schedule.actions import Kind
from pptrace.schedule.registry import SCHEDULES, build
from tests.instrument.models.cases.mixes import Mix, mesh_of, run_steps, runtime_of
from tests.support.pool import Pool
from tests.support.profiled import events_of


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_stage_is_finished_once_and_nothing_is_added_after(name: str) -> None:
    plan = build(name, 4, 8)
    for rank in range(plan.pp):
        actions = plan.compute_actions(rank)
        finishes = finishing_actions(actions)
        whole, weights = [], []
        for index, action in enumerate(actions):
            later = [half for after in actions[index + 1 :] for half in after.halves]
            for finish in finishes.get(action, ()):
                adding = {Kind.B, Kind.W} if finish.splittable else set()
                adding |= {Kind.B, Kind.I} if finish.others else set()
                assert not any(half.stage == finish.stage and half.kind in adding for half in later)
                whole += [finish.stage] if finish.others else []
                weights += [finish.stage] if finish.splittable else []
        assert sorted(whole) == sorted(weights) == sorted(plan.stages_of(rank))


def test_a_fused_backward_finishes_a_stage_at_once() -> None:
    plan = build("1f1b", 2, 3)
    [(action, finishes)] = finishing_actions(plan.compute_actions(0)).items()
    assert str(action) == "0B2"
    assert finishes == (Finish(0, splittable=True, others=True),)


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    wide=st.lists(st.booleans(), min_size=12, max_size=12),
    limit=st.integers(1, 400),
)
def test_buckets_keep_the_order_and_mix_no_dtypes(sizes: list[int], wide: list[bool], limit: int) -> None:
    dtypes = [torch.float64 if each else torch.float32 for each in wide]
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size, dtype in zip(sizes, dtypes, strict=False)]
    buckets = list(make_buckets(parameters, limit))
    assert [id(p) for bucket in buckets for p in bucket.parameters] == [id(p) for p in parameters]
    for bucket in buckets:
        assert len({p.dtype for p in bucket.parameters}) == 1
        assert len(bucket.parameters) == 1 or sum(p.nbytes for p in bucket.parameters) <= limit
    for left, right in pairwise(buckets):  # no bucket could have taken the next parameter
        after = right.parameters[0]
        full = sum(p.nbytes for p in left.parameters) + after.nbytes > limit
        assert full or after.dtype != left.parameters[0].dtype


def test_a_parameter_that_took_no_part_is_named() -> None:
    with pytest.raises(PptraceError, match=r"shape \(2, 3\) has no gradient"):
        gradient_of(nn.Parameter(torch.zeros(2, 3)))


@dataclass(frozen=True, slots=True)
class _Seen:
    """Of one rank: how many buckets left, how many of them before the last op ended, and inside the gradient sync."""

    sent: int
    during_backward: int
    during_sync: int


def _watch(mix: Mix) -> _Seen:
    mesh = mesh_of(mix)
    runtime = runtime_of(mix, mesh, Recorder())
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run_steps(mix, mesh, runtime, 1)
    marked = [(parse_mark(event.name), event.start, event.end) for event in events_of(profiler)]
    sent = [start for mark, start, _ in marked if isinstance(mark, CollectiveMark) and mark.axis is Axis.DP]
    last_op = max(end for mark, _, end in marked if isinstance(mark, OpMark))
    sync = [(s, e) for mark, s, e in marked if isinstance(mark, SpanMark) and mark.kind is SpanKind.GRAD_SYNC]
    inside = sum(start <= moment <= end for moment in sent for start, end in sync)
    return _Seen(len(sent), sum(moment < last_op for moment in sent), inside)


@pytest.mark.parametrize(("schedule", "least"), [("1f1b", 10), ("zb-h1", 5)])
def test_buckets_leave_while_backward_goes_on(pool: Pool, schedule: str, least: int) -> None:
    """With the backward split, those of norms leave in the last I and those of linear layers after the last W."""
    mix = Mix(pp=2, dp=2, schedule=schedule, tied=False, bucket_bytes=1)
    seen = pool.run(_watch, mix, world=4)  # each parameter is a bucket of its own
    for rank in seen:
        # The loss is averaged after the gradients, on the last stage alone.
        assert rank.sent > 10
        assert rank.during_backward >= least
        assert rank.during_sync == 0
