"""Probes as the ranks of a run recorded them: which steps had one, and how long each rank was delayed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pptrace.errors import UsageError
from pptrace.schedule.probe import PROBES, Probe, parse_probes, probe_of
from pptrace.timeline.windows import StepWindow

Windows = tuple[StepWindow, ...]


@dataclass(frozen=True, slots=True)
class RecordedProbes:
    """``delays_ns`` is how long each rank was delayed in each step, by rank and step; ``on_device``: ops ran where none is."""

    probes: tuple[Probe, ...]
    delays_ns: Mapping[int, Mapping[int, int]]
    on_device: bool

    def divided(self, windows: Windows) -> tuple[Windows, Windows]:
        """The windows of steps without a probe, and those of steps with one."""
        probed = self.steps_of(window.step for window in windows)
        plain = tuple(window for window in windows if window.step not in probed)
        return plain, tuple(window for window in windows if window.step in probed)

    def steps_of(self, steps: Iterable[int]) -> frozenset[int]:
        """The steps, of some, that had a probe."""
        return frozenset(int(step) for step in set(steps) if probe_of(self.probes, step) is not None)


def read_probes(facts: Mapping[int, Mapping[str, Any]]) -> RecordedProbes | None:
    """The probes of a run, from the facts of its ranks; None where no step had one, or ranks disagree."""
    recorded = {rank: read for rank, of_rank in facts.items() if (read := _read(of_rank.get(PROBES))) is not None}
    every = {probes for probes, _ in recorded.values()}
    if len(every) != 1:
        return None
    on_device = any(facts[rank][PROBES].get("on_device") for rank in recorded)
    return RecordedProbes(every.pop(), {rank: delays for rank, (_, delays) in recorded.items()}, on_device)


def _read(fact: object) -> tuple[tuple[Probe, ...], dict[int, int]] | None:
    if not isinstance(fact, Mapping):
        return None
    try:
        probes = parse_probes(map(str, fact.get("probes") or ()))
        delays = {int(step): int(ns) for step, ns in dict(fact.get("delays_ns") or {}).items()}
    except (TypeError, ValueError, UsageError):
        return None
    return (probes, delays) if probes else None
