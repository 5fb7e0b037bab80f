"""``pptrace analyze`` as a user runs it, and the contract of its JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import polars
import pytest

from tests.support.programs import SAMPLES, one_line, pptrace_here

P4 = SAMPLES / "1f1b_p4"


def report_of(*arguments: str | Path) -> dict[str, Any]:
    ended = pptrace_here("analyze", *arguments, "--json", "-")
    assert ended.code == 0, ended.err
    assert ended.err == ""
    return json.loads(ended.out)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return report_of(P4, "--ops")


def test_the_run_is_recognised(report: dict[str, Any]) -> None:
    schedule = report["schedule"]
    assert (schedule["name"], schedule["num_microbatches"], schedule["num_stages"]) == ("1f1b", 8, 4)
    assert schedule["source"] == "metadata"
    assert schedule["mismatches"] == []
    assert report["mesh"]["pp"] == 4


def test_the_ideal_is_the_closed_form(report: dict[str, Any]) -> None:
    for step in report["steps"]:
        assert step["bubble"]["ideal_ratio"] == pytest.approx(3 / 8)
        assert step["bubble"]["ideal_share"] == pytest.approx(3 / 11)


def test_ops_come_only_when_asked_for(report: dict[str, Any]) -> None:
    assert all(len(rank["ops"]) == 16 for step in report["steps"] for rank in step["ranks"])
    plain = report_of(P4)
    assert all("ops" not in rank for step in plain["steps"] for rank in step["ranks"])


def test_a_directory_its_files_and_any_order_of_them_give_the_same_steps(report: dict[str, Any]) -> None:
    files = sorted(P4.glob("rank*.json.gz"), reverse=True)
    assert report_of(*files, "--ops")["steps"] == report["steps"]


def test_a_trace_that_cannot_be_read_is_named_with_its_reason_and_the_others_are_analysed(tmp_path: Path) -> None:
    for path in P4.glob("rank*.json.gz"):
        shutil.copy(path, tmp_path)
    (tmp_path / "rank2.json.gz").write_text("not a trace")
    ended = pptrace_here("analyze", tmp_path)
    assert ended.code == 0
    assert f"! {tmp_path}: skipped rank2.json.gz (no trace: begins with 'not a trace')" in " ".join(ended.out.split())
    assert [rank["rank"] for rank in report_of(tmp_path)["steps"][0]["ranks"]] == [0, 1, 3]
    why = "no whole step whose plan is known: there is no trace of rank 2; expected"
    assert why in one_line(pptrace_here("whatif", tmp_path), 1)


def test_one_step_can_be_chosen() -> None:
    whole = report_of(P4)
    number = whole["steps"][-1]["step"]
    assert [step["step"] for step in report_of(P4, "--step", str(number))["steps"]] == [number]
    assert "step 99: the trace has no such step" in one_line(pptrace_here("analyze", P4, "--step", "99"), 2)


def test_another_schedule_is_compared_and_its_differences_are_named() -> None:
    report = report_of(P4, "--schedule", "gpipe")
    assert report["schedule"]["source"] == "option"
    assert "rank 0: op 5 is 0B0 where gpipe has 0F4" in report["schedule"]["mismatches"]
    assert "schedule 'nope' is not known" in one_line(pptrace_here("analyze", P4, "--schedule", "nope"), 2)


def test_the_text_report_shows_the_numbers_of_the_json(report: dict[str, Any]) -> None:
    ended = pptrace_here("analyze", P4)
    assert ended.code == 0, ended.err
    for step in report["steps"]:
        assert f"{step['bubble']['share']:.1%}" in ended.out
    for heading in ("Steps", "Ranks", "Phases", "Where the step went", "Communication", "Findings"):
        assert heading in ended.out


def test_html_csv_and_perfetto_are_written(tmp_path: Path) -> None:
    page, tables, perfetto = tmp_path / "report.html", tmp_path / "tables", tmp_path / "trace.json"
    ended = pptrace_here("analyze", P4, "--html", page, "--csv", tables, "--perfetto", perfetto)
    assert ended.code == 0, ended.err
    html = page.read_text(encoding="utf-8")
    assert '<div class="timeline" data-tiles="' in html
    assert "pptraceTimeline" in html, "what draws it"
    assert "<script src=" not in html
    header, *rows = (tables / "ops.csv").read_text(encoding="utf-8").splitlines()
    assert header.startswith("rank,step,kind,stage")
    assert len(rows) >= 4 * 16
    events = json.loads(perfetto.read_text(encoding="utf-8"))["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    assert sum(event["ph"] == "s" for event in events) == sum(event["ph"] == "f" for event in events) > 0


def test_parquet_tables_hold_the_same_as_csv_and_are_read_again(tmp_path: Path) -> None:
    csv, parquet = tmp_path / "csv", tmp_path / "parquet"
    ended = pptrace_here("analyze", P4, "--csv", csv, "--parquet", parquet)
    assert ended.code == 0, ended.err
    for name in ("ops", "comms"):
        texts = pd.read_csv(csv / f"{name}.csv", keep_default_na=False, dtype=str)
        columns = polars.read_parquet(parquet / f"{name}.parquet")
        assert columns.columns == texts.columns.tolist()
        assert len(columns) == len(texts) > 0
        for column in texts:
            values = ["" if value is None else str(value) for value in columns[column].to_list()]
            assert values == texts[column].tolist(), column
    reports = [pptrace_here("analyze", folder, "--json", "-", "--ops") for folder in (csv, parquet)]
    texts = [report.out.replace(str(folder), "") for report, folder in zip(reports, (csv, parquet), strict=True)]
    first, second = json.loads(texts[0].replace(".csv", "")), json.loads(texts[1].replace(".parquet", ""))
    assert first == second
    assert first["schedule"]["name"] == "1f1b"


def test_parquet_goes_into_a_directory(tmp_path: Path) -> None:
    assert "--parquet -" in one_line(pptrace_here("analyze", P4, "--parquet", "-"), 2)
    file = tmp_path / "tables"
    file.touch()
    assert "--parquet" in one_line(pptrace_here("analyze", P4, "--parquet", file), 1)


def run_with(folder: Path, **changes: Any) -> Path:
    """A copy of the sample whose run file has other facts."""
    run = shutil.copytree(P4, folder / "run")
    facts = json.loads((run / "run.json").read_text(encoding="utf-8"))
    (run / "run.json").write_text(json.dumps(facts | changes), encoding="utf-8")
    return run


class TestBadInput:
    def test_a_path_that_does_not_exist(self, tmp_path: Path) -> None:
        assert "nowhere" in one_line(pptrace_here("analyze", tmp_path / "nowhere"), 1)

    def test_no_path_at_all(self) -> None:
        assert "PATHS" in one_line(pptrace_here("analyze"), 2)

    def test_a_truncated_gzip_is_salvaged_and_said(self, tmp_path: Path) -> None:
        run = shutil.copytree(P4, tmp_path / "run")
        damaged = run / "rank2.json.gz"
        damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
        report = report_of(run)
        assert report["mesh"]["pp"] == 4
        warnings = [line for info in report["inputs"] if info["rank"] == 2 for line in info["warnings"]]
        assert any("kept" in line for line in warnings)

    def test_a_missing_rank_is_named(self, tmp_path: Path) -> None:
        run = shutil.copytree(P4, tmp_path / "run")
        (run / "rank2.json.gz").unlink()
        report = report_of(run)
        assert any("rank 2" in line for line in report["warnings"])
        for step in report["steps"]:
            assert step["bubble"]["ratio"] is None
            known = {rank["rank"] for rank in step["ranks"] if rank["bubble_ns"] is not None}
            assert (known, {rank["rank"] for rank in step["ranks"]}) == ({0}, {0, 1, 3})

    def test_traces_of_two_runs_are_refused(self) -> None:
        line = one_line(pptrace_here("analyze", P4, SAMPLES / "1f1b_p2"), 1)
        assert "is of another run" in line

    def test_a_second_trace_of_a_rank_does_not_stand_in_for_another_rank(self, tmp_path: Path) -> None:
        run = shutil.copytree(P4, tmp_path / "run")
        shutil.copy(run / "rank1.json.gz", run / "rank0.json.gz")
        report = report_of(run)
        assert any(line.startswith("no trace of rank 0") for line in report["warnings"])
        assert {rank["rank"] for step in report["steps"] for rank in step["ranks"]} == {1, 2, 3}

    def test_a_run_whose_launcher_was_killed_is_read_from_its_traces(self, tmp_path: Path) -> None:
        run = run_with(tmp_path, status="running", ranks=[])
        report = report_of(run)
        assert len(report["inputs"]) == 4
        assert any("names no rank" in line for line in report["warnings"])

    def test_a_run_that_goes_on_is_read_without_remarks_on_its_own_files(self, tmp_path: Path) -> None:
        run = run_with(tmp_path, status="running", ranks=[])
        (run / "rank0.facts.json").write_text("{}", encoding="utf-8")
        warnings = report_of(run)["warnings"]
        assert not [line for line in warnings if "facts.json" in line]
        assert [line for line in warnings if "it goes on, or its launcher was killed" in line]

    def test_the_ranks_of_all_nodes_of_a_run_are_read(self, tmp_path: Path) -> None:
        run = shutil.copytree(P4, tmp_path / "run")
        facts = json.loads((run / "run.json").read_text(encoding="utf-8"))
        first, second = facts["ranks"][:2], facts["ranks"][2:]
        (run / "run.json").write_text(json.dumps(facts | {"ranks": first}), encoding="utf-8")
        (run / "run.node1.json").write_text(json.dumps(facts | {"ranks": second}), encoding="utf-8")
        assert [info["rank"] for info in report_of(run)["inputs"]] == [0, 1, 2, 3]
