"""Options of commands: those of questions, and the values that they take, numbers without underscores and paths with a name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import click

from pptrace.api.options import Option, Value, is_url, read_bytes
from pptrace.errors import UsageError
from pptrace.schedule.layout import read_split


class _Plain(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.2
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(plain(value) if isinstance(value, str) else value, param, ctx)
        except ValueError:
            self.fail(f"{value!r} is not a valid {self.name}.", param, ctx)


class _Whole(_Plain, click.types.IntParamType):
    pass


class _Number(_Plain, click.types.FloatParamType):
    pass


class _Count(_Plain, click.IntRange):
    pass


class _GivenPath(click.Path):
    """A path with a name: an empty one, as of a shell variable that is not set, would be the current directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail(
                "the path is empty; expected the name of a file or directory ('.' is the current one)", param, ctx
            )
        if isinstance(param, click.Option) and str(value).startswith("--"):  # behind one whose path was forgotten
            self.fail(f"{value} is no path; expected the name of a file or directory (./{value})", param, ctx)
        if is_url(value):
            self.fail(f"{value} is a URL; expected the name of a file or directory of this machine", param, ctx)
        return super().convert(value, param, ctx)


class _InputPath(_GivenPath):
    """A path to read, which may be a URL: what is there is copied into the cache."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not is_url(value):
            return super().convert(value, param, ctx)
        from pptrace.api.urls import local_copy

        return local_copy(value, _say)


def _say(num_files: int, num_bytes: int) -> None:
    from pptrace.model import units
    from pptrace.model.wording import counted

    size = f", {units.num_bytes(num_bytes)}" if num_bytes else ""
    click.echo(f"pptrace: copying {counted(num_files, 'file')}{size}", err=True)


WHOLE = _Whole()
NUMBER = _Number()
COUNT = _Count(min=1)
GIVEN_PATH = _GivenPath(path_type=Path)
INPUT_PATH = _InputPath(path_type=Path)


def plain(text: str) -> str:
    """The text of a number.

    Raises:
        ValueError: it has underscores (Python takes ``1_0`` for 10) or digits of other scripts.
    """
    if "_" in text or not text.isascii():
        raise ValueError(text)
    return text


def read_value(one: Option, given: Any, such_as: str) -> Any:
    """The value of an option from what click parsed; ``such_as`` is an example of a list.

    Raises:
        UsageError: it is no list of numbers, or no size.
    """
    if given is None:
        return None
    if one.takes is Value.SPLIT:
        return read_split(given, f"--{one.flag}")
    if one.takes is Value.LIST:
        numbers = given.split(",")
        if not all(number.isascii() and number.isdigit() for number in numbers):
            raise UsageError(
                f"--{one.flag} {given}: expected whole numbers with commas between them, such as {such_as}"
            )
        return tuple(map(int, numbers))
    return read_bytes(f"--{one.flag}", given) if one.takes is Value.SIZE else given


def with_options(
    options: Iterable[Option], types: dict[Value, Any] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the options of a question; ``types`` are those of values that it takes in another way than usual."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for one in reversed([one for one in options if not one.is_argument]):
            command = click.option(f"--{one.flag}", one.name, **_attributes(one, types or {}))(command)
        return command

    return decorate


def _attributes(option: Option, types: dict[Value, Any]) -> dict[str, Any]:
    common = {"help": option.help, "metavar": option.metavar}
    if option.takes is Value.FLAG:
        return {"is_flag": True, "help": option.help}
    if option.takes is Value.NAMES:
        return {"multiple": True, **common}
    choices = list(map(str, option.choices))  # of an enumeration click would take the names of its members
    kind = click.Choice(choices) if choices else (_TYPES | types).get(option.takes, click.STRING)
    if option.default is MISSING:
        return {"type": kind, "required": True, **common}
    return {"type": kind, "default": option.default, "show_default": option.default is not None, **common}


_TYPES: dict[Value, Any] = {
    Value.WHOLE: WHOLE,
    Value.DEPTH: WHOLE,
    Value.STEP: WHOLE,
    Value.TIMES: NUMBER,
    Value.SHARE: NUMBER,
    Value.MILLISECONDS: NUMBER,
    Value.PROCESSES: COUNT,
    Value.FILE: GIVEN_PATH,
    Value.RUN: INPUT_PATH,
}
