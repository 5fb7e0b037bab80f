"""The GPT example with a fault on some of its ranks: ``faulty_train.py FAULT ARGUMENTS…``.

``FAULT`` is as :class:`Fault` writes it, or a list of such in JSON.

A fault is what happens on clusters, made of sleeps, so that it takes what is stated: in ops (``slow``), between ops
(``python``, ``pauses``, ``late``), or on the way of a message (``link``).
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from instrument import session
from instrument.examples import train_gpt
from instrument.expert.layer import ExpertLayer
from instrument.models import sleeping
from instrument.pipeline import runtime, transport
from instrument.pipeline.step import Handler, Instruction, StepRun
from pptrace.schedule.actions import Kind

_COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.OVERLAP_F_B)


@dataclass(frozen=True, slots=True)
class Fault:
    """Fault on ``ranks``; "" is a healthy run.

    ``amount`` is the factor of what ops sleep (``slow``, from step ``since`` on), or the time of one occurrence, s; ``chance``
    that of an occurrence at an op. A slow link is between the first two of ``ranks``, in both directions; ``crossed``, between
    two too, has no amount.
    """

    kind: str = ""
    ranks: tuple[int, ...] = ()
    amount: float = 0.0
    chance: float = 1.0
    seed: int = 0
    since: int = 0

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> list[Fault]:
        faults = json.loads(text)
        return [
            cls(**{**fields, "ranks": tuple(fields["ranks"])})
            for fields in (faults if isinstance(faults, list) else [faults])
        ]


def install(fault: Fault, rank: int) -> None:
    """Make this process, of a run's ``rank``, have the fault."""
    if rank in fault.ranks:
        _FAULTS[fault.kind](fault, Random(fault.seed + rank))


def _slow(fault: Fault, chances: Random) -> None:
    """Ops sleep ``amount`` times as long, each with the chance of the fault."""
    sleep = sleeping._sleep

    def slower(device: Any, seconds: float) -> None:
        is_slow = session.current().num_steps >= fault.since and chances.random() < fault.chance
        sleep(device, seconds * (fault.amount if is_slow else 1))

    sleeping._sleep = slower


def _between(fault: Fault, chances: Random, occur: Callable[[], None]) -> None:
    """Something occurs before ops, each with the chance of the fault."""

    def delayed(handler: Handler) -> Handler:
        def handle(run: StepRun, instruction: Instruction) -> None:
            if chances.random() < fault.chance:
                occur()
            handler(run, instruction)

        return handle

    handlers: Mapping[Kind, Handler] = runtime.POSTING_HANDLERS
    changed = {kind: delayed(handler) if kind in _COMPUTE else handler for kind, handler in handlers.items()}
    runtime.POSTING_HANDLERS = changed  # type: ignore[misc]


def _python(fault: Fault, chances: Random) -> None:
    _between(fault, chances, partial(time.sleep, fault.amount))


def _pauses(fault: Fault, chances: Random) -> None:
    """Collections of a heap so large that one takes about as long as is asked for."""
    gc.set_threshold(0)  # the profiler turns collections on again: none but those of the fault
    heap: list[tuple[list[int], ...]] = []
    while _seconds(gc.collect) < fault.amount:
        heap.extend(([index], [index]) for index in range(20_000))
    _heaps.append(heap)
    _between(fault, chances, gc.collect)  # type: ignore[arg-type]


_heaps: list[object] = []


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _late(fault: Fault, chances: Random) -> None:
    """The rank comes late into steps."""
    run = runtime.PipelineRuntime.run

    def late(self: runtime.PipelineRuntime, *arguments: Any) -> Any:
        if chances.random() < fault.chance:
            time.sleep(fault.amount)
        return run(self, *arguments)

    runtime.PipelineRuntime.run = late  # type: ignore[method-assign, assignment]


def _crossed(fault: Fault, chances: Random) -> None:
    """Before step ``since`` two ranks each send to the other and receive afterwards, so that both wait for ever."""
    run = runtime.PipelineRuntime.run
    first, second = fault.ranks

    def crossed(self: runtime.PipelineRuntime, *arguments: Any) -> Any:
        if session.current().num_steps == fault.since:
            rank = dist.get_rank()
            peer, number = first + second - rank, torch.ones(1)
            dist.send(number, peer)
            dist.recv(number, peer)
        return run(self, *arguments)

    runtime.PipelineRuntime.run = crossed  # type: ignore[method-assign, assignment]


def _link(fault: Fault, chances: Random) -> None:
    """Messages from one of two pipeline ranks to the other begin their way late."""
    post = transport.Wire._post_one
    ends = fault.ranks

    def slow(self: transport.Wire, parcel: transport.Parcel, *group: Any) -> Any:
        is_slow = parcel.sending and {self._rank, parcel.pp_rank} == set(ends)
        return _Delayed(partial(post, self, parcel, *group), fault.amount) if is_slow else post(self, parcel, *group)

    transport.Wire._post_one = slow  # type: ignore[method-assign]


class _Delayed:
    """A send that begins some time after it was posted; the order of tagged messages does not matter."""

    def __init__(self, post: Callable[[], transport.Pending], seconds: float) -> None:
        self._post = post
        self._posted: transport.Pending | None = None
        self._timer = threading.Timer(seconds, self._begin)
        self._timer.start()

    def _begin(self) -> None:
        self._posted = self._post()

    def wait(self) -> Any:
        self._timer.join()
        assert self._posted is not None
        return self._posted.wait()


_FAULTS: Mapping[str, Callable[[Fault, Random], None]] = {
    "slow": _slow,
    "python": _python,
    "pauses": _pauses,
    "late": _late,
    "crossed": _crossed,
    "link": _link,
}


ROW_S = 0.008
"""Sleep of experts for each of their rows in a forward; twice as much in a backward."""


class _SleepOfRows(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        sleeping._sleep(rows.device, len(rows) * ROW_S)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        sleeping._sleep(gradients[0].device, 2 * len(gradients[0]) * ROW_S)
        return gradients[0]


def install_sleeping_experts() -> None:
    """Make experts sleep for each of their rows, so that what they take depends on routes and faults alone."""
    compute = ExpertLayer._compute

    def sleep_and_compute(self: ExpertLayer, rows: Tensor, rows_of_expert: Sequence[int]) -> Tensor:
        slept: Tensor = _SleepOfRows.apply(rows)  # type: ignore[no-untyped-call]
        return compute(self, slept, rows_of_expert)

    ExpertLayer._compute = sleep_and_compute  # type: ignore[method-assign]


if __name__ == "__main__":
    install_sleeping_experts()
    for each in Fault.read(sys.argv[1]):
        install(each, int(os.environ.get("RANK", "0")))
    sys.exit(train_gpt.main(sys.argv[2:]))
