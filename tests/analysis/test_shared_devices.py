"""Ranks that share a GPU: by their recorders, and by kernels that take turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from pptrace.analysis.result import RankDevice
from pptrace.analysis.shared_devices import (
    DEVICE_ID,
    SharedDevice,
    devices_by_identity,
    shared_devices,
    who_shares,
    with_busy_shares,
)
from pptrace.intervals import EMPTY, Int64
from pptrace.model.device import DeviceBreakdown
from pptrace.model.traces import HOST_NAME
from pptrace.timeline.lanes import Lane
from pptrace.workflow.load import load
from tests.analysis.test_notes import rank_step, step_of
from tests.support.kineto import write_changed
from tests.support.programs import SAMPLES

MS = 1_000_000
STEP = replace(step_of(rank_step(0, 5)), start_ns=0, end_ns=100 * MS)


def lane(kernels: Int64) -> Lane:
    return Lane(kernels, EMPTY, EMPTY, EMPTY, EMPTY, on_device=True)


def kernels(offset_us: int, period_us: int = 200, length_us: int = 10) -> Int64:
    """A kernel every so many µs for the whole step."""
    start = np.arange(offset_us * 1000, 100 * MS, period_us * 1000)
    return np.stack((start, start + length_us * 1000), axis=1)


TURNS = {rank: lane(kernels(20 * rank)) for rank in range(3)}


def test_ranks_whose_recorders_tell_the_same_device_share_it() -> None:
    facts: dict[int, dict[str, Any]] = {0: {DEVICE_ID: "a"}, 1: {DEVICE_ID: "b"}, 2: {DEVICE_ID: "a"}, 3: {}}
    assert devices_by_identity(facts) == (SharedDevice((0, 2)),)
    assert shared_devices(facts, TURNS, (STEP,), 8) == (SharedDevice((0, 2)),)
    own = {rank: {DEVICE_ID: str(rank)} for rank in range(3)}
    assert shared_devices(own, TURNS, (STEP,), 8) == (), "a recorder that tells is right"


def test_kernels_that_never_overlap_are_of_one_device() -> None:
    """500 kernels of 10 µs in 100 ms: a pair of ranks would have 500 · 10/200 · 2 = 50 overlaps by chance, three pairs 150."""
    found = shared_devices({}, TURNS, (STEP,), 8)
    assert [device.ranks for device in found] == [(0, 1, 2)]
    assert found[0].by_chance == pytest.approx(150, abs=1)
    assert "(no kernel of one overlaps a kernel of another, where by chance 150 pairs would)" in who_shares(found)
    apart = {0: {HOST_NAME: "a"}, 1: {HOST_NAME: "a"}, 2: {HOST_NAME: "b"}}
    assert [device.ranks for device in shared_devices(apart, TURNS, (STEP,), 8)] == [(0, 1)]


def test_kernels_that_overlap_as_chance_has_it_are_of_several() -> None:
    rng = np.random.default_rng(0)
    starts = np.sort(rng.integers(0, 100 * MS, (3, 500)), axis=1)
    random = {rank: lane(np.stack((start, start + 5_000), axis=1)) for rank, start in enumerate(starts)}
    assert shared_devices({}, random, (STEP,), 8) == ()
    assert shared_devices({}, TURNS | {3: lane(kernels(5))}, (STEP,), 8)[0].ranks == (0, 1, 2)


def test_without_time_in_which_ranks_work_together_nothing_tells() -> None:
    halves = {0: lane(kernels(0)[:250]), 1: lane(kernels(20)[250:])}
    assert shared_devices({}, halves, (STEP,), 8) == (), "one after the other"
    away = TURNS | {3: lane(kernels(5)[-1:] + 100 * MS)}
    assert [device.ranks for device in shared_devices({}, away, (replace(STEP, end_ns=201 * MS),), 8)] == [(0, 1, 2)]
    assert shared_devices({}, TURNS, (STEP,), 1) == (), "one microbatch, which the ranks have one after the other"
    assert shared_devices({}, {rank: replace(of, on_device=False) for rank, of in TURNS.items()}, (STEP,), 8) == ()
    assert shared_devices({}, {rank: lane(kernels(20 * rank, 20_000)) for rank in range(3)}, (STEP,), 8) == (), "few"
    assert shared_devices({}, TURNS, (), 8) == ()


@pytest.mark.parametrize("case", ["gpu_nccl_1f1b_p4", "gpu_zbv_p2"])
def test_recordings_of_ranks_on_one_gpu_show_it_without_its_identity(case: str, tmp_path: Path) -> None:
    analysis = load([write_changed(SAMPLES / case, tmp_path, lambda _, trace: trace["pptrace"].pop(DEVICE_ID))])
    (device,) = analysis.sharing
    assert device.ranks == tuple(sorted(analysis.facts))
    assert device.by_chance is not None
    (root,) = (root for root in analysis.report.root_causes if root.name == "shared device")
    assert "share a GPU, where their work takes turns (no kernel of one overlaps" in root.title


def device_of(rank: int, busy_ns: int | None, idle_ns: int | None) -> RankDevice:
    return RankDevice(rank, DeviceBreakdown(0, 100, busy_ns, busy_ns, 0, 0, idle_ns, None))


def test_the_part_of_the_time_in_which_a_shared_device_is_busy_is_that_of_all_its_ranks() -> None:
    devices = [
        *(device_of(0, 10, 90), device_of(1, 15, 35), device_of(2, 80, 20), device_of(3, 70, 30)),
        device_of(4, None, None),
    ]
    sharing = [SharedDevice((0, 1)), SharedDevice((2, 3)), SharedDevice((0, 4)), SharedDevice((0, 5))]
    assert [shared.busy_share for shared in with_busy_shares(sharing, devices)] == [0.25, 1.0, None, None]
