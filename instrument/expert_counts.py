"""Counts of the routes that each expert is given in each forward, recorded without a wait for the device.

Counts stay on the device, in tensors of one number for each expert, until the trace is written: only then are they copied, all at
once. What the host knows by then, the rows that this rank's experts compute, is kept as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

EXPERTS_KEY = "experts"
"""The key of a rank's facts that holds what :meth:`ExpertCounts.facts` makes."""


@dataclass(frozen=True, slots=True, eq=False)
class _Forward:
    """One forward of a layer, of which ``first`` is this rank's first expert: ``counts`` (2, experts) are the routes of its
    ``tokens``, as chosen and as kept, ``dropped`` (1,) counts tokens of which no route was kept, ``arrived`` rows that came from
    ranks of ep.
    """

    step: int
    layer: int
    first: int
    rows: Sequence[int]
    counts: Tensor
    tokens: int
    dropped: Tensor
    arrived: int


class ExpertCounts:
    """Counts of all recorded forwards of this rank, in the order in which they ran."""

    __slots__ = ("_forwards", "_lock", "_top_k")

    def __init__(self) -> None:
        self._forwards: list[_Forward] = []
        self._lock = threading.Lock()
        self._top_k = 0

    def add(
        self,
        step: int,
        layer: int,
        chosen: Tensor,
        kept: Tensor,
        num_experts: int,
        held: tuple[int, Sequence[int]],
        arrived: int | None = None,
    ) -> None:
        """Add a forward.

        Args:
            step: of the training.
            layer: of the model.
            chosen: (…, k) expert ids of this rank's tokens.
            kept: the same, ``num_experts`` where a route was dropped; may be ``chosen`` itself.
            num_experts: of the layer, on all ranks.
            held: the first expert of this rank, and how many rows each of its experts computes.
            arrived: rows that came along ep; None: all that the experts compute.
        """
        first, rows = held
        top_k = chosen.shape[-1]
        counts = torch.stack([counts_of(routes.flatten(), num_experts + 1)[:num_experts] for routes in (chosen, kept)])
        dropped = counts.new_zeros(1) if kept is chosen else (kept == num_experts).all(-1).sum().view(1)
        num_arrived = sum(rows) if arrived is None else arrived
        forward = _Forward(step, layer, first, list(rows), counts, chosen.numel() // top_k, dropped, num_arrived)
        with self._lock:
            self._top_k = top_k
            self._forwards.append(forward)

    def extend(self, others: ExpertCounts) -> None:
        """Add all forwards that ``others`` has."""
        with self._lock:
            self._top_k = others._top_k or self._top_k
            self._forwards += others._forwards

    def tensors(self) -> list[Tensor]:
        """All tensors that hold counts."""
        with self._lock:
            return [tensor for forward in self._forwards for tensor in (forward.counts, forward.dropped)]

    def facts(self) -> dict[str, object] | None:
        """All counts as JSON values, None without any. Waits for the device.

        ``forwards`` has [step, layer, rows of each expert of this rank], ``chosen`` and ``kept`` a list for each forward with the
        routes of this rank's tokens to each expert, before and after dropping; ``kept`` is empty where nothing was dropped.
        ``tokens`` has [tokens, those of which no route was kept] of each forward.
        ``num`` is the number of experts of a layer and ``first`` this rank's first of them; where layers differ (pyramids),
        ``num`` is the largest and ``first`` a list by forward. ``arrived`` has the rows that came along ep in each forward, where
        ranks share each expert and compute those that came to others too.
        """
        with self._lock:
            forwards = list(self._forwards)
        if not forwards:
            return None
        sizes = [forward.counts.shape[1] for forward in forwards]
        chosen, kept = torch.cat([forward.counts for forward in forwards], 1).cpu().unbind()
        dropped = torch.cat([forward.dropped for forward in forwards]).tolist()
        firsts, arrived = [forward.first for forward in forwards], [forward.arrived for forward in forwards]
        return {
            "num": max(sizes),
            "top_k": self._top_k,
            "first": firsts[0] if len(set(zip(firsts, sizes, strict=True))) == 1 else firsts,
            "forwards": [[forward.step, forward.layer, list(forward.rows)] for forward in forwards],
            "chosen": [of_forward.tolist() for of_forward in torch.split(chosen, sizes)],
            "kept": []
            if torch.equal(chosen, kept)
            else [of_forward.tolist() for of_forward in torch.split(kept, sizes)],
            "tokens": [[forward.tokens, num] for forward, num in zip(forwards, dropped, strict=True)],
            **({} if arrived == [sum(forward.rows) for forward in forwards] else {"arrived": arrived}),
        }


def counts_of(routes: Tensor, num: int) -> Tensor:
    """Count each of 0 … num − 1: (num,) int64. ``bincount`` would wait for the device, to know how long its result is."""
    return routes.new_zeros(num).scatter_add_(0, routes, torch.ones_like(routes))
