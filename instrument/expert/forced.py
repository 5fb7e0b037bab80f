"""Routes that are given instead of chosen, for measurements and tests; weights and gradients stay the router's."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from instrument.expert.noise import TokenIds, Use
from pptrace.errors import UsageError
from pptrace.sizes.expert_options import ExpertOptions, Forced


def forced_routes(tokens: TokenIds, options: ExpertOptions) -> Tensor:
    """The experts of tokens that :class:`Forced` gives: (sequences, tokens, k) int64."""
    sequences, positions = tokens.sequences, tokens.positions
    match options.forced:
        case Forced.RANDOM | Forced.BIASED:
            scores = tokens.gumbel(Use.ROUTES, options.num)
            if options.forced is Forced.BIASED:
                scores = scores - torch.arange(1, options.num + 1, device=positions.device).log()
            order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
            return order[..., : options.top_k].contiguous()
        case Forced.REPLAYED:
            return _replayed(tokens, options)
        case _:
            return _in_turn(positions, options).expand(len(sequences), -1, -1).contiguous()


def _in_turn(positions: Tensor, options: ExpertOptions) -> Tensor:
    choices = torch.arange(options.top_k, device=positions.device)
    if options.forced is Forced.BALANCED:
        return ((positions.unsqueeze(1) * options.top_k + choices) % options.num).unsqueeze(0)
    others = max(1, options.num - 1)
    in_turn = 1 + (positions.unsqueeze(1) * (options.top_k - 1) + choices - 1) % others
    return in_turn.masked_fill(choices == 0, 0).unsqueeze(0)


def _replayed(tokens: TokenIds, options: ExpertOptions) -> Tensor:
    """Routes of a table, which begins again after its last step and its last sequence."""
    assert options.routes is not None
    table = read_routes(options.routes)
    of_layer = table[tokens.key.step % len(table), tokens.key.layer // options.every]
    sequences = (tokens.sequences % of_layer.shape[0]).unsqueeze(1).cpu()
    return of_layer[sequences, tokens.positions.cpu()].to(torch.int64).to(tokens.positions.device)


@lru_cache(maxsize=4)
def read_routes(path: str) -> Tensor:
    """The table of routes in a file of numpy: (steps, layers with experts, sequences, positions, k) expert ids.

    Raises:
        UsageError: no such file, or none of five dimensions of integers that name experts.
    """
    try:
        with Path(path).open("rb") as file:
            table = np.lib.format.read_array(file, allow_pickle=False)
    except (OSError, ValueError, MemoryError) as err:
        raise UsageError(
            f"routes cannot be read from {path}: {err}; expected an array that numpy saved (.npy)"
        ) from None
    if table.ndim != 5 or table.dtype.kind not in "iu" or 0 in table.shape:
        raise UsageError(
            f"{path} has an array of shape {table.shape} of {table.dtype}; expected integers by step, layer with experts, "
            "sequence, position and choice"
        )
    narrow = table.astype(np.int32)
    if (narrow != table).any():
        raise UsageError(f"{path} has routes to experts {table.min()} to {table.max()}, which no layer has")
    return torch.from_numpy(narrow)


def check_routes(options: ExpertOptions, layers: int, sequence: int) -> None:
    """Refuse a table of routes that does not fit a model, before any process group is made.

    Args:
        options: of the model.
        layers: of the model, with experts or without.
        sequence: tokens of a sequence.

    Raises:
        UsageError: the table has other layers, positions or choices, experts that the model lacks, or a token's expert twice.
    """
    if options.routes is None:
        return
    table = read_routes(options.routes)
    with_experts = [layer for layer in range(layers) if options.in_layer(layer)]
    found, wanted = (table.shape[1], *table.shape[3:]), (len(with_experts), sequence, options.top_k)
    if found != wanted:
        raise UsageError(
            f"{options.routes} has routes of {found[0]} layers with experts, {found[1]} positions and {found[2]} choices; the "
            f"model has {wanted[0]}, {wanted[1]} and {wanted[2]}"
        )
    for index, layer in enumerate(with_experts):
        num = options.of_layer(layer).num
        least, most = (int(bound) for bound in torch.aminmax(table[:, index]))
        if least < 0 or most >= num:
            raise UsageError(
                f"{options.routes} routes tokens of layer {layer} to experts {least} to {most}; the layer has 0 to {num - 1}"
            )
    in_order = table.sort(dim=-1).values
    if (in_order[..., 1:] == in_order[..., :-1]).any():
        raise UsageError(f"{options.routes} routes a token to an expert twice; name different experts for each token")
