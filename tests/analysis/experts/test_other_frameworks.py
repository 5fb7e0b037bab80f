"""Experts in traces of other frameworks: two ranks on paper, as torch's profiler records them on GPUs, without our marks.

A rank makes four exchanges with its experts: forward and backward, twice. The experts are one kernel, which takes a stated time
for each row, between the call that brings rows and the one that takes them back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from pptrace.analysis.experts.types import ExpertsReport
from pptrace.model.traces import Category
from pptrace.workflow.analyse import Analysis
from tests.recognise.kineto_calls import ALL_GATHER, ALL_TO_ALL, MAIN_THREAD, Rank
from tests.support.analysed import analyse
from tests.support.synthetic import AUTOGRAD_THREAD

HIDDEN, ITEM, ROW_NS = 64, 2, 10
REDUCE_SCATTER = (
    "c10d::_reduce_scatter_base_",
    "_reduce_scatter_base",
    "nccl:_reduce_scatter_base",
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)",
)
ROWS = ((30, 10), (50, 30))
"""Rows from each rank (0, 1) to the experts of each: 80 arrive at rank 0, 40 at rank 1."""
MOST = 80
EXCHANGE = 4_000
DEEP_EP = "void deep_ep::internode::{}<8>(x)"


@dataclass(frozen=True)
class Style:
    """Names that a framework writes: the description of the experts' group, and the range around a call, which says ``{}`` with
    dispatch or combine.

    ``is_alone``: the first backward has one call more, as that of a layer whose tokens need no gradient. ``steps``: one range
    of torch's profiler holds all.

    ``is_gathered``: tokens go everywhere by an all-gather, and come back by a reduce-scatter.

    ``is_even``: buffers are padded to equal parts, which no splits tell. ``heads``: the range around the all-to-alls of
    attention's heads in another group of the same ranks; "" without such. ``kernels`` carry tokens in place of NCCL's calls.
    """

    description: str = "undefined"
    range: str = ""
    is_even: bool = False
    heads: str = ""
    kernels: str = ""
    world: int = 2
    is_alone: bool = False
    is_gathered: bool = False
    steps: bool = False

    def rank(self, number: int) -> Rank:
        job = Rank(number, {"rank": number, "world_size": self.world})
        for index in range(4):
            at, thread = 100 + index * EXCHANGE, AUTOGRAD_THREAD if index % 2 else MAIN_THREAD
            if index % 2:
                job.add(
                    Category.CPU_OP,
                    "autograd::engine::evaluate_function: X",
                    at - 50,
                    at + EXCHANGE - 200,
                    thread=thread,
                )
            self._exchange(job, at, thread)
        if self.is_alone:
            sent, got = _parts_of(number)
            self._tokens(job, "combine", 6_000, (6_100, 6_200), AUTOGRAD_THREAD, sent, got)
        if self.steps:
            job.add(Category.ANNOTATION, "ProfilerStep#7", 0, 4 * EXCHANGE)
        return job

    def _exchange(self, job: Rank, at: int, thread: int) -> None:
        sent, got = _parts_of(job.rank)
        if self.heads:
            job.add(Category.CPU_OP, self.heads, at - 1, at + 15, thread=thread)
            self._call(job, ALL_TO_ALL, at, (at + 20, at + 60), thread, group="7", description="undefined", rows=20)
        self._call(job, ALL_GATHER, at + 100, (at + 160, at + 200), thread, rows=1, width=1)  # counts
        experts = at + 400 + 100, at + 400 + 100 + ROW_NS * sum(got)
        self._tokens(job, "dispatch", at + 300, (at + 400, experts[0]), thread, sent, got)
        job.kernel("void cutlass::GemmGrouped<x>(y)", at + 350, *experts, thread, stream=7)
        self._tokens(job, "combine", at + 370, (experts[1], at + 400 + 100 + ROW_NS * MOST + 100), thread, got, sent)

    def _tokens(
        self,
        job: Rank,
        role: str,
        at: int,
        kernel: tuple[int, int],
        thread: int,
        sent: tuple[int, ...],
        got: tuple[int, ...],
    ) -> None:
        if self.range:
            job.add(Category.CPU_OP, self.range.format(role), at - 1, at + 15, thread=thread)
        if self.kernels:
            job.kernel(self.kernels.format(role), at, *kernel, thread)
            return
        splits = "" if self.is_even else ">".join(",".join(map(str, side)) for side in (sent, got))
        rows = 120 if self.is_even else max(sum(sent), sum(got))
        names = ALL_TO_ALL if not self.is_gathered else ALL_GATHER if role == "dispatch" else REDUCE_SCATTER
        self._call(job, names, at, kernel, thread, rows=rows, splits=splits)

    def _call(
        self,
        job: Rank,
        names: tuple[str, str, str, str],
        at: int,
        kernel: tuple[int, int],
        thread: int,
        rows: int,
        width: int = HIDDEN,
        splits: str = "",
        group: str = "5",
        description: str | None = None,
    ) -> None:
        size = rows * width * ITEM
        job.call(
            names,
            at,
            kernel,
            thread,
            group_id=group,
            group_description=self.description if description is None else description,
            ranks=(0, 1),
            in_bytes=size,
            out_bytes=size,
            splits=splits,
        )

    def analysis(self) -> Analysis:
        return analyse([self.rank(number).trace() for number in (0, 1)])

    def experts(self) -> ExpertsReport:
        return self.analysis().report.experts


def _parts_of(rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows that a rank sends to each, and gets from each."""
    return ROWS[rank], tuple(of[rank] for of in ROWS)


MEGATRON = Style("EXPERT_MODEL_PARALLEL_GROUP", "moe_{} forward")
TORCHTITAN = Style("mesh_ep")
DEEPSPEED = Style(is_even=True, heads="_SeqAllToAll")
SWITCH = Style("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", is_even=True, is_gathered=True)
VLLM = Style(kernels=DEEP_EP)


@pytest.mark.parametrize("style", [MEGATRON, TORCHTITAN, Style(heads="SeqAllToAll4D"), Style(is_alone=True)])
def test_rows_of_ranks_and_who_is_waited_for_follow_from_the_splits(style: Style) -> None:
    experts = style.experts()
    assert experts.source == "splits"
    assert [(rank.rows, rank.ratio) for rank in experts.ranks] == [(4 * 80, 4 / 3), (4 * 40, 2 / 3)]
    assert [rank.expert_ns for rank in experts.ranks] == [4 * ROW_NS * 80, 4 * ROW_NS * 40]
    assert [rank.bytes for rank in experts.ranks] == [
        4 * 120 * HIDDEN * ITEM
    ] * 2  # 40 rows and 80 back, or the reverse
    dispatch, combine = experts.calls
    assert (dispatch.count, dispatch.wait_ns, dispatch.last_rank) == (8, 0, None)
    assert (combine.count, combine.wait_ns) == (8, 4 * ROW_NS * 40)
    assert (combine.last_rank, combine.last_share, combine.last_reason) == (0, 1.0, "rows")


@pytest.mark.parametrize("style", [DEEPSPEED, SWITCH])
def test_equal_parts_tell_waits_but_no_rows_and_thus_not_why_a_rank_is_late(style: Style) -> None:
    experts = style.experts()
    assert experts.source == "calls"
    assert [(rank.rows, rank.slowness) for rank in experts.ranks] == [(None, None)] * 2
    combine = experts.calls[1]
    assert (combine.wait_ns, combine.last_rank, combine.last_reason) == (4 * ROW_NS * 40, 0, None)


@pytest.mark.parametrize(
    ("style", "heads"),
    [
        (DEEPSPEED, "cp"),  # the range around its calls says what the group is for
        (Style(heads="SeqAllToAll4D"), "cp"),
        (Style("EXPERT_MODEL_PARALLEL_GROUP", heads="x"), "cp"),  # experts have a group already
        (Style(range="moe_{} forward", heads="x", is_even=True), "cp"),
    ],
)
def test_groups_of_experts_are_told_from_those_of_attention(style: Style, heads: str) -> None:
    comms = replace(style, world=4).analysis().data.comms
    rows = comms[comms["kind"] == "all_to_all"]
    is_of_heads = rows["bytes"] == 20 * HIDDEN * ITEM
    assert set(rows["axis"][is_of_heads]) == {heads}
    assert set(rows["axis"][~is_of_heads]) == {"ep"}


def test_kernels_of_libraries_for_experts_are_their_exchanges() -> None:
    experts = VLLM.experts()
    assert (experts.source, [call.count for call in experts.calls]) == ("calls", [8, 8])


def test_steps_without_a_pipeline_have_a_finding_of_the_rank_that_all_wait_for() -> None:
    finding, *_ = replace(TORCHTITAN, steps=True).analysis().report.findings
    where = {"axis": "ep", "rank": 0}
    share = 4 * ROW_NS * 40 / (2 * 4 * EXCHANGE)
    assert finding.evidence == {"where": where, "reason": "unequal routes", "share": share, "rank_ratio": 4 / 3}
    assert (
        finding.title
        == "Experts: 5.0% of the ranks' time is waiting for rank 0, whose experts have 1.3 times the rows of its group"
    )
    assert finding.gain_ns is None
