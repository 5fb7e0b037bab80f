"""Read Chrome traces with begin/end events; one file can hold several ranks.

Each process is a rank: by its ranges' arguments (g_rk, rank), else its name ("rank 3"), else its pid where the pids count from 0,
else the file's name. Ranges whose arguments carry the ids of pipeline ops become ops; in other files the ranges become
annotations, whose labels are recognised like those of any trace. Files that MegaScan writes per rank (``rel_ts`` in ns within
each iteration) are read as well.

An op is a range named forward or backward (or one of the names below) with its microbatch or sequence number
(``seq_id``) among its arguments, and the model chunk or stage where its rank has several.
MegaScan, which writes such ranges (github.com/OpenSQZ/MegatronApp, 77f7b0a, megatron/training/trace.py and
scripts/aggregate.py), puts the arguments on the ends: microbatch or micro_batch_index, model_chunk, pp_rank, dp_rk, pp_rk,
tp_rk, g_rk, iteration, and ``group`` and ``data`` on messages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from msgspec.structs import replace

from pptrace.ingest.chrome.events import AXES, CHUNK, MICROBATCH, PP, SIZE, STEP, Id, first_number
from pptrace.ingest.chrome.ranges import ChromeRanges, read_ranges
from pptrace.ingest.common.codes import CategoryCodes
from pptrace.ingest.common.rank_names import natural_order, rank_of_file_name, rank_of_labels
from pptrace.ingest.ops.build import by_rank
from pptrace.ingest.ops.steps import Facts, assign_stages, mesh_facts, number_by_repetition, number_chunks
from pptrace.marks import P2P
from pptrace.model.tables import COMMS, COMPUTE_KINDS, OPS, Int64, comms_table, empty_table, ops_table
from pptrace.model.traces import ONE_CLOCK, Category, Events, InputFormat, Trace

_MEGASCAN_FILE = re.compile(r"benchmark-data-\d+-pipeline-(\d+)-tensor-\d+\.json")
_MAX_RANKS = 100_000
_STEP = ("step", "iteration")
_NO_CORRELATION = 2**32 - 1
_FIRST = 100
"""Ranges that are looked at for what all of a file have."""
VESCALE = "vescale"
_NO_GLOBAL_RANKS = (
    "the trace has no global ranks: they are numbered replica by replica and may differ from those of the job"
)


def read_chrome(path: Path) -> tuple[Trace, ...]:
    """Read a trace for each process in the file.

    Raises:
        TraceError: the file cannot be read or holds no range.
    """
    content = read_ranges(path)
    table = content.table.assign(rank=_ranks(path, content)[content.table["process"]])
    content = replace(content, table=table)
    pp = None  # known of MegaScan's files of single ranks
    if _MEGASCAN_FILE.fullmatch(path.name):
        matches = (_MEGASCAN_FILE.fullmatch(other.name) for other in path.parent.iterdir())
        pp = max(int(match[1]) for match in matches if match) + 1
    found = ops_of(content, pp)
    if found is None:
        framework, facts = VESCALE if _is_vescale(content) else "", mesh_of(content)
    else:
        framework, ops, comms, facts = found
    order = np.unique(table["rank"]).tolist()
    declares_rank = bool((table["declared_rank"].iloc[:_FIRST] >= 0).any())
    has_rank = len(order) > 1 or order != [0] or rank_of_file_name(path.name) is not None
    clock = {ONE_CLOCK: str(path)} if len(order) > 1 else {}
    of_ranks = {rank: {**clock, **_facts(content, facts, rank, declares_rank)} for rank in order}
    contents: dict[int, dict[str, Any]]
    if found is None:
        contents = {rank: {"events": _events(ranges)} for rank, ranges in by_rank(table).items()}
    else:
        of_ops, of_comms = by_rank(ops), by_rank(comms)
        contents = {
            rank: {"ops": of_ops.get(rank, empty_table(OPS)), "comms": of_comms.get(rank, empty_table(COMMS))}
            for rank in order
        }
    return tuple(
        Trace(
            path=str(path),
            format=InputFormat.CHROME,
            rank=rank if has_rank or declares_rank else None,
            producer="chrome trace" if found is None or framework == "chrome" else framework,
            metadata=of_ranks[rank],
            warnings=content.warnings if rank == order[0] else (),
            framework=framework,
            **contents[rank],
        )
        for rank in order
    )


def _is_vescale(content: ChromeRanges) -> bool:
    """Return whether veScale wrote the ranges (ndtimeline/handlers/local_timeline_handler.py), whose labels are Megatron-LM's."""
    first = content.table.iloc[:_FIRST]
    names = {"rank", "step", "tp", "pp"}
    if not names <= set(first):
        return False
    is_named = first["category"].astype(object) == first["name"].astype(object)
    return bool((is_named & (first[[*names]] >= 0).all(axis=1)).any())


def _facts(content: ChromeRanges, facts: Facts, rank: int, declares_rank: bool) -> Mapping[str, Any]:
    """Facts of the mesh, with a note where pptrace numbered the ranks."""
    of_all, of_rank = facts
    if not of_all:
        return {}
    first = content.processes[content.table["process"].iloc[0]]
    notes = {"notes": [_NO_GLOBAL_RANKS]} if " PP " in str(first) and not declares_rank else {}
    return {**of_all, **of_rank.get(rank, {}), **notes}


def _ranks(path: Path, content: ChromeRanges) -> Int64:
    """A distinct rank of each process with ranges, shape (processes,)."""
    present = content.table["process"].unique().tolist()
    pids = [content.processes[number] for number in present]
    with_rank = content.table[content.table["declared_rank"] >= 0].drop_duplicates("process")
    declared = dict(zip(with_rank["process"].tolist(), with_rank["declared_rank"].tolist(), strict=True))
    by_label = [rank_of_labels([content.process_names.get(pid, "")]) for pid in pids]
    as_rank = [rank_of_labels([pid]) if isinstance(pid, str) and not pid.isdecimal() else int(pid) for pid in pids]
    ranks = np.full(len(content.processes), -1, dtype=np.int64)
    for candidate in ([declared.get(number) for number in present], by_label, as_rank):
        found = [rank for rank in candidate if rank is not None and 0 <= rank < _MAX_RANKS]
        if len(set(found)) == len(pids) and (candidate is not as_rank or max(found) < 8 * len(pids)):
            ranks[present] = found
            return ranks
    from_name = rank_of_file_name(path.name)
    if len(pids) == 1 and from_name is not None:
        ranks[present] = from_name
    else:
        ranks[sorted(present, key=lambda number: _in_order(content.processes[number]))] = np.arange(len(present))
    return ranks


def _in_order(pid: Id) -> tuple[bool, list[tuple[int, str]]]:
    return isinstance(pid, str), natural_order(str(pid))


def _events(ranges: pd.DataFrame) -> Events:
    """Convert the ranges of a rank to events, with one around the ranges of each step that their arguments name; a category of
    Kineto keeps its meaning, any other is an annotation of the program.
    """
    codes, steps = CategoryCodes(), _steps(ranges)
    categories, names = ranges["category"].cat, ranges["name"].cat
    of_category = np.array([codes[text] for text in categories.categories], dtype=np.int8)
    category = np.append(of_category[categories.codes], np.full(len(steps), Category.OTHER, np.int8))
    category[category == Category.OTHER] = Category.ANNOTATION
    on_device = category > Category.HOST_LIMIT
    threads, _ = pd.factorize(ranges["thread"])
    thread = np.append(threads, np.full(len(steps), threads[0])).astype(np.int64)
    texts = list(names.categories)
    name_id = np.append(names.codes, [len(texts) + number for number in range(len(steps))])
    start, end = (np.append(ranges[name], steps[name]).astype(np.int64) for name in ("start_ns", "end_ns"))
    correlation = np.full(len(start), -1, dtype=np.int64)
    if "correlation" in ranges:
        numbers = ranges["correlation"].to_numpy()
        correlation[: len(ranges)] = np.where((numbers > 0) & (numbers < _NO_CORRELATION), numbers, -1)
    order = np.lexsort((-end, start))
    return Events(
        category=category[order],
        name_id=name_id[order].astype(np.int32),
        start_ns=start[order],
        dur_ns=(end - start)[order],
        device=np.where(on_device, 0, -1).astype(np.int32)[order],
        stream=np.where(on_device, thread, -1)[order],
        thread=np.where(on_device, -1, thread)[order],
        correlation=correlation[order],
        names=(*texts, *(f"ProfilerStep#{number}" for number in steps.index)),
    )


def _steps(ranges: pd.DataFrame) -> pd.DataFrame:
    """Begin and end of the ranges of each step in their arguments, in order; none if steps overlap."""
    number = first_number({name: ranges[name].to_numpy() for name in _STEP if name in ranges}, _STEP, len(ranges))
    numbered = ranges[["start_ns", "end_ns"]][number >= 0]
    steps = numbered.groupby(number[number >= 0]).agg({"start_ns": "min", "end_ns": "max"}).sort_values("start_ns")
    start, end = steps["start_ns"].to_numpy(), steps["end_ns"].to_numpy()
    return steps.iloc[:0] if (end[:-1] > start[1:]).any() else steps


_NAMES = {
    "F": "forward forward-warmup forward-compute forward_step fwd f",
    "B": "backward backward-cooldown backward-compute backward_step bwd b",
    "W": "wgrad weight-backward backward_weight w",
    "I": "dgrad input-backward backward_input",
    "OPTIMIZER": "optimizer optimizer_step optimizer.step",
    "GRAD_SYNC": "grad-sync grad_sync grads-reduce-scatter",
    "LOSS": "loss",
    "STEP": "iteration step train_step",
}
_KIND = {name: kind for kind, names in _NAMES.items() for name in names.split()}
_MESSAGES = {
    **{
        f"{kind}-{part}": (kind, direction)
        for direction, parts in {"F": ("warmup", "forward", "extra"), "B": ("backward", "cooldown")}.items()
        for part in parts
        for kind in P2P
    },
    **{f"{word}-{kind}": (kind, word[0].upper()) for word in ("forward", "backward") for kind in P2P},
}
"""(kind, direction) by name."""
_FRAMEWORKS = {
    "bytedance": {"mb_id"},  # the timeline of github.com/ByteDance-Seed/StragglerAnalysis
    "megascan": {"model_chunk", "micro_batch_index", "pp_rk", "g_rk"},
}
"""Argument names that identify a framework."""


def ops_of(content: ChromeRanges, pp: int | None = None) -> tuple[str, pd.DataFrame, pd.DataFrame, Facts] | None:
    """Convert a file's ranges to ops; None unless it has forwards and backwards with microbatches.

    Args:
        content: with the column ``rank``.
        pp: the number of pipeline ranks, where known from elsewhere.

    Returns:
        The framework that named them, OPS and COMMS of all ranks, and the mesh where arguments have coordinates.
    """
    table = _named(content)
    if table.empty or not {"F", "B"} <= set(table["kind"]):
        return None
    is_op = table["kind"].isin(COMPUTE_KINDS)
    if (with_microbatches := _number_by_sequence(table, is_op)) is None:
        return None
    table = with_microbatches
    has_steps = bool((table.loc[is_op, "step"] >= 0).all())
    is_message = table["kind"].isin(P2P)
    table = table[~is_message | (table["microbatch"] >= 0) | (table["peer"] >= 0)]
    is_message = is_message[table.index]
    ops = table[~is_message].assign(step=table["step"].clip(lower=0))
    ops = ops if has_steps else number_by_repetition(ops)
    splits_backward = bool((ops["kind"] == "W").any())  # weight gradients have ranges of their own: B is I
    ops = ops.assign(stage=_stages(ops, pp), kind=ops["kind"].mask((ops["kind"] == "B") & splits_backward, "I"))
    ops["chunk"] = ops["chunk"].where(~ops["kind"].isin(COMPUTE_KINDS), number_chunks(ops))
    op_columns = ("rank", "step", "kind", "stage", "chunk", "microbatch", "start_ns", "end_ns")
    framework = next((name for name, args in _FRAMEWORKS.items() if args & content.arguments), "chrome")
    messages = _messages(table[is_message], ops)
    op_table = ops_table({name: ops[name] for name in op_columns})
    return framework, op_table, messages, _mesh(ops, content)


def mesh_of(content: ChromeRanges) -> Facts:
    """Derive the mesh from the arguments of ranges that are no ops; ({}, {}) where they have no coordinates."""
    ranks = np.unique(content.table["rank"])
    return _mesh(pd.DataFrame({"rank": ranks, "kind": "", "stage": -1, "pp_rank": -1}), content)


def _mesh(ops: pd.DataFrame, content: ChromeRanges) -> Facts:
    """Derive the mesh, if every rank has distinct coordinates and every coordinate has a rank."""
    ranks = content.table["rank"]
    coordinates = pd.DataFrame({axis: content.numbers(*names) for axis, names in AXES.items()})
    first = coordinates.where(coordinates >= 0).groupby(ranks.to_numpy()).first()
    table = first.loc[first.index.isin(ops["rank"].unique())].dropna(axis="columns", how="all")
    if "pp_rank" not in table or len(table.columns) < 2 or table.isna().any(axis=None) or table.duplicated().any():
        return {}, {}
    if math.prod(table[axis].max() + 1 for axis in table) != len(table):
        return {}, {}
    coordinates_of_ops = table.astype("int64").reindex(ops["rank"]).set_axis(ops.index)
    with_coordinates = ops.drop(columns="pp_rank").join(coordinates_of_ops)
    return mesh_facts(with_coordinates, with_coordinates.iloc[:0])


def _named(content: ChromeRanges) -> pd.DataFrame:
    """The ranges that are ops or messages by their names, with what their arguments say of them (−1: nothing)."""
    names = content.table["name"].cat
    meanings = [_MESSAGES.get(name.lower()) or (_KIND.get(name.lower(), ""), "") for name in names.categories]
    kinds, directions = (np.array(texts, dtype=object) for texts in zip(*meanings, strict=True))
    rows = np.flatnonzero((kinds != "")[names.codes])
    codes = names.codes.to_numpy()[rows]
    given = {
        "step": content.numbers(*STEP),
        "microbatch": content.numbers(*MICROBATCH),
        "chunk": content.numbers(*CHUNK),
        "stage": content.numbers("stage"),
        "pp_rank": content.numbers(*PP),
        "seq": content.numbers("seq_id"),
        "peer": content.numbers("group"),
        "bytes": content.numbers(*SIZE),
    }
    columns = {name: content.table[name].to_numpy() for name in ("rank", "start_ns", "end_ns")} | given
    return pd.DataFrame(
        {"kind": kinds[codes], "direction": directions[codes]} | {name: each[rows] for name, each in columns.items()}
    )


def _stages(ops: pd.DataFrame, pp: int | None) -> pd.Series[int]:
    """The stage in the arguments, else from chunk and pipeline rank; -1 for rows that are no op."""
    is_op = ops["kind"].isin(COMPUTE_KINDS)
    if not is_op.any() or (ops.loc[is_op, "stage"] >= 0).all():
        return ops["stage"].where(is_op, -1)
    one_op_per_rank = ops[is_op & (ops["pp_rank"] >= 0)].drop_duplicates("rank")
    pp_ranks = dict(zip(one_op_per_rank["rank"].tolist(), one_op_per_rank["pp_rank"].tolist(), strict=True))
    if not pp_ranks:
        pp_ranks = {rank: index for index, rank in enumerate(sorted(ops.loc[is_op, "rank"].unique().tolist()))}
    chunked = ops.assign(chunk=ops["chunk"].where(~is_op | (ops["chunk"] >= 0), 0).where(is_op, -1))
    if pp is not None:
        pp_rank = chunked["rank"].map(pp_ranks).fillna(0).astype("int64")
        return (chunked["chunk"] * pp + pp_rank).where(is_op, -1)
    return pd.Series(assign_stages(chunked, pp_ranks), index=ops.index)


def _messages(rows: pd.DataFrame, ops: pd.DataFrame) -> pd.DataFrame:
    """Make COMMS of sends and receives; their stage is that of their chunk, or the only one of their rank."""
    if rows.empty:
        return empty_table(COMMS)
    compute = ops[ops["kind"].isin(COMPUTE_KINDS)]
    by_chunk = {
        (rank, chunk): stage
        for rank, chunk, stage in zip(compute["rank"], compute["chunk"], compute["stage"], strict=True)
    }
    chunks = [max(chunk, 0) for chunk in rows["chunk"]]
    stages = [by_chunk.get((rank, chunk), -1) for rank, chunk in zip(rows["rank"], chunks, strict=True)]
    steps = rows["step"].clip(lower=0)
    columns = {
        name: rows[name] for name in ("rank", "kind", "direction", "microbatch", "peer", "bytes", "start_ns", "end_ns")
    }
    return comms_table({**columns, "axis": "pp", "group_size": 2, "stage": stages, "step": steps})


_GROUP = ["rank", "step", "kind"]


def _number_by_sequence(table: pd.DataFrame, is_op: pd.Series[bool]) -> pd.DataFrame | None:
    """Add microbatches from sequence numbers (``seq_id``), where ranges name none; None where they do not follow from these.

    ByteDance's timelines (github.com/ByteDance-Seed/StragglerAnalysis, 8efcd7f) count each kind of range on its rank within the
    step.
    """
    ops = table[is_op]
    if (ops["microbatch"] < 0).all():
        chunks = ops[["rank", "chunk", "stage"]].drop_duplicates()["rank"].value_counts()
        if (ops["seq"] < 0).any() or (ops.duplicated([*_GROUP, "seq"]).any() and (ops["step"] >= 0).all()):
            return None
        if (chunks == 1).all():
            has_pp_rank, forward = table["pp_rank"] >= 0, table["direction"] == "F"
            first, last = table["pp_rank"] == 0, table["pp_rank"] == table["pp_rank"].max()
            loops = has_pp_rank & forward & (first & (table["kind"] == "recv") | last & (table["kind"] == "send"))
            if (ops[["chunk", "stage"]] < 0).all(axis=None) and loops.any():
                return None  # a rank has several chunks, and the chunk of an op is unknown
            numbers = ops["seq"]
        elif (ops["step"] >= 0).all():
            numbers = (
                ops.sort_values("seq", kind="stable").groupby([*_GROUP, "chunk", "stage"], observed=True).cumcount()
            )
        else:
            return None
        table = table.assign(
            microbatch=table["microbatch"].where(~is_op, numbers.reindex(table.index, fill_value=-1)).astype("int64")
        )
    return _number_messages(table, is_op)


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
    nth = ordered.groupby(_GROUP, observed=True).cumcount()
    numbers = dict(zip(zip(*(ordered[name] for name in _GROUP), nth, strict=True), ordered["microbatch"], strict=True))
    unnumbered = unnumbered.sort_values("seq", kind="stable")
    nth_message = unnumbered.groupby([*_GROUP, "direction"], observed=True).cumcount()
    keys = zip(unnumbered["rank"], unnumbered["step"], unnumbered["direction"], nth_message, strict=True)
    microbatches = pd.Series([numbers.get(key, -1) for key in keys], index=unnumbered.index, dtype="int64")
    return table.assign(microbatch=microbatches.reindex(table.index).fillna(table["microbatch"]).astype("int64"))
