"""Values of a sweep as text."""

from __future__ import annotations

import pytest

from pptrace.errors import UsageError
from pptrace.simulator.sweep.values import Microbatches, read_costs, read_microbatches, read_sizes


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        *(("8", (8,)), ("2,4,8", (2, 4, 8)), ("2, 4", (2, 4)), ("1..4", (1, 2, 3, 4))),
        *(("8..64:8", tuple(range(8, 65, 8))), ("8..20:8", (8, 16)), ("8..64:x2", (8, 16, 32, 64))),
        *(("3..100:x3", (3, 9, 27, 81)), ("4,4..6,5", (4, 5, 6)), (8, (8,)), (range(2, 9, 2), (2, 4, 6, 8))),
        ([4, "8..10"], (4, 8, 9, 10)),
    ],
)
def test_sizes(given: object, expected: tuple[int, ...]) -> None:
    assert read_sizes("--pp", given) == expected


def test_microbatches_may_depend_on_p() -> None:
    given = read_microbatches("--microbatches", "p,p-1,4p,2p+1,32,p−1")
    assert [number.of(8) for number in given] == [8, 7, 32, 17, 32]
    assert [str(number) for number in given] == ["p", "p−1", "4p", "2p+1", "32"]
    assert read_microbatches("m", [Microbatches(0, 3).plus, "2p"]) == (Microbatches(0, 3), Microbatches(2, 0))


def test_costs_are_exact_decimals() -> None:
    assert read_costs("--p2p", "0..0.3:0.1") == (0.0, 0.1, 0.2, 0.3)
    assert read_costs("--p2p", [0, 0.5]) == (0.0, 0.5)
    assert read_costs("--forward", 1.5) == (1.5,)


NO_RANGES = ["8..4", "1..8:0", "1..8:-1", "1..8:x1", "0..8:x2", "1..", "..4", "1..8:"]


@pytest.mark.parametrize("given", ["", "x", "4x", "1.5", "nan", "inf", True, None, "1,,2", *NO_RANGES])
def test_what_is_no_size_is_refused_with_its_text(given: object) -> None:
    with pytest.raises(UsageError) as caught:
        read_sizes("--pp", given)
    assert str(caught.value).startswith("--pp has ")
    assert "; expected whole numbers with commas between them or a range" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_too_many_values_are_refused_before_they_are_made() -> None:
    with pytest.raises(UsageError, match="at most 10,000 values"):
        read_sizes("--pp", "1..9999999999999999999")
