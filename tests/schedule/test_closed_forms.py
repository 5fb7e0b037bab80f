"""The closed forms that the catalogue prints are what the simulation gives: their very text is evaluated."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest

from pptrace.schedule.registry import SCHEDULES, Schedule, build
from pptrace.simulator import peak_inflight, simulate, uniform
from tests.schedule.shapes import legal_shapes

COSTS = [(1, 1, 1), (3, 3, 2), (5, 7, 4), (4, 3, 3), (2, 2, 1)]
"""(f, i, w)"""
WRITTEN = [entry for entry in SCHEDULES.values() if entry.bubble is not None]


def value(text: str, **names: int) -> Fraction:
    """Evaluate a formula such as ``(p−1)(f+i−2w)/(m(f+b))`` or ``2(⌊p/2⌋+1)``."""
    for printed, plain in {"≤": "", "F&B": "o", "−": "-", "·": "*", "⌊": "floor(", "⌋": ")"}.items():
        text = text.replace(printed, plain)
    tokens = re.findall(r"min|floor|\d+|[a-zN]|[-()+*/,]", text)
    written = ""
    for before, token in zip(["(", *tokens], tokens, strict=False):
        ends_a_factor = before == ")" or (before.isalnum() and before not in ("min", "floor"))
        written += "*" if ends_a_factor and (token == "(" or token.isalnum()) else ""
        written += f"Fraction({token})" if token.isdecimal() else token
    functions = {"Fraction": Fraction, "min": min, "floor": lambda number: Fraction(number.__floor__())}
    return eval(written, {"__builtins__": {}}, functions | {name: Fraction(n) for name, n in names.items()})


def test_formulas_are_read_as_people_read_them() -> None:
    assert value("(p−1)(f+i−2w)/(m(f+b))", p=3, m=4, f=1, i=2, w=1, b=3) == Fraction(2 * 1, 4 * 4)
    assert value("2(⌊(p+1)/3⌋+1)", p=4) == 4
    assert value("min(2(p−r−1)+(v−1)·N+1, v·m)", p=2, r=0, v=2, N=2, m=9) == 5
    assert value("≤ (p−1)/(2m)", p=3, m=4) == Fraction(1, 4)
    assert value("(F&B+b−3w)", o=7, b=3, w=1) == 7


def costs_of(entry: Schedule) -> list[tuple[int, int, int]]:
    return [
        (f, i, w)
        for f, i, w in COSTS
        if ("f = i = w" not in entry.condition or f == i == w) and ("if f = i" not in entry.condition or f == i)
    ]


@pytest.mark.parametrize("entry", WRITTEN, ids=lambda entry: entry.name)
def test_the_bubble_of_the_simulation_is_that_of_the_closed_form(entry: Schedule) -> None:
    checked = 0
    for p, m, v in legal_shapes(entry.name, max_pp=5):
        if m < 2 * p or (entry.takes_group_size and m % p):
            continue
        plan = build(entry.name, p, m, v)
        for f, i, w in costs_of(entry):
            simulation = simulate(plan, uniform(f, i + w, w))
            expected = value(entry.bubble or "", p=p, m=m, v=v, f=f, i=i, w=w, b=i + w, o=f + i + w)
            compute = sum(rank.compute_ns for rank in simulation.ranks)
            if "within a rank" in entry.condition:
                worst = max(Fraction(rank.inner_bubble_ns, rank.compute_ns) for rank in simulation.ranks)
                assert worst == max(expected, 0), (p, m, v, f, i, w)
                continue
            ratio = Fraction(p * simulation.makespan_ns - compute, compute)
            assert ratio <= expected if (entry.bubble or "").startswith("≤") else ratio == expected, (p, m, v, f, i, w)
        checked += 1
    assert checked >= 3


@pytest.mark.parametrize("entry", WRITTEN, ids=lambda entry: entry.name)
def test_each_rank_holds_the_activations_of_the_closed_form(entry: Schedule) -> None:
    checked = 0
    for p, m, v in legal_shapes(entry.name, max_pp=5):
        if m < 2 * p or (entry.takes_group_size and m % p):
            continue
        held = list(peak_inflight(build(entry.name, p, m, v)))
        expected = [value(entry.in_flight or "", p=p, m=m, v=v, r=r, N=p) for r in range(p)]
        if "r" in (entry.in_flight or ""):
            assert held == expected, (p, m, v)
        else:
            assert max(held) == expected[0], (p, m, v)
        checked += 1
    assert checked >= 3
