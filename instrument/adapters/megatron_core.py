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
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from instrument.adapters.hooks import Hook, Hooks, require, require_parameters, signature_of
from instrument.adapters.megatron_plans import PassShape, Work, plan_of
from instrument.adapters.megatron_state import GRADIENTS, OPTIMIZERS, STATE, mesh_of
from instrument.adapters.watched_pass import PassListener, WatchedPass
from instrument.adapters.works import Works, is_work
from instrument.recorder import Range
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
MODULES = (STATE, OPTIMIZERS, GRADIENTS, SCHEDULES)
"""The modules that are hooked when they are imported."""
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

    def __init__(self, schedules: ModuleType, hooks: Hooks, works: Works, listener: PassListener) -> None:
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
            hooks.wrap(schedules, name, _PassHook(self, interleaved))
        hooks.wrap(schedules, "forward_step", _ForwardHook(self, signature_of(schedules.forward_step)))
        hooks.wrap(schedules, "backward_step", _BackwardHook(self, signature_of(schedules.backward_step)))
        for name in ("_p2p_ops", "_batched_p2p_ops"):
            hooks.wrap(p2p, name, _MessagesHook(self))
        owner = getattr(p2p, "P2PCommunicator", p2p)
        if hasattr(owner, "_communicate_shapes"):
            shapes = signature_of(owner._communicate_shapes)
            hooks.wrap(owner, "_communicate_shapes", _ShapesHook(self, shapes))
        combined = sys.modules.get(_COMBINED)
        if combined is not None:
            name = "combined_forward_backward_step"
            require_parameters(combined, name, ("f_model", "b_model", "b_output_tensor", "current_microbatch"))
            hooks.wrap(combined, name, _CombinedHook(self, signature_of(getattr(combined, name))))

    @property
    def watched(self) -> WatchedPass:
        return self._pass

    @property
    def run(self) -> Run | None:
        """The pass with backwards that runs now."""
        return self._run if self._pass.runs else None

    def begin_pass(self, interleaved: bool, arguments: Mapping[str, Any]) -> None:
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

    def end_pass(self) -> None:
        self._pass.end()
        self._run = None

    def transfers(self, arguments: Mapping[str, Any]) -> dict[str, Transfer]:
        """Messages of a call by name of the tensor; {} where no pass runs."""
        run = self.run
        named: dict[str, Transfer] = {}
        if run is None:
            return named
        for name, kind in _MESSAGES.items():
            tensor = arguments.get(name)
            if tensor is not None and (action := run.message(kind)) is not None:
                peer = arguments["prev_pipeline_rank" if name.endswith("prev") else "next_pipeline_rank"]
                named[name] = Transfer(action, int(peer), tensor.numel() * tensor.element_size())
        return named

    def links(self, arguments: Mapping[str, Any]) -> list[Link]:
        """The messages that carry the shapes of the next ones."""
        owner = arguments.get("self")
        ends = {}
        for end in ("next", "prev"):
            known = getattr(owner, f"{end}_rank", None)
            ends[end] = getattr(self._state, f"get_pipeline_model_parallel_{end}_rank")() if known is None else known
        names = ("tensor_send_next", "recv_prev", "tensor_send_prev", "recv_next")
        given = [name for name in names if arguments[name] is not None and arguments[name] is not False]
        return [Link("send" in name, int(ends[name[-4:]]), _SHAPE_BYTES) for name in given]


class _BoundHook(Hook):
    """A hook that reads arguments by name, however they were passed."""

    def __init__(self, megatron: MegatronHooks, signature: inspect.Signature) -> None:
        self._megatron = megatron
        self._signature = signature

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any]:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments


class _PassHook(Hook):
    def __init__(self, megatron: MegatronHooks, interleaved: bool) -> None:
        self._megatron = megatron
        self._interleaved = interleaved

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._megatron.begin_pass(self._interleaved, kwargs)

    def after(self, token: Any, result: Any) -> None:
        self._megatron.end_pass()

    def failed(self, token: Any) -> None:
        self._megatron.end_pass()


class _ForwardHook(_BoundHook):
    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Action | None:
        run = self._megatron.run
        if run is None:
            return None
        arguments = self._named(args, kwargs)
        forward = run.begin_forward(arguments["model"], arguments["current_microbatch"])
        self._megatron.watched.begin_op(Kind.F, forward.stage, int(forward.microbatch or 0), forward.chunk)
        return forward

    def after(self, token: Action | None, result: Any) -> None:
        run = self._megatron.run
        self._megatron.watched.end_op()
        if token is not None and run is not None:
            run.forward_gave(token, result)

    def failed(self, token: Action | None) -> None:
        self._megatron.watched.end_op()


class _BackwardHook(_BoundHook):
    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        run = self._megatron.run
        if run is not None:
            backward = run.begin_backward(self._named(args, kwargs)["output_tensor"])
            self._megatron.watched.begin_op(Kind.B, backward.stage, int(backward.microbatch or 0), backward.chunk)

    def after(self, token: None, result: Any) -> None:
        self._megatron.watched.end_op()

    def failed(self, token: None) -> None:
        self._megatron.watched.end_op()


class _CombinedHook(_ForwardHook):
    """A forward, a backward, or both at once."""

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Action | None:
        run, watched = self._megatron.run, self._megatron.watched
        if run is None:
            return None
        arguments = self._named(args, kwargs)
        forward = backward = None
        if arguments["b_model"] is not None:
            backward = run.begin_backward(arguments["b_output_tensor"])
        if arguments["f_model"] is not None:
            forward = run.begin_forward(arguments["f_model"], arguments["current_microbatch"])
        if forward is not None and backward is not None:
            watched.begin_pair(forward, backward)
        elif (op := forward or backward) is not None:
            watched.begin_op(op.kind, op.stage, int(op.microbatch or 0), op.chunk)
        return forward


class _MessagesHook(Hook):
    def __init__(self, megatron: MegatronHooks) -> None:
        self._megatron = megatron

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Transfer], Range | None]:
        transfers = self._megatron.transfers(kwargs)
        return transfers, self._megatron.watched.post(list(transfers.values()))

    def after(self, token: tuple[dict[str, Transfer], Range | None], result: Any) -> None:
        transfers, opened = token
        if opened is None:
            return
        opened.__exit__(None, None, None)
        if isinstance(result, dict):  # _p2p_ops: handles by "send_next" and the like
            for name, transfer in transfers.items():
                work = result.get(name.removeprefix("tensor_"))
                if is_work(work):
                    self._megatron.watched.watch(work, [transfer])
            return
        works = [work for work in result or () if is_work(work)]
        if len(works) == len(transfers):
            order = ("send_prev", "recv_prev", "send_next", "recv_next")
            posted = [transfers[name] for end in order if (name := f"tensor_{end}") in transfers]
            for transfer, work in zip(posted, works, strict=True):
                self._megatron.watched.watch(work, [transfer])
        elif works:
            self._megatron.watched.watch(works[-1], list(transfers.values()))

    def failed(self, token: tuple[dict[str, Transfer], Range | None]) -> None:
        if token[1] is not None:
            token[1].__exit__(None, None, None)


class _ShapesHook(_BoundHook):
    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Range | None:
        if self._megatron.run is None:
            return None
        return self._megatron.watched.exchange(self._megatron.links(self._named(args, kwargs)))

    def after(self, token: Range | None, result: Any) -> None:
        if token is not None:
            token.__exit__(None, None, None)

    def failed(self, token: Range | None) -> None:
        self.after(token, None)
