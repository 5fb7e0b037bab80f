"""Faults of the GPT example, ``--fault KIND:KEY=VALUE,…``: what happens on clusters, made of sleeps that take what is stated.

slow:ranks=2,times=1.5,since=5       from step 5 on ops sleep 1.5 times as long (``--sleep-forward`` …)
python:stages=1,ms=20                20 ms of Python before every op of the ranks with stage 1
pauses:ranks=1,ms=120,chance=0.08    garbage collections of about 120 ms before 8 % of the ops
late:ranks=2,ms=400                  the rank comes late into steps
link:ranks=1+2,ms=40                 messages between pipeline ranks 1 and 2 begin their way late
crossed:ranks=1+2,since=3            at step 3 both send to the other first: they hang
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from instrument import session
from instrument.expert.layer import ExpertLayer
from instrument.linear_map import LinearMap
from instrument.mesh import Mesh
from instrument.models import sleeping
from instrument.pipeline import runtime, transport
from instrument.pipeline.instruction import Instruction
from instrument.pipeline.step import Handler, StepRun
from pptrace.errors import UsageError
from pptrace.schedule.actions import Kind
from pptrace.schedule.plan import Plan

_COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.OVERLAP_F_B)


@dataclass(frozen=True, slots=True)
class Fault:
    """Fault on ``ranks``, and on all that have one of the ``stages``; of a slow link they are the two pipeline ranks.

    ``amount`` is the factor of what ops sleep (``slow``), or the time of one occurrence, s; ``chance`` that of an occurrence at
    an op, a message (``link``) or a step (``late``), none of ``crossed``; before step ``since`` all is well.
    """

    kind: str
    ranks: tuple[int, ...] = ()
    amount: float = 0.0
    chance: float = 1.0
    seed: int = 0
    since: int = 0
    stages: tuple[int, ...] = ()

    def __str__(self) -> str:
        ranks = {"ranks": self.ranks, "stages": self.stages}
        fields = [f"{name}={'+'.join(map(str, numbers))}" for name, numbers in ranks.items() if numbers]
        fields += [
            f"{name}={1e3 * self.amount if name == 'ms' else self.amount:g}" for name in _AMOUNTS.get(self.kind, ())
        ]
        fields += [f"chance={self.chance:g}"] * (self.chance != 1)
        fields += [f"{name}={value}" for name, value in (("since", self.since), ("seed", self.seed)) if value]
        return f"{self.kind}:{','.join(fields)}"

    @classmethod
    def read(cls, text: str) -> Fault:
        """Read the value of ``--fault``.

        Raises:
            UsageError: it is none.
        """
        kind, _, rest = text.partition(":")
        given = dict(part.partition("=")[::2] for part in rest.split(",") if part)
        names = _AMOUNTS.get(kind, ())
        try:
            if kind not in _FAULTS or given.keys() - {"ranks", "stages", "chance", "since", "seed", *names}:
                raise ValueError
            ranks, stages = (_numbers(given.get(name, "")) for name in ("ranks", "stages"))
            amount = sum(float(given[name]) / (1e3 if name == "ms" else 1) for name in names)
            chance, since, seed = float(given.get("chance", 1)), int(given.get("since", 0)), int(given.get("seed", 0))
            is_placed = len(set(ranks)) == 2 and not stages if kind in _OF_PAIRS else bool(ranks or stages)
            is_valid = min((*ranks, *stages, since)) >= 0 and 0 <= amount < inf and 0 <= chance <= 1
            is_valid &= kind != "crossed" or chance == 1
            if not is_placed or not is_valid:
                raise ValueError
        except (KeyError, ValueError):
            more = "stages=S in place of ranks, chance=0…1, since=STEP, seed=N"
            raise UsageError(f"--fault {text!r}: expected {_EXPECTED}; with {more}") from None
        return cls(kind, ranks, amount, chance, seed, since, stages)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("+"))) if text else ()


def check_faults(faults: Iterable[Fault], num_ranks: int, plan: Plan, *, is_sleeping: bool) -> None:
    """Refuse faults that the run cannot have.

    Raises:
        UsageError: of ranks or stages that are not there, or ops that do not sleep are to sleep longer.
    """
    for fault in faults:
        size = plan.pp if fault.kind == "link" else num_ranks
        if max(fault.ranks, default=0) >= size or max(fault.stages, default=0) >= plan.num_stages:
            raise UsageError(f"--fault {fault}: there are ranks 0 to {size - 1} and stages 0 to {plan.num_stages - 1}")
        if fault.kind == "link" and not _are_neighbours(plan, *fault.ranks):
            raise UsageError(
                f"--fault {fault}: pipeline ranks {fault.ranks[0]} and {fault.ranks[1]} send each other nothing; give two with "
                "stages that follow each other"
            )
        if fault.kind == "slow" and not is_sleeping:
            raise UsageError(
                f"--fault {fault}: ops sleep longer; let them sleep, with --sleep-forward and --sleep-backward"
            )


def _are_neighbours(plan: Plan, first: int, second: int) -> bool:
    after = ((stage, plan.next_stage(stage)) for stage in range(plan.num_stages))
    return any({plan.placement[stage], plan.placement[n]} == {first, second} for stage, n in after if n is not None)


def install_faults(faults: Iterable[Fault], mesh: Mesh, plan: Plan) -> None:
    """Make this process have the faults of its rank."""
    for fault in faults:
        has_stage = not set(plan.stages_of(mesh.pp_rank)).isdisjoint(fault.stages)
        if fault.kind == "link" or mesh.rank in fault.ranks or has_stage:
            _FAULTS[fault.kind](fault, Random(fault.seed + mesh.rank))


def _occurs(fault: Fault, chances: Random) -> bool:
    return session.current().num_steps >= fault.since and chances.random() < fault.chance


def _slow(fault: Fault, chances: Random) -> None:
    """Ops sleep ``amount`` times as long, each with the chance of the fault."""
    sleep = sleeping._sleep

    def slower(device: Any, seconds: float) -> None:
        sleep(device, seconds * (fault.amount if _occurs(fault, chances) else 1))

    sleeping._sleep = slower


def _between(fault: Fault, chances: Random, occur: Callable[[], None]) -> None:
    """Let something occur before ops, each with the chance of the fault."""

    def delayed(handler: Handler) -> Handler:
        def handle(run: StepRun, instruction: Instruction) -> None:
            if _occurs(fault, chances):
                occur()
            handler(run, instruction)

        return handle

    handlers: Mapping[Kind, Handler] = vars(runtime)["HANDLERS"]
    changed = {kind: delayed(handler) if kind in _COMPUTE else handler for kind, handler in handlers.items()}
    vars(runtime)["HANDLERS"] = changed


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
        if _occurs(fault, chances):
            time.sleep(fault.amount)
        return run(self, *arguments)

    runtime.PipelineRuntime.run = late  # type: ignore[method-assign, assignment]


def _crossed(fault: Fault, _: Random) -> None:
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
        is_slow = parcel.sending and {self._rank, parcel.pp_rank} == set(ends) and _occurs(fault, chances)
        return _Delayed(partial(post, self, parcel, *group), fault.amount) if is_slow else post(self, parcel, *group)

    transport.Wire._post_one = slow  # type: ignore[method-assign, assignment]


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


_OF_PAIRS = ("link", "crossed")
_AMOUNTS: Mapping[str, tuple[str, ...]] = {
    "slow": ("times",),
    **dict.fromkeys(("python", "pauses", "late", "link"), ("ms",)),
}
"""Keys of the amount of each kind of fault."""
_EXPECTED = ", ".join(
    ",".join((f"{kind}:ranks=R{'+R' if kind in _OF_PAIRS else ''}", *(f"{name}=N" for name in _AMOUNTS.get(kind, ()))))
    for kind in _FAULTS
)


class _SleepOfRows(LinearMap):
    """Identity in both directions; sleeps in each."""


def make_experts_sleep(row_s: float) -> None:
    """Make experts sleep for each of their rows in a forward, and twice as long in a backward: then what they take depends on
    routes and faults alone.
    """
    compute = ExpertLayer._compute

    def sleep(seconds: float, rows: Tensor) -> Tensor:
        sleeping._sleep(rows.device, len(rows) * seconds)
        return rows.view_as(rows)

    def sleep_and_compute(self: ExpertLayer, rows: Tensor, rows_of_expert: Sequence[int]) -> Tensor:
        return compute(self, _SleepOfRows.of(rows, partial(sleep, row_s), partial(sleep, 2 * row_s)), rows_of_expert)

    ExpertLayer._compute = sleep_and_compute  # type: ignore[method-assign]
