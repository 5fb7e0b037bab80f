"""Many schedules, sizes and costs on paper."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from pptrace.api.options import (
    Value,
    argument,
    option,
    options_of,
    require_number,
    require_type,
    require_whole,
    same,
    takes_options,
)
from pptrace.api.simulate import MOST_MS, NS_PER_MS, SimulateOptions, Spelling
from pptrace.errors import UsageError
from pptrace.schedule import registry
from pptrace.simulator.sweep.run import CostsOf, Grid, SweepCosts, run_sweep
from pptrace.simulator.sweep.values import read_costs, read_microbatches, read_sizes

if TYPE_CHECKING:
    import pandas as pd

EVERY = "all"
"""Stands for all schedules of the catalogue."""

Sizes = int | str | Iterable[int | str]
Milliseconds = float | str | Iterable[float | str]


_STEP = options_of(SimulateOptions)


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """Schedules, sizes and costs of a sweep, as a user gives them: each one value, several, or a text that stands for several."""

    schedules: str | Iterable[str] = argument('Names of pptrace.schedules, or "all".', EVERY)
    _: KW_ONLY
    pp: Sizes = same(_STEP["pp"])
    microbatches: Sizes = same(_STEP["microbatches"])
    chunks: Sizes | None = same(_STEP["chunks"], None)
    group_size: Sizes | None = same(_STEP["group_size"], None)
    memory_limit: int | None = same(_STEP["memory_limit"], None)
    forward: Milliseconds = same(_STEP["forward"], 1.0)
    backward: Milliseconds = same(_STEP["backward"], 2.0)
    wgrad: Milliseconds | None = same(_STEP["wgrad"], None)
    p2p: Milliseconds = same(_STEP["p2p"], 0.0)
    costs_of: str = option(
        "rank",
        Value.TEXT,
        "In a sweep: costs are those of all layers of a rank, of the whole model, or of one action [default: rank].",
        choices=("rank", "model", "action"),
    )


@takes_options(SweepOptions)
def sweep(options: SweepOptions) -> pd.DataFrame:
    """Simulate every combination of schedules, sizes and costs: what ``pptrace simulate --sweep`` shows.

    Each argument is one value, several, or a text such as ``"2,4,8"``, ``"8..64:8"`` (steps of 8) or ``"8..64:x2"`` (doubling);
    microbatches may be multiples of p, ``"p-1"`` or ``"4p"``. With ``costs_of`` "rank" a chunk's costs are 1/v of those given, so
    that different v compare; with "model" a stage's are 1/(p·v), so that different p compare too.

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

    from pptrace.report.sweep.layout import TEXTS, WHOLE_NUMBERS, sweep_columns

    columns = sweep_columns(run_sweep(grid_of(options)))
    types = dict.fromkeys(columns, "Float64") | dict.fromkeys(WHOLE_NUMBERS, "Int64") | dict.fromkeys(TEXTS, "str")
    return pd.DataFrame(columns, dtype=object).astype(types)


def grid_of(options: SweepOptions, spell: Spelling = str) -> Grid:
    """The sweep that is asked for, with the names of arguments in messages as ``spell`` has them.

    Raises:
        PptraceError: as :func:`sweep`.
    """
    for name in ("pp", "microbatches"):
        if getattr(options, name) is None:
            raise UsageError(f"{spell(name)} is not given; a sweep needs {spell('pp')} and {spell('microbatches')}")
    if options.memory_limit is not None:
        require_whole(spell("memory_limit"), options.memory_limit, 1)
    try:
        costs_of = CostsOf(options.costs_of)
    except ValueError:
        raise UsageError(f"{spell('costs_of')} is {options.costs_of!r}; expected one of {', '.join(CostsOf)}") from None
    return Grid(
        schedule_names(options.schedules),
        _sizes("pp", options, spell),
        read_microbatches(spell("microbatches"), options.microbatches),
        (None,) if options.chunks is None else _sizes("chunks", options, spell),
        (None,) if options.group_size is None else _sizes("group_size", options, spell),
        tuple(_costs(options, spell)),
        costs_of,
        options.memory_limit,
    )


def schedule_names(schedules: str | Iterable[str]) -> tuple[str, ...]:
    """Names of schedules, each once; "all" stands for all of them.

    Raises:
        PptraceError: there is none of a name.
    """
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


def _sizes(name: str, options: SweepOptions, spell: Spelling) -> tuple[int, ...]:
    sizes = read_sizes(spell(name), getattr(options, name))
    for size in sizes:
        require_whole(spell(name), size, 1)
    return sizes


def _costs(options: SweepOptions, spell: Spelling) -> Iterator[SweepCosts]:
    def nanoseconds(name: str, given: Any) -> list[int]:
        values = read_costs(spell(name), given)
        for value in values:
            require_number(spell(name), value, "milliseconds", MOST_MS)
        return [round(value * NS_PER_MS) for value in values]

    forwards, backwards, messages = (
        nanoseconds(name, getattr(options, name)) for name in ("forward", "backward", "p2p")
    )
    wgrads = [None] if options.wgrad is None else nanoseconds("wgrad", options.wgrad)
    for forward, backward, wgrad, p2p in product(forwards, backwards, wgrads, messages):
        if wgrad is not None and wgrad > backward:
            raise UsageError(
                f"{spell('wgrad')} has {wgrad / NS_PER_MS:g}; it is a part of {spell('backward')}, "
                f"so expected at most {backward / NS_PER_MS:g}"
            )
        yield SweepCosts(forward, backward, backward // 2 if wgrad is None else wgrad, p2p)
