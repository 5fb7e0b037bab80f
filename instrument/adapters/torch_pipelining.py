"""Hooks of ``torch.distributed.pipelining``: stage, microbatch and kind of every op and message of every schedule.

Source: ``torch/distributed/pipelining/{schedules,stage}.py`` of torch 2.6 to 2.13. All schedules, those of users included,
compute through ``forward_one_chunk``, ``backward_one_chunk`` and ``backward_weight_one_chunk`` of their stages, and send and
receive what ``get_{fwd,bwd}_{send,recv}_ops`` of the stages name, through ``_batch_p2p``.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

import torch.distributed as dist

from instrument.adapters.hooks import Hook, Hooks, require
from instrument.adapters.watched_pass import TransferWait
from instrument.adapters.works import Works, is_work
from instrument.recorder import Range, Recorder
from pptrace.errors import ScheduleError
from pptrace.marks import Axis, OpMark, P2PMark, SpanKind, Transfer
from pptrace.schedule import registry
from pptrace.schedule.actions import Action, Kind, Phase
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
_TAG = "_pptrace_message"


class Passes(Protocol):
    """Listener of a session to the passes of a pipeline."""

    @property
    def recorder(self) -> Recorder: ...

    @property
    def num_steps(self) -> int: ...

    def begin_pass(self) -> None:
        """A pass of a pipeline with backwards begins."""

    def describe_watched(self, framework: str, plan: Plan | None, pp_ranks: Sequence[int]) -> None:
        """Say which runtime runs what."""


@dataclass(slots=True)
class _Pass(threading.local):
    """The pass of a schedule that this thread runs."""

    schedule: Any = None
    trains: bool = False
    stages: tuple[int, ...] = ()
    planned: dict[tuple[Kind, int, int | None], Action] = field(default_factory=dict)
    pairs: dict[tuple[int, int | None], Action] = field(default_factory=dict)
    """Overlapped pairs of the plan by stage and microbatch of their forward."""
    open: Range | None = None
    """The op that runs, or an op that is over but for what belongs to it: its loss, or the second half of a pair."""
    pair: Action | None = None


class PipeliningHooks:
    """Watches the schedules of this process."""

    def __init__(self, schedules: ModuleType, hooks: Hooks, works: Works, passes: Passes) -> None:
        """Install the hooks.

        Raises:
            AttributeError: this torch has another pipelining than those that are known.
        """
        self._passes = passes
        self._recorder = passes.recorder
        self._works = works
        self._pass = _Pass()
        self._plans: dict[int, tuple[Any, Plan | None]] = {}
        base = schedules._PipelineStageBase
        require(base, _STAGE_NAMES)
        require(schedules, ("_batch_p2p", "PipelineScheduleSingle", "PipelineScheduleMulti", "_PipelineSchedule"))
        for name in ("PipelineScheduleSingle", "PipelineScheduleMulti"):
            hooks.wrap(getattr(schedules, name), "step", _StepHook(self))
        hooks.wrap(base, "forward_one_chunk", _OpHook(self, Kind.F))
        hooks.wrap(base, "backward_one_chunk", _OpHook(self, Kind.B))
        hooks.wrap(base, "backward_weight_one_chunk", _OpHook(self, Kind.W))
        for name, kind in _MESSAGES.items():
            hooks.wrap(base, name, _MessagesHook(kind))
        hooks.wrap(schedules, "_batch_p2p", _BatchHook(self))
        hooks.wrap(schedules._PipelineSchedule, "_maybe_compute_loss", _LossHook(self))
        if hasattr(base, "perform_reduce_grad"):
            hooks.wrap(base, "perform_reduce_grad", _ReduceHook(self))

    # Passes

    def begin_pass(self, schedule: Any) -> Range | None:
        """A schedule's ``step`` begins; the range of the pass, where it is an evaluation that somebody listens to."""
        current = self._pass
        current.schedule, current.trains = schedule, bool(getattr(schedule, "_has_backward", True))
        stages = getattr(schedule, "_stages", None) or [schedule._stage]
        current.stages = tuple(sorted(stage.stage_index for stage in stages))
        if not current.trains:
            evaluation = self._recorder.span(SpanKind.EVAL, self._passes.num_steps)
            evaluation.__enter__()
            return evaluation
        self._passes.begin_pass()
        plan = self._plan(schedule, stages[0])
        rank = stages[0].group_rank
        actions = plan.compute_actions(rank) if plan is not None and rank < plan.pp else ()
        current.planned = {action.key: action for entry in actions for action in entry.halves}
        current.pairs = {(pair.stage, pair.microbatch): pair for pair in actions if pair.parts}
        return None

    def end_pass(self, evaluation: Range | None) -> None:
        self.close_op()
        if evaluation is not None:
            evaluation.__exit__(None, None, None)
        self._pass.schedule = None

    def _plan(self, schedule: Any, stage: Any) -> Plan | None:
        """The plan of a schedule object, described to the session on first use."""
        known = self._plans.get(id(schedule))
        if known is not None:
            return known[1]
        plan = plan_of(schedule, stage.group_size)
        self._plans[id(schedule)] = (schedule, plan)
        ranks = dist.get_process_group_ranks(stage.group) if stage.group is not None else range(stage.group_size)
        self._passes.describe_watched(FRAMEWORK, plan, list(ranks))
        return plan

    # Ops

    def begin_op(self, kind: Kind, stage: int, microbatch: int) -> None:
        current = self._pass
        if not current.trains or current.schedule is None:
            return
        pair = current.pair
        if pair is not None and (kind, stage, microbatch) == pair.parts[1].key:
            return  # the second half runs inside the pair's range
        self.close_op()
        if not self._recorder.listening:
            return
        pair = current.pairs.get((stage, microbatch)) if kind is Kind.F else None
        planned = pair or current.planned.get((kind, stage, microbatch))
        action = planned or Action(kind, stage, microbatch, self._chunk(stage), Phase.STEADY)
        mark = OpMark(action, self._passes.num_steps, planned is not None)
        current.open = self._recorder.mark(mark)
        current.open.__enter__()
        current.pair = pair

    def end_op(self, kind: Kind, stage: Any, microbatch: int) -> None:
        """An op has returned. The loss of the last stage belongs to its forward; a pair ends with its second half."""
        pair = self._pass.pair
        if pair is not None and (kind, stage.stage_index, microbatch) != pair.parts[1].key:
            return
        if kind is not Kind.F or not stage.is_last:
            self.close_op()

    def close_op(self) -> None:
        current = self._pass
        if current.open is not None:
            current.open.__exit__(None, None, None)
            current.open = None
        current.pair = None

    def _chunk(self, stage: int) -> int:
        stages = self._pass.stages
        return stages.index(stage) if stage in stages else 0

    # Messages

    def begin_batch(self, ops: Sequence[Any]) -> Range | None:
        """Messages are about to be posted together; the range of the call, where it says whose they are."""
        current = self._pass
        if current.pair is None:
            self.close_op()
        if not current.trains or current.schedule is None or not self._recorder.listening:
            return None
        transfers = transfers_of(ops)
        if not transfers:
            return None
        opened = self._recorder.mark(P2PMark(tuple(transfers), Axis.PP, self._passes.num_steps))
        opened.__enter__()
        return opened

    def end_batch(self, opened: Range, ops: Sequence[Any], result: Any) -> None:
        opened.__exit__(None, None, None)
        works = [work for work in (result if isinstance(result, list) else [result]) if is_work(work)]
        step = self._passes.num_steps
        if len(works) == len(ops):
            for op, work in zip(ops, works, strict=True):
                self._works.watch(work, tuple(TransferWait(self._recorder, t, step) for t in transfers_of([op])))
        elif works:
            waits = tuple(TransferWait(self._recorder, transfer, step) for transfer in transfers_of(ops))
            self._works.watch(works[-1], waits)

    def begin_reduce(self) -> Range | None:
        self.close_op()
        if not self._pass.trains:
            return None
        opened = self._recorder.span(SpanKind.GRAD_SYNC, self._passes.num_steps)
        opened.__enter__()
        return opened


def plan_of(schedule: Any, pp: int) -> Plan | None:
    """The plan that a schedule object follows; None where it has none, or none that can be a pipeline's.

    Of a plan with messages (loaded from CSV) the compute actions.
    """
    single = _single_plan_name(schedule)
    order = getattr(schedule, "pipeline_order", None) or getattr(schedule, "pipeline_order_with_comms", None)
    try:
        if single is not None:
            return registry.build(single, pp, schedule._n_microbatches, 1) if single else None
        if not isinstance(order, dict) or sorted(order) != list(range(pp)):
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


def transfers_of(ops: Sequence[Any]) -> list[Transfer]:
    """The messages of P2P ops whose stage named them, [] if any is not named; several tensors of one activation are one."""
    size_by_transfer: dict[tuple[Action, int], int] = {}
    for op in ops:
        action = getattr(op, _TAG, None)
        if action is None:
            return []
        key = (action, int(op.peer))
        size_by_transfer[key] = size_by_transfer.get(key, 0) + op.tensor.numel() * op.tensor.element_size()
    return [Transfer(action, peer, size) for (action, peer), size in size_by_transfer.items()]


class _StepHook(Hook):
    def __init__(self, pipelining: PipeliningHooks) -> None:
        self._pipelining = pipelining

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Range | None:
        return self._pipelining.begin_pass(args[0])

    def after(self, token: Range | None, result: Any) -> None:
        self._pipelining.end_pass(token)

    def failed(self, token: Range | None) -> None:
        self._pipelining.end_pass(token)


class _OpHook(Hook):
    def __init__(self, pipelining: PipeliningHooks, kind: Kind) -> None:
        self._pipelining = pipelining
        self._kind = kind

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Kind, Any, int]:
        stage = args[0]
        microbatch = int(args[1] if len(args) > 1 else next(iter(kwargs.values())))
        kind = self._kind
        if kind is Kind.B and not (args[3] if len(args) > 3 else kwargs.get("full_backward", True)):
            kind = Kind.I
        self._pipelining.begin_op(kind, stage.stage_index, microbatch)
        return kind, stage, microbatch

    def after(self, token: tuple[Kind, Any, int], result: Any) -> None:
        self._pipelining.end_op(*token)

    def failed(self, token: tuple[Kind, Any, int]) -> None:
        self._pipelining.close_op()


class _LossHook(Hook):
    """The loss belongs to the forward of the last stage."""

    def __init__(self, pipelining: PipeliningHooks) -> None:
        self._pipelining = pipelining

    def after(self, token: Any, result: Any) -> None:
        if self._pipelining._pass.pair is None:
            self._pipelining.close_op()

    def failed(self, token: Any) -> None:
        self._pipelining.close_op()


class _MessagesHook(Hook):
    """Writes on each P2P op of a stage which message it carries."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Action:
        microbatch = int(args[1] if len(args) > 1 else next(iter(kwargs.values())))
        return Action(self._kind, args[0].stage_index, microbatch)

    def after(self, token: Action, result: Any) -> None:
        for op in result:
            setattr(op, _TAG, token)


class _BatchHook(Hook):
    def __init__(self, pipelining: PipeliningHooks) -> None:
        self._pipelining = pipelining

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Range | None, Sequence[Any]]:
        ops = args[0] if args else kwargs["p2p_ops"]
        return (self._pipelining.begin_batch(ops) if ops else None), ops

    def after(self, token: tuple[Range | None, Sequence[Any]], result: Any) -> None:
        opened, ops = token
        if opened is not None:
            self._pipelining.end_batch(opened, ops, result)

    def failed(self, token: tuple[Range | None, Sequence[Any]]) -> None:
        if token[0] is not None:
            token[0].__exit__(None, None, None)


class _ReduceHook(Hook):
    def __init__(self, pipelining: PipeliningHooks) -> None:
        self._pipelining = pipelining

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Range | None:
        return self._pipelining.begin_reduce()

    def after(self, token: Range | None, result: Any) -> None:
        if token is not None:
            token.__exit__(None, None, None)

    def failed(self, token: Range | None) -> None:
        self.after(token, None)
