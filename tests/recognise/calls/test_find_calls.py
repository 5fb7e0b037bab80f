"""Communication of traces without marks: one row per call, whatever shows it, and all of it per axis in the report."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from pptrace.model.traces import Category, Trace
from pptrace.recognise.calls.find_calls import find_calls
from pptrace.recognise.device.work import COMMUNICATION_KERNEL, device_work, hint_of_kernel, kind_of, kind_of_kernel
from pptrace.schedule.registry import build
from tests.recognise.kineto_calls import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    AUTOGRAD_THREAD,
    MAIN_THREAD,
    RECV,
    SEND,
    Rank,
)
from tests.roundtrip.files import events_of, step_begins
from tests.roundtrip.styles import TorchLabels
from tests.support.analysed import analyse, recognise
from tests.support.synthetic import NCCL_STREAM, START, Event, make_trace, run_on_paper


def test_all_events_of_a_call_are_one_communication_with_its_kernels_times() -> None:
    rank = Rank(0)
    rank.call(ALL_REDUCE, 100, (150, 190), in_bytes=64, out_bytes=64, group_id="3", ranks=(0, 4), seq=7)
    calls = find_calls(rank.trace().events)
    assert len(calls) == 1
    row = calls.iloc[0]
    assert (row["kind"], row["bytes"], row["seq"]) == ("all_reduce", 64, 7)
    assert (row["group_ranks"], row["group_size"]) == ("[0, 4]", 2)
    assert (row["host_ns"], row["start_ns"], row["end_ns"]) == (START + 100, START + 150, START + 190)
    assert (row["stream"], row["clock"]) == (NCCL_STREAM, "device")


def test_the_record_tells_all_to_all_from_send_and_receive_though_the_kernel_is_the_same() -> None:
    rank = Rank(0)
    rank.call(ALL_TO_ALL, 0, (20, 30), ranks=(0, 1, 2, 3))
    rank.call(SEND, 40, (60, 70), ranks=(0, 4), dst=4)
    rank.call(RECV, 80, (90, 99), ranks=(0, 4), src=4)
    calls = find_calls(rank.trace().events)
    assert calls["kind"].tolist() == ["all_to_all", "send", "recv"]
    assert calls["peer"].tolist() == [-1, 4, 4]


def test_the_kernel_of_a_batch_carries_all_its_calls() -> None:
    rank = Rank(1)
    rank.call(SEND, 0, None, ranks=(0, 1, 2), dst=2, in_bytes=8)
    rank.call(RECV, 20, None, ranks=(0, 1, 2), src=0, out_bytes=16)
    rank.add(Category.ANNOTATION, "nccl:coalesced", 40, 90_000, thread=MAIN_THREAD)
    rank.kernel("ncclDevKernel_SendRecv(x)", 41, 60, 80)
    rank.call(ALL_REDUCE, 100, (150, 160), ranks=(0, 1, 2))
    calls = find_calls(rank.trace().events)
    assert calls["kind"].tolist() == ["send", "recv", "all_reduce"]
    assert calls["bytes"].tolist()[:2] == [8, 16]
    assert (calls["start_ns"] - START).tolist() == [60, 60, 150]
    assert (calls["end_ns"] - START).tolist() == [80, 80, 160]


@pytest.mark.parametrize(
    ("around", "hint"),
    [
        ("FSDP::all_gather (layers.0)", "dp"),
        ("FSDP::post_backward_reduce", "dp"),
        ("FullyShardedDataParallel._pre_forward", "dp"),
        ("FSDP::pre_forward (layers.0)", ""),
        ("FullyShardedDataParallel.forward", ""),
    ],
)
def test_what_fsdp_gathers_and_scatters_is_data_parallel_and_what_runs_in_its_forwards_may_be_anything(
    around: str, hint: str
) -> None:
    rank = Rank(0)
    rank.add(Category.ANNOTATION, around, 0, 90, thread=MAIN_THREAD)
    rank.call(ALL_GATHER, 10, (20, 30), ranks=(0, 1))
    assert find_calls(rank.trace().events)["hint"].tolist() == [hint]


def test_a_kernel_without_a_recorded_call_is_a_communication_by_its_name_or_its_own_arguments() -> None:
    rank = Rank(0)
    rank.kernel("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*)", 0, 10, 20)
    rank.kernel("void deep_ep::internode::dispatch<false, 8>(int4*)", 30, 40, 50)
    rank.kernel("ncclDevKernel_SendRecv(x)", 55, 60, 70)
    calls = find_calls(rank.trace().events)
    assert calls["kind"].tolist() == ["all_gather", "all_to_all", "send_recv"]
    assert calls["hint"].tolist() == ["", "ep", ""]


def test_a_kernel_launched_before_the_recording_was_called_then_and_belongs_to_no_step() -> None:
    """Its number is smaller than those of all recorded calls; of another one without a launch nothing is known but its start."""
    rank = Rank(0)
    first, other = 5, 105
    for number, start in ((first, 40), (other, 70)):
        rank.add(Category.KERNEL, SEND[3], start, start + 10, device=0, stream=NCCL_STREAM, correlation=number)
    rank.correlation = 100
    rank.kernel("gemm", 30, 55, 60)
    rank.correlation = 109  # the other one's number lies between those of recorded calls
    rank.kernel("gemm", 80, 85, 90)
    events = rank.trace().events
    assert (find_calls(events)["host_ns"] - START).tolist() == [29, 70]
    assert (find_calls(events)["start_ns"] - START).tolist() == [40, 70]


def test_waits_are_no_communication_and_a_barriers_all_reduce_is_the_barrier() -> None:
    rank = Rank(0)
    rank.record(0, 5, collective="wait")
    rank.add(Category.CPU_OP, "c10d::barrier", 10, 60, thread=MAIN_THREAD)
    rank.call(ALL_REDUCE, 20, (40, 50))
    rank.args.clear()  # an old torch: the record tells nothing
    calls = find_calls(rank.trace().events)
    assert calls["kind"].tolist() == ["barrier"]


def test_a_message_on_the_host_lasts_until_its_range_ends_and_is_asked_for_when_the_thread_has_nothing_else() -> None:
    rank = Rank(0)
    rank.add(Category.CPU_OP, "c10d::allreduce_", 0, 10, thread=MAIN_THREAD)
    rank.add(Category.ANNOTATION, "gloo:all_reduce", 2, 100, thread=MAIN_THREAD)
    rank.add(Category.CPU_OP, "aten::mm", 20, 70, thread=MAIN_THREAD)
    row = find_calls(rank.trace().events).iloc[0]
    times = [row[name] - START for name in ("start_ns", "posted_ns", "asked_ns", "end_ns")]
    assert (times, row["clock"]) == ([0, 10, 70, 100], "host")


def test_nccls_own_ranges_name_what_its_kernels_do() -> None:
    rank = Rank(0)
    rank.add(Category.ANNOTATION, "ncclReduceScatter", 0, 10, thread=MAIN_THREAD)
    rank.kernel("ncclDevKernel_Generic(x)", 5, 20, 30)
    rank.add(Category.ANNOTATION, "ncclGroupStart", 40, 41, thread=MAIN_THREAD)
    calls = find_calls(rank.trace().events)
    assert (calls["kind"].tolist(), (calls["start_ns"] - START).tolist()) == (["reduce_scatter"], [20])


def copy(rank: Rank, name: str, launch: int, start: int) -> None:
    rank.correlation += 1
    number = rank.correlation
    rank.add(Category.RUNTIME, "cudaMemcpyAsync", launch, launch + 1, thread=MAIN_THREAD, correlation=number)
    rank.add(Category.MEMCPY, name, start, start + 10, device=0, stream=9, correlation=number)


def test_a_group_of_nccls_own_messages_is_all_of_them() -> None:
    rank = Rank(0)
    for at, (sends, recvs) in enumerate([(1, 0), (1, 1), (2, 2), (0, 1)]):
        rank.group(1000 * at, sends, recvs)
    calls = find_calls(rank.trace().events)
    assert calls["kind"].value_counts().to_dict() == {"send": 4, "recv": 4}
    assert set(calls["clock"]) == {"device"}


def test_groups_that_always_send_and_receive_several_may_be_exchanges_between_all_ranks() -> None:
    rank = Rank(0)
    for at in range(4):
        rank.group(2000 * at, 1, 1)
        rank.group(2000 * at + 1000, 4, 4, stream=NCCL_STREAM + 1)
    calls = find_calls(rank.trace().events)
    assert calls["kind"].value_counts().to_dict() == {"send": 4, "recv": 4, "send_recv": 4}
    assert set(calls.loc[calls["kind"] == "send_recv", "stream"]) == {NCCL_STREAM + 1}


@pytest.mark.parametrize("name", ["Memcpy PtoP (Device -> Device)", "Memcpy DtoD (Device -> Device)"])
def test_copies_launched_by_a_collective_are_communication_and_others_are_memory(name: str) -> None:
    rank = Rank(0)
    rank.call(ALL_GATHER, 0, None, ranks=(0, 1), in_bytes=4, out_bytes=8)
    for launch, start in ((5, 20), (50, 60)):
        copy(rank, name, launch, start)
    trace = rank.trace()
    assert device_work(trace.events).is_communication.tolist() == [True, False]
    calls = find_calls(trace.events)
    assert (calls["kind"].tolist(), (calls["start_ns"] - START).tolist()) == (["all_gather"], [20])


def test_the_range_of_a_batch_that_never_ends_holds_no_copies() -> None:
    rank = Rank(0)
    rank.call(SEND, 0, None, ranks=(0, 1), dst=1, in_bytes=8)
    rank.add(Category.ANNOTATION, "nccl:coalesced", 12, 90_000, thread=MAIN_THREAD)
    rank.kernel("ncclDevKernel_SendRecv(x)", 13, 20, 30)
    copy(rank, "Memcpy HtoD (Pageable -> Device)", 50, 60)
    events = rank.trace().events
    assert device_work(events).is_communication.tolist() == [True, False]
    assert (find_calls(events)["end_ns"] - START).tolist() == [30]


def test_a_copy_of_a_wait_belongs_to_no_call() -> None:
    rank = Rank(0)
    rank.call(SEND, 0, None, ranks=(0, 1), dst=1, in_bytes=8)
    rank.record(20, 40, collective="wait")
    copy(rank, "Memcpy DtoH (Device -> Pageable)", 25, 30)
    calls = find_calls(rank.trace().events)
    assert (calls["kind"].tolist(), calls["clock"].tolist()) == (["send"], ["host"])


@pytest.mark.parametrize(("recorded", "size", "lasts"), [(True, 1, 0), (False, 1, 0), (True, 2, 9), (False, 2, 10)])
def test_a_call_that_was_only_posted_takes_no_time_in_a_group_of_one_rank(
    recorded: bool, size: int, lasts: int
) -> None:
    """Whoever tells the size: the call, or, as MTIA's operators do not, the configuration of the job."""
    config = [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": size, "ranks": list(range(size))}]
    rank = Rank(0, {"world_size": size, "pg_config": config})
    rank.kernel("gemm", 20, 30, 40)
    if recorded:
        rank.call(ALL_REDUCE, 0, None, ranks=range(size), in_bytes=8)
    else:
        rank.add(Category.CPU_OP, "c10d::allreduce_", 0, 10, thread=MAIN_THREAD)
    comms = recognise([rank.trace()]).comms
    assert (comms["end_ns"] - comms["start_ns"]).tolist() == [lasts]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_allgather_base", "all_gather"),
        ("allgather_into_tensor_coalesced_", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("allreduce_coalesced_", "all_reduce"),
        ("alltoall_base_", "all_to_all"),
        ("AllToAll", "all_to_all"),
        ("recvAnySource", "recv"),
        ("_reduce_oop", "reduce"),
        ("wait", ""),
        ("coalesced", ""),
        ("wait_tensor", ""),
        ("GroupStart", ""),
        ("CommInitRank", ""),
    ],
)
def test_names_of_calls_tell_their_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


@pytest.mark.parametrize(
    ("name", "kind", "hint"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", "reduce_scatter", ""),
        ("ncclSymkDevKernel_AllReduce_RSxLD_AGxST(x)", "all_reduce", ""),
        ("ncclDevKernel_Generic(x)", "unknown", ""),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(x)", "send_recv", ""),
        ("void cross_device_reduce_2stage<__half, 8>(x)", "all_reduce", "tp"),
        ("kuserbuffers_pushrecv(x)", "send_recv", "tp"),
        ("void dpsk::ep::intranode::combine<__nv_bfloat16, 8>(x)", "all_to_all", "ep"),
        ("void deep_ep::internode::cached_notify<false>(x)", "barrier", "ep"),
        ("void deep_ep::intranode::notify_dispatch<8>(x)", "barrier", "ep"),
        ("void deep_ep::intranode::barrier<8>(int**, int)", "barrier", "ep"),
        ("void deep_ep::internode_ll::clean_low_latency_buffer<256>(int*)", "barrier", "ep"),
        ("void deep_ep::elastic::hybrid_dispatch_impl<8>(x)", "all_to_all", "ep"),
        ("void hybrid_ep::combine_kernel<4>(x)", "all_to_all", "ep"),
        ("void mori::moe::EpDispatchIntraNodeKernel<hip_bfloat16>(x)", "all_to_all", "ep"),
        ("EpCombineInterNodeV1KernelLowLatency_bf16", "all_to_all", "ep"),
        ("void tensorrt_llm::kernels::moe_comm::moeA2ADispatchKernel<x, 8>(y)", "all_to_all", "ep"),
        ("multimem_all_reduce_kernel", "all_reduce", "tp"),
        ("void two_shot_all_reduce_kernel<float>(x)", "all_reduce", "tp"),
        ("nvshmemi_transfer_rma", "unknown", ""),
        ("mscclKernel_Sum_half_Simple_true", "unknown", ""),
        ("quick_reduce::allreduce_prototype_twoshot(x)", "all_reduce", "tp"),
        ("void quickreduce::allreduce_prototype_twoshot<x>(y)", "all_reduce", "tp"),
        ("ncclAllReduceRingLLKernel_sum_f32(x)", "all_reduce", ""),
        ("_Z21ncclKernel_Broadcastv", "broadcast", ""),
        ("rcclGenericKernel", "unknown", ""),
        ("userbuffers_fp16_sum", "unknown", "tp"),
        ("internode::dispatch", "all_to_all", "ep"),
        ("intranode::combine", "all_to_all", "ep"),
    ],
)
def test_names_of_kernels_tell_their_kinds(name: str, kind: str, hint: str) -> None:
    assert COMMUNICATION_KERNEL.search(name)
    assert (kind_of_kernel(name), hint_of_kernel(name)) == (kind, hint)


@pytest.mark.parametrize(
    "name",
    [
        "void reduce_kernel<512, 1>(x)",
        "BlockAllReduceSum<float>",
        "void moeA2APrepareDispatchKernel(x)",
        "void permute_kernel<x>(y)",
        "flash_fwd",
        "void gather_kernel(x)",
        "void at::cuda::detail::prepare_grouped_gemm_data<cutlass::bfloat16_t, cutlass::bfloat16_t>(x)",
        "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::GemmUniversal<"
        "cutlass::gemm::GroupProblemShape<cute::tuple<int, int, int> >, x> > >(y)",
        "void at::native::nccl_like_reduce_kernel(int)",
        "void my_ncclTest(x)",
        "void rcclike_kernel()",
        "void deep_ep::internode::get_dispatch_layout<256, 32, 8>",  # where it stood at first
        *("deep_ep::layout::get_dispatch_layout", "deep_ep::internode_ll::query_mask_buffer", "hybrid_ep::scan"),
        "deep_ep::elastic::dispatch_copy_epilogue_impl",
    ],
)
def test_kernels_that_reduce_within_a_device_or_have_a_librarys_name_inside_another_word_compute(name: str) -> None:
    assert not COMMUNICATION_KERNEL.search(name)


def data_parallel(rank: int, late: int) -> Rank:
    """Two steps of gradients summed from autograd's thread; rank 1 comes ``late``."""
    job = Rank(rank, {"rank": rank, "world_size": 2})
    at = late if rank else 0
    for step in range(2):
        for bucket in range(2):
            start = 1000 * step + 100 * bucket
            node = "autograd::engine::evaluate_function: X"
            job.add(Category.CPU_OP, node, start, start + 50, thread=AUTOGRAD_THREAD)
            args = dict.fromkeys(("in_bytes", "out_bytes"), 400 * (bucket + 1))
            group = {"group_id": "0", "group_description": "default_pg", "ranks": (0, 1)}
            job.call(ALL_REDUCE, start + 5, (start + 20 + at, start + 90), AUTOGRAD_THREAD, **group, **args)
    return job


def test_a_data_parallel_run_without_steps_has_its_totals_per_axis_and_kind() -> None:
    report = analyse([data_parallel(rank, 10).trace() for rank in range(2)]).report
    assert (report.mesh.num_ranks, report.mesh.dp) == (2, 2)
    (total,) = report.device[1].comms
    assert (total.axis, total.kind, total.group_size, total.count, total.bytes) == ("dp", "all_reduce", 2, 4, 2400)
    assert (total.total_ns, total.busy_ns, total.overlap_ratio) == (4 * 60, 4 * 60, 0.0)
    assert total.algbw_gbps == total.busbw_gbps == pytest.approx(2400 / 240)
    assert any("dp by its all-reduces in the backward" in line for line in report.warnings)


def pipelined(rank: int, labelled_messages: bool = True) -> Rank:
    """A rank of pp 2 × dp 2 under torch's labels: GPipe of two microbatches, then gradients summed over dp."""
    job = Rank(rank, {"rank": rank, "world_size": 4})
    stage, dp = divmod(rank, 2)
    peer = rank + 2 if stage == 0 else rank - 2
    pp_args = {"group_id": "1", "group_description": "mesh_pp", "ranks": (dp, dp + 2), "in_bytes": 16, "out_bytes": 16}

    def op(name: str, at: int) -> None:
        job.add(Category.ANNOTATION, f"PP:{name}", at, at + 60, thread=MAIN_THREAD)
        job.correlation += 1
        number = job.correlation
        job.add(Category.RUNTIME, "cudaLaunchKernel", at + 5, at + 6, thread=MAIN_THREAD, correlation=number)
        job.add(Category.KERNEL, "gemm", at + 10, at + 90, device=0, stream=7, correlation=number)

    def message(name: str, at: int, sends: bool) -> None:
        if labelled_messages:
            job.add(Category.ANNOTATION, f"PP:{name}", at, at + 20, thread=MAIN_THREAD)
        ends = {"dst": peer} if sends else {"src": peer}
        job.call(SEND if sends else RECV, at + 2, (at + 10, at + 30), **pp_args, **ends)

    for microbatch in range(2):
        at = 200 * microbatch + 200 * stage
        if stage == 1:
            message(f"1RECV_F{microbatch}", at - 90, sends=False)
        op(f"{stage}F{microbatch}", at)
        if stage == 0:
            message(f"0SEND_F{microbatch}", at + 110, sends=True)
    for microbatch in range(2):
        at = 800 + 200 * microbatch + 200 * (1 - stage)
        if stage == 0:
            message(f"0RECV_B{microbatch}", at - 90, sends=False)
        op(f"{stage}B{microbatch}", at)
        if stage == 1:
            message(f"1SEND_B{microbatch}", at + 110, sends=True)
    group = {"group_id": "2", "group_description": "mesh_dp_shard", "ranks": (rank - dp, rank - dp + 1)}
    job.call(ALL_REDUCE, 1500, (1520, 1620), **group, in_bytes=1000, out_bytes=1000)
    return job


@pytest.mark.parametrize("labelled_messages", [True, False])
def test_labelled_pipelines_gain_their_other_communication_and_no_message_twice(labelled_messages: bool) -> None:
    report = analyse([pipelined(rank, labelled_messages).trace() for rank in range(4)]).report
    mesh = report.mesh
    assert (mesh.num_ranks, mesh.pp, mesh.dp, mesh.tp, mesh.cp) == (4, 2, 2, 1, 1)
    assert (report.schedule.name, report.schedule.num_microbatches, report.schedule.mismatches) == ("gpipe", 2, ())
    (step,) = report.steps
    assert step.span_ns == 1280
    assert step.bubble.waterfall_ns.communication == 4 * 20  # receives are not posted ahead: each keeps its rank
    for rank in step.ranks:
        by_key = {(comm.axis, comm.kind): comm for comm in rank.comms}
        assert set(by_key) == {("dp", "all_reduce"), ("pp", "send"), ("pp", "recv")}
        sent, reduced = by_key["pp", "send"], by_key["dp", "all_reduce"]
        assert (sent.count, sent.bytes, sent.exposed_ns, sent.wait_ns) == (2, 32, 40, 0)
        assert by_key["pp", "recv"].count == 2
        assert (reduced.count, reduced.bytes, reduced.total_ns) == (1, 1000, 100)
        assert reduced.busbw_gbps == pytest.approx(10.0)
        assert rank.compute_ns == 4 * 80
        assert rank.exposed_comm_ns == 4 * 20
        assert rank.bubble_ns == 1280 - 320 - 80


def kernels_alone(rank: int, one_more: bool = False) -> Trace:
    """As in a capture without NCCL's ranges; gradients of the two stages do not end together."""
    job = pipelined(rank, labelled_messages=False)
    if one_more:
        job.kernel("ncclDevKernel_SendRecv(x)", 1440, 1450, 1460)
    hosts = ("c10d::", "record_param", "nccl:")
    apart = rank // 2 * 10**6
    job.events = [
        replace(event, start=event.start + apart, end=event.end + apart) if event.start >= START + 1500 else event
        for event in job.events
        if not event.name.startswith(hosts)
    ]
    job.args.clear()
    job.distributed = {}
    shared = {"one_clock": "session 1"}  # nothing else relates ranks without calls
    return structs.replace(job.trace(), metadata=shared)


def test_kernels_alone_between_labelled_ops_are_the_messages_of_their_plan() -> None:
    report = analyse([kernels_alone(rank) for rank in range(4)]).report
    (step,) = report.steps
    for rank in step.ranks:
        assert (rank.compute_ns, rank.exposed_comm_ns) == (4 * 80, 4 * 20)
        assert rank.bubble_ns == step.span_ns - 4 * 80 - 4 * 20
    (line,) = (line for line in report.warnings if "assumed to be the messages" in line)
    assert line.startswith("16 send/receive kernels without a direction")
    assert any("4 collectives, which count as transfer" in line for line in report.warnings)


def test_kernels_that_no_plan_explains_leave_the_bubble_known_and_the_report_says_how_they_count() -> None:
    report = analyse([kernels_alone(rank, one_more=True) for rank in range(4)]).report
    (step,) = report.steps
    for rank in step.ranks:
        assert (rank.compute_ns, rank.exposed_comm_ns) == (4 * 80, 0)
        assert rank.bubble_ns == step.span_ns - 4 * 80
    lines = [line for line in report.warnings if "without a recorded group or peer" in line]
    assert len(lines) == 1
    assert "18 messages, which count as waiting (bubble) and 4 collectives" in lines[0]


def test_a_ring_exchange_of_user_buffers_is_one_kind_inside_ops_and_between_them() -> None:
    run = run_on_paper(build("1f1b", 2, 3), lambda _: 500, latency=130)
    traces = []
    for rank in range(2):
        events = events_of(TorchLabels(), run, rank, 1)
        ops = list(run.computes(rank))
        begin = step_begins(run, 0)
        for at in (begin + ops[0].start + 20, begin + ops[-1].end + 5):
            name = "void kuserbuffers_pushsendrecv<1>(int)"
            events.append(Event(Category.KERNEL, name, at, at + 9, 0, NCCL_STREAM + 9))
        traces.append(make_trace(events, rank))
    comms = recognise(traces).comms
    rings = comms[comms["kind"] == "ring_exchange"]
    assert len(rings) == 4
    assert set(rings["axis"]) == {"tp"}
    assert set(comms["kind"]) == {"send", "recv", "ring_exchange"}
