"""Links between ranks and rates of collectives, as types; each field is the JSON field of the same name, None is its ``null``."""

from __future__ import annotations

from msgspec import Struct


class Link(Struct, frozen=True):
    """Messages on an axis from one rank to another, in all steps whose ranks' times compare. Bandwidths are in GB/s."""

    axis: str  #: axis of the messages
    source: int  #: rank that sends
    target: int  #: rank that receives
    is_same_host: bool | None  #: true where both ran on one host; null where the traces do not name the hosts of both
    count: int  #: messages, each tensor of a stage that passes on several
    bytes: int | None  #: their sizes; null where a call does not tell its size
    #: time for which they were moved; what tensors of one message share counts once, as in ``slack_ns``
    transfer_ns: int
    late_sender_ns: int  #: time for which the receiver waited for the sender
    late_receiver_ns: int  #: time for which the sender waited for the receiver
    #: time for which they might have been under way before the receiver asked for them, both sides being ready
    slack_ns: int
    #: ``bytes`` over ``slack_ns``: a link as fast as this would hide them; null without slack, or where a call does not tell its
    #: size
    required_gbps: float | None
    algbw_gbps: float | None  #: ``bytes`` over ``transfer_ns``; null as ``bytes``
    #: latency of latency + bytes / bandwidth, fitted to a fast transfer of each size; null where ``fit_reason`` says why
    latency_ns: int | None
    bandwidth_gbps: float | None  #: bandwidth of it; null as ``latency_ns``
    #: reference peak of the devices' links, per direction, the lower of the two; between hosts that of a port of the network;
    #: null between hosts whose ports were not recorded, without ``--network``; where a device or its peak is not known; of
    #: messages that the host moved (gloo, MPI)
    peak_gbps: float | None = None
    #: ``algbw_gbps`` / ``peak_gbps``; null as both, and within a host over 1.25, where the times cannot be
    share_of_peak: float | None = None
    fit_reason: str | None = None  #: reason why latency and bandwidth are null; null where they are known


class DevicePeak(Struct, frozen=True):
    """The reference peak of a rank's device (:mod:`pptrace.analysis.links.peaks`)."""

    rank: int  #: global rank
    device: str | None  #: name of its device; null where the trace does not name it, or names several
    link: str | None  #: ``nvlink`` or ``pcie``; null where none is known
    peak_gbps: float | None  #: peak per direction; null where none is known


class CollectiveRate(Struct, frozen=True):
    """Bus bandwidth of all collectives of one kind on an axis, timed on devices, over all ranks and steps."""

    axis: str  #: axis of the collectives
    kind: str  #: kind of the collectives
    #: true where each group ran on one host; null where hosts or groups are not known, or differ
    is_same_host: bool | None
    #: all their bus bytes over all their transfers, made to be compared with such a peak, as nccl-tests' bus bandwidth is
    busbw_gbps: float
    peak_gbps: float | None  #: lowest peak of their ranks; null where none is known, and between hosts as of ``links``
    share_of_peak: float | None  #: ``busbw_gbps`` / ``peak_gbps``; null as ``peak_gbps``, and within a host over 1.25
    #: ``peak_gbps`` between hosts as a multiple of a port's rate, as far as ports limit it
    #: (:func:`pptrace.analysis.links.peaks.ports_reached`); null of others, and where hosts or groups are not known
    ports: float | None = None


class CollectiveSize(Struct, frozen=True):
    """Collectives of one size (within 9 %)."""

    bytes: int | None  #: mean size; null where a call does not tell its size
    count: int  #: calls, each of every member
    #: transfer that a tenth are faster than, the median over ranks; null where times are not known
    fast_ns: int | None
    algbw_gbps: float | None  #: ``bytes`` / ``fast_ns``; null where either is
    #: bus bytes / ``fast_ns``; null as ``algbw_gbps``, and of all-to-alls with parts of different size
    busbw_gbps: float | None


class CollectiveSpeed(Struct, frozen=True):
    """Collectives of one kind along an axis, in groups of one size, with kernels of one name, in all steps whose ranks' times
    compare.
    """

    axis: str  #: axis of the collectives
    kind: str  #: kind of the collectives
    group_size: int | None  #: ranks of a group; null where the trace does not tell it
    #: ``ring``, ``tree``, ``nvls``, … (:func:`pptrace.recognise.device.work.algorithm_of_kernel`): algorithm that NCCL named the
    #: kernel after, which may run others; null without a kernel of NCCL's (gloo), and in names without it (``SendRecv``, of
    #: all-to-alls too; RCCL's ``Generic``)
    kernel_algorithm: str | None
    kernel_protocol: str | None  #: ``LL``, ``LL128`` or ``SIMPLE``, likewise; null as ``kernel_algorithm``
    #: true where each group ran on one host; null where hosts or groups are not known, or differ
    is_same_host: bool | None
    count: int  #: calls, each of every member
    #: time for which they were moved from when their last member had come; null where members have no trace
    transfer_ns: int | None
    sizes: tuple[CollectiveSize, ...]  #: one entry for each size
    #: latency of latency + bus bytes / bandwidth, fitted to the sizes as of ``links``; null where ``fit_reason`` says why
    latency_ns: int | None
    bandwidth_gbps: float | None  #: bandwidth of it; null as ``latency_ns``
    fit_reason: str | None  #: reason why latency and bandwidth are null; null where they are known
    #: steps that a ring takes one after the other: of n ranks an all-reduce 2(n − 1), an all-gather or a reduce-scatter n − 1;
    #: null of other kinds, and groups of unknown size
    ring_steps: int | None
    #: steps that a tree takes: an all-reduce 2·⌈log₂ n⌉; null of other kinds than all-reduces, and groups of unknown size
    tree_steps: int | None
    peak_gbps: float | None = None  #: peak of the interconnect, as in its ``collectives``; null as there
    share_of_peak: float | None = None  #: bus bandwidth of the fastest size / ``peak_gbps``; null as there
    #: true where the fastest size moves more than half of the peak: then the protocol is not LL, in which every second word is a
    #: flag; null without a peak, between hosts, and with another name
    exceeds_ll: bool | None = None


class Interconnect(Struct, frozen=True):
    """Peaks of the links between devices, GB/s per direction, and the rates that collectives reach."""

    devices: tuple[DevicePeak, ...]  #: one entry per rank that communicated on a device
    #: one entry per axis and kind, over all ranks and steps; empty where none was timed
    collectives: tuple[CollectiveRate, ...]
    reasons: tuple[str, ...] = ()  #: reasons why peaks are null, a line each; empty where none are
    #: settings of NCCL and CUDA in the environment of these ranks (:mod:`pptrace.environment`), as ``NCCL_ALGO=Ring``; empty
    #: where none was set, or the recorder was not ``pptrace run``
    settings: tuple[str, ...] = ()


class LateRank(Struct, frozen=True):
    """Collectives of one rank, of one kind on an axis, with all members in the traces."""

    axis: str  #: axis of the collectives
    kind: str  #: kind of the collectives
    rank: int  #: global rank
    count: int  #: calls
    num_last: int  #: collectives that it was the last to enter, so that the others waited for it
    wait_ns: int  #: time for which it waited for others in the rest
