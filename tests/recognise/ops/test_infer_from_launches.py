"""Forwards and backwards by the threads that launch kernels: what else real runs launch must not become an op."""

from __future__ import annotations

import pytest

from pptrace.model.tables import COMPUTE_KINDS
from pptrace.model.traces import Category
from pptrace.recognise.run import RecognisedRun
from pptrace.schedule.registry import build
from tests.roundtrip.files import events_of
from tests.roundtrip.styles import LEAD, DeepSpeed, Host, MegatronNvtx, Style, TorchOneFOneB, Unlabelled, ZeroBubble
from tests.support.analysed import recognise
from tests.support.extent import by_turns
from tests.support.found_ops import cells, planned
from tests.support.synthetic import (
    AUTOGRAD_THREAD,
    MAIN_THREAD,
    NCCL_STREAM,
    Done,
    Event,
    PaperRun,
    make_trace,
    run_on_paper,
)

RUN = run_on_paper(build("1f1b", 3, 5), lambda action: 500, latency=130)


def recognise_run(style: Style, run: PaperRun = RUN, share: int = 1, slowest: bool = True) -> RecognisedRun:
    """``share`` copies of each pipeline rank, as the ranks of a run with the pipeline as its slowest or fastest axis."""
    pp = run.plan.pp
    indices = [rank // share if slowest else rank % pp for rank in range(pp * share)]
    return recognise([make_trace(events_of(style, run, index, 2), rank) for rank, index in enumerate(indices)])


class TensorParallel(Unlabelled):
    """Each op has an all-reduce in the middle, launched by whoever launches the op."""

    kernel, stream = "ncclDevKernel_AllReduce_Sum_bf16", NCCL_STREAM + 9

    def launch_op(self, host: Host, done: Done) -> None:
        super().launch_op(host, done)
        thread = MAIN_THREAD if str(done.action.kind) == "F" else AUTOGRAD_THREAD
        middle = (done.start + done.end) // 2
        host.launch(self.kernel, done.start - 54, middle, middle + 9, thread, self.stream)


class ExpertParallel(TensorParallel):
    """Each op has an all-to-all in the middle, whose kernel is that of a send and receive."""

    kernel, stream = "ncclDevKernel_SendRecv", NCCL_STREAM + 50


class Noise(Unlabelled):
    """The main thread launches a small kernel before each backward, such as the loss's gradient, and scales gradients at last."""

    def launch_op(self, host: Host, done: Done) -> None:
        if str(done.action.kind) == "B":
            host.launch("fill_kernel", done.start - 59, done.start, done.start + 1, MAIN_THREAD)
        super().launch_op(host, done)

    def finish(self, host: Host, run: PaperRun, rank: int, number: int) -> None:
        for index in range(8):
            begin = run.end + index
            host.launch("scale_kernel", begin, begin + 60, begin + 61, MAIN_THREAD)
        super().finish(host, run, rank, number)


@pytest.mark.parametrize("style", [TensorParallel, ExpertParallel, Noise], ids=lambda style: style.__name__)
def test_other_kernels_do_not_part_or_make_ops(style: type[Style]) -> None:
    run = recognise_run(style())
    for rank in range(3):
        for step in range(2):
            assert cells(run, rank, step) == planned(RUN.plan, rank)
    assert run.schedule.name == "1f1b"


@pytest.mark.parametrize(
    ("style", "slowest"), by_turns((Unlabelled, DeepSpeed, MegatronNvtx, ZeroBubble, Unlabelled), (False, True, True))
)
def test_replicas_are_found_by_what_they_do(style: type[Style], slowest: bool) -> None:
    """Nothing names process groups: two ranks per stage are two pipelines, not one of twice the length."""
    run = recognise_run(style(), share=2, slowest=slowest)
    wanted = {(0, 2, 4), (1, 3, 5)} if slowest else {(0, 1, 2), (3, 4, 5)}
    assert set(run.mesh.pipelines) == wanted
    assert (run.mesh.pp, run.mesh.dp) == (3, None)
    for pipeline in wanted:
        for index, rank in enumerate(pipeline):
            assert cells(run, rank, 0) == planned(RUN.plan, index)
    assert run.schedule.name == "1f1b"


def test_kernels_without_messages_are_no_pipeline() -> None:
    """One GPU: forwards and backwards, and nothing that says where one microbatch ends."""
    events = [e for e in events_of(Unlabelled(), RUN, 0, 2) if "SendRecv" not in e.name]
    run = recognise([make_trace(events, 0)])
    assert run.ops.empty or not run.ops["kind"].isin(COMPUTE_KINDS).any()


class RingOnly(ExpertParallel):
    """Messages inside the ops alone, as of context or expert parallelism without a pipeline."""

    def messages(self, *_: object) -> None:
        """Launch no message between ops."""


def test_messages_inside_ops_alone_are_no_pipeline() -> None:
    run = recognise_run(RingOnly())
    assert not run.ops["kind"].isin(COMPUTE_KINDS).any()


class RingOfOperators(TorchOneFOneB):
    """The same with operators: each op posts a send and a receive of its own, and nothing goes between ops."""

    def launch_op(self, host: Host, done: Done) -> None:
        super().launch_op(host, done)
        thread = MAIN_THREAD if str(done.action.kind) == "F" else AUTOGRAD_THREAD
        begin = done.start - LEAD + 3
        host.operator("c10d::send", begin, begin + 1, thread)
        host.operator("c10d::recv_", begin + 2, begin + 3, thread)

    def messages(self, *_: object) -> None:
        """Launch no message between ops."""


def test_messages_that_autograd_posts_as_well_are_no_pipeline() -> None:
    run = recognise_run(RingOfOperators())
    assert not run.ops["kind"].isin(COMPUTE_KINDS).any()


def test_a_launch_that_was_not_recorded_is_left_out() -> None:
    events = events_of(Unlabelled(), RUN, 1, 2)
    orphan = Event(Category.KERNEL, "gemm", events[0].start - 9, events[0].start - 5, 0, 7, correlation=999_999_999)
    traces = [make_trace(events_of(Unlabelled(), RUN, rank, 2), rank) for rank in (0, 2)]
    run = recognise(sorted([*traces, make_trace([orphan, *events], 1)], key=lambda trace: trace.rank or 0))
    assert cells(run, 1, 0) == planned(RUN.plan, 1)
