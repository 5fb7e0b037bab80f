"""Reference peaks: by the names of devices as drivers write them, and only between ranks of one host."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pptrace.analysis.links.answer import with_network
from pptrace.analysis.links.peaks import (
    device_of,
    members_of,
    peak_between,
    peak_of_device,
    peak_of_ports,
    read_rate,
    settings_of,
    share_of_peak,
)
from pptrace.analysis.links.show import links_table
from pptrace.errors import UsageError
from pptrace.model.mesh import MeshInfo
from pptrace.model.traces import Trace
from pptrace.schedule.registry import build
from pptrace.workflow.rank_store import recognise_trace
from tests.recognise.kineto_calls import Rank
from tests.support.analysed import analyse
from tests.support.synthetic import Recording, record


@pytest.mark.parametrize(
    ("name", "link", "gbps"),
    [
        *(("Tesla P100-SXM2-16GB", "nvlink", 80), ("Tesla V100-SXM2-32GB", "nvlink", 150)),
        *(("NVIDIA A100-SXM4-80GB", "nvlink", 300), ("NVIDIA H100 80GB HBM3", "nvlink", 450)),
        *(("NVIDIA H200", "nvlink", 450), ("NVIDIA B200", "nvlink", 900), ("NVIDIA GB200", "nvlink", 900)),
        *(("NVIDIA H100 SXM5 80GB", "nvlink", 450), ("Tesla V100-SXM3-32GB", "nvlink", 150)),
        *(("Tesla V100S-PCIE-32GB", "pcie", 15.75), ("Tesla P100-PCIE-16GB", "pcie", 15.75)),
        *(("NVIDIA L4", "pcie", 31.5), ("NVIDIA L40", "pcie", 31.5), ("Tesla V100-PCIE-16GB", "pcie", 15.75)),
        *(("Tesla T4", "pcie", 15.75), ("NVIDIA L40S", "pcie", 31.5)),
    ],
)
def test_the_peak_is_half_of_what_datasheets_give_for_both_directions(name: str, link: str, gbps: float) -> None:
    peak = peak_of_device(name)
    assert (peak.link, peak.gbps) == (link, gbps)


@pytest.mark.parametrize(
    "name",
    [
        *("NVIDIA A100-PCIE-40GB", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA H800"),
        *("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "NVIDIA GeForce RTX 3080", "AMD Instinct MI300X"),
        "Tesla V100-DGXS-32GB",
    ],
)
def test_devices_whose_links_their_name_does_not_tell_have_no_peak(name: str) -> None:
    assert peak_of_device(name) is None


def test_a_device_is_known_by_the_recorder_or_where_the_host_has_one_kind() -> None:
    assert device_of({"device": "cuda:3 NVIDIA H200", "device_names": ["Tesla T4"]}) == "NVIDIA H200"
    assert device_of({"device_names": ["Tesla T4", "Tesla T4"]}) == "Tesla T4"
    assert device_of({"device_names": ["Tesla T4", "NVIDIA A10"]}) is None
    assert device_of({"device": "cpu"}) is None


def test_the_names_that_a_recorder_gives_devices_reach_the_analysis() -> None:
    made = Rank(0)
    made.kernel("gemm", 0, 10, 20)
    trace = replace(made.trace(), metadata={"device_names": ["NVIDIA H200"], "argv": ["train.py"]})
    assert recognise_trace(trace).info.metadata == {"device_names": ["NVIDIA H200"]}


def test_ranks_have_a_peak_together_on_one_host_alone_and_the_lowest_of_theirs() -> None:
    facts = {rank: {"host": "a", "device_names": ["NVIDIA A100-SXM4-80GB"]} for rank in range(3)}
    facts[2] = {"host": "b", "device_names": ["NVIDIA A100-SXM4-80GB"]}
    facts[3] = {"host": "a", "device_names": ["Tesla T4"]}
    facts[4] = {"host": "a", "device_names": ["NVIDIA H800"]}
    assert (peak := peak_between((0, 1), facts)) is not None
    assert peak.gbps == 300
    assert (lowest := peak_between((0, 3), facts)) is not None
    assert lowest.link == "pcie"
    for ranks in ((0, 2), (0, 4), (0, 9), ()):
        assert peak_between(ranks, facts) is None


def test_groups_of_an_axis_are_known_where_the_mesh_is_laid_out_as_its_pipelines_are() -> None:
    mesh = MeshInfo(8, pp=2, vpp=1, tp=2, cp=1, dp=2, ep=None, pipelines=((0, 4), (1, 5), (2, 6), (3, 7)))
    assert members_of("tp", mesh, range(8)) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert members_of("dp", mesh, range(8)) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert members_of("ep", mesh, range(8)) is None
    assert members_of("tp", replace(mesh, pipelines=((0, 1), (2, 3), (4, 5), (6, 7))), range(8)) is None
    assert members_of("tp", replace(mesh, tp=None), range(8)) is None


def on_devices(recording: Recording, device: str, hosts: int) -> list[Trace]:
    """The traces with the name of their device, on so many hosts."""
    traces = recording.traces()
    return [
        replace(
            trace,
            metadata={**trace.metadata, "device": f"cuda:0 {device}", "host": f"node-{(trace.rank or 0) % hosts}"},
        )
        for trace in traces
    ]


def test_links_of_a_run_on_devices_have_their_share_of_the_peak() -> None:
    recording = record(build("1f1b", 2, 4), lambda _: 300, 100, device=True)
    report = analyse(on_devices(recording, "NVIDIA A100-SXM4-80GB", 1)).report
    assert report.links
    for link in report.links:
        assert link.peak_gbps == 300
        assert link.share_of_peak == link.algbw_gbps / 300
    assert [(entry.rank, entry.link, entry.peak_gbps) for entry in report.interconnect.devices] == [
        (0, "nvlink", 300),
        (1, "nvlink", 300),
    ]
    assert report.interconnect.reasons == ()


@pytest.mark.parametrize(
    ("device", "hosts", "reason"),
    [
        ("NVIDIA H800", 1, "NVIDIA H800: no peak is known"),
        ("NVIDIA H200", 2, "no peak is known of links between hosts"),
    ],
)
def test_a_link_without_a_peak_has_no_share_and_a_reason(device: str, hosts: int, reason: str) -> None:
    recording = record(build("1f1b", 2, 4), lambda _: 300, 100, device=True)
    report = analyse(on_devices(recording, device, hosts)).report
    assert {(link.peak_gbps, link.share_of_peak) for link in report.links} == {(None, None)}
    assert [line.startswith(reason) for line in report.interconnect.reasons] == [True]


def test_messages_that_the_host_moves_are_not_compared_with_links_of_devices() -> None:
    report = analyse(on_devices(record(build("1f1b", 2, 4)), "NVIDIA H200", 1)).report
    assert report.interconnect is None
    assert {link.peak_gbps for link in report.links} == {None}


@pytest.mark.parametrize(
    ("text", "gbps"),
    [
        *(("400 Gb/sec (4X NDR)", 50), ("200 Gb/sec (4X HDR)", 25), ("100 Gb/sec (4X EDR)", 12.5)),
        *(("40 Gb/sec (4X QDR)", 4), ("25 Gb/sec (1X EDR)", 3.125), ("2.5 Gb/sec (1X SDR)", 0.25)),
        *(("20 Gb/sec (4X DDR)", 2), ("56 Gb/sec (4X FDR)", pytest.approx(6.788, abs=1e-3))),
        *(("25 Gb/sec", 3.125), ("unknown", None)),
    ],
)
def test_a_port_moves_its_data_rate(text: str, gbps: float | None) -> None:
    assert peak_of_ports({"mlx5_0/1": text}) == gbps
    assert peak_of_ports({"mlx5_0/1": text, "mlx5_1/1": "800 Gb/sec (4X XDR)"}) == 100
    assert peak_of_ports(None) is None


@pytest.mark.parametrize(
    ("text", "gbps"),
    [
        *(("SDR", 1), ("DDR", 2), ("QDR", 4), ("FDR10", 5), ("FDR", pytest.approx(6.788, abs=1e-3)), ("EDR", 12.5)),
        *(("HDR100", 12.5), ("hdr", 25), ("NDR200", 25), ("NDR", 50), ("XDR", 100), ("100", 12.5), ("1", 0.125)),
    ],
)
def test_a_network_is_named_by_its_generation_or_its_rate(text: str, gbps: float) -> None:
    assert read_rate(text) == gbps


@pytest.mark.parametrize("text", ["fast", "0", "-1", "nan", "inf", ""])
def test_other_words_are_refused_with_those_that_are_known(text: str) -> None:
    with pytest.raises(UsageError, match="such as 400, or one of SDR, DDR"):
        read_rate(text)


def test_links_between_hosts_are_compared_with_the_slower_port_or_the_rate_that_is_given() -> None:
    recording = record(build("1f1b", 2, 4), lambda _: 300, 100, device=True)
    traces = on_devices(recording, "NVIDIA H200", 2)
    rates = ("400 Gb/sec (4X NDR)", "200 Gb/sec (4X HDR)")
    ported = [
        replace(trace, metadata={**trace.metadata, "network_ports": {"mlx5_0/1": rate}})
        for trace, rate in zip(traces, rates, strict=True)
    ]
    report = analyse(ported).report
    assert {link.peak_gbps for link in report.links} == {25}
    assert all(link.share_of_peak == (link.algbw_gbps or 0) / 25 for link in report.links)
    assert report.interconnect.reasons == ()
    slower = analyse(traces).report
    slower = replace(slower, links=(*slower.links, replace(slower.links[0], algbw_gbps=None)))
    *known, unknown = with_network(slower, 50.0).links
    assert {link.peak_gbps for link in (*known, unknown)} == {50}
    assert all(link.share_of_peak == (link.algbw_gbps or 0) / 50 for link in known)
    assert unknown.share_of_peak is None
    on_one_host = analyse(on_devices(recording, "NVIDIA H200", 1)).report
    assert with_network(on_one_host, 50.0) == on_one_host


def test_settings_are_those_of_the_ranks_that_have_them() -> None:
    ring = {"NCCL_ALGO": "Ring", "HOME": "/home/me"}
    facts = {0: {"environment": ring}, 1: {"environment": ring | {"NCCL_TOPO_FILE": "/home/me/topo"}}, 2: {}}
    assert settings_of((0, 1), facts) == ("NCCL_ALGO=Ring", "NCCL_TOPO_FILE=set (rank 1)")
    assert settings_of((0, 1, 2, 3), facts)[0] == "NCCL_ALGO=Ring (ranks 0, 1)"
    assert settings_of((2, 3), facts) == ()


def test_a_report_has_the_settings_beside_its_links() -> None:
    traces = on_devices(record(build("1f1b", 2, 4), lambda _: 300, 100, device=True), "NVIDIA A100-SXM4-80GB", 1)
    settings = {"NCCL_P2P_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    traces = [replace(trace, metadata={**trace.metadata, "environment": settings}) for trace in traces]
    report = analyse(traces).report
    assert report.interconnect.settings == ("CUDA_DEVICE_MAX_CONNECTIONS=1", "NCCL_P2P_DISABLE=1")
    assert links_table(report).notes[-1] == "with CUDA_DEVICE_MAX_CONNECTIONS=1, NCCL_P2P_DISABLE=1"


@pytest.mark.parametrize(
    ("rate", "same_host", "share"),
    [(225.0, True, 0.5), (540.0, True, 1.2), (9_000.0, True, None), (9_000.0, False, 20.0)],
)
def test_a_rate_far_beyond_the_peak_within_a_host_is_no_share_of_it(
    rate: float, same_host: bool, share: float | None
) -> None:
    assert share_of_peak(rate, 450.0, same_host) == share
