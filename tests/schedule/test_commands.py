"""The catalogue at the command line: every name, and the options of searched and lean schedules."""

from __future__ import annotations

import json

from pptrace.schedule.registry import SCHEDULES
from tests.support.programs import one_line, pptrace_here


def test_the_list_has_every_schedule_with_its_source() -> None:
    words = pptrace_here("schedule", "list").out.split()
    assert set(SCHEDULES) <= set(words)
    assert {"2401.10241", "2405.15362", "2211.05953", "ScheduleDualPipeV"} <= {word.strip(",") for word in words}


def test_a_searched_schedule_says_how_far_it_is_from_the_lower_bound() -> None:
    shape = ("zb-auto", "--pp", "4", "--microbatches", "8", "--memory-limit", "4")
    assert "the makespan is the lower bound" in pptrace_here("schedule", "show", *shape).out
    assert "above the lower bound" in pptrace_here("simulate", *shape, "--p2p", "0.1").out
    assert "lower bound" not in pptrace_here("simulate", "zb-h1", "--pp", "2", "--microbatches", "4").out


def test_a_searched_schedule_is_searched_for_the_costs_of_the_simulation() -> None:
    shape = ("zb-auto", "--pp", "4", "--microbatches", "8", "--json", "-")
    costs = ("--forward", "1", "--backward", "3", "--wgrad", "2")
    limited = json.loads(pptrace_here("simulate", *shape, *costs, "--memory-limit", "5").out)
    free = json.loads(pptrace_here("simulate", *shape, *costs).out)
    assert max(rank["peak_inflight_microbatches"] for rank in limited["ranks"]) <= 5
    assert free["makespan_ns"] <= limited["makespan_ns"]


def test_the_lean_warmup_is_simulated() -> None:
    shape = ("interleaved-1f1b", "--pp", "4", "--microbatches", "8", "--json", "-")
    full, lean = (json.loads(pptrace_here("simulate", *shape, *option).out) for option in ((), ("--lean",)))
    assert lean["makespan_ns"] == full["makespan_ns"]
    assert lean["ranks"][0]["peak_inflight_microbatches"] < full["ranks"][0]["peak_inflight_microbatches"]


def test_a_bidirectional_plan_goes_through_csv(tmp_path: object) -> None:
    file = f"{tmp_path}/two-ends.csv"
    shape = ("--pp", "4", "--microbatches", "8")
    assert pptrace_here("schedule", "show", "dualpipe", *shape, "--with-comms", "--csv", file).code == 0
    named, read = (
        json.loads(pptrace_here("simulate", *what, "--json", "-").out) for what in (("dualpipe", *shape), (file,))
    )
    assert read["makespan_ns"] == named["makespan_ns"]
    assert read["ranks"] == named["ranks"]


def test_options_of_a_name_are_refused_for_a_file(tmp_path: object) -> None:
    file = f"{tmp_path}/handwritten.csv"
    pptrace_here("schedule", "show", "1f1b", "--pp", "2", "--microbatches", "2", "--csv", file)
    for option in (("--lean",), ("--memory-limit", "3"), ("--group-size", "2")):
        assert f"{option[0]} does not change a file" in one_line(pptrace_here("simulate", file, *option), 2)
