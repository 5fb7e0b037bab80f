"""Forwards of pipeline stages from the OpenTelemetry spans of SGLang, which follow requests (``--enable-trace``).

A batch has the same requests on all stages. The n-th forward of a request on a stage is that of its n-th batch, if the request
has as many forwards on the stage before. Else spans are lost, and its forwards belong together that are as far apart in time as
those of most requests. A batch of which a stage has no span is followed from the stage before that one.

    root span of a request ─ span of each thread that it passes, of a rank (pp_rank, tp_rank, dp_rank) ─ slices, and among them
    pp_forward: the forward of a batch on this stage

Each request of a batch has spans of its own, which begin and end at the same instants: together they are one op. A batch passes
the stages one after the other with the same requests, so that its ops are found by these; the spans of some may be lost. A
step is a time without a batch in the pipeline before it and behind it (``python/sglang/srt/observability/trace.py``,
``req_time_stats.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import numpy as np
import pandas as pd

from pptrace.ingest.common.rank_names import rank_of_value
from pptrace.ingest.ops.build import Tables
from pptrace.ingest.otlp.spans import Attributes, SpanColumns
from pptrace.model.tables import Int64, ops_table
from pptrace.model.wording import counted


def batches_of(spans: pd.DataFrame) -> Int64:
    """The number of the batch of each op, in the order in which batches begin on the first stage, or would have.

    Args:
        spans: of a request each, with its ``request`` and ``op``, numbers from 0 on, and the op's ``dp``, ``pp``, ``tp``,
            ``start_ns`` and ``end_ns``.
    """
    spans = spans.drop_duplicates(["op", "request"])
    batch = np.full(int(spans["op"].max()) + 1, -1, dtype=np.int64)
    begin_of_batch: list[int] = []
    for _, replica in spans.groupby("dp"):
        before: list[pd.DataFrame] = []
        since_first_ns = 0
        for _, lane in replica.groupby(["pp", "tp"]):
            since_first_ns += _usual_delay(before[-1], lane) if before else 0
            for earlier in reversed(before):
                unknown = lane[batch[lane["op"]] < 0]
                free = earlier[~np.isin(batch[earlier["op"]], batch[lane["op"]])]
                first, second = _same_batches(free, unknown, _usual_delay(earlier, lane))
                batch[second] = batch[first]
                if len(unknown) == len(second):
                    break
            others = lane[batch[lane["op"]] < 0].drop_duplicates("op")
            batch[others["op"]] = len(begin_of_batch) + np.arange(len(others))
            begin_of_batch += (others["start_ns"] - since_first_ns).tolist()
            before.append(lane)
    return np.argsort(np.argsort(begin_of_batch, kind="stable"))[batch]


def _same_batches(first: pd.DataFrame, second: pd.DataFrame, delay_ns: int) -> tuple[Int64, Int64]:
    """(ops, those of the same batches on a later lane), of which most requests say so: each op once.

    Args:
        delay_ns: how much later ops of the second lane usually begin.
    """
    pairs = _by_turn(first, second)
    common = np.intersect1d(first["request"], second["request"])
    odd = np.setdiff1d(common, pairs["request"])
    if len(odd):  # spans are lost: maybe as many of a request on either lane, but others
        late = pairs["start_ns_second"] - pairs["start_ns"] - delay_ns
        odd = np.union1d(odd, pairs.loc[2 * late.abs() > pairs["since_ns"], "request"])
    pairs = pd.concat((pairs[~pairs["request"].isin(odd)], *_by_time(first, second, odd, delay_ns)))
    pairs = pairs[pairs["start_ns_second"] - pairs["start_ns"] >= min(delay_ns, 0)]
    votes = pairs.groupby(["op", "op_second"]).size().sort_values(ascending=False, kind="stable").reset_index()
    votes = votes[~votes["op"].duplicated() & ~votes["op_second"].duplicated()]
    return votes["op"].to_numpy(dtype=np.int64), votes["op_second"].to_numpy(dtype=np.int64)


def _usual_delay(first: pd.DataFrame, second: pd.DataFrame) -> int:
    """The time from the begin of a batch on a lane to its begin on a later one, ns: as of requests without lost spans, else since
    that forward of the stage before which was the last to end.
    """
    pairs = _by_turn(first, second)
    if len(pairs):
        return int((pairs["start_ns_second"] - pairs["start_ns"]).median())
    if first["pp"].iloc[0] == second["pp"].iloc[0]:
        return 0
    ended = first.sort_values("end_ns")
    later = second["start_ns"].to_numpy()
    index = np.searchsorted(ended["end_ns"].to_numpy(), later, side="right") - 1
    delays = later - ended["start_ns"].to_numpy()[np.maximum(index, 0)]
    return int(np.median(delays[index >= 0])) if (index >= 0).any() else 0


def _by_turn(first: pd.DataFrame, second: pd.DataFrame) -> pd.DataFrame:
    """Pairs of the n-th spans of each request that has as many spans on both lanes; columns of the second end in ``_second``,
    ``since_ns`` is the time since the span before on the first one.
    """
    lanes = []
    for lane in (first, second):
        ordered = lane[["request", "op", "start_ns"]].sort_values("start_ns", kind="stable")
        of_request = ordered.groupby("request")["op"]
        lanes.append(ordered.assign(turn=of_request.cumcount(), number=of_request.transform("size")))
    lanes[0]["since_ns"] = lanes[0].groupby("request")["start_ns"].diff()
    return lanes[0].merge(lanes[1], on=["request", "turn", "number"], suffixes=("", "_second"))


def _by_time(first: pd.DataFrame, second: pd.DataFrame, requests: Int64, delay_ns: int) -> Iterator[pd.DataFrame]:
    """Pairs of spans, nearest to each other in time after ``delay_ns``, of each of these requests."""
    lanes = [
        dict(iter(lane[lane["request"].isin(requests)].sort_values("start_ns").groupby("request")))
        for lane in (first, second)
    ]
    for request in requests.tolist():
        left, right = (lane[request] for lane in lanes)
        nearest = _nearest(left["start_ns"].to_numpy() + delay_ns, right["start_ns"].to_numpy())
        back = _nearest(right["start_ns"].to_numpy(), left["start_ns"].to_numpy() + delay_ns)
        chosen = np.flatnonzero(nearest[back] == np.arange(len(right)))
        columns = {name: left[name].to_numpy()[back[chosen]] for name in ("op", "start_ns")}
        yield pd.DataFrame(columns | {f"{name}_second": right[name].to_numpy()[chosen] for name in columns})


def _nearest(times: Int64, others: Int64) -> Int64:
    """The index of the nearest of the other times, which are in order, for each time."""
    after = np.searchsorted(others, times).clip(1, max(len(others) - 1, 1))
    before = after - 1
    after = np.minimum(after, len(others) - 1)
    return np.where(np.abs(others[before] - times) <= np.abs(others[after] - times), before, after)


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
        ranks = {axis: rank_of_value((thread or {}).get(f"{axis}_rank")) for axis in _AXES}
        if ranks["pp"] is None:
            num_lost += 1
            continue
        found.append((*(rank or 0 for rank in ranks.values()), columns.start_ns[index], columns.end_ns[index], trace))
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
    sizes: dict[str, Any] = {axis: int(ops[axis].nunique()) for axis in _AXES}
    facts = {
        "mesh": {**sizes, "vpp": 1, "cp": None, "ep": None, "order": "tp-cp-pp-dp"},
        "world_size": prod(sizes.values()),
        "notes": [_HOST_TIMES, _FORWARDS_ALONE],
    }
    return Tables(
        SGLANG,
        "OpenTelemetry (SGLang)",
        ops_table(columns),
        facts=facts,
        facts_of=_pipelines(list(ranks)),
        warnings=tuple(warnings),
    )


def _pipelines(ranks: list[tuple[int, int, int]]) -> dict[int, Mapping[str, Any]]:
    """The ranks of each rank's pipeline, by stage."""
    pipelines: dict[tuple[int, int], list[int]] = {}
    for rank, (dp, _, tp) in enumerate(ranks):
        pipelines.setdefault((dp, tp), []).append(rank)
    return {rank: {"pp_ranks": pipelines[dp, tp]} for rank, (dp, _, tp) in enumerate(ranks)}
