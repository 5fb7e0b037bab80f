"""Seeds of random generators, mixed from several numbers."""

from __future__ import annotations

_MASK = 2**64 - 1


def mix(*numbers: int) -> int:
    """Mix the lowest 64 bits of several numbers into one of 63 bits, unlike for neighbouring inputs.

    SplitMix64's finaliser, once per number.
    """
    state = len(numbers)
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1
