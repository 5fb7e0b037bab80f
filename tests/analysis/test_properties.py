"""Properties of every report: neither order nor numbers of ranks and rows change it, and a run as simulated has no cause but its
schedule.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import polars
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pptrace
from pptrace.analysis.report import Report
from pptrace.schedule.actions import Kind
from pptrace.schedule.plan_table import PlanTable
from pptrace.schedule.registry import SCHEDULES, build
from pptrace.schedule.replay_table import replay_table
from pptrace.workflow.load import load
from tests.schedule.shapes import legal_shapes
from tests.support.extent import by_turns
from tests.support.parts import by_cause
from tests.support.replayed import op_rows

FORMATS = ("csv", "parquet", "json")


def cases() -> list[tuple[str, str, float]]:
    """(schedule, form, ms of a message) of every schedule: all of them with PPTRACE_ALL, else forms and messages take turns."""
    return by_turns(list(SCHEDULES), FORMATS, (0.0, 0.2))


def ops_of(table: PlanTable, durations: np.typing.NDArray[np.int64], pair: list[str]) -> pd.DataFrame:
    """The ops of steps and pipelines whose ops take ``durations`` (steps, pipelines, rows), replayed."""
    replay, (num_steps, dp, _) = replay_table(table, durations), durations.shape
    begin = np.concatenate(([0], np.cumsum(replay.end.max(axis=(1, 2)) + 1000)))[:-1]
    rows = [
        op_rows(
            table,
            replay.start[step, replica] + begin[step],
            replay.end[step, replica] + begin[step],
            (dp, replica),
            **{"dp_rank": replica, "pp_rank": table.rank, "step": step, "pair": pair},
        )
        for step in range(num_steps)
        for replica in range(dp)
    ]
    return pd.concat(rows, ignore_index=True)


def noisy_ops(seed: int, name: str, pp: int = 4, dp: int = 2, num_steps: int = 3) -> pd.DataFrame:
    plan = build(name, pp, 2 * pp)
    table = plan.table
    actions = [action for rank in range(pp) for action in plan.compute_actions(rank)]
    pair = [str(action) if action.kind is Kind.OVERLAP_F_B else "" for action in actions]
    durations = np.random.default_rng(seed).integers(10_000, 40_000, (num_steps, dp, len(table)))
    durations[:, -1, table.rank == 1] *= 2  # a straggler
    return ops_of(table, durations, pair)


def report_of(ops: pd.DataFrame) -> Report:
    with TemporaryDirectory(prefix="pptrace-properties-") as folder:
        path = Path(folder) / "ops.csv"
        ops.to_csv(path, index=False)
        return load([path], cache=False).report


def as_json(report: Report) -> dict[str, Any]:
    """The report without the path of what was read."""
    from pptrace.report.to_json import dump, report_object

    value: dict[str, Any] = json.loads(dump(report_object(report, with_ops=True)))
    return value | {
        "inputs": [],
        "warnings": [re.sub(r"\S*pptrace-properties-\S*", "", line) for line in value["warnings"]],
    }


few = settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
names = st.sampled_from(["1f1b", "interleaved-1f1b", "zbv", "dualpipe-v"])


@few
@given(st.integers(0, 10_000), names)
def test_the_order_of_rows_changes_nothing(seed: int, name: str) -> None:
    ops = noisy_ops(seed, name)
    shuffled = ops.sample(frac=1, random_state=seed)
    assert as_json(report_of(shuffled)) == as_json(report_of(ops))


@few
@given(st.integers(0, 10_000), names)
def test_numbers_of_ranks_are_names(seed: int, name: str) -> None:
    """Replicas that change places: their figures go with them, and all others stay."""
    ops = noisy_ops(seed, name, dp=3)
    order = np.random.default_rng(seed).permutation(3)
    replica = order[ops["dp_rank"]]
    moved = ops.assign(dp_rank=replica, rank=ops["pp_rank"] * 3 + replica)
    number = dict(zip(ops["rank"].tolist(), moved["rank"].tolist(), strict=True))
    assert renumbered(as_json(report_of(ops)), number) == renumbered(as_json(report_of(moved)), {})


def renumbered(value: Any, number: dict[int, int]) -> Any:
    """A report in which ranks have other numbers, with lists in an order that does not depend on these."""
    if isinstance(value, dict):
        renamed = {key: renumbered(inner, number) for key, inner in value.items() if key not in _TEXTS}
        if isinstance(rank := value.get("rank"), int):
            renamed["rank"] = number.get(rank, rank)
        return renamed
    if isinstance(value, list):
        return sorted(
            (renumbered(inner, number) for inner in value), key=lambda inner: json.dumps(inner, sort_keys=True)
        )
    return value


_TEXTS = ("title", "detail", "verdict", "warnings", "offsets_ns")
"""Fields whose texts name ranks by number."""


def exported(step: pptrace.SimulatedStep, form: str, p2p_ns: int, folder: Path) -> Path:
    """A simulated step as a file; messages are in it where they take time, and in JSON always."""
    path = folder / f"ops.{form}"
    if form == "json":
        step.to_json(path, ops=True)
        return path
    ops = step.ops
    if p2p_ns:
        ops = pd.concat([ops, messages_of(step, p2p_ns)], ignore_index=True)
    if form == "csv":
        ops.to_csv(path, index=False)
    else:
        columns = {name: [None if pd.isna(cell) else cell for cell in ops[name]] for name in ops}
        polars.DataFrame(columns, infer_schema_length=None).write_parquet(path)
    return path


def messages_of(step: pptrace.SimulatedStep, p2p_ns: int) -> pd.DataFrame:
    """Both ends of every message: sent at the end of the op before, there after ``p2p_ns``, awaited by its reader."""
    table, ops = step.plan.table, step.ops
    entries = np.flatnonzero(table.dep_is_message)
    sender, reader = table.dep[entries], table.dep_reader[entries]
    sent = ops["end_ns"].to_numpy()[sender]
    slot = table.dep_slot[entries] // 3
    stage, is_forward = slot // table.num_microbatches, table.dep_slot[entries] % 3 == 0
    shared = {
        "step": 0,
        "microbatch": slot % table.num_microbatches,
        "direction": np.where(is_forward, "F", "B"),
        "axis": "pp",
        "start_ns": sent,
        "end_ns": sent + p2p_ns,
        "match": np.arange(len(entries)),
    }
    ends = []
    for kind, own, other, of_stage in (
        ("send", sender, reader, stage),
        ("recv", reader, sender, stage + np.where(is_forward, 1, -1)),
    ):
        ends.append(
            pd.DataFrame(
                {**shared, "kind": kind, "rank": table.rank[own], "peer": table.rank[other], "stage": of_stage}
            )
        )
    return pd.concat(ends, ignore_index=True).assign(
        asked_ns=lambda rows: rows["end_ns"].where(rows["kind"] == "send", rows["start_ns"])
    )


@pytest.mark.parametrize(("name", "form", "p2p"), cases())
def test_a_simulated_run_has_no_cause_but_its_schedule_and_messages_that_take_time(
    name: str, form: str, p2p: float, tmp_path: Path
) -> None:
    pp, microbatches, chunks = max(shape for shape in legal_shapes(name, 4, rounds=2) if shape[0] in (2, 4))
    step = pptrace.simulate(name, pp=pp, microbatches=microbatches, chunks=chunks, p2p=p2p)
    report = load([exported(step, form, int(p2p * 1_000_000), tmp_path)], cache=False).report
    (reported,) = report.steps
    assert report.schedule.mismatches == ()
    assert reported.causes is not None
    assert reported.span_ns == step.makespan_ns
    shares = by_cause(reported.causes)
    assert sum(shares.values()) == reported.span_ns - reported.ideal_ns
    expected = {"structural"} | ({"communication"} if p2p else set())
    assert {cause for cause, ns in shares.items() if ns} <= expected
    assert {finding.evidence["cause"] for finding in report.findings} <= expected
