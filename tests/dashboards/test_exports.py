"""Files of the pages: every table in both formats, and nothing but what was opened."""

from __future__ import annotations

import csv
import io
import json
import shlex
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pandas as pd
import pytest
from click.testing import CliRunner

import pptrace
from dashboards import paper
from dashboards.app import create_app
from dashboards.pages import schedules, try_change
from dashboards.store import Loaded
from dashboards.tables import TABLES
from pptrace.api.wishes import FORM
from pptrace.cli.main import cli
from pptrace.report.tiles.inline import MOST_CHARACTERS, inline_simulation
from pptrace.schedule.registry import SCHEDULES
from pptrace.simulator.sweep.run import run_sweep, sweep_plans
from tests.support.extent import ALL
from tests.support.programs import SAMPLES


@pytest.fixture(scope="module")
def client() -> Any:
    return create_app([SAMPLES / "uneven_p4"], other=SAMPLES / "1f1b_p2").server.test_client()


@pytest.fixture(scope="module")
def run() -> pptrace.Run:
    return pptrace.load(SAMPLES / "uneven_p4")


def rows_of(client: Any, name: str) -> list[dict[str, Any]]:
    answer = client.get(f"/export/{name}")
    assert (answer.status_code, answer.mimetype) == (200, "application/json")
    return json.loads(answer.get_data())


@pytest.mark.parametrize("table", sorted(TABLES))
def test_every_table_is_a_file_in_both_formats_with_as_many_rows(table: str, client: Any) -> None:
    answer = client.get(f"/export/{table}.csv")
    assert (answer.status_code, answer.mimetype) == (200, "text/csv")
    assert answer.headers["Content-Disposition"] == f'attachment; filename="pptrace-{table}.csv"'
    assert len(list(csv.reader(io.StringIO(answer.text)))) - 1 == len(rows_of(client, f"{table}.json"))


def test_files_have_the_figures_of_the_report_unrounded(client: Any, run: pptrace.Run) -> None:
    assert [row["span_ns"] for row in rows_of(client, "steps.json")] == [step.span_ns for step in run.report.steps]
    step = run.report.steps[2]
    waterfall = {row["part"]: row["ns"] for row in rows_of(client, f"waterfall.json?step={step.step}")}
    assert waterfall == step.parts
    assert sum(row["ns"] for row in rows_of(client, f"causes.json?step={step.step}")) == (step.span_ns or 0) - (
        step.ideal_ns or 0
    )
    blame = rows_of(client, f"blame.json?step={step.step}")
    assert sum(row["ns"] for row in blame if row["of"] == "rank") == step.blame.total_ns
    phases = rows_of(client, f"phases.json?step={step.step}")
    assert sum(row["num_forward"] for row in phases if row["rank"] == 0) == run.report.schedule.num_microbatches
    study = run.report.stragglers
    slowdowns = {(row["of"], row["name"]): row["slowdown"] for row in rows_of(client, "stragglers.json")}
    assert slowdowns["worker", "2"] == next(one.slowdown for one in study.workers if one.rank == 2)
    assert [row["source"] for row in rows_of(client, "links.json")] == [link.source for link in run.report.links]
    assert [row["slowest_rank"] for row in rows_of(client, "stages.json")] == run.stages.slowest_rank.tolist()
    (memory, *_) = rows_of(client, "memory.json")
    assert memory["in_flight"]["measured"] == run.report.memory.ranks[0].in_flight.measured


def test_experts_have_files_of_every_step_and_of_every_pair_of_ranks(tmp_path: Path) -> None:
    experts = create_app([SAMPLES / "experts_pp2_ep2"]).server.test_client()
    run = pptrace.load(SAMPLES / "experts_pp2_ep2")
    steps = rows_of(experts, "expert-steps.json")
    assert [row["wait_ns"] for row in steps] == [step.wait_ns for step in run.report.experts.steps]
    spread = rows_of(experts, "expert-spread.json")
    assert [row["figure"] for row in spread] == [each.figure for each in run.report.experts.over_layers]
    assert {"expert_ratio", "rank_ratio"} <= {row["figure"] for row in spread}
    table = pd.DataFrame(rows_of(experts, "expert-traffic.json")).drop(columns="share")
    pd.testing.assert_frame_equal(table, run.expert_traffic, check_dtype=False)
    assert len(table) == 8
    run.to_csv(tmp_path)
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "expert_traffic.csv"), table)
    pptrace.load(SAMPLES / "1f1b_p2").to_csv(tmp_path)
    assert not (tmp_path / "expert_traffic.csv").exists(), "it is of another run"


def test_a_change_is_asked_for_in_the_address(client: Any, run: pptrace.Run) -> None:
    (row,) = rows_of(client, "whatif.json?schedule=gpipe")
    assert row["span_ns"] == run.whatif("gpipe").result.scenarios[0].span_ns
    assert len(rows_of(client, "whatif.json")) > 5


ON_PAPER = "schedule=interleaved-1f1b&pp=4&microbatches=8&chunks=2&forward=1&backward=2&p2p=0.1"


def test_sweeps_of_a_schedule_on_paper_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(paper, "sweep_plans", lambda *given: made.append(given) or sweep_plans(*given))
    first, again, other = (paper.OnPaper("1f1b", 3, 7, None, 1.0, 2.0, p2p) for p2p in (0.25, 0.25, 0.75))
    assert first.bubbles() is again.bubbles()
    assert len(made) == 1
    assert other.bubbles() is not first.bubbles()
    assert len(made) == 2


def test_a_sweep_has_whole_rows_as_they_are_simulated_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """One plan a question; the rest, where a file is asked for, and for who waits what all at once are."""
    form, clock = paper.OnPaper("1f1b", 3, 7, None, 1.0, 2.0, 0.125), count()
    monkeypatch.setattr(paper, "monotonic", lambda: next(clock) / 2)
    rows = [len(form.bubbles(1).points) for _ in range(8)]
    assert rows == [0, 0, 0, 0, 0, 6, 6, 6]
    assert len(form.bubbles(0).points) == 6
    assert form.bubbles().points == run_sweep(form.bubbles(0).grid).points
    answer = schedules._sweep(True, None, "1f1b", 3, 7, None, 1.0, 2.0, 0.125, "/schedules")
    assert answer[1:5] == ("gone", "270", "270", "270 of 270 combinations of schedule, v and m simulated")
    small = schedules._sweep(True, None, "1f1b", 3, 7, None, 1.0, 2.0, 0.0625, "/schedules")
    assert small[1:3] + small[5:7] == ("predicting", "0", "Go on", True)


def test_very_many_ranks_of_a_schedule_are_all_drawn() -> None:
    """More than are drawn one by one: groups of them, in several blocks."""
    pp = 512 if ALL else 72
    step = paper.OnPaper("1f1b", pp, 8, None, 1.0, 2.0, 0.0).step()
    timeline = inline_simulation(step.simulation)
    about = json.loads(timeline.data)["about"]
    assert (len(about["ranks"]), about["numBars"]["ops"], about["span"]) == (pp, 2 * pp * 8, step.makespan_ns)
    assert timeline.lacks == ""
    assert len(timeline.data) < MOST_CHARACTERS


def test_fields_say_in_sight_what_they_are() -> None:
    page = str(schedules.layout(Loaded((SAMPLES,)), None))
    assert "p ranks, m microbatches, v chunks a rank" in page
    labels = {one.label for one in (*paper.SIZES.values(), *paper.SEVERAL.values())}
    assert {"microbatch size", "rank memory"} <= labels
    assert not labels & {"b", "fits"}
    tried = str(try_change.layout(Loaded((SAMPLES,)), ""))
    assert all(f"{one.label}: {one.hint}." in tried for one in FORM.values() if not one.is_change)


def test_a_schedule_on_paper_has_files_too(client: Any) -> None:
    step = pptrace.simulate("interleaved-1f1b", pp=4, microbatches=8, chunks=2, forward=0.5, backward=1.0, p2p=0.1)
    idle = rows_of(client, f"plan-idle.json?{ON_PAPER}")
    assert [
        sum(value for name, value in row.items() if name != "rank") for row in idle
    ] == step.ranks.bubble_ns.tolist()
    assert [row["start_ns"] for row in rows_of(client, f"plan-ops.json?{ON_PAPER}")] == step.ops.start_ns.tolist()
    costs = {"forward": 1, "backward": 2, "p2p": 0.1}
    swept = pptrace.sweep("interleaved-1f1b", pp="2..32:x2", microbatches="p-1,8p", chunks=2, **costs)
    curves = rows_of(client, f"plan-throughput.json?{ON_PAPER}")
    assert [row["throughput"] for row in curves] == [None if value is pd.NA else value for value in swept.throughput]
    names = {row["schedule"] for row in rows_of(client, f"plan-bubbles.json?{ON_PAPER}")}
    assert names == {name for name, entry in SCHEDULES.items() if not entry.searches}


def test_what_a_model_needs_is_shown_and_has_files_where_its_sizes_are_given(client: Any) -> None:
    sizes = {"layers": 24, "hidden": 1024, "heads": 16, "sequence": 2048, "vocabulary": 50304, "microbatch_size": 2}
    given = "&".join(f"{name}={value}" for name, value in sizes.items())
    run = pptrace.estimate("interleaved-1f1b", pp=4, microbatches=8, chunks=2, **sizes)
    assert rows_of(client, f"plan-estimate.json?{ON_PAPER}&{given}") == run.ranks.to_dict("records")
    sent = rows_of(client, f"plan-estimate-communication.json?{ON_PAPER}&{given}")
    assert [row["bytes"] for row in sent] == run.communication.bytes.tolist()
    form = paper.on_paper(dict(text.split("=") for text in f"{ON_PAPER}&{given}".split("&")))
    shown = str(schedules.body(form))
    assert "Each rank of a stage, one step" in shown
    assert f"{run.num_parameters:,} parameters" in shown
    assert "Each rank of a stage" not in str(
        schedules.body(paper.on_paper(dict(t.split("=") for t in ON_PAPER.split("&"))))
    )
    refused = str(schedules.body(replace(form, sizes=form.sizes | {"heads": 15})))
    assert "heads 15 does not divide hidden 1024" in refused
    assert "forwards are more than a page can draw" in str(schedules.body(replace(form, microbatches=10**9)))


def test_layers_known_by_their_numbers_alone_are_estimated_on_the_page(client: Any) -> None:
    numbers = {"layers": 32, "layer_parameters": 3_200_000_000, "layer_activations": 500_000_000}
    given = "&".join(f"{name}={value}" for name, value in numbers.items())
    run = pptrace.estimate("interleaved-1f1b", pp=4, microbatches=8, chunks=2, **numbers)
    assert rows_of(client, f"plan-estimate.json?{ON_PAPER}&{given}") == run.ranks.to_dict("records")
    form = paper.on_paper(dict(text.split("=") for text in f"{ON_PAPER}&{given}".split("&")))
    assert "--layer-parameters 3200000000" in form.command
    assert "Each rank of a stage, one step" in str(schedules.body(form))


def test_what_fits_of_several_values_is_that_of_the_command(client: Any) -> None:
    sizes: dict[str, Any] = {"layers": 24, "hidden": 1024, "heads": 16, "sequence": 2048}
    sizes |= {"vocabulary": 50304, "experts": 4}
    several = {"pp": "2,4", "chunks": "1,2", "ep": "1,2", "recompute": "none,full"}
    typed = sizes | {"fits": "12GB", "tied": "yes", "link": "25,tp=300", "tflops": "100", "sequence_parallel": ""}
    address = ON_PAPER.replace("pp=4", "pp=8") + "".join(f"&{name}={value}" for name, value in typed.items())
    address += (
        "".join(f"&sweep_{name}={value}" for name, value in several.items()) + "&sweep_global_batch=16&sweep_dp=2"
    )
    costs: dict[str, Any] = {"fits": 12 * 10**9, "tied": True, "link": ["25", "tp=300"], "tflops": 100}
    points = pptrace.estimate_sweep("interleaved-1f1b", global_batch=16, dp=2, **several, **sizes, **costs)
    rows = rows_of(client, f"plan-fits.json?{address}")
    assert [row["rank_ns_per_token"] for row in rows if row["fits"]] == points.rank_ns_per_token.dropna().tolist()
    assert {row["fits"] for row in rows} == {True, False}
    form = paper.on_paper(dict(parse_qsl(address)))
    assert f"16 combinations: {points.fits.sum()} fit" in str(schedules.what_fits(form))
    words = shlex.split(replace(form, chunks=2).command.removeprefix("pptrace "))
    printed = CliRunner().invoke(cli, [*words, "--json", "-"]).output
    assert json.loads(printed)["ranks"] == rows_of(client, f"plan-estimate.json?{address}")
    for wrong, line in (
        (
            {"sweep_pp": "2..900", "sweep_global_batch": "16"},
            "899 combinations are more than the 400 of a page; give fewer",
        ),
        ({"sweep_microbatches": "9000"}, "144,000 forwards are more than a page can draw"),
        ({"sweep_dp": "2", "sweep_ranks": "64"}, "dp follows from ranks"),
        ({"sweep_ranks": "x"}, "children=\"ranks is 'x'; expected a number"),
    ):
        assert line in str(schedules.what_fits(replace(form, several=wrong)))
    assert "fits much: expected a size" in str(schedules.body(replace(form, sizes=form.sizes | {"fits": "much"})))


def test_a_page_waits_so_long_for_estimates_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {"layers": 8, "hidden": 64, "heads": 4, "sequence": 16, "vocabulary": 64}
    form = paper.OnPaper("1f1b", 2, 8, sizes=sizes, several={"sweep_tp": "1,2,4"})
    monkeypatch.setattr(paper, "_MOST_ESTIMATED_S", 0)
    words = "1 of 3 combinations took 0 s, for which a page waits; give fewer values, or use pptrace estimate --sweep"
    assert words in str(schedules.what_fits(form))
    assert "1 combination: 1 fit" in str(schedules.what_fits(replace(form, several={"sweep_tp": "2"}))), (
        "the last one is done"
    )


def test_costs_that_are_left_empty_are_those_of_the_command() -> None:
    sizes = {"schedule": "1f1b", "pp": "2", "microbatches": "4"}
    usual = pptrace.simulate("1f1b", pp=2, microbatches=4)
    for empty in ({}, {"forward": "", "backward": None}):
        form = paper.on_paper(sizes | empty)
        assert form.step().makespan_ns == usual.makespan_ns == 15_000_000
        assert "both cost" not in str([*schedules.body(form), *schedules.throughput(form)])
    assert paper.on_paper(sizes | {"backward": "5"}).step().makespan_ns == 5 * 6_000_000
    none = schedules.body(paper.on_paper(sizes | {"forward": "0", "backward": "0"}))
    assert "forward and backward both cost 0 ns; expected at least one of them above 0" in str(none)


def test_the_run_is_a_file_of_its_own(client: Any, run: pptrace.Run) -> None:
    assert client.get("/export/report.json").text == run.to_json()
    assert client.get("/export/report.html").mimetype == "text/html"
    assert json.loads(client.get("/export/perfetto.json").text)["traceEvents"]
    assert json.loads(client.get("/export/comparison.json").text)["schema"] == "pptrace.compare/1"


@pytest.mark.parametrize("address", ["steps.exe", "steps", "run.json", "waterfall.csv?step=99", "<script>.csv"])
def test_what_is_no_table_of_this_run_is_not_found(address: str, client: Any) -> None:
    answer = client.get(f"/export/{address}")
    assert answer.status_code == 404
    assert "Content-Disposition" not in answer.headers
    assert "<script>.csv" not in answer.text


@pytest.mark.parametrize(
    "address",
    [
        "waterfall.csv?step=two",
        "whatif.csv?chunks=x",
        "whatif.csv?split=9999999",
        "whatif.csv?schedule=<b>",
        "whatif.json?schedule=zb-auto&microbatches=9000",
        "whatif.html?schedule=all&microbatches=9000",
        "plan-ops.csv?schedule=zb-auto&pp=2&microbatches=9000",
        "plan-idle.csv",
        "plan-idle.csv?schedule=<b>&pp=2&microbatches=2",
        "plan-idle.csv?schedule=1f1b&pp=two&microbatches=2",
        "plan-ops.csv?schedule=1f1b&pp=1e9&microbatches=1e9",
        "plan-ops.csv?schedule=1f1b&pp=inf&microbatches=nan",
        "plan-bubbles.csv?schedule=1f1b&pp=65",
        "plan-throughput.csv?schedule=1f1b&chunks=-1",
    ],
)
def test_what_cannot_be_asked_is_one_line(address: str, client: Any) -> None:
    answer = client.get(f"/export/{address}")
    assert answer.status_code == 400
    assert "Traceback" not in answer.text
    assert answer.mimetype == "text/plain", "what the address holds is no markup"


def test_only_reading_is_answered(client: Any) -> None:
    assert client.post("/export/steps.csv").status_code == 405


def test_a_run_that_cannot_be_read_has_no_files(tmp_path: Path) -> None:
    answer = create_app([tmp_path]).server.test_client().get("/export/steps.csv")
    assert answer.status_code == 400
    assert "empty" in answer.text
