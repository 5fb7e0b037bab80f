"""Executes a lowered plan: walks this rank's instructions through a table kind → handler.

An instruction is one compute action, or a group of sends and receives that are posted together
(:meth:`pptrace.schedule.plan.Plan.instructions`, and :mod:`instrument.pipeline.order` for other groups than the plan's).
New kinds of action are new entries of the table.

An evaluation runs the plan's forwards in their order, without gradients and dropout. What each rank may run before its weights
are validated is its speculative prefix.

The *speculative prefix* of a rank's instructions consists of forwards and their messages only, and it is closed under messages:
of each message the prefixes of all ranks hold both ends or none. So when all ranks have run their prefixes no message is
under way, and each may drop what it has computed and restart the step.

The last rank has no prefix: it has the whole state, from which the others' answer comes, before it can begin.
Used by :mod:`instrument.optim.clipping`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from instrument.data.text import Batch
from instrument.expert.pieces import Tape
from instrument.expert_counts import ExpertCounts
from instrument.optim.clipping import ClippedOptimizer
from instrument.optim.gradient_sync import Finish, GradientSync
from instrument.pipeline.handlers import HANDLERS
from instrument.pipeline.instruction import Instruction
from instrument.pipeline.megatron_calls import Calls
from instrument.pipeline.microbatch_buffers import MicrobatchBuffers, Tensors
from instrument.pipeline.order import Posting, arrange
from instrument.pipeline.step import Handler, RankProgram, StepRun
from instrument.recorder import Recorder
from pptrace.errors import ScheduleError
from pptrace.marks import SpanKind
from pptrace.schedule.actions import Action, Cell, Kind, iter_halves
from pptrace.schedule.lower import lower
from pptrace.schedule.messages import Message, message_of, peer_of
from pptrace.schedule.plan import Plan

_REPEATABLE = frozenset({Kind.F, Kind.SEND_F, Kind.RECV_F, Kind.UNSHARD})
"""Kinds without side effects, whose results can be dropped."""


def prefix_lengths(plan: Plan, instructions: Sequence[Sequence[Instruction]]) -> tuple[int, ...]:
    """Number of instructions in each rank's speculative prefix: the longest prefixes that are closed under messages.

    Args:
        plan: whose messages they are.
        instructions: rank → all its instructions (:func:`instrument.pipeline.order.arrange`). Those posted together
            are cut together.
    """
    lengths = [_repeatable(row) for row in instructions[:-1]] + [0]
    while True:
        ends = [
            {message_of(plan, action) for group in row[:length] for action in group if action.kind.is_p2p}
            for row, length in zip(instructions, lengths, strict=True)
        ]
        closed = [_closed(plan, row[:length], ends) for row, length in zip(instructions, lengths, strict=True)]
        if closed == lengths:
            return tuple(closed)
        lengths = closed


def _repeatable(row: Sequence[Instruction]) -> int:
    """Number of instructions before the first that cannot be run again."""
    for index, group in enumerate(row):
        if any(action.kind not in _REPEATABLE for action in group):
            return index
    return len(row)


def _closed(plan: Plan, prefix: Sequence[Instruction], ends: Sequence[set[Message]]) -> int:
    """Number of instructions before the first with a message whose other end is in no prefix."""
    for index, group in enumerate(prefix):
        for action in group:
            if action.kind.is_p2p and message_of(plan, action) not in ends[peer_of(plan, action)]:
                return index
    return len(prefix)


def forwards_of(plan: Plan) -> Plan:
    """The forwards of a plan, each rank's in its order, with the sends and receives that they need."""
    rows = tuple(tuple(half for action in row for half in action.halves if half.kind is Kind.F) for row in plan.ranks)
    return lower(replace(plan, name=f"forwards of {plan.name}", ranks=rows))


class ForwardBuffers(MicrobatchBuffers):
    """Inputs and outputs of microbatches that have no backward: no graph is kept."""

    def put_input(self, cell: Cell, received: Tensors) -> None:
        self._inputs[cell] = received

    def put_forward(self, cell: Cell, inputs: Tensors, outputs: Tensors, tape: Tape | None = None) -> None:
        """Keep nothing: no backward will ask for it."""


@contextmanager
def evaluating(stages: Iterable[nn.Module], recorder: Recorder) -> Iterator[None]:
    """Compute without gradients and dropout, and count no routes of experts: predictions are of the steps that train."""
    modules, counts = nn.ModuleList(stages), recorder.expert_counts
    recorder.expert_counts = ExpertCounts()
    modules.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        modules.train()
        recorder.expert_counts = counts


class Optimizer(Protocol):
    """One of torch's, or :class:`instrument.optim.adamw.AdamW`."""

    def step(self) -> object: ...

    def zero_grad(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """Result of a step.

    ``loss`` is the mean over the microbatches of all pipelines, on ranks that hold the last stage, else None; it stays
    on its device. ``peak_in_flight`` is the most forwards whose backward (B or I) had not run yet, all chunks together;
    ``peak_deferred_weight_grads`` the most I whose W had not.
    """

    loss: Tensor | None
    peak_in_flight: int
    peak_deferred_weight_grads: int


class PipelineRuntime:
    """Runs one pipeline rank's part of a plan, step after step.

    Args:
        program: the plan and what this rank runs it with.
        gradients: sums between ranks after the last microbatch.
        posting: when transfers are posted and awaited.
        handlers: kind → handler; None: all of this runtime's.

    Raises:
        ScheduleError: the plan has a kind without a handler, or stages that ``program`` lacks, or transfers that
            cannot be posted so; before anything runs.
    """

    def __init__(
        self,
        program: RankProgram,
        gradients: GradientSync,
        posting: Posting = Posting(),  # noqa: B008
        handlers: Mapping[Kind, Handler] | None = None,
    ) -> None:
        self.program = program
        self.gradients = gradients
        self.make_buffers: Callable[[], MicrobatchBuffers] = MicrobatchBuffers  # memory.measure has one that observes
        self._handlers = handlers or HANDLERS
        plan, pp_rank = program.plan, program.pp_rank
        _require_runnable(plan, self._handlers)
        self._posting = posting
        self._instructions = arrange(plan, pp_rank, posting)
        if set(program.stages) != set(plan.stages_of(pp_rank)):
            raise ScheduleError(
                f"{plan.name}: rank {pp_rank} runs stages {plan.stages_of(pp_rank)} and its program has "
                f"{tuple(program.stages)}"
            )
        _ = program.queues  # attached before the first forward

    def run(self, batch: Batch, step: int, optimizer: ClippedOptimizer | None = None) -> StepResult:
        """Run all microbatches forward and backward, then the gradient sums. Gradients add to what ``.grad`` holds.

        Args:
            batch: of this pipeline; read by the first stage (tokens) and the last (targets).
            step: number of the step, for the ranges.
            optimizer: validated at the end of the speculative prefix (:mod:`instrument.pipeline.runtime`), which
                runs again with the weights that it leaves, where it had to change any.
        """
        self.program.recorder.step = step
        run = StepRun(self.program, step, batch, self.make_buffers())
        start = 0
        if optimizer is not None:
            self._execute(run, 0, self.num_speculative)
            start = self.num_speculative
            if optimizer.validate(step):
                self._complete(run)
                self.gradients.forget_forwards()
                run, start = StepRun(self.program, step, batch, self.make_buffers()), 0
        self._execute(run, start, len(self._instructions))
        self.program.communicator.complete_sends(step)
        self.gradients.run(step)
        loss = None
        if run.losses:
            loss = self.gradients.mean_loss(torch.stack(run.losses), step)
        return StepResult(loss, run.buffers.peak_in_flight, run.buffers.peak_deferred_weight_grads)

    def evaluate(self, batch: Batch, step: int) -> Tensor | None:
        """Run all microbatches forward alone, in a range of evaluation: the mean loss, on ranks that hold the last stage.

        Args:
            batch: of this pipeline, as for :meth:`run`.
            step: number of the step that was trained last, for the ranges.
        """
        recorder, communicator = self.program.recorder, self.program.communicator
        recorder.step = step
        run = StepRun(self._forwards.program, step, batch, ForwardBuffers())
        with recorder.span(SpanKind.EVAL, step), evaluating(self.program.stages.values(), recorder):
            self._forwards._execute(run, 0, len(self._forwards._instructions))
            communicator.complete_sends(step)
            loss = self.gradients.mean_loss(torch.stack(run.losses), step) if run.losses else None
        self.gradients.forget_forwards()
        return loss

    @cached_property
    def _forwards(self) -> PipelineRuntime:
        """The same stages and links with the forwards of the plan alone, each call between two of them."""
        plan = forwards_of(self.program.plan)
        program = replace(self.program, plan=plan, recomputed=frozenset(), in_pieces=False)
        return PipelineRuntime(program, self.gradients, replace(self._posting, calls=Calls.PLAN))

    def optimize(self, optimizer: Optimizer, step: int) -> None:
        """Run one optimizer step and clear the gradients."""
        with self.program.recorder.span(SpanKind.OPTIMIZER, step):
            optimizer.step()
        optimizer.zero_grad()

    @cached_property
    def num_speculative(self) -> int:
        """Number of this rank's instructions that may run with weights that are not validated."""
        arranged = [arrange(self.program.plan, rank, self._posting) for rank in range(self.program.plan.pp)]
        return prefix_lengths(self.program.plan, arranged)[self.program.pp_rank]

    @cached_property
    def _sending(self) -> Mapping[Action, Sequence[Finish]]:
        return self.gradients.sending(self.program.plan.compute_actions(self.program.pp_rank))

    def _execute(self, run: StepRun, start: int, end: int) -> None:
        for instruction in self._instructions[start:end]:
            finishes = self._sending.get(instruction[0])
            if finishes is None:
                self._handlers[instruction[0].kind](run, instruction)
                continue
            with self.gradients.finishing(finishes):
                self._handlers[instruction[0].kind](run, instruction)

    def _complete(self, run: StepRun) -> None:
        """Wait for all transfers of a run that is abandoned; the prefixes of all ranks hold both ends of each."""
        for arrival in run.arrivals.values():
            arrival.wait(run.step)
        self.program.communicator.complete_sends(run.step)


def _require_runnable(plan: Plan, handlers: Mapping[Kind, Handler]) -> None:
    for rank, actions in enumerate(plan.ranks):
        for action in actions:
            if action.kind not in handlers:
                raise ScheduleError(
                    f"{plan.name}: rank {rank} has {action} and this runtime cannot execute {action.kind}; "
                    f"it runs {', '.join(handlers)}"
                )
    followed = [(stage, plan.next_stage(stage)) for stage in range(plan.num_stages)]
    crossing = any(after is not None and plan.placement[stage] != plan.placement[after] for stage, after in followed)
    if crossing and not plan.has_comms:
        first = next(iter_halves(plan.ranks[0]))
        raise ScheduleError(f"{plan.name}: has no sends and receives (it begins with {first}); lower the plan first")
