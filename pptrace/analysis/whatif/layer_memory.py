"""Memory of the ranks of a pipeline by the layers that they have: from it the peaks under another split are predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pptrace.analysis.whatif.memory import RankUse
from pptrace.analysis.whatif.stage_map import Floats, end_shares
from pptrace.model.tables import Int64
from pptrace.schedule.plan import Plan
from pptrace.simulator import peak_inflight


@dataclass(frozen=True, slots=True, eq=False)
class LayerMemory:
    """Bytes of each layer, the embedding counted with the first one and the head with the last.

    ``base`` is what each rank has whatever its layers, ``state`` is there before a step (weights, optimizer), and one microbatch
    keeps ``activations`` from its forward to its backward.
    """

    base: Floats
    state: Floats
    activations: Floats

    def peaks(self, rank: int, begins: Int64, end: int, activations: float) -> Floats:
        """The rank's peak with the layers from each of ``begins`` to before ``end``, and so many activations, bytes."""
        state, kept = (np.concatenate(([0.0], np.cumsum(part))) for part in (self.state, self.activations))
        peaks: Floats = self.base[rank] + state[end] - state[begins] + activations * (kept[end] - kept[begins])
        return peaks

    def peaks_of(self, plan: Plan, split: Sequence[float], activations: Sequence[float]) -> Floats:
        """The peak of each rank of a plan whose stages have the layers of a split; ``activations`` are those of one stage that
        each rank holds, which are shared out over its stages.
        """
        bounds = np.concatenate(([0.0], np.cumsum(split)))
        state, kept = (
            np.diff(np.interp(bounds, np.arange(len(part) + 1), np.concatenate(([0.0], np.cumsum(part)))))
            for part in (self.state, self.activations)
        )
        peaks = self.base.copy()
        for stage, rank in enumerate(plan.placement):
            at = stage % plan.chain_length
            peaks[rank] += state[at] + activations[rank] / plan.num_chunks * kept[at]
        return peaks


def layer_memory(uses: Mapping[int, RankUse], layers: Sequence[int] | None) -> LayerMemory | None:
    """The memory of layers from that of ranks with one stage each; None where it is not known which part of it is of layers.

    Layers of a rank are alike; of three ranks or more, what the ends have beyond as many layers of those between them is the
    embedding's and the head's.
    """
    in_order = [uses[rank] for rank in sorted(uses)]
    bases = [use.base for use in in_order if use.base is not None]
    if layers is None or len(in_order) != len(layers) or len(bases) != len(layers):
        return None
    base = np.array(bases)
    whole = np.array([(use.start - use.base, use.per_activation) for use in in_order if use.base is not None])
    ends, counts = end_shares(whole, layers), np.array(layers)
    by_layer = []
    for column in range(whole.shape[1]):
        of_ends = np.zeros(len(layers))
        of_ends[0] = ends[0, column] * whole[0, column]
        of_ends[-1] += ends[1, column] * whole[-1, column]
        of_layers = np.repeat((whole[:, column] - of_ends) / counts, counts)
        of_layers[0] += of_ends[0]
        of_layers[-1] += of_ends[-1]
        by_layer.append(of_layers)
    return LayerMemory(base, *by_layer)


def peak_of_layers(memory: LayerMemory, plan: Plan, layers: Sequence[float], microbatch_size: float) -> int:
    """The largest peak of a rank with a plan and so many layers in each stage of the model, bytes."""
    held = [microbatch_size * count for count in peak_inflight(plan)]
    return round(float(memory.peaks_of(plan, layers, held).max()))


@dataclass(frozen=True, slots=True, eq=False)
class MemoryLimit:
    """The most bytes that a rank may have, with so many ``activations`` in flight on each."""

    memory: LayerMemory
    most: int
    activations: Sequence[float]

    def fits(self, rank: int, begins: Int64, end: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return whether the rank has room for the layers from each of ``begins`` to before ``end``."""
        fits: np.ndarray[tuple[int], np.dtype[np.bool_]] = (
            self.memory.peaks(rank, begins, end, self.activations[rank]) <= self.most
        )
        return fits
