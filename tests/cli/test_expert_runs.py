"""A recorded run with experts: its calls along ep meet their counterparts, and together they carry what the routes come to."""

from __future__ import annotations

from pathlib import Path

import pytest

from pptrace.analysis.report import Report
from pptrace.ingest import open_inputs
from pptrace.marks import CollectiveMark, parse_mark
from pptrace.workflow.load import load
from tests.support.programs import EXAMPLE, pptrace
from tests.support.read import read_traces

pytestmark = pytest.mark.processes
LAYERS, HIDDEN, SEQUENCE, MICROBATCHES, EXPERTS, TOP_K = 2, 16, 16, 4, 4, 2
SCRIPT = (
    *("--layers", str(LAYERS), "--hidden", str(HIDDEN), "--heads", "2", "--seq", str(SEQUENCE), "--steps", "3"),
    *("--microbatch-size", "1", "--microbatches", str(MICROBATCHES), "--pp", "2", "--dp", "2", "--ep", "2"),
    *("--experts", str(EXPERTS), "--top-k", str(TOP_K), "--clip-grad", "1", "--aux-loss", "0.01"),
)


def test_calls_along_ep_are_matched_and_carry_all_routes(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    ended = pptrace("run", "-n", "4", "--steps", "1:3", "-o", folder, EXAMPLE, *SCRIPT, forked=True)
    assert ended.code == 0, ended.err
    report = load([folder]).report
    assert (report.mesh.ep, report.mesh.dp, report.mesh.pp) == (2, 2, 2)
    for step in report.steps:
        calls = [comm for rank in step.ranks for comm in rank.comms if comm.axis == "ep"]
        assert [(comm.kind, comm.count) for comm in calls] == [("all_to_all", 5 * MICROBATCHES)] * 4
        for comm in calls:
            assert comm.wait_ns is not None
            assert comm.exposed_ns is not None
            assert comm.predicted_bytes == comm.bytes
        routes = LAYERS * MICROBATCHES * 2 * SEQUENCE * TOP_K  # of both replicas
        counts = LAYERS * MICROBATCHES * 2 * EXPERTS * 8
        assert sum(comm.bytes for comm in calls) == 4 * routes * HIDDEN * 4 + counts
    check_rows(folder)
    check_loads(report)


def check_loads(report: Report) -> None:
    """Every route is counted once, and what ranks hand in is what their counts come to."""
    assert (report.experts.num_experts, report.experts.top_k, report.experts.reasons) == (EXPERTS, TOP_K, ())
    of_layer = 2 * MICROBATCHES * 2 * SEQUENCE * TOP_K  # steps, replicas
    assert [layer.layer for layer in report.experts.layers] == list(range(LAYERS))
    assert [sum(layer.routes or ()) for layer in report.experts.layers] == [of_layer] * LAYERS
    assert [layer.dropped for layer in report.experts.layers] == [0] * LAYERS
    assert sum(rank.rows or 0 for rank in report.experts.ranks) == LAYERS * of_layer
    assert [(rank.first_expert, rank.num_experts) for rank in report.experts.ranks] == [(0, 2), (2, 2)] * 2
    for rank in report.experts.ranks:
        assert rank.bytes == rank.predicted_bytes
        assert rank.bytes is not None
    assert report.experts.routing is not None
    assert (report.experts.traffic.known_from, report.experts.traffic.num_rows) == ("splits", LAYERS * of_layer)
    assert report.experts.traffic.away_bytes == report.experts.traffic.away_rows * HIDDEN * 4
    waits = [step.wait_ns or 0 for step in report.experts.steps]
    assert len(waits) == 2
    assert sum(waits) == sum(call.wait_ns or 0 for call in report.experts.calls) > 0


def check_rows(folder: Path) -> None:
    """Rows that a rank's marks send to another are those that the other's marks say that it gets."""
    traces = read_traces(open_inputs([folder]), 1, None).traces
    seen = {}
    for trace in traces:
        events = trace.events
        names = [events.names[index] for index in events.name_id[events.start_ns.argsort(kind="stable")].tolist()]
        marks = [mark for name in names if isinstance(mark := parse_mark(name), CollectiveMark)]
        seen[trace.rank] = [mark.uneven for mark in marks if mark.uneven is not None]
    for first, second in ((0, 1), (2, 3)):
        assert len(seen[first]) == len(seen[second]) == 2 * 4 * MICROBATCHES
        for ours, theirs in zip(seen[first], seen[second], strict=True):
            assert ours.sent_rows[1] == theirs.received_rows[0]
            assert ours.received_rows[1] == theirs.sent_rows[0]
