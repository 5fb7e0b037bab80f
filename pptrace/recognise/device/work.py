"""Device work by category (compute, communication, memory), each with the host call that launched it; kinds of communication by
the names of calls and kernels, and by the launchers of kernels without a name, or with another's; and work that was launched and
is not in the trace.

CUPTI drops what its buffers cannot hold, Kineto the first of a session. Every launch of a kernel has a correlation, which its
kernel has too. A launch without is of a kernel that was lost, if not of one that was captured into a graph. What lost kernels
did is not known: nor is when their rank computed, in the steps they were in.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from pptrace.intervals import Int64, earliest_from, intersect, lengths_within, merge, subtract
from pptrace.marks import P2P
from pptrace.model.device import DeviceBreakdown, DeviceWork, LostKernels, Rows
from pptrace.model.tables import Int8
from pptrace.model.traces import Bool, Category, Events
from pptrace.recognise.device.idle import idle_time
from pptrace.slices import are_of

COMMUNICATION_KERNEL = re.compile(
    r"(?-i:(?<![A-Za-z_])(?:nccl|rccl|msccl)[A-Z])|userbuffers|nvshmem|mscclpp|cross_device_reduce|quick_?reduce(?:_|::)"
    r"|symmetric_memory::|hybrid_ep::(?!scan)|elastic::(?:hybrid_)?(?:dispatch|combine)_impl"
    r"|internode(?:_ll)?::(?!get_dispatch_layout|\w+_mask_buffer)|intranode::|hcclAicpu|^Hccl|^Hcom|^hcom_"
    r"|(?<![A-Za-z])Ep(?:Dispatch|Combine)(?:Intra|Inter)Node|moeA2A(?:Dispatch|Combine)Kernel"
    r"|^(?:void )?(?:\w+::)*(?:multimem_\w*|(?:one|two)_?shot_?\w*)(?:all_?reduce|all_?gather|reduce_?scatter)"
    r"|^(?:void )?(?:\w+::)*allreduce_fusion"
    r"|^%?(?:all-reduce|all-gather|reduce-scatter|(?:ragged-)?all-to-all|collective-(?:permute|broadcast)|send|recv)"
    r"(?:-start|-done)?(?:\.\d+)*$",
    re.IGNORECASE,
)
"""Kernels that carry data between devices: NCCL, RCCL and MSCCL (names that go on with a capital letter), MSCCL++, HCCL, NVSHMEM,
DeepEP, MORI, Transformer Engine's user buffers, vLLM, AITER, TensorRT-LLM and FlashInfer, torch's symmetric memory; operations of
XLA, as TPUs record them."""

_KINDS = (
    ("all_reduce", re.compile(r"allreduce|crossdevicereduce|quickreduce")),
    ("all_gather", re.compile(r"allgather")),
    ("reduce_scatter", re.compile(r"reducescatter")),
    ("all_to_all", re.compile(r"all(?:to|2)all")),
    ("broadcast", re.compile(r"broadcast|bcast")),
    ("barrier", re.compile(r"barrier")),
    ("send_recv", re.compile(r"sendrecv|pushsend|pushrecv|collectivepermute")),
    ("recv", re.compile(r"^i?recv|receive")),
    ("send", re.compile(r"^i?send")),
    ("gather", re.compile(r"^gather")),
    ("scatter", re.compile(r"^scatter")),
    ("reduce", re.compile(r"^reduce")),
)
KINDS = ("", *(kind for kind, _ in _KINDS), "unknown")
"""All kinds of calls and kernels; "" is no communication."""
_EXPERTS = re.compile(
    r"(?:internode|internode_ll|intranode|hybrid_ep|elastic)::"
    r"|(?<![A-Za-z])Ep(?:Dispatch|Combine)(?:Intra|Inter)Node|moeA2A(?:Dispatch|Combine)Kernel",
    re.IGNORECASE,
)
_AWAITS_EXPERTS = re.compile(
    r"::(?:cached_)?notify(?:_dispatch|_combine)?\b|::rdma_sync_kernel|node::barrier\b|::clean_low_latency_buffer",
    re.IGNORECASE,
)
"""Kernels of DeepEP that end when all ranks have arrived, and move next to nothing."""
_TENSORS = re.compile(
    r"userbuffers|cross_device_reduce|quick_?reduce(?:_|::)|(?:one|two)_?shot|multimem_|allreduce_fusion", re.IGNORECASE
)


@lru_cache(maxsize=4096)
def kind_of(name: str) -> str:
    """The kind of a call such as ``_allgather_base``, ``allreduce_coalesced_`` or ``AllToAll``; "" for no communication."""
    squeezed = re.sub(r"[^a-z0-9]", "", name.lower())
    return next((kind for kind, pattern in _KINDS if pattern.search(squeezed)), "")


@lru_cache(maxsize=4096)
def kind_of_kernel(name: str) -> str:
    """The kind of a communication kernel: send_recv where it may be any of send, receive and all-to-all."""
    if _EXPERTS.search(name):
        return "barrier" if _AWAITS_EXPERTS.search(name) else "all_to_all"
    base = re.split(r"[<(]", name.removeprefix("void "), maxsplit=1)[0]
    base = re.sub(r"^nccl(?:Sym\w*?|Dev)?Kernel_|^hcom_", "", base)
    kind = kind_of(base)
    return "send_recv" if kind in P2P else kind or "unknown"


@lru_cache(maxsize=4096)
def hint_of_kernel(name: str) -> str:
    """The axis that a library's kernels serve; "" where it may be any."""
    return "ep" if _EXPERTS.search(name) else "tp" if _TENSORS.search(name) else ""


_ALGORITHM = re.compile(
    r"_(TREE|RING|COLLNET(?:_DIRECT|_CHAIN)?|NVLS(?:_TREE)?|PAT)_(LL128|LL|SIMPLE)(?![A-Z0-9])"  # NCCL 2.8 on, RCCL
    r"|^nccl[A-Z]\w*?(Tree|Ring|CollNet)(LL128|LL|)Kernel_"  # before
)
ALGORITHMS = (
    "",
    *(
        f"{algorithm}_{protocol}"
        for algorithm in ("TREE", "RING", "COLLNET", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
        for protocol in ("LL", "LL128", "SIMPLE")
    ),
)
"""Algorithms and protocols in names of kernels, by their codes; 0 is none."""


@lru_cache(maxsize=4096)
def algorithm_of_kernel(name: str) -> int:
    """The code of the algorithm and the protocol in the name of one of NCCL's kernels; 0 without one, as of sends and receives.

    A kernel runs what it is given, of other protocols too: NCCL compiles one for each function, inlines LL alone and names it
    after that (``src/device/generate.py``).
    """
    match = _ALGORITHM.search(name)
    if match is None or kind_of_kernel(name) == "send_recv":
        return 0
    algorithm, protocol = match[1] or match[3].upper(), match[2] or match[4] or "SIMPLE"
    return ALGORITHMS.index(f"{algorithm}_{protocol}")


_DEVICE_RANGE = re.compile(r"^(?:(?:nccl|rccl|hccl|xccl):|p?nccl[A-Z])")
_LAUNCH = re.compile(r"^(?:cuda|hip|cu)\w*Launch")
_OPERATOR = re.compile(r"^(?:c10d::|record_param_comms)")
_DEVICE_BACKEND = re.compile(r"(?:cuda:)?nccl")


NO_DEVICE = DeviceBreakdown(None, None, None, None, None, None, None, None)


def device_work(events: Events, backend: str = "") -> DeviceWork:
    """The kernels, copies and fills of a rank, each with its launch; ``backend`` is the process groups' where it is known."""
    rows = device_rows(events)
    calls = launch_calls(events, rows)
    is_kernel = events.category[rows] == Category.KERNEL
    communicates = _communicates(events, rows, calls)
    return DeviceWork(
        start_ns=events.start_ns[rows],
        end_ns=events.ends_of(rows),
        stream=events.stream[rows],
        launch_ns=np.where(calls >= 0, events.start_ns[calls], -1) if len(calls) else np.empty(0, dtype=np.int64),
        is_compute=is_kernel & ~communicates,
        is_communication=communicates,
        algorithm=algorithms(events, rows),
        from_pageable=_from_pageable(events, rows),
        missing_device_events="" if len(rows) else _name_of_missing_device(events, backend),
        idle=idle_time(events, rows, calls, communicates),
    )


_PAGEABLE = re.compile(r"HtoD \(Pageable")
_TELLS_MEMORY = re.compile(r"HtoD \((?:Pageable|Pinned|Managed)|(?!H)\wto\w \(")


def _from_pageable(events: Events, rows: Rows) -> Bool | None:
    """Mark the copies from pageable memory of the host; None where a copy does not tell which memory it is from."""
    is_copy: Bool = events.category[rows] == Category.MEMCPY
    copies = rows[is_copy]
    names = events.name_id[copies]
    if not events.named(_TELLS_MEMORY, copies)[names].all():
        return None
    is_copy[is_copy] = events.named(_PAGEABLE, copies)[names]
    return is_copy


def _name_of_missing_device(events: Events, backend: str) -> str:
    """The name in the trace that proves the use of a device, for ranks without device events; "" without one.

    That there is a device (Kineto's ``deviceProperties``) shows nothing: ranks of one host compute on CPUs next to it as well.
    """
    on_host = (Category.CPU_OP, Category.ANNOTATION)
    proofs = [events.rows_named(_DEVICE_RANGE, *on_host), events.rows_named(_LAUNCH, Category.RUNTIME)]
    if _DEVICE_BACKEND.fullmatch(backend):
        proofs.append(events.rows_named(_OPERATOR, *on_host))
    return next((events.names[events.name_id[rows[0]]] for rows in proofs if len(rows)), "")


def communication_rows(events: Events) -> Rows:
    """The events that carry data between devices: kernels by name, and copies that a collective launched."""
    if not len(events):
        return np.empty(0, dtype=np.intp)
    rows = device_rows(events)
    carrying: Rows = rows[_communicates(events, rows, launch_calls(events, rows))]
    return carrying


def algorithms(events: Events, rows: Rows) -> Int8:
    """The code (of :data:`ALGORITHMS`) of each kernel; 0 for the row −1."""
    ids, index = np.unique(np.where(rows >= 0, events.name_id[rows], -1) if len(events) else rows, return_inverse=True)
    codes = [algorithm_of_kernel(events.names[number]) if number >= 0 else 0 for number in ids.tolist()]
    return np.array(codes, dtype=np.int8)[index]


def device_rows(events: Events) -> Rows:
    """The kernels, copies and fills, by start."""
    return np.flatnonzero(events.is_of(Category.KERNEL, Category.MEMCPY, Category.MEMSET))


def _communicates(events: Events, rows: Rows, calls: Rows) -> Bool:
    """Mark the device rows that communicate; ``calls`` are the host calls that launched them."""
    if not len(rows):
        return np.zeros(0, dtype=np.bool_)
    communicates = labels(events, rows, calls).communicate
    copies = (events.category[rows] == Category.MEMCPY) & (calls >= 0)
    if copies.any():  # those launched inside the host range of a collective
        ranges = events.rows_named(NCCL_CALL, Category.CPU_OP, Category.ANNOTATION)
        launches = calls[copies]
        communicates[copies] = events.are_within(ranges, events.thread[launches], events.start_ns[launches])
    return communicates


def launch_calls(events: Events, rows: Rows) -> Rows:
    """The runtime call that launched each of these device events, by correlation id; -1 where it was not recorded."""
    is_call = (events.category == Category.RUNTIME) & (events.correlation >= 0)
    calls = np.flatnonzero(is_call).astype(np.int32 if len(events) <= np.iinfo(np.int32).max else np.int64)
    if not len(calls) or not len(rows):
        return np.full(len(rows), -1, dtype=np.intp)
    calls = calls[np.argsort(events.correlation[calls], kind="stable")]
    known = events.correlation[calls]
    number = events.correlation[rows]
    index = np.searchsorted(known, number)
    np.minimum(index, len(known) - 1, out=index)
    return np.where((known[index] == number) & (number >= 0), calls[index], np.intp(-1))


def breakdown(work: DeviceWork) -> DeviceBreakdown:
    """Split device time by category, from the first work to the last."""
    if not len(work):
        return NO_DEVICE
    return breakdowns(work, [int(work.start_ns.min())], [int(work.end_ns.max())])[0]


def breakdowns(work: DeviceWork, starts_ns: Sequence[int], ends_ns: Sequence[int]) -> list[DeviceBreakdown]:
    """Split device time by category in each of several windows [start, end)."""
    if not len(work):
        return [NO_DEVICE] * len(starts_ns)
    compute, communication, memory = work.compute, work.communication, work.memory
    device = merge(compute, communication)
    sets = (
        merge(device, memory),
        compute,
        communication,
        subtract(communication, compute),
        subtract(memory, device),
        intersect(communication, compute),
    )
    of_pageable: Sequence[int | None] = [None] * len(starts_ns)
    if work.from_pageable is not None:
        pageable = subtract(work.intervals(work.from_pageable), device)
        of_pageable = lengths_within(pageable, starts_ns, ends_ns).tolist()
    lengths = [lengths_within(part, starts_ns, ends_ns).tolist() for part in sets]
    return [
        DeviceBreakdown(
            first_ns=first,
            last_ns=last,
            busy_ns=busy,
            compute_ns=compute_ns,
            communication_ns=only_communication,
            memory_ns=only_memory,
            idle_ns=last - first - busy,
            overlap_ratio=hidden / all_communication if all_communication else None,
            pageable_ns=pageable_ns,
        )
        for first, last, pageable_ns, busy, compute_ns, all_communication, only_communication, only_memory, hidden in zip(
            starts_ns, ends_ns, of_pageable, *lengths, strict=True
        )
    ]


_LAUNCHES_KERNEL = re.compile(r"^(?:cuda|hip|cu)(?!\w*Graph)\w*Launch(?!HostFunc)")
_MUCH, _MANY = 1e-3, 10
"""Part of the kernels, and number of them, from which on what is lost is more than the figures may be off by."""


def kernel_launches(events: Events, rows: Rows) -> tuple[Rows, Rows]:
    """(calls that launched a kernel, those of them whose kernel is not among the device work ``rows``), by start."""
    calls = events.rows_named(_LAUNCHES_KERNEL, Category.RUNTIME)
    calls = calls[events.correlation[calls] >= 0]
    has_kernel = are_of(events.correlation[calls], events.correlation[rows])
    if not has_kernel.any() and (events.category[rows] == Category.KERNEL).any():
        return calls, calls[:0]  # kernels have no correlation
    return calls, calls[~has_kernel]


REPLAYS_GRAPH = re.compile(r"^(?:cuda|hip|cu)GraphLaunch")
_USUAL, _MOST_LOST = 3, 0.1
"""Equal replays that tell what a graph runs, and the part of its nodes that one of other nodes lacks at most."""


def lost_in_graphs(events: Events, rows: Rows) -> Rows:
    """The calls that replayed a CUDA graph of which work was not recorded, once for each piece that is missing.

    All replays of a graph run the same nodes. What ran once, and lacks a few of those that other replays run, has lost them.
    """
    calls = launch_calls(events, rows)
    of_graphs = np.flatnonzero(np.append(events.named(REPLAYS_GRAPH)[events.name_id], False)[calls])
    order = of_graphs[np.argsort(calls[of_graphs], kind="stable")]
    if not len(order):
        return order
    replays, first = np.unique(calls[order], return_index=True)
    names, name = np.unique(events.name_id[rows[order]], return_inverse=True)
    sums = np.add.reduceat(events.numbers_of_names()[names][name], first)
    _, example, times = np.unique(sums, return_index=True, return_counts=True)
    of_replay = np.split(name, first[1:])

    def nodes(replay: int) -> Int64:
        return np.bincount(of_replay[replay], minlength=len(names))

    usual = np.array([nodes(replay) for replay in example[times >= _USUAL].tolist()]).reshape(-1, len(names))
    lost = [order[:0]]
    for replay in example[times == 1].tolist():
        missing = usual - nodes(replay)
        number = missing.sum(axis=1)
        number = number[(missing >= 0).all(axis=1) & (number <= _MOST_LOST * usual.sum(axis=1))]
        lost.append(np.repeat(replays[replay], number.min(initial=len(order)) if len(number) else 0))
    return np.concatenate(lost)


def lost_kernels(launch_ns: Int64, num_launches: int, work: DeviceWork) -> LostKernels:
    """The kernels that were launched at ``launch_ns`` and are lost, of so many launches.

    Each began after its launch, and after the end of what was launched before it and is known; it had ended when what was
    launched behind it, and is known, began.
    """
    order = work.launch_order
    launched = work.launch_ns[order]
    ended = np.append(np.iinfo(np.int64).min, np.maximum.accumulate(work.end_ns[order]))
    begun = earliest_from(work.start_ns[order])
    start = np.maximum(launch_ns, ended[np.searchsorted(launched, launch_ns)])
    end = np.maximum(start, begun[np.searchsorted(launched, launch_ns, side="right")])
    return LostKernels(np.sort(start), np.sort(end), num_launches)


def is_much(lost: LostKernels, number: int | None = None) -> bool:
    """Return whether so much is lost, or of that so many kernels, that figures would be wrong by it."""
    number = len(lost) if number is None else number
    return number >= _MANY or number > _MUCH * lost.num_launches


NCCL_CALL = re.compile(r"^(?:(?:nccl|rccl):(?!coalesced)|record_param_comms|c10d::|p?nccl[A-Z])")
"""Names of NCCL's host calls, without the range of a batch, which may never end."""
_CALL = re.compile(NCCL_CALL.pattern + r"|^\w*ccl\w*:", re.ASCII)
_TORCH_OPERATOR = re.compile(r"^aten::")
UNNAMED = re.compile(r"^\W*(?:unknown|null|none)?\W*$", re.IGNORECASE)
"""Names that are none."""
_MOST_OF_CALL = 4
"""Kernels that a call launches at most: the range of a batch that never ended has all that came later."""
FEWEST_CONTRADICTING = 3
"""Kernels with names that contradict their launches from which on no name is believed against a launch."""


class Labels(Struct, frozen=True):
    """Evidence on device rows, by their names and by what launched them: each a mark for each row."""

    named: Bool
    """The name is one of communication."""
    unnamed: Bool
    launched: Bool
    """The call that launched it, and nothing else, is known."""
    of_calls: Bool
    """Launched by a call of communication, outside of operators in it."""
    of_operators: Bool

    @property
    def contradict(self) -> Bool:
        """Kernels that communicate by their name or by what launched them, and not by the other."""
        marks: Bool = (self.named & self.of_operators) | (self.of_calls & ~self.named & ~self.unnamed)
        return marks

    @property
    def communicate(self) -> Bool:
        """Kernels that communicate by what launched them, else by their name, unless names of others are wrong."""
        sure = self.launched if np.count_nonzero(self.contradict) >= FEWEST_CONTRADICTING else self.of_operators
        marks: Bool = self.of_calls | (self.named & ~sure)
        return marks

    @property
    def unknown(self) -> Bool:
        """Kernels without a name of which no call tells what they do."""
        marks: Bool = self.unnamed & ~self.of_calls & ~self.of_operators
        return marks


def labels(events: Events, rows: Rows, calls: Rows) -> Labels:
    """Evidence that kernels communicate: their names, or the ``calls`` that launched them (-1: unknown)."""
    is_kernel = events.category[rows] == Category.KERNEL
    named = is_kernel & events.named(COMMUNICATION_KERNEL, rows)[events.name_id[rows]]
    unnamed = is_kernel & events.named(UNNAMED, rows)[events.name_id[rows]]
    _, number, times = np.unique(calls, return_inverse=True, return_counts=True)
    launched = is_kernel & (calls >= 0) & (times[number] == 1)  # of several with one number it is not known
    is_range = events.named(_CALL)[events.name_id] & events.is_of(Category.CPU_OP, Category.ANNOTATION)
    inside = np.zeros(len(rows), dtype=np.bool_)
    inside[launched] = events.are_within(
        np.flatnonzero(is_range), events.thread[calls[launched]], events.start_ns[calls[launched]]
    )
    chosen = np.flatnonzero(launched & (named | unnamed | inside))
    around = innermost_ranges(events, calls[chosen])
    _, number, times = np.unique(around, return_inverse=True, return_counts=True)
    is_call = (around >= 0) & is_range[around] & (times[number] <= _MOST_OF_CALL)
    is_operator = (around >= 0) & events.named(_TORCH_OPERATOR)[events.name_id[around]]
    of_calls, of_operators = np.zeros((2, len(rows)), dtype=np.bool_)
    of_calls[chosen], of_operators[chosen] = is_call, is_operator
    ids = events.name_id[rows]  # of a library with other names, whose launches are not all known
    named |= is_kernel & ~unnamed & np.isin(ids, np.setdiff1d(ids[of_calls], ids[launched & ~of_calls]))
    return Labels(named, unnamed, launched, of_calls, of_operators)


def innermost_ranges(events: Events, calls: Rows) -> npt.NDArray[np.intp]:
    """The row of the innermost operator or range around each call on its thread; -1 without one."""
    around = np.full(len(calls), -1, dtype=np.intp)
    on_host = np.flatnonzero(events.is_of(Category.CPU_OP, Category.ANNOTATION))
    threads = events.thread[calls]
    on_host = on_host[np.isin(events.thread[on_host], threads)]
    for thread, of_thread in events.rows_by_thread(on_host).items():
        chosen = np.flatnonzero(threads == thread)
        inner = events.intervals_of(of_thread).innermost(events.start_ns[calls[chosen]])
        around[chosen] = np.where(inner >= 0, of_thread[inner], -1)
    return around
