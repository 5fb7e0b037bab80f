"""Runs made to order as tables of ops: a plan replayed with noisy ops, some of which take longer in one run than in another."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from pptrace.schedule.actions import Kind
from pptrace.schedule.plan_table import PlanTable
from pptrace.schedule.registry import build
from pptrace.schedule.replay_table import replay_table
from tests.support.replayed import ops_of_steps

Factors = npt.NDArray[np.float64]

OP_NS = {Kind.F: 1_000_000, Kind.B: 2_000_000, Kind.I: 1_000_000, Kind.W: 1_000_000}
LATENCY_NS = 50_000
GAP_NS = 500_000
"""Time between two steps."""


@dataclass(frozen=True, slots=True)
class Noise:
    """Deviation of ops as shares of their length: ``ops`` of each by itself, ``steps`` of whole steps, which follow one another
    with ``correlation``; ``long_ops`` of them take three times as long, the first steps are slower by ``warm_up``, and steps get
    longer by ``drift`` from the first to the last, or shorter, as chance has it. ``runs`` is the deviation of whole runs.
    """

    ops: float = 0.03
    steps: float = 0.0
    correlation: float = 0.0
    long_ops: float = 0.0
    warm_up: float = 0.0
    drift: float = 0.0
    runs: float = 0.0

    def factors(self, num_steps: int, num_ops: int, rng: np.random.Generator) -> Factors:
        """The length of each op over its usual one, shape (steps, ops)."""
        factors: Factors = 1 + self.ops * rng.standard_normal((num_steps, num_ops))
        factors *= (1 + self.steps * _series(num_steps, self.correlation, rng))[:, np.newaxis]
        factors *= np.where(rng.random(factors.shape) < self.long_ops, 3.0, 1.0)
        factors *= 1 + self.warm_up * np.exp(-np.arange(num_steps))[:, np.newaxis]
        if self.drift:
            factors *= (1 + self.drift * rng.choice((-1, 1)) * np.linspace(-0.5, 0.5, num_steps))[:, np.newaxis]
        if self.runs:
            factors *= 1 + self.runs * rng.standard_normal()
        return np.maximum(factors, 0.1)


def _series(num_steps: int, correlation: float, rng: np.random.Generator) -> Factors:
    """A first-order autoregressive series of deviation 1."""
    values = rng.standard_normal(num_steps)
    for step in range(1, num_steps):
        values[step] = correlation * values[step - 1] + np.sqrt(1 - correlation**2) * values[step]
    return values


@dataclass(frozen=True, slots=True)
class NoisyRun:
    """A run of a schedule. ``slower`` is by how much all its ops are longer, ``slower_stage`` those of one stage alone."""

    noise: Noise = Noise()
    schedule: str = "1f1b"
    pp: int = 4
    microbatches: int = 8
    steps: int = 50
    slower: float = 0.0
    slower_stage: tuple[int, float] | None = None

    def ops(self, seed: int) -> pd.DataFrame:
        """The table of ops, as ``pptrace`` reads it."""
        table = build(self.schedule, self.pp, self.microbatches).table
        rng = np.random.default_rng(seed)
        usual = np.array([OP_NS[kind] for kind in Kind if kind in OP_NS])[_index_of_kind(table)]
        factors = self.noise.factors(self.steps, len(table), rng) * (1 + self.slower)
        if self.slower_stage is not None:
            stage, share = self.slower_stage
            factors[:, table.stage == stage] *= 1 + share
        replays = replay_table(table, np.rint(usual * factors).astype(np.int64), LATENCY_NS)
        return ops_of_steps(table, replays.start, replays.end, GAP_NS)

    def write(self, path: Path, seed: int) -> Path:
        """Write the table as CSV."""
        self.ops(seed).to_csv(path, index=False)
        return path


def _index_of_kind(table: PlanTable) -> npt.NDArray[np.int64]:
    """Index of each row's kind among those of ``OP_NS``."""
    index = np.full(len(Kind), -1)
    index[[kind.code for kind in OP_NS]] = np.arange(len(OP_NS))
    return index[table.kind]
