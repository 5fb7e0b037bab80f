"""Ranks that form a pipeline, and their order: by the peers of messages, else the only possible order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations

import numpy as np

from pptrace.model.wording import listed
from pptrace.recognise.infer.match_chain import match_chain
from pptrace.recognise.infer.pipeline_match import PipelineMatch
from pptrace.recognise.infer.rank_order import Evidence, MismatchError

MOST_PERMUTED = 5
"""Pipelines of up to so many ranks are tried in every order, where their messages name no peers."""


def match_pipeline(evidence: Mapping[int, Evidence], order: Sequence[int]) -> PipelineMatch:
    """The ranks as a pipeline, in this order, in the opposite one, or, if nothing names their peers, in the only one that they
    can have.

    Raises:
        MismatchError: they are none, or may be several; the reason is that against ``order``.
    """
    first = [evidence[rank] for rank in order]
    matches: list[PipelineMatch] = []
    problems: list[MismatchError] = []
    for ranks in (first, first[::-1]):
        try:
            matches.append(match_chain(ranks))
        except MismatchError as err:
            problems.append(err)
    named = any((rank_evidence.peer >= 0).any() for rank in first for rank_evidence in (rank.sends, rank.recvs))
    if not matches and not named and 2 < len(order) <= MOST_PERMUTED:
        matches = list(_in_any_order(first))
    if len(matches) > 1:
        raise MismatchError(f"ranks {listed(order)} may be a pipeline in {len(matches)} orders")
    if not matches:
        raise problems[0]
    return matches[0]


def _in_any_order(evidence: Sequence[Evidence]) -> Iterator[PipelineMatch]:
    for ranks in permutations(evidence):
        try:
            yield match_chain(ranks)
        except MismatchError:
            continue


def chains_by_peers(evidence: Mapping[int, Evidence]) -> list[tuple[int, ...]]:
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
