"""Device work: what it is, who launched it, and how its time splits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pptrace.model.device import CLASSES, WorkClass
from pptrace.model.traces import Category, Events
from pptrace.recognise.device.work import NO_DEVICE, breakdown, breakdowns, device_work
from pptrace.recognise.pieces import pieces_of
from tests.support.damages import damaged, exchanged, other_names, repeated_correlation, unnamed
from tests.support.extent import by_turns
from tests.support.programs import SAMPLES
from tests.support.read import read_kineto
from tests.support.synthetic import Event, make_trace

NAMES = {
    "compute": (Category.KERNEL, "ampere_sgemm_128x64_nn"),
    "communication": (Category.KERNEL, "ncclDevKernel_AllReduce_Sum_f32_RING_LL"),
    "copy": (Category.MEMCPY, "Memcpy HtoD (Pinned -> Device)"),
    "fill": (Category.MEMSET, "Memset (Device)"),
    "projected": (Category.DEVICE_ANNOTATION, "pp1:STEP step=0"),
    "sync": (Category.DEVICE_SYNC, "Stream Sync"),
    "host": (Category.CPU_OP, "aten::mm"),
}
OWNERS = {"compute": "compute", "communication": "communication", "copy": "memory", "fill": "memory"}
placed = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), st.integers(0, 60), st.integers(0, 15)), max_size=15)


@given(placed, st.booleans(), st.integers(0, 40), st.integers(0, 40))
def test_each_nanosecond_belongs_to_one_category_in_order(
    rows: list[tuple[str, int, int]], in_window: bool, start: int, length: int
) -> None:
    events = [Event(*NAMES[what], at, at + lasts, 0, 7) for what, at, lasts in rows]
    work = device_work(make_trace(events).events)
    owned: dict[str, set[int]] = {"compute": set(), "communication": set(), "memory": set()}
    device_rows = [row for row in rows if row[0] in OWNERS]
    for what, begin, duration in device_rows:
        owned[OWNERS[what]] |= set(range(begin, begin + duration))
    if not device_rows:
        assert breakdown(work) == NO_DEVICE
        return
    first = start if in_window else min(begin for _, begin, _ in device_rows)
    last = start + length if in_window else max(begin + duration for _, begin, duration in device_rows)
    window = set(range(first, last))
    compute, communication, memory = (owned[name] & window for name in ("compute", "communication", "memory"))
    result = breakdowns(work, [first], [last])[0] if in_window else breakdown(work)
    assert (result.first_ns, result.last_ns) == (first, last)
    assert result.busy_ns == len(compute | communication | memory)
    assert result.compute_ns == len(compute)
    assert result.communication_ns == len(communication - compute)
    assert result.memory_ns == len(memory - compute - communication)
    assert result.idle_ns == len(window) - len(compute | communication | memory)
    expected = len(communication & compute) / len(communication) if communication else None
    assert result.overlap_ratio == expected


@pytest.mark.parametrize(
    ("name", "pageable_ns"),
    [
        ("Memcpy HtoD (Pageable -> Device)", 8),
        ("Memcpy HtoD (Pinned -> Device)", 3),
        ("Memcpy HtoD (Host -> Device)", None),
        ("dma_request", None),
    ],
)
def test_time_of_copies_from_pageable_memory_is_that_which_no_kernel_overlaps(
    name: str, pageable_ns: int | None
) -> None:
    rows = [
        Event(Category.MEMCPY, name, 0, 10, 0, 7),
        Event(*NAMES["compute"], 5, 30, 0, 8),
        Event(Category.MEMCPY, "Memcpy HtoD (Pageable -> Device)", 27, 33, 0, 7),
        Event(Category.MEMCPY, "Memcpy DtoH (Device -> Pageable)", 40, 50, 0, 7),
    ]
    assert breakdown(device_work(make_trace(rows).events)).pageable_ns == pageable_ns


def test_work_finds_its_launch_by_correlation() -> None:
    rows = [
        Event(Category.RUNTIME, "cudaLaunchKernel", 5, 6, thread=1, correlation=11),
        Event(Category.RUNTIME, "cudaMemcpyAsync", 7, 8, thread=2, correlation=3),
        Event(Category.RUNTIME, "cudaDeviceSynchronize", 9, 99, thread=1, correlation=-1),
        Event(Category.KERNEL, "gemm", 20, 30, 0, 7, correlation=11),
        Event(Category.MEMCPY, "copy", 30, 31, 0, 9, correlation=3),
        Event(Category.KERNEL, "of an unrecorded launch", 40, 50, 0, 7, correlation=12),
        Event(Category.KERNEL, "without correlation", 60, 61, 0, 7),
    ]
    work = device_work(make_trace(rows).events)
    assert work.launch_ns.tolist() == [5, 7, -1, -1]
    assert work.stream.tolist() == [7, 9, 7, 7]


def test_a_trace_without_device_events_has_no_work() -> None:
    work = device_work(make_trace([Event(Category.CPU_OP, "aten::mm", 0, 5, thread=1)]).events)
    assert len(work) == 0
    assert breakdowns(work, [0], [100]) == [NO_DEVICE]
    assert len(device_work(make_trace([]).events)) == 0


@pytest.mark.parametrize(
    ("category", "name", "backend", "shows"),
    [
        (Category.ANNOTATION, "nccl:all_reduce", "", True),
        (Category.ANNOTATION, "ncclAllReduce", "", True),
        (Category.RUNTIME, "cudaLaunchKernelExC", "", True),
        (Category.RUNTIME, "hipModuleLaunchKernel", "", True),
        (Category.CPU_OP, "c10d::send", "nccl", True),
        (Category.CPU_OP, "c10d::send", "gloo", False),
        (Category.CPU_OP, "c10d::send", "cpu:gloo,cuda:nccl", False),
        (Category.ANNOTATION, "gloo:all_reduce", "gloo", False),
        (Category.CPU_OP, "aten::mm", "nccl", False),
        (Category.RUNTIME, "cudaDeviceSynchronize", "", False),
    ],
)
def test_launches_and_device_libraries_show_a_device_of_which_nothing_was_recorded(
    category: Category, name: str, backend: str, shows: bool
) -> None:
    call = Event(category, name, 0, 5, thread=1)
    assert device_work(make_trace([call]).events, backend).missing_device_events == (name if shows else "")
    kernel = Event(Category.KERNEL, "gemm", 3, 4, 0, 7)
    assert device_work(make_trace([call, kernel]).events, backend).missing_device_events == ""


OF_NCCL = ["gpu_nccl_1f1b_p4", "gpu_nccl_torch_1f1b_p4", "gpu_nccl_experts_pp2_ep2"]


@pytest.mark.parametrize("sample", OF_NCCL)
def test_kernels_of_unknown_names_communicate_if_only_calls_of_communication_launch_them(
    sample: str, tmp_path: Path
) -> None:
    folder = damaged(SAMPLES / sample, tmp_path, other_names, ranks=range(4))
    for rank in range(4):
        whole = read_kineto(SAMPLES / sample / f"rank{rank}.json.gz").events
        renamed = read_kineto(folder / f"rank{rank}.json").events
        assert device_work(renamed).is_communication.tolist() == device_work(whole).is_communication.tolist()
        assert device_work(whole).is_communication.any()


@pytest.mark.parametrize(("sample", "change"), by_turns(OF_NCCL, [unnamed, exchanged, repeated_correlation]))
def test_what_launched_kernels_tells_more_than_names_that_are_wrong(
    sample: str, change: Callable[[Any], Any], tmp_path: Path
) -> None:
    folder = damaged(SAMPLES / sample, tmp_path, change, ranks=range(4))
    for rank in range(4):
        whole = device_work(read_kineto(SAMPLES / sample / f"rank{rank}.json.gz").events)
        found = device_work(read_kineto(folder / f"rank{rank}.json").events)
        known = whole.launch_ns >= 0
        assert found.is_communication[known].tolist() == whole.is_communication[known].tolist()


def launched(*kernels: tuple[str, str]) -> Events:
    """Kernels (name, operator or range that launched it) one after another."""
    rows = []
    for at, (name, launcher) in enumerate(kernels, start=1):
        category = Category.CPU_OP if launcher.startswith("aten") else Category.ANNOTATION
        rows += [Event(category, launcher, 100 * at, 100 * at + 50, thread=1)] if launcher else []
        rows.append(Event(Category.RUNTIME, "cudaLaunchKernel", 100 * at + 10, 100 * at + 12, thread=1, correlation=at))
        rows.append(Event(Category.KERNEL, name, 100 * at + 20, 100 * at + 30, 0, 7, correlation=at))
    return make_trace(rows).events


@pytest.mark.parametrize(("number", "is_believed"), [(2, True), (3, False)])
def test_names_of_communication_are_believed_until_three_contradict_their_launches(
    number: int, is_believed: bool
) -> None:
    wrong = [("gemm", "nccl:all_reduce"), ("gemm", "aten::mm")] * number
    work = device_work(launched(*wrong, ("ncclDevKernel_SendRecv", "")))
    assert work.is_communication.tolist() == [True, False] * number + [is_believed]


@pytest.mark.parametrize(("number", "work"), [(2, WorkClass.ELEMENTWISE), (3, WorkClass.MATMUL)])
def test_names_of_products_are_believed_until_operators_that_multiply_nothing_launch_three(
    number: int, work: WorkClass
) -> None:
    events = launched(*[("ampere_sgemm_128x64_nn", "aten::add_")] * number, ("elementwise_kernel", "aten::mm"))
    pieces = pieces_of(events, device_work(events))
    assert CLASSES[pieces.work[-1]] == work
    assert CLASSES[pieces.work[0]] == (WorkClass.MATMUL if number == 2 else WorkClass.ELEMENTWISE)


def test_the_work_of_kernels_without_a_name_is_that_of_their_operators() -> None:
    operators = [("aten::mm", WorkClass.MATMUL), ("aten::native_layer_norm", WorkClass.NORM), ("", WorkClass.OTHER)]
    events = launched(*[("<unknown>", name) for name, _ in operators])
    pieces = pieces_of(events, device_work(events))
    assert [CLASSES[code] for code in pieces.work] == [kind for _, kind in operators]


def test_kernels_in_the_range_of_a_batch_that_never_ended_compute() -> None:
    times = [(at, 10 * at) for at in range(1, 20)]
    calls = [Event(Category.RUNTIME, "cudaLaunchKernel", ns, ns + 2, thread=1, correlation=at) for at, ns in times]
    kernels = [Event(Category.KERNEL, "triton_mm", ns + 5, ns + 9, 0, 7, correlation=at) for at, ns in times]
    batch = Event(Category.ANNOTATION, "nccl:coalesced", 5, 1_000, thread=1)
    assert device_work(make_trace([batch, *calls, *kernels]).events).is_compute.all()
    assert device_work(make_trace([batch, *calls[:2], *kernels[:2]]).events).is_communication.all()
