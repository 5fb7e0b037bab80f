"""Output of `pptrace simulate --json --ops` read again, pairs that overlap as well."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pptrace.api.whatif import predict_changes
from pptrace.api.wishes import Wishes
from pptrace.report.to_json import dump, report_object, simulation_object
from pptrace.schedule import registry
from pptrace.schedule.shape import OpCosts
from pptrace.schedule.text import from_csv
from pptrace.simulator import IDEAL, simulate, uniform
from pptrace.workflow.load import load


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe-v", "dualpipe"])
def test_a_simulation_and_its_report_are_read_back_as_they_were_written(name: str, tmp_path: Path) -> None:
    simulation = simulate(registry.build(name, 4, 12), IDEAL)
    written = simulation_object(simulation, with_ops=True)
    (tmp_path / "simulation.json").write_text(dump(written))
    report = load([tmp_path / "simulation.json"]).report
    (step,) = report_object(report, with_ops=True)["steps"]
    assert (report.framework, report.schedule.name, report.schedule.mismatches) == ("pptrace", name, ())
    assert step["bubble"]["ratio"] == pytest.approx(simulation.bubble_ratio)
    assert [rank["bubble_ns"] for rank in step["ranks"]] == [rank.bubble_ns for rank in simulation.ranks]
    assert [rank["ops"] for rank in step["ranks"]] == [rank["ops"] for rank in json.loads(dump(written))["ranks"]]
    (tmp_path / "report.json").write_text(dump(report_object(report, with_ops=True)))
    (again,) = report_object(load([tmp_path / "report.json"]).report, with_ops=True)["steps"]
    assert [rank["ops"] for rank in again["ranks"]] == [rank["ops"] for rank in step["ranks"]]


def test_a_searched_or_handmade_plan_is_the_one_that_the_simulation_names(tmp_path: Path) -> None:
    path = tmp_path / "simulation.json"
    searched = registry.build("zb-auto", 4, 8, costs=OpCosts(10, 25, 5, 3))
    by_hand = from_csv("0F0,0B0,0F1,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n", "by hand")
    for plan, name in ((searched, "zb-auto"), (by_hand, "custom")):
        written = simulation_object(simulate(plan, uniform(10, 30, wgrad_ns=5)), with_ops=True)
        path.write_text(dump(written))
        schedule = load([path]).report.schedule
        assert (schedule.name, schedule.source, schedule.mismatches) == (name, "metadata", ())


def test_the_report_of_a_searched_or_handmade_plan_is_read_as_a_run_that_followed_it(tmp_path: Path) -> None:
    searched = registry.build("zb-auto", 4, 6, costs=OpCosts(10, 20, 5, 3))
    by_hand = from_csv("0F0,0B0,0F1,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n", "by hand")
    for plan, name in ((searched, "zb-auto"), (by_hand, "custom")):
        path = tmp_path / "simulation.json"
        path.write_text(dump(simulation_object(simulate(plan, uniform(10, 25, wgrad_ns=5)), with_ops=True)))
        written = json.loads(dump(report_object(load([path]).report, with_ops=True)))
        path = tmp_path / "report.json"
        for source in ("recognised", "metadata"):
            written["schedule"] |= {"source": source, "mismatches": []}
            path.write_text(json.dumps(written))
            assert load([path]).report.schedule.source == source
        schedule = load([path]).report.schedule
        assert (schedule.name, schedule.mismatches) == (name, ())
        assert not [finding for finding in load([path]).report.findings if "plan" in finding.title]
        written["schedule"]["mismatches"] = ["rank 0: another order"]
        path.write_text(json.dumps(written))
        assert load([path]).report.schedule.source == "recognised"


def test_the_plan_of_a_simulation_goes_by_the_numbers_of_its_ranks(tmp_path: Path) -> None:
    plan = from_csv("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n", "by hand")
    written = json.loads(dump(simulation_object(simulate(plan, uniform(10, 30)), with_ops=True)))
    written["ranks"].reverse()
    (tmp_path / "simulation.json").write_text(json.dumps(written))
    schedule = load([tmp_path / "simulation.json"]).report.schedule
    assert (schedule.source, schedule.mismatches) == ("metadata", ())


def test_an_edited_simulation_that_is_no_whole_plan_is_recognised_by_its_ops(tmp_path: Path) -> None:
    written = simulation_object(simulate(registry.build("zb-auto", 2, 4), IDEAL), with_ops=True)
    edited = json.loads(dump(written))
    del edited["ranks"][1]["ops"][-1]
    (tmp_path / "simulation.json").write_text(json.dumps(edited))
    assert load([tmp_path / "simulation.json"]).report.schedule.source == "recognised"


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe"])
def test_messages_are_read_back_with_both_ends(name: str, tmp_path: Path) -> None:
    plan = registry.build(name, 4, 8)
    simulation = simulate(plan, uniform(100, 200, p2p_ns=30))
    (tmp_path / "simulation.json").write_text(dump(simulation_object(simulation, with_ops=True)))
    analysis = load([tmp_path / "simulation.json"])
    comms = analysis.data.comms
    assert len(comms) == 2 * plan.table.num_messages
    assert set(comms["transfer_end_ns"] - comms["transfer_start_ns"]) == {30}
    both = comms[comms["kind"] == "send"].merge(comms[comms["kind"] == "recv"], on="match")
    assert len(both) == plan.table.num_messages
    assert (both["rank_x"] == both["peer_y"]).all()
    assert (both["stage_y"] - both["stage_x"] == both["direction_x"].map({"F": 1, "B": -1})).all()
    faster = predict_changes(analysis, Wishes(link_speed=2.0)).result
    assert faster.replay_span_ns == simulation.makespan_ns
    assert faster.scenarios[0].span_ns == simulate(plan, uniform(100, 200, p2p_ns=15)).makespan_ns


def test_no_messages_stand_in_a_simulation_without_ops() -> None:
    simulation = simulate(registry.build("1f1b", 2, 2), uniform(100, 200, p2p_ns=30))
    assert all("messages" not in rank for rank in simulation_object(simulation)["ranks"])
    assert all(len(rank["messages"]) == 4 for rank in simulation_object(simulation, with_ops=True)["ranks"])
