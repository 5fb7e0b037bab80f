"""Bytes that a rank of our GPT hands in to calls of tokens, by the routes that it counted.

For each forward and each backward of a layer, of n tokens with k routes each, tokens of h·e bytes, R rows that the rank's experts
compute (:mod:`pptrace.sizes.experts`):

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
from pptrace.axes import MESH_ORDER, WITHIN_STAGE, Axis, complete_order, expert_group_of
from pptrace.model.gpt_sizes import ExpertSizes, GptSizes, read_gpt_sizes
from pptrace.model.tables import Int64
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
        model, mesh = read_gpt_sizes(of_rank.get("model")), of_rank.get("mesh")
        if model is None or model.experts is None or not isinstance(mesh, Mapping):
            return None
        sizes = {axis: mesh.get(str(axis)) for axis in (*MESH_ORDER, Axis.EP, Axis.ETP)}
        order = complete_order(str(mesh.get("order", "")).split("-"))
        if order is None or not all(isinstance(size, int) and size > 0 for size in sizes.values()):
            return None
        return _sizes_of(model, model.experts, sizes, order)  # type: ignore[arg-type]
    return None


def _sizes_of(
    model: GptSizes, experts: ExpertSizes, sizes: Mapping[Axis, int], order: Sequence[Axis]
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
        4 * model.hidden * (experts.width // etp),
        tuple(sorted(groups)),
        tuple(sorted(sharing)),
        model.layers_per_stage,
    )


def passes_of(own: Slice, forward: Int64, num_forwards: int) -> Int64 | None:
    """Exchanges of each of a rank's forwards: one of it, one of its recomputation where there is one, and one of its backward;
    None where they are not all known. Without any backward (evaluation) there is none of any.

    Args:
        own: the rank's exchanges.
        forward: of each exchange the forward that it is of, −1: none that was counted.
        num_forwards: that the rank counted.
    """
    if not len(own) or (forward < 0).any() or (own["backward"] < 0).any():
        return None
    is_back, is_again = own["backward"] == 1, own["again"] == 1
    once, again, back = (
        np.bincount(forward[chosen], minlength=num_forwards) for chosen in (~is_back & ~is_again, is_again, is_back)
    )
    is_whole = (once == 1).all() and (again <= 1).all() and (back == back[0]).all() and back[0] <= 1
    return once + again + back if is_whole else None


def handed_in(
    passes: Int64 | None, rank: int, counts: Mapping[int, RankCounts], sizes: TokenSizes | None
) -> int | None:
    """The bytes of a rank's exchanges, by how many each forward has (:func:`passes_of`); None where those, counts or sizes are
    not known.
    """
    if passes is None or sizes is None or rank not in counts:
        return None
    rows = _rows(rank, counts, sizes)
    return None if rows is None else sizes.row_bytes * int((passes * rows).sum())


def expert_flops(passes: Int64 | None, counts: RankCounts | None, sizes: TokenSizes | None) -> int | None:
    """Floating-point operations of a rank's experts in the matrix products of all exchanges: a forward's, as many again where it
    is recomputed, and twice as many in backward; rows of padding too.
    """
    if passes is None or counts is None or sizes is None or (passes < _FORWARD_AND_BACKWARD).any():
        return None
    return sizes.row_flops * int(((passes + 1) * counts.rows).sum())


_FORWARD_AND_BACKWARD = 2


def _rows(rank: int, counts: Mapping[int, RankCounts], sizes: TokenSizes) -> Int64 | None:
    """The tokens, routes or slots that a rank hands in to both calls of each of its forwards."""
    of_rank = counts[rank]
    match sizes.dispatcher:
        case "all-to-all":
            arriving = _arriving(rank, counts, sizes)
            return None if arriving is None else of_rank.kept.sum(axis=1) + arriving
        case "padded":
            return 2 * of_rank.rows // sizes.etp
        case "all-gather":
            return 2 * (of_rank.num // np.maximum(of_rank.held, 1)) * sizes.num_tokens
    return None


def _arriving(rank: int, counts: Mapping[int, RankCounts], sizes: TokenSizes) -> Int64 | None:
    """The rows that come to a rank along ep in each of its forwards: what its experts compute, unless it shares them and computes
    those of others too.
    """
    own = counts[rank]
    if sizes.etp == 1:
        return own.rows
    members = [counts.get(each) for each in sizes.group_of(rank)]
    expert = np.arange(own.kept.shape[1])
    is_held = (expert >= own.first[:, np.newaxis]) & (expert < (own.first + own.held)[:, np.newaxis])
    total = np.zeros(len(own.step), dtype=np.int64)
    for each in members:
        if each is None or not _has_forwards_of(each, own):
            return None
        total += np.where(is_held, each.kept, 0).sum(axis=1)
    return total if members else None


def _has_forwards_of(one: RankCounts, other: RankCounts) -> bool:
    """Return whether two ranks counted forwards of the same layers in the same order."""
    is_like = np.array_equal(one.step, other.step) and np.array_equal(one.layer, other.layer)
    return is_like and one.kept.shape == other.kept.shape
