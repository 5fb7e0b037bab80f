"""Messages of a pipeline's ranks that are between no two ops: what goes one way and is never answered, as losses for the first
rank do, and what rings inside ops exchange along another axis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from pptrace.model.tables import Int64
from pptrace.model.wording import counted, listed
from pptrace.recognise.groups.topology import UNKNOWN
from pptrace.recognise.infer.evidence import Evidence, Messages
from pptrace.recognise.infer.match import OtherMessages
from pptrace.slices import distinct_of

_Link: TypeAlias = tuple[int, int, int]
"""Source, target and bytes of messages."""
_Links: TypeAlias = Mapping[_Link, int]
"""Numbers of messages of each."""


class Separated(Struct, frozen=True):
    """The evidence of the ranks without messages that are between no two ops; these ``others``, along an axis, and a line about
    each kind of them.
    """

    evidence: Mapping[int, Evidence]
    others: OtherMessages
    lines: tuple[str, ...]
    axis: str = "pp"


def separations(evidence: Mapping[int, Evidence]) -> Sequence[Separated]:
    """The ways to tell messages of no op from outputs and gradients, the likeliest first.

    Neighbours in a pipeline that trains send both ways. So what goes from one rank to another and never back is of no op. Between
    neighbours the same may hold for messages of one size, such as losses next to gradients; or each output has a tensor without
    a gradient. Nothing is left out where a message names no peer or, of these, no size, or where all go one way. A first
    stage's forward begins behind what came one way, or has it in its middle.
    """
    links = _links_of(evidence)
    if any(peer < 0 for link in links for peer in link[:2]):
        return (Separated(evidence, {}, ()),)
    pairs = {link[:2] for link in links}
    unanswered = [link for link in links if link[1::-1] not in pairs]
    if len(unanswered) == len(links):
        return (Separated(evidence, {}, ()),)
    lines = _lines("messages to ranks that never answer are of no op", links, unanswered)
    by_peer = _with_outsiders(evidence, _without(evidence, unanswered, lines))
    answered = {link[:2] for link in links if (link[1], link[0], link[2]) in links}
    sizes = [link for link in links if link[:2] in answered and (link[1], link[0], link[2]) not in links]
    if not sizes or min(link[2] for link in links) < 0:
        return _with_inputs_in_ops(by_peer)
    more = _lines("messages of a size that never comes back are of no op", links, sizes, f" of {sizes[0][2]} bytes")
    return _with_inputs_in_ops(
        by_peer, _with_outsiders(evidence, _without(evidence, [*unanswered, *sizes], (*lines, *more)))
    )


def along_one_axis(evidence: Mapping[int, Evidence]) -> Sequence[Separated]:
    """The ways in which messages between ranks that are equally far apart are a pipeline's and all others are inside ops, as
    those of rings of context parallelism; none where all are equally far apart, or a message names no peer.
    """
    links = _links_of(evidence)
    distances = {abs(link[0] - link[1]) for link in links if min(link[:2]) >= 0}
    if len(distances) < 2 or any(peer < 0 for link in links for peer in link[:2]):
        return ()
    ways = []
    for distance in sorted(distances):
        others = [link for link in links if abs(link[0] - link[1]) != distance]
        lines = _lines(f"messages between ranks that are not {distance} apart are inside ops", links, others)
        ways.append(replace(_with_inputs_in_ops(_without(evidence, others, lines))[-1], axis=UNKNOWN))
    return ways


def _with_inputs_in_ops(*ways: Separated) -> tuple[Separated, ...]:
    """The ways, and behind them the same where messages of no op part nothing."""
    return *ways, *(
        replace(
            way, evidence={rank: replace(of_rank, inputs=of_rank.inputs[:0]) for rank, of_rank in way.evidence.items()}
        )
        for way in ways
        if any(len(of_rank.inputs) for of_rank in way.evidence.values())
    )


def _with_outsiders(evidence: Mapping[int, Evidence], separated: Separated) -> Separated:
    """The same with a line about ranks all of whose messages are of no op."""
    outside = [rank for rank in sorted(evidence) if rank not in separated.evidence and len(evidence[rank].sends)]
    if not outside:
        return separated
    line = (
        f"ranks without an op that send to others: {listed(outside)}; of stages without a backward, as of frozen weights, "
        "forwards are not shown, and waiting for them counts as late begins of the next stage's ops"
    )
    return replace(separated, lines=(*separated.lines, line))


def _links_of(evidence: Mapping[int, Evidence]) -> _Links:
    """Messages that the ranks send, and those that they receive from ranks without evidence."""
    links: Counter[_Link] = Counter()
    for rank, of_rank in evidence.items():
        for kind, messages in (("send", of_rank.sends), ("recv", of_rank.recvs)):
            number, distinct = _distinct_links(rank, kind, messages)
            for link, count in zip(distinct, np.bincount(number).tolist(), strict=True):
                if kind == "send" or link[0] not in evidence:
                    links[link] += count
    return links


def _distinct_links(rank: int, kind: str, messages: Messages) -> tuple[Int64, list[_Link]]:
    """(index of the link of each message, the links)."""
    number, first = distinct_of([messages.peer, messages.num_bytes])
    ends = zip(messages.peer[first].tolist(), messages.num_bytes[first].tolist(), strict=True)
    return number, [(rank, peer, size) if kind == "send" else (peer, rank, size) for peer, size in ends]


def _lines(what: str, links: _Links, left_out: Sequence[_Link], each: str = "") -> tuple[str, ...]:
    """A line about messages that are left out; none without any."""
    counts: Counter[tuple[int, int]] = Counter()
    for link in left_out:
        counts[link[:2]] += links[link]
    if not counts:
        return ()
    (source, target), count = next(iter(counts.items()))
    more = f" and of {counted(len(counts) - 1, 'more pair')}" if len(counts) > 1 else ""
    return (f"{what}: {count}{each} from rank {source} to rank {target}{more}",)


def _without(evidence: Mapping[int, Evidence], links: Collection[_Link], lines: tuple[str, ...]) -> Separated:
    """The evidence without messages of some links; ranks of which none is left have no evidence."""
    if not links:
        return Separated(evidence, {}, ())
    result: dict[int, Evidence] = {}
    others: dict[int, dict[str, Messages]] = {}
    for rank, of_rank in evidence.items():
        parts: dict[str, Messages] = {}
        others[rank] = {}
        for kind, messages in (("send", of_rank.sends), ("recv", of_rank.recvs)):
            number, distinct = _distinct_links(rank, kind, messages)
            is_left_out = np.array([link in links for link in distinct], dtype=np.bool_)[number]
            parts[kind], others[rank][kind] = messages.where(~is_left_out), messages.where(is_left_out)
        if len(parts["send"]) or len(parts["recv"]):
            came = np.sort(np.concatenate((of_rank.inputs, others[rank]["recv"].ready_ns)))
            result[rank] = replace(of_rank, sends=parts["send"], recvs=parts["recv"], inputs=came)
    return Separated(result, others, lines)
