"""``pptrace whatif --repair-order``: the order that it writes, what it predicts, and what ranks then take."""

from __future__ import annotations

from pathlib import Path

import pytest

from pptrace.analysis.whatif.candidates import REPAIRED
from pptrace.analysis.whatif.result import Standing
from pptrace.api.whatif import predict_changes
from pptrace.api.wishes import Wishes
from pptrace.errors import PptraceError, UsageError
from pptrace.schedule.actions import Action, Kind
from pptrace.schedule.registry import build
from pptrace.schedule.text import from_csv, to_rows
from pptrace.schedule.validate import read_sound_csv
from pptrace.workflow.analyse import Analysis
from pptrace.workflow.load import load
from pptrace.workflow.reopen import ReopenedAnalysis, _Kept
from tests.schedule import torch_tables
from tests.schedule.test_text import torch_runtime
from tests.schedule.torch_tables import with_torch_messages
from tests.support.analysed import analyse
from tests.support.programs import EXAMPLE, pptrace, sizes
from tests.support.synthetic import record, run_on_paper

MS = 1_000_000
EARLY = with_torch_messages(build("interleaved-1f1b", 2, 4))


def cost(action: Action) -> int:
    return 10 * MS if action.kind is Kind.F else 20 * MS


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    """A run of torch's order in which each rank waits in one call after the other."""
    return analyse(record(EARLY, cost, MS, steps=6, one_by_one=True).traces())


def test_the_gain_is_that_of_the_report_and_of_a_machine(analysis: Analysis) -> None:
    predictions = predict_changes(analysis, Wishes(repair_order=True))
    (scenario,) = predictions.result.scenarios
    order = analysis.order
    before, after = (
        run.window[1] - run.window[0]
        for run in (run_on_paper(plan, cost, MS, one_by_one=True) for plan in (EARLY, order.repaired))
    )
    assert (scenario.name, scenario.standing) == (REPAIRED, Standing.SURE)
    assert scenario.span_ns == after
    assert scenario.gain_ns == before - after > 0
    assert analysis.report.early_receives.gain_ns == scenario.gain_ns
    assert predictions.result.replay_ns == predictions.result.measured_ns


def test_torch_loads_and_runs_the_csv(analysis: Analysis, tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    predict_changes(analysis, Wishes(repair_order=True)).to_csv(path)
    plan = read_sound_csv(path)  # complete, and free of deadlock
    assert to_rows(plan) == to_rows(analysis.order.repaired) != to_rows(EARLY)
    runtime = torch_runtime(EARLY)
    runtime._load_csv(str(path), format="compute_comms")
    assert torch_tables.text_rows(runtime.pipeline_order_with_comms) == to_rows(plan)
    ran = runtime._simulate()
    assert [[cell for cell in row if cell] for row in torch_tables.text_rows(ran)] == to_rows(plan)


def test_it_is_among_all_changes_and_says_how_it_is_made(analysis: Analysis) -> None:
    scenarios = {one.name: one for one in predict_changes(analysis, Wishes()).result.scenarios}
    assert scenarios[REPAIRED].paste["pptrace"] == "--schedule FILE.csv"
    assert "compute_comms" in scenarios[REPAIRED].paste["torch.distributed.pipelining"]


def test_a_run_whose_receives_hold_up_nothing_has_nothing_to_repair() -> None:
    analysis = analyse(record(build("1f1b", 2, 4), cost, steps=6).traces())
    with pytest.raises(PptraceError, match="nothing to repair in this run: none of its receives holds up another call"):
        predict_changes(analysis, Wishes(repair_order=True))
    assert REPAIRED not in [one.name for one in predict_changes(analysis, Wishes()).result.scenarios]


def test_it_goes_with_no_other_change(analysis: Analysis) -> None:
    with pytest.raises(UsageError, match="--repair-order goes with no other change"):
        predict_changes(analysis, Wishes(repair_order=True, chunks=2))


def test_a_run_whose_report_was_read_again_has_the_order_too(analysis: Analysis) -> None:
    kept = _Kept(analysis.report, analysis.schedule, analysis.mesh, analysis.windows, analysis.num_ops)
    again = ReopenedAnalysis(kept, {}, lambda: analysis)
    assert again.order is analysis.order is not None


@pytest.mark.processes
def test_real_processes_take_what_is_predicted(analysis: Analysis) -> None:
    predictions = predict_changes(analysis, Wishes(repair_order=True, verify=True))
    (scenario,) = predictions.result.scenarios
    assert scenario.verified_span_ns is not None
    assert scenario.span_ns <= scenario.verified_span_ns < 2 * scenario.span_ns  # other processes have the cores too


@pytest.mark.processes
def test_a_recorded_run_is_named_and_its_repaired_order_gains_what_was_predicted(tmp_path: Path) -> None:
    """Over gloo, one blocking call at a time: gloo itself matches messages by tag and would hold up nothing."""
    early, repaired = tmp_path / "early.csv", tmp_path / "repaired.csv"
    early.write_text("\n".join(",".join(row) for row in to_rows(EARLY)) + "\n")
    options = (*sizes(layers=4, hidden=16, heads=2, seq=8, microbatches=4), "--prefetch", "0", "--p2p-mode", "blocking")
    options += ("--sleep-forward", "20", "--sleep-backward", "40", "--steps", "4")

    def recorded(schedule: Path, attempt: int) -> Path:
        out = tmp_path / f"{schedule.stem}{attempt}"
        arguments = ("run", "-n", "2", "--steps", "1:4", "--no-analyze", "-o", out, EXAMPLE, "--schedule", schedule)
        ended = pptrace(*arguments, *options, forked=True)
        assert ended.code == 0, ended.err
        return out

    for attempt in range(4):  # a busy machine stretches one of two runs
        run = recorded(early, attempt)
        ended = pptrace("whatif", run, "--repair-order", "--csv", repaired, forked=True)
        assert ended.code == 0, ended.err
        before = load([run]).report
        predicted = before.early_receives.gain_ns
        after = load([recorded(repaired, attempt)]).report
        gain = (before.typical_step.span_ns or 0) - (after.typical_step.span_ns or 0)
        if 0.5 * predicted < gain < 2 * predicted:
            break
    assert 0.5 * predicted < gain < 2 * predicted
    assert from_csv(repaired.read_text()).has_comms
