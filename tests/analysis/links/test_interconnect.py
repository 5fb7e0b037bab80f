"""Rates of collectives by hand, and the peaks of the groups that they ran in."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pptrace.analysis.links.answer import RankTraffic, interconnect_of, with_network
from pptrace.analysis.links.types import CollectiveRate, DevicePeak
from pptrace.analysis.report import Report
from pptrace.analysis.result import CommSummary, RankStep, StepReport
from pptrace.model.mesh import MeshInfo
from pptrace.schedule.registry import build
from pptrace.slices import Slice
from tests.support.analysed import analyse
from tests.support.synthetic import record

MESH = MeshInfo(4, pp=1, vpp=1, tp=2, cp=1, dp=2, ep=None, pipelines=((0,), (1,), (2,), (3,)))
EMPTY = Slice({})


@pytest.fixture(scope="module")
def run() -> Report:
    return analyse(record(build("1f1b", 2, 2), steps=1).traces()).report


def summary(axis: str, kind: str, total: int | None, wait: int | None, busbw: float | None) -> CommSummary:
    return CommSummary(axis, kind, 1, 1000, total, wait, 0, 0, None, None, busbw)


def report_of(run: Report, *steps: dict[int, list[CommSummary]]) -> Report:
    """The report of a run whose ranks communicated so in each step."""
    step, rank = run.steps[0], run.steps[0].ranks[0]

    def of_rank(number: int, comms: list[CommSummary]) -> RankStep:
        return replace(rank, rank=number, comms=tuple(comms))

    def of_step(ranks: dict[int, list[CommSummary]]) -> StepReport:
        return replace(step, ranks=tuple(of_rank(number, comms) for number, comms in ranks.items()))

    return replace(run, steps=tuple(of_step(ranks) for ranks in steps))


def traffic(*on_device: int, others: tuple[int, ...] = ()) -> list[RankTraffic]:
    return [RankTraffic(rank, EMPTY, EMPTY, rank in on_device) for rank in sorted((*on_device, *others))]


def facts_of(*hosts_and_devices: str) -> dict[int, dict[str, object]]:
    pairs = (text.split(":") for text in hosts_and_devices)
    return {rank: {"host": host, "device_names": [device]} for rank, (host, device) in enumerate(pairs)}


def rates_of(
    run: Report, facts: dict[int, dict[str, object]], *steps: dict[int, list[CommSummary]]
) -> list[CollectiveRate]:
    found = interconnect_of(report_of(run, *steps), traffic(0, 1, 2, 3), facts, MESH)
    return list(found.collectives)


def test_rates_are_all_bytes_over_all_transfers_of_the_devices(run: Report) -> None:
    slow, fast = summary("tp", "all_reduce", 110, 10, 30.0), summary("tp", "all_reduce", 350, 50, 70.0)
    others = [
        summary("tp", "send", 100, 0, 999.0),
        summary("tp", "all_reduce", 100, 0, None),
        summary("tp", "all_reduce", None, 0, 9.0),
        summary("tp", "all_reduce", 100, None, 9.0),
        summary("tp", "all_reduce", 100, 100, 9.0),
    ]
    report = report_of(run, {0: [slow, *others], 1: []}, {1: [fast], 2: [summary("tp", "all_reduce", 500, 0, 1.0)]})
    found = interconnect_of(report, traffic(0, 1, others=(2,)), facts_of("a:NVIDIA H200", "a:NVIDIA H200"), MESH)
    assert found.devices == tuple(DevicePeak(rank, "NVIDIA H200", "nvlink", 450) for rank in (0, 1))
    rate = (30 * 100 + 70 * 300) / 400
    assert found.collectives == (CollectiveRate("tp", "all_reduce", True, rate, 450, rate / 450),)
    assert interconnect_of(report, traffic(others=(0, 1)), {}, MESH) is None


def test_collectives_are_in_order_of_axis_and_kind(run: Report) -> None:
    names = [("tp", "all_reduce"), ("dp", "reduce_scatter"), ("dp", "all_gather")]
    rates = rates_of(run, {}, {0: [summary(axis, kind, 10, 0, 1.0) for axis, kind in names]})
    assert [(rate.axis, rate.kind) for rate in rates] == sorted(names)
    assert {(rate.is_same_host, rate.peak_gbps, rate.share_of_peak) for rate in rates} == {(None, None, None)}


@pytest.mark.parametrize(
    ("places", "axis", "is_same", "peak"),
    [
        (("a:NVIDIA H200", "a:NVIDIA H200", "b:Tesla T4", "b:Tesla T4"), "tp", True, 15.75),
        (("a:NVIDIA H200", "a:NVIDIA H200", "b:NVIDIA H200", "b:NVIDIA H800"), "tp", True, None),
        (("a:NVIDIA H200", "a:NVIDIA H200", "b:NVIDIA H200", "b:NVIDIA H200"), "dp", False, None),  # no ports
        (("a:NVIDIA H200", "a:NVIDIA H200", "b:NVIDIA H200", "c:NVIDIA H200"), "tp", None, None),
        (("a:NVIDIA H200", "a:NVIDIA H200", "b:NVIDIA H200", "b:NVIDIA H200"), "ep", None, None),
        (("a:NVIDIA H200", "a:Tesla T4", "a:NVIDIA H200", "a:NVIDIA H200"), "ep", True, 15.75),
    ],
)
def test_a_group_has_a_peak_where_all_groups_of_its_axis_are_on_one_host_each(
    run: Report, places: tuple[str, ...], axis: str, is_same: bool | None, peak: float | None
) -> None:
    (rate,) = rates_of(run, facts_of(*places), {0: [summary(axis, "all_gather", 10, 0, 6.3)]})
    share = None if peak is None else 6.3 / peak
    assert (rate.is_same_host, rate.peak_gbps, rate.share_of_peak) == (is_same, peak, share)


NDR, NDR200 = "400 Gb/sec (4X NDR)", "200 Gb/sec (2X NDR)"
WORLD = MeshInfo(6, pp=1, vpp=1, tp=1, cp=1, dp=6, ep=None, pipelines=tuple((rank,) for rank in range(6)))


def on_hosts(hosts: str, ports: dict[str, list[str]], device: str = "NVIDIA H200") -> dict[int, dict[str, object]]:
    return {
        rank: {"host": host, "device_names": [device], "network_ports": dict(enumerate(ports.get(host, [])))}
        for rank, host in enumerate(hosts)
    }


@pytest.mark.parametrize(
    ("hosts", "ports", "kind", "factor", "peak"),
    [
        # one rank on each of 6 hosts: a port, which carries all bus bytes of its ring
        ("abcdef", {host: [NDR] for host in "abcdef"}, "all_reduce", 1.0, 50.0),
        ("abcdef", {host: [NDR] * 8 for host in "abcdef"}, "all_gather", 1.0, 50.0),
        # 3 ranks on each of 2: as many rings as ports; the host with fewest counts, and slower ports are not
        ("aaabbb", {"a": [NDR] * 4, "b": [NDR] * 4}, "reduce_scatter", 3.0, 150.0),
        ("aaabbb", {"a": [NDR] * 4, "b": [NDR, NDR, NDR200]}, "all_reduce", 2.0, 100.0),
        ("aaaabb", {"a": [NDR] * 4, "b": [NDR] * 4}, "all_reduce", 2.0, 100.0),
        # 3 + 3: each sends 3 of 6 parts to the other host, 0.5 of its bytes through its port, where bus bytes are 5/6 of them
        ("aaabbb", {"a": [NDR] * 3, "b": [NDR] * 3}, "all_to_all", 5 / 3, 50 * 5 / 3),
        # 4 + 2 with one port on each: host a sends 4 · 2/6 = 4/3 of one rank's bytes, host b 2 · 4/6 as much
        ("aaaabb", {"a": [NDR], "b": [NDR]}, "all_to_all", (5 / 6) / (4 / 3), 50 * (5 / 6) / (4 / 3)),
        ("aaabbb", {"a": [NDR]}, "all_reduce", 1.0, None),
    ],
)
def test_collectives_between_hosts_are_compared_with_the_ports_that_they_pass(
    run: Report, hosts: str, ports: dict[str, list[str]], kind: str, factor: float, peak: float | None
) -> None:
    report = report_of(run, {0: [summary("dp", kind, 10, 0, 25.0)]})
    found = interconnect_of(report, traffic(*range(6)), on_hosts(hosts, ports), WORLD)
    (rate,) = found.collectives
    assert (rate.is_same_host, rate.ports) == (False, pytest.approx(factor))
    assert rate.peak_gbps == (None if peak is None else pytest.approx(peak))
    assert rate.share_of_peak == (None if peak is None else pytest.approx(25 / peak))


def test_ports_are_no_faster_than_the_links_that_lead_to_them_and_a_user_may_name_their_rate(run: Report) -> None:
    report = report_of(run, {0: [summary("dp", "all_reduce", 10, 0, 12.0)]})
    facts = on_hosts("aaabbb", {"a": [NDR] * 3, "b": [NDR] * 3}, "Tesla T4")
    found = interconnect_of(report, traffic(*range(6)), facts, WORLD)
    assert found.collectives[0].peak_gbps == 15.75
    named = with_network(replace(report, interconnect=found), 2.0).interconnect
    assert (named.collectives[0].peak_gbps, named.collectives[0].share_of_peak) == (6.0, 2.0)


def test_that_no_port_was_recorded_is_no_reason_any_more_once_a_user_names_their_rate(run: Report) -> None:
    report = report_of(run, {0: [summary("dp", "all_reduce", 10, 0, 12.0)]})
    found = interconnect_of(report, traffic(*range(6)), on_hosts("aaabbb", {}), WORLD)
    assert [reason for reason in found.reasons if "--network" in reason]
    assert found.collectives[0].peak_gbps is None
    named = with_network(replace(report, interconnect=found), 50.0).interconnect
    assert named.reasons == ()
    assert named.collectives[0].peak_gbps == 150.0
