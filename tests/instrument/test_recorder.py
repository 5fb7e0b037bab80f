"""Ranges reach the profiler under their names, and cost no mark while nobody listens."""

from __future__ import annotations

import threading

import nvtx
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from instrument.recorder import Recorder
from pptrace.marks import Axis, Collective, SpanKind, SpanMark, Transfer
from pptrace.schedule.actions import Action, Kind, Phase
from tests.support.profiled import events_of

ACTION = Action(Kind.F, 2, 3, 1, Phase.WARMUP)


class Counted:
    """A transfer that counts how often it is asked for."""

    index = None

    def __init__(self) -> None:
        self.asked = 0

    def transfer(self) -> Transfer:
        self.asked += 1
        return Transfer(Action(Kind.SEND_F, 2, 3), 5, 4096)


def names(profiler: profile) -> list[str]:
    return [event.name for event in events_of(profiler) if event.name.startswith("pp1:")]


def test_nothing_is_built_while_nobody_listens() -> None:
    recorder, carried = Recorder(), Counted()
    assert not recorder.listening
    with recorder.p2p([carried], Axis.PP, 0), recorder.wait(carried, 0), recorder.op(ACTION, 0):
        pass
    assert carried.asked == 0
    ranges = [recorder.op(ACTION, 0), recorder.span(SpanKind.STEP, 0), recorder.mark(SpanMark(SpanKind.STEP, 0))]
    ranges.append(recorder.collective(Collective.ALL_REDUCE, Axis.DP, 2, 8, 0))
    assert len(set(map(id, ranges))) == 1


def test_routes_can_be_counted_while_nothing_records() -> None:
    recorder = Recorder()
    assert not recorder.counts_routes
    chosen = torch.tensor([[0, 1], [0, 2]])
    recorder.expert_counts.add(0, 0, chosen, chosen, 4, (0, [2, 1, 1, 0]))
    before = recorder.expert_counts.facts()
    with recorder.counting_routes() as counts:
        assert recorder.counts_routes
        recorder.expert_counts.add(1, 0, chosen, chosen, 4, (0, [2, 1, 1, 0]))
    facts = counts.facts()
    assert facts["forwards"] == [[1, 0, [2, 1, 1, 0]]]
    assert recorder.expert_counts.facts() == before
    assert not recorder.counts_routes


def test_routes_that_are_counted_by_themselves_are_in_a_trace_that_is_recorded_meanwhile() -> None:
    recorder, chosen = Recorder(listens=lambda: True), torch.tensor([[0, 1], [0, 2]])
    with recorder.counting_routes():
        recorder.expert_counts.add(1, 0, chosen, chosen, 4, (0, [2, 1, 1, 0]))
    facts = recorder.expert_counts.facts()
    assert (facts["top_k"], facts["forwards"]) == (2, [[1, 0, [2, 1, 1, 0]]])


def test_a_range_survives_the_profiler_starting_and_stopping_inside_it() -> None:
    recorder = Recorder()
    with recorder.span(SpanKind.STEP, 0), profile(activities=[ProfilerActivity.CPU]) as first:
        left_open = recorder.span(SpanKind.STEP, 1)
        left_open.__enter__()
    left_open.__exit__(None, None, None)
    with profile(activities=[ProfilerActivity.CPU]) as second, recorder.span(SpanKind.STEP, 2):
        pass
    assert names(second) == ["pp1:STEP step=2"]
    assert "pp1:STEP step=0" not in names(first)


@pytest.mark.parametrize(("all_threads", "seen"), [(True, ["pp1:STEP step=0"]), (False, [])])
def test_a_range_of_another_thread_is_recorded_where_the_profiler_watches_it(
    all_threads: bool, seen: list[str]
) -> None:
    recorder = Recorder()

    def work() -> None:
        with recorder.span(SpanKind.STEP, 0):
            torch.ones(1)

    watched = torch._C._profiler._ExperimentalConfig(profile_all_threads=all_threads)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=watched) as profiler:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert names(profiler) == seen


class Nsight:
    """An NVTX domain as nvtx gives it where a tool has been injected."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def get_event_attributes(self, message: str) -> str:
        return message

    def push_range(self, attributes: str) -> None:
        self.calls.append(attributes)

    def pop_range(self) -> None:
        self.calls.append("pop")


def test_an_injected_tool_gets_nested_ranges_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = Nsight()
    asked: list[str] = []

    def get_domain(name: str) -> Nsight:
        asked.append(name)
        return tool

    monkeypatch.setattr(nvtx, "get_domain", get_domain)
    recorder = Recorder()
    assert asked == ["pptrace"]
    assert recorder.listening
    with recorder.span(SpanKind.STEP, 1), recorder.op(ACTION, 1):
        pass
    assert tool.calls == ["pp1:STEP step=1", "pp1:2F3 chunk=1 phase=warmup step=1", "pop", "pop"]
