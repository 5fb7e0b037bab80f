"""Communication calls that a kernel or copy carries: those around its launch, else those that its thread called before it.

Calls of a batch (``batch_isend_irecv``, coalescing managers) launch nothing themselves: the kernel that the thread launches
next carries them all. What a kernel does whose call was not recorded, its own arguments or its name say. Of kernels that were
launched before the recording began, and that have no arguments, nothing tells group or size: where the rank's calls were
recorded they are none of these, and device time alone.
"""

from __future__ import annotations

import numpy as np

from pptrace.model.tables import Bool, Int64
from pptrace.model.traces import Category, Events
from pptrace.recognise.calls.call_columns import CODE_OF_KIND, HINTS, CommArgs, make_calls
from pptrace.recognise.device.work import communication_rows, hint_of_kernel, kind_of_kernel, launch_calls
from pptrace.slices import Slice, places_of_each

_SEND, _RECV, _SEND_RECV = (CODE_OF_KIND[kind] for kind in ("send", "recv", "send_recv"))


def with_kernels(events: Events, calls: Slice, args: CommArgs) -> Slice:
    """The calls with the times of their kernels; a kernel without a recorded call becomes a call of its own.

    Calls that are parts of another one lose their kind.
    """
    rows = communication_rows(events)
    if not len(rows):
        return calls
    kernels = _kernels(events, rows)
    index, call = _carried(kernels, calls)
    args_rows = args.rows_of(kernels["row"])
    is_alone = kernels["kind"] != 0  # not a copy in addition to what a call asks for, as of a wait
    is_alone[index] = False
    if len(index):
        is_alone &= ~kernels["is_earlier"] | (args_rows >= 0)
    alone = np.flatnonzero(is_alone)
    kind_of_args, posted = args.kinds(args_rows[alone]), kernels["posted_ns"][alone]
    columns = {
        "kind": np.where(kind_of_args > 0, kind_of_args, kernels["kind"][alone]),
        "start_ns": posted,
        "until_ns": posted,
        "args": args_rows[alone],
        "hint": kernels["hint"][alone],
    }
    joined = Slice.joined([calls, make_calls(len(alone), columns)])
    index, call = np.append(index, alone), np.append(call, len(calls) + np.arange(len(alone)))
    order = np.lexsort((call, index))
    index, call = index[order], call[order]
    return _with_all_to_alls(_with_times(joined, kernels, index, call, args), kernels, index, call)


def _kernels(events: Events, rows: Int64) -> Slice:
    """The kernels and copies that communicate, in the order of their launches: events and what their names tell. A copy is of no
    kind. ``posted_ns`` is when their call was made, as far as that is known: their start where it is not, before all events where
    that was before the recording (``is_earlier``).
    """
    launchers = launch_calls(events, rows)
    launch_ns = np.where(launchers >= 0, events.start_ns[launchers], -1)
    order = np.lexsort((launchers, rows, launch_ns))
    rows, launchers, launch_ns = rows[order], launchers[order], launch_ns[order]
    is_launched = launchers >= 0
    # Correlation ids count the calls of a process, so that a smaller one than that of every recorded call was given before them.
    numbers = events.correlation[(events.category == Category.RUNTIME) & (events.correlation >= 0)]
    least = numbers.min() if len(numbers) else 0
    number = events.correlation[rows]
    is_earlier = ~is_launched & (number >= 0) & (number < least)
    posted_ns = np.where(is_launched, launch_ns, events.start_ns[rows])
    codes, name = np.unique(events.name_id[rows], return_inverse=True)
    names = [events.names[code] for code in codes.tolist()]
    kinds = np.array([CODE_OF_KIND[kind_of_kernel(each)] for each in names], dtype=np.int64)
    hints = np.array([HINTS.index(hint_of_kernel(each)) for each in names], dtype=np.int64)
    return Slice(
        {
            "row": rows,
            "launch_ns": launch_ns,
            "is_launched": is_launched,
            "posted_ns": np.where(is_earlier, events.start_ns.min() - 1, posted_ns),
            "is_earlier": is_earlier,
            "thread": events.thread[launchers],
            "start_ns": events.start_ns[rows],
            "end_ns": events.ends_of(rows),
            "stream": events.stream[rows],
            "kind": np.where(events.category[rows] == Category.KERNEL, kinds[name], 0),
            "hint": hints[name],
        }
    )


def _carried(kernels: Slice, calls: Slice) -> tuple[Int64, Int64]:
    """(kernel, call) of what carries what, as indices."""
    order = np.lexsort((calls["start_ns"], calls["thread"]))
    threads = calls["thread"][order]
    launched = np.flatnonzero(kernels["is_launched"])
    parts = [(launched[:0], launched[:0])]
    for thread, places in places_of_each(kernels["thread"][launched]).items():
        of_thread = launched[places]
        thread_calls = order[np.searchsorted(threads, thread) : np.searchsorted(threads, thread, side="right")]
        index, call = _carried_on_thread(
            kernels["launch_ns"][of_thread], kernels["kind"][of_thread], calls.where(thread_calls)
        )
        parts.append((of_thread[index], thread_calls[call]))
    index, call = (np.concatenate(column) for column in zip(*parts, strict=True))
    return index, call


def _carried_on_thread(launch_ns: Int64, kind: Int64, calls: Slice) -> tuple[Int64, Int64]:
    """(kernel, call) of one thread; both in order of time."""
    begun = np.searchsorted(calls["start_ns"], launch_ns, side="right")
    is_around = (begun > 0) & (launch_ns <= np.append(calls["until_ns"], 0)[begun - 1])
    may_carry = np.flatnonzero(is_around | (kind > 0))  # a copy is of the call around it alone
    begun, kind, is_around = begun[may_carry], kind[may_carry], is_around[may_carry]
    latest = np.full(len(kind), -1, dtype=np.int64)  # the last call before each launch that the kernel can carry
    for each in np.unique(kind[kind > 0]).tolist():
        able = _carries(np.full(len(calls), each), calls["kind"])
        last = np.maximum.accumulate(np.append(-1, np.where(able, np.arange(len(able)), -1)))
        latest[kind == each] = last[begun[kind == each]]
    carries, first = batches(begun, latest, is_around)
    batch = np.flatnonzero(carries & ~is_around)
    sizes = begun[batch] - first[batch]
    within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    call = np.repeat(first[batch], sizes) + within
    index = np.repeat(batch, sizes)
    able = _carries(kind[index], calls["kind"][call])
    around = np.flatnonzero(is_around)
    return may_carry[np.append(around, index[able])], np.append(begun[around] - 1, call[able])


def batches(begun: Int64, latest: Int64, is_around: Bool) -> tuple[Bool, Int64]:
    """(mask of the kernels that carry calls, for each kernel the first call that no kernel before it has carried).

    A kernel without a call around it carries what was called since the last one that carried something.
    """
    before = np.append(0, begun[:-1])
    carries = is_around | (latest >= before[: len(begun)])
    first = np.append(0, np.maximum.accumulate(np.where(carries, begun, 0)))[:-1]
    if (~carries & (latest >= first)).any():  # kernels of several kinds between calls: one by one
        reached = 0
        for index, (around, number, last) in enumerate(
            zip(is_around.tolist(), begun.tolist(), latest.tolist(), strict=True)
        ):
            first[index] = reached
            carries[index] = around or last >= reached
            reached = number if carries[index] else reached
    return carries, first


def _carries(kernel_kind: Int64, call_kind: Int64) -> Bool:
    """Return whether kernels of some kinds can do what calls of some kinds ask for."""
    is_message = np.isin(call_kind, (_SEND, _RECV, CODE_OF_KIND["all_to_all"]))
    able: Bool = (
        (kernel_kind == call_kind)
        | (kernel_kind == CODE_OF_KIND["unknown"])
        | ((kernel_kind == _SEND_RECV) & is_message)
    )
    return able


def _with_times(calls: Slice, kernels: Slice, kernel: Int64, call: Int64, args: CommArgs) -> Slice:
    """The calls with what their kernels tell: times, the axis of a library, arguments where the call has none."""
    order = np.argsort(call, kind="stable")
    kernel, call = kernel[order], call[order]
    begins = np.flatnonzero(np.diff(call, prepend=-1))
    carried = call[begins]
    changed = {name: calls[name].copy() for name in ("kernel", "kernel_start_ns", "kernel_end_ns", "hint", "args")}
    changed["kernel"][carried] = kernels["row"][kernel[begins]]
    changed["kernel_start_ns"][carried] = np.minimum.reduceat(kernels["start_ns"][kernel], begins)
    changed["kernel_end_ns"][carried] = np.maximum.reduceat(kernels["end_ns"][kernel], begins)
    for name, of_kernels, unknown in (("hint", kernels["hint"], 0), ("args", args.rows_of(kernels["row"]), -1)):
        value = of_kernels[kernel]
        tells = np.flatnonzero((value != unknown) & (calls[name][call] == unknown))[::-1]
        changed[name][call[tells]] = value[tells]  # of several the first: the last assignment stays
    return calls.with_columns(changed)


def _with_all_to_alls(calls: Slice, kernels: Slice, kernel: Int64, call: Int64) -> Slice:
    """The calls, with one of unknown kind for all that a kernel carries, as where nothing but the kernel was recorded, on streams
    of which each kernel carries so many sends and receives of the library that they may be an all-to-all; these lose their kind.
    A pipeline's batches begin and end with fewer on the same stream.
    """
    num_kernels, of_library, kind = len(kernels), calls["of_library"][call], calls["kind"][call]
    sends, recvs = (np.bincount(kernel[of_library & (kind == code)], minlength=num_kernels) for code in (_SEND, _RECV))
    may_be = (sends > 1) & (recvs > 1)
    if not may_be.any():
        return calls
    carrying = np.unique(kernel)
    stream = kernels["stream"][carrying]
    merged = carrying[~np.isin(stream, stream[~may_be[carrying]])]
    if not len(merged):
        return calls
    in_batch = np.isin(kernel, merged)
    kernel, call = kernel[in_batch], call[in_batch]
    begins = np.flatnonzero(np.diff(kernel, prepend=-1))
    first = call[begins]
    columns = {
        "kind": np.full(len(merged), _SEND_RECV),
        "until_ns": np.maximum.reduceat(calls["until_ns"][call], begins),
        **{name: calls[name][first] for name in ("thread", "start_ns", "kernel", "kernel_start_ns", "kernel_end_ns")},
    }
    left = calls["kind"].copy()
    left[call] = 0
    return Slice.joined([calls.with_columns({"kind": left}), make_calls(len(merged), columns)])
