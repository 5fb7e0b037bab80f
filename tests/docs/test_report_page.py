"""docs/report.md has every field of the JSON, and no other, and says of each whether it may be null or empty, as the types do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

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
from pptrace.analysis.report import AsRecorded, RecordedRank, RecordedStep, Report
from pptrace.analysis.result import HostWindow, ScheduleCandidate
from pptrace.analysis.stages.types import StageCompute, StageDifference, StageOps, StagePart, StageWork
from pptrace.analysis.whole_run import BlamedOp, Cause, Doubt, InDoubt, StepChange, StepOutlier, StepSeries
from pptrace.errors import UsageError
from pptrace.model.device import HostIdle
from pptrace.model.traces import Category
from pptrace.report.hang import hang_object
from pptrace.report.to_json import dump, report_object, simulation_object
from pptrace.schedule import registry
from pptrace.simulator import IDEAL, simulate
from pptrace.workflow.find_hang import HangResult
from pptrace.workflow.load import load
from tests.support.analysed import analyse
from tests.support.programs import SAMPLES
from tests.support.synthetic import MAIN_THREAD, START, Event, make_trace, record
from tools import report_page
from tools.house import ASIDES, QUESTIONS

PAGE = report_page.PAGE.read_text(encoding="utf-8")
SUMS = {
    **{f"steps.critical_path.{sums}": {"kind" if sums == "parts" else "stage", "ns"} for sums in ("parts", "by_stage")},
    **{f"steps.blame.by_{of}": {of, "ns"} for of in ("rank", "stage", "kind")},
}
"""Keys of sums, objects that no type has, by their path."""
FREE = {
    *(
        "clock.offsets_ns",
        "schedule.candidates.pp_ranks",
        "steps.ranks.spans",
        "steps.ranks.idle_spans",
        "steps.causes.where",
    ),
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
    """Every field of a JSON object; lists, and the phases by their names, count as their members."""
    if isinstance(value, list):
        for member in value:
            yield from fields(member, path)
    elif isinstance(value, Mapping) and path not in FREE:
        for key, inner in value.items():
            yield path, key, inner
            members = [*inner.values()] if key == "phases" and inner else inner
            yield from fields(members, f"{path}.{key}".removeprefix("."))


def section(heading: str) -> str:
    """The text below a heading, up to the next one."""
    (result,) = re.finditer(rf"^#+ {re.escape(heading)}$", PAGE, re.MULTILINE)
    return re.split(r"^#+ ", PAGE[result.end() :], maxsplit=1, flags=re.MULTILINE)[0]


def names(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


@cache
def tables() -> dict[str, dict[str, tuple[str, str]]]:
    """By the path of an object in the JSON: its fields in the tables of the page, each with the two other columns."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for kind, paths in report_page.paths_of_types(Report).items():
        table = PAGE.split(f"<!-- fields of {kind.__name__} -->")[1].split("<!-- end of")[0]
        rows = [re.split(r" (?<!\\)\| ?", line) for line in table.splitlines() if line.startswith(("| `", "| [`"))]
        for path in paths:
            fields_there = found.setdefault(path.replace("[]", ""), {})
            fields_there |= {name: (meaning, without) for first, meaning, without, _ in rows for name in names(first)}
    return found


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
        doubts=(Doubt(InDoubt.CLOCK, "a line"),),
        recording=lone_rank.recording and replace(lone_rank.recording, as_recorded=AsRecorded("slow", (_RECORDED,))),
        device=tuple(replace(device, on_host=HostWindow(0, 9, 4, 3, 2)) for device in lone_rank.device),
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
_RECORDED = RecordedStep(1, None, None, None, None, (RecordedRank(0, None, None, None, HostIdle(1, 2, 3)),))
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
    predicted = PredictedMemory(1, 2, 3, None, None, (StageActivations(0, 4),))
    ranks = tuple(replace(rank, predicted=predicted) for rank in report.memory.ranks)
    return replace(report, memory=replace(report.memory, ranks=ranks))


def test_the_page_is_what_the_command_writes() -> None:
    assert report_page.page_of(PAGE) == PAGE


def test_each_object_has_the_fields_of_its_tables_and_no_other(reports: list[dict[str, Any]]) -> None:
    written: dict[str, set[str]] = {}
    for report in reports:
        for path, key, _ in fields(report):
            written.setdefault(path, set()).add(key)
    described = {path: set(rows) for path, rows in tables().items()}
    described |= {"": {"schema", *described[""]}, **SUMS, "hang": set(HANG), "hang.edges": set(HANG["edges"][0])}
    assert written.keys() == described.keys()
    assert not {path: written[path] ^ keys for path, keys in described.items() if written[path] != keys}


@pytest.mark.parametrize("path", SUMS)
def test_the_comment_of_sums_names_their_keys(path: str) -> None:
    parent, _, name = path.rpartition(".")
    assert names(tables()[parent][name][0]) >= SUMS[path]


def test_a_field_is_null_or_empty_only_where_the_page_says_that_it_may_be(reports: list[dict[str, Any]]) -> None:
    found = {
        ("null" if value is None else "empty", path, key)
        for report in reports
        for path, key, value in fields(report)
        if value in (None, [], {}, "")
    }
    assert {("null", "steps.ranks", "bubble_ns"), ("empty", "steps.causes", "where")} <= found
    written = tables()
    assert not {it for it in found if (row := written.get(it[1], {}).get(it[2])) and it[0] not in row[1]}


@dataclass(frozen=True)
class Silent:
    """A type with a field of which nothing is said."""

    rank: int


@dataclass(frozen=True)
class Wrong:
    """A type with a field that may be None, and does not say when."""

    rank: int | None  #: global rank; empty where it is not known


@dataclass(frozen=True)
class Call:
    """A call."""

    #: name of the call
    #: (:mod:`here`), ``a|b``; left out of others
    name: str
    rank: int | None  #: global rank; null where it is not known; empty never


@dataclass(frozen=True)
class Calls:
    """Calls of a run.

    Of which no more is on the page.
    """

    by_kind: Mapping[str, tuple[Call, ...]]  #: calls
    num_calls: int  #: a number
    num_ranks: int  #: a number


@pytest.mark.parametrize("kind", [Silent, Wrong])
def test_a_field_whose_comment_is_missing_or_does_not_fit_its_type_is_refused(kind: type) -> None:
    with pytest.raises(UsageError, match=f"{kind.__name__}.rank"):
        report_page.page_of("", kind)


def test_a_type_that_the_page_does_not_have_gets_a_section_behind_that_of_its_field() -> None:
    page = "# Page\n\n<!-- fields of Calls -->\nold\n<!-- end of Calls -->\n\nMore.\n\n(next)=\n## Next\n\nText.\n"
    written = report_page.page_of(page, Calls)
    assert (
        written
        == """# Page

<!-- fields of Calls -->
Calls of a run.

| field | meaning | null or empty |
|---|---|---|
| [`by_kind`](#by-kind) | calls | never |
| `num_calls`, `num_ranks` | a number | never |
<!-- end of Calls -->

More.

(by-kind)=
## `by_kind[]`

<!-- fields of Call -->
A call.

| field | meaning | null or empty |
|---|---|---|
| `name` | name of the call, `a\\|b` | left out of others |
| `rank` | global rank | null where it is not known; empty never |
<!-- end of Call -->

(next)=
## Next

Text.
"""
    )
    assert report_page.page_of(written, Calls) == written
    moved = written.replace("(by-kind)=\n## `by_kind[]`\n\n", "")
    assert "\n`by_kind[]`: A call.\n" in report_page.page_of(moved, Calls)


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (
            "<!-- fields of Doubt -->\n<!-- end of Doubt -->\n<!-- fields of Call -->\n<!-- end of Call -->\n",
            "fields of Call",
        ),
        ("<!-- fields of Doubt -->\n", "lacks <!-- fields of Doubt --> and behind it <!-- end of Doubt -->"),
        ("", "lacks <!-- fields of Doubt -->"),
    ],
)
def test_a_page_with_a_table_of_a_type_that_is_gone_or_without_a_place_for_one_is_refused(
    page: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        report_page.page_of(f"# Page\n\n{page}", Doubt)


def test_the_meaning_of_a_field_begins_with_a_noun_or_a_verb() -> None:
    openings = {
        f"{kind.__name__}.{field.name}": re.findall(r"[^\W_]+", field.meaning)[0].lower()
        for kind in report_page.paths_of_types(Report)
        for field in report_page.fields_of(kind)
    }
    assert not {name for name, word in openings.items() if word in QUESTIONS | ASIDES}


def test_the_fields_of_a_simulation_are_described() -> None:
    written = simulation_object(simulate(registry.build("1f1b", 2, 4, 1), IDEAL), with_ops=True)
    keys = set(written) | set(written["ranks"][0])
    assert keys <= names(section("`pptrace.simulation/1`")) | {"ops"}


def test_the_fields_of_a_verdict_are_described() -> None:
    result = hang_object(HangResult(HANG, "", (0, 3)))
    assert set(result) | set(HANG) | set(HANG["edges"][0]) <= names(section("`hang`")) | {"hang"}
