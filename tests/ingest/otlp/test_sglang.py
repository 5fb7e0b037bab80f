"""Spans of SGLang's requests: a batch's forward on a stage is one op, whatever number of requests it serves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import pptrace
from pptrace.analysis.findings.verdict import verdict_lines
from pptrace.ingest.otlp.reader import read_otlp
from tests.support.extent import by_turns

START = 1_700_000_000_000_000_000
MS = 1_000_000


class Spans:
    """An export of OTLP, with a number for each span."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []

    def add(self, name: str, trace: str, parent: str, start: int, end: int, **attributes: int | str) -> str:
        kinds = {int: "intValue", str: "stringValue"}
        of_span = [{"key": key, "value": {kinds[type(value)]: value}} for key, value in attributes.items()]
        self.spans.append(
            {
                "traceId": trace,
                "spanId": f"{len(self.spans) + 1:016x}",
                "parentSpanId": parent,
                "name": name,
                "startTimeUnixNano": str(START + start),
                "endTimeUnixNano": str(START + end),
                "attributes": of_span,
            }
        )
        return str(self.spans[-1]["spanId"])

    def write(self, path: Path) -> Path:
        resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "sglang"}}]}
        document = {"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": self.spans}]}]}
        path.write_text(json.dumps(document))
        return path


def serve(
    batches: list[list[str]],
    tp: int = 1,
    dp: int = 1,
    forward: int = 8,
    period: int = 10,
    gap: int = 0,
    lost: tuple[int, int] | None = None,
) -> Spans:
    """Batches of requests on three stages, one a ``period``, the second half of them ``gap`` later; all times in ms. ``lost``:
    (batch, stage) of a forward without spans.
    """
    spans = Spans()
    requests = sorted({request for batch in batches for request in batch})
    for replica in range(dp):
        for request in requests:
            trace = f"{request}{replica:02d}".rjust(32, "0")
            root = spans.add(f" Req {request}", trace, "", 0, 900 * MS, rid=request)
            for stage, rank in ((stage, rank) for stage in range(3) for rank in range(tp)):
                name = f"Scheduler [TP {rank}] [PP {stage}] (host:ab12cd34 | pid:{100 + 10 * stage + rank})"
                ranks = {"tp_rank": rank, "pp_rank": stage} | ({"dp_rank": replica} if dp > 1 else {})
                thread = spans.add(name, trace, root, 0, 800 * MS, **ranks, pid=100, thread_label="Scheduler")
                prefill = spans.add("prefill_forward", trace, thread, 0, 700 * MS)
                for number, batch in enumerate(batches):
                    if request in batch and (number, stage) != lost:
                        late = gap if 2 * number >= len(batches) else 0
                        begin = (period * (number + stage) + late + rank) * MS
                        spans.add("pp_forward", trace, prefill, begin, begin + forward * MS)
    return spans


BATCHES = [["a", "b"], ["c"], ["a", "b"], ["c"], ["a", "d"], ["c"]]


def test_a_batch_is_one_op_on_each_stage(tmp_path: Path) -> None:
    report = pptrace.load(serve(BATCHES).write(tmp_path / "spans.json")).report
    (step,) = report.steps
    assert step.span_ns == (10 * (len(BATCHES) - 1 + 2) + 8) * MS
    for rank in step.ranks:
        assert rank.compute_ns == len(BATCHES) * 8 * MS
        assert rank.bubble_ns == step.span_ns - rank.compute_ns
    assert (report.framework, report.mesh.pp) == ("sglang", 3)
    assert any("forwards alone" in line for line in report.warnings)
    assert verdict_lines(report).first == "Nothing stands out."


def test_the_same_requests_again_are_the_next_batch(tmp_path: Path) -> None:
    traces = read_otlp(serve(BATCHES, tp=2).write(tmp_path / "spans.json"))
    assert [trace.rank for trace in traces] == [0, 1, 2, 3, 4, 5]
    for trace in traces:
        assert trace.ops["microbatch"].tolist() == list(range(len(BATCHES)))
        assert set(trace.ops["stage"]) == {trace.rank // 2}  # tensor-parallel ranks are neighbours
        assert trace.metadata["pp_ranks"] == [trace.rank % 2, trace.rank % 2 + 2, trace.rank % 2 + 4]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("batch", "stage"), by_turns(range(6), range(3)))
def test_a_batch_that_a_stage_lost_moves_no_other_though_its_requests_recur(
    batch: int, stage: int, tp: int, tmp_path: Path
) -> None:
    spans = serve(BATCHES, tp=tp)
    whole = read_otlp(spans.write(tmp_path / "spans.json"))
    traces = read_otlp(serve(BATCHES, tp=tp, lost=(batch, stage)).write(tmp_path / "lost.json"))
    for trace, before in zip(traces, whole, strict=True):
        expected = before.ops[(before.ops["stage"] != stage) | (before.ops["microbatch"] != batch)]
        for column in ("microbatch", "start_ns"):
            assert trace.ops[column].tolist() == expected[column].tolist()


@pytest.mark.parametrize("period", [8, 35])
def test_requests_that_are_served_alone_are_followed_past_lost_forwards_and_spans(period: int, tmp_path: Path) -> None:
    """The same two requests in every batch, of which the middle stage lost one, and the last one a span of b."""
    spans = serve([["a", "b"]] * 8, period=period, lost=(2, 1))
    of_b = [span for span in spans.spans if span["name"] == "pp_forward" and span["traceId"].endswith("b00")]
    spans.spans.remove(of_b[-3])
    first, middle, last = read_otlp(spans.write(tmp_path / "spans.json"))
    assert first.ops["microbatch"].tolist() == last.ops["microbatch"].tolist() == list(range(8))
    assert middle.ops["microbatch"].tolist() == [0, 1, *range(3, 8)]


def test_an_empty_pipeline_ends_a_step(tmp_path: Path) -> None:
    report = pptrace.load(serve(BATCHES, dp=2, gap=200).write(tmp_path / "spans.json")).report
    assert [step.span_ns for step in report.steps] == [(10 * 4 + 8) * MS] * 2
    assert report.mesh.dp == 2
    assert all(rank.compute_ns == 24 * MS for step in report.steps for rank in step.ranks)


def test_a_forward_without_its_thread_is_left_out_and_counted(tmp_path: Path) -> None:
    spans = serve(BATCHES)
    spans.add("pp_forward", "f" * 32, "9" * 16, 5 * MS, 6 * MS)
    thread = spans.add("Scheduler (host:ab12cd34 | pid:99)", "f" * 32, "", 0, 9 * MS, pp_rank=10**30)
    spans.add("pp_forward", "f" * 32, thread, 5 * MS, 6 * MS)
    traces = read_otlp(spans.write(tmp_path / "spans.json"))
    assert traces[0].warnings == ("left out 2 forwards whose thread is not in the file",)
    assert len(traces[0].ops) == len(BATCHES)


@pytest.mark.parametrize("end", ["0", str(START - 1)])
def test_forwards_that_never_ended_are_left_out_and_counted(tmp_path: Path, end: str) -> None:
    spans = serve(BATCHES)
    whole = read_otlp(spans.write(tmp_path / "whole.json"))
    forwards = [span for span in spans.spans if span["name"] == "pp_forward" and span["traceId"].endswith("b00")]
    for span in (*forwards, spans.spans[-1]):
        span["endTimeUnixNano"] = end
    traces = read_otlp(spans.write(tmp_path / "spans.json"))
    assert traces[0].warnings == (f"left out {len(forwards) + 1} spans without a name or with impossible times",)
    kept = [len(trace.ops) for trace in traces]  # by the other request of the batch
    assert kept == [len(trace.ops) for trace in whole]


@pytest.mark.parametrize("name", ["prefill_forward", "decode_loop"])
def test_spans_of_one_stage_are_no_pipeline(tmp_path: Path, name: str) -> None:
    spans = Spans()
    thread = spans.add("Scheduler [TP 0] (host:ab12cd34 | pid:7)", "1" * 32, "", 0, 9 * MS, tp_rank=0)
    spans.add(name, "1" * 32, thread, MS, 5 * MS)
    (trace,) = read_otlp(spans.write(tmp_path / "spans.json"))
    assert trace.framework != "sglang"
