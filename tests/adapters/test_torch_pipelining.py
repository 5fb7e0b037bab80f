"""Hooked schedules of torch: every op and message with its kind, stage and microbatch, and nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest

from pptrace.model.tables import COMPUTE_KINDS
from pptrace.schedule.actions import parse_action
from pptrace.workflow.load import load
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
    def train_once(run: TorchRun, hooked: bool = True) -> Trained:
        folder = tmp_path_factory.mktemp(run.schedule)
        return Trained(folder, pool.run(train, run, str(folder), hooked, world=run.pp))

    return train_once


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


@pytest.mark.parametrize(("name", "pp"), [("1f1b", 4), ("zbv", 2), ("dualpipe-v", 4)])
def test_losses_are_the_same_to_the_last_bit(trained: Callable[..., Trained], name: str, pp: int) -> None:
    run = TorchRun(name, pp, 2 * pp)
    hooked = trained(run).losses
    plain = trained(replace(run, steps=LONGER), False).losses
    assert hooked == [losses[: run.microbatches * (run.steps + 1)] for losses in plain]
    assert sum(map(len, hooked)) == run.microbatches * (run.steps + 1)
