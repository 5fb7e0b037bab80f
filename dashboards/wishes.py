"""Changes of a run, from the texts and numbers of a form or of an address."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlencode

from pptrace.api.whatif import Wishes
from pptrace.errors import UsageError

FIELDS = (
    "schedule",
    "chunks",
    "microbatches",
    "microbatch_size",
    "split",
    "link_speed",
    "layers",
    "wgrad_share",
    "fixed_share",
)
ASSUMED = ("layers", "wgrad_share", "fixed_share")
"""Fields that change nothing of the run: what its trace does not say."""

_MOST_NUMBER = 1e9
_MOST_LAYERS = 2_000
"""More are not divided while a page waits."""


def wishes_of(form: Mapping[str, object]) -> Wishes:
    """The wishes of a form; fields that are missing or empty stay as they are in the run.

    Raises:
        UsageError: a field is no number, or no list of numbers.
    """
    values = {name: value for name in FIELDS if (value := form.get(name)) not in (None, "")}
    return Wishes(
        schedules=(str(values["schedule"]),) if "schedule" in values else (),
        chunks=_whole(values, "chunks"),
        microbatches=_whole(values, "microbatches"),
        microbatch_size=_number(values, "microbatch_size"),
        split=_wholes(values, "split"),
        link_speed=_number(values, "link_speed"),
        layers=_wholes(values, "layers"),
        wgrad_share=_number(values, "wgrad_share"),
        fixed_share=_number(values, "fixed_share"),
    )


def address_of(form: Mapping[str, object]) -> str:
    """The fields of a form that are not empty as the query of an address."""
    return urlencode([(name, str(value)) for name in FIELDS if (value := form.get(name)) not in (None, "")])


def command_of(wishes: Wishes) -> str:
    """The options of ``pptrace whatif`` that ask for the same."""
    options = [
        *(f"--schedule {name}" for name in wishes.schedules),
        *(f"--{name.replace('_', '-')} {value:g}" for name in _NUMBERS if (value := getattr(wishes, name)) is not None),
        *(f"--{name} {','.join(map(str, value))}" for name in _LISTS if (value := getattr(wishes, name)) is not None),
    ]
    return " ".join(options)


_NUMBERS = ("chunks", "microbatches", "microbatch_size", "link_speed", "wgrad_share", "fixed_share")
_LISTS = ("split", "layers")


def _number(values: Mapping[str, object], name: str) -> float | None:
    if name not in values:
        return None
    try:
        return float(str(values[name]))
    except ValueError:
        raise UsageError(f"{name} is {str(values[name])[:40]!r}; expected a number") from None


def _whole(values: Mapping[str, object], name: str) -> int | None:
    number = _number(values, name)
    if number is None:
        return None
    if not number.is_integer() or abs(number) > _MOST_NUMBER:
        raise UsageError(f"{name} is {number:g}; expected a whole number")
    return int(number)


def _wholes(values: Mapping[str, object], name: str) -> tuple[int, ...] | None:
    if name not in values:
        return None
    try:
        numbers = tuple(int(part) for part in str(values[name]).replace(" ", ",").split(",") if part)
    except ValueError:
        raise UsageError(f"{name} is {str(values[name])[:40]!r}; expected numbers of layers such as 5,5,5,3") from None
    if sum(numbers) > _MOST_LAYERS:
        raise UsageError(f"{name} has {sum(numbers):,} layers; expected at most {_MOST_LAYERS:,}")
    return numbers
