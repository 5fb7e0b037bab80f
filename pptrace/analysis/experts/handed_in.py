"""Bytes that a rank of our GPT hands in to calls of tokens, by the routes that it counted.

For each forward and each backward of a layer, of n tokens with k routes each, tokens of h·e bytes, R rows that the rank's experts
compute (:mod:`pptrace.analysis.volume.experts`):

    all-to-all   the tokens' kept routes out, and R rows back
    padded       E·C slots out and back, which are R / etp, since R has the slots of all sources
    all-gather   ep·n tokens out and back: the whole of what is gathered, and of what is scattered
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pptrace.analysis.experts.counts import RankCounts
from pptrace.analysis.volume.gpt_facts import ITEM_BYTES
from pptrace.slices import Slice

_ALL_TO_ALL = "all-to-all"


@dataclass(frozen=True, slots=True)
class TokenSizes:
    """Bytes of a token, the way of tokens to experts, and the ranks that share each expert."""

    row_bytes: int
    dispatcher: str
    etp: int


def sizes_of_run(facts: Iterable[Mapping[str, Any]]) -> TokenSizes | None:
    """The sizes of a run of our GPT, from the facts of its ranks; None of other runs."""
    for of_rank in facts:
        model, mesh = of_rank.get("model"), of_rank.get("mesh")
        if not isinstance(model, Mapping) or model.get("name") != "gpt" or not isinstance(mesh, Mapping):
            return None
        hidden, item_bytes = model.get("hidden"), ITEM_BYTES.get(str(model.get("dtype")))
        dispatcher, etp = model.get("experts_dispatcher", _ALL_TO_ALL), mesh.get("etp", 1)
        if not isinstance(hidden, int) or item_bytes is None or not isinstance(etp, int) or etp < 1:
            return None
        return TokenSizes(hidden * item_bytes, str(dispatcher), etp)
    return None


def handed_in(own: Slice, counts: RankCounts | None, sizes: TokenSizes | None) -> int | None:
    """The bytes of a rank's exchanges; None where counts or sizes are not known, or passes are not as many for each forward."""
    if counts is None or sizes is None:
        return None
    forward = (own["backward"] == 0) & (own["again"] == 0)
    passes = len(own) / max(int(forward.sum()), 1)
    if passes != int(passes) or int(forward.sum()) != len(counts.step) or (own["backward"] < 0).any():
        return None
    rows = _rows(counts, sizes)
    return None if rows is None else int(passes) * sizes.row_bytes * rows


def _rows(counts: RankCounts, sizes: TokenSizes) -> int | None:
    """The tokens, routes or slots that a rank hands in to both calls of all its forwards."""
    match sizes.dispatcher:
        case "all-to-all":
            return int(counts.kept.sum() + counts.rows.sum())
        case "padded":
            return 2 * int(counts.rows.sum()) // sizes.etp
        case "all-gather":
            ep = counts.num // np.maximum(counts.held, 1)
            return 2 * int((ep * (counts.chosen.sum(axis=1) // counts.top_k)).sum())
    return None
