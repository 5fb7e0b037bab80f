"""Observers of calls that write down what happens."""

from __future__ import annotations

from abc import ABC, abstractmethod

from instrument.adapters.calls import Call


class Noting(ABC):
    """Observer that notes every event in one way."""

    @abstractmethod
    def note(self, event: str, call: Call) -> None: ...

    def posted(self, call: Call) -> None:
        self.note("posted", call)

    def returned(self, call: Call) -> None:
        self.note("returned", call)

    def waiting(self, call: Call) -> None:
        self.note("waiting", call)

    def completed(self, call: Call) -> None:
        self.note("completed", call)

    def failed(self, call: Call) -> None:
        self.note("failed", call)
