"""Receives that held up other calls and ops, as types; each field is the JSON field of the same name, None is its ``null``."""

from __future__ import annotations

from msgspec import Struct


class HeldCall(Struct, frozen=True):
    """A receive of one rank, and the call or op that it held up, over all steps that compare."""

    rank: int  #: global rank that received
    receive: str  #: the receive as an action (``4RECV_F0``)
    stage: int  #: stage whose F or B it is for
    microbatch: int  #: microbatch whose F or B it is for
    source: int  #: global rank that sends
    #: op (``0F1``), send or receive (``0SEND_F1``), or another call with its axis (``all_to_all ep``) that it held up
    held: str
    count: int  #: times, in all steps
    held_ns: int  #: time in a mean step
    longest_ns: int  #: longest of all


class HeldRank(Struct, frozen=True):
    """Time for which receives held up a rank."""

    rank: int  #: global rank
    count: int  #: times, in all steps
    held_ns: int  #: time in a mean step
    longest_ns: int  #: longest of all


class EarlyReceives(Struct, frozen=True):
    """Receives that were posted before their sender could send, and what they held up, in steps whose ranks' times compare."""

    #: side that runs calls in the order of their posting: ``host`` (the rank waits in each call) or ``stream`` (of its device);
    #: null where ``reason`` is not
    where: str | None = None
    num_steps: int = 0  #: steps that were looked at
    #: time for which receives held up others, the sum over all ranks, in a mean step; it overlaps with what ranks wait for
    #: anyway; null where ``reason`` is not
    held_ns: int | None = None
    #: time that a mean step would get back with receives posted later, by replay; 0 where nothing was held up; null where that is
    #: not known or no order is better: ``gain_reason``
    gain_ns: int | None = None
    #: reason why there is no gain: ops or calls whose order is not known, or not the same in every step; a replay in the order
    #: that was posted that is 5 % off; no better order; null where there is a gain, or nothing to gain
    gain_reason: str | None = None
    #: sums by rank, the one that was held up longest first; empty where nothing was held up
    ranks: tuple[HeldRank, ...] = ()
    #: receives with what each held up, the longest first, 1,000 at most; empty where nothing was held up
    pairs: tuple[HeldCall, ...] = ()
    num_pairs: int = 0  #: pairs in all
    #: reason why nothing is known: times that do not compare, kernels that were not recorded, messages of which some are timed on
    #: the host and some on the device; null where it is known
    reason: str | None = None
