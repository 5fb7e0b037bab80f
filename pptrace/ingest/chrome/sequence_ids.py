"""Number the microbatches of ops and messages by their sequence numbers (``seq_id``), where ranges name no microbatch.

ByteDance's timelines (github.com/ByteDance-Seed/StragglerAnalysis, 8efcd7f) count each kind of range on its rank within the step.
"""

from __future__ import annotations

import pandas as pd

_GROUP = ["rank", "step", "kind"]


def number_by_sequence(table: pd.DataFrame, is_op: pd.Series[bool]) -> pd.DataFrame | None:
    """Add microbatches to the table; None where they do not follow from the sequence numbers.

    Args:
        table: columns rank, step, kind, direction, microbatch, chunk, stage, pp_rank, seq; -1 where unknown.
        compute: which rows are ops.
    """
    ops = table[is_op]
    if (ops["microbatch"] < 0).all():
        chunks = ops[["rank", "chunk", "stage"]].drop_duplicates()["rank"].value_counts()
        if (ops["seq"] < 0).any() or (ops.duplicated([*_GROUP, "seq"]).any() and (ops["step"] >= 0).all()):
            return None
        if (chunks == 1).all():
            if (ops[["chunk", "stage"]] < 0).all(axis=None) and _has_loops(table):
                return None  # a rank has several chunks, and the chunk of an op is unknown
            numbers = ops["seq"]
        elif (ops["step"] >= 0).all():
            numbers = ops.sort_values("seq", kind="stable").groupby([*_GROUP, "chunk", "stage"]).cumcount()
        else:
            return None
        table = table.assign(microbatch=table["microbatch"].where(~is_op, numbers.reindex(table.index)).astype("int64"))
    return _number_messages(table, is_op)


def _has_loops(table: pd.DataFrame) -> bool:
    """Return whether the first pipeline rank receives forwards or the last sends them, so that ranks have several stages."""
    has_pp_rank, forward = table["pp_rank"] >= 0, table["direction"] == "F"
    first, last = table["pp_rank"] == 0, table["pp_rank"] == table["pp_rank"].max()
    return bool((has_pp_rank & forward & (first & (table["kind"] == "recv") | last & (table["kind"] == "send"))).any())


def _number_messages(table: pd.DataFrame, is_op: pd.Series[bool]) -> pd.DataFrame:
    """Give the k-th message of a kind the microbatch of the k-th op of its direction, where ranks have one stage each."""
    unnumbered = table[(table["direction"] != "") & (table["microbatch"] < 0) & (table["seq"] >= 0)]
    ops = table[is_op]
    if (
        unnumbered.empty
        or (ops["step"] < 0).any()
        or ops.groupby("rank")[["chunk", "stage"]].nunique().to_numpy().max() > 1
    ):
        return table
    ordered = ops.sort_values("start_ns", kind="stable")
    nth = ordered.groupby(_GROUP).cumcount()
    numbers = dict(zip(zip(*(ordered[name] for name in _GROUP), nth, strict=True), ordered["microbatch"], strict=True))
    unnumbered = unnumbered.sort_values("seq", kind="stable")
    nth_message = unnumbered.groupby([*_GROUP, "direction"]).cumcount()
    keys = zip(unnumbered["rank"], unnumbered["step"], unnumbered["direction"], nth_message, strict=True)
    microbatches = pd.Series([numbers.get(key, -1) for key in keys], index=unnumbered.index, dtype="int64")
    return table.assign(microbatch=microbatches.reindex(table.index).fillna(table["microbatch"]).astype("int64"))
