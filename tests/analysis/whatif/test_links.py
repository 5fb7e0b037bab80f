"""Messages of predictions: a fitted latency stays, what is left changes with bandwidth and size; runs on paper are the answer."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pptrace.analysis.whatif.change import Change
from pptrace.analysis.whatif.study import Study, study_run
from pptrace.api.whatif import predict_changes
from pptrace.api.wishes import Wishes
from pptrace.errors import PptraceError
from pptrace.schedule.registry import build
from pptrace.workflow.analyse import Analysis
from tests.support.analysed import analyse
from tests.support.synthetic import record, run_on_paper

PLAN = build("1f1b", 3, 6)
LATENCY, OF_BYTES = 20_000, 60_000


def cost(size: float = 1.0) -> dict[str, int]:
    return {"F": round(100_000 * size), "B": round(200_000 * size)}


@pytest.fixture(scope="module")
def measured() -> Analysis:
    return analyse(record(PLAN, lambda action: cost()[action.kind], LATENCY + OF_BYTES, steps=6).traces())


def on_paper(transfer: int, size: float = 1.0) -> int:
    begin, end = run_on_paper(PLAN, lambda action: cost(size)[action.kind], transfer).window
    return end - begin


def study_of(analysis: Analysis, latency: int | None) -> Study:
    links = tuple(replace(link, latency_ns=latency) for link in analysis.report.links)
    assert len(links) == 4
    report = replace(analysis.report, links=links)
    return study_run(report, analysis.costs, analysis.schedule, None)


@pytest.mark.parametrize("speed", [0.5, 2.0, 6.0])
def test_faster_links_leave_the_latency_as_it_was(measured: Analysis, speed: float) -> None:
    study = study_of(measured, LATENCY)
    assert study.baseline.error == 0
    scenario = study.scenario(Change(link_speed=speed), "links")
    assert scenario.span_ns == pytest.approx(on_paper(round(LATENCY + OF_BYTES / speed)), abs=5)
    assert scenario.note == "messages keep the latency that was fitted to their links"


def test_links_that_cost_a_pipeline_14_percent_of_its_throughput_can_be_asked_for(measured: Analysis) -> None:
    """A pipeline across nodes loses 14 % of its throughput, as one of the documents has it."""
    transfer = LATENCY + OF_BYTES
    slow = next(ns for ns in range(transfer, 10 * transfer, 100) if on_paper(transfer) / on_paper(ns) <= 1 - 0.14)
    scenario = study_of(measured, None).scenario(Change(link_speed=transfer / slow), "links")
    assert on_paper(transfer) / scenario.span_ns == pytest.approx(1 - 0.14, abs=1e-3)


def test_without_a_fit_all_of_a_message_is_divided_and_the_interval_has_none_of_it(measured: Analysis) -> None:
    scenario = study_of(measured, None).scenario(Change(link_speed=4.0), "links")
    assert scenario.span_ns == pytest.approx(on_paper((LATENCY + OF_BYTES) // 4), abs=5)
    assert scenario.low_ns <= scenario.span_ns < on_paper(LATENCY + OF_BYTES) <= scenario.high_ns
    assert "none could be fitted" in scenario.note
    fitted = study_of(measured, LATENCY).scenario(Change(link_speed=4.0), "links")
    assert fitted.high_ns < on_paper(LATENCY + OF_BYTES)


def test_latencies_of_another_run_count_where_this_one_has_none(measured: Analysis) -> None:
    of_pipeline = [replace(link, latency_ns=LATENCY) for link in measured.report.links]
    elsewhere = tuple(replace(link, axis="unknown", latency_ns=10**9, count=10**6) for link in of_pipeline)
    asked = Wishes(link_speed=2.0, links=(*of_pipeline, *elsewhere))
    scenario = predict_changes(measured, asked).result.scenarios[0]
    assert scenario.span_ns == pytest.approx(on_paper(LATENCY + OF_BYTES // 2), abs=5)
    assert not Wishes(links=elsewhere)


def test_a_run_whose_links_have_no_latency_is_refused_with_the_reason(measured: Analysis) -> None:
    with pytest.raises(PptraceError, match=r"--links: no latency could be fitted .*: all messages have 4096 bytes"):
        predict_changes(measured, Wishes(link_speed=2.0, links=measured.report.links))


def test_where_two_ways_of_messages_explain_a_run_the_interval_has_both() -> None:
    """All forwards first looks the same whether sends wait for their receives or not; forwards and backwards by turns do not."""
    source, target = build("looped-bfs", 2, 4), build("interleaved-1f1b", 2, 4)
    chunk = {"F": 50_000, "B": 100_000}
    measured = analyse(record(source, lambda action: chunk[action.kind], 20_000, steps=5).traces())
    begin, end = run_on_paper(target, lambda action: chunk[action.kind], 20_000).window
    result = predict_changes(measured, Wishes(schedules=("interleaved-1f1b",))).result
    scenario = result.scenarios[0]
    assert result.replay_error == 0
    assert scenario.span_ns < 0.95 * (end - begin)
    assert scenario.low_ns <= end - begin <= scenario.high_ns
    assert "the steps fit as well if" in result.warnings[-1]
