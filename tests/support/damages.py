"""Damage that recorders were seen to do, made in a copy of a recording; each kind with the public thread that reports it."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pptrace.model.damage import Damage
from tests.support.kineto import write_changed

Event = dict[str, Any]
Events = list[Event]
RANK = 1
"""The rank whose trace is changed."""
MANY, FEW = 20, 4
WORK = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")


def of(events: Events, category: str, name: str = "") -> Events:
    """The events of a category whose name begins so, by start."""
    chosen = [event for event in events if event.get("cat") == category and str(event["name"]).startswith(name)]
    return sorted(chosen, key=lambda event: float(event["ts"]))


def middle(chosen: Events, count: int) -> Events:
    first = (len(chosen) - count) // 2
    return chosen[first : first + count]


def without(events: Events, gone: Events) -> Events:
    ids = set(map(id, gone))
    return [event for event in events if id(event) not in ids]


def calls_of(events: Events) -> Events:
    return [call for category in CALLS for call in of(events, category)]


def launches_of(events: Events, kernels: Events) -> Events:
    numbers = {kernel["args"]["correlation"] for kernel in kernels}
    return [call for call in calls_of(events) if call["args"].get("correlation") in numbers]


def with_launch(events: Events, work: Events) -> Events:
    """The device work whose launch was recorded."""
    numbers = {launch["args"]["correlation"] for launch in launches_of(events, work)}
    return [event for event in work if event["args"].get("correlation") in numbers]


def lost(events: Events) -> Events:
    """pytorch issue 192021."""
    return without(events, middle(of(events, "kernel"), MANY))


def no_device_events(events: Events) -> Events:
    """pytorch/kineto issue 996."""
    return [event for event in events if event.get("cat") not in (*WORK, "ac2g")]


def without_launch(events: Events) -> Events:
    """HolisticTraceAnalysis pull request 59."""
    launched = with_launch(events, of(events, "kernel"))
    return without(events, launches_of(events, launched[len(launched) // 2 :][:FEW]))


def before_recording(events: Events) -> Events:
    """pytorch/kineto pull request 1545: what the warm-up left."""
    work = sorted([*of(events, "kernel"), *of(events, "gpu_memcpy")], key=lambda event: float(event["ts"]))
    stream = [event for event in work if event["args"]["stream"] == 7]
    return without(events, launches_of(events, with_launch(events, stream)[:FEW]))


def no_correlation(events: Events) -> Events:
    for event in events:
        if event.get("cat") in (*WORK, *CALLS):
            event["args"].pop("correlation", None)
    return events


def repeated_correlation(events: Events) -> Events:
    """ROCm/omnitrace issue 266: the same number for every launch."""
    kernels = middle(of(events, "kernel"), FEW + 1)
    for kernel, launch in zip(kernels[1:], launches_of(events, kernels)[1:], strict=False):
        kernel["args"]["correlation"] = launch["args"]["correlation"] = kernels[0]["args"]["correlation"]
    return events


def with_clock_off(events: Events, microseconds: float, drift: float = 0.0) -> Events:
    """torch-spyre issue 3274: the clock of the device is not the host's; ``drift`` is how much more it is off in the end."""
    work = [event for event in events if event.get("cat") in WORK]
    begin, end = min(event["ts"] for event in work), max(event["ts"] for event in work)
    for event in work:
        event["ts"] += microseconds + drift * (event["ts"] - begin) / (end - begin)
    return events


def out_of_order(events: Events) -> Events:
    """torch-spyre issue 3274: shifted times."""
    for kernel in middle(of(events, "kernel"), MANY)[:: MANY // FEW]:
        kernel["ts"] += 20_000
    return events


def overrunning(events: Events) -> Events:
    """AMD-AGI/TraceLens issue 669."""
    for kernel in middle(of(events, "kernel"), MANY)[:: MANY // FEW]:
        kernel["dur"] += 300_000
    return events


def doubled(events: Events) -> Events:
    """torch-spyre issue 3274: a kernel twice."""
    return [*events, *(copy.deepcopy(kernel) for kernel in middle(of(events, "kernel"), FEW))]


def empty(events: Events) -> Events:
    """torch-spyre issue 3274."""
    for kernel in middle(of(events, "kernel"), MANY):
        kernel["dur"] = 0
    return events


def unnamed(events: Events) -> Events:
    """pytorch/kineto pull request 850: kernels of graphs, whose names were read from their launches."""
    for kernel in middle(of(events, "kernel"), MANY):
        kernel["name"] = ""
    return events


def exchanged(events: Events) -> Events:
    """ROCm/legacy-rocm-build issue 2553 and ROCm/rocm-systems pull request 8141: kernels under the names of others."""
    kernels = of(events, "kernel")
    names = [kernel["name"] for kernel in kernels]
    random.Random(0).shuffle(names)
    for kernel, name in zip(kernels, names, strict=True):
        kernel["name"] = name
    return events


def graphs_as_one_event(events: Events) -> Events:
    computing = [kernel for kernel in of(events, "kernel") if "nccl" not in kernel["name"]]
    for kernel in middle(computing, FEW):
        kernel["name"] = "CUDA graph"
    return events


def graphs_without_kernels(events: Events) -> Events:
    """HolisticTraceAnalysis issue 290."""
    launch = middle(of(events, "cuda_runtime", "cudaLaunchKernel"), FEW)
    numbers = range(10**6, 10**6 + FEW)
    added = [
        {**event, "name": "cudaGraphLaunch", "args": {"correlation": number}}
        for event, number in zip(launch, numbers, strict=True)
    ]
    return [*events, *added]


def far(events: Events) -> Events:
    """pytorch/kineto issue 996: a time out of all range."""
    for kernel in middle(of(events, "kernel"), FEW):
        kernel["ts"] += 3_600e6
    return events


def unset(events: Events) -> Events:
    """pytorch/kineto issue 109."""
    for kernel in middle(of(events, "kernel"), FEW):
        kernel["ts"] = kernel["dur"] = 0
    return events


def impossible(events: Events) -> Events:
    """pytorch pull request 124080: an end of INT_MIN."""
    for event in middle(of(events, "cpu_op"), FEW):
        event["dur"] = -9.2e15
    return events


def unfinished(events: Events) -> Events:
    """pytorch pull request 178168."""
    end = max(float(event["ts"]) + float(event.get("dur", 0)) for event in events if event.get("ph") == "X")
    for event in of(events, "cpu_op")[-15:]:
        event["dur"] = end - event["ts"]
    return events


def doubled_operators(events: Events) -> Events:
    """Two profilers in one process."""
    return [*events, *map(copy.deepcopy, of(events, "cpu_op"))]


def unfinished_calls(events: Events) -> Events:
    """pytorch issue 193440: Python calls that end with the profiler."""
    end = max(float(event["ts"]) + float(event.get("dur", 0)) for event in events if event.get("ph") == "X")
    calls = middle(of(events, "cpu_op"), FEW)
    added = [
        {**event, "cat": "python_function", "name": "<built-in method call>", "dur": end - event["ts"], "args": {}}
        for event in calls
    ]
    return [*events, *added]


def crossing(events: Events) -> Events:
    """pytorch issue 174555."""
    operators = middle(of(events, "cpu_op"), 200)[::50]
    added = [
        {**event, "cat": "user_annotation", "name": "user range", "ts": event["ts"] + event["dur"] / 2, "args": {}}
        for event in operators
    ]
    for event, operator in zip(added, operators, strict=True):
        event["dur"] = operator["dur"] / 2 + 2
    return [*events, *added]


def ranges_of_no_length(events: Events) -> Events:
    """pytorch/kineto pull request 646: annotations whose end was never set."""
    ops = [event for event in of(events, "user_annotation") if re.match(r"pp1:\d+[FBIW]", event["name"])]
    for event in ops[::2]:
        event["dur"] = 0
    return events


def buffer_requests(events: Events) -> Events:
    """pytorch/kineto issue 1020."""
    calls = middle(of(events, "cuda_runtime", "cudaLaunchKernel"), FEW)
    name = "Activity Buffer Request"
    return [*events, *({**event, "cat": "overhead", "name": name, "args": {}} for event in calls)]


Change = Callable[[Events], Events]
KINDS: dict[Damage, tuple[Change, int | None]] = {
    Damage.LOST_KERNELS: (lost, MANY),
    Damage.NO_DEVICE_EVENTS: (no_device_events, 1),
    Damage.KERNELS_WITHOUT_LAUNCH: (without_launch, FEW),
    Damage.WORK_BEFORE_RECORDING: (before_recording, FEW),
    Damage.NO_CORRELATION: (no_correlation, None),
    Damage.REPEATED_CORRELATION: (repeated_correlation, FEW),
    Damage.KERNELS_BEFORE_LAUNCH: (partial(with_clock_off, microseconds=-2_000), None),
    Damage.KERNELS_AFTER_WAIT: (partial(with_clock_off, microseconds=2_000), None),
    Damage.KERNELS_OUT_OF_ORDER: (out_of_order, FEW),
    Damage.OVERRUNNING_KERNELS: (overrunning, FEW),
    Damage.REPEATED_KERNELS: (doubled, FEW),
    Damage.EMPTY_KERNELS: (empty, MANY),
    Damage.UNNAMED_KERNELS: (unnamed, MANY),
    Damage.CONTRADICTING_NAMES: (exchanged, None),
    Damage.GRAPHS_AS_ONE_EVENT: (graphs_as_one_event, FEW),
    Damage.GRAPHS_WITHOUT_KERNELS: (graphs_without_kernels, FEW),
    Damage.FAR_TIMES: (far, FEW),
    Damage.UNSET_TIMES: (unset, FEW),
    Damage.IMPOSSIBLE_TIMES: (impossible, FEW),
    Damage.UNFINISHED_OPERATORS: (unfinished, 15),
    Damage.REPEATED_OPERATORS: (doubled_operators, None),
    Damage.UNFINISHED_CALLS: (unfinished_calls, FEW),
    Damage.CROSSING_RANGES: (crossing, FEW),
    Damage.EMPTY_RANGES: (ranges_of_no_length, 2),
    Damage.BUFFER_REQUESTS: (buffer_requests, FEW),
}
"""The change that makes each kind, and how many events are then of it; None where that hangs on the trace."""


def without_ranges(events: Events) -> Events:
    """A rank recorded without its user annotations."""
    return without(events, of(events, "user_annotation"))


def half_of_ranges(events: Events) -> Events:
    """A rank that lost every second of its user annotations."""
    return without(events, of(events, "user_annotation")[::2])


def begun_late(events: Events) -> Events:
    """A recording that begins in the middle of what the others recorded."""
    return [event for event in events if event.get("ph") != "X" or float(event["ts"]) >= _middle(events)]


def ended_early(events: Events) -> Events:
    """A recording that ends in the middle of what the others recorded."""
    return [event for event in events if event.get("ph") != "X" or float(event["ts"]) < _middle(events)]


def _middle(events: Events) -> float:
    times = [float(event["ts"]) for event in events if event.get("ph") == "X"]
    return (min(times) + max(times)) / 2


def lost_buffer(events: Events) -> Events:
    """A buffer of CUPTI that was dropped, with calls and kernels."""
    numbers = sorted(call["args"]["correlation"] for call in calls_of(events))
    gone = set(numbers[len(numbers) // 3 : len(numbers) // 2])
    return [e for e in events if e.get("cat") not in (*WORK, *CALLS) or e["args"].get("correlation") not in gone]


def lost_launches(events: Events) -> Events:
    """A tenth of the kernels, each with its launch."""
    numbers = [call["args"]["correlation"] for call in calls_of(events) if "Launch" in call["name"]]
    chance = random.Random(0)
    gone = {number for number in numbers if chance.random() < 0.1}
    return [e for e in events if e.get("cat") not in ("kernel", *CALLS) or e["args"].get("correlation") not in gone]


def no_device_records(events: Events) -> Events:
    """A rank recorded without its device: activities=[CPU]."""
    of_cupti = (*WORK, *CALLS, "gpu_user_annotation", "ac2g")
    return [event for event in events if event.get("cat") not in of_cupti]


def other_names(events: Events) -> Events:
    """Kernels of a library of communication whose names nobody knows."""
    for kernel in of(events, "kernel", "nccl"):
        kernel["name"] = "void (anonymous namespace)::move<float>(Args)"
    return events


def shifted(events: Events, microseconds: float) -> Events:
    """A rank whose times are all off: of the host and of the device."""
    for event in events:
        if "ts" in event:
            event["ts"] += microseconds
    return events


SHIFTS: dict[str, Change] = {
    "all times 5 ms early": partial(shifted, microseconds=-5_000),
    "all times 30 ms late": partial(shifted, microseconds=30_000),
    "all times an hour late": partial(shifted, microseconds=3_600e6),
}
"""Shifts of a rank's times, by what is done."""
OF_CLOCK: dict[str, Change] = {
    "device 0.5 ms behind": partial(with_clock_off, microseconds=-500),
    "device 10 ms ahead": partial(with_clock_off, microseconds=10_000),
    "device drifts 4 ms behind": partial(with_clock_off, microseconds=0, drift=-4_000),
    "device drifts 4 ms ahead": partial(with_clock_off, microseconds=0, drift=4_000),
}
"""Other errors of a device's clock than that of 2 ms, which is a kind for each direction."""
OF_DEVICE: dict[str, Change] = {change.__name__: change for change in (lost_buffer, lost_launches, no_device_records)}
"""Changes that take calls and device work together, by what is done."""
OF_RUN: dict[str, Change] = {
    change.__name__: change for change in (without_ranges, half_of_ranges, begun_late, ended_early)
}
"""Changes that only a comparison with the traces of the other ranks shows, by what is done."""


def damaged(sample: Path, folder: Path, change: Change, ranks: Sequence[int] = (RANK,)) -> Path:
    """A copy of a sample of which the traces of some ranks are changed."""

    def change_rank(rank: int, content: dict[str, Any]) -> None:
        if rank in ranks:
            content["traceEvents"] = change(content["traceEvents"])

    return write_changed(sample, folder, change_rank)
