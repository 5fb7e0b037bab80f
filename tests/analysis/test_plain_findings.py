"""Findings on hosts of steps without a pipeline, of steps by hand."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from pptrace.analysis.findings.find import find
from pptrace.analysis.findings.plain import BETWEEN_OPERATORS, LAST_TO_COLLECTIVES, LAUNCHED_WORK, WITH_WAITING
from pptrace.analysis.result import CommSummary, Finding, RankStep, ScheduleSummary, StepReport
from pptrace.analysis.steps.plain_steps import NO_PIPELINE
from pptrace.analysis.steps.step_series import series_of
from pptrace.model.device import DeviceBreakdown, HostIdle, SyncSummary
from tests.support.parts import rank_step

NO_SCHEDULE = ScheduleSummary("unknown", None, None, None, "none", ())
MS = 1_000_000


def rank_of(number: int = 0, between: int | None = None, late: int | None = None, **figures: Any) -> RankStep:
    """A rank of a step of 100 ms; times in ms."""
    times = {"compute_ns": 30 * MS, "exposed_comm_ns": 0, "bubble_ns": 70 * MS} | figures
    ms = {"between_operators_ns": between, "late_ns": late}
    times |= {name: None if value is None else value * MS for name, value in ms.items()}
    return rank_step(number, stage=None, window_ns=100 * MS, **times)


def step_of(*ranks: RankStep, number: int = 0) -> StepReport:
    length = 100 * MS
    return StepReport(step=number, start_ns=0, end_ns=length, span_ns=length, bubble=NO_PIPELINE, ranks=ranks)


def findings_of(*steps: StepReport) -> tuple[Finding, ...]:
    return find(steps, NO_SCHEDULE)


@pytest.mark.parametrize(("between", "is_found"), [(5, True), (4, False)])
def test_time_between_operators_is_a_finding_from_a_twentieth_of_the_step_on(between: int, is_found: bool) -> None:
    found = findings_of(step_of(rank_of(between=between)), step_of(rank_of(between=between)))
    assert bool(found) is is_found
    if is_found:
        assert (found[0].gain_ns, found[0].evidence["reason"]) == (5 * MS, BETWEEN_OPERATORS)
        assert found[0].title == "Host: 5.0% of the step is between operators (Python, input)"
        assert found[0].detail.startswith("no operator and no communication runs; look at data loading")


def test_of_several_ranks_what_every_one_has_is_between_operators() -> None:
    (found,) = findings_of(*[step_of(rank_of(0, 10), rank_of(1, 60))] * 2)
    assert found.gain_ns == 10 * MS
    assert found.detail.startswith("every rank has at least as much: ")
    assert findings_of(*[step_of(rank_of(0, 10), rank_of(1, None))] * 2) == ()


def test_the_rank_that_others_wait_for_is_named_with_what_it_does_meanwhile() -> None:
    steps = [step_of(rank_of(0, 2, 1), rank_of(1, 42, 38)), step_of(rank_of(0, 2, 0), rank_of(1, 42, 40))]
    (found,) = findings_of(*steps)
    assert found.title == "Straggler: 39.0% of the step goes to waiting for rank 1, which comes last to the collectives"
    assert found.detail == (
        "rank 1 comes last to the collectives, in all 39.0 ms a step after the last but one: what would be won if it came with "
        "that one; look at the time between operators (Python, input) of rank 1: 42.0 ms a step, of the others 2.0"
    )
    assert found.gain_ns == 39 * MS
    assert (found.evidence["cause"], found.evidence["where"]) == ("straggler", {"rank": 1})
    assert found.evidence["reason"] == LAST_TO_COLLECTIVES


@pytest.mark.parametrize(("waited", "gain"), [(0, 30), (10, 20), (40, None), (None, None)])
def test_a_rank_that_waited_for_messages_is_late_for_these(waited: int | None, gain: int | None) -> None:
    """As the first stage of a pipeline that is not recognised, whose last backward comes last."""
    wait_ns = None if waited is None else waited * MS
    received, sent = (
        CommSummary("pp", kind, 1, 8, 50 * MS, wait, None, None, None, None, None)
        for kind, wait in (("recv", wait_ns), ("send", 99 * MS))
    )
    found = findings_of(*[step_of(rank_of(0, 2, 30, comms=(received, sent)), rank_of(1, 2, 0))] * 2)
    assert [finding.gain_ns for finding in found] == ([] if gain is None else [gain * MS])


def test_a_rank_that_computes_longer_comes_last_for_that() -> None:
    (found,) = findings_of(*[step_of(rank_of(0, 2, 0), rank_of(1, 2, 20, compute_ns=50 * MS))] * 2)
    assert found.detail.endswith("; look at the compute of rank 1: 50.0 ms a step, of the others 30.0")
    (found,) = findings_of(*[step_of(rank_of(0, None, 0), rank_of(1, None, 20))] * 2)
    assert found.detail.endswith("if it came with that one; look at the host, clocks and neighbours of rank 1")


def test_ranks_that_come_last_in_turn_are_none_that_is_late() -> None:
    turns = [step_of(*(rank_of(number, 2, 12 * (number == at % 3)) for number in range(3))) for at in range(3)]
    (found,) = findings_of(*turns)
    assert (found.gain_ns, found.evidence["cause"], found.evidence["where"]) == (12 * MS, "jitter", {})


@pytest.mark.parametrize(
    ("late", "named"),
    [
        ([{1: 3}, {0: 54}, {2: 3}, {0: 8}], {}),
        ([{1: 3}, {0: 54}, {2: 3}, {0: 40}], {"rank": 0}),
        ([{1: 20}, {0: 75}, {2: 20}, {0: 20}], {}),
        ([{1: 3}, {0: 20}, {0: 20}, {0: 20}], {"rank": 0}),
        ([{0: 20, 1: 10}], {"rank": 0}),
    ],
)
def test_a_rank_that_comes_last_by_far_in_one_step_alone_is_not_named(
    late: list[dict[int, int]], named: dict[str, int]
) -> None:
    steps = [
        step_of(*(rank_of(rank, 2, of_step.get(rank, 0)) for rank in range(3)), number=number)
        for number, of_step in enumerate(late)
    ]
    (found,) = findings_of(*steps)
    assert (found.evidence["reason"], found.evidence["where"]) == (LAST_TO_COLLECTIVES, named)


def test_groups_that_wait_beside_one_another_cost_a_step_what_its_ranks_wait() -> None:
    """Two pairs: one rank of each comes late by 60 ms of the 100, for which its peer waits: 120 in all."""

    def rank_at(number: int, turn: int) -> RankStep:
        is_late = number % 2 == turn
        wait = 0 if is_late else 60 * MS
        calls = (
            CommSummary(axis, "all_reduce", 1, 8, 60 * MS, ns, *[None] * 5) for axis, ns in (("tp", wait), ("dp", None))
        )
        return rank_of(number, 2, 60 * is_late, comms=tuple(calls))

    turns = [step_of(*(rank_at(number, turn) for number in range(4))) for turn in (0, 1)]
    (found,) = findings_of(*turns)
    assert found.title.startswith("Jitter: 30.0% of the step goes to waiting for the last rank")


def test_exposed_communication_leaves_out_what_a_late_rank_was_waited_for() -> None:
    """Rank 1 is late by 30 ms, during 8 of which another collective of 10 ms was under way, exposed on rank 0."""
    exposed = {"exposed_comm_ns": 20 * MS, "bubble_ns": 50 * MS}
    early, late = (
        rank_of(0, 2, 0, late_in_transfer_ns=0, **exposed),
        rank_of(1, 2, 30, late_in_transfer_ns=8 * MS, **exposed),
    )
    _, found = findings_of(*[step_of(early, late)] * 2)
    assert (found.evidence["cause"], found.gain_ns) == ("communication", (20 + 20 - 8) * MS // 2)


def test_a_device_that_waits_for_a_late_host_is_counted_once() -> None:
    ranks = rank_of(0, None, 0, host=HostIdle(6 * MS, 0, 0)), rank_of(1, None, 38, host=HostIdle(42 * MS, 0, 0))
    late, host = findings_of(*[step_of(*ranks)] * 2)
    assert (late.gain_ns, host.gain_ns) == (38 * MS, (6 + 42 - 38) * MS // 2)


@pytest.mark.parametrize(("communication", "is_found"), [(10, True), (9, False)])
def test_communication_of_a_rank_whose_others_have_no_trace_is_a_finding_without_a_gain(
    communication: int, is_found: bool
) -> None:
    device = DeviceBreakdown(0, 100 * MS, 90 * MS, 30 * MS, communication * MS, 0, 10 * MS, 0.0)
    rank = replace(rank_of(exposed_comm_ns=None, bubble_ns=None), device=device)
    found = findings_of(*[step_of(rank)] * 2)
    assert [(f.evidence["cause"], f.evidence["reason"], f.gain_ns) for f in found] == (
        [("communication", WITH_WAITING, None)] if is_found else []
    )
    if is_found:
        assert found[0].title.startswith("Communication: 10.0% of the step is communication that no compute hides")
        assert found[0].detail.endswith(
            "; record all ranks (the profiler on each; pptrace run: --profile-ranks all), and see the warnings"
        )
    separated = replace(rank, exposed_comm_ns=5 * MS)
    assert all(
        f.evidence["reason"] != WITH_WAITING for f in findings_of(*[step_of(separated)] * 2) if "reason" in f.evidence
    )


@pytest.mark.parametrize(("pageable", "is_found"), [(5 * MS, True), (4 * MS, False), (None, False)])
def test_copies_from_pageable_memory_that_nothing_overlaps_are_a_finding_without_a_gain(
    pageable: int | None, is_found: bool
) -> None:
    device = DeviceBreakdown(0, 100 * MS, 90 * MS, 30 * MS, 0, 50 * MS, 10 * MS, None, pageable)
    found = findings_of(*[step_of(replace(rank_of(), device=device))] * 2)
    assert [(f.title, f.gain_ns) for f in found] == (
        [("Copies: 5.0% of all steps the device only copies from pageable memory of its host", None)]
        if is_found
        else []
    )
    assert all("; pin the batches" in f.detail and f.detail.endswith("non_blocking=True") for f in found)


@pytest.mark.parametrize(("dependency", "is_found"), [(10, True), (9, False)])
def test_a_device_that_is_idle_with_launched_work_is_a_finding_without_a_gain(dependency: int, is_found: bool) -> None:
    found = findings_of(*[step_of(rank_of(host=HostIdle(0, 0, dependency * MS)))] * 2)
    assert [f.evidence["reason"] for f in found] == ([LAUNCHED_WORK] if is_found else [])
    unknown = rank_of(1, host=None)
    assert findings_of(*[step_of(rank_of(host=HostIdle(0, 0, 50 * MS)), unknown)] * 2) == ()


def test_a_rank_that_alone_does_something_every_so_many_steps_is_told_with_what_it_does() -> None:
    """Every fourth step takes 60 ms longer, for which rank 1 writes a checkpoint: no outlier, and no host that launches late."""

    def step(number: int) -> StepReport:
        ms = 60 * (number % 4 == 3)
        late = rank_of(1, 2 + ms, ms, idle_spans={"CHECKPOINT": ms * MS} if ms else {}, bubble_ns=(70 + ms) * MS)
        early = rank_of(0, 2, 0, idle_spans={}, bubble_ns=(70 + ms) * MS)
        return replace(step_of(early, late, number=number), end_ns=(100 + ms) * MS, span_ns=(100 + ms) * MS)

    steps = [step(number) for number in range(12)]
    (found,) = find(steps, NO_SCHEDULE, series=series_of(steps))
    assert (found.gain_ns, found.evidence["where"]) == (15 * MS, {"rank": 1})
    assert found.detail.endswith("; look at the checkpoint of rank 1: 15.0 ms a step, of the others 0.0")


def test_what_explains_less_than_half_of_a_late_rank_is_not_named() -> None:
    (found,) = findings_of(*[step_of(rank_of(0, 2, 0), rank_of(1, 11, 20))] * 2)
    assert found.detail.endswith("; look at the host, clocks and neighbours of rank 1")
    (found,) = findings_of(*[step_of(rank_of(0, 2, 0), rank_of(1, 12, 20))] * 2)
    assert found.detail.endswith(
        "; look at the time between operators (Python, input) of rank 1: 12.0 ms a step, of the others 2.0"
    )


def test_calls_that_are_long_for_nothing_on_the_device_are_named_apart() -> None:
    calls = {"cudaModuleLoadData": 30, "cudaStreamSynchronize": 8}
    syncs = tuple(SyncSummary(name, "", 1, ms * MS, ms * MS, ms * MS, 0) for name, ms in calls.items())
    step = step_of(rank_of(host=HostIdle(40 * MS, 0, 0), synchronisations=syncs))
    (found,) = findings_of(step, step)
    assert found.detail.startswith(
        "20% of it follows calls that wait for the device: cudaStreamSynchronize (2 in all, the longest 8.000 ms on rank 0): "
        "avoid them; 75% of it is in calls that take far longer than usual: cudaModuleLoadData (2 in all, the longest 30.000 ms "
        "on rank 0): look for first use of kernels"
    )


def test_an_outlier_names_the_call_for_which_its_device_ran_dry() -> None:
    calls = (SyncSummary("cudaModuleLoadData", "", 1, 200 * MS, 190 * MS, 200 * MS, 0),)
    ranks = [rank_of(host=HostIdle(0, 0, 0), synchronisations=calls if at == 5 else ()) for at in range(12)]
    steps = [replace(step_of(rank, number=at), span_ns=(100 + 200 * (at == 5)) * MS) for at, rank in enumerate(ranks)]
    (found,) = find(steps, NO_SCHEDULE, series=series_of(steps))
    assert "; cudaModuleLoadData takes 200.0 ms on rank 0, while its device runs dry; look at" in found.detail


def test_a_rank_that_is_waited_for_in_the_next_step_explains_that_one() -> None:
    """Rank 0 comes late by 200 ms at the end of every fourth step; the next one is longer, on the rank that waits."""
    steps = [step_of(rank_of(0, 2, 200 * (at % 4 == 2)), rank_of(1, 2, 0), number=at) for at in range(12)]
    steps = [replace(step, span_ns=(100 + 200 * (step.step % 4 == 3)) * MS) for step in steps]
    (found,) = find(steps, NO_SCHEDULE, series=series_of(steps))
    assert (
        found.title == "Straggler: 33.3% of all steps goes to waiting for rank 0, which comes last to the collectives"
    )
    assert found.evidence["in_some_steps"]
