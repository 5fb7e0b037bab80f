"""Iterations of a script with several optimizers: after which of their steps each ends."""

from __future__ import annotations


class IterationRule:
    """Decides, from the order in which optimizers step, after which of them an iteration ends."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._last: int | None = None  # of the iteration before: the one to wait for
        self._latest: int | None = None
        self._ended = False

    @property
    def is_open(self) -> bool:
        """Return whether optimizers have stepped in an iteration whose end was not announced."""
        return self._latest is not None and not self._ended

    def before(self, optimizer: int) -> bool:
        """Return whether the iteration ends only now, since the optimizer it was to end with did not step in it."""
        if optimizer != self._first:
            return False
        late = not self._ended
        self._last = self._latest
        self._ended = False
        return late

    def after(self, optimizer: int) -> bool:
        """Return whether the iteration ends with this optimizer's step."""
        if self._first is None:
            self._first = self._last = optimizer
        self._latest = optimizer
        if optimizer == self._last and not self._ended:
            self._ended = True
            return True
        return False
