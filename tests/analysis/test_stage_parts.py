"""Compute of the stages, against the figures of an independent reader of kernels and launches."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pptrace.analysis.aligned import StepsOfRank
from pptrace.analysis.findings.verdict import verdict_lines
from pptrace.analysis.part_words import SLOW_RANK_ALIKE, WORDS
from pptrace.analysis.questions import QuestionInputs
from pptrace.analysis.result import Finding, Severity
from pptrace.analysis.stages.answer import Sums, answer, of_rank, same_work, stage_compute, sums_of_run, words_of
from pptrace.analysis.stages.flops import OpSums
from pptrace.analysis.stages.show import stage_tables
from pptrace.analysis.stages.types import StageCompute, StageDifference, StagePart
from pptrace.api.load import load
from pptrace.api.run import Run
from pptrace.model.report_table import Amount
from pptrace.report.charts.stages import stage_work_chart
from pptrace.sizes.flops import op_flops
from pptrace.sizes.gpt_facts import GptFacts
from tests.support.device_oracle import LAUNCHES, _complete_events, _times
from tests.support.kineto import write_changed
from tests.support.programs import SAMPLES

_OP = re.compile(r"pp1:(\d+)([FBIW])\d+ ")
_ENGINE = "autograd::engine::evaluate_function"
Event = dict[str, Any]
_MATMUL = re.compile(r"(?!.*(?:fmha|flash)).*(?:gemm|cutlass|xmma|splitK)")


def compute_of(run: Run) -> StageCompute:
    return run.report.stages


def matmul_of(path: Path) -> Counter[tuple[int, str]]:
    """Time of the multiplying kernels that were launched inside the marked ops of a Kineto file, by stage and kind, ns."""
    ranges, launched, kernels = [], {}, {}
    for event in _complete_events(path):
        correlation = event.get("args", {}).get("correlation")
        if event.get("cat") == "user_annotation" and (match := _OP.match(event["name"])):
            ranges.append((*_times(event), (int(match[1]), match[2])))
        elif event.get("cat") in LAUNCHES:
            launched[correlation] = _times(event)[0]
        elif event.get("cat") == "kernel" and _MATMUL.match(event["name"]):
            kernels[correlation] = _times(event)
    found: Counter[tuple[int, str]] = Counter()
    for start, end, key in ranges:
        found[key] += sum(
            kernels[number][1] - kernels[number][0]
            for number, at in launched.items()
            if start <= at < end and number in kernels
        )
    return found


@pytest.mark.parametrize("name", ["gpu_1f1b_p4", "gpu_1f1b_p2_tp2", "gpu_nccl_1f1b_p4", "gpu_zbv_p2"])
def test_matrix_products_take_what_an_independent_reader_counts(name: str) -> None:
    counted: Counter[tuple[int, str]] = Counter()
    for path in sorted((SAMPLES / name).glob("rank*.json.gz")):
        counted.update(matmul_of(path))
    compute = compute_of(load(SAMPLES / name, as_recorded=True))
    shown = {(ops.stage, ops.kind): sum(p.ns for p in ops.classes if p.name == "matmul") for ops in compute.ops}
    assert shown == {key: counted[key] for key in shown}


def with_modules(events: list[Event]) -> list[Event]:
    """Events of a Kineto file in which every forward runs two layers in turn, and in each a module that is no layer."""
    forwards = [event for event in events if re.match(r"pp1:0F\d ", str(event.get("name")))]
    for event in (event for event in forwards if event.get("cat") == "user_annotation"):
        half = int(event["dur"] * 1000) // 2 / 1000
        of_first = half - 0.01  # floats of so many microseconds are off by a nanosecond
        modules = [
            *(("Stage_0", 0, 2 * half), ("Layer_0", 0, of_first), ("Linear_5", 0, of_first)),
            ("Layer_1", half, half),
        ]
        events += [
            {**event, "cat": "python_function", "name": f"nn.Module: {name}", "ts": event["ts"] + at, "dur": length}
            for name, at, length in modules
        ]
    return events


def kernels_by_layer(events: list[Event]) -> Counter[tuple[str, str]]:
    """Time of kernels in the marked ops of stage 0 by kind and layer, ns: one kernel after the other, by the node that launched
    it and what ran last with that node's sequence number.
    """
    whole = sorted(
        (event for event in events if event.get("ph") == "X"), key=lambda event: (event["ts"], -event["dur"])
    )
    host = [event for event in whole if "stream" not in event.get("args", {})]
    launches = {event["args"]["correlation"]: event for event in host if event.get("cat") in LAUNCHES}
    latest_first = host[::-1]

    def around(inner: Event, start: str) -> Event | None:
        within = (event for event in latest_first if event["tid"] == inner["tid"] and _holds(event, inner))
        return next((event for event in within if event["name"].startswith(start)), None)

    def forward_of(node: Event) -> Event:
        earlier = [event for event in latest_first if event["ts"] < node["ts"]]
        if "AccumulateGrad" in node["name"]:
            nodes = (event for event in earlier if event["name"].startswith(_ENGINE) and event["tid"] == node["tid"])
            node = next(event for event in nodes if "AccumulateGrad" not in event["name"])
        numbered = (
            event
            for event in earlier
            if event.get("args", {}).get("Sequence number") == node["args"]["Sequence number"]
        )
        return next(event for event in numbered if "Backward" not in event["name"])

    found: Counter[tuple[str, str]] = Counter()
    for kernel in (event for event in whole if event.get("cat") == "kernel" and "nccl" not in event["name"]):
        call = launches.get(kernel["args"]["correlation"])
        op = None if call is None else next((e for e in latest_first if _OP.match(e["name"]) and _holds(e, call)), None)
        if call is None or op is None or op["name"][4] != "0":
            continue
        node = around(call, _ENGINE)
        call = call if node is None else forward_of(node)
        layer = around(call, "nn.Module: Layer")
        start, end = _times({name: repr(kernel[name]) for name in ("ts", "dur")})
        found[op["name"][5], "" if layer is None else layer["name"][len("nn.Module: ") :]] += end - start
    return found


def _holds(outer: Event, inner: Event) -> bool:
    return bool(outer["ts"] <= inner["ts"] < outer["ts"] + outer["dur"])


def test_parts_of_the_model_are_the_modules_below_the_outermost_in_backwards_too(tmp_path: Path) -> None:
    expected: Counter[tuple[str, str]] = Counter()

    def change(rank: int, content: dict[str, Any]) -> None:
        content["traceEvents"] = with_modules(content["traceEvents"])
        if rank == 0:
            expected.update(kernels_by_layer(content["traceEvents"]))

    compute = compute_of(load(write_changed(SAMPLES / "gpu_1f1b_p4", tmp_path, change), as_recorded=True))
    of_stages = {(ops.stage, ops.kind): {part.name: part.ns for part in ops.parts} for ops in compute.ops}
    for kind in "FB":
        found = {name: ns for name, ns in of_stages.pop((0, kind)).items() if ns}
        assert found == {name: ns for (of_kind, name), ns in expected.items() if of_kind == kind}
        assert {"Layer_0", "Layer_1"} <= set(found)
    assert not any(of_stages.values())


def test_the_finding_of_a_heavy_stage_says_of_which_work_it_has_more() -> None:
    run = load(SAMPLES / "uneven_p4", as_recorded=True)
    (finding,) = (one for one in run.report.findings if one.evidence.get("cause") == "imbalance")
    stage = finding.evidence["where"]["stage"]
    longest = max((one for one in compute_of(run).differences if one.stage == stage), key=lambda one: one.more_ns)
    assert finding.detail.startswith(words_of(longest))
    bare = replace(run.report, findings=(replace(finding, detail="look"),))
    analysis: Any = run.analysis
    (again,) = answer(QuestionInputs(bare, sums_of(run), analysis))["findings"]
    assert again.detail.endswith(" ms. Look")
    assert answer(QuestionInputs(bare, {}, analysis)) == {}


def sums_of(run: Run) -> dict[int, Sums]:
    """Sums of each rank, as its trace tells them of its ops."""
    steps = StepsOfRank([step.step for step in run.report.steps])
    sums = {rank: of_rank(rank, steps, run.analysis.data) for rank in run.analysis.data.lanes}
    return {rank: of for rank, of in sums.items() if of is not None}


def slower(sums: Sums) -> Sums:
    """The same ops where each kernel takes three times as long."""

    def thrice(entries: dict[str, int]) -> dict[str, int]:
        return {name: 3 * ns for name, ns in entries.items()}

    return {
        key: replace(one, compute=3 * one.compute, classes=thrice(one.classes), parts=thrice(one.parts))
        for key, one in sums.items()
    }


@pytest.mark.parametrize("knows_layers", [True, False])
def test_a_stage_that_takes_longer_for_as_much_is_a_slow_rank_and_one_with_more_layers_is_none(
    knows_layers: bool,
) -> None:
    run = load(SAMPLES / "gpu_nccl_1f1b_p4", as_recorded=True)
    evidence = {"cause": "imbalance", "where": {"stage": 2}, "gain_if_spread_ns": 10_000_000}
    finding = Finding(
        Severity.WARNING,
        "Imbalance",
        f"{WORDS['imbalance'].look}{SLOW_RANK_ALIKE}",
        30_000_000,
        evidence,
        20_000_000,
        40_000_000,
    )
    analysis: Any = run.analysis
    if not knows_layers:
        analysis = dataclasses.replace(analysis, facts={})
    bare, sums = replace(run.report, findings=(finding,)), sums_of(run)
    inputs = QuestionInputs(bare, {rank: slower(of) if rank == 2 else of for rank, of in sums.items()}, analysis)
    report = replace(bare, **answer(inputs))
    (found,) = report.findings
    assert (
        set(bare.missing_evidence) - set(report.missing_evidence)
        == {one for one in bare.missing_evidence if "a slow worker cannot be distinguished" in one.reason}
        != set()
    )
    than, of = found.evidence["same_work_as"], "layers (1)" if knows_layers else "kernels or operators of each kind"
    assert than in (0, 1, 3) if knows_layers else than == 1
    assert found.evidence["same_work_ratio"] == pytest.approx(3, rel=0.2)
    assert f"times as long as stage {than} for as many {of}" in found.detail
    assert found.detail.endswith(
        "its rank is slow, or what it computes is larger; look at that before layers are moved"
    )
    assert "move layers away" not in found.detail
    first = verdict_lines(report).first
    assert first.startswith(
        "Look at the host, clocks and neighbours of stage 2's rank, before layers are moved: it takes"
    )
    assert "saves 30.0 ms" in first, "what it would be at the others' cost, not spread"
    if not knows_layers:
        more = {
            key: replace(one, pieces={name: 3 * n for name, n in one.pieces.items()}) for key, one in sums[2].items()
        }
        (heavy,) = answer(replace(inputs, of_ranks={**sums, 2: slower(more)}))["findings"]
        assert heavy.detail.endswith(SLOW_RANK_ALIKE)
        assert "same_work" not in heavy.evidence


def test_a_slow_rank_beside_a_stage_that_is_as_heavy_is_named() -> None:
    run = load(SAMPLES / "gpu_1f1b_p4", as_recorded=True)
    look = WORDS["imbalance"].look
    finding = Finding(Severity.WARNING, "Imbalance", look, 9, {"cause": "imbalance", "where": {}}, 4, 12)
    bare, sums = replace(run.report, findings=(finding,)), sums_of(run)
    inputs = QuestionInputs(bare, {rank: slower(of) if rank == 2 else of for rank, of in sums.items()}, run.analysis)
    (found,) = answer(inputs)["findings"]
    assert found.evidence["same_work_stages"] == [2]
    assert found.detail.startswith(f"{look}. Stage 2: it takes ")
    assert found.detail.endswith("for as many layers (1): its rank may be slow")
    (other,) = answer(replace(inputs, of_ranks=sums))["findings"]
    assert other == finding, "no stage takes longer for as much"


def test_of_two_chains_of_stages_each_has_as_many_kernels_as_its_mirror() -> None:
    run = load(SAMPLES / "dualpipe_p4", as_recorded=True)
    finding = Finding(Severity.WARNING, "Imbalance", "", 9, {"cause": "imbalance", "where": {"stage": 7}}, 4, 12)
    inputs = QuestionInputs(replace(run.report, findings=(finding,)), sums_of(run), run.analysis)
    (found,) = answer(inputs)["findings"]
    assert "same_work" not in found.evidence


def difference(stage: int, **parts: int) -> StageDifference:
    named = tuple(StagePart(name, ns) for name, ns in parts.items())
    return StageDifference("F", stage, 1, sum(parts.values()), (), named)


def test_a_difference_of_nanoseconds_is_in_words_no_zero_with_a_sign() -> None:
    one = difference(2, head=4_100_000, loss=900_000, layers=-200, norm=-32)
    assert words_of(one) == (
        "its F takes 5.00 ms more than that of stage 1: head +4.10, loss +0.90, layers -0.0002, all else -0.000032 ms"
    )


@pytest.mark.parametrize(
    ("layers", "one", "is_same"),
    [
        ((2, 2, 2, 2), difference(2, layers=90, head=10), True),
        ((2, 2, 2, 2), difference(3, layers=90, head=10), True),
        ((2, 2, 2, 2), difference(3, layers=70, head=30), False),
        ((2, 2, 3, 1), difference(2, layers=100), False),
        ((2, 3, 2, 1), difference(2, layers=100), True),
    ],
)
def test_layers_of_a_stage_take_longer_where_it_has_no_more_and_it_is_no_end(
    layers: tuple[int, ...], one: StageDifference, is_same: bool
) -> None:
    fast, slow = OpSums(2, 400), OpSums(1, 300)
    found = same_work([one], {(1, "F"): fast, (one.stage, "F"): slow}, layers)
    assert (found is not None) == is_same
    assert found is None or found["same_work_ratio"] == 1.5
    assert same_work([one], {(1, "F"): fast, (one.stage, "F"): replace(slow, compute=215)}, layers) is None


def test_no_ops_that_are_known_tell_nothing() -> None:
    assert stage_compute(sums_of_run([{}, {}])) is None


def test_tables_have_a_row_for_each_stage_and_kind_and_tell_the_differences() -> None:
    compute = compute_of(load(SAMPLES / "uneven_p4", as_recorded=True))
    table, of_parts = stage_tables(compute, Amount.WHOLE)
    assert {row[:2] for row in of_parts.rows} == {(str(ops.stage), ops.kind) for ops in compute.ops if ops.parts}
    assert [row[:3] for row in table.rows] == [(str(ops.stage), ops.kind, str(ops.count)) for ops in compute.ops]
    assert sum("more than that of stage" in note for note in table.notes) == len(compute.differences)


def test_the_chart_stacks_the_kinds_of_work_to_the_mean_op() -> None:
    compute = compute_of(load(SAMPLES / "1f1b_p4", as_recorded=True))
    figure = stage_work_chart(compute)
    heights = [sum(trace.y[index] for trace in figure.data) for index in range(len(compute.ops))]
    assert heights == pytest.approx([ops.compute_ns / ops.count / 1e6 for ops in compute.ops])
    many = replace(compute, ops=compute.ops * 10)
    assert stage_work_chart(many) is None


@pytest.mark.parametrize("name", ["gpu_1f1b_p2_tp2", "gpu_zbv_p2"])
def test_flops_of_kernels_are_those_of_the_sizes_of_the_model(name: str) -> None:
    """But for attention's backward: its kernel computes the scores again, one product of five."""
    run = load(SAMPLES / name, as_recorded=True)
    facts, plan = next(iter(run.analysis.facts.values())), run.analysis.schedule.plan
    assert plan is not None
    model = {field.name: facts["model"][field.name] for field in fields(GptFacts) if field.name in facts["model"]}
    sizes = GptFacts(**{name: tuple(value) if isinstance(value, list) else value for name, value in model.items()})
    for ops in compute_of(run).ops:
        counted = {part.name: part.flops for part in ops.classes if part.flops}
        expected = op_flops(sizes, plan.model_stage(ops.stage), facts["mesh"]["tp"], facts["mesh"]["cp"])[ops.kind]
        of_attention = expected["attention"] * 5 // 4 if ops.kind in "BI" else expected["attention"]
        assert counted["matmul"] == ops.count * expected["matmul"]
        assert counted.get("attention", 0) == ops.count * of_attention
        assert (ops.flops, ops.flops_from) == (sum(filter(None, counted.values())), "operators")
