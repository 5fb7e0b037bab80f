"""Collectives by size: lines through their times, names of kernels, steps of rings and trees, hosts that tp crosses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

import pptrace
from pptrace.analysis.links.answer import with_network
from pptrace.analysis.links.collectives import fast_of_groups, findings_on_hosts, ring_steps, tree_steps, with_peaks
from pptrace.analysis.links.types import CollectiveRate, CollectiveSize, CollectiveSpeed, Interconnect
from pptrace.analysis.report import Report
from pptrace.model.mesh import MeshInfo
from pptrace.recognise.device.work import ALGORITHMS, algorithm_of_kernel
from tests.support.tp_tables import transfer_ns, write_run

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data" / "hta" / "nccl_parser_config" / "nccl_data.json.gz"
LATENCY, GBPS = 200_000, 2.0
SIZES = (1 << 18, 1 << 22)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    path = tmp_path_factory.mktemp("tp") / "run.csv"
    write_run(path, lambda microbatch: SIZES[microbatch % 2], LATENCY, GBPS)
    return pptrace.load(path).report


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "RING_LL"),
        ("ncclDevKernel_AllReduce_Sum_bf16_TREE_LL", "TREE_LL"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL128", "RING_LL128"),
        ("ncclDevKernel_AllReduce_Sum_f16_NVLS_TREE_SIMPLE", "NVLS_TREE_SIMPLE"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float", "RING_LL"),
        ("ncclKernel_AllReduce_COLLNET_CHAIN_SIMPLE_Sum_half", "COLLNET_CHAIN_SIMPLE"),
        ("ncclAllReduceTreeLLKernel_sum_f32(ncclColl)", "TREE_LL"),
        ("ncclAllReduceRingLL128Kernel_sum_f16(ncclColl)", "RING_LL128"),
        ("ncclAllReduceRingKernel_sum_f16(ncclColl)", "RING_SIMPLE"),
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", ""),  # neither: a message
        ("ncclDevKernel_SendRecv", ""),
        ("ncclDevKernel_Generic_4", ""),
        ("ampere_sgemm_128x64", ""),
    ],
)
def test_algorithm_and_protocol_are_those_in_the_name_of_the_kernel(name: str, expected: str) -> None:
    assert ALGORITHMS[algorithm_of_kernel(name)] == expected


@pytest.mark.parametrize(("size", "ring", "tree"), [(2, 2, 2), (8, 14, 6), (64, 126, 12), (1024, 2046, 20), (6, 10, 6)])
def test_a_ring_takes_twice_n_less_one_steps_and_a_tree_twice_the_logarithm(size: int, ring: int, tree: int) -> None:
    assert (ring_steps("all_reduce", size), tree_steps("all_reduce", size)) == (ring, tree)
    assert (ring_steps("all_gather", size), tree_steps("all_gather", size)) == (ring // 2, None)
    assert (ring_steps("all_to_all", size), ring_steps("all_reduce", -1), tree_steps("all_reduce", 1)) == (None,) * 3


def test_latency_and_bandwidth_are_those_that_the_times_were_made_with(report: Report) -> None:
    (speed,) = report.collectives
    assert (speed.axis, speed.kind, speed.group_size, speed.count) == ("tp", "all_reduce", 2, 4 * 3 * 4 * 3)
    assert speed.latency_ns == pytest.approx(LATENCY, abs=2)
    assert speed.bandwidth_gbps == pytest.approx(GBPS, rel=1e-4)  # of two ranks the bus bandwidth is the algorithm's
    assert (speed.kernel_algorithm, speed.kernel_protocol, speed.fit_reason) == (None, None, None)
    assert [(size.bytes, size.fast_ns) for size in speed.sizes] == [(n, transfer_ns(n, LATENCY, GBPS)) for n in SIZES]
    assert speed.sizes[0].busbw_gbps == pytest.approx(SIZES[0] / transfer_ns(SIZES[0], LATENCY, GBPS))


def test_of_one_size_there_is_no_line_and_a_reason(tmp_path: Path) -> None:
    write_run(tmp_path / "run.csv", lambda _: 1 << 20, LATENCY, GBPS)
    (speed,) = pptrace.load(tmp_path / "run.csv").report.collectives
    assert (speed.latency_ns, speed.bandwidth_gbps) == (None, None)
    assert speed.fit_reason == "all calls have 1048576 bytes"


def test_kernels_of_a_real_run_are_named_after_rings_of_ll() -> None:
    speeds = pptrace.load("sample_traces/gpu_nccl_experts_pp2_ep2").report.collectives
    named = {(speed.axis, speed.kind): (speed.kernel_algorithm, speed.kernel_protocol) for speed in speeds}
    assert named == {("dp", "all_reduce"): ("ring", "LL"), ("ep", "all_to_all"): (None, None)}


@pytest.mark.skipif(not SHARED.exists(), reason="the folder of public traces is not on this machine")
def test_one_rank_of_two_tells_algorithms_and_sizes_but_no_rates() -> None:
    speeds = pptrace.load(SHARED).report.collectives
    assert {(speed.kind, speed.kernel_algorithm, speed.count) for speed in speeds} == {
        ("all_reduce", "ring", 15),
        ("broadcast", "ring", 6),
    }
    assert all(size.busbw_gbps is None and size.fast_ns is None for speed in speeds for size in speed.sizes)
    assert all(speed.fit_reason is not None and "not all members" in speed.fit_reason for speed in speeds)


SPEED = CollectiveSpeed(
    *("dp", "all_reduce", 8, "ring", "LL", True, 9, 90, (CollectiveSize(1 << 20, 9, 10, None, None),)),
    *(None, None, None, 14, 6),
)


@pytest.mark.parametrize(
    ("busbw", "same_host", "protocol", "exceeds"),
    [(230.0, True, "LL", True), (220.0, True, "LL", False), (230.0, False, "LL", None), (230.0, True, "SIMPLE", None)],
)
def test_more_than_half_of_the_peak_is_not_ll(
    busbw: float, same_host: bool, protocol: str, exceeds: bool | None
) -> None:
    size = CollectiveSize(1 << 20, 9, 10, None, busbw)
    speed = replace(SPEED, sizes=(size,), is_same_host=same_host, kernel_protocol=protocol)
    rate = CollectiveRate("dp", "all_reduce", same_host, 100.0, 450.0, 100 / 450)
    (compared,) = with_peaks([speed], Interconnect((), (rate,)))
    assert (compared.peak_gbps, compared.share_of_peak, compared.exceeds_ll) == (450.0, busbw / 450, exceeds)
    assert with_peaks([speed], None) == (speed,)


def test_a_named_network_is_the_peak_of_collectives_between_hosts(report: Report) -> None:
    size = CollectiveSize(1 << 20, 9, 10, None, 25.0)
    rate = CollectiveRate("dp", "all_reduce", False, 25.0, None, None, ports=1.0)
    with_rate = replace(report, collectives=(replace(SPEED, sizes=(size,)),), interconnect=Interconnect((), (rate,)))
    (speed,) = with_network(with_rate, 50.0).collectives
    assert (speed.peak_gbps, speed.share_of_peak) == (50.0, 0.5)


MESH = MeshInfo(4, pp=2, vpp=1, tp=2, cp=1, dp=1, ep=None, pipelines=((0, 2), (1, 3)))


@pytest.mark.parametrize(("hosts", "across"), [("aabb", None), ("abab", 2), ("aaba", 1), ("aaaa", None), ("abcd", 2)])
def test_tp_across_hosts_is_a_finding(report: Report, hosts: str, across: int | None) -> None:
    facts = {rank: {"host": host} for rank, host in enumerate(hosts)}
    findings = list(findings_on_hosts(report.collectives, report.steps, range(4), facts, MESH))
    assert [finding.evidence["num_across"] for finding in findings] == ([] if across is None else [across])
    if findings:
        (finding,) = findings
        moved = sum(3 * transfer_ns(SIZES[n % 2], LATENCY, GBPS) for n in range(4))  # of a rank: F, and B two of them
        window = report.steps[0].ranks[0].window_ns
        assert finding.evidence["share"] == pytest.approx(moved / window)
        assert f"tp crosses hosts ({across} of 2 groups)" in finding.title


def test_where_hosts_are_not_known_nothing_is_said_of_them(report: Report) -> None:
    assert not list(findings_on_hosts(report.collectives, report.steps, range(4), {}, MESH))
    assert not list(findings_on_hosts((), report.steps, range(4), {0: {"host": "a"}}, MESH))


def test_calls_without_a_match_say_nothing_of_what_a_fast_one_takes() -> None:
    times, group = np.array([0, 7, 5, 0, 9]), np.array([0, 0, 0, 1, 2])
    assert fast_of_groups(times, group, 3, times > 0).tolist() == [5, 0, 9]
    assert fast_of_groups(times, group, 3).tolist() == [0, 0, 9]
