"""Executes a lowered plan: walks this rank's instructions through a table kind → handler.

An instruction is one compute action, or a group of sends and receives that are posted and awaited together
(:meth:`pptrace.schedule.plan.Plan.instructions`). New kinds of action are new entries of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from instrument.data.text import Batch
from instrument.pipeline.gradients import GradientSync
from instrument.pipeline.ledger import Ledger
from instrument.pipeline.p2p import Cell, Communicator, Message
from instrument.recorder import Recorder
from pptrace.errors import ScheduleError
from pptrace.marks import SpanKind
from pptrace.schedule.actions import Action, Kind, iter_halves
from pptrace.schedule.plan import Plan

Instruction = tuple[Action, ...]
LossFunction = Callable[[Tensor, Tensor], Tensor]
"""(output of the last stage, targets) of one microbatch → scalar."""


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What a step gives back.

    ``loss`` is the mean over the microbatches of all pipelines, on ranks that hold the last stage, else None; it stays
    on its device. ``peak_in_flight`` counts forwards whose backward had not run yet, all chunks together, at most.
    """

    loss: Tensor | None
    peak_in_flight: int


@dataclass(frozen=True, slots=True, eq=False)
class StepRun:
    """One step under way: what handlers work with. ``losses`` grows by one scalar per microbatch of the last stage."""

    runtime: PipelineRuntime
    step: int
    batch: Batch
    ledger: Ledger
    losses: list[Tensor]


Handler = Callable[[StepRun, Instruction], None]


class PipelineRuntime:
    """Runs one pipeline rank's part of a plan, step after step.

    Args:
        plan: lowered; validated by the caller where it does not come from a builder.
        pp_rank: this rank's place in the pipeline.
        stages: stage → module, for every stage that the plan places on this rank.
        loss_function: of the last stage.
        communicator: sends and receives for this rank.
        gradients: sums between ranks after the last microbatch.
        handlers: kind → handler.

    Raises:
        ScheduleError: the plan has a kind without a handler, or stages that are not given; before anything runs.
    """

    def __init__(
        self,
        plan: Plan,
        pp_rank: int,
        stages: Mapping[int, nn.Module],
        loss_function: LossFunction,
        communicator: Communicator,
        gradients: GradientSync,
        recorder: Recorder,
        handlers: Mapping[Kind, Handler] | None = None,
    ) -> None:
        self.plan = plan
        self.pp_rank = pp_rank
        self.stages = dict(stages)
        self.loss_function = loss_function
        self.communicator = communicator
        self.gradients = gradients
        self.recorder = recorder
        self._handlers = HANDLERS if handlers is None else handlers
        self._instructions = tuple(plan.instructions(pp_rank))
        _require_runnable(plan, self._handlers)
        if set(self.stages) != set(plan.stages_of(pp_rank)):
            raise ScheduleError(
                f"{plan.name}: rank {pp_rank} runs stages {plan.stages_of(pp_rank)} and was given {tuple(self.stages)}"
            )

    def run(self, batch: Batch, step: int) -> StepResult:
        """All microbatches forward and backward, then the gradient sums. Gradients add to what ``.grad`` holds.

        Args:
            batch: of this pipeline; read by the first stage (tokens) and the last (targets).
            step: number of the step, for the ranges.
        """
        run = StepRun(self, step, batch, Ledger(), [])
        for instruction in self._instructions:
            self._handlers[instruction[0].kind](run, instruction)
        self.gradients.run(step)
        loss = None
        if run.losses:
            loss = self.gradients.mean_loss(torch.stack(run.losses).mean(), step)
        return StepResult(loss, run.ledger.peak_in_flight)

    def optimize(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """One optimizer step, and gradients cleared for the next."""
        with self.recorder.span(SpanKind.OPTIMIZER, step):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def is_local(self, stage: int | None) -> bool:
        """Whether this rank runs a stage, so that its neighbours on this rank hand over without a message."""
        return stage in self.stages

    def parameters(self) -> Iterable[nn.Parameter]:
        """Every parameter of this rank's stages once."""
        return nn.ModuleList(self.stages.values()).parameters()


def forward(run: StepRun, instruction: Instruction) -> None:
    """F: the stage's forward, and the loss in the last stage. Keeps the graph for the backward."""
    (action,) = instruction
    runtime, cell = run.runtime, _cell(action)
    following = runtime.plan.next_stage(cell.stage)
    with runtime.recorder.op(action, run.step):
        read = None if cell.stage == 0 else run.ledger.take_input(cell)
        output = runtime.stages[cell.stage](run.batch.tokens[cell.microbatch] if read is None else read)
        if following is None:
            output = runtime.loss_function(output, run.batch.targets[cell.microbatch])
            run.losses.append(output.detach())
        run.ledger.open(cell, read, output)
    if following is None:
        return
    if runtime.is_local(following):
        run.ledger.put_input(Cell(following, cell.microbatch), output)
    else:
        run.ledger.put_output(cell, output)


def backward(run: StepRun, instruction: Instruction) -> None:
    """B: gradients of the stage's parameters and of its input. Frees the graph."""
    (action,) = instruction
    runtime, cell = run.runtime, _cell(action)
    with runtime.recorder.op(action, run.step):
        flight = run.ledger.close(cell)
        if runtime.plan.next_stage(cell.stage) is None:
            # The loss of a step is the mean over its microbatches.
            gradient = run.losses[-1].new_full((), 1 / runtime.plan.num_microbatches)
        else:
            gradient = run.ledger.take_output_gradient(cell)
        torch.autograd.backward(flight.edge, gradient)
    preceding = runtime.plan.previous_stage(cell.stage)
    if preceding is None:
        return
    if flight.input is None or flight.input.grad is None:
        raise ScheduleError(f"{action}: the stage's output does not depend on its input, so nothing can be sent back")
    if runtime.is_local(preceding):
        run.ledger.put_output_gradient(Cell(preceding, cell.microbatch), flight.input.grad)
    else:
        run.ledger.put_input_gradient(cell, flight.input.grad)


def exchange(run: StepRun, instruction: Instruction) -> None:
    """A group of sends and receives. What was sent is let go of when the call is complete."""
    ledger = run.ledger
    messages = [
        Message(action, ledger.take_output(_cell(action)))
        if action.kind is Kind.SEND_F
        else Message(action, ledger.take_input_gradient(_cell(action)))
        if action.kind is Kind.SEND_B
        else Message(action)
        for action in instruction
    ]
    for action, tensor in zip(instruction, run.runtime.communicator.exchange(messages, run.step), strict=True):
        if tensor is None:
            continue
        if action.kind is Kind.RECV_F:
            ledger.put_input(_cell(action), tensor)
        else:
            ledger.put_output_gradient(_cell(action), tensor)


HANDLERS: Mapping[Kind, Handler] = MappingProxyType(
    {
        Kind.F: forward,
        Kind.B: backward,
        Kind.SEND_F: exchange,
        Kind.RECV_F: exchange,
        Kind.SEND_B: exchange,
        Kind.RECV_B: exchange,
    }
)
"""What the runtime can do. A runtime given another table can do other things."""


def _cell(action: Action) -> Cell:
    if action.microbatch is None:
        raise ScheduleError(f"{action} needs a microbatch")
    return Cell(action.stage, action.microbatch)


def _require_runnable(plan: Plan, handlers: Mapping[Kind, Handler]) -> None:
    for rank, actions in enumerate(plan.ranks):
        for action in actions:
            if action.kind not in handlers:
                raise ScheduleError(
                    f"{plan.name}: rank {rank} has {action} and this runtime cannot execute {action.kind}; "
                    f"it runs {', '.join(handlers)}"
                )
    crossing = any(plan.placement[stage] != plan.placement[stage + 1] for stage in range(plan.num_stages - 1))
    if crossing and not plan.has_comms:
        first = next(iter_halves(plan.ranks[0]))
        raise ScheduleError(f"{plan.name}: has no sends and receives (it begins with {first}); lower the plan first")
