"""Convert the arguments of communication events to the sparse :data:`pptrace.model.tables.COMM_ARGS`.

Written by ``record_param_comms`` and, through Kineto, onto NCCL kernels (torch's ``ParamCommsUtils`` and ``saveNcclMeta``):

    torch 2.2   Collective name, In/Out msg size (elements), dtype, Group size
    torch 2.3   In/Out msg nelems instead
    torch 2.4   Process Group Name, Description, Ranks; Global rank start, stride
    torch 2.5   Rank, Src Rank (receives), Dst Rank (sends)
    torch 2.12  Seq, Is asynchronized op
    all of them In/Out split size: of an all-to-all of uneven parts, rows for each peer; more than 30 are elided
    torch 2.13  Comms Id

Peers of ``c10d::send`` and ``c10d::recv_`` are in their ``Concrete Inputs`` (with record_shapes), as ranks *within the group*
without the group's name; such rows have an empty ``group_id``. Sizes from shapes:
:mod:`pptrace.ingest.kineto.comm_shapes`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from pptrace.ingest.common.dtype_sizes import DTYPE_BYTES
from pptrace.ingest.kineto.comm_shapes import SHAPED, sizes_of, splits_of_operator, splits_text
from pptrace.ingest.kineto.event_columns import CommRow
from pptrace.ingest.kineto.event_types import Args, int_of, text_of, value_of
from pptrace.model.categories import as_category
from pptrace.model.tables import COMM_ARGS, Int64, make_table

_PEER_INPUT = {"c10d::send": ("send", 2), "c10d::recv_": ("recv", 2), "c10d::recv_any_source_": ("recv_any_source", -1)}
_PEERLESS = frozenset({"send", "recv", "coalesced", "recvanysource"})


def comm_table(rows: Sequence[CommRow], event: Int64, distributed: Mapping[str, Any]) -> pd.DataFrame:
    """Make one row per communication event, its texts as categories.

    Args:
        rows: the arguments of each event.
        event: the index of each in the sorted events, -1 if dropped.
        distributed: what the profiler wrote about the job.
    """
    texts = _RankTexts(_configured_groups(distributed))
    records = sorted(
        (_record(row, int(index), texts) for row, index in zip(rows, event, strict=True) if index >= 0),
        key=lambda record: record[0],
    )
    columns = list(zip(*records, strict=True)) or [()] * len(COMM_ARGS)
    table: dict[str, Any] = {
        name: as_category(list(column)) if dtype == "str" else column
        for (name, dtype), column in zip(COMM_ARGS.items(), columns, strict=True)
    }
    return make_table(COMM_ARGS, table)


_Record = tuple[int, str, int, int, str, str, str, int, int, int, int, int, str]


class _RankTexts:
    """Lists of ranks as JSON, cached per group: a large job has thousands of calls with thousands of ranks."""

    def __init__(self, configured: Mapping[str, tuple[int, ...]]) -> None:
        self._configured = configured
        self._cache: dict[tuple[bytes, bytes, bytes, str, int], tuple[str, int]] = {}

    def of(self, args: Args, group_id: str, size: int) -> tuple[str, int]:
        """(the ranks of a call's group as JSON, their number); ("", 0) if unknown."""
        raws = (bytes(args.group_ranks), bytes(args.rank_start), bytes(args.rank_stride))
        key = (*raws, group_id, size)
        if key not in self._cache:
            ranks = group_ranks(args) or self._configured.get(group_id, ())
            if size > 0 and len(ranks) != size:
                ranks = _elided_ranks(args, size) or _strided_ranks(args, size)
            self._cache[key] = (json.dumps(list(ranks)) if ranks else "", len(ranks))
        return self._cache[key]


def _record(row: CommRow, event: int, texts: _RankTexts) -> _Record:
    """A row of COMM_ARGS, in the order of the schema."""
    args = row.args
    if row.name in _PEER_INPUT and not args.collective:
        kind, index = _PEER_INPUT[row.name]
        peer = _concrete_int(args, index)
        src, dst = (-1, peer) if kind == "send" else (peer, -1)
        return event, kind, -1, -1, "", "", "", -1, src, dst, -1, -1, ""
    if row.name in SHAPED and not args.collective:
        sizes = sizes_of(row.name, args)
        splits = splits_of_operator(row.name, args)
        return event, "", sizes.in_bytes, sizes.out_bytes, "", "", "", -1, -1, -1, -1, sizes.in_elements, splits
    item_bytes = DTYPE_BYTES.get(text_of(args.dtype).lower(), -1)
    group_id = text_of(args.group_id)
    size = int_of(args.group_size)
    text, num_ranks = texts.of(args, group_id, size)
    return (
        event,
        text_of(args.collective),
        _num_bytes(args.in_nelems or args.in_size, item_bytes),
        _num_bytes(args.out_nelems or args.out_size, item_bytes),
        group_id,
        text_of(args.group_description),
        text,
        size if size > 0 else (num_ranks or -1),
        int_of(args.src),
        int_of(args.dst),
        int_of(args.seq),
        -1,
        splits_text(value_of(args.in_split), value_of(args.out_split)),
    )


def _num_bytes(nelems: Any, item_bytes: int) -> int:
    count = int_of(nelems)
    if count < 0 or item_bytes < 0:
        return -1
    total = count * item_bytes
    return total if total < 2**63 else -1


def group_ranks(args: Args) -> tuple[int, ...]:
    """The global ranks of the group; () where the list is absent or elided."""
    return _complete_list(value_of(args.group_ranks))


def _complete_list(value: object) -> tuple[int, ...]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return ()
    if not isinstance(value, list) or not all(type(rank) is int and 0 <= rank < 2**63 for rank in value):
        return ()
    return tuple(value)


_ELIDED = re.compile(r"\[(?P<first>\d+(?:, ?\d+)+), ?\.\.\., ?(?P<last>\d+)\]", re.ASCII)
"""A list of more than 30 ranks, as torch shortens it: "[0, 2, 4, ..., 126]"."""


def _elided_ranks(args: Args, size: int) -> tuple[int, ...]:
    """Complete an elided list whose ranks form an arithmetic progression that ends at the last one; () for other lists."""
    match = _ELIDED.fullmatch(text_of(args.group_ranks))
    if match is None or size > 2**20:
        return ()
    first = [int(rank) for rank in match["first"].split(",")]
    stride = first[1] - first[0]
    ranks = range(first[0], first[0] + stride * size, stride) if stride > 0 else range(0)
    is_progression = len(ranks) > len(first) and list(ranks[: len(first)]) == first and ranks[-1] == int(match["last"])
    return tuple(ranks) if is_progression else ()


def _strided_ranks(args: Args, size: int) -> tuple[int, ...]:
    start, stride = int_of(args.rank_start), int_of(args.rank_stride)
    if start < 0 or stride < 1 or size > 2**20 or start + stride * size >= 2**63:
        return ()
    return tuple(range(start, start + stride * size, stride))


def _configured_groups(distributed: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Ranks by group name from ``distributedInfo.pg_config``, without elided lists."""
    config = distributed.get("pg_config")
    entries = list(config.values()) if isinstance(config, dict) else config
    if not isinstance(entries, list):
        return {}
    named = ((entry.get("pg_name"), _complete_list(entry.get("ranks"))) for entry in entries if isinstance(entry, dict))
    return {str(name): ranks for name, ranks in named if name is not None and ranks}


def _concrete_int(args: Args, index: int) -> int:
    values = value_of(args.inputs)
    if not isinstance(values, list) or not 0 <= index < len(values):
        return -1
    try:
        number = int(str(values[index]))
    except ValueError:
        return -1
    return number if -(2**63) <= number < 2**63 else -1


def rank_of_comms(rows: Sequence[CommRow]) -> int | None:
    """The rank of this process according to its collectives; None if they lack it or disagree.

    ``Rank`` is the rank within the group (the peer, in sends and receives), so only collectives of groups 0, 1, 2, … count, where
    it equals the global rank.
    """
    votes: Counter[int] = Counter()
    lists: dict[bytes, tuple[int, ...]] = {}
    for row in rows:
        text = bytes(row.args.group_ranks)
        if text not in lists:
            lists[text] = group_ranks(row.args)
        ranks = lists[text]
        rank = int_of(row.args.rank)
        is_collective = text_of(row.args.collective).lower() not in _PEERLESS
        if is_collective and 0 <= rank < len(ranks) and ranks == tuple(range(len(ranks))):
            votes[rank] += 1
    return next(iter(votes)) if len(votes) == 1 else None
