"""A recorded run of the example: what every rank communicated is what its sizes and options come to, to the byte."""

from __future__ import annotations

import io
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

import pptrace as pptrace_api
from pptrace.analysis.report import Report
from pptrace.ingest import open_inputs
from pptrace.report.text import print_report
from pptrace.report.to_json import report_object
from pptrace.workflow.load import load
from tests.support.analysed import analyse
from tests.support.programs import EXAMPLE, SAMPLES, pptrace, sizes
from tests.support.read import read_traces

_TINY = sizes(layers=2, hidden=16, heads=4, seq=16, microbatches=4)
_PARALLEL = ("--pp", "2", "--tp", "2", "--sequence-parallel", "--tied", "--clip-grad", "1", "--dropout", "0.1")
AXES_AND_KINDS = {
    ("pp", "send"),
    ("pp", "recv"),
    ("pp", "all_reduce"),
    ("tp", "all_gather"),
    ("tp", "all_reduce"),
    ("tp", "broadcast"),
    ("tp", "reduce_scatter"),
    ("embd", "all_reduce"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("volume") / "run"
    script = (EXAMPLE, "--steps", "4", *_TINY, *_PARALLEL)
    ended = pptrace("run", "-n", "4", "--steps", "1:3", "-o", folder, *script, forked=True)
    assert ended.code == 0, ended.err
    assert "bytes: predicted from the model's sizes and options = measured, in all 32 rows" in ended.out
    return folder


def test_what_is_estimated_before_the_run_is_what_it_sends(run: Path) -> None:
    sizes = {"layers": 2, "hidden": 16, "heads": 4, "sequence": 16, "vocabulary": 256, "number_bytes": 4}
    mesh = {"pp": 2, "tp": 2, "sequence_parallel": True, "tied": True}
    sent = pptrace_api.estimate("1f1b", microbatches=4, **sizes, **mesh).communication
    analysis = load([run])
    for step in analysis.report.steps:
        for rank in step.ranks:
            of_stage = sent[sent["rank"] == rank.rank // 2]
            expected = {(row.axis, row.kind): row.bytes for row in of_stage.itertuples()}
            clipping = {("tp", "all_reduce"): 8, ("pp", "all_reduce"): 8}  # the norm of the gradient, one number each
            measured = {(comm.axis, comm.kind): comm.bytes for comm in rank.comms}
            assert measured == {key: expected.get(key, 0) + clipping.get(key, 0) for key in measured}
            assert measured.keys() == expected.keys() | clipping.keys()


def comms_of(report: Report) -> list[dict[str, Any]]:
    steps = report_object(report)["steps"]
    return [comm for step in steps for rank in step["ranks"] for comm in rank["comms"]]


def printed(report: Report) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_report(report, console)
    return console.file.getvalue()


def test_predicted_bytes_are_the_measured_bytes(run: Path) -> None:
    report = load([run]).report
    assert [step.step for step in report.steps] == [1, 2]
    for step in report.steps:
        for rank in step.ranks:
            assert {(comm.axis, comm.kind) for comm in rank.comms} == AXES_AND_KINDS
    for comm in comms_of(report):
        assert comm["predicted_bytes"] == comm["bytes"] > 0


def predicting(run: Path, change: Callable[[dict[str, dict[str, int]]], object]) -> Report:
    """The report of the run if it had predicted other bytes, by axis and kind."""
    traces = read_traces(open_inputs([run]), 1, None).traces
    changed = []
    for trace in traces:
        metadata = deepcopy(dict(trace.metadata))
        for steps in metadata["predicted"]["communication"]:
            change(steps["bytes"])
        changed.append(replace(trace, metadata=metadata))
    return analyse(changed).report


def test_a_difference_is_named(run: Path) -> None:
    def more(num_bytes: dict[str, dict[str, int]]) -> None:
        num_bytes["tp"] = {kind: 2 * number for kind, number in num_bytes["tp"].items()}

    text = printed(predicting(run, more))
    assert "bytes: predicted from the model's sizes and options ≠ measured in 16 of 32 rows: " in text
    assert "; and 12 more" in text


def test_calls_that_did_not_happen_and_calls_that_nobody_foresaw_are_rows(run: Path) -> None:
    foreseen = comms_of(predicting(run, lambda num_bytes: num_bytes["tp"].update(send=3)))
    absent = [comm for comm in foreseen if comm["count"] == 0]
    assert {(comm["axis"], comm["kind"]) for comm in absent} == {("tp", "send")}
    assert all(comm["bytes"] == 0 and comm["predicted_bytes"] == 3 and comm["busbw_gbps"] is None for comm in absent)
    fewer = comms_of(predicting(run, lambda num_bytes: num_bytes["tp"].pop("all_gather")))
    unforeseen = [comm for comm in fewer if comm["predicted_bytes"] == 0]
    assert {(comm["axis"], comm["kind"]) for comm in unforeseen} == {("tp", "all_gather")}


def test_a_recording_without_predictions_is_reported_without_them_and_says_why(run: Path) -> None:
    traces = read_traces(open_inputs([run]), 1, None).traces
    older = [{name: fact for name, fact in trace.metadata.items() if name != "predicted"} for trace in traces]
    report = analyse([replace(trace, metadata=facts) for trace, facts in zip(traces, older, strict=True)]).report
    assert {comm["predicted_bytes"] for comm in comms_of(report)} == {None}
    assert "bytes: predicted" not in printed(report)
    assert all(rank.predicted is None for rank in report.memory.ranks)
    assert any("record the run anew" in reason for reason in report.memory.reasons)


def test_the_bytes_of_a_sample_are_the_predicted_ones() -> None:
    comms = comms_of(load([SAMPLES / "1f1b_p4"]).report)
    assert {(comm["axis"], comm["kind"]) for comm in comms} >= {("pp", "send"), ("pp", "recv")}
    assert [comm["bytes"] for comm in comms] == [comm["predicted_bytes"] for comm in comms]
