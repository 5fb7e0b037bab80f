"""Empty paths, as of shell variables that are not set: one line and exit code 2, never the current directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import pptrace
from pptrace.cli.main import cli
from pptrace.errors import UsageError
from tests.support.programs import SAMPLES, one_line, pptrace_here

P2 = str(SAMPLES / "1f1b_p2")


def test_a_command_refuses_an_empty_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (("analyze", P2, ""), ("compare", "", P2)):
        assert "is empty; expected" in one_line(pptrace_here(*arguments), 2)


@pytest.mark.parametrize("arguments", [("--json", "--no-cache"), ("--html", "--all"), ("--csv", "--all")])
def test_the_option_behind_one_whose_file_was_forgotten_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"{arguments[1]} is no" in one_line(pptrace_here("analyze", P2, *arguments), 2)
    assert not list(tmp_path.iterdir())


def _path_parameters(command: click.Command) -> Iterator[click.Parameter]:
    """The parameters of a command and its subcommands that are paths."""
    yield from (parameter for parameter in command.params if isinstance(parameter.type, click.Path))
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            subcommand = command.get_command(context, name)
            yield from _path_parameters(subcommand)


def test_every_path_of_every_command_is_refused_where_it_is_empty() -> None:
    parameters = list(_path_parameters(cli))
    assert len(parameters) > 10
    for parameter in parameters:
        with pytest.raises(click.BadParameter, match="the path is empty"):
            parameter.type.convert("", parameter, None)


def test_python_refuses_an_empty_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (pptrace.load, pptrace.hang):
        for paths in ("", [""], [P2, ""]):
            with pytest.raises(UsageError, match="path is empty"):
                call(paths)
    with pytest.raises(UsageError, match="path is empty"):
        pptrace.compare(P2, "")
