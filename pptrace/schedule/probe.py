"""Causal probes: steps in which every op but the target's is delayed, which shows what a faster target would gain.

    probe  = target ":" epsilon            e.g.  F:0.2   stage=2:0.1
    target = "F" | "B" | "I" | "W" | "stage=" stage

An op of duration d that is no target's takes (1 + epsilon) · d. As a step's length scales with all of its durations, that is
(1 + epsilon) times the step whose target alone takes 1 / (1 + epsilon) of its time: the virtual speed-up of Coz (Curtsinger and
Berger, SOSP 2015, section 3), in proportion to each op. Probed steps alternate with others, and several probes take turns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pptrace.errors import UsageError
from pptrace.schedule.actions import Action, Kind

_TARGETS = (Kind.F, Kind.B, Kind.I, Kind.W)
_PROBE = re.compile(r"(?:([FBIW])|stage=(\d{1,9})):(\d+(?:\.\d+)?)", re.ASCII)
PROBES = "probes"
"""Fact of a rank: the probes of its run as texts, and its delay in each step, ns."""
MOST = 1.0
"""The largest epsilon: the target then seems to be twice as fast."""
_PERIOD = 2


@dataclass(frozen=True, slots=True)
class Probe:
    """``target`` is a kind of op or the number of a stage."""

    target: Kind | int
    epsilon: float

    def __str__(self) -> str:
        return f"{self.target_text}:{self.epsilon:g}"

    @property
    def target_text(self) -> str:
        return f"stage={self.target}" if isinstance(self.target, int) else str(self.target)

    def is_target(self, kind: Kind, stage: int) -> bool:
        """Return whether a simple op is of the target."""
        return stage == self.target if isinstance(self.target, int) else kind is self.target

    def delays(self, action: Action) -> bool:
        """Return whether an op is delayed; an overlapped pair is if neither half is of the target, and one of unknown stage (−1)
        where the target is no stage.
        """
        if isinstance(self.target, int) and action.stage < 0:
            return False
        return not any(self.is_target(half.kind, half.stage) for half in action.halves)

    def divides(self, action: Action) -> bool:
        """Return whether one half of an overlapped pair alone is of the target, so that no delay of the pair is right."""
        return len({self.is_target(half.kind, half.stage) for half in action.halves}) > 1


def parse_probe(text: str) -> Probe:
    """Read what ``--probe`` takes.

    Raises:
        UsageError: it is no probe, or its epsilon is out of range.
    """
    match = _PROBE.fullmatch(text)
    if match is None:
        raise UsageError(
            f"--probe {text}: expected F, B, I, W or stage=N, and a part to delay the rest by, such as F:0.2"
        )
    probe = Probe(Kind(match[1]) if match[1] else int(match[2]), float(match[3]))
    if not 0 < probe.epsilon <= MOST:
        raise UsageError(f"--probe {text}: expected a part above 0, and at most {MOST:g}, behind the colon")
    return probe


def parse_probes(texts: Iterable[str]) -> tuple[Probe, ...]:
    """Read several; each target once.

    Raises:
        UsageError: one is no probe, or two have the same target.
    """
    probes = tuple(map(parse_probe, texts))
    targets = [probe.target_text for probe in probes]
    twice = next((target for target in targets if targets.count(target) > 1), None)
    if twice is not None:
        raise UsageError(f"--probe {twice}: given twice; give each target one epsilon")
    return probes


def probe_of(probes: Sequence[Probe], step: int) -> Probe | None:
    """The probe of a step: none of the even ones, of the odd ones each in turn."""
    return probes[step // _PERIOD % len(probes)] if probes and step % _PERIOD else None


def steps_for(num_probes: int, times: int) -> int:
    """Steps from an even one on in which each probe comes so many times, between steps without."""
    return _PERIOD * num_probes * times + 1
