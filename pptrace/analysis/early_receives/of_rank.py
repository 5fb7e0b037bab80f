"""Receives of one rank that held up what it posted behind them, and the order in which it posts sends and receives.

A rank waits in a call (*host*), or a stream of its device runs its calls one after the other (*stream*): what is behind a receive
begins when that is over. It could have begun when all that it needs was there; what of the time until the receive's sender was
ready lies after that, the receive held it up. Who reads what the receive brings was not held up by it.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct, field

from pptrace.analysis.aligned import AlignedRun, RankRows, StepsOfRank
from pptrace.marks import P2P
from pptrace.model.device import DeviceWork
from pptrace.model.tables import BACKWARD_KINDS, FORWARD_KINDS, UNKNOWN, Bool, Int64
from pptrace.schedule.actions import KINDS, Kind
from pptrace.slices import Slice, distinct_of, last_like, reduce_groups

HOST, STREAM = "host", "stream"
NOT_RECORDED = "the kernels of sends and receives were not recorded, so that when they ran is not known"
NO_LAUNCHES = (
    "the calls that launched the kernels of sends and receives were not recorded, so that their order is not known"
)
SEVERAL_CLOCKS = "some sends and receives are timed on the host and some on the device"
OPS_ELSEWHERE = "ops are timed on the device, sends and receives on the host, so that their order is not known"
OTHER_ORDERS = "sends and receives are not posted in the same order in every step"
NO_STEPS = "in no step do the times of the ranks compare"

_LEAST_SHARE = 0.001
"""Part of a rank's step below which nothing counts as held up."""
_AT_ONCE, _AT_ONCE_NS = 0.1, 50_000
"""On a device, what was held up begins within this part of that time, or this time, after the receive."""
_NEVER = np.iinfo(np.int64).max
_OF_RECEIVE = ("receive", "step", "kind", "stage", "microbatch", "peer")
_HOLDS = (*_OF_RECEIVE, "begin", "until", "what", "at", "of", "match", "size")


class RankOrder(Struct, frozen=True, eq=False):
    """Sends, receives and calls that one rank posted in the steps that compare.

    ``holds`` has a row for each call or op that may have been held up, by its own rank's times: the number of the ``receive``,
    its ``step``, ``kind`` (a code), ``stage``, ``microbatch`` and ``peer``; from ``begin`` ``until`` its sender was ready (ns) it
    held up ``what`` (index in ``names``), of stage ``at`` and microbatch ``of``. A call with ``match`` needs ``size`` − 1 others
    too. ``waiting``: since when the rank was ready in calls in which it waited long (``match``, ``since``).
    ``posted``: sends and receives in order: ``kind``, ``stage``, ``microbatch``, and the ``position``: ops before each;
    ``one_by_one``: none of them begins before the one before it is over.
    ``reason`` says why nothing is known of the rank, ``order_reason`` why its order is not.
    """

    num_steps: int
    where: str = HOST
    holds: Slice = field(default_factory=lambda: Slice.empty(*_HOLDS))
    names: tuple[str, ...] = ()
    waiting: Slice = field(default_factory=lambda: Slice.empty("match", "since"))
    posted: Slice | None = None
    one_by_one: bool = False
    reason: str | None = None
    order_reason: str | None = None


def of_rank(rank: int, steps: StepsOfRank, data: AlignedRun) -> RankOrder | None:
    """Work that a rank's receives may have held up; None of a rank that neither sends nor receives."""
    rows = data.rows.of_rank(rank)
    if not _is_message(rows.comms).any():
        return None
    if data.work[rank].missing_device_events:
        return RankOrder(0, reason=NOT_RECORDED)
    if not steps.comparable:
        return RankOrder(0, reason=NO_STEPS)
    tables = (rows.ops, rows.spans, rows.comms)
    rows = RankRows(*(table.where(np.isin(table["step"], steps.comparable)) for table in tables))
    messages = rows.comms.where(_is_message(rows.comms))
    on_device = messages.among("clock", ("device",))
    if on_device.any() and not on_device.all():
        return RankOrder(0, reason=SEVERAL_CLOCKS)
    if not len(messages) or not len(rows.ops):
        return None
    is_device = bool(on_device.any())
    launches = Launches.of(data, rank) if is_device else None
    order = _posted(rows.ops, messages, launches)
    in_order = messages.sorted_by(("start_ns",))
    begin, over = in_order["start_ns"], in_order["end_ns"]
    holds, names = _holds(rows.ops, rows.comms, launches)
    return RankOrder(
        len(steps.comparable),
        STREAM if is_device else HOST,
        holds,
        names,
        _waiting(rows.comms, _least(rows.ops)),
        order if isinstance(order, Slice) else None,
        bool(((begin[1:] > begin[:-1]) & (begin[1:] >= over[:-1])).all()),
        order_reason=order if isinstance(order, str) else None,
    )


def _is_message(comms: Slice) -> Bool:
    is_message: Bool = (comms["axis"] == "pp") & comms.among("kind", P2P)
    return is_message


def _least(ops: Slice) -> int:
    """Time below which nothing is held up: a part of the usual step, ns."""
    _, first = np.unique(ops["step"], return_index=True)
    spans = np.maximum.reduceat(ops["end_ns"], first) - np.minimum.reduceat(ops["start_ns"], first)
    return max(1, int(_LEAST_SHARE * np.median(spans)))


def _waiting(comms: Slice, least: int) -> Slice:
    """Calls in which the rank was ready long before others were."""
    is_long = (comms["match"] >= 0) & (comms["transfer_start_ns"] - comms["start_ns"] >= least)
    return Slice({"match": comms["match"][is_long], "since": comms["start_ns"][is_long]})


class Launches(Struct, frozen=True, eq=False):
    """Launches of a rank's device work on the common clock, ns: ``at`` of each kernel by its ``start``, in order of start.

    By ``ended`` the compute that was ``launched`` up to a time was over.
    """

    start: Int64
    at: Int64
    launched: Int64
    ended: Int64

    @classmethod
    def of(cls, data: AlignedRun, rank: int) -> Launches:
        """The launches of a rank; work whose launch was not recorded is left out."""
        work: DeviceWork = data.work[rank]
        start, at, end = (
            data.clock.to_common_clock(rank, times[work.launch_ns >= 0])
            for times in (work.start_ns, work.launch_ns, work.end_ns)
        )
        computes = np.flatnonzero(work.is_compute[work.launch_ns >= 0])
        order = computes[np.argsort(at[computes], kind="stable")]
        return cls(start, at, at[order], np.maximum.accumulate(end[order]) if len(order) else order)

    def of_starts(self, starts: Int64) -> Int64:
        """Launches of the kernels that began at some times; :data:`_NEVER` where that is not known."""
        if not len(self.start):
            return np.full(len(starts), _NEVER)
        place = np.minimum(np.searchsorted(self.start, starts), len(self.start) - 1)
        return np.where(self.start[place] == starts, self.at[place], _NEVER)

    def ready(self, starts: Int64) -> Int64:
        """The time from which kernels could run: when they, and all compute before them, were launched and over."""
        at = self.of_starts(starts)
        before = np.searchsorted(self.launched, at) - 1
        ended = self.ended[np.maximum(before, 0)] if len(self.ended) else at
        return np.where(before >= 0, np.maximum(at, ended), at)


def _posted(ops: Slice, messages: Slice, launches: Launches | None) -> Slice | str:
    """The sends and receives of a step in the order of their posting, the same in every step, or why that is not known."""
    times = [rows["start_ns"] for rows in (ops, messages)]
    if launches is not None:
        times = [launches.of_starts(of_rows) for of_rows in times]
        if any((of_rows == _NEVER).any() for of_rows in times):
            return NO_LAUNCHES
    elif ops.among("clock", ("device",)).any():
        return OPS_ELSEWHERE
    ops_at, at = times
    numbers, size = np.unique(messages["step"], return_counts=True)
    in_order = np.lexsort((at, messages["step"]))  # is stable: what is posted together stays in its order
    codes = _codes(messages)[in_order]
    columns = {
        "kind": codes,
        "stage": messages["stage"][in_order],
        "microbatch": messages["microbatch"][in_order],
        "position": np.empty(len(codes), dtype=np.int64),
    }
    bounds = np.cumsum([0, *size.tolist()])
    for number, begin, end in zip(numbers.tolist(), bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        of_step = np.sort(ops_at[ops["step"] == number])
        columns["position"][begin:end] = np.searchsorted(of_step, at[in_order[begin:end]])
    if (size != size[0]).any():
        return OTHER_ORDERS
    by_step = {name: column.reshape(len(size), -1) for name, column in columns.items()}
    if any((rows != rows[0]).any() for rows in by_step.values()):
        return OTHER_ORDERS
    return Slice({name: rows[0].copy() for name, rows in by_step.items()})


def _codes(messages: Slice) -> Int64:
    """The kind of each send or receive, as a code of :class:`Kind`."""
    is_send, forward = messages.among("kind", ("send",)), messages["direction"] == "F"
    sends, receives = (
        np.where(forward, first.code, second.code)
        for first, second in ((Kind.SEND_F, Kind.SEND_B), (Kind.RECV_F, Kind.RECV_B))
    )
    return np.where(is_send, sends, receives)


def _holds(ops: Slice, comms: Slice, launches: Launches | None) -> tuple[Slice, tuple[str, ...]]:
    """(candidates held up by each call with a receive that waited long for its sender, names of its kinds)."""
    comms = comms.sorted_by(("start_ns",))
    ops = ops.sorted_by(("start_ns",))
    late = _late_receives(comms, _least(ops))
    (of_calls, call_names), (of_ops, op_names) = _call_names(comms), ops.codes("kind")
    texts, of_ops = (*call_names, *op_names), of_ops + len(call_names)
    next_op = np.searchsorted(ops["start_ns"], late["end"])
    next_call = _next_calls(comms, late)
    rows = []
    for index, table, what in ((next_op, ops, of_ops), (next_call, comms, of_calls)):
        known = index < len(table)
        known[known] = table["step"][index[known]] == late["step"][known]
        at, of_late = index[known], late.where(known)
        is_op = table is ops
        own = _op_ready(ops, comms, at, launches) if is_op else _call_ready(ops, comms, at, launches)
        begin = np.maximum(of_late["begin"], own)
        starts, ns = table["start_ns"][at], of_late["until"] - begin
        held = (ns >= of_late["least"]) & (starts >= of_late["until"])
        if launches is not None:
            held &= starts - of_late["end"] <= np.maximum(_AT_ONCE * ns, _AT_ONCE_NS)
        elif not is_op:
            held &= starts <= np.append(ops["start_ns"], _NEVER)[next_op[known]]  # an op before it holds it up itself
        at = at[held]
        match = size = np.full(len(at), UNKNOWN)
        if not is_op:
            match, size = comms["match"][at], np.where(comms.among("kind", P2P), 2, comms["group_size"])[at]
        columns = {name: of_late[name][held] for name in (*_OF_RECEIVE, "until")} | {"begin": begin[held]}
        columns |= {
            "what": what[at],
            "at": table["stage"][at],
            "of": table["microbatch"][at],
            "match": match,
            "size": size,
        }
        rows.append(Slice(columns))
    return Slice.joined(rows), texts


def _call_names(comms: Slice) -> tuple[Int64, tuple[str, ...]]:
    """(number of each call's name, the names): kinds of actions, and of other calls kind and axis."""
    (kinds, names), (axes, axis_names) = comms.codes("kind"), comms.codes("axis")
    texts = (*map(str, KINDS), *(f"{name} {axis}" for name in names for axis in axis_names))
    return np.where(_is_message(comms), _codes(comms), len(KINDS) + kinds * len(axis_names) + axes), texts


def _late_receives(comms: Slice, least: int) -> Slice:
    """Choose of each call with receives the one that waited longest for its sender, if that was long.

    It waited from ``begin`` ``until`` its sender was ready, and was over at ``end``; the call was posted at ``start``.
    """
    begin = np.where(comms.among("clock", ("device",)), comms["start_ns"], comms["asked_ns"])
    until = np.minimum(comms["transfer_start_ns"], comms["end_ns"])
    waits = until - begin
    is_late = _is_message(comms) & comms.among("kind", ("recv",)) & (comms["match"] >= 0) & (waits >= least)
    rows = np.flatnonzero(is_late)
    call, first = distinct_of((comms["step"][rows], comms["stream"][rows], comms["start_ns"][rows], begin[rows]))
    rows = rows[waits[rows] == reduce_groups(np.maximum, waits[rows], call, len(first))[call]]
    columns = {name: comms[name][rows] for name in ("step", "stage", "microbatch", "peer", "stream")}
    columns |= {"kind": _codes(comms)[rows], "receive": np.arange(len(rows)), "least": np.full(len(rows), least)}
    columns |= {
        "begin": begin[rows],
        "until": until[rows],
        "end": comms["end_ns"][rows],
        "start": comms["start_ns"][rows],
    }
    return Slice(columns)


def _next_calls(comms: Slice, late: Slice) -> Int64:
    """The first call behind each receive on its stream, or of its host; the number of calls where there is none."""
    following = np.full(len(late), len(comms), dtype=np.int64)
    for stream in np.unique(late["stream"]).tolist():
        rows = np.flatnonzero(comms["stream"] == stream)
        of_stream = late["stream"] == stream
        place = np.searchsorted(comms["start_ns"][rows], np.maximum(late["end"], late["start"] + 1)[of_stream])
        following[of_stream] = np.append(rows, len(comms))[place]
    return following


def _op_ready(ops: Slice, comms: Slice, at: Int64, launches: Launches | None) -> Int64:
    """The time from which each op could run: the op before it had ended, and what it reads had its sender ready; ns."""
    before = np.where(at > 0, ops["end_ns"][np.maximum(at - 1, 0)], np.iinfo(np.int64).min)
    if launches is not None:
        before = np.maximum(before, launches.of_starts(ops["start_ns"][at]))
    received = comms.where(_is_message(comms) & comms.among("kind", ("recv",)))
    ready = np.minimum(received["transfer_start_ns"], received["end_ns"])
    for kinds, code in ((FORWARD_KINDS, Kind.RECV_F.code), (BACKWARD_KINDS, Kind.RECV_B.code)):
        of_kind = _codes(received) == code
        came = _looked_up(ops.where(at), received.where(of_kind), ready[of_kind])
        before = np.where(ops.among("kind", kinds)[at], np.maximum(before, came), before)
    # the cells of the second half of a pair are not in the columns, so that what it reads is not known
    return np.where(ops.among("kind", ("OVERLAP_F_B",))[at], _NEVER, before)


def _looked_up(rows: Slice, known: Slice, times: Int64) -> Int64:
    """The times of known rows of the same step, stage and microbatch as some rows; the earliest of all where there is none."""
    names = ("step", "stage", "microbatch")
    first = last_like([rows[name] for name in names], [known[name][::-1] for name in names])
    return np.append(times[::-1], np.iinfo(np.int64).min)[first]


def _call_ready(ops: Slice, comms: Slice, at: Int64, launches: Launches | None) -> Int64:
    """The time from which each call could run as far as its own rank goes, ns.

    What it sends was made, and on a device what had been launched before it was over.
    """
    calls = comms.where(at)
    ready = np.full(len(at), np.iinfo(np.int64).min) if launches is None else launches.ready(calls["start_ns"])
    for kinds, code in ((FORWARD_KINDS, Kind.SEND_F.code), (BACKWARD_KINDS, Kind.SEND_B.code)):
        makes = ops.among("kind", kinds)
        made = _looked_up(calls, ops.where(makes), ops["end_ns"][makes])
        sends = _is_message(calls) & (_codes(calls) == code)
        ready = np.where(sends, np.maximum(ready, made), ready)
    return ready
