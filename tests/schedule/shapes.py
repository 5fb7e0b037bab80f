"""Legal shapes, and plans of them."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import strategies as st

from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import build

MAX_PP, MAX_CHUNKS = 8, 4


def one_chunk_shapes() -> Iterator[tuple[int, int]]:
    """Every (p, m) with p ≤ 8 and m ≤ 4p."""
    return ((p, m) for p in range(1, MAX_PP + 1) for m in range(1, 4 * p + 1))


def interleaved_shapes() -> Iterator[tuple[int, int, int, int]]:
    """Every (p, m, v, N) with p ≤ 8, m ≤ 4p, 2 ≤ v ≤ 4 that Megatron allows: p ≤ N ≤ m, and m mod N = 0 or ≥ p."""
    return (
        (p, m, v, n)
        for p, m in one_chunk_shapes()
        for v in range(2, MAX_CHUNKS + 1)
        for n in range(p, m + 1)
        if m % n == 0 or m % n >= p
    )


@st.composite
def plans(draw: st.DrawFn, max_pp: int = 5) -> Plan:
    """A small legal plan of any schedule, without sends and receives."""
    p = draw(st.integers(1, max_pp))
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved-1f1b"]))
    if name != "interleaved-1f1b":
        return build(name, p, draw(st.integers(1, 2 * p + 1)))
    v = draw(st.integers(2, 3))
    n = draw(st.integers(p, p + 2))
    m = draw(st.integers(n, 2 * n + 2).filter(lambda m: m % n == 0 or m % n >= p))
    lean = n == p and draw(st.booleans())
    return build(name, p, m, v, n, lean)
