"""docs/report.md describes every field of the JSON, and no other, and says of each whether it may be null."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pptrace.analysis.early_receives.types import EarlyReceives, HeldCall, HeldRank
from pptrace.analysis.experts.types import (
    ExpertCalls,
    ExpertsReport,
    ExpertStep,
    ExpertTraffic,
    LayerLoad,
    LayerSpread,
    RankLoad,
    RoutingGain,
    TrafficPair,
)
from pptrace.analysis.links.types import (
    CollectiveRate,
    CollectiveSize,
    CollectiveSpeed,
    DevicePeak,
    Interconnect,
    LateRank,
)
from pptrace.analysis.memory.types import PredictedMemory, StageActivations
from pptrace.analysis.recompute.types import BackwardOps, RecomputeReport, StepRecompute
from pptrace.analysis.report import Report
from pptrace.analysis.result import ScheduleCandidate
from pptrace.analysis.stages.types import StageCompute, StageDifference, StageOps, StagePart, StageWork
from pptrace.analysis.whole_run import BlamedOp, Cause, StepChange, StepOutlier, StepSeries
from pptrace.model.traces import Category
from pptrace.report.hang import hang_object
from pptrace.report.to_json import dump, report_object, simulation_object
from pptrace.schedule import registry
from pptrace.simulator import IDEAL, simulate
from pptrace.workflow.analyse import analyse
from pptrace.workflow.find_hang import HangResult
from pptrace.workflow.load import load
from tests.support.programs import ROOT, SAMPLES
from tests.support.synthetic import MAIN_THREAD, START, Event, make_trace, record

PAGE = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
_OF_PATHS = {
    heading.strip("`").replace("[]", ""): heading for heading in re.findall(r"^##+ (`[\w.\[\]]+`)$", PAGE, re.MULTILINE)
}
"""Headings that are the path of an object: `steps[].bubble` of "steps.bubble"."""
SECTIONS = {
    **{path: heading for path, heading in _OF_PATHS.items() if f"\n#### {heading}\n" not in PAGE},
    "": "Top level",
    "schedule.candidates": "`schedule`",
    "steps.bubble.waterfall_ns": "`steps[].bubble`",
    "steps.ranks.phases": "`phases`: `warmup`, `steady`, `cooldown`",
    "steps.ranks.phases.warmup": "`phases`: `warmup`, `steady`, `cooldown`",
    "steps.ranks.phases.steady": "`phases`: `warmup`, `steady`, `cooldown`",
    "steps.ranks.phases.cooldown": "`phases`: `warmup`, `steady`, `cooldown`",
    "steps.ranks.ideal": "`ideal`",
    "steps.ranks.comms": "`comms[]`",
    "steps.ranks.ops": "`ops[]`",
    "steps.ranks.ops.parts": "`ops[]`",
    "steps.ranks.device": "`device`",
    **{f"steps.critical_path.{sums}": "`steps[].critical_path`" for sums in ("parts", "by_stage", "ops")},
    **{f"steps.blame.{sums}": "`steps[].blame`" for sums in ("by_rank", "by_stage", "by_kind", "ops")},
    "steps.ranks.host": "`host`",
    "steps.ranks.synchronisations": "`synchronisations[]`",
    "collectives.sizes": "`collectives[]`",
    **{f"interconnect.{path}": "`interconnect`" for path in ("devices", "collectives")},
    "device.host": "`host`",
    "device.synchronisations": "`synchronisations[]`",
    **{f"stragglers.{entries}": "`stragglers`" for entries in ("workers", "stages", "op_kinds")},
    "device": "`device[]`",
    "device.comms": "`device[]`",
    **{
        f"memory.{path}": "`memory`"
        for path in ("ranks", "ranks.in_flight", "ranks.predicted", "ranks.predicted.stages")
    },
    **{
        f"step_series.{entries}": "`step_series`"
        for entries in ("outliers", "outliers.differences", "outliers.ops", "changes", "changes.differences")
    },
    "missing_evidence": "`missing_evidence[]`",
    **{
        f"experts.{path}": "`experts`"
        for path in ("layers", "over_layers", "ranks", "calls", "routing", "steps", "traffic")
    },
    "experts.traffic.pairs": "`experts`",
    "recompute.steps": "`recompute`",
    "hang.edges": "`hang`",
    "recording.as_recorded.steps": "`recording.as_recorded`",
    "recording.as_recorded.steps.waterfall_ns": "`steps[].bubble`",
    "recording.as_recorded.steps.ranks": "`recording.as_recorded`",
}
FREE = {
    *("clock.offsets_ns", "schedule.candidates.pp_ranks", "steps.ranks.spans", "steps.causes.where"),
    *("steps.outside.where", "step_series.outliers.differences.where", "step_series.changes.differences.where"),
    *("marked_steps.spans", "findings.evidence", "recording.settings"),
}
"""Objects whose keys are names or numbers of the run."""
HANG = {
    "verdict": "late",
    "ranks": [3],
    "detail": "late: rank 3",
    "edges": [{"rank": 0, "waits_for": [3], "call": "all_reduce", "group": "default_pg", "seq": 3}],
}
Found = tuple[str, str, object]
"""The path of an object in the JSON, one of its keys, and the value."""


def fields(value: object, path: str = "") -> Iterator[Found]:
    """Every field of a JSON object; lists count as their members."""
    if isinstance(value, list):
        for member in value:
            yield from fields(member, path)
    elif isinstance(value, Mapping) and path not in FREE:
        for key, inner in value.items():
            yield path, key, inner
            yield from fields(inner, f"{path}.{key}".removeprefix("."))


@cache
def section(heading: str) -> str:
    """The text below a heading, up to the next one."""
    (result,) = re.finditer(rf"^#+ {re.escape(heading)}$", PAGE, re.MULTILINE)
    return re.split(r"^#+ ", PAGE[result.end() :], maxsplit=1, flags=re.MULTILINE)[0]


def names(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


def rows(text: str) -> Iterator[tuple[str, ...]]:
    """The rows of the tables in a text, without their heads and rules."""
    for line, below in pairwise([*text.splitlines(), ""]):
        if line.startswith("|") and not line.startswith("|---") and not below.startswith("|---"):
            yield tuple(cell.strip() for cell in line.strip("|").split("|"))


@cache
def described(heading: str) -> set[str]:
    """The names in a heading and its text; of tables, those in the columns that describe a field."""
    text = section(heading)
    prose = [line for line in text.splitlines() if not line.startswith("|")]
    return names("\n".join([heading, *prose, *(" ".join(row[:2]) for row in rows(text))]))


@pytest.fixture(scope="module")
def sample() -> Report:
    return load([SAMPLES / "1f1b_p4"]).report


@pytest.fixture(scope="module")
def lone_rank() -> Report:
    return load([SAMPLES / "1f1b_p4" / "rank1.json.gz"]).report


@pytest.fixture(scope="module")
def overlapped(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The report of a simulated run with overlapped pairs."""
    file = tmp_path_factory.mktemp("dualpipe") / "simulation.json"
    file.write_text(dump(simulation_object(simulate(registry.build("dualpipe-v", 2, 6, 2), IDEAL), with_ops=True)))
    return load([file]).report


@pytest.fixture(scope="module")
def without_pipeline(tmp_path_factory: pytest.TempPathFactory) -> Report:
    file: Path = tmp_path_factory.mktemp("plain") / "ops.csv"
    file.write_text("rank,step,kind,start_us,end_us\n0,0,STEP,0,900\n1,0,STEP,0,800\n0,0,all_reduce,100,300\n")
    return load([file]).report


@pytest.fixture(scope="module")
def on_devices() -> Report:
    """The report of a run on devices, with a synchronisation in the pipeline and one after it."""
    recording = record(registry.build("1f1b", 2, 4), device=True)
    traces = []
    for rank in (0, 1):
        calls = [
            Event(Category.RUNTIME, "cudaStreamSynchronize", START + at, START + at + 20, thread=MAIN_THREAD)
            for at in (300, recording.run.end - 2 * 40)
        ]
        metadata = recording.job.metadata(rank)
        traces.append(make_trace([*recording.events_of(rank), *calls], rank, metadata))
    return analyse(traces).report


@pytest.fixture(scope="module")
def reports(
    sample: Report, lone_rank: Report, overlapped: Report, without_pipeline: Report, on_devices: Report
) -> list[dict[str, Any]]:
    candidate = ScheduleCandidate("1f1b", 4, 8, 4, 1, {"1": 1})
    several = replace(
        _with_prediction(lone_rank),
        schedule=replace(lone_rank.schedule, candidates=(candidate,)),
        hang=HANG,
        step_series=_SERIES,
        interconnect=_INTERCONNECT,
        collectives=_COLLECTIVES,
        late_ranks=(LateRank("dp", "all_reduce", 0, 4, 2, 10),),
        experts=_EXPERTS,
        early_receives=_EARLY,
        recompute=_RECOMPUTE,
        stages=StageCompute((StageOps(0, "F", 2, 5, (StageWork("matmul", 5),), (StageWork("layer 0", 5),)),), (_MORE,)),
    )
    return [
        json.loads(dump(report_object(report, with_ops=True)))
        for report in (sample, several, overlapped, without_pipeline, on_devices)
    ]


_RECOMPUTE = RecomputeReport(
    (BackwardOps(0, 0, "B", 2, 9, 3, None), BackwardOps(1, 1, "B", 2, 9, None, 2)),
    (StepRecompute(1, 3),),
    *("full", None, True, "a reason", "a reason"),
)
_MORE = StageDifference("F", 1, 0, 2, (StagePart("matmul", 2),), (StagePart("layer", 2),))
_INTERCONNECT = Interconnect(
    (DevicePeak(0, "NVIDIA H200", "nvlink", 450.0), DevicePeak(1, None, None, None)),
    (
        CollectiveRate("tp", "all_reduce", True, 90.0, 450.0, 0.2),
        CollectiveRate("dp", "all_reduce", None, 9.0, None, None),
    ),
    ("the traces of 1 of 2 ranks do not name the device",),
    ("NCCL_ALGO=Ring",),
)
_COLLECTIVES = (
    CollectiveSpeed(
        *("dp", "all_reduce", 8, "ring", "LL", True, 9, 90, (CollectiveSize(1024, 9, 10, 102.4, 179.2),)),
        *(5, 200.0, None, 14, 6, 450.0, 0.4, False),
    ),
    CollectiveSpeed(
        *("dp", "broadcast", *(None,) * 4, 9, None, (CollectiveSize(None, 9, None, None, None),)),
        *(None, None, "a reason", None, None),
    ),
)
_EXPERTS = ExpertsReport(
    *("counts", 2, 1),
    (LayerLoad(None, None, 0, *(None,) * 9), LayerLoad(3, 1, 0, (4, 2), 0, 1.3, 1.2, 0, 1, 0.2, 1.3, 1.5)),
    (RankLoad(0, None, None, None, None, None, 7, *(None,) * 7),),
    (ExpertCalls(None, None, None, None, "dispatch", 4, *(None,) * 9),),
    RoutingGain(5, None, None, 0.1, 30, 20),
    ("a reason",),
    steps=(ExpertStep(3, *(None,) * 6), ExpertStep(4, 9, 1, 5, 0.6, "rows", 1.5)),
    traffic=ExpertTraffic("counts", 9, 4, None, 2, (TrafficPair(0, 1, 3, None, 0.5),)),
    over_layers=(LayerSpread("expert_ratio", 2, 1.0, 1.1, 1.2, 1.2, 1.2, 1.2),),
)
_EARLY = EarlyReceives(
    *("host", 2, 9, None, "a reason"), (HeldRank(0, 1, 9, 9),), (HeldCall(0, "2RECV_F0", 2, 0, 1, "0F1", 1, 9, 9),), 1
)
_DIFFERENCES = (Cause("jitter", {"rank": 2}, 5),)
_OUTLIERS = (StepOutlier(3, 15, 2, 10, _DIFFERENCES, (BlamedOp(2, "F", 2, 0, 5),)), StepOutlier(4, 15, 2, 10, None, ()))
_CHANGES = (StepChange(9, 2, 10, 12, 20, _DIFFERENCES), StepChange(20, 12, 20, 22, 10, None))
_SERIES = StepSeries(30, 9, 10, 10, 20, 21, _OUTLIERS, _CHANGES)


def _with_prediction(report: Report) -> Report:
    assert report.memory is not None
    predicted = PredictedMemory(1, 2, 3, None, None, (StageActivations(0, 4),))
    ranks = tuple(replace(rank, predicted=predicted) for rank in report.memory.ranks)
    return replace(report, memory=replace(report.memory, ranks=ranks))


def test_every_object_of_the_report_has_a_section(reports: list[dict[str, Any]]) -> None:
    assert {path for report in reports for path, _, _ in fields(report)} == set(SECTIONS)


def test_every_field_is_described_in_the_section_of_its_object(reports: list[dict[str, Any]]) -> None:
    missing = {
        f"{path}.{key}"
        for report in reports
        for path, key, _ in fields(report)
        if key not in described(SECTIONS[path]) and not (path == "device" and key in described("`device`"))
    }
    assert not missing


def test_no_table_describes_a_field_that_is_not_written(reports: list[dict[str, Any]]) -> None:
    written: dict[str, set[str]] = {}
    for report in reports:
        for path, key, _ in fields(report):
            written.setdefault(SECTIONS[path], set()).add(key)
    stale = {
        f"{heading}: {name}"
        for heading, keys in written.items()
        for row in rows(section(heading))
        for name in names(row[0]) - keys
    }
    assert not stale


def test_a_field_that_is_never_null_never_is(reports: list[dict[str, Any]]) -> None:
    promised = {
        (heading, name)
        for heading in SECTIONS.values()
        for row in rows(section(heading))
        if row[-1] == "never"
        for name in names(row[0])
    }
    assert ("Top level", "framework") in promised
    broken = {
        f"{path}.{key}"
        for report in reports
        for path, key, value in fields(report)
        if value is None and (SECTIONS[path], key) in promised
    }
    assert not broken


def test_every_field_that_was_null_is_said_to_be_so_at_times(reports: list[dict[str, Any]]) -> None:
    tables = {
        heading: {name for row in rows(section(heading)) for name in names(row[0])} for heading in SECTIONS.values()
    }
    null = {(path, key) for report in reports for path, key, value in fields(report) if value is None}
    assert ("steps.ranks", "bubble_ns") in null
    unsaid = {
        f"{path}.{key}"
        for path, key in null
        if key not in tables[SECTIONS[path]] | tables["`device`"] | tables["`ops[]`"]
    }
    assert not unsaid


def test_the_fields_of_a_simulation_are_described() -> None:
    written = simulation_object(simulate(registry.build("1f1b", 2, 4, 1), IDEAL), with_ops=True)
    keys = set(written) | set(written["ranks"][0])
    assert keys <= names(section("`pptrace.simulation/1`")) | {"ops"}


def test_the_fields_of_a_verdict_are_described() -> None:
    result = hang_object(HangResult(HANG, "", (0, 3)))
    assert set(result) | set(HANG) | set(HANG["edges"][0]) <= names(section("`hang`")) | {"hang"}  # type: ignore[arg-type]
