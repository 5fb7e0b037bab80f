"""``pptrace.load``: what the command line gives, as types and tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import polars
import pytest
from msgspec import structs

import pptrace
from pptrace.errors import TraceError, UsageError
from pptrace.model.tables import COMMS, MEMORY, OPS, SLACK
from tests.support.kineto import event_row, write_rows
from tests.support.programs import SAMPLES, pptrace_here

P4 = SAMPLES / "1f1b_p4"


@pytest.fixture(scope="module")
def run() -> pptrace.Run:
    return pptrace.load(P4)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All files that ``pptrace analyze`` writes, and its text."""
    folder = tmp_path_factory.mktemp("cli")
    files = ("--json", folder / "r.json", "--html", folder / "r.html", "--perfetto", folder / "r.perfetto")
    ended = pptrace_here("analyze", P4, *files, "--csv", folder / "csv", "--ops")
    assert ended.code == 0, ended.err
    (folder / "r.txt").write_text(ended.out, encoding="utf-8")
    return folder


def test_json_page_and_trace_are_those_of_the_command_line_to_the_byte(run: pptrace.Run, written: Path) -> None:
    assert run.to_json(ops=True) == (written / "r.json").read_text(encoding="utf-8")
    assert run.to_html() == (written / "r.html").read_text(encoding="utf-8")
    assert run.to_perfetto() == (written / "r.perfetto").read_text(encoding="utf-8")


def test_the_text_is_what_the_command_line_prints(run: pptrace.Run, written: Path) -> None:
    printed = (written / "r.txt").read_text(encoding="utf-8").splitlines()
    assert run.to_text().splitlines() == [line.rstrip() for line in printed]
    everything = pptrace_here("analyze", P4, "--all").out.splitlines()
    assert run.to_text(everything=True).splitlines() == [line.rstrip() for line in everything] != printed
    assert max(map(len, run.to_text(width=90).splitlines())) <= 90


def read_table(path: Path) -> pd.DataFrame:
    """A written table; an empty cell is an empty text, but in a column of flags an unknown one."""
    table = pd.read_csv(path, keep_default_na=False)
    flags = [name for name, dtype in SLACK.items() if dtype == "boolean" and name in table]
    return table.assign(**{name: table[name].map({"True": True, "False": False}).astype("boolean") for name in flags})


def test_tables_are_those_of_the_csv_files(run: pptrace.Run, written: Path) -> None:
    for name, table in (("ops", run.ops), ("comms", run.comms)):
        pd.testing.assert_frame_equal(table, read_table(written / "csv" / f"{name}.csv"), check_dtype=False)


def test_ops_have_their_slack_and_those_without_are_the_critical_path(run: pptrace.Run, tmp_path: Path) -> None:
    ops = run.ops
    on_path = ops[ops.on_critical_path]
    assert (on_path.slack_ns == 0).all()
    kinds = (on_path.end_ns - on_path.start_ns).groupby([on_path.step, on_path.kind]).sum()
    for step in run.report.steps:
        assert kinds[step.step].to_dict() == {kind: step.critical_path.parts[kind] for kind in ("F", "B")}
    others = ~ops.kind.isin(["F", "B"])
    assert (ops[others].slack_ns == -1).all()
    assert ops[others].on_critical_path.isna().all()
    assert (ops[~others].slack_ns >= 0).all()
    (tmp_path / "memory.parquet").write_bytes(b"another run's")
    run.to_parquet(tmp_path)
    assert sorted(file.stem for file in tmp_path.iterdir()) == ["comms", "ops"], "the run has no memory events"
    written = polars.read_parquet(tmp_path / "ops.parquet")
    assert written["slack_ns"].to_list() == ops.slack_ns.tolist()
    assert written["on_critical_path"].to_list() == [None if flag is pd.NA else flag for flag in ops.on_critical_path]


def test_a_full_disk_is_one_line_and_leaves_no_half_of_a_table(
    run: pptrace.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(_: polars.DataFrame, file: Path) -> None:
        file.write_bytes(b"PAR1")
        raise polars.exceptions.ComputeError("parquet: underlying IO error: No space left on device (os error 28)")

    monkeypatch.setattr(polars.DataFrame, "write_parquet", fill)
    with pytest.raises(pptrace.PptraceError, match=r"cannot be written \(No space left on device"):
        run.to_parquet(tmp_path)
    assert not list(tmp_path.iterdir())


def test_texts_are_written_where_a_path_is_given(run: pptrace.Run, tmp_path: Path) -> None:
    run.to_json(tmp_path / "r.json")
    run.to_html(str(tmp_path / "r.html"))
    run.to_csv(tmp_path / "csv")
    assert (tmp_path / "r.json").read_text(encoding="utf-8") == run.to_json()
    assert (tmp_path / "r.html").read_text(encoding="utf-8") == run.to_html()
    assert pd.read_csv(tmp_path / "csv" / "ops.csv").shape == run.ops.shape


def test_tables_have_their_columns_and_times_are_whole_nanoseconds(run: pptrace.Run) -> None:
    for table, schema in ((run.ops, {**OPS, **SLACK}), (run.comms, COMMS), (run.memory, MEMORY)):
        assert list(table.columns) == list(schema)
        numbers = [name for name, dtype in schema.items() if dtype == "int64"]
        assert (table[numbers].dtypes == "int64").all()
        assert list(table.index) == list(range(len(table)))
    assert len(run.memory) == 0


@pytest.mark.parametrize(
    "choose", [lambda comms: comms, lambda comms: comms.query("kind == 'recv'")[["axis", "kind", "bytes"]]]
)
def test_communication_is_grouped_by_axis_with_several_functions(run: pptrace.Run, choose: Any) -> None:
    comms = choose(run.comms)
    plain = pd.DataFrame({"mesh_axis": comms["axis"], "kind": comms["kind"], "bytes": comms["bytes"]})
    for names, plain_names in ((["axis", "kind"], ["mesh_axis", "kind"]), ("axis", "mesh_axis")):
        sums = comms.groupby(names)[["bytes"]].agg(["sum", "count"])
        expected = plain.groupby(plain_names)[["bytes"]].agg(["sum", "count"])
        pd.testing.assert_frame_equal(pd.DataFrame(sums), expected.rename_axis(index={"mesh_axis": "axis"}))
    assert comms.groupby("kind")["axis"].unique().explode().tolist() == ["pp"] * comms["kind"].nunique()


def test_each_rank_window_is_partitioned_to_the_nanosecond(run: pptrace.Run) -> None:
    ranks = run.ranks
    assert ranks[["step", "rank"]].to_numpy().tolist() == [[s, r] for s in (3, 4) for r in range(4)]
    assert (ranks.window_ns == ranks.compute_ns + ranks.exposed_comm_ns + ranks.bubble_ns).all()
    assert (ranks.peak_memory_bytes > 100e6).all(), "a process that has imported torch"


def test_the_waterfall_of_each_step_sums_to_its_span(run: pptrace.Run) -> None:
    names = ("compute", "structural", "imbalance", "straggler", "jitter", "communication", "host", "interaction")
    parts = [f"{name}_ns" for name in (*names, "unexplained")]
    assert (run.steps[parts].sum(axis=1) == run.steps.span_ns).all()
    assert run.steps.bubble_ratio.tolist() == [step.bubble.ratio for step in run.report.steps]
    of_hosts = [sum(cause.ns for cause in step.causes or () if cause.cause == "host") for step in run.report.steps]
    assert run.steps.host_ns.tolist() == of_hosts


def test_a_figure_is_that_of_the_typical_step_or_of_the_one_asked_for(run: pptrace.Run) -> None:
    number = run.report.typical_step.step
    assert run.figure().to_json() == run.figure(number, "overview").to_json()
    other = next(step.step for step in run.report.steps if step.step != number)
    for kind in ("overview", "waterfall"):
        assert run.figure(other, kind).to_json() != run.figure(number, kind).to_json()


def test_a_timeline_begins_with_the_typical_step_or_the_one_asked_for(run: pptrace.Run) -> None:
    number = run.report.typical_step.step
    other = next(step.step for step in run.report.steps if step.step != number)
    assert run.timeline().to_html() == run.timeline(number).to_html() != run.timeline(other).to_html()
    assert f"&quot;firstStep&quot;:{other}," in run.timeline(other).to_html()
    assert repr(run.timeline(other)) == f"<pptrace.TimelinePicture: step {other}>"
    assert run.timeline(other)._repr_html_().startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    with pytest.raises(UsageError, match="step 99: there is no such step"):
        run.timeline(99)


def test_a_page_has_all_steps_as_a_table_with_labels_to_the_left(run: pptrace.Run) -> None:
    page = run.to_html()
    assert "<h3>Steps</h3>" in page
    for step in run.report.steps:
        assert f'<td class="label">{step.step}</td><td>{(step.period_ns or 0) / 1e6:.2f}</td>' in page
    assert "<h3>Steps</h3>" not in pptrace.load(P4, step=3).to_html()


def test_one_step_can_be_reported(run: pptrace.Run) -> None:
    assert pptrace.load(P4, step=3).steps.step.tolist() == [3]
    assert pptrace.load([P4], schedule="gpipe").report.schedule.source == "option"


def test_progress_is_told_up_to_the_last_trace() -> None:
    calls: list[tuple[float, int]] = []
    pptrace.load(SAMPLES / "1f1b_p2", progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (2, 2)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda: pptrace.load("nowhere"), TraceError, "nowhere: not found; expected"),
        (lambda: pptrace.load([]), UsageError, "no path is given"),
        (lambda: pptrace.load(P4, step=99), UsageError, "step 99: the trace has no such step; it has 3, 4"),
        (lambda: pptrace.load(P4, schedule="nope"), UsageError, "schedule 'nope' is not known"),
        (lambda: pptrace.load(P4, jobs=0), UsageError, "jobs is 0; expected at least 1"),
        (lambda: pptrace.load(P4).figure(99), UsageError, "step 99: there is no such step; the report has 3, 4"),
        (lambda: pptrace.load(P4).figure(kind="pie"), UsageError, "'pie' is not known; expected one of overview"),
        (
            lambda: pptrace.load(P4).to_html("/nowhere/x.html"),
            pptrace.PptraceError,
            "/nowhere/x.html: cannot be written",
        ),
        (lambda: pptrace.load(P4).to_csv(__file__), pptrace.PptraceError, "there is a file of that name"),
    ],
)
def test_a_mistake_is_an_error_of_one_line(call: Callable[[], object], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, pptrace.PptraceError)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_trace_without_steps_has_empty_tables_and_says_so(tmp_path: Path) -> None:
    write_rows(tmp_path / "rank0.json", [event_row("cpu_op", "aten::mm", 1.0, 2.0)])
    run = pptrace.load(tmp_path)
    assert "no steps" in repr(run)
    for table, schema in ((run.ops, {**OPS, **SLACK}), (run.comms, COMMS), (run.memory, MEMORY)):
        assert (list(table.columns), len(table)) == (list(schema), 0)
    assert (len(run.steps), len(run.ranks)) == (0, 0)
    assert "span_ns" in run.steps.columns
    assert "no steps" in run._repr_html_()
    with pytest.raises(UsageError, match=r"there is no step to draw; report\.warnings says why"):
        run.figure()


def test_a_notebook_shows_tiles_findings_and_steps(run: pptrace.Run) -> None:
    page = run._repr_html_()
    for shown in (
        *(run.report.verdict.partition("; the most")[0], "Why: Ranks 0 to 3 were short of processor cores"),
        *("4 ranks, 1f1b, steps 3 and 4", "77.10 ms", "41.2%", "ideal 27.3%", "<li>Long ops: 10.8% of the step"),
        "78.26",
    ):
        assert shown in page
    assert len(page) < 10_000
    assert "<script" not in page


def test_what_traces_say_is_text_in_the_summary(run: pptrace.Run) -> None:
    report = structs.replace(run.report, framework="<script>alert(1)</script>", verdict="<script>alert(2)</script>")
    page = pptrace.Run(replace(run.analysis, report=report))._repr_html_()
    assert "&lt;script&gt;" in page
    assert "<script" not in page


def test_a_summary_of_many_steps_stays_short(run: pptrace.Run) -> None:
    steps = tuple(structs.replace(run.report.steps[0], step=number) for number in range(500))
    many = pptrace.Run(replace(run.analysis, report=structs.replace(run.report, steps=steps)))
    assert "500 steps, 0 to 499" in repr(many)
    assert "488 more in report.steps" in many._repr_html_()
    assert len(many._repr_html_()) < 16_000


def test_what_a_prompt_shows_of_a_result_is_short(run: pptrace.Run) -> None:
    report, predictions = repr(run.report), run.whatif()
    assert report == f"<Report: pptrace, 4 ranks, 2 steps, {len(run.report.findings)} findings: {run.report.verdict}>"
    first, *lines = repr(predictions).splitlines()
    scenarios = predictions.result.scenarios
    assert first == f"<pptrace.Predictions: {len(scenarios)} predictions, best first"
    assert [line.strip().partition(": ")[0] for line in lines[:-1]] == [one.name for one in scenarios[:6]]
    assert lines[-1] == f"  {len(scenarios) - 6} more in .scenarios>"
    assert len(repr(predictions)) < 1500
    assert repr(predictions.result).startswith(f"<WhatIf: {len(scenarios)} scenarios, measured ")
    both = pptrace.compare(SAMPLES / "1f1b_p2", run)
    assert repr(both.result) == f"<Comparison: {both.detail}>"


@pytest.mark.parametrize("name", ["ops", "comms", "memory", "steps", "ranks"])
def test_a_table_that_a_user_changes_is_unchanged_at_the_next_look_and_in_files(tmp_path: Path, name: str) -> None:
    run = pptrace.load(SAMPLES / "1f1b_p2")
    before, page = getattr(run, name).copy(), run.to_json(ops=True)
    changed = getattr(run, name)
    for column in changed.columns:
        changed[column] = 0
    changed["added"] = 1
    pd.testing.assert_frame_equal(getattr(run, name), before)
    run.to_csv(tmp_path)
    if name in ("ops", "comms"):
        pd.testing.assert_frame_equal(before, read_table(tmp_path / f"{name}.csv"), check_dtype=False)
    assert run.to_json(ops=True) == page


def test_tables_of_a_run_on_paper_are_copies_too() -> None:
    step = pptrace.simulate("1f1b", pp=2, microbatches=2)
    for name in ("ops", "ranks"):
        before, changed = getattr(step, name).copy(), getattr(step, name)
        changed.loc[:, "rank"] = 7
        changed["added"] = 1
        pd.testing.assert_frame_equal(getattr(step, name), before)
