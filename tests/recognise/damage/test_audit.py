"""The audit of recordings that were damaged on purpose: each kind is found, counted and placed, and nothing is silently wrong.

The kinds are those that public threads report: named with each.
"""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dashboards import app
from dashboards.pages import overview
from dashboards.store import Store
from pptrace.analysis.recording_parts import AuditEntry
from pptrace.analysis.result import Report
from pptrace.model.damage import Damage
from pptrace.workflow.load import load
from tests.support.programs import ROOT, SAMPLES, pptrace

Event = dict[str, Any]
Events = list[Event]
SAMPLE, RANK, STEP = SAMPLES / "gpu_1f1b_p2_tp2", 1, 3
MANY, FEW = 20, 4


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


def launches_of(events: Events, kernels: Events) -> Events:
    numbers = {kernel["args"]["correlation"] for kernel in kernels}
    calls = [*of(events, "cuda_runtime"), *of(events, "cuda_driver")]
    return [event for event in calls if event["args"].get("correlation") in numbers]


def lost(events: Events) -> Events:
    """pytorch issue 192021."""
    return without(events, middle(of(events, "kernel"), MANY))


def no_device_events(events: Events) -> Events:
    """pytorch/kineto issue 996."""
    return [event for event in events if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset", "ac2g")]


def without_launch(events: Events) -> Events:
    """HolisticTraceAnalysis pull request 59."""
    return without(events, launches_of(events, middle(of(events, "kernel"), FEW)))


def before_recording(events: Events) -> Events:
    """pytorch/kineto pull request 1545: what the warm-up left."""
    work = sorted([*of(events, "kernel"), *of(events, "gpu_memcpy")], key=lambda event: float(event["ts"]))
    stream = [event for event in work if event["args"]["stream"] == 7]
    return without(events, launches_of(events, stream[:FEW]))


def no_correlation(events: Events) -> Events:
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cuda_driver"):
            event["args"].pop("correlation", None)
    return events


def repeated_correlation(events: Events) -> Events:
    """ROCm/omnitrace issue 266: the same number for every launch."""
    kernels = middle(of(events, "kernel"), FEW + 1)
    for kernel, launch in zip(kernels[1:], launches_of(events, kernels)[1:], strict=False):
        kernel["args"]["correlation"] = launch["args"]["correlation"] = kernels[0]["args"]["correlation"]
    return events


def before_launch(events: Events) -> Events:
    """torch-spyre issue 3274: the clock of the device is not the host's."""
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            event["ts"] -= 2_000
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


def graphs_as_one_event(events: Events) -> Events:
    for kernel in middle(of(events, "kernel"), FEW):
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
        {**event, "cat": "user_annotation", "name": "mine", "ts": event["ts"] + event["dur"] / 2, "args": {}}
        for event in operators
    ]
    for event, operator in zip(added, operators, strict=True):
        event["dur"] = operator["dur"] / 2 + 2
    return [*events, *added]


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
    Damage.KERNELS_BEFORE_LAUNCH: (before_launch, None),
    Damage.KERNELS_OUT_OF_ORDER: (out_of_order, FEW),
    Damage.OVERRUNNING_KERNELS: (overrunning, FEW),
    Damage.REPEATED_KERNELS: (doubled, FEW),
    Damage.EMPTY_KERNELS: (empty, MANY),
    Damage.GRAPHS_AS_ONE_EVENT: (graphs_as_one_event, FEW),
    Damage.GRAPHS_WITHOUT_KERNELS: (graphs_without_kernels, FEW),
    Damage.FAR_TIMES: (far, FEW),
    Damage.UNSET_TIMES: (unset, FEW),
    Damage.IMPOSSIBLE_TIMES: (impossible, FEW),
    Damage.UNFINISHED_OPERATORS: (unfinished, 15),
    Damage.UNFINISHED_CALLS: (unfinished_calls, FEW),
    Damage.CROSSING_RANGES: (crossing, FEW),
    Damage.BUFFER_REQUESTS: (buffer_requests, FEW),
}
"""The change that makes each kind, and how many events are then of it; None where that hangs on the trace."""
WITHOUT_STEPS = {Damage.NO_DEVICE_EVENTS, Damage.FAR_TIMES, Damage.UNSET_TIMES, Damage.IMPOSSIBLE_TIMES}


def damaged(folder: Path, change: Change) -> Path:
    """A copy of the sample of which one rank's trace is changed."""
    for path in sorted(SAMPLE.glob("rank*.json.gz")):
        content = json.loads(gzip.decompress(path.read_bytes()))
        if path.name == f"rank{RANK}.json.gz":
            content["traceEvents"] = change(content["traceEvents"])
        (folder / path.name.removesuffix(".gz")).write_text(json.dumps(content), encoding="utf-8")
    return folder


def audit_of(report: Report) -> dict[str, AuditEntry]:
    assert report.recording is not None
    return {entry.kind: entry for entry in report.recording.audit}


def computes(report: Report) -> list[int | None]:
    (step,) = report.steps
    return [rank.compute_ns for rank in step.ranks]


WHOLE = load([SAMPLE], cache=False, as_recorded=True).report


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_damage_is_found_counted_and_placed(kind: Damage, tmp_path: Path) -> None:
    change, count = KINDS[kind]
    report = load([damaged(tmp_path, change)], cache=False, as_recorded=True).report
    assert kind not in audit_of(WHOLE)
    entry = audit_of(report)[kind]
    assert entry.ranks == (RANK,)
    assert entry.count == count or (count is None and entry.count > MANY)
    assert entry.steps == (() if kind in WITHOUT_STEPS else (STEP,))
    assert entry.affects
    assert entry.cure


@pytest.mark.parametrize("kind", KINDS)
def test_what_damage_does_to_computing_is_nothing_or_null(kind: Damage, tmp_path: Path) -> None:
    report = load([damaged(tmp_path, KINDS[kind][0])], cache=False, as_recorded=True).report
    if not report.steps:
        return
    after, before = computes(report), computes(WHOLE)
    others = [index for index in range(len(before)) if index != RANK]
    for index in others:  # within the window of the ranks that are known, which may be narrower
        assert after[index] == pytest.approx(before[index], rel=0.1)
    if after[RANK] is not None and kind not in (Damage.EMPTY_KERNELS, Damage.NO_CORRELATION):
        assert after[RANK] == pytest.approx(before[RANK], rel=0.05)


def test_events_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    folder = damaged(tmp_path, lambda events: events)
    file = folder / f"rank{RANK}.json"
    parts = file.read_text().split('{"ph": "X", "cat": "cpu_op"')
    file.write_text(
        '{"ph": "X", "cat": "cpu_op"'.join(parts[:-FEW]) + '{"ph": "X", "cat": ?"cpu_op"'.join(["", *parts[-FEW:]])
    )
    entry = audit_of(load([folder], cache=False, as_recorded=True).report)["unreadable_events"]
    assert (entry.ranks, entry.count) == ((RANK,), FEW)


def test_a_file_that_was_cut_is_named(tmp_path: Path) -> None:
    folder = damaged(tmp_path, lambda events: events)
    text = (folder / f"rank{RANK}.json").read_bytes()
    (folder / f"rank{RANK}.json").write_bytes(text[: len(text) // 2])
    entry = audit_of(load([folder], cache=False, as_recorded=True).report)["cut_file"]
    assert (entry.ranks, entry.count) == ((RANK,), 1)


def test_a_recording_that_is_whole_has_no_damage_and_one_with_damage_says_so_everywhere(tmp_path: Path) -> None:
    assert "Nothing of the recording is damaged" in pptrace("doctor", str(SAMPLES / "1f1b_p4")).out
    folder = damaged(tmp_path, lost)
    out = pptrace("doctor", str(folder)).out
    assert "Damaged: 1 kind of damage" in out
    assert f"lost kernels: {MANY} (rank {RANK}, step {STEP})" in out
    assert (
        "the recording is damaged: lost kernels (20); pptrace doctor PATH says" in pptrace("analyze", str(folder)).out
    )
    ended = pptrace("doctor", str(folder), "--json", "-")
    assert [entry["kind"] for entry in json.loads(ended.out)["audit"]] == ["lost_kernels"]


def test_ranks_without_a_trace_are_a_part_of_the_audit(tmp_path: Path) -> None:
    folder = damaged(tmp_path, lambda events: events)
    (folder / "rank3.json").unlink()
    assert audit_of(load([folder], cache=False, as_recorded=True).report)["missing_ranks"].count == 1


def test_the_docs_name_every_kind() -> None:
    text = (ROOT / "docs" / "inputs.md").read_text(encoding="utf-8")
    assert not [kind for kind in Damage if f"`{kind}`" not in text]
    assert set(KINDS) | {Damage.UNREADABLE_EVENTS, Damage.CUT_FILE} == set(Damage)


def test_the_machine_has_no_audit_to_write() -> None:
    ended = pptrace("doctor", "--json", "-")
    assert ended.code == 2
    assert "--json: give the traces that are to be audited" in ended.err


def test_the_dashboard_has_a_badge_above_every_page_and_a_line_on_the_first(tmp_path: Path) -> None:
    loaded = Store([damaged(tmp_path, lost)]).get()
    shown = str(app._facts(loaded))
    assert "damaged: lost kernels" in shown
    assert f"lost kernels: {MANY} (rank {RANK}, step {STEP})" in shown
    assert loaded.analysis is not None
    assert "The recording is damaged: lost kernels (20)" in str(overview._recording(loaded.analysis.report))
