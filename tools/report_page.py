"""Writes the tables of docs/report.md: the fields of the report's types, with what their comments say.

    python tools/report_page.py [--write docs/report.md]

The comment of a field (``#:``, behind it or above it) says what it is, and behind the first "; null", "; empty" or "; left out"
when it has no value. A table stands between ``<!-- fields of TYPE -->`` and ``<!-- end of TYPE -->``, below the first paragraph
of the type's docstring; the rest of the page is written by hand. A type that the page does not have yet gets a section behind
that of the type with the field. Without ``--write`` the page is printed.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby, takewhile
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from pptrace.analysis.report import Report  # noqa: E402
from pptrace.errors import UsageError  # noqa: E402
from pptrace.fields import field_names  # noqa: E402
from tools.marked_tables import write_or_print  # noqa: E402

PAGE = ROOT / "docs" / "report.md"
INLINE = "breakdown"
"""The field in whose place the JSON has its own fields."""
HEADER = "| field | meaning | null or empty |\n|---|---|---|"
NEVER = "never"
_WITHOUT = re.compile(r"(.+?); ((?:null|empty|left out)\b.*)")
_REFERENCE = re.compile(r" \(:\w+:`[^`]+`\)")
_BLOCK = re.compile(r"^<!-- fields of (\w+) -->\n(?:.*?\n)??<!-- end of \1 -->$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"(?:^\((?P<label>[\w-]+)\)=\n)?^#+ (?P<text>.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a type: ``path`` is where the JSON has it, such as ``steps[].ranks[].host``, ``kind`` the type of its object, or
    of each object of its list; None of other values. ``without`` says when it is null, empty or left out, or "never".
    """

    name: str
    path: str
    kind: type | None
    meaning: str
    without: str


def paths_of_types(root: type) -> dict[type, list[str]]:
    """The paths at which the JSON has objects of each type, in the order of the fields."""
    paths: dict[type, list[str]] = {}
    waiting = [(root, "")]
    while waiting:
        kind, path = waiting.pop()
        paths.setdefault(kind, []).append(path)
        inner = [(field.kind, path if field.name == INLINE else field.path) for field in fields_of(kind, path)]
        waiting += [(kind, path) for kind, path in reversed(inner) if kind is not None]
    return paths


def fields_of(kind: type, path: str = "") -> Iterator[Field]:
    """The fields of a type, whose objects are at a path.

    Raises:
        UsageError: a field has no comment, or one that does not fit its type.
    """
    comments, hints = comments_of(kind), get_type_hints(kind)
    for name in field_names(kind):
        comment = comments.get(name, "")
        match = _WITHOUT.fullmatch(comment)
        meaning, without = match.groups() if match else (comment, NEVER)
        if not meaning:
            raise UsageError(f"{kind.__name__}.{name} has no comment; say behind it what it is: #: …")
        if (NoneType in get_args(hints[name])) != without.startswith("null"):
            raise UsageError(
                f"{kind.__name__}.{name}: it {_nullness(hints[name])}, but says {without!r}: #: …; null where …"
            )
        inner, is_list = _object_in(hints[name])
        yield Field(name, f"{path}.{name}".lstrip(".") + "[]" * is_list, inner, meaning, without)


def _nullness(hint: Any) -> str:
    return "may be None" if NoneType in get_args(hint) else "is never None"


def _object_in(hint: Any) -> tuple[type | None, bool]:
    """The type with fields in an annotation, and whether it is of a list of them."""
    if isinstance(hint, type) and field_names(hint):
        return hint, False
    for argument in get_args(hint):
        kind, is_list = _object_in(argument)
        if kind is not None:
            return kind, is_list or get_origin(hint) in (tuple, Sequence)
    return None, False


@cache
def comments_of(kind: type) -> dict[str, str]:
    """The comment of each field that has one, as Markdown."""
    lines = inspect.getsource(kind).splitlines()
    (definition,) = ast.parse("\n".join(lines)).body
    assert isinstance(definition, ast.ClassDef)
    comments = {}
    for field in definition.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.end_lineno:
            above = takewhile(lambda line: line.startswith("    #: "), reversed(lines[: field.lineno - 1]))
            behind = lines[field.end_lineno - 1].split("  #: ")[1:]
            comments[field.target.id] = _markdown(" ".join(behind or [line[7:] for line in above][::-1]))
    return comments


def _markdown(text: str) -> str:
    """Text of a comment or docstring, without the code that it refers to in parentheses."""
    return _REFERENCE.sub("", " ".join(text.split())).replace("``", "`").replace("|", "\\|")


def page_of(text: str, root: type = Report) -> str:
    """The page with its tables written anew.

    Raises:
        UsageError: it has a table of a type that is none of the report's, or no place for one.
    """
    paths = paths_of_types(root)
    text = _with_sections(text, paths)
    kinds = {kind.__name__: kind for kind in paths}
    places = {block[1]: _heading_at(text, block.start()) for block in _BLOCK.finditer(text)}
    if unknown := places.keys() - kinds.keys():
        raise UsageError(f"the page has fields of {min(unknown)}, which is not in the report; remove the table")
    if lacking := [kind for name, kind in kinds.items() if name not in places]:
        raise UsageError(f"the page lacks {' and behind it '.join(_markers(lacking[0]))}; put them in, each a line")
    labels = {path: places[kind.__name__]["label"] for kind, at in paths.items() for path in at}
    for heading in _HEADING.finditer(text):
        labels |= dict.fromkeys(re.findall(r"`([^`]+)`", heading["text"]), heading["label"])
    return _BLOCK.sub(lambda block: _block(kinds[block[1]], paths[kinds[block[1]]], places[block[1]], labels), text)


def _with_sections(text: str, paths: Mapping[type, Sequence[str]]) -> str:
    """The page with a section for each type that it does not have."""
    kind_at = {path: kind for kind, at in paths.items() for path in at}
    for kind, (path, *_) in paths.items():
        begin, end = _markers(kind)
        if path and begin not in text:
            behind = text.find(_markers(kind_at[path.rpartition(".")[0]])[1])
            following = _HEADING.search(text, behind)
            place = following.start() if following else len(text)
            label = re.sub(r"[\W_]+", "-", path).strip("-")
            section = f"({label})=\n##{'#' * ('.' in path)} `{path}`\n\n{begin}\n{end}\n\n"
            text = f"{text[:place].rstrip()}\n\n{section}{text[place:]}"
    return text


def _heading_at(text: str, place: int) -> re.Match[str]:
    return [heading for heading in _HEADING.finditer(text) if heading.start() < place][-1]


def _markers(kind: type) -> tuple[str, str]:
    return f"<!-- fields of {kind.__name__} -->", f"<!-- end of {kind.__name__} -->"


def _block(kind: type, paths: Sequence[str], heading: re.Match[str], labels: Mapping[str, str | None]) -> str:
    """The docstring and the table of a type: fields of the same meaning in one row, linked to their sections."""
    begin, end = _markers(kind)
    introduction = _markdown((inspect.getdoc(kind) or "").split("\n\n")[0])
    others = [f"`{path}`" for path in paths if path and f"`{path}`" not in heading["text"]]
    if len(others) == len(paths):
        introduction = f"{', '.join(others)}: {introduction}"
    elif others:
        introduction += f" Also {', '.join(others)}."
    written = (field for field in fields_of(kind, paths[0]) if field.name != INLINE)
    rows = [
        f"| {', '.join(_linked(field, labels, heading['label']) for field in alike)} | {meaning} | {without} |"
        for (meaning, without), alike in groupby(written, lambda field: (field.meaning, field.without))
    ]
    return "\n".join([begin, introduction, "", HEADER, *rows, end])


def _linked(field: Field, labels: Mapping[str, str | None], here: str | None) -> str:
    label = labels.get(field.path)
    return f"[`{field.name}`](#{label})" if label and label != here else f"`{field.name}`"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="report_page.py")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the page; left out: print")
    page = parser.parse_args(arguments).write
    try:
        text = page_of((page or PAGE).read_text(encoding="utf-8"))
    except (UsageError, OSError) as err:
        print(f"report_page: {err}", file=sys.stderr)
        return 2
    write_or_print(text, page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
