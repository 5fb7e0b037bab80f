"""Host calls of communication: nested events of one thread joined to calls.

    calling thread   c10d::allreduce_ ⊃ record_param_comms ⊃ nccl:all_reduce        posting: returns at once
    worker thread    gloo:all_reduce                                                the work: ends when it is done

A message of gloo's has its range on the calling thread, until somebody waits for it. No operator lasts until what it posts is
done but a monitored barrier, which waits inside.

The events of a trace's calls nest in a few ways only. The events of each thread are cut where nothing lasts across the cut; what
nests alike is joined alike, once for all of them (:mod:`pptrace.recognise.calls.nesting`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pptrace.model.tables import Int64
from pptrace.model.traces import Category, Events
from pptrace.recognise.calls.call_columns import CODE_OF_KIND, CommArgs, make_calls
from pptrace.recognise.calls.nesting import LASTING_ROLES, Nesting, RangeName, Role, join_nested
from pptrace.recognise.device.communication_names import kind_of
from pptrace.slices import Slice, distinct_rows

_WORK = re.compile(
    r"(?P<backend>[a-z0-9_]*ccl[a-z0-9_]*|gloo|ucc|mpi):(?P<what>\S+)(?: (?P<own>\d+)(?:->|<-)(?P<peer>\d+))?", re.ASCII
)
"""Backends are libraries of collective communication (CCL), however they are called: nccl, rccl, ncclx, nccl2, mccl, …"""
_OPERATOR = re.compile(r"_?c10d(?P<functional>_functional)?::(?P<what>\w+)", re.ASCII)
_LIBRARY = re.compile(r"p?nccl(?P<what>[A-Z]\w+)", re.ASCII)
_LASTING = frozenset({"gloo", "mpi"})
"""Backends whose ranges end with the work; those of the others when it is enqueued."""
_BLOCKING = "monitoredbarrier"
_ONE_TENSOR = re.compile("_base_?$|_tensor$")
"""Operators of one tensor, which one work does."""
_NOT_COMMUNICATION = RangeName(Role.NONE)


def host_calls(events: Events, args: CommArgs) -> Slice:
    """The calls of all threads (columns of :data:`~pptrace.recognise.calls.call_columns.COLUMNS`), thread by thread as their
    events end them. Works are not joined yet.
    """
    peers, names = _read_names(events.names)
    roles = np.array([name.role for name in names], dtype=np.int8)
    if not roles.any():
        return make_calls(0, {})
    on_host = (events.category == Category.CPU_OP) | (events.category == Category.ANNOTATION)
    rows = np.flatnonzero(on_host & (roles[events.name_id] > 0))
    if not len(rows):
        return make_calls(0, {})
    thread, first_of_thread = _by_first(events.thread[rows])
    order = np.argsort(thread, kind="stable")
    ranges = _Ranges.of(events, rows[order], thread[order], names, np.array(peers, dtype=np.int64), args)
    parts = list(_joined(ranges))
    return _calls_of(ranges, parts, events.thread[rows][first_of_thread])


def _by_first(values: Int64) -> tuple[Int64, Int64]:
    """(for each value its number, counted as values come first; where each comes first)."""
    _, first, number = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    return place[number], first[order]


def _read_names(names: Sequence[str]) -> tuple[list[int], list[RangeName]]:
    """The peer within its group that each name tells, −1 without one, and all else that it tells."""
    peers, read = [], []
    for name in names:
        peer, range_name = _read_name(name)
        peers.append(peer)
        read.append(range_name)
    return peers, read


def _read_name(name: str) -> tuple[int, RangeName]:
    if name == "record_param_comms":
        return -1, RangeName(Role.RECORD)
    if match := _OPERATOR.fullmatch(name):
        kind = kind_of(match["what"])
        blocks = match["what"].replace("_", "") == _BLOCKING
        in_parts = kind == "reduce_scatter" and not _ONE_TENSOR.search(match["what"])
        functional = match["functional"] is not None
        return -1, RangeName(Role.OPERATOR, kind, blocks, in_parts, functional) if kind else _NOT_COMMUNICATION
    if match := _WORK.fullmatch(name):
        kind = kind_of(match["what"])
        peer = int(match["peer"] or -1)
        return (peer, RangeName(Role.WORK, kind, match["backend"] in _LASTING)) if kind else (-1, _NOT_COMMUNICATION)
    if match := _LIBRARY.fullmatch(name):
        kind = kind_of(match["what"])
        return -1, RangeName(Role.LIBRARY, kind) if kind else _NOT_COMMUNICATION
    return -1, _NOT_COMMUNICATION


@dataclass(frozen=True, slots=True)
class _Ranges:
    """The host events of communication, thread by thread, each thread's in the order of their starts.

    ``thread`` counts threads from 0; ``name`` are codes of what is read in the name and, of a record, in its arguments.
    """

    start_ns: Int64
    end_ns: Int64
    thread: Int64
    name: Int64
    lasts: npt.NDArray[np.bool_]
    peer: Int64
    args: Int64
    elements: Int64
    num_bytes: Int64
    names: Sequence[RangeName]

    @classmethod
    def of(
        cls, events: Events, rows: Int64, thread: Int64, names: Sequence[RangeName], peers: Int64, args: CommArgs
    ) -> _Ranges:
        args_rows = args.rows_of(rows)
        collectives, texts = args.codes("collective")
        kinds = np.array([CODE_OF_KIND[kind_of(text)] for text in texts], dtype=np.int64)
        kind_of_args = np.where(args_rows >= 0, kinds[collectives[args_rows]] + 1, 0)
        distinct = list(dict.fromkeys(names))
        number = {name: index for index, name in enumerate(distinct)}
        name = np.array([number[each] for each in names], dtype=np.int64)[events.name_id[rows]]
        roles = np.array([each.role for each in distinct])[name]
        code = name * (len(CODE_OF_KIND) + 1) + np.where(roles == Role.RECORD, kind_of_args, 0)
        codes, name = np.unique(code, return_inverse=True)
        kinds_by_code = list(CODE_OF_KIND)
        read = []
        for index, of_args in (divmod(each, len(CODE_OF_KIND) + 1) for each in codes.tolist()):
            kind = kinds_by_code[of_args - 1] if of_args else ""
            read.append(
                replace(distinct[index], kind=distinct[index].kind or kind, is_other_call=of_args > 0 and not kind)
            )
        src_dst = (args.numbers("src", args_rows), args.numbers("dst", args_rows))
        return cls(
            start_ns=events.start_ns[rows],
            end_ns=events.ends_of(rows),
            thread=thread,
            name=name,
            lasts=np.isin(roles, LASTING_ROLES),
            peer=np.where(roles == Role.OPERATOR, np.maximum(*src_dst), peers[events.name_id[rows]]),
            args=args_rows,
            elements=args.numbers("in_elements", args_rows),
            num_bytes=args.message_bytes(args_rows),
            names=read,
        )

    def clusters(self) -> Int64:
        """Indices where nothing that began before lasts: those at which the events can be cut, 0 among them."""
        reach = np.where(self.lasts, np.maximum(self.end_ns, self.start_ns + 1), np.iinfo(np.int64).min)
        is_cut = np.ones(len(reach), dtype=np.bool_)
        bounds = np.append(np.flatnonzero(np.diff(self.thread, prepend=-1)), len(reach))
        for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            latest = np.maximum.accumulate(reach[first:last])
            is_cut[first + 1 : last] = self.start_ns[first + 1 : last] >= latest[:-1]
        return np.flatnonzero(is_cut)


_MOST_EVENTS = 16
"""Stretches of more events are compared with no other: their nesting is hardly that of another one."""


@dataclass(frozen=True, slots=True)
class _Joined:
    """Nesting of the stretches that begin at ``firsts``."""

    firsts: Int64
    nesting: Nesting


def _joined(ranges: _Ranges) -> Iterator[_Joined]:
    """The stretches between cuts, those that nest alike together."""
    firsts = ranges.clusters()
    sizes = np.diff(np.append(firsts, len(ranges.start_ns)))
    for size in np.unique(sizes).tolist():
        same_size = firsts[sizes == size]
        if size > _MOST_EVENTS:
            groups = [same_size[index : index + 1] for index in range(len(same_size))]
        else:
            groups = list(_alike(ranges, same_size, size))
        for group in groups:
            first = int(group[0])
            stretch = slice(first, first + size)
            read = [ranges.names[code] for code in ranges.name[stretch].tolist()]
            times = (ranges.start_ns[stretch].tolist(), ranges.end_ns[stretch].tolist())
            yield _Joined(group, join_nested(read, *times))


def _alike(ranges: _Ranges, firsts: Int64, size: int) -> Iterator[Int64]:
    """The stretches of so many events in groups: equal names that hold each other alike."""
    events = firsts[:, None] + np.arange(size)
    name, start, end = ranges.name[events], ranges.start_ns[events], ranges.end_ns[events]
    columns, bits, num_bits = [name[:, index] for index in range(size)], np.zeros(len(firsts), dtype=np.int64), 0
    for later in range(1, size):
        for earlier in range(later):
            held = start[:, later] < end[:, earlier]
            is_same_start = start[:, later] == start[:, earlier]
            bits = bits * 4 + held + 2 * is_same_start
            num_bits += 2
            if num_bits == 60:
                columns.append(bits)
                bits, num_bits = np.zeros(len(firsts), dtype=np.int64), 0
    _, number = distinct_rows(np.stack([*columns, bits], axis=1))
    order = np.argsort(number, kind="stable")
    yield from np.split(firsts[order], np.flatnonzero(np.diff(number[order])) + 1)


def _calls_of(ranges: _Ranges, parts: Sequence[_Joined], threads: Int64) -> Slice:
    """The calls of all stretches, in the order in which they end up known."""
    num_calls = 0
    fields: dict[str, list[npt.NDArray[np.int64]]] = {name: [] for name in ("start", "until", "record", "at", "opens")}
    pairs: dict[str, list[tuple[Int64, Int64]]] = {name: [] for name in ("ends", "peers", "sizes")}
    constants: dict[str, list[npt.NDArray[np.int64]]] = {}
    for part in parts:
        nesting, firsts = part.nesting, part.firsts[:, None]
        fields["opens"].append((firsts + nesting.operators).ravel())
        number = num_calls + np.arange(len(firsts) * nesting.num_calls).reshape(len(firsts), -1)
        num_calls += number.size
        fields["start"].append((firsts + nesting.start).ravel())
        fields["until"].append((firsts + nesting.until).ravel())
        fields["at"].append((firsts + nesting.at).ravel())
        fields["record"].append(np.where(nesting.record >= 0, firsts + nesting.record, -1).ravel())
        for name, (call, event) in nesting.sources.items():
            pairs[name].append((number[:, call].ravel(), (firsts + event).ravel()))
        for name, values in nesting.constants.items():
            constants.setdefault(name, []).append(np.tile(values, len(firsts)))
    start, until, record, at = (np.concatenate(fields[name]) for name in ("start", "until", "record", "at"))
    constant = {name: np.concatenate(values) for name, values in constants.items()}
    joined = {name: _concatenated(some) for name, some in pairs.items()}
    columns: dict[str, npt.NDArray[np.generic]] = {
        **{name: constant[name] for name in ("kind", "of_library", "on_worker", "is_enqueued", "in_parts")},
        "is_functional": constant["is_functional"],
        "thread": threads[ranges.thread[start]],
        "start_ns": ranges.start_ns[start],
        "until_ns": np.where(constant["on_worker"] > 0, ranges.start_ns[until], ranges.end_ns[until]),
        "end_ns": _latest(num_calls, *joined["ends"], ranges.end_ns),
        "local_peer": _first_known(num_calls, *joined["peers"], ranges.peer),
        "elements": _first_known(num_calls, *joined["sizes"], ranges.elements),
        "num_bytes": _first_known(num_calls, *joined["sizes"], ranges.num_bytes),
        "shapes": _first_known(num_calls, *joined["sizes"], ranges.args),
        "args": np.where(record >= 0, ranges.args[record], -1),
    }
    order = np.argsort(_known_at(ranges, at, constant["is_operator"] > 0, np.concatenate(fields["opens"])))
    return make_calls(num_calls, columns).where(order)


def _concatenated(pairs: Sequence[tuple[Int64, Int64]]) -> tuple[Int64, Int64]:
    first, second = zip(*pairs, strict=True)
    return np.concatenate(first), np.concatenate(second)


def _known_at(ranges: _Ranges, at: Int64, is_operator: npt.NDArray[np.bool_], opens: Int64) -> Int64:
    """A number for each call by which calls are in order: that of an operator which holds no record is known when the next
    operator of its thread begins.
    """
    opens = np.sort(opens)
    following = np.append(opens, len(ranges.start_ns))[np.searchsorted(opens, at, side="right")]
    ends_of_threads = np.searchsorted(ranges.thread, ranges.thread[at], side="right")
    return np.where(is_operator, 2 * np.minimum(following, ends_of_threads) - 1, 2 * at)


def _first_known(num_calls: int, call: Int64, event: Int64, values: Int64) -> Int64:
    """The first value of each call's events that is not negative; without one, the last."""
    chosen = np.full(num_calls, -1, dtype=np.int64)
    chosen[call] = values[event]  # of several, the last assignment stays
    is_known = values[event] >= 0
    chosen[call[is_known][::-1]] = values[event[is_known]][::-1]
    return chosen


def _latest(num_calls: int, call: Int64, event: Int64, ends_ns: Int64) -> Int64:
    """The latest end of each call's events; −1 without any."""
    latest = np.full(num_calls, -1, dtype=np.int64)
    np.maximum.at(latest, call, ends_ns[event])
    return latest
