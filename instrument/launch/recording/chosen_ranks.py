"""Choice of the ranks that are recorded, within a budget of bytes: ``pptrace run --profile-ranks auto``.

Rank 0 records a step ahead of the window, which is thrown away, and counts its events: as many are expected of every rank in
every step. It writes down which ranks record; the others read that when the window begins. Ranks come in this order: one of each
stage, the ends of the pipeline first; the other positions of tp and cp within the first replica; one replica after the other.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from instrument.launch.record import write_json
from pptrace.axes import MESH_ORDER, Axis, complete_order, coordinates_of

DISK_BYTES, MEMORY_BYTES = 32, 1600
"""Bytes of an event in a trace (17 to 32, gzip) and, while the recording ends, in the memory of its process (1460 to 1600):
measured with torch 2.13, on traces of CPUs and of an H200.
"""
_WAIT_S, _POLL_S = 30.0, 0.01


@dataclass(frozen=True, slots=True)
class Choice:
    """The ranks that are recorded, and why; ``events_per_step`` of a rank are None where no step was tried."""

    ranks: tuple[int, ...]
    why: str
    budget_bytes: int
    events_per_step: int | None = None
    trace_bytes: int | None = None
    memory_bytes: int | None = None

    def as_json(self) -> dict[str, Any]:
        """The ``profile_ranks`` object of run.json."""
        return asdict(self)


def ranks_in_order(world_size: int, mesh: Mapping[str, Any] | None) -> Iterator[tuple[int, bool]]:
    """(rank, whether it is the first of its stage) for all ranks, those first that tell most; without a mesh evenly spread."""
    sizes = {axis: int((mesh or {}).get(str(axis)) or 1) for axis in MESH_ORDER}
    order = complete_order(str((mesh or {}).get("order") or "-".join(MESH_ORDER)).split("-"))
    if mesh is None or order is None or prod(sizes.values()) != world_size:
        yield from ((rank, number == 0) for number, rank in enumerate(_spread(world_size)))
        return
    last = sizes[Axis.PP] - 1

    def standing(rank: int) -> tuple[int, ...]:
        at = coordinates_of(rank, sizes, order)
        return at[Axis.DP], int(any((at[Axis.TP], at[Axis.CP]))), int(0 < at[Axis.PP] < last), at[Axis.PP], rank

    for rank in sorted(range(world_size), key=standing):
        yield rank, standing(rank)[:2] == (0, 0)


def _spread(number: int) -> list[int]:
    """The numbers below ``number``: the first, the last, then those in the middle between these, and so on."""
    chosen, step = [0, number - 1], number - 1
    while step > 1:
        step = -(-step // 2)
        chosen += range(step, number, step)
    return list(dict.fromkeys(chosen))[:number] + [rank for rank in range(number) if rank not in chosen]


def choose(
    world_size: int, mesh: Mapping[str, Any] | None, budget: int, per_host: int, num_steps: int, events: int | None
) -> Choice:
    """Choose the ranks whose traces together, and whose recorders on one host together, stay within ``budget`` bytes.

    A rank of each stage is recorded whatever that takes. Where no step was tried, no others are.
    """
    ranks = list(ranks_in_order(world_size, mesh))
    if events is None:
        chosen = [rank for rank, is_first in ranks if is_first]
        why = "the window begins too early to record a step ahead of it: one rank of each stage"
        return Choice(tuple(sorted(chosen)), why, budget)
    on_disk, in_memory = (max(1, events * num_steps * size) for size in (DISK_BYTES, MEMORY_BYTES))
    on_host: Counter[int] = Counter()
    chosen, beyond = [], 0
    for rank, is_first in ranks:
        fits = (len(chosen) + 1) * on_disk <= budget and (on_host[rank // per_host] + 1) * in_memory <= budget
        if fits or is_first:
            chosen.append(rank)
            on_host[rank // per_host] += 1
            beyond += not fits
    why = (
        f"{events:,} events a step, {num_steps} steps: {on_disk:,} bytes of trace and {in_memory:,} of memory a rank; "
    )
    always = "each stage needs one" if sum(is_first for _, is_first in ranks) > 1 else "one is recorded always"
    why += f"{len(chosen)} of {world_size} ranks{f', {beyond} beyond the budget, as {always}' * bool(beyond)}"
    return Choice(tuple(sorted(chosen)), why, budget, events, on_disk, in_memory)


class RankChoice:
    """The choice of a run, made by rank 0 and read by the others."""

    def __init__(self, run_dir: Path, rank: int, world_size: int, per_host: int, budget: int) -> None:
        self._path = run_dir / ".rank0.chosen.json"  # removed when the run ends, as all that begins so
        self._arguments = (budget, per_host)
        self._world_size = world_size
        self.is_first = rank == 0

    def make(self, mesh: Mapping[str, Any] | None, num_steps: int, events: int | None) -> Choice:
        """Choose, and let the other ranks know."""
        choice = choose(self._world_size, mesh, *self._arguments, num_steps, events)
        write_json(self._path, choice.as_json())
        return choice

    def read(self, mesh: Mapping[str, Any] | None, num_steps: int) -> Choice:
        """The choice of rank 0; where that does not come, the one that every rank knows without it: one rank of each stage."""
        end = time.monotonic() + _WAIT_S
        while time.monotonic() < end:
            try:
                content = json.loads(self._path.read_bytes())
                return Choice(**{**content, "ranks": tuple(map(int, content["ranks"]))})
            except (OSError, ValueError, TypeError, KeyError):
                time.sleep(_POLL_S)
        return choose(self._world_size, mesh, *self._arguments, num_steps, None)
