"""Hooks of DeepSpeed's pipeline engine: stage, microbatch and kind of every op and message.

Source: ``deepspeed/runtime/pipe/{engine,p2p,dualpipev}.py`` of DeepSpeed 0.16 to 0.19. An engine runs the instructions of a
schedule through a table from instruction to function, which subclasses replace, so the table of each class is hooked when its
first pass begins. Messages go through ``p2p.send`` and ``p2p.recv``, one call for each tensor; DualPipeV posts those that
have gathered when it commits.

Which microbatch a buffer holds, and the plan, are followed instruction by instruction (``schedule.py`` there). Instructions name
a buffer, which a receive fills with the next microbatch, or the forward where nothing is received. DualPipeV's instructions have
a phase: phase 1 is the second chunk of a rank, on the way back to the first rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch

from instrument.adapters.hooks import Hook, Hooks, Watch, require
from instrument.adapters.tensor_bytes import num_bytes
from instrument.adapters.watched_pass import TransferWait, WatchedPass, watch_optimizer, watch_span
from instrument.adapters.works import Works
from instrument.recorder import Range, null_range
from instrument.session import Session
from pptrace.axes import MESH_ORDER
from pptrace.errors import PptraceError
from pptrace.marks import Link, SpanKind, Transfer
from pptrace.schedule import registry
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.plan import Plan
from pptrace.schedule.replay import replay
from pptrace.schedule.text import from_rows, to_rows

KINDS = {
    "ForwardPass": Kind.F,
    "BackwardPass": Kind.B,
    "SendActivation": Kind.SEND_F,
    "RecvActivation": Kind.RECV_F,
    "SendGrad": Kind.SEND_B,
    "RecvGrad": Kind.RECV_B,
}
LOAD = "LoadMicroBatch"
_SCHEDULES = "deepspeed.runtime.pipe.schedule"


@dataclass(slots=True)
class Buffers:
    """The buffers of one rank during a pass."""

    pp: int
    pp_rank: int
    _microbatches: dict[int, int] = field(default_factory=dict)
    _fresh: set[int] = field(default_factory=set)
    """Filled, and not used by a forward yet."""
    _num_filled: dict[int, int] = field(default_factory=dict)

    def action(self, instruction: str, arguments: Mapping[str, Any]) -> Action | None:
        """Action of an instruction; None where it is neither compute nor a message."""
        buffer, phase = arguments.get("buffer_id"), arguments.get("phase") or 0
        kind = KINDS.get(instruction)
        if not isinstance(buffer, int) or kind is None:
            return None
        if kind is Kind.RECV_F or (kind is Kind.F and buffer not in self._fresh):
            self._microbatches[buffer] = self._num_filled.get(phase, 0)
            self._num_filled[phase] = self._microbatches[buffer] + 1
            self._fresh.add(buffer)
        if kind is Kind.F:
            self._fresh.discard(buffer)
        if buffer not in self._microbatches:
            return None
        stage = self.pp_rank if phase == 0 else 2 * self.pp - 1 - self.pp_rank
        return Action(kind, stage, self._microbatches[buffer], phase)

    def peer(self, action: Action) -> int:
        """The pipeline rank at a message's other end."""
        ahead = action.kind in (Kind.SEND_F, Kind.RECV_B)
        return self.pp_rank + (1 if ahead == (action.chunk == 0) else -1)


def plan_of(schedule: Any) -> Plan | None:
    """The plan of a schedule object; None where it is a user's, whose instructions cannot be read ahead."""
    if type(schedule).__module__ != _SCHEDULES:
        return None
    pp, num_microbatches = int(schedule.stages), int(schedule.micro_batches)
    rows = [
        _row(type(schedule)(micro_batches=num_microbatches, stages=pp, stage_id=rank), pp, rank) for rank in range(pp)
    ]
    try:
        known = registry.build("1f1b", pp, num_microbatches, 1)
        if rows == to_rows(known):
            return known
        plan = from_rows(rows, "custom")
        return None if replay(plan).blocked else plan
    except PptraceError:
        return None


def _row(schedule: Any, pp: int, rank: int) -> list[str]:
    buffers = Buffers(pp, rank)
    actions = (
        buffers.action(type(command).__name__, command.kwargs) for commands in schedule.steps() for command in commands
    )
    return [str(action) for action in actions if action is not None and action.kind.is_compute]


FRAMEWORK = "deepspeed"
ENGINE = "deepspeed.runtime.pipe.engine"
_GROUPS = {"dp_proc_group": "dp", "pp_proc_group": "pp", "slice_proc_group": "tp"}
_AXES = {"pipe": "pp", "data": "dp", "model": "tp"}


@dataclass(slots=True)
class _Message:
    """The message of the instruction that runs: its range begins with the first tensor."""

    action: Action
    peer: int
    bytes: int = 0
    open: Range | None = None


@dataclass(slots=True)
class _Run:
    """The pass that runs now."""

    engine: Any
    buffers: Buffers
    message: _Message | None = None
    negotiates: int = 0
    """Depth of nested exchanges of shapes."""
    queued: list[Transfer] = field(default_factory=list)
    """Messages that wait for the next commit (DualPipeV)."""


class DeepSpeedHooks:
    """Watches the pipeline engines of this process."""

    def __init__(self, engine: ModuleType, hooks: Hooks, works: Works, listener: Session, axes: dict[str, str]) -> None:
        """Install the hooks; ``axes`` takes by name of a process group its axis.

        Raises:
            AttributeError: this is another DeepSpeed than those that are known.
        """
        kind = engine.PipelineEngine
        require(kind, ("_exec_schedule", "_INSTRUCTION_MAP", "_send_tensor_meta", "_recv_tensor_meta"))
        require(engine.p2p, ("send", "recv"))
        lacking = {*KINDS, LOAD} - {instruction.__name__ for instruction in kind._INSTRUCTION_MAP}
        if lacking:
            raise AttributeError(f"PipelineEngine has no instruction {min(lacking)!r}")
        self._hooks = hooks
        self._axes = axes
        self._listener = listener
        self._pass = WatchedPass(listener, works)
        self._run: _Run | None = None
        self._tables: dict[int, Any] = {}
        self._plans: dict[tuple[type, int, int], Plan | None] = {}
        hooks.wrap(kind, "_exec_schedule", self._watch_pass)
        for name in ("_send_tensor_meta", "_recv_tensor_meta"):
            hooks.wrap(kind, name, self._watch_negotiation)
        for name, sends in (("send", True), ("recv", False)):
            hooks.wrap(engine.p2p, name, partial(self._watch_tensor, sends))

    @property
    def _running(self) -> _Run | None:
        """The pass with backwards that runs now."""
        return self._run if self._pass.runs else None

    def _watch_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        self._begin_pass(args[0], args[1] if len(args) > 1 else kwargs["pipe_schedule"])
        try:
            yield
        finally:
            self._pass.end()
            self._run = None

    def _begin_pass(self, engine: Any, schedule: Any) -> None:
        self._run = None
        self._watch_instructions(type(engine)._INSTRUCTION_MAP)
        if not torch.is_grad_enabled():  # eval_batch
            self._pass.begin_evaluation()
            return
        grid = engine.grid
        pp, rank = int(grid.pipe_parallel_size), int(engine.stage_id)
        key = type(schedule), pp, int(engine.micro_batches)
        if key not in self._plans:
            self._plans[key] = plan_of(schedule)
            self._describe(engine, self._plans[key])
        self._run = _Run(engine, Buffers(pp, rank))
        self._pass.begin(self._plans[key], rank)

    def _describe(self, engine: Any, plan: Plan | None) -> None:
        grid = engine.grid
        sizes = {"pp": grid.pipe_parallel_size, "dp": grid.data_parallel_size, "tp": grid.model_parallel_size}
        named = [_AXES[axis] for axis in reversed(grid.topology().get_axis_names()) if axis in _AXES]
        order = [*(axis for axis in MESH_ORDER if axis not in named), *named]
        vpp = plan.num_stages // plan.pp if plan is not None else 1
        mesh: dict[str, int | str] = {axis: int(size) for axis, size in sizes.items()}
        mesh |= {"cp": 1, "ep": 1, "vpp": vpp, "order": "-".join(order)}
        ranks = [int(grid.stage_to_global(stage_id=stage)) for stage in range(int(grid.pipe_parallel_size))]
        for name, axis in _GROUPS.items():
            group = getattr(grid, name, None)
            if group is not None:
                self._axes.setdefault(str(group.group_name), axis)
        self._listener.describe_watched(FRAMEWORK, plan, ranks, mesh)

    def _watch_instructions(self, table: dict[type, Any]) -> None:
        if id(table) in self._tables:
            return
        self._tables[id(table)] = table
        for instruction, function in list(table.items()):
            hook = self._hook_of(instruction.__name__)
            if hook is not None and not hasattr(function, "__wrapped__"):  # a subclass copies what is hooked already
                self._hooks.replace_item(table, instruction, self._hooks.watched(function, hook))

    def _hook_of(self, instruction: str) -> Hook | None:
        if instruction == "OptimizerStep":
            return partial(watch_optimizer, self._listener)
        if instruction in ("ReduceGrads", "ReduceTiedGrads"):
            return partial(watch_span, self._listener, SpanKind.GRAD_SYNC)
        if instruction == "CommitP2P":
            return self._watch_commit
        if instruction == LOAD:
            return partial(watch_span, self._listener, SpanKind.DATA)
        kind = KINDS.get(instruction)
        if kind is None:
            return None
        return partial(self._watch_op if kind.is_compute else self._watch_message, instruction)

    def _action(self, instruction: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Action | None:
        """Action that an instruction is about to run; the engine passes its arguments by name."""
        run = self._running
        positional = dict(zip(("buffer_id", "phase"), args[1:], strict=False))
        return None if run is None else run.buffers.action(instruction, {**positional, **kwargs})

    def _watch_op(self, instruction: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        op = self._action(instruction, args, kwargs)
        if op is None:
            return
        self._pass.begin_op(op)
        try:
            yield
        finally:
            self._pass.end_op()

    def _watch_message(self, instruction: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        """The size of what several tensors carry stands in the mark of the wait."""
        run, action = self._running, self._action(instruction, args, kwargs)
        if run is None or action is None:
            return
        peer = int(run.engine.grid.stage_to_global(stage_id=run.buffers.peer(action)))
        num_queued = len(getattr(run.engine, "_p2p_ops", ()))
        message = run.message = _Message(action, peer)
        try:
            yield
            run.message = None
            message.bytes += num_bytes([op.tensor for op in getattr(run.engine, "_p2p_ops", ())[num_queued:]])
            transfer = Transfer(action, peer, message.bytes)
            if message.open is not None:
                wait = TransferWait(self._listener.recorder, transfer, self._listener.num_steps)
                wait.waiting()
                wait.completed()
            elif message.bytes:
                run.queued.append(transfer)
        finally:
            if message.open is not None:
                message.open.__exit__(None, None, None)

    def _watch_commit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        run = self._running
        if run is None:
            return
        transfers, run.queued = run.queued, []
        with self._pass.post(transfers) or null_range():
            yield

    def _watch_negotiation(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        """Shapes are sent before the first tensors: messages that carry no microbatch."""
        run = self._running
        if run is None:
            return
        run.negotiates += 1
        try:
            yield
        finally:
            run.negotiates -= 1

    def _watch_tensor(self, sends: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        """A tensor is sent or received: of the instruction's message, or a shape that goes before it."""
        run = self._running
        if run is None:
            return
        tensor = args[0] if args else kwargs["tensor"]
        message = run.message
        if run.negotiates:
            stage = int(args[1] if len(args) > 1 else kwargs["dest_stage" if sends else "src_stage"])
            link = Link(sends, int(run.engine.grid.stage_to_global(stage_id=stage)), num_bytes(tensor))
            with self._pass.exchange([link]):
                yield
        elif message is not None:
            if message.open is None and (posted := self._pass.post([Transfer(message.action, message.peer, 0)])):
                posted.__enter__()
                message.open = posted
            message.bytes += num_bytes(tensor)
