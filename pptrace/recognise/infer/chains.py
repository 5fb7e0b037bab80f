"""Ranks that form pipelines, and their order: by the peers of messages, else the only possible order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import permutations

import numpy as np

from pptrace.model.wording import counted, listed
from pptrace.recognise.groups.axes import Groups
from pptrace.recognise.infer.match import Match
from pptrace.recognise.infer.match_chain import match_chain
from pptrace.recognise.infer.rank_order import Evidence, MismatchError, outcome_of

MOST_PERMUTED = 5
"""Pipelines of up to so many ranks are tried in every order, where their messages name no peers."""


def find_pipelines(evidence: Mapping[int, Evidence], groups: Groups, num_ranks: int) -> list[Match]:
    """The pipelines that all of these ranks form, of ``num_ranks`` that have a trace.

    Raises:
        MismatchError: they form none.
    """
    chains = _chains_by_peers(evidence)
    if not chains and groups.pipelines and {r for p in groups.pipelines for r in p} == set(evidence):
        chains = list(groups.pipelines)
    if chains:
        return [_match_pipeline(evidence, chain) for chain in chains]
    ranks = sorted(evidence)
    absent = max(num_ranks, groups.world_size or 0) - len(ranks)
    if absent:
        raise MismatchError(
            f"{counted(absent, 'rank')} of the run show no messages, and those of the others name no peers"
        )
    one = outcome_of(lambda: _match_pipeline(evidence, ranks))
    if not isinstance(one, MismatchError):
        return [one]
    replicas = [pipelines for chains in _replicas(ranks) if (pipelines := _match_all(evidence, chains)) is not None]
    if len(replicas) != 1:
        raise one
    return replicas[0]


def _replicas(ranks: Sequence[int]) -> Iterator[list[list[int]]]:
    """The ways to read the ranks as several pipelines of equal length, next to each other or one within the other."""
    size = len(ranks)
    for length in (length for length in range(2, size // 2 + 1) if size % length == 0):
        count = size // length
        yield [list(ranks[index * length : (index + 1) * length]) for index in range(count)]
        yield [list(ranks[index::count]) for index in range(count)]


def _match_all(evidence: Mapping[int, Evidence], chains: Sequence[Sequence[int]]) -> list[Match] | None:
    pipelines = outcome_of(lambda: [_match_pipeline(evidence, chain) for chain in chains])
    return None if isinstance(pipelines, MismatchError) else pipelines


def _match_pipeline(evidence: Mapping[int, Evidence], order: Sequence[int]) -> Match:
    """The ranks as a pipeline, in this order, in the opposite one, or, if nothing names their peers, in the only one that they
    can have.

    Raises:
        MismatchError: they are none, or may be several; the reason is that against ``order``.
    """
    first = [evidence[rank] for rank in order]
    outcomes = [outcome_of(partial(match_chain, ranks)) for ranks in (first, first[::-1])]
    named = any((messages.peer >= 0).any() for rank in first for messages in (rank.sends, rank.recvs))
    if not any(isinstance(match, Match) for match in outcomes) and not named and 2 < len(order) <= MOST_PERMUTED:
        outcomes += [outcome_of(partial(match_chain, ranks)) for ranks in permutations(first)]
    matches = [match for match in outcomes if isinstance(match, Match)]
    if len(matches) > 1:
        raise MismatchError(f"ranks {listed(order)} may be a pipeline in {len(matches)} orders")
    if not matches and isinstance(outcomes[0], MismatchError):
        raise outcomes[0]
    return matches[0]


def _chains_by_peers(evidence: Mapping[int, Evidence]) -> list[tuple[int, ...]]:
    """The chains that messages form, each from its end with the lower rank; [] where a message names no peer.

    Raises:
        MismatchError: they form no chains, or a rank of one has no trace.
    """
    peers: dict[int, set[int]] = {}
    for rank, rank_evidence in evidence.items():
        known_peers = np.concatenate((rank_evidence.sends.peer, rank_evidence.recvs.peer))
        if (known_peers < 0).any():
            return []
        peers[rank] = set(known_peers.tolist())
    absent = sorted(set().union(*peers.values()) - set(evidence))
    if absent:
        raise MismatchError(f"rank {absent[0]}, which others exchange messages with, has no trace with operators")
    chains = []
    remaining = set(peers)
    while remaining:
        chain_ends = sorted(rank for rank in remaining if len(peers[rank]) == 1)
        if not chain_ends:
            rank = min(remaining)
            raise MismatchError(
                f"the messages of rank {rank} and its peers {listed(sorted(peers[rank]))} form no chain"
            )
        chain = [chain_ends[0]]
        while following := peers[chain[-1]] - set(chain):
            if len(peers[chain[-1]]) > 2 or len(following) > 1:
                raise MismatchError(
                    f"rank {chain[-1]} exchanges messages with ranks {listed(sorted(peers[chain[-1]]))}: no chain"
                )
            chain.append(following.pop())
        chains.append(tuple(chain))
        remaining -= set(chain)
    return chains
