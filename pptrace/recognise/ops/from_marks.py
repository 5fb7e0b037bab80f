"""Ops and communication from pptrace's own marks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from msgspec.structs import replace

from pptrace.marks import P2P, SpanKind
from pptrace.model.device import DeviceWork
from pptrace.model.tables import DIRECTIONS, Int64, as_category, category_of_codes, comms_table, ops_table
from pptrace.model.wording import counted
from pptrace.recognise.device.work import ALGORITHMS
from pptrace.recognise.ops.label_steps import LaunchIndex, RankTables
from pptrace.recognise.ops.mark_ranges import AXES, KINDS_OF_COLLECTIVES, KINDS_OF_SPANS, MarkedRanges
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
        # A rank whose optimizer step turns out to be wrong begins the next one anew (zero bubble's post-validation): the same ops
        # and transfers occur twice in a step, and the last ones count.
        steps = ", ".join(map(str, np.unique(rolled_back["step"]).tolist()))
        total_ms = int((marks.end_ns[rolled_back["at"]] - marks.start_ns[rolled_back["at"]]).sum()) / 1e6
        line = (
            f"{len(rolled_back)} ops of step {steps} ({total_ms:.2f} ms) ran again in the same step, "
            "as after an optimizer step that was rolled back; only the last runs count"
        )
        warnings += (line,)
    launches = LaunchIndex(work)
    endless = _without_end(marks, launches)
    if len(endless):
        marks = replace(marks, collectives=marks.collectives.where(~np.isin(marks.collectives["at"], endless["at"])))
        steps = ", ".join(map(str, np.unique(endless["step"]).tolist()))
        warnings += (
            f"left out, as their end is not known: {counted(len(endless), 'collective')} of step {steps} for which nothing in "
            "the trace waits, as for gathers of parameters that the first step after the recording awaits",
        )
    return RankTables("pptrace" if len(marks.ops) else "", _ops(marks, launches), _comms(marks, launches), warnings)


def _without_end(marks: MarkedRanges, launches: LaunchIndex) -> Slice:
    """The collectives that were only posted, whose wait the trace does not have, and that no kernel shows."""
    posted = marks.collectives
    posted = posted.where((posted["handle"] >= 0) & (last_like([posted["handle"]], [marks.awaits["handle"]]) < 0))
    on_device = launches.spans(marks.start_ns[posted["at"]], marks.end_ns[posted["at"]], communication=True)
    return posted.where(~on_device.launched)


def _ops(marks: MarkedRanges, launches: LaunchIndex) -> pd.DataFrame:
    """The ops table: a range is as long as the kernels that it launched, but for a step's."""
    ops, spans = marks.ops, marks.spans.where(marks.spans["kind"] != KINDS_OF_SPANS.index(SpanKind.RECOMPUTE))
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
        "step": joined(ops["step"], spans["step"]),
        "kind": category_of_codes(kind, _KINDS),
        "phase": category_of_codes(joined(ops["phase"], -1) + 1, ("", *Phase)),
        "start_ns": np.where(on_device, work.start_ns, marks.start_ns[at]),
        "end_ns": np.where(on_device, work.end_ns, marks.end_ns[at]),
        "clock": category_of_codes(on_device.astype(np.int64), ("host", "device")),
        "pair": as_category(joined(ops["pair"], "")),
    }
    return ops_table(columns)


def _comms(marks: MarkedRanges, launches: LaunchIndex) -> pd.DataFrame:
    """The communication table: a row per message and collective, in the order of their ranges."""
    codes, splits = pd.factorize(np.append("", marks.collectives["splits"]).astype(object))  # "" first
    collectives, links = marks.collectives, marks.links
    of_collectives = {name: collectives[name] for name in ("at", "step", "axis", "kind", "bytes", "received_bytes")}
    of_collectives |= {"splits": codes[1:].astype(np.int64), "group_size": collectives["size"]}
    of_collectives |= {"peer": np.full(len(collectives), -1), **_without_microbatch(collectives, marks)}
    of_links = {name: links[name] for name in ("at", "step", "axis", "peer", "bytes")}
    of_links |= {"kind": np.where(links["is_send"], _SEND, _RECV), "group_size": np.full(len(links), 2)}
    of_links |= {**_without_microbatch(links, marks), **_without_splits(len(links))}
    parts = [_transfer_columns(marks), of_collectives, of_links]
    order = np.argsort(np.concatenate([part["at"] for part in parts]), kind="stable")
    rows = Slice({name: np.concatenate([part[name] for part in parts])[order] for name in parts[0]})
    times = _times(marks, rows, launches)
    numbers = ("step", "peer", "group_size", "bytes", "received_bytes", "stage", "microbatch")
    columns: dict[str, Any] = {name: rows[name] for name in numbers}
    columns |= {
        "kind": category_of_codes(rows["kind"], _KINDS_OF_COMMS),
        "axis": category_of_codes(rows["axis"], AXES),
        "direction": category_of_codes(rows["direction"], _DIRECTIONS),
        "splits": category_of_codes(rows["splits"], [str(text) for text in splits]),
        "clock": category_of_codes((times["stream"] >= 0).astype(np.int64), ("host", "device")),
    }
    return comms_table({**columns, **times, "algorithm": category_of_codes(times["algorithm"], ALGORITHMS)})


def _transfer_columns(marks: MarkedRanges) -> dict[str, Int64]:
    """Messages of the pipeline. Their wait knows the bytes of a receive whose size was negotiated; the call gives 0."""
    transfers, waits = marks.transfers, marks.waits
    names = ("kind", "stage", "microbatch", "tensor", "peer", "step")
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
    return times | {"stream": np.where(work.launched, work.stream, -1), "algorithm": work.algorithm}
