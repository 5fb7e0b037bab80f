"""Formatting of numbers with their units."""

from __future__ import annotations

from pptrace.model.wording import counted as counted
from pptrace.model.wording import milliseconds as milliseconds
from pptrace.model.wording import signed_milliseconds as signed_milliseconds


def uncertainty(ns: int) -> str:
    """The most that clocks may be off, with its unit."""
    return f"±{ns / 1e3:.1f} µs" if ns < 1e6 else f"±{milliseconds(ns)} ms"


def percent(share: float | None) -> str:
    if share is None:
        return "–"
    text = f"{share:.1%}"
    return "0.0%" if text == "-0.0%" else text


def ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def num_bytes(count: int | None) -> str:
    if count is None:
        return "–"
    value = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def bandwidth(gigabytes_per_second: float | None) -> str:
    """Bytes per second, without "per second", which is in the column's head."""
    if gigabytes_per_second is None:
        return "–"
    value = gigabytes_per_second
    for unit in ("GB", "MB"):
        if value >= 1:
            return f"{value:.1f} {unit}"
        value *= 1e3
    return f"{value:.1f} KB"


def flops(per_second: float | None) -> str:
    """Floating-point operations per second, without "FLOP/s", which is in the column's head."""
    if per_second is None:
        return "–"
    value = per_second / 1e6
    for unit in ("M", "G"):
        if value < 1000:
            return f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} T"


def number(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def text(value: object) -> str:
    """A value as it is; "–" where there is none."""
    return "–" if value is None or value == "" else str(value)
