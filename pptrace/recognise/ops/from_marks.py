"""Ops and communication from pptrace's own marks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.marks import P2P, SpanKind
from pptrace.model.categories import as_category, category_of_codes, same_category
from pptrace.model.device import DeviceWork
from pptrace.model.tables import COMMS, DIRECTIONS, OPS, Int64, make_table
from pptrace.recognise.ops.mark_ranges import AXES, KINDS_OF_COLLECTIVES, KINDS_OF_SPANS, MarkedRanges
from pptrace.recognise.ops.tables import LaunchIndex, RankTables
from pptrace.schedule.actions import Kind, Phase
from pptrace.slices import Slice, last_like

_NAMED_LIKE = "ranges named like"
_KINDS = (*Kind, *KINDS_OF_SPANS)
_KINDS_OF_COMMS = (*KINDS_OF_COLLECTIVES, *P2P)
_SEND, _RECV = map(_KINDS_OF_COMMS.index, P2P)
_OF_THE_HOST = (_KINDS.index(SpanKind.STEP), _KINDS.index(SpanKind.GC))
"""Spans whose times are those of their ranges, whatever other threads launch meanwhile."""
_IS_SEND = np.array([kind.is_send for kind in Kind])
_DIRECTIONS = (*DIRECTIONS, "")
_DIRECTION_OF_KIND = np.array([_DIRECTIONS.index(kind[-1]) if kind.is_p2p else 2 for kind in Kind])


def warnings_of_marks(warnings: Iterable[str]) -> tuple[str, ...]:
    """Warnings of a rank that are about marks which could not be read, however its ops were recognised."""
    return tuple(line for line in warnings if f" {_NAMED_LIKE} " in line)


def tables_from_marks(marks: MarkedRanges, work: DeviceWork) -> RankTables:
    """Ops and comms fully described by marks; ``call`` marks are left to :mod:`pptrace.recognise.calls.marked_calls`.

    The framework is "" where the marks name no op: then they say how the script goes on, and labels or order tell the ops.
    """
    warnings = tuple(
        f"{len(names)} {_NAMED_LIKE} {names[0][:60]!r} are left out: {reason}"
        for reason, names in marks.unreadable.items()
    )
    is_last = ~pd.Series(marks.equal).duplicated(keep="last").to_numpy() | (marks.equal < 0)
    rolled_back = marks.ops.where(~is_last[marks.ops["at"]])
    if not is_last.all():
        marks = marks.only(is_last)
    if len(rolled_back):
        warnings += (_rolled_back_warning(rolled_back, marks),)
    launches = LaunchIndex(work)
    return RankTables("pptrace" if len(marks.ops) else "", _ops(marks, launches), _comms(marks, launches), warnings)


def _rolled_back_warning(ops: Slice, marks: MarkedRanges) -> str:
    """A rank whose optimizer step turns out to be wrong begins the next one anew (zero bubble's post-validation): the same ops
    and transfers occur twice in a step, and the last ones count.
    """
    steps = np.unique(ops["step"]).tolist()
    total_ms = int((marks.end_ns[ops["at"]] - marks.start_ns[ops["at"]]).sum()) / 1e6
    return (
        f"{len(ops)} ops of step {', '.join(map(str, steps))} ({total_ms:.2f} ms) ran again in the same step, "
        "as after an optimizer step that was rolled back; only the last runs count"
    )


def _ops(marks: MarkedRanges, launches: LaunchIndex) -> pd.DataFrame:
    """The ops table: a range is as long as the kernels that it launched, but for a step's."""
    ops, spans = marks.ops, marks.spans
    order = np.argsort(np.concatenate((ops["at"], spans["at"])), kind="stable")

    def joined(of_ops: npt.NDArray[Any], of_spans: npt.NDArray[Any] | int | str) -> npt.NDArray[Any]:
        given = np.full(len(spans), of_spans, of_ops.dtype) if isinstance(of_spans, int | str) else of_spans
        return np.concatenate((of_ops, given))[order]

    at = joined(ops["at"], spans["at"])
    kind = joined(ops["kind"], len(Kind) + spans["kind"])
    work = launches.spans(marks.start_ns[at], marks.end_ns[at], communication=False)
    on_device = work.launched & ~np.isin(kind, _OF_THE_HOST)
    columns: dict[str, Any] = {name: joined(ops[name], -1) for name in ("stage", "chunk", "microbatch")}
    columns |= {
        "rank": np.full(len(at), -1),
        "step": joined(ops["step"], spans["step"]),
        "kind": category_of_codes(kind, _KINDS),
        "phase": category_of_codes(joined(ops["phase"], -1) + 1, ("", *Phase)),
        "start_ns": np.where(on_device, work.start_ns, marks.start_ns[at]),
        "end_ns": np.where(on_device, work.end_ns, marks.end_ns[at]),
        "clock": category_of_codes(on_device.astype(np.int64), ("host", "device")),
        "source": same_category("label", len(at)),
        "pair": as_category(joined(ops["pair"], "")),
    }
    return make_table(OPS, columns)


def _comms(marks: MarkedRanges, launches: LaunchIndex) -> pd.DataFrame:
    """The communication table: a row per message and collective, in the order of their ranges."""
    parts = [_transfer_columns(marks), _collective_columns(marks), _link_columns(marks)]
    order = np.argsort(np.concatenate([part["at"] for part in parts]), kind="stable")
    rows = Slice({name: np.concatenate([part[name] for part in parts])[order] for name in parts[0]})
    times = _times(marks, rows, launches)
    numbers = ("step", "peer", "group_size", "bytes", "received_bytes", "stage", "microbatch")
    columns: dict[str, Any] = {name: rows[name] for name in numbers}
    columns |= {
        "kind": category_of_codes(rows["kind"], _KINDS_OF_COMMS),
        "axis": category_of_codes(rows["axis"], AXES),
        "direction": category_of_codes(rows["direction"], _DIRECTIONS),
        "splits": category_of_codes(rows["splits"], _distinct_splits(marks)[1]),
        "clock": category_of_codes((times["stream"] >= 0).astype(np.int64), ("host", "device")),
        "transfer_start_ns": times["start_ns"],
        "transfer_end_ns": times["end_ns"],
    }
    unknown = dict.fromkeys(("rank", "match"), np.full(len(rows), -1))
    return make_table(COMMS, {**columns, **times, **unknown})


def _transfer_columns(marks: MarkedRanges) -> dict[str, Int64]:
    """Messages of the pipeline. Their wait knows the bytes of a receive whose size was negotiated; the call gives 0."""
    transfers, waits = marks.transfers, marks.waits
    names = ("kind", "stage", "microbatch", "peer", "step")
    wait = last_like([transfers[name] for name in names], [waits[name] for name in names])
    awaited_bytes = _taken(waits["bytes"], wait, 0)
    return {name: transfers[name] for name in ("at", "step", "axis", "peer", "stage", "microbatch")} | {
        "kind": np.where(_IS_SEND[transfers["kind"]], _SEND, _RECV),
        "direction": _DIRECTION_OF_KIND[transfers["kind"]],
        "group_size": np.full(len(transfers), 2),
        "bytes": np.where(transfers["bytes"] == 0, awaited_bytes, transfers["bytes"]),
        "awaited": _taken(waits["at"], wait, -1),
        **_without_splits(len(transfers)),
    }


def _collective_columns(marks: MarkedRanges) -> dict[str, Int64]:
    rows = marks.collectives
    columns = {name: rows[name] for name in ("at", "step", "axis", "kind", "bytes", "received_bytes")}
    columns["splits"] = _distinct_splits(marks)[0][1:]
    return columns | {"group_size": rows["size"], "peer": np.full(len(rows), -1)} | _without_microbatch(rows, marks)


def _distinct_splits(marks: MarkedRanges) -> tuple[Int64, Sequence[str]]:
    """(code of "", then of the splits of each collective; the texts, "" first)."""
    codes, texts = pd.factorize(np.append("", marks.collectives["splits"]).astype(object))
    return codes.astype(np.int64), [str(text) for text in texts]


def _link_columns(marks: MarkedRanges) -> dict[str, Int64]:
    rows = marks.links
    columns = {name: rows[name] for name in ("at", "step", "axis", "peer", "bytes")}
    columns |= {"kind": np.where(rows["is_send"], _SEND, _RECV), "group_size": np.full(len(rows), 2)}
    return columns | _without_microbatch(rows, marks) | _without_splits(len(rows))


def _without_splits(num_rows: int) -> dict[str, Int64]:
    """Columns of messages that are no all-to-all; 0 is the code of no splits."""
    return {"received_bytes": np.full(num_rows, -1), "splits": np.zeros(num_rows, dtype=np.int64)}


def _without_microbatch(rows: Slice, marks: MarkedRanges) -> dict[str, Int64]:
    """Columns that collectives and messages of exchanges share: those with a handle last until they were awaited."""
    awaited = last_like([rows["handle"]], [marks.awaits["handle"]])
    none = dict.fromkeys(("stage", "microbatch"), np.full(len(rows), -1))
    direction = np.full(len(rows), _DIRECTIONS.index(""))
    return {**none, "direction": direction, "awaited": _taken(marks.awaits["at"], awaited, -1)}


def _taken(values: Int64, index: Int64, default: int) -> Int64:
    """The values at some indices, ``default`` where these are −1."""
    return np.append(values, default)[index]


def _times(marks: MarkedRanges, rows: Slice, launches: LaunchIndex) -> dict[str, Int64]:
    """Times of the device work where the call launched any, else of the host, which a call that holds its wait keeps
    throughout.
    """
    start, end = marks.start_ns[rows["at"]], marks.end_ns[rows["at"]]
    is_awaited = rows["awaited"] >= 0
    wait_start, wait_end = (_taken(times, rows["awaited"], 0) for times in (marks.start_ns, marks.end_ns))
    is_ahead = is_awaited & (wait_end > end)
    work = launches.spans(start, end, communication=True)
    times = {
        "start_ns": start,
        "posted_ns": np.where(is_ahead, end, start),
        "asked_ns": np.where(is_ahead, wait_start, start),
        "end_ns": np.where(is_awaited, wait_end, end),
    }
    on_device = {name: work.end_ns if name == "end_ns" else work.start_ns for name in times}
    times = {name: np.where(work.launched, on_device[name], times[name]) for name in times}
    return times | {"stream": np.where(work.launched, work.stream, -1)}
