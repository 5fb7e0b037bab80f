"""Many schedules, sizes and costs on paper."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from pptrace.api.arguments import require_number, require_type, require_whole
from pptrace.api.simulate import MOST_MS, NS_PER_MS, Spelling
from pptrace.errors import UsageError
from pptrace.schedule import registry
from pptrace.simulator.sweep.grid import CostsOf, Grid, SweepCosts
from pptrace.simulator.sweep.run import OnPoints, Sweep, run_sweep
from pptrace.simulator.sweep.values import read_costs, read_microbatches, read_sizes

if TYPE_CHECKING:
    import pandas as pd

EVERY = "all"
"""Stands for all schedules of the catalogue."""

Sizes = int | str | Iterable[int | str]
Milliseconds = float | str | Iterable[float | str]


def sweep(
    schedules: str | Iterable[str] = EVERY,
    *,
    pp: Sizes,
    microbatches: Sizes,
    chunks: Sizes | None = None,
    group_size: Sizes | None = None,
    memory_limit: int | None = None,
    forward: Milliseconds = 1.0,
    backward: Milliseconds = 2.0,
    wgrad: Milliseconds | None = None,
    p2p: Milliseconds = 0.0,
    costs_of: str = "rank",
) -> pd.DataFrame:
    """Simulate every combination of schedules, sizes and costs: what ``pptrace simulate --sweep`` shows.

    Each argument is one value, several, or a text such as ``"2,4,8"``, ``"8..64:8"`` (steps of 8) or ``"8..64:x2"`` (doubling);
    microbatches may be multiples of p, ``"p-1"`` or ``"4p"``.

        >>> import pptrace
        >>> points = pptrace.sweep(["1f1b", "zb-h1"], pp=[4, 8], microbatches="p-1,4p")
        >>> columns = ["schedule", "pp", "microbatches", "bubble_ratio", "throughput_per_rank"]
        >>> print(points[columns].round(3).to_string(index=False))
        schedule  pp  microbatches  bubble_ratio  throughput_per_rank
            1f1b   4             3           1.0                  0.5
            1f1b   4            16         0.188                0.842
            1f1b   8             7           1.0                  0.5
            1f1b   8            32         0.219                0.821
           zb-h1   4             3         0.444                0.692
           zb-h1   4            16         0.062                0.941
           zb-h1   8             7         0.381                0.724
           zb-h1   8            32         0.073                0.932

    Args:
        schedules: names of ``pptrace.schedules``, or "all".
        pp: pipeline ranks p.
        microbatches: microbatches m of a step.
        chunks: virtual stages per rank v; None: each schedule's default.
        group_size: microbatch group size N (interleaved); None: p.
        memory_limit: activations that a rank may hold, for schedules that are searched.
        forward: cost of one microbatch's F, ms.
        backward: cost of its full B, ms.
        wgrad: W's part of a full B, ms; None: half of it.
        p2p: cost of one message, ms.
        costs_of: "rank": costs are those of all layers of a rank, and a chunk's are 1/v of them, so that different v compare;
            "model": of all layers of the model, and a stage's are 1/(p·v), so that different p compare too; "action":
            of one action.

    Returns:
        One row per combination, schedules slowest. ``makespan_ns``; ``bubble_ratio`` (bubble / compute) and ``bubble_share`` (of
        the step); ``inner_bubble_ratio``, that between the first and last action of the rank that waits most;
        ``throughput_per_rank`` (1: it never waits) and ``throughput`` (their sum); ``microbatches_per_s``; ``peak_inflight``,
        the most activations of one chunk and microbatch on a rank, and ``peak_activations``, in those of 1/p of
        the model. A combination that a schedule does not have is <NA> in them, and ``refused`` says why.

    Raises:
        PptraceError: an unknown schedule, or a value that is none; the message is one line.
    """
    import pandas as pd

    from pptrace.report.sweep.columns import TEXTS, WHOLE_NUMBERS, sweep_columns

    wanted = SweepArguments(pp, microbatches, chunks, group_size, memory_limit, forward, backward, wgrad, p2p, costs_of)
    columns = sweep_columns(sweep_as(schedules, wanted))

    types = dict.fromkeys(columns, "Float64") | dict.fromkeys(WHOLE_NUMBERS, "Int64") | dict.fromkeys(TEXTS, "str")
    return pd.DataFrame(columns, dtype=object).astype(types)


@dataclass(frozen=True, slots=True)
class SweepArguments:
    """The arguments of :func:`sweep`, as a user gives them."""

    pp: object
    microbatches: object
    chunks: object = None
    group_size: object = None
    memory_limit: object = None
    forward: object = 1.0
    backward: object = 2.0
    wgrad: object = None
    p2p: object = 0.0
    costs_of: str = "rank"


def sweep_as(
    schedules: str | Iterable[str], wanted: SweepArguments, spell: Spelling = str, on_points: OnPoints | None = None
) -> Sweep:
    """:func:`sweep`, with the names of arguments in messages as ``spell`` has them."""
    return run_sweep(grid_of(schedules, wanted, spell), on_points)


def grid_of(schedules: str | Iterable[str], wanted: SweepArguments, spell: Spelling = str) -> Grid:
    """The sweep that is asked for.

    Raises:
        PptraceError: as :func:`sweep`.
    """
    for name in ("pp", "microbatches"):
        if getattr(wanted, name) is None:
            raise UsageError(f"{spell(name)} is not given; a sweep needs {spell('pp')} and {spell('microbatches')}")
    if wanted.memory_limit is not None:
        require_whole(spell("memory_limit"), wanted.memory_limit, 1)
    return Grid(
        _names(schedules),
        _sizes("pp", wanted, spell),
        read_microbatches(spell("microbatches"), wanted.microbatches),
        (None,) if wanted.chunks is None else _sizes("chunks", wanted, spell),
        (None,) if wanted.group_size is None else _sizes("group_size", wanted, spell),
        tuple(_costs(wanted, spell)),
        _costs_of(wanted.costs_of, spell),
        wanted.memory_limit,  # type: ignore[arg-type]
    )


def _names(schedules: str | Iterable[str]) -> tuple[str, ...]:
    require_type("schedules", schedules, Iterable, "names of pptrace.schedules, or 'all'")
    names = [name.strip() for name in schedules.split(",")] if isinstance(schedules, str) else list(schedules)
    if files := [name for name in names if str(name).endswith(".csv")]:
        raise UsageError(
            f"{files[0]}: a sweep takes names of the catalogue, whose sizes it can change; simulate the file alone"
        )
    every = [entry for name in names for entry in (registry.SCHEDULES if name == EVERY else [name])]
    for name in every:
        registry.get(name)
    return tuple(dict.fromkeys(every))


def _sizes(name: str, wanted: SweepArguments, spell: Spelling) -> tuple[int, ...]:
    sizes = read_sizes(spell(name), getattr(wanted, name))
    for size in sizes:
        require_whole(spell(name), size, 1)
    return sizes


def _costs_of(given: str, spell: Spelling) -> CostsOf:
    try:
        return CostsOf(given)
    except ValueError:
        raise UsageError(f"{spell('costs_of')} is {given!r}; expected one of {', '.join(CostsOf)}") from None


def _costs(wanted: SweepArguments, spell: Spelling) -> Iterator[SweepCosts]:
    def nanoseconds(name: str, given: Any) -> list[int]:
        values = read_costs(spell(name), given)
        for value in values:
            require_number(spell(name), value, "milliseconds", MOST_MS)
        return [round(value * NS_PER_MS) for value in values]

    forwards, backwards, messages = (
        nanoseconds(name, getattr(wanted, name)) for name in ("forward", "backward", "p2p")
    )
    wgrads = [None] if wanted.wgrad is None else nanoseconds("wgrad", wanted.wgrad)
    for forward, backward, wgrad, p2p in product(forwards, backwards, wgrads, messages):
        if wgrad is not None and wgrad > backward:
            raise UsageError(
                f"{spell('wgrad')} has {wgrad / NS_PER_MS:g}; it is a part of {spell('backward')}, "
                f"so expected at most {backward / NS_PER_MS:g}"
            )
        yield SweepCosts(forward, backward, backward // 2 if wgrad is None else wgrad, p2p)
