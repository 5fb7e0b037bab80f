"""Rates of collectives by hand, and the peaks of the groups that they ran in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pptrace.analysis.links.interconnect import interconnect_of
from pptrace.analysis.links.rank_traffic import RankTraffic
from pptrace.analysis.result import CommSummary, RankStep, Report, StepReport
from pptrace.analysis.whole_run import CollectiveRate, DevicePeak
from pptrace.model.mesh import MeshInfo
from pptrace.schedule.registry import build
from pptrace.slices import Slice
from pptrace.workflow.analyse import analyse
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
    assert found is not None
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
    assert found is not None
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
        (("a:NVIDIA H200", "a:NVIDIA H200", "b:NVIDIA H200", "b:NVIDIA H200"), "dp", False, None),
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
