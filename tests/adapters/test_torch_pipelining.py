"""Hooked schedules of torch: every op and message with its kind, stage and microbatch, and nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pandas as pd
import pytest
from torch.distributed.pipelining.schedules import _Action

from instrument.adapters.hooks import Hooks
from instrument.adapters.torch_pipelining import PipeliningHooks, plan_of
from instrument.adapters.works import Works
from pptrace.model.tables import COMPUTE_KINDS
from pptrace.schedule.actions import parse_action
from pptrace.schedule.text import from_rows
from pptrace.workflow.load import load
from tests.adapters.heard import HeardSession
from tests.adapters.pipelining_cases import train
from tests.frameworks.torch_cases import SCHEDULES, TorchRun
from tests.support.extent import ALL
from tests.support.pool import Pool


class Trained(NamedTuple):
    folder: Path
    ranks: list[tuple[list[str], list[list[Any]]]]
    """By rank its losses, and by recorded step what it ran."""

    @property
    def losses(self) -> list[list[str]]:
        return [losses for losses, _ in self.ranks]


@pytest.fixture(scope="module")
def trained(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trained]:
    """Training with or without hooks, once for all tests that look at it."""

    @cache
    def train_once(run: TorchRun, hooked: bool = True, passes: int = 1) -> Trained:
        folder = tmp_path_factory.mktemp(run.schedule)
        return Trained(folder, pool.run(train, run, str(folder), hooked, None, passes, world=run.pp))

    return train_once


class Stage:
    """The methods of torch's stages; the last of two."""

    stage_index, group_size, group_rank, group, is_last = 1, 2, 1, None, True

    def forward_one_chunk(self, microbatch: int) -> None: ...

    def backward_one_chunk(self, microbatch: int) -> None: ...

    def perform_reduce_grad(self, scale: int) -> None: ...

    def nothing(self, microbatch: int) -> list[Any]:
        return []

    backward_weight_one_chunk = get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = nothing


class Schedule:
    """A schedule of torch that runs a function."""

    def __init__(self, run: Callable[[Stage], None], pipeline_order: Any = None) -> None:
        self.run, self._stages, self.pipeline_order = run, [Stage()], pipeline_order

    def step(self) -> None:
        self.run(self._stages[0])

    def _maybe_compute_loss(self) -> None: ...


def test_an_op_ends_with_its_function_or_the_loss_and_gradients_are_reduced_behind_it(hooks: Hooks) -> None:
    session, schedules = HeardSession(), ModuleType("schedules")
    vars(schedules).update(_PipelineStageBase=Stage, _PipelineSchedule=Schedule, _batch_p2p=lambda ops: [])
    vars(schedules).update(PipelineScheduleSingle=Schedule, PipelineScheduleMulti=type("Multi", (), {"step": None}))
    PipeliningHooks(schedules, hooks, Works(hooks), session)
    num_open: list[int] = []

    def run(stage: Stage) -> None:
        calls = (
            partial(stage.forward_one_chunk, 0),
            schedule._maybe_compute_loss,
            partial(stage.backward_one_chunk, 0),
        )
        for call in (*calls, partial(stage.perform_reduce_grad, 1)):
            call()
            num_open.append(len(session.recorder.open))

    schedule = Schedule(run)
    schedule.step()
    assert session.words == ["1F0", "1B0", "GRAD_SYNC"]
    Stage().perform_reduce_grad(1)  # outside of a pass
    assert len(session.words) == 3
    assert num_open == [1, 0, 0, 0]


def test_the_rows_of_a_plan_may_stand_in_any_order() -> None:
    rows = {1: ["1F0", "1B0"], 0: ["0F0", None, "0B0"]}
    order = {rank: [None if text is None else _Action.from_str(text) for text in row] for rank, row in rows.items()}
    assert plan_of(Schedule(lambda _: None, order), 2) == from_rows([["0F0", "0B0"], ["1F0", "1B0"]], "custom")
    assert plan_of(Schedule(lambda _: None, order), 3) is None


LONGER = 4
"""Steps of the plain runs, with which shorter ones begin too."""


def halves(ops: pd.DataFrame) -> list[tuple[str, int, int]]:
    """Simple ops in order, overlapped pairs taken apart."""
    result = []
    for op in ops.sort_values("start_ns", kind="stable").itertuples():
        parts = parse_action(op.pair).parts if op.pair else ()
        result += [(str(p.kind), p.stage, p.microbatch) for p in parts] or [(op.kind, op.stage, op.microbatch)]
    return result


FEW = (("gpipe", 2), ("1f1b", 4), ("interleaved-zb", 2), ("dualpipe-v", 4))


@pytest.mark.parametrize(("name", "pp"), [*((name, 2) for name in SCHEDULES), *FEW] if ALL else FEW)
def test_hooks_name_every_op_and_message(trained: Callable[..., Trained], name: str, pp: int) -> None:
    run = TorchRun(name, pp, 2 * pp)
    folder, results = trained(run)
    analysis = load([folder])
    report, plan = analysis.report, run.plan
    assert report.framework == "torch.distributed.pipelining"
    assert (report.schedule.name, report.schedule.source, report.schedule.mismatches) == (name, "metadata", ())
    assert (report.mesh.pp, report.mesh.vpp) == (pp, plan.num_chunks)
    compute = analysis.data.ops[analysis.data.ops["kind"].isin(COMPUTE_KINDS)]
    assert compute["step"].nunique() == run.steps
    for rank, (_, ran) in enumerate(results):
        own = compute[compute["rank"] == rank]
        for done, (_, ops) in zip(ran, own.groupby("step"), strict=True):
            assert halves(ops) == [tuple(entry[:3]) for entry in done]
            spans = [entry[4] - entry[3] for entry in done]
            assert len(ops) <= len(spans)
    comms = analysis.data.comms
    crossing = sum(plan.placement[s] != plan.placement[s + 1] for s in range(plan.num_stages - 1))
    messages = comms[comms["kind"].isin(("send", "recv")) & (comms["axis"] == "pp") & (comms["step"] >= 0)]
    assert len(messages) == 2 * 2 * crossing * run.microbatches * run.steps  # two ends, two directions
    assert (messages["match"] >= 0).all()
    assert (messages[["stage", "microbatch", "bytes", "peer"]] >= 0).all(axis=None)
    for step in report.steps:
        assert step.bubble.ratio is not None
        assert step.bubble.waterfall_ns is not None
        for rank_step in step.ranks:
            assert rank_step.compute_ns + rank_step.exposed_comm_ns + rank_step.bubble_ns == step.span_ns


@pytest.mark.parametrize(("name", "passes"), [("1f1b", 3), ("dualpipe-v", 2)])
def test_calls_before_one_update_are_one_step_whose_microbatches_are_numbered_on(
    trained: Callable[..., Trained], name: str, passes: int
) -> None:
    run = TorchRun(name, 2, 4)
    folder, results = trained(run, passes=passes)
    analysis = load([folder])
    compute = analysis.data.ops[analysis.data.ops["kind"].isin(COMPUTE_KINDS)]
    assert sorted(compute["step"].unique()) == list(
        range(1, 1 + run.steps)
    )  # step 0, which was not recorded, has as many
    for rank, (_, ran) in enumerate(results):
        for done, (_, ops) in zip(ran, compute[compute["rank"] == rank].groupby("step"), strict=True):
            size = len(done) // passes
            assert halves(ops) == [
                (kind, stage, microbatch + index // size * run.microbatches)
                for index, (kind, stage, microbatch, *_) in enumerate(done)
            ]
    comms = analysis.data.comms
    messages = comms[comms["kind"].isin(("send", "recv")) & (comms["axis"] == "pp") & (comms["step"] >= 0)]
    assert set(messages["microbatch"]) == set(range(passes * run.microbatches))
    assert (messages["match"] >= 0).all()
    assert not [line for line in analysis.report.warnings if "an update takes" in line]


def test_the_plan_of_one_call_is_the_plan_of_each_of_several(trained: Callable[..., Trained]) -> None:
    folder, _ = trained(TorchRun("1f1b", 2, 4), passes=3)
    report = load([folder]).report
    assert (report.schedule.num_microbatches, report.schedule.source, report.schedule.mismatches) == (
        12,
        "metadata",
        (),
    )
    assert [line for line in report.warnings if line.startswith("each step runs 1f1b 3 times")]
    assert all(step.bubble.ratio is not None and step.bubble.waterfall_ns is not None for step in report.steps)


@pytest.mark.parametrize(("name", "pp"), [("1f1b", 4), ("zbv", 2), ("dualpipe-v", 4)])
def test_losses_are_the_same_to_the_last_bit(trained: Callable[..., Trained], name: str, pp: int) -> None:
    run = TorchRun(name, pp, 2 * pp)
    hooked = trained(run).losses
    plain = trained(replace(run, steps=LONGER), False).losses
    assert hooked == [losses[: run.microbatches * (run.steps + 1)] for losses in plain]
    assert sum(map(len, hooked)) == run.microbatches * (run.steps + 1)
