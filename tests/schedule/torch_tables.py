"""Plans and executed actions of torch.distributed.pipelining, without any process group."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules

from pptrace.schedule.plan import Plan
from pptrace.schedule.text import from_rows

Calls = list[tuple[str, ...]]


class StubStage:
    """Just enough of a stage for a schedule's constructor."""

    def __init__(self, index: int, pp: int, num_stages: int) -> None:
        self.stage_index = index
        self.num_stages = num_stages
        self.group_size = pp
        self.group_rank = 0
        self.is_first = index == 0
        self.is_last = index == num_stages - 1
        self.has_backward = True
        self.submod = nn.Identity()


class RecordingStage(StubStage):
    """A stage that writes down what it is told to do: compute as "2F0", transfers as "2SEND_F0"."""

    def __init__(self, rank: int, pp: int, calls: Calls) -> None:
        super().__init__(rank, pp, pp)
        self.calls = calls

    def forward_one_chunk(self, mb: int, *_: Any, **__: Any) -> str:
        self.calls.append((f"{self.stage_index}F{mb}",))
        return ""

    def backward_one_chunk(self, mb: int, **_: Any) -> None:
        self.calls.append((f"{self.stage_index}B{mb}",))

    def perform_reduce_grad(self, *_: Any) -> None:
        return None

    def get_fwd_recv_ops(self, mb: int) -> list[str]:
        return [] if self.is_first else [f"{self.stage_index}RECV_F{mb}"]

    def get_fwd_send_ops(self, mb: int) -> list[str]:
        return [] if self.is_last else [f"{self.stage_index}SEND_F{mb}"]

    def get_bwd_recv_ops(self, mb: int) -> list[str]:
        return [] if self.is_last else [f"{self.stage_index}RECV_B{mb}"]

    def get_bwd_send_ops(self, mb: int) -> list[str]:
        return [] if self.is_first else [f"{self.stage_index}SEND_B{mb}"]


def multi(schedule_class: type, pp: int, num_microbatches: int, num_chunks: int, **options: Any) -> Any:
    """One of torch's multi-stage schedules as rank 0 builds it; its tables hold all ranks."""
    v_shaped = issubclass(schedule_class, (torch_schedules.ScheduleZBVZeroBubble, torch_schedules.ScheduleDualPipeV))
    owned = (0, 2 * pp - 1) if v_shaped else range(0, pp * num_chunks, pp)
    return schedule_class([StubStage(stage, pp, pp * num_chunks) for stage in owned], num_microbatches, **options)


def interleaved_rows(pp: int, num_microbatches: int, num_chunks: int) -> list[list[str]]:
    """The compute actions of torch's ScheduleInterleaved1F1B, as :func:`multi_rows`."""
    return multi_rows(torch_schedules.ScheduleInterleaved1F1B, pp, num_microbatches, num_chunks)


def multi_rows(schedule_class: type, pp: int, num_microbatches: int, num_chunks: int) -> list[list[str]]:
    """The compute actions of one of torch's multi-stage schedules, rank by rank, its idle slots left out.

    Built without the lowering that the constructor ends with, which takes most of its time.

    Raises:
        ValueError: torch does not take the shape.
    """
    table_only = type("TableOnly", (schedule_class,), {"_prepare_schedule_with_comms": lambda *_, **__: None})
    return compute_rows(multi(table_only, pp, num_microbatches, num_chunks).pipeline_order)


def compute_rows(table: dict[int, list[torch_schedules._Action | None]]) -> list[list[str]]:
    return [[str(action) for action in table[rank] if action and action.is_compute_op] for rank in sorted(table)]


def text_rows(table: dict[int, list[torch_schedules._Action | None]]) -> list[list[str]]:
    """All cells, idle slots as empty ones."""
    return [["" if action is None else str(action) for action in table[rank]] for rank in sorted(table)]


def executed(schedule_class: type, rank: int, pp: int, num_microbatches: int, monkeypatch: Any) -> Calls:
    """The calls that torch's single-stage schedule makes on one rank: computes, and groups of transfers posted together.

    Runs torch's real ``_step_microbatches`` on a stage that only takes notes.
    """
    calls: Calls = []

    def posted(ops: list[str], desc: str | None = None) -> list[Any]:
        if ops:
            calls.append(tuple(ops))
        return []

    def posted_sorted(ops: list[str], desc: str | None = None) -> dict[int, Any]:
        posted(ops)
        return {}

    monkeypatch.setattr(torch_schedules, "_batch_p2p", posted)
    monkeypatch.setattr(torch_schedules, "_sorted_batch_p2p", posted_sorted)
    schedule = schedule_class(RecordingStage(rank, pp, calls), num_microbatches)
    monkeypatch.setattr(schedule, "_initialize_stage", lambda *_: None)
    schedule._step_microbatches()
    return calls


def with_torch_messages(plan: Plan, *, deferred: bool = False) -> Plan:
    """The plan with its sends and receives where torch's runtime puts them; ``deferred``: with ``defer_pp_recv=True``."""
    rows = {
        rank: [torch_schedules._Action.from_str(str(action)) for action in plan.compute_actions(rank)]
        for rank in range(plan.pp)
    }
    lowered = torch_schedules._add_send_recv(rows, plan.placement.__getitem__, plan.num_stages)
    if deferred:
        lowered = torch_schedules._defer_recv_ops(lowered, plan.placement.__getitem__)
    return from_rows([[str(action) for action in lowered[rank]] for rank in range(plan.pp)], plan.name)
