"""Convert the arguments of communication events to the sparse :data:`pptrace.model.tables.COMM_ARGS`.

Written by ``record_param_comms`` and, through Kineto, onto NCCL kernels (torch's ``ParamCommsUtils`` and ``saveNcclMeta``):

    torch 2.2   Collective name, In/Out msg size (elements), dtype, Group size
    torch 2.3   In/Out msg nelems instead
    torch 2.4   Process Group Name, Description, Ranks; Global rank start, stride
    torch 2.5   Rank (of a broadcast the root's), Src Rank (receives), Dst Rank (sends)
    torch 2.12  Seq, Is asynchronized op
    all of them In/Out split size: of an all-to-all of uneven parts, rows for each peer; more than 30 are elided
    torch 2.13  Comms Id

Peers of ``c10d::send`` and ``c10d::recv_`` and roots of ``c10d::broadcast_`` are in their ``Concrete Inputs`` (with
record_shapes), as ranks *within the group* without the group's name; such rows have an empty ``group_id``. Sizes follow from
tensor shapes, as ``record_shapes`` writes them, where they are unambiguous:

    "Input type": ["TensorList", "", "Scalar"]       element type of each tensor argument; "" for other arguments
    "Input Dims": [[[4, 6], [3]], [], []]            its shape; for a list those of its tensors, [] if more than 30
    "Concrete Inputs": ["", "", "-1"]                its value, if a number

An operator's sizes are known where its tensors are separate arguments; lists have no element type. Ranges of gloo's and NCCL's
works list all tensors that a work reads, with types: these are the message where input and output have equal sizes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from pptrace.ingest.common.rank_names import DTYPE_BYTES, CommRecord, comm_args_table, ranks_of
from pptrace.ingest.kineto.event_types import Args, int_of, text_of, value_of
from pptrace.model.tables import Int64

CommRow = tuple[int, str, Args]
"""(row in the file, name, arguments) of an event of communication."""

_GATHER, _INPUT_ONLY = "gather", "alone"
_SAME_TENSOR = (0, 0)
_OPERATORS: dict[str, tuple[int, int | str]] = {
    "c10d::allreduce_": _SAME_TENSOR,
    "c10d::allreduce_coalesced_": _SAME_TENSOR,
    "c10d::broadcast_": _SAME_TENSOR,
    "c10d::reduce_": _SAME_TENSOR,
    "c10d::_allgather_base_": (1, 0),
    "c10d::_reduce_scatter_base_": (1, 0),
    "c10d::alltoall_base_": (1, 0),
    "_c10d_functional::all_reduce": _SAME_TENSOR,
    "_c10d_functional::all_reduce_": _SAME_TENSOR,
    "_c10d_functional::all_reduce_coalesced": _SAME_TENSOR,
    "_c10d_functional::all_reduce_coalesced_": _SAME_TENSOR,
    "_c10d_functional::broadcast": _SAME_TENSOR,
    "_c10d_functional::broadcast_": _SAME_TENSOR,
    "_c10d_functional::all_gather_into_tensor": (0, _GATHER),
    "_c10d_functional::all_gather_into_tensor_out": (0, _GATHER),
    "_c10d_functional::reduce_scatter_tensor": (0, _INPUT_ONLY),
    "_c10d_functional::reduce_scatter_tensor_out": (0, _INPUT_ONLY),
}
"""(index of the input, index of the output) by operator; _GATHER: output = ranks · input; _INPUT_ONLY: output unknown."""
_ENQUEUED = ("nccl:all_reduce", "nccl:broadcast", "nccl:reduce")
_EQUAL = (*_ENQUEUED, "gloo:all_reduce", "gloo:broadcast", "gloo:reduce", "gloo:send", "gloo:recv")
"""Works whose output and input have equal sizes; those of NCCL list a tensor for each device of their process."""
SHAPED = frozenset({*_OPERATORS, *_EQUAL})
PEER_INPUT = {"c10d::send": ("send", 2), "c10d::recv_": ("recv", 2), "c10d::recv_any_source_": ("recv_any_source", -1)}
_OF_ANOTHER_RANK = (
    *("send", "recv", "coalesced", "recvanysource", "broadcast", "_broadcast_oop"),
    *("reduce", "_reduce_oop", "gather", "scatter"),
)
"""Calls whose ``Rank`` is the peer's or the root's, or nobody's."""
_BROADCAST, _ROOT = "c10d::broadcast_", 2
"""The operator of a broadcast, and its argument that is the rank of the root within the group."""


def comm_table(rows: Sequence[CommRow], event: Int64, distributed: Mapping[str, Any]) -> pd.DataFrame:
    """Make one row per communication event, its texts as categories.

    Args:
        rows: the arguments of each event.
        event: the index of each in the sorted events, -1 if dropped.
        distributed: what the profiler wrote about the job.
    """
    texts = _RankTexts(distributed)
    indexed = zip(rows, event.tolist(), strict=True)
    return comm_args_table(_record(name, args, index, texts) for (_, name, args), index in indexed if index >= 0)


class _RankTexts:
    """Lists of ranks as JSON, cached per group: a large job has thousands of calls with thousands of ranks."""

    def __init__(self, distributed: Mapping[str, Any]) -> None:
        config = distributed.get("pg_config")
        entries = list(config.values()) if isinstance(config, dict) else config
        self._configured = {  # without elided lists
            str(entry["pg_name"]): ranks
            for entry in (entries if isinstance(entries, list) else ())
            if isinstance(entry, dict) and entry.get("pg_name") is not None and (ranks := ranks_of(entry.get("ranks")))
        }
        self._cache: dict[tuple[bytes, bytes, bytes, str, int], tuple[str, int]] = {}

    def of(self, args: Args, group_id: str, size: int) -> tuple[str, int]:
        """(the ranks of a call's group as JSON, their number); ("", 0) if unknown."""
        raws = (bytes(args.group_ranks), bytes(args.rank_start), bytes(args.rank_stride))
        key = (*raws, group_id, size)
        if key not in self._cache:
            ranks = ranks_of(value_of(args.group_ranks)) or self._configured.get(group_id, ())
            if size > 0 and len(ranks) != size:
                ranks = _elided_ranks(args, size)
                start, stride = int_of(args.rank_start), int_of(args.rank_stride)
                if not ranks and start >= 0 and stride > 0 and size <= 2**20 and start + stride * size < 2**63:
                    ranks = tuple(range(start, start + stride * size, stride))
            self._cache[key] = (json.dumps(list(ranks)) if ranks else "", len(ranks))
        return self._cache[key]


def _record(name: str, args: Args, event: int, texts: _RankTexts) -> CommRecord:
    if name in PEER_INPUT and not args.collective:
        kind, index = PEER_INPUT[name]
        peer = _concrete_int(args, index)
        src, dst = (-1, peer) if kind == "send" else (peer, -1)
        return event, kind, -1, -1, "", "", "", -1, src, dst, -1, -1, ""
    if name in SHAPED and not args.collective:
        in_bytes, out_bytes, elements = sizes_of(name, args)
        values, splits = value_of(args.inputs), ""
        if name == _ALL_TO_ALL and isinstance(values, list) and len(values) > _IN_SPLITS:
            splits = _splits_text(values[_IN_SPLITS], values[_OUT_SPLITS])
        root = _concrete_int(args, _ROOT) if name == _BROADCAST else -1
        return event, "", in_bytes, out_bytes, "", "", "", -1, root, -1, -1, elements, splits
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
        _source(args, text),
        int_of(args.dst),
        int_of(args.seq),
        -1,
        _splits_text(value_of(args.in_split), value_of(args.out_split)),
    )


def _source(args: Args, group_ranks: str) -> int:
    """The global rank that a receive, or a broadcast in a group of two, is from; −1 where it is not recorded."""
    members = json.loads(group_ranks) if text_of(args.collective) == "broadcast" and group_ranks.count(",") == 1 else []
    root = int_of(args.rank)
    return members[root] if 0 <= root < len(members) else int_of(args.src)


def _num_bytes(nelems: Any, item_bytes: int) -> int:
    count = int_of(nelems)
    if count < 0 or item_bytes < 0:
        return -1
    total = count * item_bytes
    return total if total < 2**63 else -1


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

    ``Rank`` is the rank within the group (the peer, in sends and receives; the root, where there is one), so only collectives of
    groups 0, 1, 2, … count, where it equals the global rank.
    """
    votes: set[int] = set()
    lists: dict[bytes, tuple[int, ...]] = {}
    for _, _, args in rows:
        text = bytes(args.group_ranks)
        if text not in lists:
            lists[text] = ranks_of(value_of(args.group_ranks))
        ranks, rank = lists[text], int_of(args.rank)
        is_collective = text_of(args.collective).lower() not in _OF_ANOTHER_RANK
        if is_collective and 0 <= rank < len(ranks) and ranks == tuple(range(len(ranks))):
            votes.add(rank)
    return votes.pop() if len(votes) == 1 else None


Sizes = tuple[int, int, int]
"""Bytes of input and output, and elements of the input; -1 if unknown."""


def sizes_of(name: str, args: Args) -> Sizes:
    """Compute the sizes of an event from its shapes."""
    dims, types = value_of(args.dims), value_of(args.types)
    are_lists = isinstance(dims, list) and isinstance(types, list)
    if name not in SHAPED or not are_lists or not 0 < len(dims) == len(types):
        return -1, -1, -1
    tensors = [_tensor(*pair) for pair in zip(dims, types, strict=True)]
    if name in _ENQUEUED and len(tensors) > 1:
        return -1, -1, -1
    if name in _EQUAL:
        elements, size = (_sum(column) for column in zip(*tensors, strict=True))
        return size, size, elements
    source, target = _OPERATORS[name]
    if source >= len(tensors):
        return -1, -1, -1
    elements, size = tensors[source]
    if target == _GATHER:
        number = _concrete_int(args, 1)
        return (size, size * number, elements) if size >= 0 and 0 < number < 10**9 else (-1, -1, elements)
    if target == _INPUT_ONLY:
        return size, -1, elements
    out = tensors[int(target)][1] if int(target) < len(tensors) else -1
    return (size, out, elements) if min(size, out) >= 0 else (-1, -1, elements)


_ALL_TO_ALL, _OUT_SPLITS, _IN_SPLITS = "c10d::alltoall_base_", 3, 4
"""The operator of an all-to-all of one tensor, and the arguments with the rows of each peer."""


def _splits_text(sent: object, received: object) -> str:
    """The splits of an all-to-all as the tables have them ("3,7>3,1"), from two texts such as "[3, 7]".

    "" where there are none, or not all peers are listed.
    """
    sides = [_SPLITS.fullmatch(side) if isinstance(side, str) else None for side in (sent, received)]
    texts = [side[1].replace(" ", "") for side in sides if side is not None]
    if len(texts) < 2 or texts[0].count(",") != texts[1].count(","):
        return ""
    return ">".join(texts)


_SPLITS = re.compile(r"\[(\d{1,18}(?:, ?\d{1,18})*)\]", re.ASCII)


def _tensor(dims: object, kind: object) -> tuple[int, int]:
    """(elements, bytes) of an argument; the bytes of a list are unknown."""
    if kind == "TensorList":
        listed = dims if isinstance(dims, list) else []
        return (_sum(map(_elements, listed)) if listed else -1), -1
    item = DTYPE_BYTES.get(str(kind).lower(), -1)
    elements = _elements(dims) if item > 0 else -1
    size = elements * item
    return (elements, size) if elements >= 0 and size < 2**63 else (-1, -1)


def _elements(dims: object) -> int:
    if not isinstance(dims, list) or not all(type(length) is int and length >= 0 for length in dims):
        return -1
    product = math.prod(dims)
    return product if product < 2**63 else -1


def _sum(values: Iterable[int]) -> int:
    numbers = list(values)
    return sum(numbers) if min(numbers) >= 0 and sum(numbers) < 2**63 else -1
