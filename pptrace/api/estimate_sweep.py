"""Many meshes, schedules and options of one model: which fit a memory, and which of these has the shortest step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from pptrace.api.estimate import estimate_of
from pptrace.api.estimate_options import RECOMPUTES, EstimateOptions, require_change
from pptrace.api.options import Value, argument, option, options_of, require_whole, same, takes_options
from pptrace.api.simulate import Spelling
from pptrace.api.sweep import schedule_names
from pptrace.errors import PptraceError, UsageError
from pptrace.simulator.estimated_step import Candidate
from pptrace.simulator.sweep.values import read_sizes

if TYPE_CHECKING:
    import pandas as pd

MOST_COMBINATIONS = 5_000
_SIZES = ("pp", "chunks", "tp", "cp", "dp", "ep", "microbatches", "microbatch_size", "zero")
SWEPT = frozenset({*_SIZES, "recompute"})
"""Options that may have several values, besides the schedule."""
OF_SWEEP = ("num_ranks", "global_batch")
"""Options that only a sweep has."""
_ONE = options_of(EstimateOptions)
Sizes = int | str | Iterable[int | str]


@dataclass(frozen=True, slots=True)
class EstimateSweepOptions(EstimateOptions):
    """Options of :class:`EstimateOptions`, of which sizes and recompute may have several values.

    A value is one, a list, or a text as ``2,4,8``.
    """

    schedule: Any = argument('Names of pptrace.schedules, or "all".')
    _: KW_ONLY
    pp: Sizes = same(_ONE["pp"], 1)  # type: ignore[assignment]
    chunks: Sizes | None = same(_ONE["chunks"], None)  # type: ignore[assignment]
    tp: Sizes = same(_ONE["tp"], 1)  # type: ignore[assignment]
    cp: Sizes = same(_ONE["cp"], 1)  # type: ignore[assignment]
    dp: Sizes | None = same(_ONE["dp"], None)  # type: ignore[assignment]
    ep: Sizes = same(_ONE["ep"], 1)  # type: ignore[assignment]
    microbatches: Sizes | None = same(_ONE["microbatches"], None)  # type: ignore[assignment]
    microbatch_size: Sizes = same(_ONE["microbatch_size"], 1)  # type: ignore[assignment]
    zero: Sizes = same(_ONE["zero"], 0)  # type: ignore[assignment]
    recompute: str | Iterable[str] = option(  # type: ignore[assignment]
        "none", Value.TEXT, f"{', '.join(RECOMPUTES)}, or several of them.", label="recompute"
    )
    num_ranks: int | None = option(
        None,
        Value.WHOLE,
        "In a sweep: ranks in all; dp is what the other axes leave.",
        "N",
        flag="ranks",
        label="ranks",
    )
    global_batch: int | None = option(
        None, Value.WHOLE, "In a sweep: sequences of a step, from which microbatches follow.", "N", label="sequences"
    )


@takes_options(EstimateSweepOptions)
def estimate_sweep(options: EstimateSweepOptions) -> pd.DataFrame:
    """Estimate every combination of meshes, schedules and options: what ``pptrace estimate --sweep`` shows.

        >>> import pptrace
        >>> sizes = dict(layers=24, hidden=1024, heads=16, sequence=2048, vocabulary=50304, tied=True)
        >>> points = pptrace.estimate_sweep("1f1b", pp="1,2,4", num_ranks=4, global_batch=16, fits=6 * 10**9, **sizes)
        >>> points[["pp", "dp", "microbatches", "fits"]].values.tolist()
        [[4, 1, 16, True], [2, 2, 8, True], [1, 4, 4, False]]

    Returns:
        One row per combination, those that fit first, of these the fewest nanoseconds of a rank for a token first
        (``rank_ns_per_token``, where speeds are given), else the smallest peak. ``peak_bytes`` is missing of those that no
        schedule or mesh has, ``step_ns`` of those that do not fit; ``reason`` says why.

    Raises:
        PptraceError: an unknown schedule, or a value that is none; the message is one line.
    """
    import pandas as pd

    from pptrace.report.estimate.sweep import candidate_columns

    return pd.DataFrame(candidate_columns(run_combinations(options)))


def run_combinations(
    options: EstimateSweepOptions,
    spell: Spelling = str,
    on_count: Callable[[int, int], None] | None = None,
    check: Callable[[EstimateOptions], None] | None = None,
) -> list[Candidate]:
    """All combinations, the best first; what ``check`` raises is why one of them cannot be.

    Raises:
        PptraceError: as :func:`estimate_sweep`.
    """
    axes = _axes(options, spell)
    count = prod(map(len, axes.values()))
    if count > MOST_COMBINATIONS:
        raise UsageError(
            f"the sweep has {count:,} combinations; expected at most {MOST_COMBINATIONS:,}: give fewer values"
        )
    found = []
    for values in product(*axes.values()):
        found.append(_one(options, dict(zip(axes, values, strict=True)), spell, check))
        if on_count is not None:
            on_count(len(found), count)
    reasons = {candidate.refused for candidate in found}
    if len(reasons) == 1 and (reason := reasons.pop()):  # a mistake in what all of them have
        raise UsageError(reason)
    require_change(options, axes["tp"], spell)
    return sorted(found, key=lambda candidate: candidate.order)


def _axes(options: EstimateSweepOptions, spell: Spelling) -> dict[str, tuple[Any, ...]]:
    """The values of each option that has several, or may have."""
    axes: dict[str, tuple[Any, ...]] = {"schedule": schedule_names(options.schedule)}
    for name in _SIZES:
        given = getattr(options, name)
        axes[name] = (None,) if given is None else read_sizes(spell(name), given)
    given = options.recompute
    axes["recompute"] = tuple(given.split(",")) if isinstance(given, str) else tuple(given)
    for name, total in (("num_ranks", options.num_ranks), ("global_batch", options.global_batch)):
        if total is not None:
            require_whole(spell("ranks" if name == "num_ranks" else name), total, 1)
    if options.dp is not None and options.num_ranks is not None:
        raise UsageError(f"{spell('dp')} follows from {spell('ranks')}; give one of them")
    if (options.microbatches is None) is (options.global_batch is None):
        raise UsageError(f"give {spell('microbatches')} or {spell('global_batch')}, from which they follow")
    return axes


def _one(
    options: EstimateSweepOptions,
    values: dict[str, Any],
    spell: Spelling,
    check: Callable[[EstimateOptions], None] | None,
) -> Candidate:
    """One combination; what sizes do not allow is its reason."""
    common = {one.name: getattr(options, one.name) for one in fields(EstimateOptions)}
    try:
        values["dp"], values["microbatches"] = _derived(options, values, spell)
        one = EstimateOptions(**common | values)
        if check is not None:
            check(one)
        run = estimate_of(one, spell)
    except PptraceError as err:
        return Candidate(values, refused=str(err))
    fits = run.limit_bytes is None or run.peak_bytes <= run.limit_bytes
    return Candidate(values, run.estimate, run.step if fits else None, run.limit_bytes)


def _derived(options: EstimateSweepOptions, values: Mapping[str, Any], spell: Spelling) -> tuple[int, int]:
    """The size of dp and the microbatches of one pipeline."""
    dp = values["dp"] or 1
    if options.num_ranks is not None:
        of_others = values["pp"] * values["tp"] * values["cp"]
        if options.num_ranks % of_others:
            raise UsageError(f"{spell('ranks')} {options.num_ranks} is no multiple of pp · tp · cp, {of_others}")
        dp = options.num_ranks // of_others
    if options.global_batch is None:
        return dp, values["microbatches"]
    at_once = dp * values["microbatch_size"]
    if options.global_batch % at_once:
        raise UsageError(
            f"{spell('global_batch')} {options.global_batch} is no multiple of dp · {spell('microbatch_size')}, {at_once}"
        )
    return dp, options.global_batch // at_once
