"""Ops that were recognised, as texts."""

from __future__ import annotations

from pptrace.model.tables import COMPUTE_KINDS
from pptrace.recognise.run import RecognisedRun


def cells(run: RecognisedRun, rank: int, step: int | None = None) -> list[str]:
    """The ops of a rank in their order, of all steps or of one."""
    ops = run.ops[(run.ops["rank"] == rank) & run.ops["kind"].isin(COMPUTE_KINDS)].sort_values("start_ns")
    ops = ops if step is None else ops[ops["step"] == step]
    return (ops["stage"].astype(str) + ops["kind"].astype(str) + ops["microbatch"].astype(str)).tolist()
