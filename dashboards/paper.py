"""A schedule on paper: what the form of the schedules page asks for, and the tables of the answer."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from time import monotonic
from typing import Any

from dashboards.fields import number, values_of, words_of
from pptrace.api.estimate import EstimatedRun, estimate
from pptrace.api.estimate_options import EstimateOptions
from pptrace.api.estimate_sweep import OF_SWEEP, SWEPT, EstimateSweepOptions, run_combinations
from pptrace.api.options import Option, options_of
from pptrace.api.simulate import SimulatedStep, SimulateOptions, simulate
from pptrace.api.sweep import SweepOptions, grid_of
from pptrace.errors import PptraceError, UsageError
from pptrace.report.columns import as_rows
from pptrace.report.estimate.columns import communication_columns, rank_columns
from pptrace.report.estimate.sweep import candidate_columns
from pptrace.report.sweep.layout import sweep_columns
from pptrace.schedule import registry
from pptrace.schedule.registry import SCHEDULES
from pptrace.simulator import idle_by_cause
from pptrace.simulator.estimated_step import Candidate
from pptrace.simulator.sweep.run import Sweep, SweptPoint, sweep_plans

PLAN: Mapping[str, Option] = {one.form_name: one for one in options_of(SimulateOptions).values() if one.label}
"""Sizes and costs of a plan by the names of their fields."""
COSTS = ("forward", "backward", "p2p")
"""Costs among them: one that is left empty is what it is on the command line, F 1 ms and B 2."""
SIZES: Mapping[str, Option] = {
    one.form_name: one for one in options_of(EstimateOptions).values() if one.label and one.name not in PLAN
}
"""Sizes of a model and a mesh, what is recomputed and shared, and what a rank has."""
SEVERAL: Mapping[str, Option] = {
    f"sweep_{one.form_name}": one
    for one in options_of(EstimateSweepOptions).values()
    if one.name in ("schedule", *SWEPT, *OF_SWEEP)
}
"""Options that may have several values, as texts."""
OF_MODEL = ("layers", "hidden", "heads", "sequence", "vocabulary")
"""Sizes without which nothing is estimated of a model, unless its layers are known by numbers."""
OF_NUMBERS = ("layers", "layer_parameters", "layer_activations")
"""The same of a model whose layers are known by their numbers alone."""
Rows = Iterable[Mapping[Any, object]]
"""Rows of a table by the names of its columns."""
_MOST_ACTIONS = 20_000
"""Most forwards of a plan that is drawn."""
_MOST_SEARCHED = 6_000
"""Most forwards of a plan that is searched for, which takes more than a hundred times as long."""
_MOST_KEPT = 32
"""Most sweeps that are kept."""
_MOST_ESTIMATED = 4
"""Most sweeps of estimates that are kept."""
_MOST_COMBINATIONS = 400
"""Most estimates while a page waits."""
_MOST_ESTIMATED_S = 20
"""The longest that a page waits for them, s."""
_MOST_SWEPT_PP = 64
"""Most pipeline ranks whose bubbles are swept while a page waits."""


@dataclass(frozen=True, slots=True)
class OnPaper:
    """A schedule with its sizes and costs, as they were typed: sizes that are None or wrong are left for the errors that name
    them.

    ``forward`` and ``backward`` are ms of one microbatch in all layers of a rank, ``p2p`` ms of one message.
    """

    schedule: str
    pp: Any = None
    microbatches: Any = None
    chunks: Any = None
    forward: float = 0.0
    backward: float = 0.0
    p2p: float = 0.0
    sizes: Mapping[str, object] = field(default_factory=dict)
    """Texts and numbers that were typed for :data:`SIZES`."""
    several: Mapping[str, object] = field(default_factory=dict)
    """Texts that were typed for :data:`SEVERAL`."""

    @property
    def has_model(self) -> bool:
        """Return whether there are sizes enough to estimate something."""
        return any(all(name in self.sizes for name in names) for names in (OF_MODEL, OF_NUMBERS))

    def estimate(self) -> EstimatedRun | None:
        """Estimate of a model of these sizes; None where some of them are not given.

        Raises:
            PptraceError: there is no such model, mesh or plan.
        """
        if not self.has_model:
            return None
        _require_size(self)
        sizes = values_of(SIZES, self.sizes)
        return estimate(self.schedule, pp=self.pp, microbatches=self.microbatches, chunks=self.chunks, **sizes)

    def candidates(self) -> list[Candidate] | None:
        """Combinations of the values where some are several, the best first; None where none are, or sizes are missing.

        Raises:
            PptraceError: a value is none, or there are too many for a page.
        """
        if not self.several or not self.has_model:
            return None
        typed = {one.name: self.several[name] for name, one in SEVERAL.items() if name in self.several}
        totals = {one.form_name: one for one in SEVERAL.values() if one.name in OF_SWEEP}
        given = {one.form_name: typed[one.name] for one in totals.values() if one.name in typed}
        options = values_of(SIZES, self.sizes) | self._plan | typed | values_of(totals, given)
        for total, follows in (("num_ranks", "dp"), ("global_batch", "microbatches")):
            if total in typed:
                options[follows] = typed.get(follows)
        return _estimated(EstimateSweepOptions(**options))

    @property
    def _plan(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("schedule", "pp", "microbatches", "chunks")}

    @property
    def command(self) -> str:
        """The command that estimates the same."""
        plan = {one.name: one for one in PLAN.values() if one.name in self._plan}
        words = words_of(plan, {name: self._plan[name] for name in plan}), words_of(SIZES, self.sizes)
        return " ".join(("pptrace estimate", self.schedule, *filter(None, words)))

    def step(self) -> SimulatedStep:
        """The step of the plan.

        Raises:
            PptraceError: the schedule has no such plan, or it is too large for a page.
        """
        _require_size(self)
        entry = registry.get(self.schedule)
        parts = 1 if entry.bidirectional else self.chunks or entry.default_chunks
        sizes = {"pp": self.pp, "microbatches": self.microbatches, "chunks": self.chunks}
        return simulate(
            self.schedule, **sizes, forward=self.forward / parts, backward=self.backward / parts, p2p=self.p2p
        )

    def bubbles(self, most_s: float = math.inf) -> Sweep:
        """All schedules that are not searched, over m from p to 8p, with 1, 2 and 4 chunks: what there is of them after so many
        seconds more.

        Raises:
            PptraceError: p is no size, or too large for a page.
        """
        if self.pp is not None and self.pp > _MOST_SWEPT_PP:
            raise UsageError(
                f"p is {self.pp}; a page compares schedules of at most {_MOST_SWEPT_PP} ranks, pptrace simulate --sweep of any"
            )
        names = tuple(name for name, entry in SCHEDULES.items() if not entry.searches)
        return self._swept(names, self.pp, "p,2p,3p,4p,6p,8p", "1,2,4").more(most_s)

    def throughput(self) -> Sweep | None:
        """The schedule over p, with as few microbatches as p − 1 and with many more; None where it is searched."""
        entry = registry.get(self.schedule)
        if entry.searches:
            return None
        return self._swept((self.schedule,), "2..32:x2", "p-1,8p", self.chunks or entry.default_chunks).more()

    def _swept(self, schedules: tuple[str, ...], pp: Any, microbatches: str, chunks: Any) -> Sweeping:
        costs: dict[str, Any] = {"forward": self.forward, "backward": self.backward, "p2p": self.p2p}
        return _swept(SweepOptions(schedules, pp=pp, microbatches=microbatches, chunks=chunks, **costs))

    @property
    def options(self) -> dict[str, object]:
        """The form as options of an address; :func:`on_paper` reads them."""
        plan = {name: getattr(self, name) for name in ("schedule", *PLAN)}
        return plan | dict(self.sizes) | dict(self.several)


def _require_size(plan: OnPaper | EstimateOptions) -> None:
    """Refuse a plan that is too large for a page."""
    entry = registry.get(plan.schedule)
    size = (plan.pp or 0) * (plan.microbatches or 0) * (plan.chunks or entry.default_chunks)
    most = _MOST_SEARCHED if entry.searches else _MOST_ACTIONS
    if size > most:
        raise PptraceError(f"{size:,} forwards are more than a page can draw; expected at most {most:,}")


class Sweeping:
    """A sweep that goes on while somebody asks. Usable from any thread."""

    def __init__(self, options: SweepOptions) -> None:
        self._grid = grid_of(options)
        self._left = sweep_plans(self._grid)
        self._points: list[SweptPoint] = []
        self._lock = threading.Lock()
        self._swept = Sweep(self._grid, ())

    def more(self, most_s: float = math.inf) -> Sweep:
        """Simulate the rest, or what there is time for: all of m of the schedules and numbers of chunks so far."""
        with self._lock:
            begin, num = monotonic(), len(self._points)
            try:
                while monotonic() - begin < most_s and (points := next(self._left, None)) is not None:
                    self._points += points
            except PptraceError:  # asking again gives the error again
                self._left, self._points = sweep_plans(self._grid), []
                raise
            if len(self._points) > num:
                of_row = len(self._grid.microbatches) * len(self._grid.costs)
                self._swept = Sweep(self._grid, tuple(self._points[: len(self._points) // of_row * of_row]))
            return self._swept


@lru_cache(_MOST_KEPT)
def _swept(options: SweepOptions) -> Sweeping:
    """A sweep, which is kept: pages that are gone back to, and the files of their tables, ask for the same one."""
    return Sweeping(options)


@lru_cache(_MOST_ESTIMATED)
def _estimated(options: EstimateSweepOptions) -> list[Candidate]:
    """A sweep of estimates, while a page waits."""
    begin = monotonic()

    def require_few(count: int, total: int) -> None:
        others = "give fewer values, or use pptrace estimate --sweep"
        if total > _MOST_COMBINATIONS:
            raise UsageError(f"{total:,} combinations are more than the {_MOST_COMBINATIONS} of a page; {others}")
        if count < total and monotonic() - begin > _MOST_ESTIMATED_S:
            raise UsageError(
                f"{count:,} of {total:,} combinations took {_MOST_ESTIMATED_S} s, for which a page waits; {others}"
            )

    return run_combinations(options, on_count=require_few, check=_require_size)


def on_paper(form: Mapping[str, object]) -> OnPaper:
    """The form of an address, or of a page.

    Raises:
        UsageError: a value is no number.
    """
    plan: dict[str, Any] = {name: _number(name, form.get(name)) for name in PLAN}
    plan |= {name: PLAN[name].default for name in COSTS if plan[name] is None}
    sizes, several = (
        {name: value for name in names if (value := form.get(name)) not in (None, "")} for names in (SIZES, SEVERAL)
    )
    return OnPaper(str(form.get("schedule")), **plan, sizes=sizes, several=several)


def _number(name: str, value: object) -> float | None:
    """A number, an int where it is whole; None where nothing was typed."""
    if value in (None, ""):
        return None
    found = number(name, value)
    return int(found) if found.is_integer() else found


def _idle(form: OnPaper) -> Rows:
    for rank, parts in enumerate(idle_by_cause(form.step().simulation)):
        yield {"rank": rank} | {f"{cause}_ns": idle_ns for cause, idle_ns in parts.items()}


def _rows(sweep: Sweep | None) -> Rows:
    return [] if sweep is None else as_rows(sweep_columns(sweep))


PAPER_TABLES: Mapping[str, Callable[[OnPaper], Rows]] = {
    "plan-ops": lambda form: form.step().ops.to_dict("records"),
    "plan-idle": _idle,
    "plan-estimate": lambda form: [] if (run := form.estimate()) is None else as_rows(rank_columns(run.estimate)),
    "plan-estimate-communication": lambda form: (
        [] if (run := form.estimate()) is None else as_rows(communication_columns(run.estimate, run.link_speeds))
    ),
    "plan-fits": lambda form: as_rows(candidate_columns(found)) if (found := form.candidates()) else [],
    "plan-bubbles": lambda form: _rows(form.bubbles()),
    "plan-throughput": lambda form: _rows(form.throughput()),
}
"""Tables of a schedule on paper by the names of their files."""
