"""Executes a lowered plan: walks this rank's instructions through a table kind → handler.

An instruction is one compute action, or a group of sends and receives that are posted together
(:meth:`pptrace.schedule.plan.Plan.instructions`, and :mod:`instrument.pipeline.order` for other groups than the plan's).
New kinds of action are new entries of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from instrument.data.text import Batch
from instrument.pipeline.gradients import GradientSync, finishing_actions
from instrument.pipeline.handlers import HANDLERS, POSTING_HANDLERS, Handler, StepRun
from instrument.pipeline.ledger import Ledger
from instrument.pipeline.order import Posting, arrange
from instrument.pipeline.p2p import Cell, Communicator
from instrument.pipeline.speculation import prefix_lengths
from instrument.pipeline.split import attach
from instrument.pipeline.validation import ClippedOptimizer
from instrument.recorder import Recorder
from instrument.sequence.dropout import Moment
from pptrace.errors import ScheduleError
from pptrace.marks import SpanKind
from pptrace.schedule.actions import Kind, iter_halves
from pptrace.schedule.plan import Plan


class Optimizer(Protocol):
    """One of torch's, or :class:`instrument.pipeline.optimizer.AdamW`."""

    def step(self) -> object: ...

    def zero_grad(self) -> None: ...


LossFunction = Callable[[Tensor, Tensor], Tensor]
"""(output of the last stage, targets) of one microbatch → scalar."""


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What a step gives back.

    ``loss`` is the mean over the microbatches of all pipelines, on ranks that hold the last stage, else None; it stays
    on its device. ``peak_in_flight`` counts forwards whose backward (B or I) had not run yet, all chunks together, at
    most; ``peak_put_aside`` input gradients whose weight gradients had not.
    """

    loss: Tensor | None
    peak_in_flight: int
    peak_put_aside: int


class PipelineRuntime:
    """Runs one pipeline rank's part of a plan, step after step.

    Args:
        plan: lowered; validated by the caller where it does not come from a builder.
        pp_rank: this rank's place in the pipeline.
        stages: stage → module, for every stage that the plan places on this rank.
        loss_function: of the last stage.
        communicator: sends and receives for this rank.
        gradients: sums between ranks after the last microbatch.
        posting: when transfers are posted and awaited.
        handlers: kind → handler; left out, those that fit ``posting``.
        recomputed: microbatches whose forward is told to keep its input alone (``stage(x, recompute=True)``).
        numbered: every forward is told its step and microbatch (``stage(x, moment=…)``).

    Raises:
        ScheduleError: the plan has a kind without a handler, or stages that are not given, or transfers that cannot be
            posted so; before anything runs.
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
        posting: Posting = Posting(),  # noqa: B008
        handlers: Mapping[Kind, Handler] | None = None,
        recomputed: frozenset[Cell] = frozenset(),
        numbered: bool = False,
    ) -> None:
        self.plan = plan
        self.pp_rank = pp_rank
        self.stages = dict(stages)
        self.loss_function = loss_function
        self.communicator = communicator
        self.gradients = gradients
        self.recorder = recorder
        self._recomputed = recomputed
        self._numbered = numbered
        self.make_ledger: Callable[[], Ledger] = Ledger  # memory.measure has one that observes
        self._handlers = handlers or (POSTING_HANDLERS if posting.ahead else HANDLERS)
        _require_runnable(plan, self._handlers)
        self._posting = posting
        self._instructions = arrange(plan, pp_rank, posting)
        self._finishing = finishing_actions(plan.compute_actions(pp_rank))
        if set(self.stages) != set(plan.stages_of(pp_rank)):
            raise ScheduleError(
                f"{plan.name}: rank {pp_rank} runs stages {plan.stages_of(pp_rank)} and was given {tuple(self.stages)}"
            )
        # Layers without a queue are torch's own: plans that never split the backward keep the fused one.
        self.queues = {stage: attach(module) for stage, module in self.stages.items()} if plan.splits_backward else {}

    def run(self, batch: Batch, step: int, optimizer: ClippedOptimizer | None = None) -> StepResult:
        """All microbatches forward and backward, then the gradient sums. Gradients add to what ``.grad`` holds.

        Args:
            batch: of this pipeline; read by the first stage (tokens) and the last (targets).
            step: number of the step, for the ranges.
            optimizer: validated at the end of the speculative prefix (:mod:`instrument.pipeline.speculation`), which
                runs again with the weights that it leaves, where it had to change any.
        """
        self.recorder.step = step
        run = StepRun(self, step, batch, self.make_ledger(), [])
        start = 0
        if optimizer is not None:
            self._execute(run, 0, self.num_speculative)
            start = self.num_speculative
            if optimizer.validate(step):
                self._complete(run)
                run, start = StepRun(self, step, batch, self.make_ledger(), []), 0
        self._execute(run, start, len(self._instructions))
        self.communicator.complete_sends(step)
        self.gradients.run(step)
        loss = None
        if run.losses:
            loss = self.gradients.mean_loss(torch.stack(run.losses), step)
        return StepResult(loss, run.ledger.peak_in_flight, run.ledger.peak_put_aside)

    def optimize(self, optimizer: Optimizer, step: int) -> None:
        """One optimizer step, and gradients cleared for the next."""
        with self.recorder.span(SpanKind.OPTIMIZER, step):
            optimizer.step()
        optimizer.zero_grad()

    @cached_property
    def num_speculative(self) -> int:
        """How many of this rank's instructions may run with weights that are not validated."""
        arranged = [arrange(self.plan, rank, self._posting) for rank in range(self.plan.pp)]
        return prefix_lengths(self.plan, arranged)[self.pp_rank]

    def _execute(self, run: StepRun, start: int, end: int) -> None:
        for instruction in self._instructions[start:end]:
            finishes = self._finishing.get(instruction[0])
            if finishes is None:
                self._handlers[instruction[0].kind](run, instruction)
                continue
            with self.gradients.finishing(finishes):
                self._handlers[instruction[0].kind](run, instruction)

    def _complete(self, run: StepRun) -> None:
        """Wait for all transfers of a run that is given up; the prefixes of all ranks hold both ends of each."""
        for arrival in run.arrivals.values():
            arrival.wait(run.step)
        self.communicator.complete_sends(run.step)

    def told(self, step: int, cell: Cell) -> dict[str, object]:
        """What a stage's forward is told beside its input."""
        told: dict[str, object] = {"recompute": True} if cell in self._recomputed else {}
        if self._numbered:
            told["moment"] = Moment(step, cell.microbatch)
        return told

    def is_local(self, stage: int | None) -> bool:
        """Whether this rank runs a stage, so that its neighbours on this rank hand over without a message."""
        return stage in self.stages

    def parameters(self) -> Iterable[nn.Parameter]:
        """Every parameter of this rank's stages once."""
        return nn.ModuleList(self.stages.values()).parameters()


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
