"""Costs where nothing straggles: what its kind typically costs in all steps, on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from pptrace.analysis.matrix.step_matrix import RECEIVES, StepMatrix
from pptrace.analysis.stragglers.outside import Chains, is_collective
from pptrace.model.tables import Int64
from pptrace.schedule.actions import Kind

_NAMES = tuple(str(kind) for kind in Kind)


@dataclass(frozen=True, slots=True)
class Typical:
    """Cost by kind, ns: of what computes the mean; of messages and collectives the median, as the study has it.

    A kind of message that was never matched is left out: it costs nothing in any replay.
    """

    of_kind: Mapping[str, int]

    @classmethod
    def of(cls, plans: Sequence[StepMatrix], chains: Sequence[Chains]) -> Typical:
        """Typical costs of all plans' steps, and of what is done before and after them."""
        times: dict[str, list[Int64]] = {}
        for name, part in chain.from_iterable((*map(_times_of_ops, plans), *map(_times_of_items, chains))):
            times.setdefault(name, []).append(part)
        typical = {}
        for name, parts in times.items():
            if count := sum(part.size for part in parts):
                total = sum(int(part.sum(dtype=np.int64)) for part in parts)
                is_moved = is_collective(name) or name in (_NAMES[code] for code in RECEIVES)
                middle = np.median(np.concatenate([part.ravel() for part in parts])) if is_moved else total / count
                typical[name] = round(float(middle))
        return cls(typical)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds: ops, messages, then all else."""
        first = [name for name in _NAMES if name in self.of_kind]
        return (*first, *sorted(set(self.of_kind) - set(first)))

    def durations(self, costs: StepMatrix) -> Int64:
        """The typical cost of each row of a plan, ns."""
        return self._by_code()[costs.table.kind]

    def transfers(self, costs: StepMatrix) -> Int64:
        """The typical cost of each message of a plan, ns."""
        return self._by_code()[costs.message_kind]

    def work(self, chains: Chains) -> Int64:
        """The typical cost of each item of chains, ns."""
        return np.array([self.of_kind[name] for name in chains.name.tolist()], dtype=np.int64)

    def _by_code(self) -> Int64:
        return np.array([self.of_kind.get(name, 0) for name in _NAMES], dtype=np.int64)


def _times_of_ops(costs: StepMatrix) -> Iterator[tuple[str, Int64]]:
    """(kind, what each op or matched message of it cost) in some steps, ns."""
    for code in np.unique(costs.table.kind).tolist():
        yield _NAMES[code], costs.durations[:, costs.table.kind == code]
    for code in RECEIVES:
        transfers = costs.transfers[:, costs.message_kind == code]
        yield _NAMES[code], transfers[transfers >= 0]


def _times_of_items(chains: Chains) -> Iterator[tuple[str, Int64]]:
    """(kind, what each item of it cost) in some steps, ns."""
    for name in np.unique(chains.name).tolist():
        yield name, chains.work[:, chains.name == name]
