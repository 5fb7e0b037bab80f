"""Read what NCCL's own NVTX ranges say of its calls: the communicator, its size and the process's place in it, bytes and peers.

    ncclCommInitRank*, ncclCommSplit, …   {"NCCL communicator ID": 1342…, "No. of ranks": 8, "Rank": 3, …}
    ncclAllReduce, ncclSend, …            {"NCCL communicator ID": 1342…, "Message size [bytes]": 4096, "Root" | "Peer rank": 1}

These are payloads of NVTX, which nsys writes as JSON texts (NCCL ``src/include/nvtx_payload_schemas.h``). Older NCCL names
no communicator, and calls the size of some calls "Bytes". It is that of one rank's part; peers are ranks within the communicator.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from msgspec import Struct

from pptrace.ingest.common.codes import Codes
from pptrace.ingest.common.json_texts import object_of
from pptrace.ingest.common.rank_names import CommRecord, comm_args_table
from pptrace.ingest.common.sqlite import NONE, Database, as_integers
from pptrace.ingest.nsight.event_tables import NVTX, pid_of, tid_of
from pptrace.model.tables import Int64
from pptrace.model.traces import Category, Events
from pptrace.slices import distinct_of

_NCCL = re.compile(r"^p?nccl[A-Z]")
_COMMUNICATOR, _SIZE, _RANK = "NCCL communicator ID", "No. of ranks", "Rank"
_BYTES, _PEERS = ("Message size [bytes]", "Bytes"), ("Peer rank", "Root")
_MOST = 2**62
_FULL_INPUT = ("ncclReduceScatter", "ncclAlltoAll", "ncclScatter")
_FULL_OUTPUT = ("ncclAllGather", "ncclAlltoAll", "ncclGather")
"""Calls of which the input or the output has a part for each rank."""

Place = tuple[int, int]
"""(rank within a communicator, its size)."""


class Payloads(Struct, frozen=True):
    """Payloads of the ranges of all processes, in order of process, thread and start: each an index into ``texts``.

    ``places`` are those of each process, by communicator.
    """

    pid: Int64
    thread: Int64
    start_ns: Int64
    index: Int64
    texts: tuple[Mapping[str, Any], ...]
    places: Mapping[int, Mapping[str, Place]]

    def rank_by_pid(self, pids: list[int]) -> dict[int, int]:
        """The rank of each process where one communicator has them all and no other: its place there; else {}."""
        for group in self.places.get(pids[0], {}):
            places = [self.places.get(pid, {}).get(group, (-1, -1)) for pid in pids]
            if sorted(places) == [(rank, len(pids)) for rank in range(len(pids))]:
                return {pid: rank for pid, (rank, _) in zip(pids, places, strict=True)}
        return {}

    def comm_args(self, pid: int, events: Events, base_ns: int) -> pd.DataFrame:
        """The schema ``COMM_ARGS`` of the calls of one process.

        Args:
            pid: of the process.
            events: its sorted events.
            base_ns: what was added to the times of the file.
        """
        calls = events.rows_named(_NCCL, Category.ANNOTATION, Category.CPU_OP)
        first, last = np.searchsorted(self.pid, (pid, pid + 1)).tolist()
        payloads = pd.DataFrame({name: getattr(self, name)[first:last] for name in ("thread", "start_ns", "index")})
        payloads = payloads.drop_duplicates(["thread", "start_ns"])
        times = {"event": calls, "thread": events.thread[calls], "start_ns": events.start_ns[calls] - base_ns}
        joined = pd.DataFrame(times).merge(payloads, on=["thread", "start_ns"])
        # Few calls differ in more than their times: what is alike is read once.
        names, index = events.name_id[joined["event"].to_numpy()], joined["index"].to_numpy()
        number, first = distinct_of([names, index])
        distinct = zip(names[first].tolist(), index[first].tolist(), strict=True)
        table = comm_args_table(
            self._record(pid, at, events.names[name], self.texts[text]) for at, (name, text) in enumerate(distinct)
        )
        return table.take(number).reset_index(drop=True).assign(event=joined["event"])

    def _record(self, pid: int, number: int, name: str, payload: Mapping[str, Any]) -> CommRecord:
        group, part = _group_of(payload), _number(payload, *_BYTES)
        _, size = self.places.get(pid, {}).get(group, (-1, -1))
        all_parts = part * size if part >= 0 and size > 0 else -1
        sent, came = (all_parts if name in names else part for names in (_FULL_INPUT, _FULL_OUTPUT))
        if min(sent, came) < 0:
            sent = came = -1  # the larger one counts
        peer = _number(payload, *_PEERS)
        src, dst = (-1, peer) if name == "ncclSend" else (peer, -1)
        return number, "", sent, came, group, "", "", size, src, dst, -1, -1, ""


def read_payloads(db: Database, names: Iterable[str]) -> Payloads:
    """Read the payloads of an export's ranges; none where nsys wrote none, or no range has one of NCCL's ``names``."""
    texts, none = Codes(), np.zeros(0, dtype=np.int64)
    found = [(none, none, none)]
    for column in ("jsonText", "jsonTextId") if any(map(_NCCL.match, names)) else ():
        if not db.has(NVTX, "start", "globalTid", column):
            continue
        for chunk in db.rows(NVTX, ("start", "globalTid", column), f"WHERE {column} IS NOT NULL"):
            start, global_ids, ids = map(as_integers, chunk)
            by_id = column == "jsonTextId"
            code = db.text_codes("StringIds", "value", ids, texts) if by_id else texts.of(map(str, chunk[2]))
            found.append((start, global_ids, code.astype(np.int64)))
    start_ns, global_id, index = (np.concatenate(column) for column in zip(*found, strict=True))
    rows = np.flatnonzero((start_ns != NONE) & (global_id != NONE))
    pid, thread = (of(global_id[rows]).astype(np.int64) for of in (pid_of, tid_of))
    order = np.lexsort((start_ns[rows], thread, pid))
    rows, payloads = rows[order], tuple(map(object_of, texts.texts))
    return Payloads(
        pid[order], thread[order], start_ns[rows], index[rows], payloads, _places(pid[order], index[rows], payloads)
    )


def _places(pid: Int64, index: Int64, payloads: tuple[Mapping[str, Any], ...]) -> dict[int, dict[str, Place]]:
    """The places of each process by communicator; without those of which it has several, one for each of its devices."""
    found: dict[int, dict[str, set[Place]]] = {}
    _, first = distinct_of([pid, index])
    for process, number in zip(pid[first].tolist(), index[first].tolist(), strict=True):
        group, size, rank = _group_of(payloads[number]), *(_number(payloads[number], key) for key in (_SIZE, _RANK))
        if group and 0 <= rank < size:
            found.setdefault(process, {}).setdefault(group, set()).add((rank, size))
    return {
        process: {group: next(iter(places)) for group, places in of_group.items() if len(places) == 1}
        for process, of_group in found.items()
    }


def _group_of(payload: Mapping[str, Any]) -> str:
    """The communicator as NCCL's logs and its Inspector write it; "" where the payload names none."""
    number = payload.get(_COMMUNICATOR)
    return f"{number:#x}" if type(number) is int and number > 0 else ""


def _number(payload: Mapping[str, Any], *keys: str) -> int:
    """The first of some values that is there; −1 where none is, or it is impossible."""
    value = next((payload[key] for key in keys if key in payload), -1)
    return value if type(value) is int and 0 <= value < _MOST else -1
