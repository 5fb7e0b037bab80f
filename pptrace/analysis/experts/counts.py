"""Counts of routes that our runtime records (``instrument/expert_counts.py``), read from the facts of the ranks.

Bytes that a rank of our GPT hands in to calls of tokens, by the routes that it counted.

For each forward and each backward of a layer, of n tokens with k routes each, tokens of h·e bytes, R rows that the rank's experts
compute (:mod:`pptrace.sizes.experts`):

    all-to-all   the tokens' kept routes out, and the rows that came along ep back: R, where no ranks share an expert
    padded       E·C slots out and back, which are R / etp, since R has the slots of all sources
    all-gather   ep·n tokens out and back: the whole of what is gathered, and of what is scattered
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct, ValidationError, convert

from pptrace.analysis.experts import EXPERT_COUNTS
from pptrace.axes import MESH_ORDER, WITHIN_STAGE, Axis, complete_order, expert_group_of
from pptrace.model.predicted import ExpertSizes, GptSizes, read_gpt_sizes
from pptrace.model.tables import UNKNOWN, Floats, Int64
from pptrace.slices import Slice

Groups = Sequence[Sequence[int]]
"""The ranks that exchange tokens with each other."""


class RankCounts(Struct, frozen=True, eq=False):
    """Forwards of layers with experts on one rank, in order of time.

    ``step`` and ``layer`` (forwards,) say of what, ``rows`` how many rows the rank's experts computed in each; ``num`` is how
    many experts the layer has, ``first`` and ``held`` which first of them this rank holds, and how many. ``chosen`` and ``kept``
    (forwards, most experts) count the routes of the rank's tokens, before and after dropping; 0 beyond ``num``. ``tokens`` are
    how many these are, and of ``dropped`` ones no route was kept; −1 where that was not recorded.
    """

    top_k: int
    step: Int64
    layer: Int64
    rows: Int64
    num: Int64
    first: Int64
    held: Int64
    chosen: Int64
    kept: Int64
    tokens: Int64
    dropped: Int64

    def in_steps(self, steps: Sequence[int]) -> RankCounts:
        """The forwards of some steps."""
        inside = np.isin(self.step, np.asarray(steps, dtype=np.int64))
        return RankCounts(self.top_k, *(getattr(self, name)[inside] for name in self.__struct_fields__[1:]))


_Count = Annotated[int, Meta(ge=0, lt=2**53)]
_Line = Annotated[list[_Count], Meta(min_length=1)]


class _Recorded(Struct, frozen=True):
    """The counts as the runtime writes them; ``forwards`` have (step, layer, rows of each expert), ``kept`` as ``chosen``."""

    top_k: _Count
    num: int
    forwards: Annotated[list[tuple[_Count, _Count, _Line]], Meta(min_length=1)]
    chosen: list[_Line]
    first: _Count | list[_Count]
    kept: list[_Line] | None = None
    tokens: Any = None


def counts_of_ranks(
    facts: Mapping[int, Mapping[str, Any]], steps: Mapping[int, Sequence[int]]
) -> dict[int, RankCounts]:
    """The counts of each rank in its ``steps``; ranks without any are left out."""
    read = {rank: read_counts(of_rank.get(EXPERT_COUNTS)) for rank, of_rank in facts.items() if rank in steps}
    inside = {rank: counts.in_steps(steps[rank]) for rank, counts in read.items() if counts is not None}
    return {rank: counts for rank, counts in inside.items() if len(counts.step)}


def read_counts(fact: object) -> RankCounts | None:
    """The counts of one rank; None where it has none, or what stands there is damaged."""
    try:
        found = convert(fact, _Recorded)
    except ValidationError:
        return None
    num_forwards, chosen, kept = len(found.forwards), found.chosen, found.kept or found.chosen
    firsts = found.first if isinstance(found.first, list) else [found.first] * num_forwards
    sizes = [len(line) for line in chosen]
    if not len(chosen) == len(firsts) == num_forwards or [len(line) for line in kept] != sizes:
        return None
    are_alike = len(set(sizes)) == 1 or isinstance(found.first, list)
    if max(sizes) != found.num or not are_alike:
        return None
    step, layer, rows = zip(*found.forwards, strict=True)
    of_forwards = (step, layer, list(map(sum, rows)), sizes, firsts, list(map(len, rows)))
    columns = [np.array(column, dtype=np.int64) for column in of_forwards]
    columns += [_matrix(chosen), _matrix(kept), *_tokens(found.tokens, num_forwards)]
    return RankCounts(found.top_k, *columns)


def _tokens(pairs: object, num_forwards: int) -> Int64:
    """(2, forwards): tokens, and those of which no route was kept; −1 in traces that do not tell, or whose counts are damaged."""
    try:
        tokens: Int64 = np.array(convert(pairs, list[tuple[_Count, _Count]]), dtype=np.int64).reshape(-1, 2).T
    except ValidationError:
        tokens = np.zeros((2, 0), dtype=np.int64)
    is_whole = tokens.shape[1] == num_forwards and (tokens[0] >= tokens[1]).all()
    return tokens if is_whole else np.full((2, num_forwards), UNKNOWN)


def _matrix(lines: Sequence[Sequence[int]]) -> Int64:
    """The lines as rows, 0 beyond the end of the shorter ones."""
    table = np.zeros((len(lines), max(map(len, lines))), dtype=np.int64)
    for row, line in zip(table, lines, strict=True):
        row[: len(line)] = line
    return table


def rows_of_group(group: Sequence[int], counts: Mapping[int, RankCounts], layer: int | None = None) -> Int64 | None:
    """(members, forwards) rows of a group's experts, of one ``layer`` or of all; None where a member counted none, or other
    forwards.

    The members of a group run the same forwards in the same order: their calls are collectives.
    """
    if not set(group) <= set(counts):
        return None
    tables = []
    for rank in group:
        of_rank = counts[rank]
        chosen = np.arange(len(of_rank.step)) if layer is None else np.flatnonzero(of_rank.layer == layer)
        tables.append(np.stack((of_rank.step[chosen], of_rank.layer[chosen], of_rank.rows[chosen])))
    if any(not np.array_equal(table[:2], tables[0][:2]) for table in tables):
        return None
    return np.stack([table[2] for table in tables])


def ratios_of_layer(groups: Groups, counts: Mapping[int, RankCounts], layer: int | None) -> Floats | None:
    """Most rows of a rank over the mean of its group, in each forward of a layer that has rows; None where any are not known."""
    ratios = []
    for group in groups:
        rows = rows_of_group(group, counts, layer)
        if rows is None:
            return None
        mean = rows.mean(axis=0)
        ratios.append(rows.max(axis=0, initial=0)[mean > 0] / mean[mean > 0])
    return np.concatenate(ratios) if ratios and len(groups[0]) > 1 else None


def rows_and_ratios(groups: Groups, counts: Mapping[int, RankCounts]) -> dict[int, tuple[int, float | None]]:
    """Rank → (its rows in all forwards, these over the mean of its group); none where they are not known."""
    found: dict[int, tuple[int, float | None]] = {}
    for group in groups:
        rows = rows_of_group(group, counts) if len(group) > 1 else None
        if rows is None:
            continue
        of_ranks, mean = rows.sum(axis=1).tolist(), float(rows.sum() / len(group))
        found |= {rank: (own, own / mean if mean else None) for rank, own in zip(group, of_ranks, strict=True)}
    return found


SHARING_AXES = (Axis.EP, Axis.ETP)


class TokenSizes(Struct, frozen=True):
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
    first = next(iter(facts), {})
    model, mesh = read_gpt_sizes(first.get("model")), first.get("mesh")
    if model is None or model.experts is None or not isinstance(mesh, Mapping):
        return None
    sizes = {axis: mesh.get(str(axis)) for axis in (*MESH_ORDER, Axis.EP, Axis.ETP)}
    order = complete_order(str(mesh.get("order", "")).split("-"))
    if order is None or not all(isinstance(size, int) and size > 0 for size in sizes.values()):
        return None
    return _sizes_of(model, model.experts, sizes, order)  # type: ignore[arg-type]


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
        # they have to have counted forwards of the same layers in the same order
        if each is None or not (np.array_equal(each.step, own.step) and np.array_equal(each.layer, own.layer)):
            return None
        if each.kept.shape != own.kept.shape:
            return None
        total += np.where(is_held, each.kept, 0).sum(axis=1)
    return total if members else None
