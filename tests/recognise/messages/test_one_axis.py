"""Calls of one process group are on one axis with one size, in steps and in the device's row, whoever made them."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from pptrace.marks import CallMark, SpanKind, SpanMark
from pptrace.model.traces import Category, Trace
from tests.recognise.kineto_calls import Rank
from tests.support.analysed import analyse
from tests.support.synthetic import AUTOGRAD_THREAD, NCCL_STREAM, START, marked

BUCKET = 1_048_576
STEP, PAUSE = 1_000, 100
WORLD: dict[str, Any] = {"group_id": "0", "group_description": "default_pg", "ranks": (0, 1)}
ALL_REDUCE = ("c10d::allreduce_", "allreduce", "nccl:all_reduce", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)")
BARRIER = ("c10d::barrier", "barrier", "nccl:all_reduce_barrier", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)")
CONFIG = {
    "backend": "nccl",
    "world_size": 2,
    "pg_config": [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": 2, "ranks": [0, 1]}],
}
HOOKED = {"groups": {"0": {"ranks": [0, 1], "axis": "dp", "description": "default_pg", "reducer": True}}}


def trace(rank: int, is_hooked: bool, with_earlier: bool) -> Trace:
    """Two steps of DDP over NCCL: two buckets reduced by C++ in the backward of each, a barrier of the script at their ends.

    With ``with_earlier``, two kernels that were launched before the recording go on in it.
    """
    made = Rank(rank, CONFIG, correlation=100)
    if with_earlier:
        for number in range(2):
            times = (20 * number, 20 * number + 15)
            made.add(Category.KERNEL, ALL_REDUCE[3], *times, device=0, stream=NCCL_STREAM, correlation=7 + number)
    for step in range(2):
        at = 50 + step * (STEP + PAUSE)
        made.events.append(marked(SpanMark(SpanKind.STEP, step), START + at, START + at + STEP))
        made.kernel("gemm", at + 5, at + 10, at + 300, stream=7)
        for bucket in range(2):
            begin = at + 100 + 200 * bucket
            engine = "autograd::engine::evaluate_function: AddmmBackward0"
            made.add(Category.CPU_OP, engine, begin - 5, begin + 30, thread=AUTOGRAD_THREAD)
            kernel = (begin + 50, begin + 150)
            made.call(ALL_REDUCE, begin, kernel, AUTOGRAD_THREAD, in_bytes=BUCKET, out_bytes=BUCKET, **WORLD)
        if is_hooked:
            mark = CallMark("barrier", "0", step, -1, -1, None, -1)
            made.events.append(marked(mark, START + at + 795, START + at + 820))
        made.call(BARRIER, at + 800, (at + 830, at + 850), in_bytes=4, out_bytes=4, **WORLD)
    facts = {"rank": rank, "world_size": 2, "backend": "nccl", **(HOOKED if is_hooked else {})}
    return replace(made.trace(), metadata=facts)


@pytest.mark.parametrize("with_earlier", [False, True])
@pytest.mark.parametrize("is_hooked", [False, True])
def test_ddps_buckets_are_dp_and_a_barrier_of_all_ranks_is_of_the_world_everywhere(
    is_hooked: bool, with_earlier: bool
) -> None:
    report = analyse([trace(rank, is_hooked, with_earlier) for rank in range(2)]).report
    assert [step.step for step in report.steps] == [0, 1]
    for device in report.device:
        rows = {(comm.axis, comm.kind): (comm.count, comm.bytes) for comm in device.comms}
        assert rows.keys() == {("dp", "all_reduce"), ("world", "barrier")}
        assert rows["dp", "all_reduce"] == (4, 4 * BUCKET)
        of_steps = [
            comm for step in report.steps for rank in step.ranks if rank.rank == device.rank for comm in rank.comms
        ]
        assert {(comm.axis, comm.kind) for comm in of_steps} == rows.keys()
        for key, (count, num_bytes) in rows.items():
            same = [comm for comm in of_steps if (comm.axis, comm.kind) == key]
            assert sum(comm.count for comm in same) == count
            if num_bytes is not None:
                assert sum(comm.bytes or 0 for comm in same) == num_bytes
    assert report.mesh.dp == 2
