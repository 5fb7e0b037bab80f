"""Bytes that a rank of our GPT hands in to calls of tokens, by the routes that it counted.

For each forward and each backward of a layer, of n tokens with k routes each, tokens of h·e bytes, R rows that the rank's experts
compute (:mod:`pptrace.analysis.volume.experts`):

    all-to-all   the tokens' kept routes out, and the rows that came along ep back: R, where no ranks share an expert
    padded       E·C slots out and back, which are R / etp, since R has the slots of all sources
    all-gather   ep·n tokens out and back: the whole of what is gathered, and of what is scattered
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from pptrace.analysis.experts.counts import RankCounts
from pptrace.analysis.volume.expert_facts import ExpertFacts
from pptrace.analysis.volume.gpt_facts import GptFacts, read_gpt_facts
from pptrace.axes import MESH_ORDER, WITHIN_STAGE, Axis, complete_order, expert_group_of
from pptrace.slices import Slice

SHARING_AXES = (Axis.EP, Axis.ETP)


@dataclass(frozen=True, slots=True)
class TokenSizes:
    """Sizes of a run with experts: bytes of a token, the way of tokens to experts, the ranks that share each expert, the tokens
    that a rank routes in a forward, and floating-point operations of a row (``row_flops``) in the part of an expert that a rank
    has. ``ep_groups`` are the ranks that exchange tokens, ``sharing_groups`` those whose experts compute the same tokens: of ep
    and etp together. ``layers_per_stage`` are the layers of each stage of the model.
    """

    row_bytes: int
    dispatcher: str
    etp: int
    num_tokens: int = 0
    row_flops: int = 0
    ep_groups: tuple[tuple[int, ...], ...] = ()
    sharing_groups: tuple[tuple[int, ...], ...] = ()
    layers_per_stage: tuple[int, ...] = ()

    def group_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that a rank exchanges tokens with, itself included; () where they are not known."""
        return next((group for group in self.ep_groups if rank in group), ())


def sizes_of_run(facts: Iterable[Mapping[str, Any]]) -> TokenSizes | None:
    """The sizes of a run of our GPT, from the facts of its ranks; None of other runs."""
    for of_rank in facts:
        model, mesh = read_gpt_facts(of_rank.get("model")), of_rank.get("mesh")
        if model is None or model.experts is None or not isinstance(mesh, Mapping):
            return None
        sizes = {axis: mesh.get(str(axis)) for axis in (*MESH_ORDER, Axis.EP, Axis.ETP)}
        order = complete_order(str(mesh.get("order", "")).split("-"))
        if order is None or not all(isinstance(size, int) and size > 0 for size in sizes.values()):
            return None
        return _sizes_of(model, model.experts, sizes, order)  # type: ignore[arg-type]
    return None


def _sizes_of(
    model: GptFacts, experts: ExpertFacts, sizes: Mapping[Axis, int], order: Sequence[Axis]
) -> TokenSizes | None:
    ep, etp, in_stage = sizes[Axis.EP], sizes[Axis.ETP], {axis: sizes[axis] for axis in MESH_ORDER}
    if prod(sizes[axis] for axis in WITHIN_STAGE) % (ep * etp):
        return None
    world = range(prod(in_stage.values()))
    of_rank = {axis: [expert_group_of(rank, axis, in_stage, order, ep, etp) for rank in world] for axis in SHARING_AXES}
    groups = set(of_rank[Axis.EP])
    sharing = {tuple(sorted({each for member in group for each in of_rank[Axis.ETP][member]})) for group in groups}
    return TokenSizes(
        model.hidden * model.item_bytes,
        experts.dispatcher,
        etp,
        model.microbatch_size * model.sequence // (sizes[Axis.CP] * sizes[Axis.TP]),
        4 * model.hidden * (model.expert_width // etp),
        tuple(sorted(groups)),
        tuple(sorted(sharing)),
        tuple(model.layers_per_stage),
    )


def handed_in(own: Slice, rank: int, counts: Mapping[int, RankCounts], sizes: TokenSizes | None) -> int | None:
    """The bytes of a rank's exchanges; None where counts or sizes are not known, or passes are not as many for each forward."""
    of_rank = counts.get(rank)
    passes = passes_of(own, of_rank)
    if of_rank is None or sizes is None or passes is None:
        return None
    rows = _rows(rank, counts, sizes)
    return None if rows is None else passes * sizes.row_bytes * rows


def passes_of(own: Slice, counts: RankCounts | None) -> int | None:
    """Exchanges of each forward of a rank: there is one in it, in its recomputation and in its backward; None where they are not
    equally many.
    """
    forward = (own["backward"] == 0) & (own["again"] == 0)
    passes = len(own) / max(int(forward.sum()), 1)
    is_known = counts is not None and int(forward.sum()) == len(counts.step) and not (own["backward"] < 0).any()
    return int(passes) if is_known and passes == int(passes) else None


def expert_flops(own: Slice, counts: RankCounts | None, sizes: TokenSizes | None) -> int | None:
    """Floating-point operations of a rank's experts in the matrix products of all exchanges: a forward's, as many again where it
    is recomputed, and twice as many in backward; rows of padding too.
    """
    passes = passes_of(own, counts)
    if counts is None or sizes is None or passes is None or passes < _FORWARD_AND_BACKWARD:
        return None
    return (passes + 1) * sizes.row_flops * int(counts.rows.sum())


_FORWARD_AND_BACKWARD = 2


def _rows(rank: int, counts: Mapping[int, RankCounts], sizes: TokenSizes) -> int | None:
    """The tokens, routes or slots that a rank hands in to both calls of all its forwards."""
    of_rank = counts[rank]
    match sizes.dispatcher:
        case "all-to-all":
            arriving = _arriving(rank, counts, sizes)
            return None if arriving is None else int(of_rank.kept.sum()) + arriving
        case "padded":
            return 2 * int(of_rank.rows.sum()) // sizes.etp
        case "all-gather":
            return 2 * int((of_rank.num // np.maximum(of_rank.held, 1)).sum()) * sizes.num_tokens
    return None


def _arriving(rank: int, counts: Mapping[int, RankCounts], sizes: TokenSizes) -> int | None:
    """The rows that come to a rank along ep: what its experts compute, unless it shares them and computes those of others too."""
    own = counts[rank]
    if sizes.etp == 1:
        return int(own.rows.sum())
    group = sizes.group_of(rank)
    if not group or not set(group) <= set(counts):
        return None
    total = 0
    for layer in np.unique(own.layer).tolist():
        place = int(np.flatnonzero(own.layer == layer)[0])
        held = slice(int(own.first[place]), int(own.first[place] + own.held[place]))
        total += sum(int(counts[each].kept[counts[each].layer == layer, held].sum()) for each in group)
    return total
