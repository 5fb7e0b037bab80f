"""Layers by the order of kernels: sequences worked out by hand, and drawn ones that hold layers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pptrace.analysis.stages.layer_order import BEFORE, BEHIND, Layers, find_layers, parts_by_order


def numbers(text: str) -> np.ndarray:
    return np.array([ord(letter) for letter in text], dtype=np.int32)


@pytest.mark.parametrize(
    ("kernels", "layers"),
    [
        ("e" + 3 * "nmam" + "hs", Layers(1, 4, 3)),
        (4 * "nmamm", Layers(0, 5, 4)),
        ("xyzw" + 2 * "abc", Layers(4, 3, 2)),
        ("nmamhs", None),  # one layer repeats nothing
        ("abababab", Layers(0, 4, 2)),  # two kernels are no layer: two of them twice are
        ("ab", None),
        ("abcabcdefghijklmnop", None),  # what repeats is less than half
    ],
)
def test_the_layers_are_what_repeats(kernels: str, layers: Layers | None) -> None:
    assert find_layers(numbers(kernels)) == layers


@given(
    st.text("xyz", max_size=3),
    st.lists(st.integers(10, 30), min_size=3, max_size=8, unique=True),
    st.integers(2, 6),
    st.text("uvw", max_size=3),
)
def test_layers_of_different_kernels_are_found_wherever_they_are(
    before: str, layer: list[int], count: int, behind: str
) -> None:
    kernels = np.array([*map(ord, before), *layer * count, *map(ord, behind)], dtype=np.int32)
    found = find_layers(kernels)
    assert found == Layers(len(before), len(layer), count)
    parts = found.part_of_each(len(kernels)).tolist()
    assert parts == [0] * len(before) + [n + 1 for n in range(count) for _ in layer] + [count + 1] * len(behind)


def test_ops_of_the_usual_order_have_parts_and_others_none() -> None:
    usual, other = "e" + 2 * "nma" + "h", "enmanmxh"
    op = np.repeat([3, 5, 8, 9], [8, 8, 8, 2])
    part, names = parts_by_order(op, numbers(usual + other + usual + "ab")) or (None, [])
    assert names == ["", BEFORE, "repeat 1", "repeat 2", BEHIND]
    of_usual = [1, 2, 2, 2, 3, 3, 3, 4]
    assert part.tolist() == [*of_usual, *[0] * 8, *of_usual, 0, 0]
    assert parts_by_order(op[:0], numbers("")) is None
    assert parts_by_order(np.zeros(6, dtype=np.intp), numbers("nmamhs")) is None
