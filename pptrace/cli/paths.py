"""Paths on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


class _GivenPath(click.Path):
    """A path with a name: an empty one, as of a shell variable that is not set, would be the current directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail(
                "the path is empty; expected the name of a file or directory ('.' is the current one)", param, ctx
            )
        return super().convert(value, param, ctx)


GIVEN_PATH = _GivenPath(path_type=Path)
