"""Hooks of DeepSeek's DualPipe and DualPipe-V: stage, microbatch and kind of every op and message.

Source: ``dualpipe/{dualpipe,dualpipev}.py`` of deepseek-ai/DualPipe, 1.0.0. Both compute through ``_forward_compute_chunk``,
``_backward_compute_chunk``, the two together in ``_forward_backward_compute_chunk``, and ``_weight_chunk`` for the oldest weight
gradients that a backward left; ``_send_*`` and ``_recv_*`` append P2P ops, which ``_commit_and_wait_comm`` posts. They count by
phase what each of these has done.

In DualPipe ranks of the second half call the direction in which they come first phase 0; the second direction is a chain of its
own in the plan (:mod:`pptrace.schedule.builders.dualpipe`), stages p … 2p−1, with the second half of the microbatches.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from instrument.adapters.hooks import Hooks, Watch, require
from instrument.adapters.watched_pass import WatchedPass, name_messages
from instrument.adapters.works import Works
from instrument.session import Session
from pptrace.errors import PptraceError
from pptrace.schedule import registry
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.plan import Plan

FRAMEWORK = "deepseek"
MODULES = {"dualpipe.dualpipe": ("DualPipe", "dualpipe"), "dualpipe.dualpipev": ("DualPipeV", "dualpipe-v")}
"""Classes by their module, and the registry's name of the schedule."""
_COUNTS = {
    Kind.F: "current_f_chunk_id",
    Kind.B: "current_b_chunk_id",
    Kind.SEND_F: "current_send_f_chunk_id",
    Kind.RECV_F: "current_recv_f_chunk_id",
    Kind.SEND_B: "current_send_b_chunk_id",
    Kind.RECV_B: "current_recv_b_chunk_id",
}
_MESSAGES = {
    "_send_forward": Kind.SEND_F,
    "_recv_forward": Kind.RECV_F,
    "_send_backward": Kind.SEND_B,
    "_recv_backward": Kind.RECV_B,
}
_RANKS = "_pptrace_pipeline"


class DualPipeHooks:
    """Watches the pipelines of one of the two classes in this process."""

    def __init__(self, module: ModuleType, hooks: Hooks, works: Works, listener: Session) -> None:
        """Install the hooks.

        Raises:
            AttributeError: this is another DualPipe than the ones that are known.
        """
        name, self._schedule = MODULES[module.__name__]
        kind = getattr(module, name)
        own = ("_forward_compute_chunk", "_backward_compute_chunk", "_forward_backward_compute_chunk", "_weight_chunk")
        require(kind, (*own, *_MESSAGES, "_commit_and_wait_comm", "step"))
        self._listener = listener
        self._pass = WatchedPass(listener, works)
        self._plans: dict[tuple[int, int], Plan | None] = {}
        self._second = 0
        """The first microbatch of the second direction."""
        self._left: deque[Action] = deque()
        """Backwards whose weight gradients are to come."""
        self._in_pair = False
        self._weights_next = False
        hooks.wrap(kind, "__init__", self._watch_made)
        hooks.wrap(kind, "step", self._watch_step)
        hooks.wrap(kind, "_forward_compute_chunk", self._watch_forward)
        hooks.wrap(kind, "_backward_compute_chunk", self._watch_backward)
        hooks.wrap(kind, "_forward_backward_compute_chunk", self._watch_pair)
        hooks.wrap(kind, "_weight_chunk", self._watch_weights)
        hooks.wrap(kind, "_commit_and_wait_comm", self._watch_commit)
        for method, of_message in _MESSAGES.items():
            hooks.wrap(kind, method, partial(self._watch_message, of_message))
        hooks.wrap(dist, "batch_isend_irecv", self._watch_batch)

    def _watch_made(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        """Note the global ranks of the pipeline in its order, which may be another one than that of its group."""
        yield
        mapping = args[4] if len(args) > 4 else kwargs.get("rank_mapping")
        ranks = dist.get_process_group_ranks(args[0].group)
        if mapping is not None:
            ranks = [ranks[place] for place in sorted(range(len(ranks)), key=mapping.__getitem__)]
        setattr(args[0], _RANKS, ranks)

    def _watch_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        pipeline, num_microbatches = args[0], int(kwargs.get("num_chunks", 0))
        if torch.is_grad_enabled():
            shape = int(pipeline.num_ranks), num_microbatches
            self._left.clear()
            self._second = num_microbatches // 2 if self._schedule == "dualpipe" else 0
            if shape not in self._plans:
                self._plans[shape] = _plan_of(self._schedule, *shape)
                self._listener.describe_watched(FRAMEWORK, self._plans[shape], getattr(pipeline, _RANKS))
            self._pass.begin(self._plans[shape], int(pipeline.rank))
        else:
            self._pass.begin_evaluation()
        try:
            yield
        finally:
            self._in_pair = self._weights_next = False
            self._pass.end()

    def _action(self, kind: Kind, pipeline: Any, phase: int) -> Action:
        """Return what the pipeline does next of a kind in a phase."""
        direction = int(phase ^ bool(getattr(pipeline, "is_in_second_half", False)))
        rank, num_ranks = int(pipeline.rank), int(pipeline.num_ranks)
        count = getattr(pipeline, _COUNTS[Kind.B if kind is Kind.I else kind])[direction]
        stage, first = (2 * num_ranks - 1 - rank, self._second) if direction else (rank, 0)
        return Action(kind, stage, first + int(count), direction)

    def _watch_op(self, op: Action) -> Watch:
        self._pass.begin_op(op)
        try:
            yield
        finally:
            self._pass.end_op()

    def _watch_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        if self._pass.runs and not self._in_pair:
            yield from self._watch_op(self._action(Kind.F, args[0], _argument(args, kwargs, 1, "phase")))

    def _watch_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        if not self._pass.runs or self._in_pair:
            return
        leaves_weights = _argument(args, kwargs, 2, "enable_zb")
        op = self._action(Kind.I if leaves_weights else Kind.B, args[0], _argument(args, kwargs, 1, "phase"))
        if leaves_weights:
            self._left.append(op)
        yield from self._watch_op(op)

    def _watch_pair(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        if not self._pass.runs:
            return
        forward = self._action(Kind.F, args[0], _argument(args, kwargs, 1, "phase0"))
        backward = self._action(Kind.B, args[0], _argument(args, kwargs, 2, "phase1"))
        self._in_pair = self._pass.begin_pair(forward, backward)
        try:
            yield
        finally:
            self._in_pair = False
            self._pass.end_op()

    def _watch_weights(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        """Weight gradients begin when the messages that were posted before them are there."""
        self._weights_next = self._pass.runs and bool(self._left)
        try:
            yield
        finally:
            self._weights_next = False
            self._pass.end_op()

    def _watch_commit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        yield
        if self._weights_next:
            left = self._left.popleft()
            self._pass.begin_op(Action(Kind.W, left.stage, left.microbatch, left.chunk))

    def _watch_message(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        if self._pass.runs:
            pipeline, action = args[0], self._action(kind, args[0], _argument(args, kwargs, 1, "phase"))
            num_named = len(pipeline.comm_ops)
            yield
            name_messages(pipeline.comm_ops[num_named:], action)

    def _watch_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        if self._pass.runs:
            yield from self._pass.watch_batch(args[0] if args else kwargs["p2p_op_list"])


def _plan_of(name: str, pp: int, num_microbatches: int) -> Plan | None:
    try:
        return registry.build(name, pp, num_microbatches, 2)
    except PptraceError:  # which the pipeline refuses too
        return None


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str) -> int:
    return int(args[index] if len(args) > index else kwargs.get(name, 0))
