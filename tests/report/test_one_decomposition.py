"""Figures of a step that several places show, over all samples: one decomposition, and compute as another reader counts it."""

from __future__ import annotations

import gzip
import json
import re
from functools import cache
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest
from msgspec.structs import asdict

from pptrace.analysis.findings.reasons import explained_steps
from pptrace.analysis.op_costs import computed_by_op
from pptrace.analysis.result import StepReport
from pptrace.analysis.stragglers.communication import LATE_RECEIVES
from pptrace.analysis.whole_run import UNEQUAL_ROUTES, Cause
from pptrace.api.load import load
from pptrace.api.run import Run
from pptrace.model.report_table import Amount
from pptrace.model.units import milliseconds, percent
from pptrace.report.charts.steps import causes_chart, place_of
from pptrace.report.step_tiles import step_tiles
from pptrace.report.summary_figures import waterfall
from pptrace.report.tables.waterfall import causes_table, waterfall_table
from pptrace.report.to_json import report_object
from tests.report.test_nothing_impossible import impossible
from tests.support.extent import ALL
from tests.support.parts import by_cause
from tests.support.programs import ROOT

SAMPLES = sorted(path.parent for path in (ROOT / "sample_traces").glob("*/expected.json"))
GPU = [sample for sample in SAMPLES if sample.name.startswith("gpu_")]
_PART = re.compile(r"(less )?(\d+)% ([^,;%]+?)(?=, (?:less )?\d+% |; |\.(?: |$))")


@cache
def run_of(sample: Path) -> Run:
    return load(sample)


def explained(sample: Path) -> StepReport:
    step = run_of(sample).report.typical_step
    if step is None or step.parts is None:
        pytest.skip("no step of this sample is explained")
    return step


each = pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)


@each
def test_the_parts_of_a_step_are_the_same_in_json_tables_pictures_and_python(sample: Path) -> None:
    run, step = run_of(sample), explained(sample)
    parts, length = step.parts or {}, step.length_ns or 0
    sums = by_cause((Cause("compute", {}, step.ideal_ns or 0), *(step.causes or ())))
    fall = step.bubble.waterfall_ns
    assert {name: ns or 0 for name, ns in asdict(fall).items()} == {name: sums[name] for name in asdict(fall)}
    assert sum(sums.values()) == step.span_ns
    (entry,) = (entry for entry in report_object(run.report)["steps"] if entry["step"] == step.step)
    assert entry["bubble"]["waterfall_ns"] == asdict(fall)
    row = run.steps.set_index("step").loc[step.step]
    assert {name: None if pd.isna(row[f"{name}_ns"]) else row[f"{name}_ns"] for name in asdict(fall)} == asdict(fall)
    shown = {name: milliseconds(ns) for name, ns in parts.items()}
    table = waterfall_table(step, Amount.WHOLE)
    assert [row[1:3] for row in table.rows] == [(shown[name], percent(ns / length)) for name, ns in parts.items()]
    labels = [label for _, label, _ in waterfall(step).data[0].customdata][:-1]
    assert [label.lstrip("+−").split(" ms")[0] for label in labels] == [text.lstrip("-") for text in shown.values()]
    rows = {(str(row[0]), str(row[1])): row[2] for row in causes_table(step).rows}
    assert len(rows) == len(step.causes or ())
    chart = causes_chart(step)
    names = {place_of(cause): cause.ns / 1e6 for cause in step.causes or ()}
    drawn = dict(zip(chart.layout.yaxis.ticktext, chart.data[0].x, strict=True))
    assert {name: names[name] for name in drawn} == pytest.approx(drawn)


@each
def test_parts_of_all_steps_and_stages_sum_up_and_none_is_impossible(sample: Path) -> None:
    run = run_of(sample)
    assert sample.name.startswith("hang") or impossible(run.report) == []
    for step in run.report.steps:
        if step.period_ns is not None and step.span_ns is not None and step.has_pipeline:
            assert sum(part.ns for part in step.outside or ()) == step.period_ns - step.span_ns
        assert step.parts is None or sum(step.parts.values()) == step.length_ns
    stages, expected = run.report.stages, computed_by_op(run.analysis.data)
    assert {(ops.stage, ops.kind) for ops in stages.ops} == set(expected)
    for ops in stages.ops:
        of_ops = expected[ops.stage, ops.kind].values()
        assert ops.count == sum(map(len, of_ops))
        assert ops.compute_ns == sum(int(part.sum()) for part in of_ops) == sum(part.ns for part in ops.classes)
        assert not ops.parts or sum(part.ns for part in ops.parts) == ops.compute_ns
    assert all(sum(part.ns for part in one.classes) == one.more_ns > 0 for one in stages.differences)
    of_run = run.stage_work.query("what == 'class'").groupby(["stage", "kind"]).ns.sum()
    assert of_run.to_dict() == {(ops.stage, ops.kind): ops.compute_ns for ops in stages.ops}


@each
def test_the_sentence_the_tiles_and_the_findings_have_the_shares_of_the_same_parts(sample: Path) -> None:
    run, step = run_of(sample), explained(sample)
    report, length = run.report, step.length_ns or 1
    parts = step.parts or {}
    said = {name: (-1 if less else 1) * int(share) for less, share, name in _PART.findall(report.verdict)}
    assert report.hang is not None or sorted(said.values()) == sorted(
        round(100 * ns / length) for name, ns in parts.items() if abs(ns) >= 0.02 * length or name == "compute"
    )
    (exposed,) = (tile for tile in step_tiles(step, report) if tile.name == "exposed")
    assert exposed.value == percent(parts["communication"] / length)
    for finding in report.findings:
        name = finding.evidence.get("reason") or finding.evidence.get("cause")
        if name in parts and "steps" not in finding.evidence and "step" not in finding.evidence:
            title = re.search(r"([\d.]+)% of the step", finding.title)
            assert title is None or title[1] == f"{100 * parts[name] / length:.1f}", finding.title


@pytest.mark.parametrize("sample", SAMPLES[:: 1 if ALL else 2], ids=lambda sample: sample.name)
def test_an_ideal_gains_what_the_parts_of_the_steps_and_the_findings_say(sample: Path) -> None:
    run = run_of(sample)
    explained(sample)
    predicted = run.whatif().result
    if not predicted.scenarios:
        pytest.skip("no change of this sample is predicted")

    def gain_of(ideal: str) -> int:
        (scenario,) = run.whatif(ideals=ideal).result.scenarios
        assert scenario.gain_ns == predicted.measured_ns - scenario.length_ns or scenario.length_ns == 0
        return scenario.gain_ns

    steps = explained_steps(run.report.steps, run.report.step_series)
    for name in ("jitter", "communication", "host"):
        late = sum(cause.ns for step in steps for cause in step.causes or () if cause.reason == LATE_RECEIVES)
        known = sum(cause.ns for step in steps for cause in step.causes or () if cause.cause == name)
        assert gain_of(name) == (known + late * (name == "host")) // len(steps)
    for finding in run.report.findings:
        evidence = finding.evidence
        if evidence.get("cause") in ("imbalance", "straggler") and evidence.get("reason") is None and evidence["where"]:
            ((kind, number),) = evidence["where"].items()
            assert gain_of(f"{kind}={number}") == finding.gain_ns, finding.title
        if evidence.get("reason") == UNEQUAL_ROUTES:
            assert gain_of("routing") == pytest.approx(finding.gain_ns, abs=1)
        named = [step.causes or () for step in steps]
        is_whole = not any(cause.reason for causes in named for cause in causes if cause.cause == evidence.get("cause"))
        if evidence.get("cause") in ("jitter", "communication") and evidence.get("reason") is None and is_whole:
            assert gain_of(evidence["cause"]) == finding.gain_ns, finding.title


@pytest.mark.parametrize("sample", GPU, ids=lambda sample: sample.name)
def test_the_compute_of_each_rank_in_each_step_is_what_a_reader_of_its_own_counts(sample: Path) -> None:
    """All kernels of the trace that are no NCCL's, within the step; their union."""
    report = load(sample, as_recorded=True).report
    assert report.steps
    for path in sorted(sample.glob("rank*.json.gz")):
        trace, rank = json.loads(gzip.decompress(path.read_bytes())), int(re.findall(r"\d+", path.name)[0])
        offset = report.clock.offsets_ns[str(rank)] + int(trace.get("baseTimeNanoseconds", 0))
        kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
        times = [(round(1000 * event["ts"]), round(1000 * event["dur"]), event["name"]) for event in kernels]
        compute = sorted((start + offset, start + offset + ns) for start, ns, name in times if "nccl" not in name)
        for step in report.steps:
            (of_rank,) = (entry for entry in step.ranks if entry.rank == rank)
            assert of_rank.compute_ns is not None
            edges = sorted(
                edge
                for start, end in compute
                if max(start, step.start_ns) < min(end, step.end_ns)
                for edge in ((max(start, step.start_ns), 1), (min(end, step.end_ns), -1))
            )
            depth = counted = 0
            for (at, change), (then, _) in pairwise([*edges, (step.end_ns, 0)]):
                depth += change
                counted += (then - at) * (depth > 0)
            assert of_rank.compute_ns == counted


def test_the_exposed_time_of_collectives_is_what_a_reader_of_its_own_counts() -> None:
    """Expert exchanges over NCCL: the k-th kernel of a group on each of its ranks is one call, which moves data from when all
    have begun; what of that no other kernel overlaps is exposed.
    """
    sample = next(path for path in GPU if path.name == "gpu_nccl_experts_pp2_ep2")
    report = load(sample, as_recorded=True).report
    calls: dict[str, dict[int, list[tuple[int, int]]]] = {}
    compute: dict[int, list[tuple[int, int]]] = {}
    for path in sorted(sample.glob("rank*.json.gz")):
        trace, rank = json.loads(gzip.decompress(path.read_bytes())), int(re.findall(r"\d+", path.name)[0])
        offset = report.clock.offsets_ns[str(rank)] + int(trace["baseTimeNanoseconds"])
        kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
        for event in sorted(kernels, key=lambda event: event["ts"]):
            start = round(1000 * event["ts"]) + offset
            times = (start, start + round(1000 * event["dur"]))
            if event["args"].get("Process Group Description") == "mesh_ep":
                calls.setdefault(event["args"]["Process Group Ranks"], {}).setdefault(rank, []).append(times)
            elif "nccl" not in event["name"]:
                compute.setdefault(rank, []).append(times)
    assert {len(of_ranks) for of_ranks in calls.values()} == {2}
    for step in report.steps:
        for of_ranks in calls.values():
            for rank, own in of_ranks.items():
                begun = [
                    max(starts)
                    for starts in zip(*([start for start, _ in of] for of in of_ranks.values()), strict=True)
                ]
                moving = [(max(all_there, start), end) for all_there, (start, end) in zip(begun, own, strict=True)]
                moving = [times for times in moving if step.start_ns <= times[0] and times[1] <= step.end_ns]
                overlapped = sum(
                    max(0, min(end, kernel_end) - max(start, kernel_start))
                    for start, end in moving
                    for kernel_start, kernel_end in compute[rank]
                )
                (of_rank,) = (entry for entry in step.ranks if entry.rank == rank)
                (exchange,) = (comm for comm in of_rank.comms if comm.axis == "ep")
                assert exchange.count == len(moving) == 10
                assert exchange.exposed_ns == sum(end - start for start, end in moving) - overlapped
