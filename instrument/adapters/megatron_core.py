"""Hooks of Megatron-LM (``megatron-core``): stage, microbatch and kind of every op and message of its schedules.

Source: ``megatron/core/pipeline_parallel/{schedules,p2p_communication,combined_1f1b}.py`` of megatron-core 0.12 to 0.16. All
schedules compute through ``forward_step`` and ``backward_step`` (or ``combined_forward_backward_step``) and send and receive
through ``_p2p_ops`` or ``_batched_p2p_ops``, so these four know everything. A message to the next rank is an activation, one
to the previous rank a gradient; what is sent belongs to the op that ran last, what is received to the next op that needs it.

The progress of a pass is the op and the message that it runs next.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from instrument.adapters.hooks import Hooks, Watch, arguments_of, require, require_parameters
from instrument.adapters.megatron_plans import PassShape, Work, plan_of
from instrument.adapters.megatron_state import STATE, mesh_of
from instrument.adapters.tensor_bytes import num_bytes
from instrument.adapters.watched_pass import WatchedPass
from instrument.adapters.works import Works, is_work
from instrument.session import Session
from pptrace.marks import Link, Transfer
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.plan import Plan


@dataclass(slots=True)
class Run:
    """The pass that runs now, as far as it has come."""

    shape: PassShape
    rank: int
    models: Sequence[Any]
    forward: Action | None = None
    backward: Action | None = None
    """The ops that began last."""
    num_begun: dict[Kind, int] = field(default_factory=lambda: {Kind.F: 0, Kind.B: 0})
    num_received: dict[Kind, int] = field(default_factory=lambda: {Kind.RECV_F: 0, Kind.RECV_B: 0})
    of_output: dict[int, Work] = field(default_factory=dict)
    """Work of each forward by id of its first output; the schedule keeps that tensor until the backward."""

    def action(self, kind: Kind, work: Work) -> Action:
        chunk, microbatch = work
        return Action(kind, chunk * self.shape.pp + self.rank, microbatch, chunk)

    def begin_forward(self, model: Any, microbatch: int | None) -> Action:
        count = self.num_begun[Kind.F]
        self.num_begun[Kind.F] += 1
        chunk = next((index for index, known in enumerate(self.models) if known is model), None)
        if chunk is None or microbatch is None:
            planned = self.shape.forwards[count]
            chunk, microbatch = planned[0] if chunk is None else chunk, planned[1]
        self.forward = self.action(Kind.F, (chunk, microbatch))
        return self.forward

    def forward_gave(self, forward: Action, output: Any) -> None:
        tensor = _first_tensor(output)
        if tensor is not None and forward.microbatch is not None:
            self.of_output[id(tensor)] = (forward.chunk, forward.microbatch)

    def begin_backward(self, output: Any) -> Action:
        count = self.num_begun[Kind.B]
        self.num_begun[Kind.B] += 1
        work = self.of_output.pop(id(_first_tensor(output)), None) or self.shape.backwards[count]
        self.backward = self.action(Kind.B, work)
        return self.backward

    def message(self, kind: Kind) -> Action | None:
        """Action of a message that is about to be posted; None where no op needs it."""
        if kind.is_send:
            op = self.forward if kind is Kind.SEND_F else self.backward
            return None if op is None else Action(kind, op.stage, op.microbatch, op.chunk)
        if self.shape.num_chunks == 1:  # the next one, however many tensors it consists of
            microbatch = self.num_begun[Kind.F if kind is Kind.RECV_F else Kind.B]
            return self.action(kind, (0, microbatch)) if microbatch < self.shape.num_microbatches else None
        order = self.shape.received(kind, self.rank)
        count = self.num_received[kind]
        self.num_received[kind] += 1
        return self.action(kind, order[count]) if count < len(order) else None


def _first_tensor(value: Any) -> torch.Tensor | None:
    """The first tensor of an output, which may be one, or a list, or (of ``forward_step``) a pair with a number of tokens."""
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return value if isinstance(value, torch.Tensor) else None


FRAMEWORK = "megatron-lm"
SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_P2P = "megatron.core.pipeline_parallel.p2p_communication"
_COMBINED = "megatron.core.pipeline_parallel.combined_1f1b"
_PASSES = {
    "forward_backward_no_pipelining": False,
    "forward_backward_pipelining_without_interleaving": False,
    "forward_backward_pipelining_with_interleaving": True,
}
"""The functions that run a pass, and whether it is interleaved."""
_MESSAGES = {
    "tensor_recv_prev": Kind.RECV_F,
    "tensor_send_next": Kind.SEND_F,
    "tensor_recv_next": Kind.RECV_B,
    "tensor_send_prev": Kind.SEND_B,
}
_SHAPE_BYTES = 24
"""Bytes of the shape of a tensor, three int64, that is sent before it where sequence lengths vary."""


class MegatronHooks:
    """Watches the schedules of this process."""

    def __init__(self, schedules: ModuleType, hooks: Hooks, works: Works, listener: Session) -> None:
        """Install the hooks.

        Raises:
            AttributeError: this is another Megatron-LM than those that are known.
        """
        p2p, self._state = sys.modules[_P2P], sys.modules[STATE]
        require(self._state, ("get_pipeline_model_parallel_group",))
        require(schedules, ("get_model_config",))
        for name in _PASSES:
            require_parameters(schedules, name, ("model", "num_microbatches", "forward_only"))
        require_parameters(schedules, "forward_step", ("model", "current_microbatch"))
        require_parameters(schedules, "backward_step", ("output_tensor",))
        for name in ("_p2p_ops", "_batched_p2p_ops"):
            require_parameters(p2p, name, (*_MESSAGES, "prev_pipeline_rank", "next_pipeline_rank"))
        self._schedules = schedules
        self._pass = WatchedPass(listener, works)
        self._run: Run | None = None
        self._plans: dict[PassShape, Plan | None] = {}
        self._described: tuple[PassShape, tuple[int, ...]] | None = None
        for name, interleaved in _PASSES.items():
            hooks.wrap(schedules, name, partial(self._watch_pass, interleaved))
        forward, backward = map(inspect.signature, (schedules.forward_step, schedules.backward_step))
        hooks.wrap(schedules, "forward_step", partial(self._watch_forward, forward))
        hooks.wrap(schedules, "backward_step", partial(self._watch_backward, backward))
        for name in ("_p2p_ops", "_batched_p2p_ops"):
            hooks.wrap(p2p, name, self._watch_messages)
        owner = getattr(p2p, "P2PCommunicator", p2p)
        if hasattr(owner, "_communicate_shapes"):
            shapes = inspect.signature(owner._communicate_shapes)
            hooks.wrap(owner, "_communicate_shapes", partial(self._watch_shapes, shapes))
        combined = sys.modules.get(_COMBINED)
        if combined is not None:
            name = "combined_forward_backward_step"
            require_parameters(combined, name, ("f_model", "b_model", "b_output_tensor", "current_microbatch"))
            hooks.wrap(combined, name, partial(self._watch_combined, inspect.signature(getattr(combined, name))))

    @property
    def _running(self) -> Run | None:
        """The pass with backwards that runs now."""
        return self._run if self._pass.runs else None

    def _watch_pass(self, interleaved: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        self._begin_pass(interleaved, kwargs)
        try:
            yield
        finally:
            self._pass.end()
            self._run = None

    def _begin_pass(self, interleaved: bool, arguments: Mapping[str, Any]) -> None:
        self._run = None
        if arguments.get("forward_only", False):
            self._pass.begin_evaluation()
            return
        model = arguments["model"]
        models = model if isinstance(model, list | tuple) else [model]
        config = self._schedules.get_model_config(models[0])
        group = self._pipeline(arguments.get("p2p_communicator"))
        ranks = tuple(dist.get_process_group_ranks(group))
        shape = PassShape(
            len(ranks),
            int(arguments["num_microbatches"]),
            len(models) if interleaved else 1,
            getattr(config, "microbatch_group_size_per_vp_stage", None) if interleaved else None,
            bool(getattr(config, "overlap_moe_expert_parallel_comm", False)),
        )
        rank = ranks.index(dist.get_rank())
        plan = None if getattr(config, "hybrid_context_parallel", False) else self._plan(shape, ranks)
        self._run = Run(shape, rank, models)
        self._pass.begin(plan, rank)

    def _pipeline(self, communicator: Any) -> Any:
        """The pipeline's group. Megatron-LM 0.12 has a list of them where an encoder has its own tensor parallelism."""
        group = getattr(communicator, "pp_group", None) or self._state.get_pipeline_model_parallel_group()
        return group[0] if isinstance(group, list) else group

    def _plan(self, shape: PassShape, ranks: tuple[int, ...]) -> Plan | None:
        if shape not in self._plans:
            self._plans[shape] = plan_of(shape)
        plan = self._plans[shape]
        if self._described != (shape, ranks):
            self._described = (shape, ranks)
            self._pass.listener.describe_watched(FRAMEWORK, plan, ranks, mesh_of(self._state, shape.num_chunks))
        return plan

    def _watch_forward(self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        run = self._running
        if run is None:
            return
        arguments = arguments_of(signature, args, kwargs)
        forward = run.begin_forward(arguments["model"], arguments["current_microbatch"])
        self._pass.begin_op(forward)
        yield from self._watch_op(run, forward)

    def _watch_backward(self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        run = self._running
        if run is None:
            return
        self._pass.begin_op(run.begin_backward(arguments_of(signature, args, kwargs)["output_tensor"]))
        yield from self._watch_op(run, None)

    def _watch_combined(self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        """A forward, a backward, or both at once."""
        run = self._running
        if run is None:
            return
        arguments = arguments_of(signature, args, kwargs)
        forward = backward = None
        if arguments["b_model"] is not None:
            backward = run.begin_backward(arguments["b_output_tensor"])
        if arguments["f_model"] is not None:
            forward = run.begin_forward(arguments["f_model"], arguments["current_microbatch"])
        if forward is not None and backward is not None:
            self._pass.begin_pair(forward, backward)
        elif (op := forward or backward) is not None:
            self._pass.begin_op(op)
        yield from self._watch_op(run, forward)

    def _watch_op(self, run: Run, forward: Action | None) -> Watch:
        """End what has begun, in which a forward ran, if one did."""
        try:
            result = yield
        finally:
            self._pass.end_op()
        if forward is not None:
            run.forward_gave(forward, result)

    def _watch_messages(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        transfers = self._transfers(kwargs)
        posted = self._pass.post(list(transfers.values()))
        if posted is None:
            return
        with posted:
            result = yield
        if isinstance(result, dict):  # _p2p_ops: handles by "send_next" and the like
            for name, transfer in transfers.items():
                work = result.get(name.removeprefix("tensor_"))
                if is_work(work):
                    self._pass.watch(work, [transfer])
            return
        works = [work for work in result or () if is_work(work)]
        if len(works) == len(transfers):
            order = ("send_prev", "recv_prev", "send_next", "recv_next")
            in_order = [transfers[name] for end in order if (name := f"tensor_{end}") in transfers]
            for transfer, work in zip(in_order, works, strict=True):
                self._pass.watch(work, [transfer])
        elif works:
            self._pass.watch(works[-1], list(transfers.values()))

    def _watch_shapes(self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        if self._running is None:
            return
        with self._pass.exchange(self._links(arguments_of(signature, args, kwargs))):
            yield

    def _transfers(self, arguments: Mapping[str, Any]) -> dict[str, Transfer]:
        """Messages of a call by name of the tensor; {} where no pass runs."""
        run = self._running
        named: dict[str, Transfer] = {}
        if run is None:
            return named
        for name, kind in _MESSAGES.items():
            tensor = arguments.get(name)
            if tensor is not None and (action := run.message(kind)) is not None:
                peer = arguments["prev_pipeline_rank" if name.endswith("prev") else "next_pipeline_rank"]
                named[name] = Transfer(action, int(peer), num_bytes(tensor))
        return named

    def _links(self, arguments: Mapping[str, Any]) -> list[Link]:
        """The messages that carry the shapes of the next ones."""
        owner = arguments.get("self")
        ends = {}
        for end in ("next", "prev"):
            known = getattr(owner, f"{end}_rank", None)
            ends[end] = getattr(self._state, f"get_pipeline_model_parallel_{end}_rank")() if known is None else known
        names = ("tensor_send_next", "recv_prev", "tensor_send_prev", "recv_next")
        given = [name for name in names if arguments[name] is not None and arguments[name] is not False]
        return [Link("send" in name, int(ends[name[-4:]]), _SHAPE_BYTES) for name in given]
