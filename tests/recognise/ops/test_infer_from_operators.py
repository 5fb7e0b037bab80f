"""Ops by the order of operators and messages, where a step holds more than its ops and one message for each."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pptrace.model.traces import Category, Events
from pptrace.recognise.ops.infer_from_operators import (
    Segment,
    SegmentKind,
    _segments,
    has_optimizer_ranges,
    infer_ops,
    with_microbatches,
)
from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build
from tests.roundtrip.files import recognise_run
from tests.roundtrip.styles import LEAD, Host, TorchBatched, TorchOneFOneB
from tests.support.found_ops import cells, planned
from tests.support.synthetic import MAIN_THREAD, NCCL_STREAM, Done, Event, PaperRun, make_trace, run_on_paper

RUN = run_on_paper(build("1f1b", 3, 5), lambda action: 500, latency=130)


class SeveralTensors(TorchOneFOneB):
    """An activation goes as a small tensor and a large one, each with its own call and kernel (DeepSpeed, nanotron)."""

    def messages(self, host: Host, plan: Plan, rank: int, group: Sequence[Done]) -> None:
        for index, done in enumerate(group):
            for tensor in range(2):
                begin = done.start - LEAD + 6 * index + 3 * tensor
                host.operator("c10d::send" if done.action.kind.is_send else "c10d::recv_", begin, begin + 3)
                cuts = (done.start, done.end - 20, done.end)
                kernel = cuts[tensor : tensor + 2]
                host.launch("ncclDevKernel_SendRecv", begin + 1, *kernel, MAIN_THREAD, NCCL_STREAM + index)


def test_all_tensors_of_an_activation_are_its_messages() -> None:
    run = recognise_run(SeveralTensors(), RUN, 2)
    for rank in range(RUN.plan.pp):
        rank_comms = run.comms[run.comms["rank"] == rank]
        assert len(rank_comms) == 2 * 2 * len(list(RUN.transfers(rank)))
        assert cells(run, rank, 1) == planned(RUN.plan, rank)
    assert (run.comms["match"] >= 0).all()
    assert (run.comms["clock"] == "device").all()


class Evaluated(TorchBatched):
    """Forwards alone before each step, which has a range of its own."""

    def step(self, run: PaperRun, rank: int, number: int, at: int) -> list[Event]:
        host = Host(at, 900_000 + (rank * 100 + number) * 10_000)
        for index in range(3):
            begin = -900 + 300 * index
            if rank:
                host.operator("c10d::recv_", begin - LEAD, begin - LEAD + 2)
                host.launch("ncclDevKernel_SendRecv", begin - LEAD + 3, begin - 20, begin, MAIN_THREAD, NCCL_STREAM)
            for kernel in range(5):
                host.operator("aten::mm", begin - 50 + 2 * kernel, begin - 48 + 2 * kernel)
                host.launch("gemm", begin - 49 + 2 * kernel, begin + 20 * kernel, begin + 20 * kernel + 20, MAIN_THREAD)
            if rank < run.plan.pp - 1:
                host.operator("c10d::send", begin - 30, begin - 28)
                host.launch("ncclDevKernel_SendRecv", begin - 27, begin + 100, begin + 120, MAIN_THREAD, NCCL_STREAM)
        host.range(f"ProfilerStep#{number + 4}", -LEAD - 5, run.end + 40)
        return [*host.events, *super().step(run, rank, number, at)]


def test_forwards_of_an_evaluation_between_steps_are_not_counted() -> None:
    run = recognise_run(Evaluated(), RUN, 2)
    assert run.schedule.name == "1f1b"
    assert run.schedule.mismatches == ()
    for rank in range(RUN.plan.pp):
        for step in (4, 5):
            assert cells(run, rank, step) == planned(RUN.plan, rank)


KINDS = {
    **{"F": SegmentKind.FORWARD, "B": SegmentKind.BACKWARD, "O": SegmentKind.OPTIMIZER},
    **{"s": SegmentKind.SEND, "r": SegmentKind.RECV},
}


def test_messages_have_the_microbatch_of_the_op_before_a_send_or_behind_a_receive() -> None:
    segments = [Segment(KINDS[kind], 10 * at, 10 * at + 5) for at, kind in enumerate("srFssrFsrBsrBsrOrFrBs")]
    found = [f"{action.kind}{action.microbatch}" for _, action in with_microbatches(segments)]
    first = "RECV_F0 F0 SEND_F0 SEND_F0 RECV_F1 F1 SEND_F1 RECV_B0 B0 SEND_B0 RECV_B1 B1 SEND_B1"
    assert " ".join(found) == f"{first} RECV_F0 F0 RECV_B0 B0 SEND_B0"


def events_of(*named: tuple[str, int]) -> Events:
    """Operators of one thread, one after another: so many of each name."""
    names = [name for name, count in named for _ in range(count)]
    return make_trace(
        [Event(Category.CPU_OP, name, 10 * at, 10 * at + 5, thread=MAIN_THREAD) for at, name in enumerate(names)]
    ).events


@pytest.mark.parametrize(("behind", "word"), [(0, "high"), (8, "low")])
def test_confidence_is_low_where_most_operators_lie_in_no_op(behind: int, word: str) -> None:
    node = "autograd::engine::evaluate_function: MmBackward0"
    calls = [("c10d::recv_", 1), ("aten::mm", 2), ("c10d::send", 1), ("c10d::recv_", 1), (node, 2), ("c10d::send", 1)]
    (line,) = infer_ops(events_of(*calls, ("aten::zero_", behind))).evidence
    assert f"({word} confidence)" in line


def test_operators_that_launch_kernels_of_optimizers_are_optimizers_where_no_range_says_so() -> None:
    events = events_of(("aten::mm", 1), ("aten::_foreach_add_", 2), ("aten::mm", 1))
    kinds = [segment.kind for segment in _segments(events, MAIN_THREAD, [(12, 24)])]
    assert kinds == [KINDS[kind] for kind in "FOOF"]
    assert not has_optimizer_ranges(events)
    assert has_optimizer_ranges(events_of(("aten::mm", 1), ("Optimizer.step#SGD.step", 1)))
