"""Host calls of communication: nested events of one thread joined to calls.

    calling thread   c10d::allreduce_ ⊃ record_param_comms ⊃ nccl:all_reduce        posting: returns at once
    worker thread    gloo:all_reduce                                                the work: ends when it is done

A message of gloo's has its range on the calling thread, until somebody waits for it. No operator lasts until what it posts is
done but a monitored barrier, which waits inside.

The events of a trace's calls nest in a few ways only. The events of each thread are cut where nothing lasts across the cut; what
nests alike is joined alike, once for all of them (:mod:`pptrace.recognise.calls.call_columns`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from pptrace.model.tables import Bool, Int64
from pptrace.model.traces import Category, Events
from pptrace.recognise.calls.call_columns import (
    CODE_OF_KIND,
    EVENTS_OF_CALL,
    LASTING_ROLES,
    CommArgs,
    Nesting,
    RangeName,
    Role,
    join_nested,
    make_calls,
)
from pptrace.recognise.device.work import kind_of
from pptrace.slices import Slice, distinct_of, distinct_rows, places_of_each, reduce_groups

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
_WITH_LOCAL_PEERS = (Role.OPERATOR, Role.LIBRARY)
"""Roles of events whose arguments name peers by their ranks within the group."""


def host_calls(events: Events, args: CommArgs) -> Slice:
    """The calls of all threads (columns of :data:`~pptrace.recognise.calls.find_calls.COLUMNS`), thread by thread as their
    events end them. Works are not joined yet.
    """
    read = [read_name(name) for name in events.names]
    peers, names = np.array([peer for peer, _ in read], dtype=np.int64), [name for _, name in read]
    roles = np.array([name.role for name in names], dtype=np.int8)
    if not roles.any():
        return make_calls(0, {})
    rows = np.flatnonzero(events.is_of(Category.CPU_OP, Category.ANNOTATION) & (roles[events.name_id] > 0))
    if not len(rows):
        return make_calls(0, {})
    thread, first_of_thread = distinct_of([events.thread[rows]])
    order = np.argsort(thread, kind="stable")
    ranges = _Ranges.of(events, rows[order], thread[order], names, peers, args)
    return _calls_of(ranges, list(_joined(ranges)), events.thread[rows][first_of_thread])


def read_name(name: str) -> tuple[int, RangeName]:
    """(the peer within its group that a name tells, −1 without one; all else that it tells)."""
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


class _Ranges(Struct, frozen=True):
    """The host events of communication, thread by thread, each thread's in the order of their starts.

    ``thread`` counts threads from 0; ``name`` are codes of what is read in the name and, of a record, in its arguments.
    """

    start_ns: Int64
    end_ns: Int64
    thread: Int64
    name: Int64
    lasts: Bool
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
        kind_of_args = np.where(args_rows >= 0, args.kinds(args_rows) + 1, 0)
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
            peer=np.where(np.isin(roles, _WITH_LOCAL_PEERS), np.maximum(*src_dst), peers[events.name_id[rows]]),
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


_Joined = tuple[Int64, Nesting]
"""Find (where some stretches begin, the nesting of each of them)."""


def _joined(ranges: _Ranges) -> Iterator[_Joined]:
    """The stretches between cuts, those that nest alike together."""
    firsts = ranges.clusters()
    sizes = np.diff(np.append(firsts, len(ranges.start_ns)))
    for size in np.unique(sizes).tolist():
        same_size = firsts[sizes == size]
        for group in same_size[:, None] if size > _MOST_EVENTS else _of_equal_nesting(ranges, same_size, size):
            stretch = slice(int(group[0]), int(group[0]) + size)
            read = [ranges.names[code] for code in ranges.name[stretch].tolist()]
            yield group, join_nested(read, ranges.start_ns[stretch].tolist(), ranges.end_ns[stretch].tolist())


def _of_equal_nesting(ranges: _Ranges, firsts: Int64, size: int) -> list[Int64]:
    """The stretches of so many events in groups: equal names that hold each other alike."""
    events = firsts[:, None] + np.arange(size)
    name, start, end = ranges.name[events], ranges.start_ns[events], ranges.end_ns[events]
    columns, bits, num_bits = [name[:, index] for index in range(size)], np.zeros(len(firsts), dtype=np.int64), 0
    for later in range(size):
        for earlier in range(later):
            bits = bits * 4 + (start[:, later] < end[:, earlier]) + 2 * (start[:, later] == start[:, earlier])
            num_bits += 2
            if num_bits == 60:
                columns.append(bits)
                bits, num_bits = np.zeros(len(firsts), dtype=np.int64), 0
    _, number = distinct_rows(np.stack([*columns, bits], axis=1))
    return [firsts[rows] for rows in places_of_each(number).values()]


def _calls_of(ranges: _Ranges, parts: Sequence[_Joined], threads: Int64) -> Slice:
    """The calls of all stretches, in the order in which they end up known."""
    num_calls = 0
    columns: dict[str, list[Int64]] = {}
    sources: dict[str, list[Int64]] = {"ends": [], "peers": [], "sizes": []}  # (call, event) of each
    opens = []
    for group, (nested, of_nested, operators) in parts:
        firsts = group[:, None]
        opens.append((firsts + operators).ravel())
        number = num_calls + np.arange(len(firsts) * len(nested)).reshape(len(firsts), -1)
        num_calls += number.size
        for name in nested.columns:
            values = nested[name]
            of_events = np.where(values >= 0, firsts + values, -1) if name in EVENTS_OF_CALL else values
            columns.setdefault(name, []).append(np.broadcast_to(of_events, number.shape).ravel())
        for name, (call, event) in of_nested.items():
            sources[name].append(np.stack((number[:, call].ravel(), (firsts + event).ravel())))
    found = {name: np.concatenate(values) for name, values in columns.items()}
    ends, peers, sizes = (np.concatenate(pairs, axis=1) for pairs in sources.values())
    start, until, record = (found.pop(name) for name in ("start", "until", "record"))
    at, is_operator = found.pop("at"), found.pop("is_operator")
    on_worker = found["on_worker"] > 0
    calls = found | {
        "thread": threads[ranges.thread[start]],
        "start_ns": ranges.start_ns[start],
        "until_ns": np.where(on_worker, ranges.start_ns[until], ranges.end_ns[until]),
        "end_ns": np.maximum(reduce_groups(np.maximum, ranges.end_ns[ends[1]], ends[0], num_calls), -1),
        "local_peer": _first_known(num_calls, peers, ranges.peer),
        "elements": _first_known(num_calls, sizes, ranges.elements),
        "num_bytes": _first_known(num_calls, sizes, ranges.num_bytes),
        "shapes": _first_known(num_calls, sizes, ranges.args),
        "args": np.where(record >= 0, ranges.args[record], -1),
    }
    # An operator that holds no record is known when the next operator of its thread begins.
    operators = np.sort(np.concatenate(opens))
    following = np.append(operators, len(ranges.start_ns))[np.searchsorted(operators, at, side="right")]
    ends_of_threads = np.searchsorted(ranges.thread, ranges.thread[at], side="right")
    known_at = np.where(is_operator > 0, 2 * np.minimum(following, ends_of_threads) - 1, 2 * at)
    return make_calls(num_calls, calls).where(np.argsort(known_at))


def _first_known(num_calls: int, sources: Int64, values: Int64) -> Int64:
    """The first value of each call's events that is not negative; without one, the last."""
    call, event = sources
    chosen = np.full(num_calls, -1, dtype=np.int64)
    chosen[call] = values[event]  # of several, the last assignment stays
    is_known = values[event] >= 0
    chosen[call[is_known][::-1]] = values[event[is_known]][::-1]
    return chosen
