"""What the runtime does for each kind of action."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from instrument.pipeline.ledger import Flight
from instrument.pipeline.p2p import Cell, Message
from instrument.pipeline.step import Handler, Instruction, StepRun
from pptrace.errors import ScheduleError
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.plan import Plan


def forward(run: StepRun, instruction: Instruction) -> None:
    """F: the stage's forward, and the loss in the last stage. Keeps the graph for the backward."""
    (action,) = instruction
    cell = _cell(action)
    _await_input(run, cell)
    with run.program.recorder.op(action, run.step):
        output = _compute_forward(run, cell)
    _hand_on(run, cell, output)


def backward(run: StepRun, instruction: Instruction) -> None:
    """B: gradients of the stage's parameters and of its input. Frees the graph."""
    (action,) = instruction
    cell = _cell(action)
    _await_output_gradient(run, cell)
    with run.program.recorder.op(action, run.step):
        flight = _compute_backward(run, cell)
    _hand_back(run, action, flight)


def input_backward(run: StepRun, instruction: Instruction) -> None:
    """I: the gradient of the stage's input. Frees the graph but for what the weight gradients need."""
    (action,) = instruction
    cell = _cell(action)
    _await_output_gradient(run, cell)
    with run.program.recorder.op(action, run.step):
        flight = _compute_input_backward(run, cell)
    _hand_back(run, action, flight)


def weight_backward(run: StepRun, instruction: Instruction) -> None:
    """W: the weight gradients that the I of the same microbatch has put aside, each let go of as soon as it is done."""
    (action,) = instruction
    with run.program.recorder.op(action, run.step):
        waiting = list(run.ledger.take_weights(_cell(action)))[::-1]
        while waiting:
            waiting.pop().run()


def overlap(run: StepRun, instruction: Instruction) -> None:
    """OVERLAP_F_B: a forward and a backward (B or I) of two microbatches as one op, one after the other.

    Neither waits for the other, and their outputs are handed on when both are done.
    """
    (action,) = instruction
    ahead, back = action.parts
    _await_input(run, _cell(ahead))
    _await_output_gradient(run, _cell(back))
    compute = _compute_backward if back.kind is Kind.B else _compute_input_backward
    with run.program.recorder.op(action, run.step):
        output = _compute_forward(run, _cell(ahead))
        flight = compute(run, _cell(back))
    _hand_on(run, _cell(ahead), output)
    _hand_back(run, back, flight)


def exchange(run: StepRun, instruction: Instruction) -> None:
    """A group of sends and receives. What was sent is let go of when the call is complete."""
    messages = [_message(run, action) for action in instruction]
    for action, tensor in zip(instruction, run.program.communicator.exchange(messages, run.step), strict=True):
        if tensor is not None:
            _arrived(run, action.kind, _cell(action), tensor)


def post(run: StepRun, instruction: Instruction) -> None:
    """A group of sends and receives that are posted only: what is received is awaited by the action that reads it."""
    messages = [_message(run, action) for action in instruction]
    for action, arrival in run.program.communicator.post(messages, run.step):
        run.arrivals[action.kind, _cell(action)] = arrival


def skip(run: StepRun, instruction: Instruction) -> None:
    """UNSHARD, RESHARD, REDUCE_GRAD: nothing to do (:func:`skipped_kinds` says so)."""


def skipped_kinds(plan: Plan) -> tuple[Kind, ...]:
    """The kinds of a plan's actions that the runtime passes over, to be said before it runs.

    Parameters are whole on every rank, or ``fully_shard`` gathers and frees them by itself; gradients are summed during and
    after the backward of the last microbatch, wherever a plan has its REDUCE_GRAD.
    """
    kinds = {action.kind for row in plan.ranks for action in row}
    return tuple(kind for kind, handler in HANDLERS.items() if handler is skip and kind in kinds)


_ON_THIS_RANK: Mapping[Kind, Handler] = {
    Kind.F: forward,
    Kind.B: backward,
    Kind.I: input_backward,
    Kind.W: weight_backward,
    Kind.OVERLAP_F_B: overlap,
    Kind.UNSHARD: skip,
    Kind.RESHARD: skip,
    Kind.REDUCE_GRAD: skip,
}
_P2P = (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)

HANDLERS: Mapping[Kind, Handler] = MappingProxyType({**_ON_THIS_RANK, **dict.fromkeys(_P2P, exchange)})
"""What the runtime can do. A runtime given another table can do other things."""

POSTING_HANDLERS: Mapping[Kind, Handler] = MappingProxyType({**_ON_THIS_RANK, **dict.fromkeys(_P2P, post)})
"""The same with transfers that overlap compute."""


def _compute_forward(run: StepRun, cell: Cell) -> Tensor:
    program = run.program
    read = None if program.plan.previous_stage(cell.stage) is None else run.ledger.take_input(cell)
    kwargs = program.forward_kwargs(run.step, cell)
    output: Tensor = program.stages[cell.stage](
        run.batch.tokens_of(cell.microbatch) if read is None else read, **kwargs
    )
    if program.plan.next_stage(cell.stage) is None:
        output = program.loss_function(output, run.batch.targets_of(cell.microbatch))
        run.losses.append(output.detach())
    run.ledger.open(cell, read, output)
    return output


def _compute_backward(run: StepRun, cell: Cell) -> Flight:
    flight = run.ledger.close(cell)
    if run.program.plan.next_stage(cell.stage) is None:
        # The loss of a step is the mean over its microbatches.
        gradient = run.losses[-1].new_full((), 1 / run.program.plan.num_microbatches)
    else:
        gradient = run.ledger.take_output_gradient(cell)
    torch.autograd.backward(flight.edge, gradient)
    return flight


def _compute_input_backward(run: StepRun, cell: Cell) -> Flight:
    with run.program.queues[cell.stage].collecting() as work:
        flight = _compute_backward(run, cell)
    run.ledger.put_aside(cell, work)
    return flight


def _hand_on(run: StepRun, cell: Cell, output: Tensor) -> None:
    """Give the output to the next stage, if that is on this rank, or keep it for its send."""
    following = run.program.plan.next_stage(cell.stage)
    if following is None:
        return
    if run.program.is_local(following):
        run.ledger.put_input(Cell(following, cell.microbatch), output)
    else:
        run.ledger.put_output(cell, output)


def _hand_back(run: StepRun, action: Action, flight: Flight) -> None:
    """Give the gradient of the input to the previous stage, if that is on this rank, or keep it for its send."""
    cell = _cell(action)
    preceding = run.program.plan.previous_stage(cell.stage)
    if preceding is None:
        return
    if flight.input is None or flight.input.grad is None:
        raise ScheduleError(f"{action}: the stage's output does not depend on its input, so nothing can be sent back")
    if run.program.is_local(preceding):
        run.ledger.put_output_gradient(Cell(preceding, cell.microbatch), flight.input.grad)
    else:
        run.ledger.put_input_gradient(cell, flight.input.grad)


def _message(run: StepRun, action: Action) -> Message:
    if action.kind is Kind.SEND_F:
        return Message(action, run.ledger.take_output(_cell(action)))
    if action.kind is Kind.SEND_B:
        return Message(action, run.ledger.take_input_gradient(_cell(action)))
    return Message(action)


def _await_input(run: StepRun, cell: Cell) -> None:
    _await(run, Kind.RECV_F, cell)


def _await_output_gradient(run: StepRun, cell: Cell) -> None:
    _await(run, Kind.RECV_B, cell)


def _await(run: StepRun, kind: Kind, cell: Cell) -> None:
    if arrival := run.arrivals.pop((kind, cell), None):
        _arrived(run, kind, cell, arrival.wait(run.step))


def _arrived(run: StepRun, kind: Kind, cell: Cell, tensor: Tensor) -> None:
    if kind is Kind.RECV_F:
        run.ledger.put_input(cell, tensor)
    else:
        run.ledger.put_output_gradient(cell, tensor)


def _cell(action: Action) -> Cell:
    if action.microbatch is None:
        raise ScheduleError(f"{action} needs a microbatch")
    return Cell(action.stage, action.microbatch)
