"""Traces of frameworks whose ranges name their ops: labels → ops and sends and receives of one rank.

Where a label lacks something, order says it: a step ends where an op would come again, and the k-th forward is that of
microbatch k. Ops last as long as their compute: the kernels launched inside the range, or on CPUs the operators in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from pptrace.recognise.catalogue import Label, read_label
from pptrace.recognise.devices import DeviceWork
from pptrace.recognise.host_compute import HostCompute
from pptrace.recognise.inferred import Inferred, infer_ops, messages_in_ranges
from pptrace.recognise.mesh import MeshInfo
from pptrace.recognise.rank_tables import Owner, RankTables, table_of
from pptrace.schedule.actions import Action, Kind
from pptrace.tables import COMMS, OPS, Category, Events, Trace


@dataclass(frozen=True, slots=True)
class _Labelled:
    """A labelled host range."""

    label: Label
    start_ns: int
    end_ns: int
    thread: int
    step: int = -1


def tables_from_labels(trace: Trace, work: DeviceWork) -> RankTables | None:
    """The ops and comms of a trace with op labels or with messages between ops; None when it has neither.

    The framework is "unlabelled" where order alone tells. Peers are -1 and wait for :func:`with_peers`, stages that no label
    tells are -1 and wait for :func:`with_stages`.
    """
    labelled = _labelled(trace.events)
    framework, source = _framework(labelled), "label"
    if framework is None:
        labelled = [entry for entry in labelled if entry.label.action is None]
        framework, source = "unlabelled", "inferred"
        found = infer_ops(trace.events)
    else:
        found = messages_in_ranges(trace.events, [_plain(e) for e in labelled if _lacks_stage(e.label)])
    if source == "inferred" and not _is_pipeline(found):
        return None
    labelled += [_Labelled(Label(framework, f.action), f.start_ns, f.end_ns, f.thread) for f in found]
    ranges = _with_steps(sorted(labelled, key=lambda entry: entry.start_ns))
    times = _Times(Owner(work), HostCompute(trace.events))
    messages = _Messages(trace.events)
    readers = {(key, entry.step): entry for entry in ranges for key in _reads(entry.label.action)}
    ops, comms = [], []
    for entry in ranges:
        action = entry.label.action
        if action is not None and action.kind.is_p2p:
            comms.append(_comm_row(entry, readers.get((action.key, entry.step)), times, messages))
        else:
            ops.append(_op_row(entry, times) | ({} if action is None else {"source": source}))
    chunk_of = {stage: chunk for chunk, stage in enumerate(sorted({row["stage"] for row in ops} - {-1}))}
    for row in ops:
        row["chunk"] = chunk_of.get(row["stage"], -1)
    return RankTables(framework, table_of(OPS, ops), table_of(COMMS, comms))


def _framework(ranges: Sequence[_Labelled]) -> str | None:
    """Whose op labels these are. Those without a stage are common words: they count where both directions are there."""
    actions = {entry.label.action.kind: entry.label for entry in ranges if entry.label.action is not None}
    sure = [label for label in actions.values() if not _lacks_stage(label)]
    if sure:
        return sure[0].framework
    return actions[Kind.F].framework if {Kind.F, Kind.B} <= set(actions) else None


def _lacks_stage(label: Label) -> bool:
    return label.action is not None and label.action.stage < 0


def _plain(entry: _Labelled) -> Inferred:
    assert entry.label.action is not None
    return Inferred(entry.label.action, entry.start_ns, entry.end_ns, entry.thread)


def _is_pipeline(found: Sequence[Inferred]) -> bool:
    """Whether order found forwards, backwards and messages."""
    kinds = {entry.action.kind for entry in found}
    return {Kind.F, Kind.B} <= kinds and any(kind.is_p2p for kind in kinds)


def with_stages(table: pd.DataFrame, mesh: MeshInfo) -> pd.DataFrame:
    """Ops or comms in which what has no stage has its rank's place in the pipeline, as with one stage per rank."""
    lacking = (table["microbatch"] >= 0) & (table["stage"] < 0)
    if not lacking.any():
        return table
    filled = table.copy()
    filled.loc[lacking, "stage"] = [mesh.pp_rank(rank) or 0 for rank in table.loc[lacking, "rank"]]
    if "chunk" in table:
        filled.loc[lacking, "chunk"] = 0
    return filled


def with_peers(comms: pd.DataFrame, ops: pd.DataFrame, mesh: MeshInfo) -> pd.DataFrame:
    """``comms`` in which each send and receive of a stage has the rank of its own pipeline that holds the other stage."""
    holders: dict[tuple[tuple[int, ...], int], int] = {}
    for rank, stage in ops.loc[ops["stage"] >= 0, ["rank", "stage"]].drop_duplicates().itertuples(index=False):
        holders[mesh.pipeline_of(rank), stage] = rank
    lacking = (comms["peer"] < 0) & (comms["stage"] >= 0)
    if not lacking.any():
        return comms
    filled, own = comms.copy(), comms[lacking]
    away = np.where((own["kind"] == "send") == (own["direction"] == "F"), 1, -1)
    wanted = zip(own["rank"], own["stage"] + away, strict=True)
    filled.loc[lacking, "peer"] = [holders.get((mesh.pipeline_of(rank), stage), -1) for rank, stage in wanted]
    return filled


def _labelled(events: Events) -> list[_Labelled]:
    """The labelled host ranges in time order."""
    labels = [read_label(name) for name in events.names]
    known = np.array([label is not None for label in labels], dtype=bool)
    if not known.any():
        return []
    rows = np.flatnonzero((events.category == Category.ANNOTATION) & known[events.name_id])
    ends = events.end_ns
    found = []
    for row in rows.tolist():
        label = labels[events.name_id[row]]
        assert label is not None
        found.append(_Labelled(label, int(events.start_ns[row]), int(ends[row]), int(events.thread[row])))
    return found


def _with_steps(ranges: Sequence[_Labelled]) -> list[_Labelled]:
    """The ranges with their steps: those of the profiler where it numbers them, else counted from 0 by ops that come again."""
    numbered = [entry for entry in ranges if entry.label.span == "STEP"]
    done: set[object] = set()
    count, found = 0, []
    for entry in ranges:
        action = entry.label.action
        if numbered:
            step = next((e.label.step for e in numbered if e.start_ns <= entry.start_ns < e.end_ns), -1)
        else:
            if action is not None and action.key in done:
                count += 1
                done.clear()
            step = count
        if action is not None:
            done.add(action.key)
        if step >= 0:
            found.append(_Labelled(entry.label, entry.start_ns, entry.end_ns, entry.thread, step))
    return found


def _reads(action: Action | None) -> list[tuple[Kind, int, int | None]]:
    """Keys of the receives whose messages an op reads."""
    if action is None or not action.kind.is_compute:
        return []
    kinds = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B}
    return [(kinds[half.kind], half.stage, half.microbatch) for half in action.halves if half.kind in kinds]


class _Times:
    """When ops really ran, and messages really moved."""

    def __init__(self, owner: Owner, host: HostCompute) -> None:
        self.owner = owner
        self._host = host

    def of_op(self, entry: _Labelled) -> tuple[int, int, str]:
        """(start, end, clock) of the compute inside a range; of the range itself where nothing shows it."""
        if span := self.owner.span(entry.start_ns, entry.end_ns, communication=False):
            return span[0], span[1], "device"
        inside = self._host.span(entry.thread, entry.start_ns, entry.end_ns)
        return (*(inside or (entry.start_ns, entry.end_ns)), "host")


class _Messages:
    """gloo's own ranges, which last until a message was waited for, and the sizes that NCCL calls tell."""

    def __init__(self, events: Events) -> None:
        gloo = np.array([name in ("gloo:send", "gloo:recv") for name in events.names], dtype=bool)
        rows = np.flatnonzero(gloo[events.name_id]) if gloo.any() else np.empty(0, dtype=np.intp)
        self._starts, self._ends = events.start_ns[rows], events.end_ns[rows]
        sized = events.comm_args[events.comm_args[["in_bytes", "out_bytes"]].max(axis=1) > 0]
        self._sized_at = events.start_ns[sized["event"].to_numpy()] if len(sized) else self._starts[:0]
        self._bytes = sized[["in_bytes", "out_bytes"]].max(axis=1).to_numpy(dtype=np.int64)

    def arrival(self, start_ns: int, end_ns: int) -> int | None:
        """When the one message that was posted in [start_ns, end_ns) had been waited for; None where no range shows it."""
        low, high = np.searchsorted(self._starts, (start_ns, end_ns))
        return int(self._ends[low]) if high == low + 1 else None

    def size(self, start_ns: int, end_ns: int) -> int:
        """Bytes of the calls in [start_ns, end_ns); -1 where none tells."""
        low, high = np.searchsorted(self._sized_at, (start_ns, end_ns))
        return int(self._bytes[low:high].sum()) if low < high else -1


def _op_row(entry: _Labelled, times: _Times) -> dict[str, Any]:
    action = entry.label.action
    row: dict[str, Any] = {"rank": -1, "step": entry.step, "stage": -1, "chunk": -1, "microbatch": -1, "phase": ""}
    row["pair"] = "" if action is None or not action.parts else str(action)
    if action is None:
        row |= {"kind": entry.label.span, "start_ns": entry.start_ns, "end_ns": entry.end_ns, "clock": "host"}
        return row | {"source": "label"}
    start, end, clock = times.of_op(entry)
    microbatch = -1 if action.microbatch is None else action.microbatch
    row |= {"kind": action.kind.value, "stage": action.stage, "microbatch": microbatch}
    return row | {"start_ns": start, "end_ns": end, "clock": clock, "source": "label"}


def _comm_row(entry: _Labelled, reader: _Labelled | None, times: _Times, messages: _Messages) -> dict[str, Any]:
    """A send lies in a buffer when its posting is over; a receive is over when its reader has it."""
    action = entry.label.action
    assert action is not None
    start, posted, stream, clock = entry.start_ns, entry.end_ns, -1, "host"
    asked = end = posted
    if span := times.owner.span(entry.start_ns, entry.end_ns, communication=True):
        start, end, stream = span
        posted, asked, clock = start, start, "device"
    elif action.kind.is_recv and reader is not None:
        asked = max(posted, reader.start_ns)
        arrival = messages.arrival(entry.start_ns, entry.end_ns)
        begun = times.of_op(reader)[0]
        end = max(posted, begun if arrival is None else min(arrival, begun))
    return {
        "rank": -1,
        "step": entry.step,
        "kind": "send" if action.kind.is_send else "recv",
        "axis": "pp",
        "peer": -1,
        "group_size": 2,
        "bytes": messages.size(entry.start_ns, entry.end_ns),
        "direction": action.kind.value[-1],
        "stage": action.stage,
        "microbatch": -1 if action.microbatch is None else action.microbatch,
        "start_ns": start,
        "posted_ns": posted,
        "asked_ns": min(asked, end),
        "end_ns": end,
        "transfer_start_ns": start,
        "transfer_end_ns": end,
        "stream": stream,
        "match": -1,
        "clock": clock,
    }
