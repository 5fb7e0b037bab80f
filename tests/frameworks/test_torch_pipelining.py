"""Traces of torch.distributed.pipelining, made here by torch itself: the plan, the ops and the messages are found again."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from pptrace.model.tables import COMPUTE_KINDS
from pptrace.report.to_json import report_object
from pptrace.workflow.load import Analysis, load
from tests.frameworks.by_hand_cases import train_by_hand
from tests.frameworks.torch_cases import SCHEDULES, SlowRun, TorchRun, train_profiled, train_slow
from tests.support.analysed import recognise
from tests.support.extent import ALL
from tests.support.found_ops import planned
from tests.support.pool import Pool
from tests.support.read import read_kineto


class Recorded(NamedTuple):
    run: TorchRun
    folder: Path
    analysis: Analysis


@pytest.fixture(scope="module")
def recorded(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Recorded]:
    """Traces of a schedule with two microbatches for each rank, recorded and read once for all tests that look at them."""

    @cache
    def record_once(name: str, pp: int, record_shapes: bool) -> Recorded:
        run = TorchRun(name, pp, 2 * pp, record_shapes=record_shapes)
        folder = tmp_path_factory.mktemp(name)
        pool.run(train_profiled, run, str(folder), world=pp, timeout_s=300)
        return Recorded(run, folder, load([folder]))

    return lambda name, pp=2, record_shapes=True: record_once(name, pp, record_shapes)


FEW = ("gpipe", "1f1b", "interleaved-1f1b", "zbv", "dualpipe-v")
"""One chunk and several, a V, split backwards and pairs."""


@pytest.mark.parametrize(("name", "pp"), [*((name, 2) for name in (SCHEDULES if ALL else FEW)), *[("1f1b", 4)] * ALL])
def test_the_plan_is_found_microbatch_by_microbatch(recorded: Callable[..., Recorded], name: str, pp: int) -> None:
    run, _, analysis = recorded(name, pp)
    for rank in range(pp):
        assert planned(analysis.schedule.plan, rank) == planned(run.plan, rank)
    report = analysis.report
    assert report.schedule.name == name
    assert report.schedule.source == "recognised"
    assert report.schedule.mismatches == ()
    assert report.framework == ("unlabelled" if name == "1f1b" else "torch.distributed.pipelining")
    assert (report.mesh.pp, report.mesh.vpp) == (pp, run.plan.num_chunks)
    assert len(report.steps) == run.steps
    ops = analysis.data.ops
    assert set(ops.loc[ops["kind"].isin(COMPUTE_KINDS), "source"]) == {"inferred" if name == "1f1b" else "label"}
    warned = " ".join(report.warnings)
    assert ("inferred from the order" in warned) == (name == "1f1b")
    assert ("no label names the stages" in warned) == (name in ("1f1b", "gpipe"))
    calls = [comm for step in report.steps for rank in step.ranks for comm in rank.comms]
    assert all(comm.bytes for comm in calls)  # of the recorded shapes
    assert "comms[].bytes" not in warned


@pytest.mark.parametrize(("name", "record_shapes"), [("1f1b", False), ("zbv", True)])
def test_every_message_meets_its_other_end(recorded: Callable[..., Recorded], name: str, record_shapes: bool) -> None:
    run, _, analysis = recorded(name, record_shapes=record_shapes)
    comms = analysis.data.comms
    assert (comms["bytes"] > 0).all() if record_shapes else (comms["bytes"] == -1).all()
    plan = run.plan
    crossing = sum(plan.placement[s] != plan.placement[s + 1] for s in range(plan.num_stages - 1))
    assert len(comms) == 2 * 2 * crossing * run.microbatches * run.steps  # two ends, two directions
    assert (comms["match"] >= 0).all()
    assert (comms["transfer_start_ns"] <= comms["transfer_end_ns"]).all()


def test_waiting_inside_a_label_is_no_compute(recorded: Callable[..., Recorded]) -> None:
    """Ops last from their first operator to their last, and lie within their labels."""
    run, folder, analysis = recorded("interleaved-1f1b")
    ops = analysis.data.ops
    for rank in range(2):
        labels = defaultdict(list)  # by name, step after step
        events = json.loads((folder / f"rank{rank}.json").read_text())["traceEvents"]
        named = (e for e in events if e.get("ph") == "X" and e["name"].startswith("PP:"))
        for event in sorted(named, key=lambda event: event["ts"]):
            labels[event["name"]].append(event["dur"] * 1e3)
        rank_ops = ops[(ops["rank"] == rank) & ops["kind"].isin(COMPUTE_KINDS)].sort_values("start_ns")
        assert len(rank_ops) == 16 * run.steps
        shorter = 0
        for op in rank_ops.itertuples():
            label = labels[f"PP:{op.stage}{op.kind}{op.microbatch}"].pop(0)
            assert 0 < op.end_ns - op.start_ns <= label
            shorter += op.end_ns - op.start_ns < 0.95 * label
        assert shorter > 0


@pytest.mark.parametrize(
    ("run", "world", "name"),
    [
        (SlowRun(), 3, "1f1b"),
        (SlowRun(loss_chunks=4), 2, "1f1b"),
        (SlowRun(loss_chunks=1), 2, "1f1b"),
        (SlowRun(by_hand="fifo", record_shapes=True), 2, "gpipe"),
        (SlowRun(by_hand="lifo"), 2, "gpipe"),
    ],
)
def test_stages_of_one_operator_are_found_between_what_surrounds_a_step(
    pool: Pool, tmp_path: Path, run: SlowRun, world: int, name: str
) -> None:
    """Each op with the kind and microbatch that its own stage saw at that time; a backward of a loss's own is none."""
    seen = pool.run(train_slow, run, str(tmp_path), world=world, timeout_s=120)
    recognised = recognise([read_kineto(tmp_path / f"rank{rank}.json") for rank in range(world)])
    assert recognised.schedule.name == name
    ops = recognised.ops[recognised.ops["kind"].isin(COMPUTE_KINDS)]
    for rank in range(world):
        rank_ops = ops[ops["rank"] == rank].sort_values("start_ns")
        assert len(rank_ops) == len(seen[rank]) == 2 * run.microbatches * run.steps
        assert set(rank_ops["stage"]) == {rank}
        for op, (kind, microbatch, start, end) in zip(rank_ops.itertuples(), seen[rank], strict=True):
            assert (op.kind, op.microbatch) == (kind, microbatch)
            assert min(op.end_ns, end) > max(op.start_ns, start)
            assert kind == "F" or op.start_ns >= start
        alone = recognise([read_kineto(tmp_path / f"rank{rank}.json")]).ops
        alone = alone[alone["kind"].isin(COMPUTE_KINDS)].sort_values("start_ns")
        for column in ("kind", "start_ns", "end_ns"):
            assert alone[column].tolist() == rank_ops[column].tolist()
        assert all(one in (-1, all_) for one, all_ in zip(alone["microbatch"], rank_ops["microbatch"], strict=True))


def test_an_overlapped_pair_gives_both_halves_and_no_message_speaks_against_the_hosts_clock(
    recorded: Callable[..., Recorded],
) -> None:
    run, _, analysis = recorded("dualpipe-v")
    assert analysis.report.clock.method == "same-host"
    chunk_of = {stage: run.plan.stages_of(rank).index(stage) for rank in range(2) for stage in run.plan.stages_of(rank)}
    for step in report_object(analysis.report, with_ops=True)["steps"]:
        for rank in step["ranks"]:
            pairs = [action for action in run.plan.compute_actions(rank["rank"]) if action.parts]
            rows = [op for op in rank["ops"] if op["kind"] == "OVERLAP_F_B"]
            assert len(rows) == len(pairs) > 0
            for row, pair in zip(rows, pairs, strict=True):
                names = ("kind", "stage", "chunk", "microbatch")
                halves = [(half.kind, half.stage, chunk_of[half.stage], half.microbatch) for half in pair.parts]
                assert row["parts"] == [dict(zip(names, half, strict=True)) for half in halves]
            assert all("parts" not in op for op in rank["ops"] if op["kind"] != "OVERLAP_F_B")


@pytest.mark.parametrize(
    ("loop", "reason"), [("ring", "other numbers of messages"), ("chunks", "the nodes of other forwards")]
)
def test_what_has_the_order_of_chunks_alone_is_no_interleaved_pipeline(
    pool: Pool, tmp_path: Path, loop: str, reason: str
) -> None:
    pool.run(train_by_hand, loop, str(tmp_path), world=4, timeout_s=120)
    report = load([tmp_path]).report
    assert (report.schedule.name, report.mesh.vpp) == ("unknown", None)
    assert report.steps, "the optimizers tell them"
    assert not any(step.has_pipeline for step in report.steps)
    assert any(reason in line for line in report.warnings), report.warnings
