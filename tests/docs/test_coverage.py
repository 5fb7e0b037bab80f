"""docs/coverage.md is what its command writes, and every path, symbol, test and option that its table names exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import click
import pytest

from pptrace.cli.main import cli
from tests.support.programs import ROOT
from tools.coverage_table import ANSWERS, page_of, read_rows, several

ROWS = read_rows()


@cache
def names_in(path: str) -> frozenset[str]:
    """Names that a module defines: functions, classes, constants, and ``Class.member``."""
    return frozenset(_names(ast.parse((ROOT / path).read_text(encoding="utf-8"))))


def _names(node: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[str]:
    for item in node.body:
        if isinstance(item, ast.FunctionDef | ast.ClassDef):
            yield f"{prefix}{item.name}"
        targets = (
            item.targets if isinstance(item, ast.Assign) else [item.target] if isinstance(item, ast.AnnAssign) else []
        )
        yield from (f"{prefix}{target.id}" for target in targets if isinstance(target, ast.Name))
        if isinstance(item, ast.ClassDef):
            yield from _names(item, f"{item.name}.")


def options_of(command: click.Command | None) -> set[str]:
    context = click.Context(command)
    names = {name for option in command.get_params(context) for name in option.opts}
    if not isinstance(command, click.Group):
        return names
    return names.union(*(options_of(command.get_command(context, name)) for name in command.list_commands(context)))


def test_the_page_is_what_the_command_writes() -> None:
    assert (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8") == page_of(ROWS)


def test_every_item_stands_there_once_with_an_answer() -> None:
    items = [row["item"] for row in ROWS]
    assert len(items) == len(set(items)) > 100
    assert {row["answer"] for row in ROWS} == set(ANSWERS)
    assert [row["item"] for row in ROWS if not (row["topic"] and row["source"])] == []


@pytest.mark.parametrize(("column", "separator"), [("where", ":"), ("test", "::")])
def test_every_symbol_and_test_exists(column: str, separator: str) -> None:
    named = {entry for row in ROWS for entry in several(row[column])}
    assert len(named) > 100
    missing = []
    for entry in sorted(named):
        path, _, name = entry.partition(separator)
        if not (ROOT / path).is_file() or name not in names_in(path):
            missing.append(entry)
    assert missing == []


def test_yes_has_code_and_a_test_and_all_else_one_sentence() -> None:
    assert [row["item"] for row in ROWS if row["answer"] == "yes" and not (row["where"] and row["test"])] == []
    assert [row["item"] for row in ROWS if row["answer"] == "yes" and row["why_not"]] == []
    others = [row for row in ROWS if row["answer"] != "yes"]
    assert [row["item"] for row in others if not re.fullmatch(r"\w.{20,}\.", row["why_not"])] == []
    assert [row["item"] for row in others if row["answer"] == "partly" and not (row["how"] and row["where"])] == []


def test_every_option_exists() -> None:
    """Of a command, or of the runtime's example, whose parser is text here: it needs torch."""
    parsers = [path.read_text("utf-8") for path in (ROOT / "instrument" / "examples").glob("*arguments.py")]
    known = options_of(cli).union(*(re.findall(r'"(--[\w-]+)"', text) for text in parsers))
    code = [part for row in ROWS for part in re.findall(r"`[^`]*`", row["how"])]
    named = {option for part in code for option in re.findall(r"--[a-z][\w-]+", part)}
    assert len(named) > 60
    assert named - known == set()
