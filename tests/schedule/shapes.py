"""Legal shapes, and plans of them."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import strategies as st

from pptrace.schedule.plan import Plan
from pptrace.schedule.registry import SCHEDULES, build
from pptrace.schedule.text import from_rows
from tests.support.extent import ALL

MAX_PP, MAX_CHUNKS = 8, 4
OF_MANY_RANKS = ((6, 13), (7, 7), (8, 3), (8, 8), (8, 17), (8, 20))
"""(p, m) with fewer, as many and more microbatches than ranks, in whole rounds and not."""


def one_chunk_shapes() -> Iterator[tuple[int, int]]:
    """Every (p, m) with p ≤ 8 and m ≤ 4p; by default of more than five ranks only some."""
    shapes = ((p, m) for p in range(1, MAX_PP + 1) for m in range(1, 4 * p + 1))
    return ((p, m) for p, m in shapes if ALL or p <= 5 or (p, m) in OF_MANY_RANKS)


def interleaved_shapes() -> Iterator[tuple[int, int, int, int]]:
    """Every (p, m, v, N) of those shapes with 2 ≤ v ≤ 4 that Megatron allows: p ≤ N ≤ m, and m mod N = 0 or ≥ p."""
    return (
        (p, m, v, n)
        for p, m in one_chunk_shapes()
        for v in range(2, MAX_CHUNKS + 1)
        for n in range(p, m + 1)
        if m % n == 0 or m % n >= p
    )


ONE_CHUNK = tuple(name for name, entry in SCHEDULES.items() if entry.default_chunks == 1)
V_SHAPED = ("zbv", "v-half", "v-min", "dualpipe-v", "dualpipe")


def whole_rounds(p: int, m: int) -> bool:
    """Return whether m is as torch's interleaved schedules ask: max(1, m // p) divides it."""
    return m % max(1, m // p) == 0


def legal_shapes(name: str, max_pp: int = 6, rounds: int = 3) -> Iterator[tuple[int, int, int]]:
    """Every (p, m, v) with p ≤ ``max_pp`` and m ≤ ``rounds`` · p + 1 that a schedule takes; N is its default. By default those m
    that are small or about a multiple of p.
    """
    for p in range(1, max_pp + 1):
        for m in (m for m in range(1, rounds * p + 2) if ALL or m <= p + 1 or m in (2 * p, rounds * p, rounds * p + 1)):
            if name in ONE_CHUNK:
                yield (p, m, 1)
            elif name in V_SHAPED:
                overlaps = name.startswith("dualpipe")
                if (not overlaps or m >= 2 * p) and (name != "dualpipe" or p % 2 == m % 2 == 0):
                    yield (p, m, 2)
            else:
                yield from ((p, m, v) for v in (2, 3) if _takes_chunks(name, p, m, v))


def sound_last_group(p: int, v: int, n: int, last: int) -> bool:
    """Return whether an interleaved order whose last group of N = ``n`` has ``last`` microbatches runs to its end."""
    return last == 0 or last + n >= 2 * (p - 1) or (v, last) == (2, 1)


def _takes_chunks(name: str, p: int, m: int, v: int) -> bool:
    return {
        "looped-bfs": True,
        "interleaved-zb": whole_rounds(p, m),
        "interleaved-1f1b": m >= p and sound_last_group(p, v, p, m % p),
        "interleaved-afab": m >= p,
        "combined-1f1b": m % p == 0,
    }[name]


@st.composite
def plans(draw: st.DrawFn, max_pp: int = 5) -> Plan:
    """A small legal plan of any schedule, without sends and receives."""
    name = draw(st.sampled_from(list(SCHEDULES)))
    if name != "interleaved-1f1b":
        return build(name, *draw(st.sampled_from(list(legal_shapes(name, max_pp, rounds=2)))))
    p, v = draw(st.integers(1, max_pp)), draw(st.integers(2, 3))
    n = draw(st.integers(p, p + 2))
    lean = n == p and draw(st.booleans())
    m = draw(st.integers(n, 2 * n + 2).filter(lambda m: lean or sound_last_group(p, v, n, m % n)))
    return build(name, p, m, v, n, lean)


def in_a_row(*plans: Plan) -> Plan:
    """The compute actions of plans, one plan after the other, as microbatches of one step."""
    rows: list[list[str]] = [[] for _ in range(plans[0].pp)]
    first = 0
    for plan in plans:
        for rank, row in enumerate(rows):
            row += [str(action.later(first)) for action in plan.compute_actions(rank)]
        first += plan.num_microbatches
    return from_rows(rows, "custom")
