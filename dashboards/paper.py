"""A schedule on paper: what the form of the schedules page asks for, and the tables of the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from pptrace.api.estimate import EstimatedRun, estimate
from pptrace.api.simulate import SimulatedStep, simulate
from pptrace.api.sweep import SweepOptions, grid_of
from pptrace.errors import PptraceError, UsageError
from pptrace.report.estimate.columns import as_rows, communication_columns, rank_columns
from pptrace.report.sweep.layout import sweep_columns
from pptrace.schedule import registry
from pptrace.schedule.registry import SCHEDULES
from pptrace.simulator import idle_by_cause
from pptrace.simulator.sweep.run import Sweep, run_sweep

OF_MODEL = ("layers", "hidden", "heads", "sequence", "vocabulary")
"""Sizes without which nothing is estimated of a model."""
OF_MESH = ("microbatch_size", "tp", "dp", "zero")
Rows = Iterable[Mapping[Any, object]]
"""Rows of a table by the names of its columns."""
_MOST_ACTIONS = 20_000
"""Most forwards of a plan that is drawn."""
_MOST_SEARCHED = 6_000
"""Most forwards of a plan that is searched for, which takes more than a hundred times as long."""
_MOST_KEPT = 32
"""Most sweeps that are kept."""
_MOST_SWEPT_PP = 64
"""Most pipeline ranks whose bubbles are swept while a page waits."""


@dataclass(frozen=True, slots=True)
class OnPaper:
    """A schedule with its sizes and costs, as they were typed: None and wrong values are left for the errors that name them.

    ``forward`` and ``backward`` are ms of one microbatch in all layers of a rank, ``p2p`` ms of one message.
    """

    schedule: str
    pp: Any = None
    microbatches: Any = None
    chunks: Any = None
    forward: float = 0.0
    backward: float = 0.0
    p2p: float = 0.0
    layers: Any = None
    hidden: Any = None
    heads: Any = None
    sequence: Any = None
    vocabulary: Any = None
    microbatch_size: Any = None
    tp: Any = None
    dp: Any = None
    zero: Any = None

    def estimate(self) -> EstimatedRun | None:
        """Estimate of a model of these sizes; None where some of them are not given.

        Raises:
            PptraceError: there is no such model, mesh or plan.
        """
        if any(getattr(self, name) is None for name in OF_MODEL):
            return None
        self._require_size()
        sizes = {name: value for name in (*OF_MODEL, *OF_MESH) if (value := getattr(self, name)) is not None}
        return estimate(self.schedule, pp=self.pp, microbatches=self.microbatches, chunks=self.chunks, **sizes)

    def step(self) -> SimulatedStep:
        """The step of the plan.

        Raises:
            PptraceError: the schedule has no such plan, or it is too large for a page.
        """
        chunks = self._require_size()
        parts = 1 if registry.get(self.schedule).bidirectional else chunks
        sizes = {"pp": self.pp, "microbatches": self.microbatches, "chunks": self.chunks}
        return simulate(
            self.schedule, **sizes, forward=self.forward / parts, backward=self.backward / parts, p2p=self.p2p
        )

    def _require_size(self) -> int:
        """The chunks of a rank, of a plan that is not too large for a page."""
        entry = registry.get(self.schedule)
        chunks: int = self.chunks or entry.default_chunks
        size = (self.pp or 0) * (self.microbatches or 0) * chunks
        most = _MOST_SEARCHED if entry.searches else _MOST_ACTIONS
        if size > most:
            raise PptraceError(f"{size:,} forwards are more than a page can draw; expected at most {most:,}")
        return chunks

    def bubbles(self) -> Sweep:
        """All schedules that are not searched, over m from p to 8p, with 1, 2 and 4 chunks.

        Raises:
            PptraceError: p is no size, or too large for a page.
        """
        if self.pp is not None and self.pp > _MOST_SWEPT_PP:
            raise UsageError(
                f"p is {self.pp}; a page compares schedules of at most {_MOST_SWEPT_PP} ranks, pptrace simulate --sweep of any"
            )
        names = tuple(name for name, entry in SCHEDULES.items() if not entry.searches)
        return self._swept(names, self.pp, "p,2p,3p,4p,6p,8p", "1,2,4")

    def throughput(self) -> Sweep | None:
        """The schedule over p, with as few microbatches as p − 1 and with many more; None where it is searched."""
        entry = registry.get(self.schedule)
        if entry.searches:
            return None
        return self._swept((self.schedule,), "2..32:x2", "p-1,8p", self.chunks or entry.default_chunks)

    def _swept(self, schedules: tuple[str, ...], pp: Any, microbatches: str, chunks: Any) -> Sweep:
        costs: dict[str, Any] = {"forward": self.forward, "backward": self.backward, "p2p": self.p2p}
        return _swept(SweepOptions(schedules, pp=pp, microbatches=microbatches, chunks=chunks, **costs))

    @property
    def options(self) -> dict[str, object]:
        """The form as options of an address; :func:`on_paper` reads them."""
        return asdict(self)


@lru_cache(_MOST_KEPT)
def _swept(options: SweepOptions) -> Sweep:
    """A sweep, which is kept: pages that are gone back to, and the files of their tables, ask for the same one."""
    return run_sweep(grid_of(options))


def on_paper(form: Mapping[str, object]) -> OnPaper:
    """The form of an address, or of a page.

    Raises:
        UsageError: a value is no number.
    """
    whole = ("pp", "microbatches", "chunks", *OF_MODEL, *OF_MESH)
    sizes: dict[str, Any] = {name: _number(name, form.get(name)) for name in whole}
    costs: dict[str, Any] = {name: _number(name, form.get(name)) or 0.0 for name in ("forward", "backward", "p2p")}
    return OnPaper(str(form.get("schedule")), **sizes, **costs)


def _number(name: str, value: object) -> float | None:
    """A number, an int where it is whole; None where nothing was typed."""
    if value in (None, ""):
        return None
    try:
        number = float(str(value))
    except ValueError:
        raise UsageError(f"{name} is {str(value)[:40]!r}; expected a number") from None
    return int(number) if number.is_integer() else number


def _idle(form: OnPaper) -> Rows:
    for rank, parts in enumerate(idle_by_cause(form.step().simulation)):
        yield {"rank": rank} | {f"{cause}_ns": idle_ns for cause, idle_ns in parts.items()}


def _rows(sweep: Sweep | None) -> Rows:
    columns = {} if sweep is None else sweep_columns(sweep)
    return (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))


def _needs(form: OnPaper) -> Rows:
    run = form.estimate()
    return [] if run is None else as_rows(rank_columns(run.estimate))


def _sent(form: OnPaper) -> Rows:
    run = form.estimate()
    return [] if run is None else as_rows(communication_columns(run.estimate, run.link_speeds))


PAPER_TABLES: Mapping[str, Callable[[OnPaper], Rows]] = {
    "plan-ops": lambda form: form.step().ops.to_dict("records"),
    "plan-idle": _idle,
    "plan-estimate": _needs,
    "plan-estimate-communication": _sent,
    "plan-bubbles": lambda form: _rows(form.bubbles()),
    "plan-throughput": lambda form: _rows(form.throughput()),
}
"""Tables of a schedule on paper by the names of their files."""
