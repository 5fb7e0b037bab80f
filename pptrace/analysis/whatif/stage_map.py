"""Another division of the model into stages: the part of each measured stage's work that every new stage has.

Layers of one stage cost alike. The first stage has the embedding besides its layers and the last one the head with its loss: what
they take beyond as many layers of the stages between them stays with the ends, wherever layers go. These two may have no layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from pptrace.model.tables import Floats, Int64

FEWEST_STAGES = 3
"""With fewer stages none is between the first and the last, and what the ends have besides their layers is not known."""


class StageMap(Struct, frozen=True, eq=False):
    """``shares`` (outputs, new stages, measured stages) are parts of the measured stages' work; they sum to 1 over the new ones.

    ``source`` is the measured stage of which each new stage has most layers.
    """

    shares: Floats
    source: Int64

    @property
    def is_identity(self) -> bool:
        """Return whether the division is the measured one."""
        return self.shares.shape[1] == self.shares.shape[2] and bool(
            (self.shares == np.eye(self.shares.shape[1])).all()
        )


def stage_map(
    measured: Sequence[float], wanted: Sequence[float], ends: Floats, weights: Floats | None = None
) -> StageMap:
    """Map measured stages to others.

    Args:
        measured: layers of each measured stage.
        wanted: layers of each new stage, as many in all.
        ends: as :func:`end_shares` has them.
        weights: what each layer takes, in any unit; None where all are alike.
    """
    new, old = (np.concatenate(([0.0], np.cumsum(part))) for part in (wanted, measured))
    overlap, counts = _overlap(new, old), np.array(measured, dtype=np.float64)
    parts = overlap
    if weights is not None:  # of time, rather than of layers
        before = np.concatenate(([0.0], np.cumsum(weights)))
        new, old = (np.interp(bounds, np.arange(len(before)), before) for bounds in (new, old))
        parts, counts = _overlap(new, old), np.diff(old)
    parts = np.divide(parts, counts, out=np.zeros(overlap.shape), where=counts > 0)
    shares = np.empty((ends.shape[1], *parts.shape))
    for output, (first, last) in enumerate(ends.T):
        kept = np.zeros(len(measured))
        kept[0], kept[-1] = first, kept[-1] + last
        shares[output] = parts * (1 - kept)
        shares[output, 0, 0] += first
        shares[output, -1, -1] += last
    source = overlap.argmax(axis=1)
    source[-1] = source[-1] if wanted[-1] else len(measured) - 1
    return StageMap(shares, source)


def _overlap(new: Floats, old: Floats) -> Floats:
    """The part that each stage between some bounds shares with each of those between others, shape (new stages, old stages)."""
    shared: Floats = np.minimum(new[1:, np.newaxis], old[1:]) - np.maximum(new[:-1, np.newaxis], old[:-1])
    return np.maximum(shared, 0.0)


def end_shares(typical: Floats, layers: Sequence[float]) -> Floats:
    """Part of the first and of the last stage's work that is not that of its layers, shape (2, outputs)."""
    ends, counts = typical[[0, -1]], np.array([layers[0], layers[-1]])[:, np.newaxis]
    if len(layers) < FEWEST_STAGES:
        return np.where(counts > 0, np.zeros(ends.shape), 1.0)
    of_layer = np.median(typical[1:-1] / np.array(layers[1:-1])[:, np.newaxis], axis=0)
    beyond = np.divide(ends - counts * of_layer, ends, out=np.zeros(ends.shape), where=ends > 0)
    shares: Floats = np.clip(beyond, 0.0, 1.0)
    return shares


def most_in_ends(typical: Floats, layers: Sequence[float]) -> Floats | None:
    """:func:`end_shares` of two stages whose layers all cost the same: what one takes beyond the other's is its embedding or
    head. None where there are not two.
    """
    if len(layers) != 2 or not all(layers):
        return None
    works = np.array(layers)[:, np.newaxis] * (typical / np.array(layers)[:, np.newaxis]).min(axis=0)
    shares: Floats = 1 - np.divide(works, typical, out=np.ones(typical.shape), where=typical > 0)
    return shares
