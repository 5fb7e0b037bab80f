"""Student's t distribution, from the continued fraction of the incomplete beta function (Numerical Recipes, §6.4)."""

from __future__ import annotations

from math import exp, inf, lgamma, log

_MOST_TERMS = 500
_CLOSE = 1e-13
_TINY = 1e-300


def p_value(t: float, freedom: float) -> float:
    """The chance of a value at least as far from 0 as ``t``, on either side."""
    if t in (inf, -inf):
        return 0.0
    return _beta_share(freedom / 2, 0.5, freedom / (freedom + t * t))


def quantile(confidence: float, freedom: float) -> float:
    """The t within which, on either side of 0, ``confidence`` of the values lie."""
    low, high = 0.0, 1.0
    while p_value(high, freedom) > 1 - confidence:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle, freedom) > 1 - confidence else (low, middle)
    return high


def _beta_share(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    factor = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log(1 - x))
    if x < (a + 1) / (a + b + 2):
        return factor * _continued_fraction(a, b, x) / a
    return 1 - factor * _continued_fraction(b, a, 1 - x) / b


def _continued_fraction(a: float, b: float, x: float) -> float:
    """Lentz's evaluation of the fraction."""
    upper, lower = 1.0, 1 / _away_from_zero(1 - (a + b) * x / (a + 1))
    value = lower
    for term in range(1, _MOST_TERMS):
        even = term * (b - term) * x / ((a + 2 * term - 1) * (a + 2 * term))
        odd = -(a + term) * (a + b + term) * x / ((a + 2 * term) * (a + 2 * term + 1))
        for coefficient in (even, odd):
            lower = 1 / _away_from_zero(1 + coefficient * lower)
            upper = _away_from_zero(1 + coefficient / upper)
            value *= lower * upper
        if abs(lower * upper - 1) < _CLOSE:
            break
    return value


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
