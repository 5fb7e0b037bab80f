"""Ops and messages of plans and of runs that were recognised, as texts."""

from __future__ import annotations

import pandas as pd

from pptrace.model.tables import COMPUTE_KINDS
from pptrace.recognise.run import RecognisedRun
from pptrace.schedule.plan import Plan


def cells(run: RecognisedRun, rank: int, step: int | None = None) -> list[str]:
    """The ops of a rank in their order, of all steps or of one."""
    ops = run.ops[(run.ops["rank"] == rank) & run.ops["kind"].isin(COMPUTE_KINDS)].sort_values("start_ns")
    ops = ops if step is None else ops[ops["step"] == step]
    return (ops["stage"].astype(str) + ops["kind"].astype(str) + ops["microbatch"].astype(str)).tolist()


def planned(plan: Plan, rank: int) -> list[str]:
    """The ops that a rank has to run, in their order."""
    return [str(action) for action in plan.compute_actions(rank)]


def message_names(comms: pd.DataFrame) -> list[str]:
    """The messages, each called as the plan's action that it says it is."""
    kinds = comms["kind"].str.upper() + "_" + comms["direction"].astype(str)
    return (comms["stage"].astype(str) + kinds + comms["microbatch"].astype(str)).tolist()
