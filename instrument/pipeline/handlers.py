"""Handlers: how the runtime executes each kind of action."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from types import MappingProxyType

from torch import Tensor

from instrument.expert.pieces import InPieces, Pieces, Tape, alternate, run_through
from instrument.pipeline.instruction import Instruction, Posted
from instrument.pipeline.microbatch_buffers import ForwardState, Tensors
from instrument.pipeline.p2p import Message
from instrument.pipeline.step import Handler, StepRun
from pptrace.errors import ScheduleError
from pptrace.schedule.actions import Action, Cell, Kind, cell_of
from pptrace.schedule.plan import Plan


def forward(run: StepRun, instruction: Instruction) -> None:
    """F: the stage's forward, and the loss in the last stage. Keeps the graph for the backward."""
    (action,) = instruction
    cell = cell_of(action)
    _await(run, Kind.RECV_F, cell)
    with run.program.recorder.op(action, run.step):
        output = run_through(_forward_in_pieces(run, cell))
    _pass_output(run, cell, output)


def backward(run: StepRun, instruction: Instruction) -> None:
    """B: gradients of the stage's parameters and of its input. Frees the graph; I of its input alone, but for what W needs."""
    (action,) = instruction
    _await(run, Kind.RECV_B, cell_of(action))
    with run.program.recorder.op(action, run.step):
        state = run_through(_backward_in_pieces(run, action))
    _pass_input_gradient(run, action, state)


def weight_backward(run: StepRun, instruction: Instruction) -> None:
    """W: the weight gradients that the I of the same microbatch deferred, each released as soon as it is done."""
    (action,) = instruction
    with run.program.recorder.op(action, run.step):
        waiting = list(run.buffers.take_deferred_weight_grads(cell_of(action)))[::-1]
        while waiting:
            waiting.pop().run()


def overlap(run: StepRun, instruction: Instruction) -> None:
    """OVERLAP_F_B: a forward and a backward (B or I) of two microbatches as one op, one after the other or in pieces by turns.

    Neither waits for the other, and their outputs are passed on when both are done.
    """
    (action,) = instruction
    forward_half, backward_half = action.parts
    _await(run, Kind.RECV_F, cell_of(forward_half))
    _await(run, Kind.RECV_B, cell_of(backward_half))
    halves = _forward_in_pieces(run, cell_of(forward_half)), _backward_in_pieces(run, backward_half)
    with run.program.recorder.op(action, run.step):
        output, state = alternate(*halves)
    _pass_output(run, cell_of(forward_half), output)
    _pass_input_gradient(run, backward_half, state)


def transfer(run: StepRun, instruction: Instruction) -> None:
    """A group of sends and receives, only posted or awaited too. Sent tensors are released when the call is complete."""
    messages = [_message(run, action) for action in instruction]
    if isinstance(instruction, Posted):
        for action, arrival in run.program.communicator.post(messages, run.step):
            run.arrivals[action.kind, cell_of(action)] = arrival
        return
    for action, tensors in zip(instruction, run.program.communicator.exchange(messages, run.step), strict=True):
        if tensors is not None:
            _store_received(run, action.kind, cell_of(action), tensors)


def skip(run: StepRun, instruction: Instruction) -> None:
    """UNSHARD, RESHARD, REDUCE_GRAD: nothing to do (:func:`skipped_kinds` says so)."""


def skipped_kinds(plan: Plan) -> tuple[Kind, ...]:
    """The kinds of a plan's actions that the runtime passes over, to report before it runs.

    Parameters are whole on every rank, or ``fully_shard`` gathers and frees them; gradients are summed during and
    after the backward of the last microbatch, wherever a plan has its REDUCE_GRAD.
    """
    kinds = {action.kind for row in plan.ranks for action in row}
    return tuple(kind for kind, handler in HANDLERS.items() if handler is skip and kind in kinds)


_ON_THIS_RANK: Mapping[Kind, Handler] = {
    Kind.F: forward,
    Kind.B: backward,
    Kind.I: backward,
    Kind.W: weight_backward,
    Kind.OVERLAP_F_B: overlap,
    Kind.UNSHARD: skip,
    Kind.RESHARD: skip,
    Kind.REDUCE_GRAD: skip,
}
_P2P = (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)

HANDLERS: Mapping[Kind, Handler] = MappingProxyType({**_ON_THIS_RANK, **dict.fromkeys(_P2P, transfer)})
"""Kind of action → handler."""


def _forward_in_pieces(run: StepRun, cell: Cell) -> Pieces[Tensors]:
    """The forward, which pauses only where the program runs in pieces."""
    program, stage, tape = run.program, run.program.stages[cell.stage], Tape()
    run.buffers.begin_forward()
    is_first, is_last = (
        neighbour(cell.stage) is None for neighbour in (program.plan.previous_stage, program.plan.next_stage)
    )
    inputs = () if is_first else run.buffers.take_input(cell)
    kwargs = program.forward_kwargs(run.step, cell, run.batch)
    read = (run.batch.inputs_of(cell.microbatch),) if is_first else program.received(cell.stage, inputs)
    output: Tensor | Tensors
    if program.in_pieces and isinstance(stage, InPieces):
        output = yield from stage.in_pieces(read[0], tape, **kwargs)  # type: ignore[arg-type]
    else:
        output = stage(*read, **kwargs)
    outputs = (output,) if isinstance(output, Tensor) else output
    del output  # the loss does not keep the logits
    if is_last:
        outputs = (program.loss_function(outputs[0], run.batch.targets_of(cell.microbatch)),)
        run.losses.append(outputs[0].detach())
    else:
        outputs = program.sent(cell.stage, outputs)
    run.buffers.put_forward(cell, inputs, outputs, tape)
    return outputs


def _backward_in_pieces(run: StepRun, action: Action) -> Pieces[ForwardState]:
    """The backward (B, or I, which defers the gradients of weights), in the pieces that the forward had."""
    cell = cell_of(action)
    state = run.buffers.take_forward(cell)
    if run.program.plan.next_stage(cell.stage) is None:
        # The loss of a step is the mean over its microbatches.
        gradients: Tensors = (run.losses[-1].new_full((), 1 / run.program.plan.num_microbatches),)
    else:
        gradients = run.buffers.take_output_gradient(cell)
    with run.program.queues[cell.stage].collecting() if action.kind is Kind.I else nullcontext() as deferred:
        yield from state.tape.backward(state.edges, gradients)
    if deferred is not None:
        run.buffers.defer_weight_grads(cell, deferred)
    return state


def _pass_output(run: StepRun, cell: Cell, outputs: Tensors) -> None:
    """Pass the outputs to the next stage if that is on this rank, else store them for their sends."""
    following = run.program.plan.next_stage(cell.stage)
    if following is None:
        return
    if run.program.is_local(following):
        run.buffers.put_input(Cell(following, cell.microbatch), outputs)
    else:
        run.buffers.put_output(cell, outputs)


def _pass_input_gradient(run: StepRun, action: Action, state: ForwardState) -> None:
    """Pass the gradients of the inputs to the previous stage if that is on this rank, else store them for their sends."""
    cell = cell_of(action)
    preceding = run.program.plan.previous_stage(cell.stage)
    if preceding is None:
        return
    gradients = tuple(tensor.grad for tensor in state.inputs if tensor.grad is not None)
    if not gradients or len(gradients) < len(state.inputs):
        raise ScheduleError(f"{action}: the stage's output does not depend on its input, so nothing can be sent back")
    if run.program.is_local(preceding):
        run.buffers.put_output_gradient(Cell(preceding, cell.microbatch), gradients)
    else:
        run.buffers.put_input_gradient(cell, gradients)


def _message(run: StepRun, action: Action) -> Message:
    if action.kind is Kind.SEND_F:
        return Message(action, run.buffers.take_output(cell_of(action)))
    if action.kind is Kind.SEND_B:
        return Message(action, run.buffers.take_input_gradient(cell_of(action)))
    return Message(action)


def _await(run: StepRun, kind: Kind, cell: Cell) -> None:
    if arrival := run.arrivals.pop((kind, cell), None):
        _store_received(run, kind, cell, arrival.wait(run.step))


def _store_received(run: StepRun, kind: Kind, cell: Cell, tensors: Tensors) -> None:
    if kind is Kind.RECV_F:
        run.buffers.put_input(cell, tensors)
    else:
        run.buffers.put_output_gradient(cell, tensors)
