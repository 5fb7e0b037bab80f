"""Links between ranks and rates of collectives, as types; each field is the JSON field of the same name, None is its ``null``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """Messages from one rank to another on an axis, in all steps of the report, ns.

    For ``late_sender_ns`` the receiver waited, for ``late_receiver_ns`` the sender. ``slack_ns`` is how long messages might have
    been under way before they were asked for, and ``required_gbps`` the bandwidth (GB/s) that would hide them in it.
    ``latency_ns`` and ``bandwidth_gbps`` describe fast transfers as latency + bytes / bandwidth; ``fit_reason`` says why they
    are None. ``peak_gbps`` is the reference peak of the devices' links, per direction, and ``share_of_peak`` what
    ``algbw_gbps`` is of it.
    """

    axis: str
    source: int
    target: int
    is_same_host: bool | None
    count: int
    bytes: int | None
    transfer_ns: int
    late_sender_ns: int
    late_receiver_ns: int
    slack_ns: int
    required_gbps: float | None
    algbw_gbps: float | None
    latency_ns: int | None
    bandwidth_gbps: float | None
    peak_gbps: float | None = None
    share_of_peak: float | None = None
    fit_reason: str | None = None


@dataclass(frozen=True, slots=True)
class DevicePeak:
    """The reference peak of a rank's device: ``peak_gbps`` in GB/s per direction, over ``link`` (``nvlink``, ``pcie``).

    Both are None where :mod:`pptrace.analysis.links.peaks` has none.
    """

    rank: int
    device: str | None
    link: str | None
    peak_gbps: float | None


@dataclass(frozen=True, slots=True)
class CollectiveRate:
    """Bus bandwidth of all collectives of one kind on an axis, timed on devices, over all ranks and steps, GB/s.

    ``ports`` is how many times the rate of a port of the network it can reach where its groups are on several hosts
    (:func:`pptrace.analysis.links.peaks.ports_reached`), None where they are not.
    """

    axis: str
    kind: str
    is_same_host: bool | None
    busbw_gbps: float
    peak_gbps: float | None
    share_of_peak: float | None
    ports: float | None = None


@dataclass(frozen=True, slots=True)
class CollectiveSize:
    """Collectives of one size (within 9 %): ``bytes`` their mean, ``count`` calls of all ranks, ``fast_ns`` a fast transfer, from
    when the last member had come: a tenth are faster, the median over ranks.
    """

    bytes: int | None
    count: int
    fast_ns: int | None
    algbw_gbps: float | None
    busbw_gbps: float | None


@dataclass(frozen=True, slots=True)
class CollectiveSpeed:
    """Collectives of one kind on an axis, in all steps of the report, in groups of one size, by the name of their kernels.

    ``kernel_algorithm`` and ``kernel_protocol`` are what NCCL named the kernel after, which may run others
    (:func:`pptrace.recognise.device.work.algorithm_of_kernel`); ``exceeds_ll``: too fast for the protocol LL. ``latency_ns`` and
    ``bandwidth_gbps`` (bus bandwidth) describe fast transfers as latency + bus bytes / bandwidth. ``ring_steps`` and
    ``tree_steps`` are what either algorithm takes one after the other.
    """

    axis: str
    kind: str
    group_size: int | None
    kernel_algorithm: str | None
    kernel_protocol: str | None
    is_same_host: bool | None
    count: int
    transfer_ns: int | None
    sizes: tuple[CollectiveSize, ...]
    latency_ns: int | None
    bandwidth_gbps: float | None
    fit_reason: str | None
    ring_steps: int | None
    tree_steps: int | None
    peak_gbps: float | None = None
    share_of_peak: float | None = None
    exceeds_ll: bool | None = None


@dataclass(frozen=True, slots=True)
class Interconnect:
    """Peaks of the links between devices, and the rates that collectives reach; ``reasons`` why peaks are None, a line each.

    ``settings`` are those of NCCL and CUDA in the environment (:mod:`pptrace.environment`), as NAME=VALUE.
    """

    devices: tuple[DevicePeak, ...]
    collectives: tuple[CollectiveRate, ...]
    reasons: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LateRank:
    """Collectives of one rank, of one kind on an axis, in all steps of the report.

    It was the last of its group to enter ``num_last`` of ``count``, and waited ``wait_ns`` for others in the rest.
    """

    axis: str
    kind: str
    rank: int
    count: int
    num_last: int
    wait_ns: int
