"""A rank holds what its plan says: as many microbatches, and as many bytes as those keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from instrument.backward_split.split import Linear, attach
from instrument.expert_counts import ExpertCounts
from instrument.models.gpt_config import Recompute, RecomputeMethod, RecomputeModule
from instrument.pipeline.memory import MeasuredBuffers, StorageWatch
from pptrace.schedule.actions import Cell
from pptrace.schedule.registry import SCHEDULES, build
from pptrace.simulator.simulation import peak_inflight
from pptrace.sizes.activations import ActivationSizes
from tests.instrument.pipeline.buffers import is_empty
from tests.instrument.pipeline.cases.memory import Measured, keeps, measure_cases
from tests.instrument.pipeline.cases.training import MICROBATCH_SIZE, Case
from tests.support.extent import ALL
from tests.support.gpt_runs import facts_of_model
from tests.support.pool import Pool

MESSAGES = 4  # on their way in or out of a rank at most, beside what its stages keep: a quarter of one microbatch


def check(measured: Measured, case: Case, rank: int) -> None:
    use = measured.use
    assert use.in_flight == use.planned.in_flight, (case, rank)
    assert use.deferred_weight_grads == use.planned.deferred_weight_grads, (case, rank)
    assert use.planned.held == peak_inflight(build(case.schedule, 4, case.microbatches, case.chunks))[rank]
    excess = use.peak_bytes - measured.predicted_bytes
    assert 0 <= excess <= MESSAGES * measured.message_bytes + 8 * case.microbatches, (case, rank, measured)


DIFFERENT = ("1f1b", "interleaved-1f1b", "zb-h2", "v-half", "dualpipe")
"""Whole and split backwards, one chunk and several, a V, both directions, and pairs."""


@pytest.mark.parametrize("schedule", SCHEDULES if ALL else DIFFERENT)
def test_every_schedule_holds_what_it_plans(pool: Pool, schedule: str) -> None:
    case = Case(schedule, 4, 8, chunks=SCHEDULES[schedule].default_chunks)
    for rank, (measured,) in enumerate(pool.run(measure_cases, [case])):
        check(measured, case, rank)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved-1f1b"] if ALL else ["zb-h1"])
def test_less_recompute_keeps_more(pool: Pool, schedule: str) -> None:
    chunks = SCHEDULES[schedule].default_chunks
    m = 8 if ALL or chunks == 1 else 4
    none, full = (Case(schedule, 4, m, chunks=chunks, recompute=how) for how in (Recompute.NONE, Recompute.FULL))
    some = [Case(schedule, 4, m, chunks=chunks, keep=keep) for keep in (2, 1, 0)]
    for rank, row in enumerate(pool.run(measure_cases, [none, *some, full])):
        for case, measured in zip((none, *some, full), row, strict=True):
            check(measured, case, rank)
        peaks = [measured.use.peak_bytes for measured in row]
        assert peaks == sorted(peaks, reverse=True), (schedule, rank)
        assert peaks[3] == peaks[4], "keeping none is full recompute"
        if row[0].use.in_flight > 2:
            assert peaks[0] > peaks[1] > peaks[2] > peaks[3], (schedule, rank)


WAYS = [
    *({"recompute": recompute} for recompute in Recompute),
    *({"recompute": Recompute.FULL, "method": method, "num_layers": 2} for method in RecomputeMethod),
    *(
        {"recompute": Recompute.SELECTIVE, "modules": (RecomputeModule.MLP, *more)}
        for more in ((), (RecomputeModule.CORE_ATTN,))
    ),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_what_is_alive_after_a_forward_is_what_is_predicted(way: dict[str, Any], is_recomputed: bool) -> None:
    case = Case("1f1b", 3, 4, layers=8, **way)
    if is_recomputed and case.recompute is Recompute.FULL and case.num_layers > 1:
        pytest.skip("every microbatch recomputes")
    run = facts_of_model(case.config, MICROBATCH_SIZE, layers_per_stage=tuple(map(len, case.cut)))
    for stage, layers in enumerate(case.cut):
        sizes = ActivationSizes(run, 1, 1, on_device=False)
        how = sizes.facts.recompute_of(stage, fully=is_recomputed)
        predicted = sizes.stage([None] * len(layers), stage == 0, stage == 2, how)
        assert keeps(case, stage, is_recomputed).after_forward == predicted, stage


def test_weight_work_keeps_less_than_a_forward_and_is_freed_by_w() -> None:
    """:func:`keeps` itself asserts that nothing is left when the weight work has run."""
    kept = keeps(Case("zb-h1", 4, 4), 1, is_recomputed=False)
    assert 0 < kept.after_input_grad < kept.after_forward
    whole = keeps(Case("1f1b", 4, 4), 1, is_recomputed=False)
    assert whole.after_input_grad == 0 < whole.after_forward


def test_a_watch_counts_what_was_made_and_is_alive_but_for_parameters_and_their_gradients() -> None:
    layer = torch.nn.Linear(4, 4, dtype=torch.float64)
    before = torch.ones(100)
    watch = StorageWatch(layer.parameters())
    watch.exempt((before,))
    with watch:
        made = torch.zeros(3, dtype=torch.float64)
        assert watch.live_bytes() == 24
        view = made[1:]
        part = before[2:]
        transposed = layer.weight.t()
        assert watch.live_bytes() == 24
        del made
        assert watch.live_bytes() == 24  # the view holds it
        del view
        assert watch.live_bytes() == 0
        layer(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
        assert watch.live_bytes() == 0
    assert layer.weight.grad is not None
    assert part.shape == (98,)
    assert transposed.shape == (4, 4)


def test_the_buffers_see_the_peak_before_weights_are_taken() -> None:
    layer = Linear(8, 8, bias=False)
    queue = attach(layer)
    watch = StorageWatch(layer.parameters())
    counts = ExpertCounts()
    buffers = MeasuredBuffers(watch, counts)
    with watch:
        chosen = torch.zeros(2, 1, dtype=torch.int64)
        counts.add(0, 0, chosen, chosen, 4, (0, [2, 0, 0, 0]))  # these are not the step's
        del chosen
        for microbatch in range(3):
            x = torch.ones(2, 8).requires_grad_()
            buffers.put_forward(Cell(0, microbatch), (x,), (layer(x),))
        del x
        for microbatch in range(3):
            with queue.collecting() as work:
                torch.autograd.backward(buffers.take_forward(Cell(0, microbatch)).edges, torch.ones(2, 8))
            buffers.defer_weight_grads(Cell(0, microbatch), work)
        del work
        held = watch.live_bytes()
        for microbatch in range(3):
            waiting = list(buffers.take_deferred_weight_grads(Cell(0, microbatch)))
            while waiting:
                waiting.pop().run()
        assert watch.live_bytes() == 0
    assert held == 3 * 2 * 64  # three inputs and three gradients of 2 × 8 float32
    assert buffers.peak_bytes == held
    assert is_empty(buffers)
