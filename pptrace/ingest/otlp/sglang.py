"""Forwards of pipeline stages from the OpenTelemetry spans of SGLang, which follow requests (``--enable-trace``).

    root span of a request ─ span of each thread that it passes, of a rank (pp_rank, tp_rank, dp_rank) ─ slices, and among them
    pp_forward: the forward of a batch on this stage

Each request of a batch has spans of its own, which begin and end at the same instants: together they are one op. A batch passes
the stages one after the other with the same requests, so that its ops are found by these (:mod:`pptrace.ingest.otlp.batches`). A
step is a time without a batch in the pipeline before it and behind it (``python/sglang/srt/observability/trace.py``,
``req_time_stats.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from pptrace.ingest.ops.build import Tables
from pptrace.ingest.otlp.batches import batches_of
from pptrace.ingest.otlp.spans import Attributes, SpanColumns
from pptrace.model.tables import Int64, ops_table
from pptrace.model.wording import counted

SGLANG = "sglang"
_FORWARD = "pp_forward"
_THREAD = re.compile(r".*\(host:[^|]*\| *pid:\d+\)")
_AXES = ("dp", "pp", "tp")
_MOST_PARENTS = 32
_HOST_TIMES = (
    "SGLang's spans are timed on the host of a rank's scheduler: they show when it began and ended a batch's forward"
)
_FORWARDS_ALONE = "batches that are served have forwards alone; a step is a time in which the pipeline is never empty"


def is_thread(name: str) -> bool:
    """Return whether a span of this name is a thread of SGLang, whose attributes have the ranks."""
    return _THREAD.fullmatch(name) is not None


def forwards_of_batches(columns: SpanColumns) -> Tables | None:
    """The forwards of all stages of pipelines; None in a file without any.

    Args:
        columns: with the ids of all spans, and the attributes of threads.
    """
    if _FORWARD not in columns.names:
        return None
    code = columns.names[_FORWARD]
    index_of = {span: index for index, (_, span, _) in columns.ids_of_span.items()}
    found = []
    num_lost = 0
    for index, (trace, _, parent) in columns.ids_of_span.items():
        if columns.name[index] != code:
            continue
        thread = _thread_above(parent, index_of, columns)
        if thread is None or type(thread.get("pp_rank")) is not int:
            num_lost += 1
            continue
        ranks = [rank if type(rank := thread.get(f"{axis}_rank")) is int else 0 for axis in _AXES]
        found.append((*ranks, columns.start_ns[index], columns.end_ns[index], trace))
    if not found:
        return None
    spans = pd.DataFrame(found, columns=[*_AXES, "start_ns", "end_ns", "request"])
    spans["request"] = pd.factorize(spans["request"])[0]
    of_op = spans.groupby(["start_ns", *_AXES, "end_ns"])
    spans["op"] = of_op.ngroup()
    ops = of_op.size().index.to_frame(index=False)
    warnings = [f"left out {counted(num_lost, 'forward')} whose thread is not in the file"] if num_lost else []
    return _tables(ops, batches_of(spans), warnings)


def _thread_above(parent: str, index_of: Mapping[str, int], columns: SpanColumns) -> Attributes | None:
    """The attributes of the thread that a span is in."""
    for _ in range(_MOST_PARENTS):
        index = index_of.get(parent)
        if index is None:
            return None
        if (attributes := columns.attributes_of_span.get(index)) is not None:
            return attributes
        parent = columns.ids_of_span[index][2]
    return None


def _tables(ops: pd.DataFrame, batch_of_op: Int64, warnings: list[str]) -> Tables:
    """The tables of ops with dp, pp, tp and times, by start, and the batch of each."""
    batch = pd.Series(batch_of_op)
    begin, end = ops["start_ns"].groupby(batch).min(), ops["end_ns"].groupby(batch).max()
    # Batches are numbered by their first forward; one that begins when all before it have ended begins a step.
    before = end.cummax().shift(fill_value=0)
    step_of_batch = (begin >= before).cumsum() - 1
    first_of_step = step_of_batch.groupby([ops["dp"].groupby(batch).first(), step_of_batch]).cumcount()
    rank, ranks = pd.factorize(pd.MultiIndex.from_frame(ops[[*_AXES]]), sort=True)
    pp_rank = ops["pp"].to_numpy()
    columns: dict[str, Any] = {
        "rank": rank,
        "step": step_of_batch.to_numpy()[batch],
        "kind": np.full(len(ops), "F", dtype=object),
        "stage": pp_rank,
        "chunk": np.zeros(len(ops), dtype=np.int64),
        "microbatch": first_of_step.to_numpy()[batch],
        "start_ns": ops["start_ns"].to_numpy(),
        "end_ns": ops["end_ns"].to_numpy(),
    }
    return Tables(
        SGLANG,
        "OpenTelemetry (SGLang)",
        ops_table(columns),
        facts={**_mesh_of(ops), "notes": [_HOST_TIMES, _FORWARDS_ALONE]},
        facts_of=_pipelines(list(ranks)),
        warnings=tuple(warnings),
    )


def _mesh_of(ops: pd.DataFrame) -> dict[str, Any]:
    sizes = {axis: int(ops[axis].nunique()) for axis in _AXES}
    mesh = {
        "pp": sizes["pp"],
        "vpp": 1,
        "tp": sizes["tp"],
        "cp": None,
        "dp": sizes["dp"],
        "ep": None,
        "order": "tp-cp-pp-dp",
    }
    return {"mesh": mesh, "world_size": sizes["pp"] * sizes["tp"] * sizes["dp"]}


def _pipelines(ranks: list[tuple[int, int, int]]) -> dict[int, Mapping[str, Any]]:
    """The ranks of each rank's pipeline, by stage."""
    pipelines: dict[tuple[int, int], list[int]] = {}
    for rank, (dp, _, tp) in enumerate(ranks):
        pipelines.setdefault((dp, tp), []).append(rank)
    return {rank: {"pp_ranks": pipelines[dp, tp]} for rank, (dp, _, tp) in enumerate(ranks)}
