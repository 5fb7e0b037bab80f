"""No report has an impossible figure, whatever a recorder did to its traces: damage is drawn, shares and gains are checked."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pptrace.analysis.part_words import words_of_part
from pptrace.analysis.report import Report
from pptrace.workflow.load import load
from tests.support.extent import ALL, by_turns
from tests.support.kineto import write_changed
from tests.support.programs import SAMPLES

Events = list[dict[str, Any]]
Damage = Callable[[random.Random, Events, int], Events]
HARDLY = 0.01
REASONS = (
    "counted in several causes",
    "the replay is longer than the run was: times that overlapped in the run follow one another in it",
)
"""Words for parts below zero."""
ON_GPUS = sorted(path for path in SAMPLES.glob("gpu_*") if any(path.glob("rank*.json.gz")))


def kernels_of(events: Events) -> Events:
    return [event for event in events if event.get("cat") == "kernel"]


def without(events: Events, gone: Sequence[dict[str, Any]]) -> Events:
    ids = {id(event) for event in gone}
    return [event for event in events if id(event) not in ids]


def stretched(draw: random.Random, events: Events, _rank: int) -> Events:
    """Single kernels last 300 ms longer (ROCm; AMD-AGI/TraceLens issue 669)."""
    kernels = kernels_of(events)
    for event in draw.sample(kernels, max(1, len(kernels) // 50)):
        event["dur"] = float(event["dur"]) + 300_000
    return events


def lost(draw: random.Random, events: Events, _rank: int) -> Events:
    """Some kernels of every rank are missing (full buffers of CUPTI)."""
    share = draw.choice([0.02, 0.3])
    return without(events, [event for event in kernels_of(events) if draw.random() < share])


def lost_at_first(draw: random.Random, events: Events, rank: int) -> Events:
    """The first kernels of one rank are missing (Kineto; pytorch issue 192021)."""
    kernels = sorted(kernels_of(events), key=lambda event: float(event["ts"]))
    return without(events, kernels[: int(draw.uniform(0.1, 0.5) * len(kernels))]) if rank == 1 else events


def never_set(draw: random.Random, events: Events, _rank: int) -> Events:
    """Kernels whose times were never set (pytorch/kineto issue 109)."""
    for event in draw.sample(kernels_of(events), 10):
        event["ts"] = event["dur"] = 0
    return events


def unfinished(draw: random.Random, events: Events, _rank: int) -> Events:
    """The last operators last until the end of the trace (pytorch pull request 178168)."""
    timed = [event for event in events if event.get("ph") == "X"]
    end = max(float(event["ts"]) + float(event.get("dur", 0)) for event in timed)
    operators = sorted((event for event in timed if event.get("cat") == "cpu_op"), key=lambda event: float(event["ts"]))
    for event in operators[-draw.randint(1, 15) :]:
        event["dur"] = end - float(event["ts"])
    return events


def without_devices(_draw: random.Random, events: Events, _rank: int) -> Events:
    """A session of CUPTI that died."""
    of_devices = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation", "ac2g")
    return [event for event in events if event.get("cat") not in of_devices]


def damaged(folder: Path, source: Path, damage: Damage, seed: int) -> Report:
    draw = random.Random(seed)

    def change(rank: int, content: dict[str, Any]) -> None:
        content["traceEvents"] = damage(draw, content["traceEvents"], rank)

    return load([write_changed(source, folder, change)]).report


def impossible(report: Report) -> list[str]:
    """Figures that cannot be: shares above 1, gains above the step, parts below 0 without a reason, times beyond their window."""
    found = []
    for step in report.steps:
        length = step.length_ns or 0
        for name, ns in (step.parts or {}).items():
            has_reason = name.startswith("outside") or words_of_part(step, name).detail in REASONS
            if ns > length or (ns < -HARDLY * length and not has_reason):
                found.append(f"step {step.step}: {name} {ns / length:.1%}")
        for rank in step.ranks:
            parts = [rank.compute_ns, rank.exposed_comm_ns, rank.bubble_ns]
            if None not in parts and rank.window_ns is not None and sum(parts) != rank.window_ns:
                found.append(f"step {step.step}: rank {rank.rank} {parts} of {rank.window_ns}")
            found += [f"step {step.step}: rank {rank.rank} {ns}" for ns in parts if ns is not None and ns < 0]
    typical = report.typical_step
    longest = max((step.length_ns or 0 for step in report.steps), default=0)
    for finding in report.findings:
        if finding.gain_ns is not None and typical is not None and not 0 <= finding.gain_ns <= longest:
            found.append(f"{finding.title}: {finding.gain_ns} of {longest}")
    return found


def thousandfold(_draw: random.Random, events: Events, rank: int) -> Events:
    """One rank's durations are in another unit."""
    for event in events:
        if rank == 1 and "dur" in event:
            event["dur"] = float(event["dur"]) * 1000
    return events


DAMAGES = (stretched, lost, lost_at_first, never_set, unfinished, without_devices, thousandfold)


@pytest.mark.parametrize(
    ("sample", "damage"), by_turns(ON_GPUS, DAMAGES), ids=lambda each: each.__name__ if callable(each) else each.name
)
def test_damaged_traces_have_no_impossible_figure(sample: Path, damage: Damage, tmp_path: Path) -> None:
    for seed in range(3 if ALL else 1):
        folder = tmp_path / str(seed)
        folder.mkdir()
        report = damaged(folder, sample, damage, seed)
        assert impossible(report) == [], seed
        assert report.warnings or any(info.warnings for info in report.inputs) or damage is unfinished


def test_the_check_finds_what_is_impossible() -> None:
    from msgspec.structs import replace

    report = load([SAMPLES / "uneven_p4"]).report
    (step, *_) = report.steps
    (rank, *_) = step.ranks
    wrong = replace(step, ranks=(replace(rank, compute_ns=(rank.compute_ns or 0) + 1),))
    assert impossible(replace(report, steps=(wrong,)))
    (finding, *_) = report.findings
    assert impossible(replace(report, findings=(replace(finding, gain_ns=10**12),)))
