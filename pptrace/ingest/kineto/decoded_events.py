"""Accumulate the events of a Kineto file and its damage; parts of a file can be accumulated separately and joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pptrace.ingest.kineto.event_columns import Columns
from pptrace.ingest.kineto.event_types import Begin, Complete, Counter, Event, Instant, Metadata, OldInstant, text_of
from pptrace.ingest.kineto.memory_events import MemoryColumns

_OTHER_TYPES = frozenset({Instant, OldInstant, Counter, Metadata, Begin})
_LABELS = frozenset({"process_name", "process_labels"})
_MAX_LABELS = 10_000  # per file or worker


@dataclass(slots=True)
class Damage:
    """Counts of damage found while reading."""

    lost_events: int = 0
    repaired: int = 0
    early_end: bool = False


@dataclass(slots=True)
class Collected:
    """The complete events and memory instants of batches, and the labels of processes."""

    columns: Columns = field(default_factory=Columns)
    memory: MemoryColumns = field(default_factory=MemoryColumns)
    labels: set[str] = field(default_factory=set)
    num_begin: int = 0
    num_events: int = 0

    def add(self, events: Sequence[Event]) -> None:
        complete = [event for event in events if type(event) is Complete]
        self.num_events += len(events)
        self.columns.add(complete)
        if len(complete) < len(events) and not _OTHER_TYPES.isdisjoint(map(type, events)):
            self._add_others([event for event in events if type(event) in _OTHER_TYPES])

    def _add_others(self, events: Sequence[Event]) -> None:
        self.memory.add([event for event in events if isinstance(event, Instant)])
        self.num_begin += sum(isinstance(event, Begin) for event in events)
        for event in events:
            if isinstance(event, Metadata) and event.name in _LABELS and event.args and len(self.labels) < _MAX_LABELS:
                self.labels.add(text_of(event.args.name) or text_of(event.args.labels))

    def extend(self, other: Collected) -> None:
        """Move in the events of other batches of the same file, which ``other`` no longer has afterwards."""
        self.columns.extend(other.columns)
        self.memory.extend(other.memory)
        self.labels |= other.labels
        self.num_begin += other.num_begin
        self.num_events += other.num_events
