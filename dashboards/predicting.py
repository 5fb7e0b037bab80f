"""Predictions of a run, made one after the other in a thread while pages show those that there are."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from pptrace.analysis.whatif.answer import ranked
from pptrace.analysis.whatif.change import Change
from pptrace.analysis.whatif.result import Scenario
from pptrace.analysis.whatif.study import Study
from pptrace.api.whatif import Predictions, changes_of
from pptrace.api.wishes import Wishes
from pptrace.errors import PptraceError, mistake_of

_log = logging.getLogger(__name__)
_IDLE_S = 10.0
"""Time after which nothing more is predicted, s, if nobody asks."""


@dataclass(frozen=True, slots=True)
class Progress:
    """``done`` of ``num_changes`` are predicted (None: it is not known yet how many there are), ``predictions`` are of these."""

    done: int
    num_changes: int | None
    predictions: Predictions | None

    @property
    def is_over(self) -> bool:
        return self.done == self.num_changes


class Predicting:
    """Predicts what is wished for while somebody asks. Usable from any thread."""

    def __init__(self, make_study: Callable[[], Study], wishes: Wishes) -> None:
        self._make_study, self._wishes = make_study, wishes
        self._changed = threading.Condition()
        self._study: Study | None = None
        self._changes: list[tuple[str, Change]] = []
        self._scenarios: list[Scenario] = []
        self._error: PptraceError | None = None
        self._all: Progress | None = None
        self._is_running = self._is_paused = False
        self._last_call_s = 0.0

    def go_on(self) -> None:
        """Predict what is left, if anything is."""
        with self._changed:
            self._last_call_s, self._is_paused = monotonic(), False
            if not (self._is_running or self._has_ended):
                self._is_running = True
                threading.Thread(target=self._run, name="predictions", daemon=True).start()

    def pause(self) -> None:
        """Stop after the change that is being predicted."""
        with self._changed:
            self._is_paused = True

    def progress(self) -> Progress:
        """The predictions so far.

        Raises:
            PptraceError: it cannot be predicted.
        """
        with self._changed:
            self._last_call_s = monotonic()
            if self._error is not None:
                raise self._error
            if self._study is None:
                return Progress(0, None, None)
            if self._all is None:
                progress = self._progress_of(self._study)
                self._all = progress if self._has_ended else None
                return progress
            return self._all

    def wait(self, most_s: float) -> Progress:
        """Go on, and wait until all is predicted, or for so many seconds.

        Raises:
            PptraceError: it cannot be predicted.
        """
        ends_s = monotonic() + most_s
        while not self._has_ended and (left_s := ends_s - monotonic()) > 0:
            self.go_on()
            with self._changed:
                if self._is_running:
                    self._changed.wait(min(left_s, _IDLE_S / 2))
        return self.progress()

    @property
    def _has_ended(self) -> bool:
        """Return whether nothing is left to predict."""
        if self._error is not None:
            return True
        is_refused = self._study is not None and self._study.refusal is not None
        return self._study is not None and (is_refused or len(self._scenarios) == len(self._changes))

    def _progress_of(self, study: Study) -> Progress:
        scenarios = list(self._scenarios)
        done = len(scenarios) if study.refusal is None else len(self._changes)
        result = ranked(study, self._changes, scenarios)
        return Progress(done, len(self._changes), Predictions(study, self._changes, result))

    def _run(self) -> None:
        try:
            while self._is_wanted():
                self._predict_next()
        except PptraceError as err:
            self._end(err)
        except Exception as err:  # a page that says so serves its reader better than one that waits for ever
            _log.exception("predicting failed")
            self._end(PptraceError(mistake_of(err)))

    def _is_wanted(self) -> bool:
        """Return whether to predict another change; if not, the thread ends."""
        with self._changed:
            is_wanted = monotonic() - self._last_call_s <= _IDLE_S and not self._is_paused
            self._is_running = is_wanted and not self._has_ended
            self._changed.notify_all()
            return self._is_running

    def _predict_next(self) -> None:
        """Predict the next change; before the first one, find out which there are."""
        study = self._study
        if study is None:
            study = self._make_study()
            changes = changes_of(study, self._wishes)
            if study.refusal is None:
                study.today  # noqa: B018, the first who asks would wait for it
            with self._changed:
                self._study, self._changes = study, changes
            return
        name, change = self._changes[len(self._scenarios)]
        scenario = study.scenario(change, name)
        with self._changed:
            self._scenarios.append(scenario)

    def _end(self, error: PptraceError) -> None:
        with self._changed:
            self._error, self._is_running = error, False
            self._changed.notify_all()
