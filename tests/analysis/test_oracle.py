"""The device breakdown of public traces, to the nanosecond, against a reader that shares no code with pptrace."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict, replace

from pptrace.analysis.result import RankDevice
from pptrace.model.device import DeviceBreakdown
from pptrace.workflow.load import load
from tests.support.device_oracle import Counted, count, kineto_pieces, nsight_pieces

DATA = Path(__file__).parents[3] / "shared" / "data"
KINETO = ("hta", "kineto_tb_plugin", "tracelens")
NSIGHT = ("nsys_ai", "pipit_nsys")
KINETO_FILES = sorted(path for folder in KINETO for path in (DATA / folder).rglob("*.json.gz"))
NSIGHT_FILES = sorted(path for folder in NSIGHT for path in (DATA / folder).rglob("*.sqlite"))

pytestmark = pytest.mark.skipif(not KINETO_FILES, reason="the public traces are not on this machine")


def assert_same(result: RankDevice, expected: Counted) -> None:
    got = result.breakdown
    first = got.first_ns
    times = (expected.busy_ns, expected.compute_ns, expected.communication_ns, expected.memory_ns, expected.idle_ns)
    ratio = expected.overlapped_ns / expected.communicating_ns if expected.communicating_ns else None
    assert replace(got, pageable_ns=None) == DeviceBreakdown(first, first + expected.span_ns, *times, ratio)
    if result.host is not None:
        assert sum(asdict(result.host).values()) == expected.idle_ns


@pytest.mark.parametrize("path", KINETO_FILES, ids=lambda path: path.parent.name)
def test_kineto_traces_have_the_device_time_that_the_oracle_counts(path: Path) -> None:
    (result,) = load([path]).report.device
    pieces = kineto_pieces(path)
    if pieces:
        assert_same(result, count(pieces))
    else:
        assert result.breakdown.busy_ns is None


@pytest.mark.parametrize("path", NSIGHT_FILES, ids=lambda path: path.stem)
def test_nsight_exports_have_the_device_time_that_the_oracle_counts(path: Path) -> None:
    result = load([path]).report.device
    expected = sorted((count(pieces) for pieces in nsight_pieces(path)), key=lambda counted: counted.busy_ns)
    for device, counted in zip(sorted(result, key=lambda entry: entry.breakdown.busy_ns or 0), expected, strict=True):
        assert_same(device, counted)


def test_the_walk_counts_overlaps_as_the_definitions_say() -> None:
    pieces = [(0, 10, "compute"), (5, 20, "communication"), (15, 30, "memory"), (40, 40, "compute"), (41, 50, "memory")]
    assert count(pieces) == Counted(50, 39, 10, 10, 19, 11, 5, 15)


HTA_PYTHON = os.environ.get("PPTRACE_HTA_PYTHON", "")


WITH_HTA = pytest.mark.skipif(
    not HTA_PYTHON, reason="PPTRACE_HTA_PYTHON names no Python that has HolisticTraceAnalysis"
)


def rows_of_hta(path: Path, table: str) -> list[dict[str, Any]]:
    """The rows of a table of HTA's analysis of a trace."""
    script = f"""
import json
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_files={{0: {str(path)!r}}}, trace_dir="/", include_last_profiler_step=True)
print(json.dumps(analysis.{table}.to_dict("records")))
"""
    asked = subprocess.run([HTA_PYTHON, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    return json.loads(asked.stdout.splitlines()[-1])


@WITH_HTA
def test_a_trace_in_whole_microseconds_has_the_times_that_hta_counts() -> None:
    """HTA rounds starts and durations down to µs, so that it agrees only where a trace has no fractions of them."""
    (path,) = (DATA / "kineto_tb_plugin").glob("*.json.gz")
    (expected,) = rows_of_hta(path, "get_temporal_breakdown(visualize=False)")
    breakdown = load([path]).report.device[0].breakdown
    assert breakdown.idle_ns == 1000 * expected["idle_time(us)"]
    assert breakdown.compute_ns == 1000 * expected["compute_time(us)"]
    assert breakdown.busy_ns - breakdown.compute_ns == 1000 * expected["non_compute_time(us)"]


@WITH_HTA
def test_idle_time_is_told_apart_as_hta_does_but_for_launches_in_flight() -> None:
    """HTA counts a gap as the host's where the launch began in it; here the host also has gaps in which a launch that began
    before went on. The trace has one stream and whole µs, so that nothing else differs."""
    (path,) = (DATA / "kineto_tb_plugin").glob("*.json.gz")
    rows = rows_of_hta(path, "get_idle_time_breakdown(ranks=[0], visualize=False)[0]")
    expected = {row["idle_category"]: row["idle_time"] for row in rows}
    device = load([path]).report.device[0]
    in_flight_us = _idle_behind_launches_in_flight(path)
    assert in_flight_us > 0
    assert device.host.launch_starved_ns == 1000 * (expected["host_wait"] + in_flight_us)
    assert device.host.dependency_ns == 1000 * (expected["kernel_wait"] + expected["other"] - in_flight_us)


def _idle_behind_launches_in_flight(path: Path) -> int:
    """Total of the gaps of a stream whose next kernel was being launched when they began, µs."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    calls = {event["args"]["correlation"]: event for event in events if event["cat"] == "Runtime"}
    work = sorted(
        (event for event in events if event["cat"] in ("Kernel", "Memcpy", "Memset")), key=lambda event: event["ts"]
    )
    total = 0
    for before, after in pairwise(work):
        idle_from = before["ts"] + before["dur"]
        call = calls[after["args"]["correlation"]]
        if call["ts"] <= idle_from < call["ts"] + call["dur"] and "Pageable" not in after["name"]:
            total += after["ts"] - idle_from
    return total
