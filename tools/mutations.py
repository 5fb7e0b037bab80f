"""The mutants of a file: one small change of its code each, that a test should notice.

Changed are comparisons (``<`` to ``<=``, ``==`` to ``!=``), arithmetic (``+`` to ``-``), ``and`` and ``or``, ``not`` and ``-``
(dropped), conditions (negated), numbers (plus one; fractions, and from 16 on, doubled), ``True`` and ``False``, ``min`` and
``max``, ``any`` and ``all``, ``sorted`` (to ``list``), filters of comprehensions (dropped), ``break`` and ``continue``, calls
whose result is not used (dropped), and raised errors (not raised).

Left alone is what no figure depends on: docstrings, strings and f-strings with all that is formatted in them, the texts of
errors and whatever else a raise statement computes, assertions, annotations, decorators, imports, ``__all__``, blocks for type
checkers, and ``strict=`` of zip, which is an assertion as well.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_COMPARISONS: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Lt: ast.LtE(),
    ast.LtE: ast.Lt(),
    ast.Gt: ast.GtE(),
    ast.GtE: ast.Gt(),
    ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(),
    ast.Is: ast.IsNot(),
    ast.IsNot: ast.Is(),
    ast.In: ast.NotIn(),
    ast.NotIn: ast.In(),
}
_ARITHMETIC: dict[type[ast.operator], ast.operator] = {
    ast.Add: ast.Sub(),
    ast.Sub: ast.Add(),
    ast.Mult: ast.FloorDiv(),
    ast.Div: ast.Mult(),
    ast.FloorDiv: ast.Mult(),
    ast.Mod: ast.FloorDiv(),
    ast.Pow: ast.Mult(),
    ast.BitAnd: ast.BitOr(),
    ast.BitOr: ast.BitAnd(),
    ast.BitXor: ast.BitAnd(),
    ast.LShift: ast.RShift(),
    ast.RShift: ast.LShift(),
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_SKIPPED_FIELDS = {"annotation", "returns", "decorator_list", "type_params", "bases"}
_SKIPPED_NODES = (ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Assert, ast.expr_context, ast.operator, ast.cmpop)
_LARGE = 16
_CONTEXT = 24
"""Characters of code shown on either side of a change."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of a file; ``name`` is the same wherever the changed line moves to within its function.

    ``is_in_function``: the change is in the body of a function, whose lines run when it is called, and not on import.
    """

    path: str
    index: int
    line: int
    lines: range
    name: str
    is_in_function: bool


@dataclass(frozen=True, slots=True)
class _Change:
    """A node's replacement, in the statement and the function that have it."""

    parent: ast.AST
    field: str
    position: int | None
    node: ast.AST
    replacement: ast.AST
    statement: ast.stmt
    scope: str
    is_in_function: bool

    def put(self, node: ast.AST) -> None:
        if self.position is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.position] = node


def mutants_of(path: str, source: str) -> list[Mutant]:
    """All mutants of a file, in the order of its code."""
    code = source.splitlines()
    seen: Counter[str] = Counter()
    mutants = []
    for index, change in enumerate(_changes(ast.parse(source))):
        statement = change.statement
        line = getattr(change.node, "lineno", statement.lineno)
        name = f"{path} {change.scope}: {code[line - 1].strip()} [{_difference(change)}]"
        seen[name] += 1
        body = getattr(statement, "body", None)
        end = max(statement.lineno, body[0].lineno - 1) if body else statement.end_lineno or statement.lineno
        suffix = f" #{seen[name]}" if seen[name] > 1 else ""
        lines = range(statement.lineno, end + 1)
        mutants.append(Mutant(path, index, line, lines, name + suffix, change.is_in_function))
    return mutants


def mutated(path: Path, index: int) -> ast.Module:
    """The syntax tree of a file with one change."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    change = next(change for number, change in enumerate(_changes(tree)) if number == index)
    change.put(ast.copy_location(change.replacement, change.node))
    return ast.fix_missing_locations(tree)


def _difference(change: _Change) -> str:
    """The part of the code that changes, before and after."""
    pair = change.node, change.replacement
    if isinstance(change.node, ast.If | ast.While | ast.IfExp):
        pair = change.node.test, change.replacement.test
    before, after = (" ".join(ast.unparse(node).split()) for node in pair)
    start = _num_common(before, after)
    end = _num_common(before[start:][::-1], after[start:][::-1])
    start, end = max(0, start - _CONTEXT), max(0, end - _CONTEXT)
    return f"{before[start : len(before) - end]} → {after[start : len(after) - end]}"


def _num_common(one: str, other: str) -> int:
    """The number of characters with which both begin."""
    return next(
        (index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )


def _changes(tree: ast.Module) -> Iterator[_Change]:
    for statement in tree.body:
        yield from _walk(tree, statement, "", False)


def _walk(parent: ast.AST, statement: ast.stmt, scope: str, is_in_function: bool) -> Iterator[_Change]:
    """The changes in a part of a statement; a statement of a module is reached through the module."""
    for field, value in ast.iter_fields(parent):
        if field in _SKIPPED_FIELDS or (isinstance(parent, ast.Module) and field != "body"):
            continue
        for position, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(node, ast.AST) or _is_left_alone(node):
                continue
            if isinstance(parent, ast.Module) and node is not statement:
                continue
            own = node if isinstance(node, ast.stmt) else statement
            runs_later = is_in_function or (isinstance(parent, ast.FunctionDef) and field == "body")
            for replacement in _replacements(node):
                yield _Change(parent, field, position, node, replacement, own, scope, runs_later)
            if not isinstance(node, ast.Raise):
                is_scope = isinstance(node, ast.FunctionDef | ast.ClassDef)
                yield from _walk(node, own, f"{scope}.{node.name}".lstrip(".") if is_scope else scope, runs_later)


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Constant()) | ast.keyword(arg="strict") | ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Assign(targets=[ast.Name(id="__all__")]) | ast.BinOp(op=ast.BitOr(), right=ast.Constant(value=None)):
            return True
    return isinstance(node, _SKIPPED_NODES)


def _replacements(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(ops=ops):
            for position, op in enumerate(ops):
                yield _with(node, ops=[*ops[:position], _COMPARISONS[type(op)], *ops[position + 1 :]])
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in _ARITHMETIC:
            yield _with(node, op=_ARITHMETIC[type(op)])
        case ast.BoolOp(op=op):
            yield _with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1 if value == 0 or (isinstance(value, int) and value < _LARGE) else 2 * value)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            if not isinstance(test, ast.Compare | ast.UnaryOp | ast.Constant):  # negated in other ways already
                yield _with(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.comprehension(ifs=filters):
            for position in range(len(filters)):
                yield _with(node, ifs=filters[:position] + filters[position + 1 :])
        case ast.Call(func=ast.Name(id="sorted"), args=[values, *_]):
            yield _with(node, func=ast.Name("list", ast.Load()), args=[values], keywords=[])
        case ast.Name(id=name) if name in _NAMES:
            yield _with(node, id=_NAMES[name])
        case ast.Attribute(attr=name) if name in _NAMES:
            yield _with(node, attr=_NAMES[name])
        case ast.Expr(value=ast.Call()) | ast.Raise():
            yield ast.Pass()
        case ast.Break():
            yield ast.Continue()
        case ast.Continue():
            yield ast.Break()


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed
