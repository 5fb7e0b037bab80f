"""The step of ``whatif`` is that of ``analyze``: one length from start to start, whoever shows it."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

import pptrace
from pptrace.analysis.whatif.measured_gains import OutsideTimes
from pptrace.analysis.whatif.study import MOST_ERROR
from pptrace.analysis.whole_run import OutsidePart
from pptrace.api.whatif import Predictions
from pptrace.errors import UsageError
from pptrace.model.report_table import Amount
from pptrace.model.units import milliseconds
from pptrace.report.charts.changes import changes_chart
from pptrace.report.tables.step_series import steps_table
from pptrace.report.whatif import headline, replay_line, span_words, whatif_tables
from tests.support.extent import ALL
from tests.support.programs import SAMPLES

FEW = ["uneven_p4", "dualpipe_p4", "faults_pp2_dp2", "gpu_nccl_torch_1f1b_p4", "gpu_zbv_p2", "mesh_pp2_tp2_cp2_dp2"]
RUNS = sorted(path.parent.name for path in SAMPLES.glob("*/expected.json")) if ALL else FEW
CHOSEN = {"schedules": "gpipe", "ideals": "jitter"}


@cache
def predicted(name: str) -> tuple[pptrace.Run, Predictions]:
    run = pptrace.load(SAMPLES / name)
    return run, run.whatif(**CHOSEN)


@pytest.mark.parametrize("name", RUNS)
def test_the_measured_step_is_the_one_that_the_report_shows(name: str) -> None:
    run, predictions = predicted(name)
    step, result = run.report.typical_step, predictions.result
    assert step.period_ns is not None
    assert result.measured_ns == result.measured_period_ns == step.length_ns
    assert f"its step {milliseconds(step.length_ns)} ms (typical of " in replay_line(result)
    if found := re.search(r"takes ([\d,.]+) ms", run.report.verdict):
        assert float(found[1].replace(",", "")) == pytest.approx(result.measured_ns / 1e6, rel=5e-3)
    (shown,) = [row for row in steps_table(run.report, step, Amount.WHOLE).rows if row[0] == str(step.step)]
    assert shown[1] == milliseconds(result.measured_ns)


@pytest.mark.parametrize("name", RUNS)
def test_every_length_is_the_pipelines_and_what_is_outside_of_it(name: str) -> None:
    _, predictions = predicted(name)
    result = predictions.result
    outside = result.measured_ns - result.measured_span_ns
    assert result.replay_ns == result.replay_span_ns + outside
    if result.today is None:
        assert result.replay_error > MOST_ERROR
        return
    assert result.today.length_ns == result.measured_ns
    for one in (*result.scenarios, result.today):
        assert (one.period_ns, one.period_low_ns, one.period_high_ns) == (
            one.span_ns + outside,
            one.low_ns + outside,
            one.high_ns + outside,
        )
        assert one.same_work_ns == result.measured_ns
        assert one.gain_share == pytest.approx(one.gain_ns / result.measured_ns)


def test_tables_json_frames_and_pictures_show_the_same_length() -> None:
    run = pptrace.load(SAMPLES / "uneven_p4")
    predictions = run.whatif()
    result = predictions.result
    tables = whatif_tables(result)
    of_json = json.loads(predictions.to_json())
    shown = {row[0]: row[table.num_labels - 1 :] for table in tables for row in table.rows}
    frame = predictions.scenarios.set_index("name")
    points = {point[0]: point[1] for trace in changes_chart(result).data for point in trace.customdata or ()}
    for one, entry in zip(result.scenarios, of_json["scenarios"], strict=True):
        lengths = tuple(map(milliseconds, (one.length_ns, one.length_low_ns, one.length_high_ns)))
        assert shown[one.name][1:4] == lengths
        assert entry["period_ns"] == frame.period_ns[one.name] == one.length_ns
        assert points.get(one.name, lengths[0]) == lengths[0]
        assert span_words(one, result).endswith(f"instead of {milliseconds(result.measured_ns)}")
        gain = one.gain_ns / result.measured_ns
        assert shown[one.name][5] == f"{gain:.1%}"
    assert shown["as it was"][1] == milliseconds(result.measured_ns) == milliseconds(of_json["measured_period_ns"])
    assert headline(result).endswith(f"instead of {milliseconds(result.measured_ns)}")
    assert "outside the pipeline stays as it is" in " ".join(tables[0].notes)


def test_without_a_known_start_of_the_next_step_lengths_are_those_of_the_pipeline(tmp_path: Path) -> None:
    rows = "0,0,F,0,10,0,0\n1,0,F,10,20,1,0\n1,0,B,20,30,1,0\n0,0,B,30,40,0,0\n"
    (tmp_path / "ops.csv").write_text(f"rank,step,kind,start_us,end_us,stage,microbatch\n{rows}", encoding="utf-8")
    result = pptrace.load(tmp_path / "ops.csv", cache=False).whatif().result
    assert (result.measured_period_ns, result.replay_period_ns) == (None, None)
    assert result.measured_ns == result.measured_span_ns == 40_000
    assert {one.period_ns for one in result.scenarios} == {None}
    assert "(the pipeline's span, typical of 1 step)" in replay_line(result)
    assert "the step" not in headline(result)
    (table,) = whatif_tables(result)
    assert "ms: the pipeline's span; when the next step begins is not known" in table.notes


@pytest.mark.parametrize("part", ["unrecorded_ranks", "unknown_rank"])
def test_waiting_for_ranks_without_a_trace_is_no_change(part: str) -> None:
    run, predictions = predicted("uneven_p4")
    times = OutsideTimes(10, 5, {})
    with pytest.raises(UsageError, match="no gain is known: only the traces of these ranks tell"):
        times.without(part, predictions.result.today)
    step = replace(run.report.steps[0], outside=(OutsidePart(part, {}, 5), OutsidePart("data", {}, 1)))
    assert list(OutsideTimes.of([step], step, 1).of_parts) == ["data"]
