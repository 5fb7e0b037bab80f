"""Answers that take long, kept by their questions until the analysis is another one."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeVar

import pptrace
from dashboards.predicting import Predicting
from dashboards.store import Loaded, Store
from pptrace.analysis.aligned import AlignedRun
from pptrace.analysis.whatif.result import Scenario
from pptrace.analysis.whatif.study import Study
from pptrace.api.compare import RunComparison
from pptrace.api.hang import HangReport
from pptrace.api.run import Run
from pptrace.api.whatif import ALL, Predictions, study_of, verified
from pptrace.api.wishes import Wishes
from pptrace.errors import PptraceError, UsageError
from pptrace.ingest.inputs.resolve import RUN_FILE
from pptrace.ingest.job.disk_cache import Packed
from pptrace.schedule.registry import SCHEDULES
from pptrace.workflow.find_hang import is_dump
from pptrace.workflow.load import load

_MOST_KEPT = 64
_WHY = "no-prediction"
"""The entry of the cache that says why nothing is predicted."""
_MOST_ACTIONS = 200_000
"""Larger plans are not predicted: a page that asks for one keeps all others waiting."""
_MOST_SEARCHED = 20_000
"""Most actions of a plan that is searched for, which takes more than a hundred times as long."""
_MOST_S = 60.0
"""Time for which a request waits for predictions, s."""

Answer = TypeVar("Answer")


class _Kept:
    """One answer, made by the first who asks; the others wait for it. ``other`` is the second run that it is about."""

    def __init__(self, other: Loaded | None) -> None:
        self.other = other
        self._lock = threading.Lock()
        self._answer: Any = None
        self._error: PptraceError | None = None
        self._is_made = False

    def get(self, make: Callable[[], Any]) -> Any:
        with self._lock:
            if not self._is_made:
                try:
                    self._answer = make()
                except PptraceError as err:
                    self._error = err
                self._is_made = True
        if self._error is not None:
            raise self._error
        return self._answer


class Answers:
    """Predictions, comparison and diagnosis of the run that a store has. Usable from any thread.

    ``is_secret`` is whether only who knows a secret is answered.
    """

    def __init__(self, store: Store, other: Store | None = None, is_secret: bool = False) -> None:
        self._store, self._other = store, other
        self.is_secret = is_secret
        self._running = threading.Lock()
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()
        self._loaded: Loaded | None = None

    @property
    def other(self) -> Loaded | None:
        """The run to compare with; None where none was given."""
        return None if self._other is None else self._other.get()

    def run(self) -> Run:
        """The run.

        Raises:
            PptraceError: it could not be analysed.
        """
        loaded = self._store.get()
        return self._keep("run", lambda: _run_of(loaded))

    def whole_run(self) -> Run:
        """The run with its tables.

        Raises:
            PptraceError: it could not be analysed, or its tables were let go.
        """
        return _with_tables(self.run())

    def whatif(self, wishes: Wishes) -> Predictions:
        """Predict what is wished for; all sensible changes where nothing is.

        Raises:
            PptraceError: it cannot be predicted.
        """
        progress = self.predicting(wishes).wait(_MOST_S)
        if not progress.is_over or progress.predictions is None:
            of_all = "" if progress.num_changes is None else f" of {progress.num_changes}"
            raise UsageError(
                f"{progress.done}{of_all} changes are predicted after {_MOST_S:.0f} s, the most that a page waits; ask for one "
                "change, or use pptrace whatif, which has no limit"
            )
        return progress.predictions

    def predicting(self, wishes: Wishes) -> Predicting:
        """The same predictions, which are made while somebody asks for them.

        Raises:
            PptraceError: they are too many for a page.
        """
        run = self.whole_run()

        def make() -> Predicting:
            _require_small(run, wishes)
            return Predicting(lambda: self.study(wishes.assumed), wishes)

        return self._keep(("predicting", wishes), make)

    def verified(self, wishes: Wishes, most_s: float) -> Scenario:
        """Run what is wished for in real processes; its first scenario, with what it took.

        Raises:
            PptraceError: it cannot be predicted or run, its step is longer than ``most_s``, or another one is being run.
        """
        predictions = self.whatif(wishes)
        if not predictions.result.scenarios:
            raise PptraceError("; ".join(predictions.result.warnings) or "this cannot be predicted")
        length_s = predictions.result.scenarios[0].span_ns / 1e9
        if length_s > most_s:
            raise UsageError(
                f"its pipeline takes {length_s:.0f} s, which is run six times; a page waits for steps of at most {most_s:.0f} s: "
                "use the command line"
            )
        if not self._running.acquire(blocking=False):
            raise UsageError("another plan is being run; try again when it has ended")
        try:
            return verified(self.whole_run().analysis, predictions).result.scenarios[0]
        finally:
            self._running.release()

    def study(self, wishes: Wishes) -> Study:
        """The run as predictions see it, with the layers that are wished for.

        Raises:
            PptraceError: it has no whole step, or the layers do not fit it.
        """
        run = self.whole_run()
        return self._keep(("study", wishes), lambda: study_of(run.analysis, wishes))

    def why_no_prediction(self) -> str:
        """The reason for which no change of this run can be predicted, as a sentence; "" where changes can.

        It is kept with a run, so that opening it again needs none of its tables.
        """
        return self._keep("why", self._why_no_prediction)

    def _why_no_prediction(self) -> str:
        store = self._store.get().store
        kept = None if store is None else store.read(_WHY)
        if kept is not None:
            return kept.facts
        try:
            run = self.whole_run()
            _require_small(run, Wishes())
            self.study(Wishes())
        except PptraceError as err:
            reason = sentence_of(err)
        else:
            reason = ""
        if store is not None:
            store.write(_WHY, Packed(reason, {}))
        return reason

    def of_data(self, make: Callable[[AlignedRun], Answer]) -> Answer:
        """Apply a function to the run's tables, and keep what it makes of them.

        Raises:
            PptraceError: the run's ops are not kept.
        """
        run = self.whole_run()
        return self._keep(make, lambda: make(run.analysis.data))

    def comparison(self) -> RunComparison:
        """Compare the run with the other one.

        Raises:
            PptraceError: there is no other one, or one of them has no whole step.
        """
        run, other = self.whole_run(), self.other
        if other is None:
            raise UsageError("there is no second run; start with pptrace dashboard A --compare B")
        return self._keep("comparison", lambda: pptrace.compare(run, _with_tables(_run_of(other))), other)

    def hang(self) -> HangReport:
        """Diagnose the dumps, or read what the run directory says.

        Raises:
            PptraceError: there is neither.
        """
        paths = [path for path in self._store.get().paths if path.is_dir() or path.name == RUN_FILE or is_dump(path)]
        if not paths:
            raise PptraceError(
                "these inputs are traces; a hang is diagnosed from flight-recorder dumps, or from a run directory"
            )
        return self._keep("hang", lambda: pptrace.hang(paths))

    def _keep(self, key: Hashable, make: Callable[[], Answer], other: Loaded | None = None) -> Answer:
        loaded = self._store.get()
        with self._lock:
            if loaded is not self._loaded:
                self._kept.clear()
                self._loaded = loaded
            kept = self._kept.get(key)
            if kept is None or kept.other is not other:
                kept = self._kept[key] = _Kept(other)
            self._kept.move_to_end(key)
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        answer: Answer = kept.get(make)
        return answer


def _run_of(loaded: Loaded) -> Run:
    if loaded.analysis is None:
        raise PptraceError(loaded.error)
    return Run(loaded.analysis, partial(load, loaded.paths, as_recorded=True))


def _with_tables(run: Run) -> Run:
    """The run, whose ops a dashboard may have let go for want of memory."""
    if run.report.steps and not run.analysis.num_ops:
        raise PptraceError(
            "this run has so many ops that the dashboard keeps its report alone; use pptrace whatif and pptrace compare, or look "
            "at fewer steps"
        )
    return run


def _require_small(run: Run, wishes: Wishes) -> None:
    plan = run.analysis.schedule.plan
    if plan is None:
        return
    microbatches = wishes.microbatches or plan.num_microbatches
    actions = 3 * plan.pp * microbatches * (wishes.chunks or plan.num_chunks)
    is_searched = any(name == ALL or (name in SCHEDULES and SCHEDULES[name].searches) for name in wishes.schedules)
    most = _MOST_SEARCHED if is_searched else _MOST_ACTIONS
    if actions > most:
        searched = " that is searched for" if is_searched else ""
        raise UsageError(
            f"{actions:,} actions of a plan{searched} are more than a page predicts; expected at most {most:,}; "
            "pptrace whatif has no limit"
        )


def sentence_of(error: PptraceError) -> str:
    """The line of an error that is about a run as a sentence, without the command that it names first."""
    text = str(error).removeprefix("whatif: ")
    return f"{text[:1].upper()}{text[1:]}."
