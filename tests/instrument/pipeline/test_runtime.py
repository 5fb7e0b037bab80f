"""The runtime frees what was sent, and refuses what it cannot run before it starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instrument.backward_split.split import Linear
from instrument.data.text import Batch
from instrument.expert.pieces import Pieces, Tape
from instrument.pipeline.handlers import HANDLERS
from instrument.pipeline.microbatch_buffers import MicrobatchBuffers
from instrument.pipeline.runtime import PipelineRuntime
from instrument.pipeline.step import RankProgram, StepRun
from instrument.recorder import Recorder
from pptrace.errors import ScheduleError
from pptrace.schedule.actions import Cell, Kind, parse_action
from pptrace.schedule.plan import Plan, make_plan
from pptrace.schedule.registry import build
from tests.instrument.pipeline.buffers import is_empty
from tests.instrument.pipeline.cases.training import Case, outputs_alive
from tests.support.pool import Pool

ANYTHING: Any = None  # a part of the runtime that a refused plan never reaches


def runtime(plan: Plan, stages: dict[int, nn.Module], handlers: Any = None) -> PipelineRuntime:
    program = RankProgram(plan, 0, stages, ANYTHING, ANYTHING, Recorder())
    return PipelineRuntime(program, ANYTHING, handlers=handlers)


def plan_of(*rows: str) -> Plan:
    return make_plan("test", [[parse_action(text) for text in row.split()] for row in rows])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_output_of_a_forward_is_freed_once_sent(pool: Pool, schedule: str) -> None:
    for rank, (alive, after) in enumerate(pool.run(outputs_alive, Case(schedule, 4, 6))):
        assert len(alive) == 6
        assert after == 0, rank
        if rank < 3:  # the last stage sends nothing: its graph holds the logits until their backward
            assert alive == [0] * 6, rank


def test_a_kind_without_a_handler_is_refused_before_anything_runs() -> None:
    plan = plan_of("0F0 0I0 0W0")
    whole = {kind: HANDLERS[kind] for kind in (Kind.F, Kind.B, Kind.SEND_F)}
    with pytest.raises(ScheduleError, match=r"rank 0 has 0I0 and this runtime cannot execute I; it runs F, B, SEND_F"):
        runtime(plan, {0: nn.Identity()}, whole)
    assert runtime(plan, {0: nn.Identity()}).program.plan is plan


def test_a_plan_that_was_not_lowered_is_refused() -> None:
    with pytest.raises(ScheduleError, match="lower the plan first"):
        runtime(build("1f1b", 2, 2, 1), {0: nn.Identity()})


def test_stages_that_are_not_the_plans_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"rank 0 runs stages \(0,\) and its program has \(1,\)"):
        runtime(plan_of("0F0 0B0"), {1: nn.Identity()})


def test_the_buffers_name_what_is_not_there() -> None:
    buffers = MicrobatchBuffers()
    with pytest.raises(ScheduleError, match="stage 2 has no input of microbatch 3 at this point of the plan"):
        buffers.take_input(Cell(2, 3))


class Pausing(nn.Module):
    """A stage that pauses once in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def in_pieces(self, x: Tensor, tape: Tape, **_: object) -> Pieces[Tensor]:
        yield
        return x * self.weight


def test_a_forward_is_in_flight_from_its_begin_while_the_backward_of_its_pair_runs() -> None:
    plan, stage = plan_of("0F0 (0F1;0B0)OVERLAP_F_B 0B1"), Pausing()
    program = RankProgram(
        plan, 0, {0: stage}, lambda output, target: (output - target).sum(), ANYTHING, Recorder(), in_pieces=True
    )
    numbers = torch.arange(6.0).view(2, 3)
    run = StepRun(program, 0, Batch(numbers, numbers), MicrobatchBuffers())
    for action in plan.ranks[0]:
        HANDLERS[action.kind](run, (action,))
    assert run.buffers.peak_in_flight == 2
    assert stage.weight.grad.tolist() == (numbers.sum(0) / 2).tolist()
    assert is_empty(run.buffers)


def test_layers_are_torchs_own_in_a_plan_that_does_not_split_the_backward() -> None:
    stage = nn.Sequential(Linear(2, 2))
    runtime(plan_of("0F0 0B0"), {0: stage})
    assert stage[0].queue is None
    runtime(plan_of("0F0 0I0 0W0"), {0: stage})
    assert stage[0].queue is not None


@pytest.mark.parametrize("ahead", [1, 2])
def test_outputs_that_wait_for_their_send_are_as_many_as_the_prefetch_depth(pool: Pool, ahead: int) -> None:
    for rank, (alive, after) in enumerate(pool.run(outputs_alive, Case("gpipe", 4, 6, ahead=ahead))):
        assert after == 0, rank
        if rank < 3:
            assert max(alive) <= ahead, rank
