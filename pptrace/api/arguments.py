"""Arguments of the API: what has another type than its annotation is refused in one line, where it comes in."""

from __future__ import annotations

import operator
import re
from numbers import Real

from pptrace.errors import UsageError


def require_type(name: str, value: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Refuse a value of another type.

    Raises:
        UsageError: it is none of ``kinds``.
    """
    if not isinstance(value, kinds):
        raise UsageError(f"{name} is {_shown(value)}; expected {expected}")


def require_whole(name: str, value: object, least: int | None = None, most: int = 2**62) -> None:
    """Refuse what is no whole number, as Python or numpy has them, or one out of bounds.

    Raises:
        UsageError: it is none.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # this is the question
    except TypeError:
        raise UsageError(f"{name} is {_shown(value)}; expected a whole number") from None
    if least is not None and number < least:
        raise UsageError(f"{name} is {_shown(value)}; expected at least {least}")
    if number > most:
        raise UsageError(f"{name} is {_shown(value)}; expected at most {most}")


def require_number(name: str, value: object, unit: str, most: float) -> None:
    """Refuse what is no number from 0 to ``most``.

    Raises:
        UsageError: it is none.
    """
    if not (isinstance(value, Real) and 0 <= value <= most):  # type: ignore[operator]  # of numpy's numbers too
        raise UsageError(f"{name} is {_shown(value)}; expected {unit}, from 0 to {most:g}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+://.")


def is_url(path: object) -> bool:
    """Return whether a path is a URL, which ``pathlib`` would take for a file."""
    return isinstance(path, str) and _URL.match(path) is not None


def read_bytes(option: str, text: str) -> int:
    """A size in bytes, such as 80GB or 74GiB.

    Raises:
        UsageError: it is none.
    """
    parts = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B?", text, re.ASCII | re.IGNORECASE)
    if parts is None:
        raise UsageError(f"{option} {text}: expected a size such as 80GB, 74GiB or 500MB")
    number, prefix, is_binary = parts.groups()
    return int(float(number) * (1024 if is_binary else 1000) ** " KMGT".index(prefix.upper() or " "))
