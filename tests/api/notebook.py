"""Runs the cells of a notebook in this process, as a kernel would, without a server: a last expression is a cell's output."""

from __future__ import annotations

import ast
import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Cell:
    """A code cell that ran: what it printed, and the value that it shows (None for none)."""

    name: str
    printed: str
    value: Any


def run_notebook(path: Path) -> dict[str, Cell]:
    """Run all code cells in order, from the notebook's folder; an exception of a cell passes through with the cell's name."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells = {}
    with contextlib.chdir(path.parent):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                cells[cell["id"]] = _run(cell["id"], "".join(cell["source"]), namespace)
    return cells


def _run(name: str, source: str, namespace: dict[str, Any]) -> Cell:
    tree = ast.parse(source, filename=f"<cell {name}>")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, f"<cell {name}>", "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"<cell {name}>", "eval"), namespace)
    return Cell(name, printed.getvalue(), value)
