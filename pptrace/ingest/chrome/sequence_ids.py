"""Ranges that number themselves in order (``seq_id``) and name no microbatch → microbatches, and those of messages.

ByteDance's timelines (github.com/ByteDance-Seed/StragglerAnalysis, 8efcd7f) count each kind of range on its rank within the step.
"""

from __future__ import annotations

import pandas as pd

_PLACE = ["rank", "step", "kind"]


def with_sequence(table: pd.DataFrame, compute: pd.Series[bool]) -> pd.DataFrame | None:
    """The table with microbatches; None where the numbers do not tell them.

    Args:
        table: columns rank, step, kind, direction, microbatch, chunk, stage, pp_rank, seq; -1 where a range does not say.
        compute: which rows are ops.
    """
    ops = table[compute]
    if (ops["microbatch"] < 0).all():
        chunks = ops[["rank", "chunk", "stage"]].drop_duplicates()["rank"].value_counts()
        if (ops["seq"] < 0).any() or (ops.duplicated([*_PLACE, "seq"]).any() and (ops["step"] >= 0).all()):
            return None
        if (chunks == 1).all():
            if (ops[["chunk", "stage"]] < 0).all(axis=None) and _has_loops(table):
                return None  # several chunks of a rank, and nothing tells which op is of which
            numbers = ops["seq"]
        elif (ops["step"] >= 0).all():
            numbers = ops.sort_values("seq", kind="stable").groupby([*_PLACE, "chunk", "stage"]).cumcount()
        else:
            return None
        table = table.assign(
            microbatch=table["microbatch"].where(~compute, numbers.reindex(table.index)).astype("int64")
        )
    return _with_messages(table, compute)


def _has_loops(table: pd.DataFrame) -> bool:
    """Whether the first rank of a pipeline receives forwards or the last sends them: each rank holds several stages."""
    known, forward = table["pp_rank"] >= 0, table["direction"] == "F"
    first, last = table["pp_rank"] == 0, table["pp_rank"] == table["pp_rank"].max()
    return bool((known & forward & (first & (table["kind"] == "recv") | last & (table["kind"] == "send"))).any())


def _with_messages(table: pd.DataFrame, compute: pd.Series[bool]) -> pd.DataFrame:
    """The k-th message of a kind serves the k-th op of its direction, where the ranks hold one stage each."""
    served = table[(table["direction"] != "") & (table["microbatch"] < 0) & (table["seq"] >= 0)]
    ops = table[compute]
    if (
        served.empty
        or (ops["step"] < 0).any()
        or ops.groupby("rank")[["chunk", "stage"]].nunique().to_numpy().max() > 1
    ):
        return table
    ordered = ops.sort_values("start_ns", kind="stable")
    nth = ordered.groupby(_PLACE).cumcount()
    numbers = dict(zip(zip(*(ordered[name] for name in _PLACE), nth, strict=True), ordered["microbatch"], strict=True))
    served = served.sort_values("seq", kind="stable")
    place = served.groupby([*_PLACE, "direction"]).cumcount()
    keys = zip(served["rank"], served["step"], served["direction"], place, strict=True)
    found = pd.Series([numbers.get(key, -1) for key in keys], index=served.index, dtype="int64")
    return table.assign(microbatch=found.reindex(table.index).fillna(table["microbatch"]).astype("int64"))
