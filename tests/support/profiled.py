"""Ranges that PyTorch's profiler saw."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.autograd.profiler import profile


@dataclass(frozen=True, slots=True)
class Event:
    """A range in a trace; times in µs."""

    name: str
    start: float
    end: float

    def holds(self, other: Event) -> bool:
        return self.start <= other.start and other.end <= self.end


def rows_of(profiler: profile) -> list[dict[str, Any]]:
    """The ranges of a profile as its trace has them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]


def events_of(profiler: profile) -> list[Event]:
    return [Event(row["name"], row["ts"], row["ts"] + row["dur"]) for row in rows_of(profiler)]
