"""Hooks of ``torch.distributed.pipelining``: stage, microbatch and kind of every op and message of every schedule.

Source: ``torch/distributed/pipelining/{schedules,stage}.py`` of torch 2.6 to 2.13. All schedules, those of users included,
compute through ``forward_one_chunk``, ``backward_one_chunk`` and ``backward_weight_one_chunk`` of their stages, and send and
receive what ``get_{fwd,bwd}_{send,recv}_ops`` of the stages name, through ``_batch_p2p``.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch.distributed as dist

from instrument.adapters.hooks import Hooks, Watch, require
from instrument.adapters.watched_pass import WatchedPass, name_messages, watch_span
from instrument.adapters.works import Works
from instrument.session import Session
from pptrace.errors import ScheduleError
from pptrace.marks import SpanKind
from pptrace.schedule import registry
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.plan import Plan
from pptrace.schedule.replay import replay
from pptrace.schedule.text import from_rows

FRAMEWORK = "torch.distributed.pipelining"
_STAGE_NAMES = (
    "forward_one_chunk",
    "backward_one_chunk",
    "backward_weight_one_chunk",
    "get_fwd_recv_ops",
    "get_fwd_send_ops",
    "get_bwd_recv_ops",
    "get_bwd_send_ops",
)
_MESSAGES = {
    "get_fwd_recv_ops": Kind.RECV_F,
    "get_fwd_send_ops": Kind.SEND_F,
    "get_bwd_recv_ops": Kind.RECV_B,
    "get_bwd_send_ops": Kind.SEND_B,
}
_PLANNED_BY_NAME = {"ScheduleGPipe": "gpipe", "Schedule1F1B": "1f1b"}
"""Schedules with one stage per rank, and the registry's names of them."""


class _Local(threading.local):
    """The pass of a schedule that this thread runs."""

    def __init__(self, listener: Session, works: Works) -> None:
        self.running = WatchedPass(listener, works)
        self.stages: tuple[int, ...] = ()
        self.pair: Action | None = None
        """The overlapped pair of the plan that runs, in one range."""


class PipeliningHooks:
    """Watches the schedules of this process."""

    def __init__(self, schedules: ModuleType, hooks: Hooks, works: Works, listener: Session) -> None:
        """Install the hooks.

        Raises:
            AttributeError: this torch has another pipelining than those that are known.
        """
        self._listener = listener
        self._local = _Local(listener, works)
        self._plans: dict[int, tuple[Any, Plan | None]] = {}
        base = schedules._PipelineStageBase
        require(base, _STAGE_NAMES)
        require(schedules, ("_batch_p2p", "PipelineScheduleSingle", "PipelineScheduleMulti", "_PipelineSchedule"))
        for name in ("PipelineScheduleSingle", "PipelineScheduleMulti"):
            hooks.wrap(getattr(schedules, name), "step", self._watch_step)
        hooks.wrap(base, "forward_one_chunk", partial(self._watch_op, Kind.F))
        hooks.wrap(base, "backward_one_chunk", partial(self._watch_op, Kind.B))
        hooks.wrap(base, "backward_weight_one_chunk", partial(self._watch_op, Kind.W))
        for name, kind in _MESSAGES.items():
            hooks.wrap(base, name, partial(_name_messages, kind))
        hooks.wrap(schedules, "_batch_p2p", self._watch_batch)
        hooks.wrap(schedules._PipelineSchedule, "_maybe_compute_loss", self._watch_loss)
        if hasattr(base, "perform_reduce_grad"):
            hooks.wrap(base, "perform_reduce_grad", self._watch_reduce)

    def _watch_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        schedule, running = args[0], self._local.running
        stages = getattr(schedule, "_stages", None) or [schedule._stage]
        self._local.stages = tuple(sorted(stage.stage_index for stage in stages))
        if getattr(schedule, "_has_backward", True):
            known = self._plans.get(id(schedule))
            plan = plan_of(schedule, stages[0].group_size) if known is None else known[1]
            running.begin(plan, stages[0].group_rank)
            if known is None:
                self._plans[id(schedule)] = (schedule, plan)
                self._describe(plan, stages[0])
        else:
            running.begin_evaluation()
        try:
            yield
        finally:
            self._local.pair = None
            running.end()

    def _describe(self, plan: Plan | None, stage: Any) -> None:
        ranks = dist.get_process_group_ranks(stage.group) if stage.group is not None else range(stage.group_size)
        self._listener.describe_watched(FRAMEWORK, plan, list(ranks))

    def _watch_op(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        """The loss of the last stage belongs to its forward, which ends with that; a pair ends with its second half."""
        stage, microbatch = args[0], _microbatch_of(args, kwargs)
        if kind is Kind.B and not (args[3] if len(args) > 3 else kwargs.get("full_backward", True)):
            kind = Kind.I
        local, index = self._local, stage.stage_index
        op = Action(kind, index, microbatch, local.stages.index(index) if index in local.stages else 0)
        is_second = local.pair is not None and op.key == local.pair.parts[1].key
        if not is_second:
            local.pair = local.running.pairs.get((index, microbatch)) if kind is Kind.F else None
            local.running.begin_op(local.pair or op)
        yield
        if is_second or (local.pair is None and (kind is not Kind.F or not stage.is_last)):
            self._end_op()

    def _end_op(self) -> None:
        self._local.pair = None
        self._local.running.end_op()

    def _watch_loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        yield
        if self._local.pair is None:
            self._end_op()

    def _watch_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        ops: Sequence[Any] = args[0] if args else kwargs["p2p_ops"]
        running = self._local.running
        if not ops:
            return
        if self._local.pair is None:
            running.end_op()
        yield from running.watch_batch(ops)

    def _watch_reduce(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
        self._end_op()
        if self._local.running.runs:
            yield from watch_span(self._listener, SpanKind.GRAD_SYNC, args, kwargs)


def plan_of(schedule: Any, pp: int) -> Plan | None:
    """The plan that a schedule object follows; None where it has none, or none that can be a pipeline's.

    Of a plan with messages (loaded from CSV) the compute actions.
    """
    single = _single_plan_name(schedule)
    order = getattr(schedule, "pipeline_order", None) or getattr(schedule, "pipeline_order_with_comms", None)
    try:
        if single is not None:
            return registry.build(single, pp, schedule._n_microbatches, 1) if single else None
        if not isinstance(order, dict) or order.keys() != set(range(pp)):
            return None
        rows = [
            [str(action) for action in order[rank] if action is not None and _is_compute(action)] for rank in range(pp)
        ]
        plan = from_rows(rows, "custom")
    except ScheduleError:
        return None
    return None if replay(plan).blocked else plan


def _single_plan_name(schedule: Any) -> str | None:
    """The registry's name for a schedule with one stage per rank, "" where it is a user's; None where it has several.

    The order that torch gives for these is not what they run: that of Schedule1F1B numbers the last rank's forwards from 1.
    """
    if hasattr(schedule, "_stages"):
        return None
    ours = (kind for kind in type(schedule).__mro__ if "_step_microbatches" in vars(kind))
    runs = next(ours, type(schedule))
    return _PLANNED_BY_NAME.get(runs.__name__, "") if runs.__module__.startswith("torch.") else ""


def _is_compute(action: Any) -> bool:
    try:
        return Kind(str(action.computation_type.value)).is_compute
    except ValueError:
        return False


def _microbatch_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The microbatch, which a stage's methods take first."""
    return int(args[1] if len(args) > 1 else next(iter(kwargs.values())))


def _name_messages(kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
    """Write on each P2P op of a stage which message it carries."""
    action = Action(kind, args[0].stage_index, _microbatch_of(args, kwargs))
    name_messages((yield), action)
