"""Paths on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pptrace.api.arguments import is_url


class _GivenPath(click.Path):
    """A path with a name: an empty one, as of a shell variable that is not set, would be the current directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail(
                "the path is empty; expected the name of a file or directory ('.' is the current one)", param, ctx
            )
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


GIVEN_PATH = _GivenPath(path_type=Path)
INPUT_PATH = _InputPath(path_type=Path)
