"""Numbers as options take them: without Python's underscores, and in the digits 0 to 9."""

from __future__ import annotations

from typing import Any

import click


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


WHOLE = _Whole()
NUMBER = _Number()
COUNT = _Count(min=1)


def plain(text: str) -> str:
    """The text of a number.

    Raises:
        ValueError: it has underscores (Python takes ``1_0`` for 10) or digits of other scripts.
    """
    if "_" in text or not text.isascii():
        raise ValueError(text)
    return text
