"""Measures how easily code is read: rooms, imports, circles, lengths of functions, words, docstrings, recipes, files entered.

    python tools/house.py [CHECKOUT]

A room is a folder with Python files; of a folder that has rooms in it, each file is one. An arrow goes from a room to another
that it imports.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import statistics
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

PACKAGES = ("pptrace", "instrument", "dashboards")
DIALECT = re.compile(
    r"told|beside|mine|goes_on|scraps|unseen|regrouped|numbered|anonymous|asked|effort|hear|no_more|given_up"
)
"""Words of identifiers for which the field has another one: see docs/glossary.md."""
QUESTIONS = frozenset(["how", "what", "when", "where", "whether", "which", "who", "whom", "whose", "why"])
ASIDES = frozenset(["as", "beside", "by", "if", "in", "it", "of", "so", "something", "that", "these", "those", "until"])
"""Words that leave the verb and the noun of a docstring's first line for later; QUESTIONS begin half a sentence besides."""


def main(root: Path) -> None:
    files = sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))
    rooms = Counter(str(path.parent.relative_to(root)) for path in files if path.name != "__init__.py")
    print(f"{len(files)} files in {len(rooms)} rooms; most files in a room:")
    for room, count in rooms.most_common(8):
        print(f"    {count:4d} {room}")
    arrows = Counter(arrow for path in files for arrow in arrows_of(path, root))
    print(f"{len(arrows)} arrows between rooms; circles: {describe_circles(arrows)}")
    lengths, parameters = zip(*(shape for path in files for shape in functions_of(path)), strict=True)
    deciles = statistics.quantiles(lengths, n=10)
    print(
        f"{len(lengths)} functions; lines: median {statistics.median(lengths):.0f}, p90 {deciles[8]:.0f}, "
        f"largest {max(lengths)}; {sum(length > 45 for length in lengths)} of more than 45 lines, "
        f"{sum(count > 6 for count in parameters)} with more than 6 parameters"
    )
    sizes = {str(path.relative_to(root)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    print(f"{sum(sizes.values())} lines; files of 300 or more: {sum(size >= 300 for size in sizes.values())}")
    words = Counter(word for path in files for word in dialect_of(path))
    print(f"{sum(words.values())} uses of identifiers of the dialect: {dict(words.most_common(8))}")
    openings = [opening for path in files for opening in odd_openings_of(path, QUESTIONS | ASIDES)]
    print(f"{len(openings)} docstrings that begin with neither a verb nor a noun")
    own = [path for path in files if path.is_relative_to(root / "pptrace")]
    functions, once = private_once(own)
    lines = sum(sizes[str(path.relative_to(root))] for path in own)
    classes = sum(isinstance(node, ast.ClassDef) for path in own for node in ast.walk(_parsed(path)))
    entered = files_entered(root, SAMPLE)
    print(
        f"pptrace: {lines:,} lines, {classes} classes, {once / functions:.0%} of {functions:,} functions private and called once"
    )
    of_experts = sum("experts" in path for path in entered)
    print(f"pptrace analyze {SAMPLE} enters {len(entered)} files, {of_experts} of them of experts")
    readme = root / "README.md"
    print(f"README: {readme.stat().st_size:,} bytes; docs: {len(list((root / 'docs').glob('*.md')))} pages")
    for recipe, num_files in recipes_of(root / "docs" / "extending.md"):
        print(f"{recipe}: {num_files} files")


def private_once(paths: Iterable[Path]) -> tuple[int, int]:
    """(functions and methods, the private ones of them that are named in one place besides their definition)."""
    defined: list[str] = []
    named: Counter[str] = Counter()
    for path in paths:
        for node in ast.walk(_parsed(path)):
            if isinstance(node, ast.FunctionDef):
                defined.append(node.name)
            elif isinstance(node, ast.Name):
                named[node.id] += 1
            elif isinstance(node, ast.Attribute):
                named[node.attr] += 1
    times = Counter(name for name in defined if name.startswith("_") and not name.endswith("__"))
    return len(defined), sum(
        count for name, count in times.items() if named[name] <= count
    )  # a name of several has its share


ENTERED = """
import sys
root, path = sys.argv[1] + "/", sys.argv[2]
entered = set()
def note(frame, event, _argument):
    if event == "call" and frame.f_code.co_flags & 1:  # no body of a module or of a class
        entered.add(frame.f_code.co_filename)
from pptrace.cli.main import main
sys.argv, stdout = ["pptrace", "analyze", "--no-cache", root + path], sys.stdout
sys.stdout = open("/dev/null", "w")
sys.setprofile(note)
try:
    main()
except SystemExit:
    pass
sys.setprofile(None)
print(*sorted(file for file in entered if file.startswith(root + "pptrace/")), sep="\\n", file=stdout)
"""
SAMPLE = "sample_traces/1f1b_p4"


def files_entered(root: Path, sample: str) -> list[str]:
    """The files of pptrace of which a function runs while a sample is analysed."""
    command = [sys.executable, "-c", ENTERED, str(root), sample]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return [str(Path(line).relative_to(root)) for line in ended.stdout.splitlines()]


def recipes_of(page: Path) -> list[tuple[str, str]]:
    """(recipe, files to touch) as the page says; ``tests/docs/test_recipes_followed.py`` follows the recipes and counts."""
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    return re.findall(r"^\| \[([\w ]+)\]\(#[\w-]+\) \| (\d+)", text, re.MULTILINE)


def arrows_of(path: Path, root: Path) -> Iterator[tuple[str, str]]:
    """(room, imported room) of each import of a file, within the project."""
    room = _room_of_file(root, path)
    for node in _statements(_parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in PACKAGES:
            for name in node.names:
                target = _room_of(root, f"{node.module}.{name.name}")
                if target != room:
                    yield room, target


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """The module and each statement in it, at any depth, with handlers and cases: without what expressions hold, and without
    what is for type checkers alone.
    """
    waiting: list[ast.AST] = [tree]
    for node in waiting:
        yield node
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            block = getattr(node, name, None)
            waiting += block if isinstance(block, list) else ()


@cache
def _room_of(root: Path, dotted: str) -> str:
    """Room of a module, or of the module of a name."""
    path = root / Path(*dotted.split("."))
    while not path.with_suffix(".py").is_file() and not path.is_dir():
        path = path.parent
    return _room_of_file(root, path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))


def _room_of_file(root: Path, path: Path) -> str:
    return str((path.with_suffix("") if _has_rooms(path.parent) else path.parent).relative_to(root))


@cache
def _has_rooms(folder: Path) -> bool:
    return any(folder.glob("*/*.py"))


def describe_circles(arrows: Counter[tuple[str, str]]) -> str:
    """The sets of rooms that import each other, directly or through others; a room's own sub-rooms are rooms as well."""
    reach = {room: {room} for arrow in arrows for room in arrow}
    changed = True
    while changed:
        changed = False
        for source, target in arrows:
            more = reach[target] - reach[source]
            reach[source] |= more
            changed = changed or bool(more)
    circles = {frozenset(other for other in reach if room in reach[other] and other in reach[room]) for room in reach}
    return "; ".join(" ↔ ".join(sorted(circle)) for circle in circles if len(circle) > 1) or "none"


def functions_of(path: Path) -> Iterator[tuple[int, int]]:
    """(lines with docstring, parameters) of each function."""
    for node in ast.walk(_parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            yield node.end_lineno - node.lineno + 1, len([name for name in names if name not in ("self", "cls")])


def odd_openings_of(path: Path, words: frozenset[str]) -> list[str]:
    """List "file:line: first line" of each docstring that begins with one of some words, in any spelling or punctuation."""
    return [
        f"{path}:{line}: {text.strip().splitlines()[0]}"
        for line, text in docstrings_of(_parsed(path))
        if (word := re.search(r"[^\W_]+", text)) and word[0].lower() in words
    ]


def docstrings_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring: of modules, classes and functions at any depth, and behind assignments."""
    for owner in _statements(tree):
        is_documented = isinstance(owner, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for block in (getattr(owner, name, None) for name in ("body", "orelse", "finalbody")):
            previous: ast.stmt | None = None
            for statement in block if isinstance(block, list) else ():
                is_place = is_documented if previous is None else isinstance(previous, ast.Assign | ast.AnnAssign)
                match statement:
                    case ast.Expr(ast.Constant(str(text))) if is_place:
                        yield statement.lineno, text
                previous = statement


def dialect_of(path: Path) -> Iterator[str]:
    """The words of the dialect in a file's identifiers, once for each use."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.NAME:
            yield from (word for word in token.string.lower().strip("_").split("_") if DIALECT.fullmatch(word))
            if DIALECT.fullmatch(token.string.lower()) and "_" in token.string.strip("_"):
                yield token.string.lower()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(__file__).parents[1])
    main(parser.parse_args().checkout)
