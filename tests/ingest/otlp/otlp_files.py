"""Runs on paper → OpenTelemetry spans as Megatron-LM makes them, in the forms in which exporters write them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pptrace.schedule.actions import Kind
from tests.support.synthetic import START, PaperRun, groups_of

PAUSE = 1000
OPS = {Kind.F: "forward", Kind.B: "backward"}
MESSAGES = {Kind.SEND_F: "send_forward", Kind.SEND_B: "send_backward"}
MESSAGES |= {Kind.RECV_F: "recv_forward", Kind.RECV_B: "recv_backward"}


@dataclass(frozen=True)
class Span:
    name: str
    start: int
    end: int
    attributes: Mapping[str, Any] = field(default_factory=dict)


def step_begins(run: PaperRun, number: int) -> int:
    return START + number * (run.end + PAUSE) + 50


def megatron_spans(run: PaperRun, rank: int, steps: int, groups: Sequence[str] = ("all",)) -> list[Span]:
    """The spans of a pipeline rank. Messages that are posted together have none, as in Megatron's steady phase."""
    spans: list[Span] = []
    for number in range(steps):
        at = step_begins(run, number)
        spans += _step(run, rank, at, number, lambda group: "all" in groups or group in groups)
    return spans


def _step(run: PaperRun, rank: int, at: int, number: int, wanted: Any) -> Iterator[Span]:
    if wanted("step"):
        yield Span("megatron.train.iteration", at - 30, at + run.end + 200, {"megatron.iteration": 10 + number})
    if wanted("forward_backward"):
        count = {"num_microbatches": run.plan.num_microbatches}
        yield Span("megatron.train.iteration.forward_backward", at - 20, at + run.end + 20, count)
    for group in groups_of(run.ranks[rank]):
        done = group[0]
        if done.action.kind in OPS and wanted("microbatch"):
            yield Span(f"megatron.microbatch.{OPS[done.action.kind]}", at + done.start, at + done.end)
            if wanted("layer"):
                yield Span("megatron.layer.forward", at + done.start + 1, at + done.end - 1)
        elif done.action.kind in MESSAGES and len(group) == 1 and wanted("communication"):
            yield Span(f"megatron.p2p.{MESSAGES[done.action.kind]}", at + done.start, at + done.end)
    if wanted("communication"):
        yield from _of_no_neighbour(run, rank, at)
        yield Span("megatron.grad_sync.start", at + run.end + 30, at + run.end + 40)
        yield Span("megatron.grad_sync.finish", at + run.end + 40, at + run.end + 50)
    if wanted("optimizer"):
        yield Span("megatron.train.iteration.optimizer", at + run.end + 60, at + run.end + 120)


def _of_no_neighbour(run: PaperRun, rank: int, at: int) -> Iterator[Span]:
    """The functions are called at the ends of the pipeline as well, where nothing moves."""
    stages = {0: ("recv_forward", "send_backward"), run.plan.pp - 1: ("send_forward", "recv_backward")}
    if rank not in stages or run.plan.num_chunks > 1:
        return
    for done in run.computes(rank):
        for name in stages[rank]:
            if name.endswith("forward") == (done.action.kind is Kind.F):
                moment = at + (done.start - 1 if name.startswith("recv") else done.end)
                yield Span(f"megatron.p2p.{name}", moment, moment + (done.start > 0))


def resource(rank: int, pp: int, *, tp: int = 1, dp: int = 1, host: str = "node-a") -> dict[str, Any]:
    """Attributes that NeMo Lens gives a process."""
    return {
        "service.name": "megatron-lm",
        "service.instance.id": f"run-1-rank{rank}",
        "dl.rank": rank,
        "dl.world_size": pp * tp * dp,
        "nemo.run.id": "run-1",
        "dl.local_rank": rank,
        "dl.pipeline_parallel.size": pp,
        "dl.tensor_parallel.size": tp,
        "dl.data_parallel.size": dp,
        "host.name": host,
        "process.pid": 4000 + rank,
    }


def document(spans: Sequence[Span], of: Mapping[str, Any], *, text_numbers: bool = True) -> dict[str, Any]:
    """One process's spans as OTLP."""
    number = str if text_numbers else int
    rows = [
        {
            "traceId": f"{1:032x}",
            "spanId": f"{index:016x}",
            "parentSpanId": "",
            "flags": 256,
            "name": span.name,
            "kind": 1,
            "startTimeUnixNano": number(span.start),
            "endTimeUnixNano": number(span.end),
            "attributes": _attributes(span.attributes),
            "status": {},
        }
        for index, span in enumerate(spans)
    ]
    scope = {"scope": {"name": "nemo.lens"}, "spans": rows}
    return {"resourceSpans": [{"resource": {"attributes": _attributes(of)}, "scopeSpans": [scope]}]}


def _attributes(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    def value(own: Any) -> dict[str, Any]:
        if isinstance(own, bool):
            return {"boolValue": own}
        return {"intValue": str(own)} if isinstance(own, int) else {"stringValue": str(own)}

    return [{"key": key, "value": value(own)} for key, own in given.items()]


def printed(spans: Sequence[Span], of: Mapping[str, Any]) -> str:
    """The same as the SDK's ConsoleSpanExporter prints it; its times have microseconds."""
    return "".join(
        json.dumps(
            {
                "name": span.name,
                "context": {"trace_id": f"0x{1:032x}", "span_id": f"0x{index:016x}", "trace_state": "[]"},
                "kind": "SpanKind.INTERNAL",
                "parent_id": None,
                "start_time": _iso(span.start),
                "end_time": _iso(span.end),
                "status": {"status_code": "UNSET"},
                "attributes": dict(span.attributes),
                "events": [],
                "links": [],
                "resource": {"attributes": dict(of), "schema_url": ""},
            },
            indent=4,
        )
        + "\n"
        for index, span in enumerate(spans)
    )


def _iso(ns: int) -> str:
    moment = datetime.fromtimestamp(ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{moment}.{ns // 1000 % 10**6:06d}Z"


def write_lines(path: Path, documents: Sequence[Mapping[str, Any]]) -> Path:
    """Write them as the collector's file exporter does."""
    text = "".join(json.dumps(one, separators=(",", ":")) + "\n" for one in documents).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path
