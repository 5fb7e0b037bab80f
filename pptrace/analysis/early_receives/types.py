"""Receives that held up other calls and ops, as types; each field is the JSON field of the same name, None is its ``null``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeldCall:
    """A receive of one rank, and the call or op that it held up, over all steps that compare.

    ``receive`` and ``held`` are actions as text (``4RECV_F0``, ``0F1``), ``held`` of a collective its kind and axis
    (``all_to_all ep``). ``source`` is the global rank that sends. ``count`` is how often, ``held_ns`` how long in a mean step.
    """

    rank: int
    receive: str
    stage: int
    microbatch: int
    source: int
    held: str
    count: int
    held_ns: int
    longest_ns: int


@dataclass(frozen=True, slots=True)
class HeldRank:
    """Time for which receives held up a rank in a mean step, ns; ``count`` is how often in all steps."""

    rank: int
    count: int
    held_ns: int
    longest_ns: int


@dataclass(frozen=True, slots=True)
class EarlyReceives:
    """Receives that were posted before their sender could send and held up what their rank posted behind them.

    ``where`` is what runs calls in the order of their posting: ``host`` (the rank waits in each call) or ``stream`` (of its
    device). ``held_ns`` is the sum over all ranks in a mean step. ``gain_ns`` is what a mean step would get back with the
    repaired order, None where that is not known: ``gain_reason`` says why. ``pairs`` are those with most time, of ``num_pairs``.
    ``reason`` says why nothing is known at all: then the rest is None or empty.
    """

    where: str | None = None
    num_steps: int = 0
    held_ns: int | None = None
    gain_ns: int | None = None
    gain_reason: str | None = None
    ranks: tuple[HeldRank, ...] = ()
    pairs: tuple[HeldCall, ...] = ()
    num_pairs: int = 0
    reason: str | None = None
