"""Options of a question, written once: fields of a dataclass, from which commands, Python, forms and assistants derive theirs.

A new option is one field, made with :func:`option`, and what is done with it.

What has another type than its annotation is refused in one line, where it comes in.
"""

from __future__ import annotations

import inspect
import operator
import re
import textwrap
from collections.abc import Callable
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields, replace
from enum import Enum
from functools import cache, wraps
from numbers import Real
from typing import Any, Concatenate, ParamSpec, TypeVar

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


_P = ParamSpec("_P")
_Options = TypeVar("_Options")
_Self = TypeVar("_Self")
_Result = TypeVar("_Result")


class Value(Enum):
    """Values that options take."""

    TEXT = "text"
    NAMES = "one or several names"
    WHOLE = "a whole number of at least 1"
    DEPTH = "a whole number of at least 0"
    STEP = "a whole number"
    TIMES = "how many times as much as today, more than 0"
    SHARE = "a part of something, from 0 to 1"
    LIST = "whole numbers with commas between them"
    SPLIT = "layers of each stage: whole numbers with commas between them, or a layout of Megatron-LM"
    MILLISECONDS = "a time, ms"
    SIZE = "bytes"
    PROCESSES = "a number of processes"
    FLAG = "yes or no"
    FILE = "a file or directory to write"
    RUN = "another run"


@dataclass(frozen=True, slots=True)
class Option:
    """An option: the field ``name`` of its question, ``flag`` on the command line and in forms.

    ``help`` and ``metavar`` are the command line's, ``choices`` all values of a text where it has but some; ``label`` and
    ``hint`` are those of the dashboard's form and of the assistant; without a label these have no such field, without a hint its
    is ``help``. ``is_change`` is false for
    what a user only takes for granted of a run.
    """

    takes: Value
    help: str
    _: KW_ONLY
    metavar: str | None = None
    flag: str = ""
    choices: tuple[str, ...] = ()
    label: str = ""
    hint: str = ""
    is_change: bool = True
    name: str = ""
    default: Any = None
    is_argument: bool = False

    @property
    def form_name(self) -> str:
        """The name of its field in a form or in the query of an address."""
        return self.flag.replace("-", "_")


def option(default: Any, takes: Value, help: str, metavar: str | None = None, **more: Any) -> Any:
    """A field that is an option; ``more`` are those of :class:`Option`."""
    return field(default=default, metadata={"option": Option(takes, help, metavar=metavar, **more)})


def argument(help: str, default: Any = MISSING) -> Any:
    """A field that has no name on the command line: what the question is about."""
    return field(default=default, metadata={"option": Option(Value.TEXT, help, is_argument=True)})


def same(other: Option, default: Any = MISSING) -> Any:
    """A field that is an option as another question has it."""
    return field(default=default, metadata={"option": other})


@cache
def options_of(question: Any) -> dict[str, Option]:
    """The options of a question by the names of its fields, in their order."""
    return {
        one.name: replace(found, name=one.name, flag=found.flag or one.name.replace("_", "-"), default=one.default)
        for one in fields(question)
        for found in (one.metadata["option"],)
    }


def takes_options(question: Callable[_P, _Options]) -> Callable[[Callable[[_Options], _Result]], Callable[_P, _Result]]:
    """Give a function of a question's options these as its arguments, with their help in its docstring."""
    return lambda function: _taking(function, question)


def method_takes_options(
    question: Callable[_P, _Options],
) -> Callable[[Callable[[_Self, _Options], _Result]], Callable[Concatenate[_Self, _P], _Result]]:
    """:func:`takes_options` for a method."""
    return lambda method: _taking(method, question, "self")


def _taking(function: Callable[..., Any], question: Callable[..., Any], *before: str) -> Callable[..., Any]:
    """The function with the options of a question as its arguments, behind some others."""

    @wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        bound = signature.bind(*args, **given)
        others, options = bound.args[: len(before)], bound.args[len(before) :]
        return function(*others, question(*options, **bound.kwargs))

    signature = _describe(call, question, *before)
    return call


def _describe(function: Any, question: Any, *before: str) -> inspect.Signature:
    """Give a function the signature of a question, behind some other arguments, and what each option means in its docstring."""
    own = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in before]
    parameters = [*own, *inspect.signature(question).parameters.values()]
    result = inspect.signature(function.__wrapped__).return_annotation
    function.__signature__ = signature = inspect.Signature(parameters, return_annotation=result)
    lines = []
    for one in options_of(question).values():
        choices = f" One of {', '.join(one.choices)}." if one.choices else ""
        text = f"{one.name}: {one.help}{choices}{' In ms.' if one.takes is Value.MILLISECONDS else ''}"
        lines.append(textwrap.fill(text, 120, initial_indent="    ", subsequent_indent="        "))
    text, raises, errors = inspect.cleandoc(function.__doc__).partition("Raises:\n")
    function.__doc__ = "\n".join([f"{text}Args:", *lines, "", raises + errors])
    return signature
