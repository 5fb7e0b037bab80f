"""Changes of a run, from the texts and numbers of a form or of an address."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from pptrace.api.options import Value
from pptrace.api.wishes import FORM, Wishes
from pptrace.errors import UsageError
from pptrace.schedule.layout import read_split

FIELDS = tuple(FORM)
"""Names of the fields of a form."""
ASSUMED = tuple(name for name, option in FORM.items() if not option.is_change)
"""Fields that change nothing of the run: what its trace does not say."""

_MOST_NUMBER = 1e9
_MOST_LAYERS = 2_000
"""More are not divided while a page waits."""


def wishes_of(form: Mapping[str, object]) -> Wishes:
    """The wishes of a form; fields that are missing or empty stay as they are in the run.

    Raises:
        UsageError: a field is no number, or no layers of stages.
    """
    given = {name: value for name in FORM if (value := form.get(name)) not in (None, "")}
    return Wishes(**{FORM[name].name: _READ[FORM[name].takes](name, value) for name, value in given.items()})


def address_of(form: Mapping[str, object]) -> str:
    """The fields of a form that are not empty as the query of an address."""
    return urlencode([(name, str(value)) for name in FIELDS if (value := form.get(name)) not in (None, "")])


def command_of(wishes: Wishes) -> str:
    """The options of ``pptrace whatif`` that ask for the same."""
    values = ((option, getattr(wishes, option.name)) for option in FORM.values())
    return " ".join(f"--{option.flag} {_text(value)}" for option, value in values if value not in (None, ()))


def _text(value: float | Sequence[object]) -> str:
    return f"{value:g}" if isinstance(value, int | float) else ",".join(map(str, value))


def _number(name: str, value: object) -> float:
    try:
        return float(str(value))
    except ValueError:
        raise UsageError(f"{name} is {str(value)[:40]!r}; expected a number") from None


def _whole(name: str, value: object) -> int:
    number = _number(name, value)
    if not number.is_integer() or abs(number) > _MOST_NUMBER:
        raise UsageError(f"{name} is {number:g}; expected a whole number")
    return int(number)


def _split(name: str, value: object) -> tuple[int, ...]:
    text = ",".join(part for part in str(value).replace(" ", ",").split(",") if part)
    numbers = read_split(text, name)
    if sum(numbers) > _MOST_LAYERS:
        raise UsageError(f"{name} has {sum(numbers):,} layers; expected at most {_MOST_LAYERS:,}")
    return numbers


_READ: Mapping[Value, Callable[[str, object], Any]] = {
    Value.NAMES: lambda _, value: (str(value),),
    Value.WHOLE: _whole,
    Value.TIMES: _number,
    Value.SHARE: _number,
    Value.SPLIT: _split,
}
