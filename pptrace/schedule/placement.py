"""Placement of stages on pipeline ranks: which stage is chunk c of rank r, of p ranks."""

from __future__ import annotations


def loop(chunk: int, rank: int, pp: int) -> int:
    """The stage under loop placement, as Megatron-LM's virtual pipeline has it: c·p + r."""
    return chunk * pp + rank


def zigzag(chunk: int, rank: int, pp: int) -> int:
    """The stage where every other chunk runs over the ranks in reverse; with two chunks a V: stages r and 2p − 1 − r."""
    return chunk * pp + (pp - 1 - rank if chunk % 2 else rank)
