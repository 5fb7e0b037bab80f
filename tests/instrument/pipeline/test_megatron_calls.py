"""Megatron-LM's calls: as megatron-core itself makes them, without deadlock, and with the results of one process."""

from __future__ import annotations

import json
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from instrument.data.text import Batch
from instrument.models.gpt_pipeline import Wiring
from instrument.optim.gradient_sync import Reduce, sending_actions
from instrument.pipeline.megatron_calls import Calls, require_progress
from instrument.pipeline.order import Posting, arrange
from instrument.pipeline.p2p import Communicator, Message, TensorSpec
from instrument.pipeline.runtime import PipelineRuntime
from instrument.pipeline.step import RankProgram
from instrument.pipeline.transport import Mode
from pptrace.errors import ScheduleError, ShapeError, UsageError
from pptrace.schedule.actions import Kind
from pptrace.schedule.lower import lower
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build
from tests.instrument.pipeline.cases.training import Case
from tests.instrument.pipeline.test_exact import check
from tests.support.extent import ALL
from tests.support.pool import Pool
from tests.support.programs import script

needs_megatron = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
PROGRAM = Path(__file__).parent / "cases" / "megatron_core_calls.py"
Size = tuple[int, int, int, int]
"""(pp, microbatches, chunks, group size)"""

ONE_CHUNK: list[Size] = [(2, 1, 1, 2), (2, 5, 1, 2), (4, 2, 1, 4), (4, 4, 1, 4), (4, 9, 1, 4)]
CHUNKS: list[Size] = [(2, 2, 2, 2), (2, 6, 2, 2), (2, 5, 2, 3), (4, 4, 2, 4), (4, 8, 3, 4), (4, 12, 2, 6), (3, 8, 3, 5)]
CASES = [(size, Calls.MEGATRON, batched) for size, batched in product(ONE_CHUNK + CHUNKS, (True, False))]
CASES += [(size, calls, False) for size, calls in product(CHUNKS, (Calls.OVERLAP, Calls.OVERLAP_ALL))]
CASES = CASES if ALL else CASES[::3]  # in which all ways and both shapes occur


def plan_of(size: Size) -> Plan:
    pp, m, v, n = size
    return lower(build("1f1b" if v == 1 else "interleaved-1f1b", pp, m, v, None if v == 1 else n))


class Marks:
    """Stands for the recorder: what it is to mark, in order."""

    def __init__(self) -> None:
        self.events: list[list[Any]] = []
        self.step = 0

    def note(self, event: list[Any]) -> nullcontext[None]:
        self.events.append(event)
        return nullcontext()

    def op(self, action: Any, _step: int) -> nullcontext[None]:
        return self.note([str(action.kind), action.stage, action.microbatch])

    def p2p(self, carried: Any, _axis: Any, _step: int) -> nullcontext[None]:
        return self.note(["post", [named(item.action) for item in carried]])

    def wait(self, carried: Any, _step: int) -> nullcontext[None]:
        return self.note(["wait", [named(carried.action)]])


def named(action: Any) -> list[Any]:
    return [str(action.kind), action.stage, action.microbatch]


class Arrived:
    """A transport whose tensors are there at once."""

    def post(self, parcels: Any) -> list[Any]:
        return [SimpleNamespace(wait=lambda tensor=parcel.tensor: tensor) for parcel in parcels]


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def marked(plan: Plan, rank: int, posting: Posting) -> list[list[Any]]:
    """Marks of our runtime in one step of one rank."""
    marks: Any = Marks()
    mesh: Any = SimpleNamespace(pp_rank=rank, global_rank=lambda peer: peer)
    spec = TensorSpec(lambda _: [(1,)], torch.float32, torch.device("cpu"))
    communicator = Communicator(mesh, plan, spec, Arrived(), marks, posting)
    stages: dict[int, nn.Module] = {stage: Scale() for stage in plan.stages_of(rank)}
    program = RankProgram(plan, rank, stages, lambda output, _: output.sum(), communicator, marks)
    gradients: Any = SimpleNamespace(sending=lambda _: {}, run=lambda _: None, mean_loss=lambda *_: None)
    numbers = torch.ones(plan.num_microbatches, 1)
    PipelineRuntime(program, gradients, posting).run(Batch(numbers, numbers), 0)
    return marks.events


def receives_awaited(events: list[list[Any]]) -> list[tuple[int, list[Any]]]:
    """Each receive that is awaited, with the number of ops before."""
    ops, awaited = 0, []
    for kind, *rest in events:
        ops += kind in ("F", "B")
        if kind == "wait" and rest[0][0][0].startswith("RECV"):
            awaited.append((ops, rest[0][0]))
    return sorted(awaited)


def reduced(plan: Plan, rank: int) -> list[tuple[int, int]]:
    """Each stage whose aligned sums this rank begins with or after an action, with the number of backwards up to there."""
    actions = plan.compute_actions(rank)
    sending, backwards, begun = sending_actions(actions, Reduce.ALIGNED, rank), 0, []
    for action in actions:
        backwards += action.kind is Kind.B
        begun += [(backwards, finish.stage) for finish in sending.get(action, ())]
    late = set(plan.stages_of(rank)) - {stage for _, stage in begun}
    return begun + [(backwards, stage) for stage in sorted(late)]


def reduced_by_megatron(events: list[list[Any]]) -> list[tuple[int, int]]:
    backwards, begun = 0, []
    for kind, *rest in events:
        backwards += kind == "B"
        begun += [(backwards, rest[0][0])] if kind == "reduce" else []
    return begun


@needs_megatron
def test_calls_are_those_of_megatron_core_in_its_order() -> None:
    """Ops, calls and the transfers of each call; and each receive is awaited between the same ops, but for groups larger than p,
    where Megatron-LM waits for the oldest receive, and ours for the one that the next op reads. Aligned gradient sums begin after
    the same backwards (of one stage, the first rank's begin in its last one, without a call of ``grad_sync_func``).
    """
    cases = [(size, calls, batched, rank) for size, calls, batched in CASES for rank in range(size[0])]
    asked = [
        [size[0], rank, *size[1:], calls.overlaps, calls is Calls.OVERLAP_ALL, batched]
        for size, calls, batched, rank in cases
    ]
    ended = script(PROGRAM, json.dumps(asked))
    assert ended.code == 0, ended.err
    for (size, calls, batched, rank), theirs in zip(cases, json.loads(ended.out), strict=True):
        ours = marked(plan_of(size), rank, Posting(calls=calls, even_odd=not batched))
        theirs_made = [event for event in theirs if event[0] not in ("wait", "reduce")]
        assert [event for event in ours if event[0] != "wait"] == theirs_made, (size, calls, batched, rank)
        if rank or size[2] > 1:
            assert reduced(plan_of(size), rank) == reduced_by_megatron(theirs), (size, rank)
        if size[3] == size[0]:
            assert receives_awaited(ours) == receives_awaited(theirs), (size, calls, batched, rank)


def test_the_steady_calls_of_chunks_have_four_transfers() -> None:
    groups = arrange(plan_of((4, 8, 2, 4)), 1, Posting(calls=Calls.MEGATRON))
    assert max(map(len, groups)) == 4
    assert sum(len(group) == 4 for group in groups) == 2 * 8 - (2 * 2 + 4) - 1  # all steady calls but the last


@pytest.mark.parametrize(("device", "synchronised", "times"), [("cuda", True, 1), ("cuda", False, 0), ("cpu", True, 0)])
def test_the_host_waits_for_the_gpu_after_a_call_that_is_awaited(
    monkeypatch: pytest.MonkeyPatch, device: str, synchronised: bool, times: int
) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr("torch.cuda.synchronize", waited.append)
    mesh: Any = SimpleNamespace(pp_rank=0, global_rank=lambda peer: peer)
    plan, marks, transport = plan_of((2, 2, 1, 2)), Marks(), Arrived()
    spec = TensorSpec(lambda _: [(1,)], torch.float32, torch.device(device))
    posting = Posting(calls=Calls.MEGATRON, synchronised=synchronised)
    communicator = Communicator(mesh, plan, spec, transport, marks, posting)
    send = next(action for action in plan.ranks[0] if action.kind.is_send)
    communicator.exchange([Message(send, (torch.ones(1),))], 0)
    assert waited == [torch.device(device)] * times
    assert [event[0] for event in marks.events] == ["post", "wait"]


def test_no_shape_that_megatron_takes_deadlocks() -> None:
    for pp, v in product((1, 2, 3, 4), (1, 2, 3)):
        for m, n in product(range(1, 2 * pp + 3), range(pp, 2 * pp + 1, 1 if ALL else 2) if v > 1 else (pp,)):
            if v > 1 and (m < n or 0 < m % n < pp):
                continue
            plan = plan_of((pp, m, v, n))
            for calls in (Calls.MEGATRON, Calls.OVERLAP, Calls.OVERLAP_ALL) if v > 1 else (Calls.MEGATRON,):
                rows = [arrange(plan, rank, Posting(calls=calls)) for rank in range(pp)]
                require_progress(plan, rows)
                for rank, row in enumerate(rows):
                    assert sorted(map(str, sum(map(tuple, row), ()))) == sorted(map(str, plan.ranks[rank]))


def test_what_megatron_refuses_is_refused() -> None:
    with pytest.raises(ScheduleError, match="last microbatch group smaller"):
        arrange(lower(build("interleaved-1f1b", 2, 3, 2)), 1, Posting(calls=Calls.MEGATRON))
    with pytest.raises(ScheduleError, match="overlap is for interleaved 1F1B"):
        arrange(plan_of((2, 4, 1, 2)), 0, Posting(calls=Calls.OVERLAP))
    with pytest.raises(ScheduleError, match="two sends to one rank"):
        arrange(plan_of((2, 4, 2, 2)), 0, Posting(calls=Calls.MEGATRON, tagged=False))
    for name in ("zb-h1", "dualpipe-v"):
        with pytest.raises(ScheduleError, match="those of 1f1b"):
            arrange(lower(build(name, 2, 4)), 0, Posting(calls=Calls.MEGATRON))
    with pytest.raises(UsageError, match="neither --prefetch nor"):
        Posting(2, calls=Calls.MEGATRON)
    with pytest.raises(UsageError, match="wait in a ring"):
        Wiring(torch.device("cpu"), negotiated=True, calls=Calls.MEGATRON).posting(plan_of((2, 4, 2, 2)), tagged=True)


def test_a_stuck_rank_is_named() -> None:
    plan = lower(build("interleaved-1f1b", 4, 8, 2, lean=True))
    rows = [arrange(plan, rank, Posting(calls=Calls.MEGATRON)) for rank in range(4)]
    with pytest.raises((ScheduleError, ShapeError), match="deadlock with Megatron-LM's calls: rank 0"):
        require_progress(plan, rows)


def test_training_is_exact(pool: Pool) -> None:
    chunks = [(Calls.MEGATRON, Mode.BATCHED), (Calls.OVERLAP, Mode.EVEN_ODD), (Calls.OVERLAP_ALL, Mode.EVEN_ODD)]
    of_chunks = [Case("interleaved-1f1b", 4, 4, chunks=2, mode=mode, calls=calls) for calls, mode in chunks]
    check(pool, [Case("1f1b", 4, 5, calls=Calls.MEGATRON, negotiated=True), *of_chunks])
    check(pool, [Case("interleaved-1f1b", 2, 4, chunks=3, calls=Calls.OVERLAP_ALL)])
