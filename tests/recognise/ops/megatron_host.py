"""Megatron-LM's schedules as its functions call them, timed on paper, with the NVTX ranges of its messages and no device.

The orders are written down from ``megatron/core/pipeline_parallel/schedules.py``; every function of messages is called on all
ranks, also where it has nothing to send or to receive. A call returns when what it receives has come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pptrace.model.traces import Category
from tests.support.synthetic import MAIN_THREAD, START, Event

PACKAGE = "megatron.core.pipeline_parallel"
GLUE = 3
FORWARD, BACKWARD, OPTIMIZER = 1000, 2000, 300

Done = tuple[str, int, int, int, int, int]
"""kind, stage, microbatch, start, end, step"""


@dataclass(frozen=True)
class Call:
    """A range: an op of (kind, stage, microbatch), or a function with the outputs it sends and the inputs it waits for."""

    name: str
    op: tuple[str, int, int] | None = None
    sends: tuple[tuple[str, int, int], ...] = ()
    waits: tuple[tuple[str, int, int], ...] = ()


@dataclass
class Rank:
    calls: list[Call]
    place: int = 0
    now: int = START
    events: list[Event] = field(default_factory=list)
    done: list[Done] = field(default_factory=list)


def one_f_one_b(p: int, r: int, m: int) -> Iterator[Call]:
    """forward_backward_pipelining_without_interleaving of one step."""
    warmup = min(p - r - 1, m)

    def recv_f(k: int) -> tuple[tuple[str, int, int], ...]:
        return (("F", r - 1, k),) if r else ()

    def recv_b(k: int) -> tuple[tuple[str, int, int], ...]:
        return (("B", r + 1, k),) if r < p - 1 else ()

    for k in range(warmup):
        yield Call("recv_forward", waits=recv_f(k))
        yield Call("F", op=("F", r, k))
        yield Call("send_forward", sends=(("F", r, k),))
    if m > warmup:
        yield Call("recv_forward", waits=recv_f(warmup))
    for k in range(m - warmup):
        yield Call("F", op=("F", r, warmup + k))
        yield Call("send_forward_recv_backward", sends=(("F", r, warmup + k),), waits=recv_b(k))
        yield Call("B", op=("B", r, k))
        is_last = k == m - warmup - 1
        waits = () if is_last else recv_f(warmup + k + 1)
        yield Call("send_backward" if is_last else "send_backward_recv_forward", sends=(("B", r, k),), waits=waits)
    for k in range(m - warmup, m):
        yield Call("recv_backward", waits=recv_b(k))
        yield Call("B", op=("B", r, k))
        yield Call("send_backward", sends=(("B", r, k),))


def interleaved(p: int, r: int, m: int, v: int) -> Iterator[Call]:
    """forward_backward_pipelining_with_interleaving of one step, without overlap; with the ranges of its phases."""
    total, last = m * v, p * v - 1
    warmup = min(total, (p - r - 1) * 2 + (v - 1) * p)

    def chunk(k: int, forward: bool) -> tuple[int, int]:
        index = k % (p * v) // p
        return (index if forward else v - 1 - index) * p + r, k // (p * v) * p + k % p

    forwards = [("F", *chunk(k, True)) for k in range(total)]
    backwards = [("B", *chunk(k, False)) for k in range(total)]

    def into(ops: Sequence[tuple[str, int, int]]) -> tuple[tuple[str, int, int], ...]:
        sides = [(kind, stage + (-1 if kind == "F" else 1), mb) for kind, stage, mb in ops]
        return tuple(side for side in sides if 0 <= side[1] <= last)

    yield Call("begin warmup")
    yield Call("recv_forward", waits=into(forwards[:1]))
    for k in range(warmup):
        yield Call("F", op=forwards[k])
        ahead = forwards[k + 1 : k + 2]
        if k == warmup - 1 and warmup < total:
            waits = into([*ahead, backwards[0]])
            yield Call("send_forward_backward_recv_forward_backward", sends=(forwards[k],), waits=waits)
        else:
            yield Call("send_forward_recv_forward", sends=(forwards[k],), waits=into(ahead))
    yield Call("begin steady")
    for k in range(total - warmup):
        yield Call("F", op=forwards[warmup + k])
        yield Call("B", op=backwards[k])
        waits = into([*forwards[warmup + k + 1 : warmup + k + 2], *backwards[k + 1 : k + 2]])
        sends = (forwards[warmup + k], backwards[k])
        yield Call("send_forward_backward_recv_forward_backward", sends=sends, waits=waits)
    yield Call("begin cooldown")
    if warmup == total:
        yield Call("recv_backward", waits=into(backwards[:1]))
    for k in range(total - warmup, total):
        yield Call("B", op=backwards[k])
        yield Call("send_backward_recv_backward", sends=(backwards[k],), waits=into(backwards[k + 1 : k + 2]))
    yield Call("end")


def run(programs: Sequence[Sequence[Call]], steps: int, *, optimizer: bool = True, labels: bool = False) -> list[Rank]:
    """The ranks after ``steps`` rounds of their programs: their events, and what they really did.

    ``labels`` gives the ops ranges of their own, ``optimizer`` one to the end of each step.
    """
    ranks = [Rank(list(program)) for program in programs]
    for step in range(steps):
        sent: dict[tuple[str, int, int], int] = {}
        for rank in ranks:
            rank.place = 0
        phase = [("", 0)] * len(ranks)
        while any(rank.place < len(rank.calls) for rank in ranks):
            before = sum(rank.place for rank in ranks)
            for number, rank in enumerate(ranks):
                phase[number] = _advance(rank, number, step, sent, phase[number], labels)
            assert sum(rank.place for rank in ranks) > before, "the calls wait for each other"
        for rank in ranks:
            if optimizer:
                rank.events.append(_range("optimizer", rank.now + 5, rank.now + 5 + OPTIMIZER))
            rank.now += 10 + OPTIMIZER
    return ranks


def _advance(
    rank: Rank, number: int, step: int, sent: dict[tuple[str, int, int], int], phase: tuple[str, int], labels: bool
) -> tuple[str, int]:
    """Run the calls of a rank as far as what they wait for has been sent."""
    while rank.place < len(rank.calls):
        call = rank.calls[rank.place]
        begin = rank.now + GLUE
        if call.name.startswith(("begin ", "end")):
            if phase[0]:
                name = f"{PACKAGE}.schedules.forward_backward_pipelining_with_interleaving.{phase[0]}"
                rank.events.append(_range(name, phase[1], rank.now + 1))
            phase = (call.name.removeprefix("begin "), rank.now + 2)
            rank.place += 1
            continue
        if call.op is not None:
            kind, stage, microbatch = call.op
            own = FORWARD if kind == "F" else BACKWARD
            end = begin + own + 7 * ((3 * microbatch + 5 * stage) % 4)
            rank.done.append((kind, stage, microbatch, begin, end, step))
            if labels:
                rank.events.append(_range("forward_step" if kind == "F" else "backward_step", begin, end))
        else:
            for message in call.sends:
                sent.setdefault(message, begin + 1)
            if any(message not in sent for message in call.waits):
                return phase
            end = max([begin + 2, *(sent[message] + 20 for message in call.waits)])
            rank.events.append(_range(f"{PACKAGE}.p2p_communication.{call.name}", begin, end))
        rank.now = end
        rank.place += 1
    return phase


def _range(name: str, start: int, end: int) -> Event:
    return Event(Category.ANNOTATION, name, start, end, thread=MAIN_THREAD)
