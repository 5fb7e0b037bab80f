"""Follows the recipes of docs/extending.md in a copy of the sources, literally: new files, entries, and rows of docs."""

from __future__ import annotations

import re
import shutil
import textwrap
from pathlib import Path

from tests.support.programs import ROOT

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
_BLOCK = r"^ *```\{code-block\} \w+\n +:caption: ([^\n]*)\n\n(.*?)^ *```$"
EXAMPLES = {caption: textwrap.dedent(code) for caption, code in re.findall(_BLOCK, PAGE, re.MULTILINE | re.DOTALL)}
"""The examples of the page, by their captions."""
NEW = {caption for caption in EXAMPLES if caption.endswith(".py")}
_COPIED = ("pptrace", "instrument", "dashboards", "tests", "tools", "docs", "sample_traces")
_FILES = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "constraints.txt")
_LEFT = shutil.ignore_patterns("__pycache__", "*.pyc", "_build", "node_modules")
_COMPILED = "pptrace"
"""Package whose bytecode is copied as well: what the recipes leave as it is need not be compiled again."""


def copy_sources(target: Path) -> None:
    """The working tree as a clone has it."""
    for name in _COPIED:
        shutil.copytree(ROOT / name, target / name, ignore=None if name == _COMPILED else _LEFT)
    for name in _FILES:
        shutil.copy(ROOT / name, target)


def follow_all(root: Path) -> dict[str, set[str]]:
    """Do what each recipe says, but for the tests that it asks for: the files that it changes, by the recipe's heading."""
    changed, before = {}, _texts(root)
    for heading, follow in _RECIPES.items():
        follow(root)
        after = _texts(root)
        changed[heading] = {name for name, text in after.items() if before.get(name) != text}
        before = after
    return changed


def _texts(root: Path) -> dict[str, str]:
    """The text of each source and page, by its path below the root."""
    paths = (path for room in ("pptrace", "instrument", "dashboards", "docs") for path in (root / room).rglob("*.*"))
    return {str(path.relative_to(root)): path.read_text() for path in paths if path.suffix in (".py", ".md")}


def _write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).write_text(EXAMPLES[name].lstrip("\n"), encoding="utf-8")


def _schedule(root: Path) -> None:
    _write(root, "pptrace/schedule/builders/gpipe_reversed.py")
    registry = root / "pptrace" / "schedule" / "registry.py"
    _insert(registry, "    dualpipe,\n", "    gpipe_reversed,\n")
    _insert(registry, "            bidirectional=True,\n        ),\n", _example("an entry of SCHEDULES", 8))


def _labels(root: Path) -> None:
    _write(root, "pptrace/recognise/labels/acme.py")
    labels = root / "pptrace" / "recognise" / "labels" / "__init__.py"
    _insert(labels, "from pptrace.recognise.labels import (\n", "    acme,\n")
    _insert(labels, "        vescale.RULES,\n", "        acme.RULES,\n")
    _insert(root / "docs" / "inputs.md", "", "\n| acme | `acme/fwd/s{stage}/mb{microbatch}` |\n")


def _format(root: Path) -> None:
    _write(root, "pptrace/ingest/op_tables/acme.py")
    formats = root / "pptrace" / "ingest" / "formats.py"
    reader = "from pptrace.ingest.ops.build import Tables, traces_of\n"
    _insert(formats, reader, "from pptrace.ingest.op_tables.acme import read_acme, sniff_acme\n", before=True)
    _insert(formats, "FORMATS: tuple[Format, ...] = (\n", _example("an entry of FORMATS", 4))


def _analysis(root: Path) -> None:
    _write(root, "pptrace/analysis/steps/longest_ops.py", "pptrace/report/tables/longest_ops.py")
    (caption,) = (name for name in EXAMPLES if name.startswith("pptrace/analysis/result.py:"))
    result = root / "pptrace" / "analysis" / "result.py"
    _insert(result, "class StepReport(Struct, frozen=True, kw_only=True):\n", f"{_example(caption)}\n\n", before=True)
    text = result.read_text(encoding="utf-8")
    head, step = text.split("class StepReport(Struct, frozen=True, kw_only=True):\n")
    field = "    ranks: tuple[RankStep, ...]  #: one entry per rank, in order of ranks\n"
    step = step.replace(field, f"{field}{_example('a field of StepReport', 4)}", 1)
    result.write_text(f"{head}class StepReport(Struct, frozen=True, kw_only=True):\n{step}", encoding="utf-8")
    steps = root / "pptrace" / "analysis" / "steps" / "steps.py"
    ranks = "        ranks=tuple(sorted(ranks, key=lambda rank: rank.rank)),\n"
    _insert(steps, ranks, _example("the argument of StepReport", 8))
    after = "from pptrace.analysis.steps.rank_steps import RankWindows, report_rank_steps\n"
    _insert(steps, after, "from pptrace.analysis.steps.longest_ops import longest_ops\n", before=True)
    tables = root / "pptrace" / "report" / "tables" / "__init__.py"
    after = "from pptrace.report.tables.ranks import bounds_table, device_host_table, host_table, phases_table, ranks_table\n"
    _insert(tables, after, "from pptrace.report.tables.longest_ops import longest_ops_table\n", before=True)
    end = "    return tables\n\n\ndef warning_lines"
    _insert(tables, end, _example("a table of a step", 4), before=True)


def _question(root: Path) -> None:
    folder = "pptrace/analysis/calls"
    (root / folder).mkdir()
    _write(root, *(f"{folder}/{name}.py" for name in ("__init__", "types", "answer", "show")))
    report = root / "pptrace" / "analysis" / "report.py"
    after = "from pptrace.analysis.early_receives.types import EarlyReceives\n"
    _insert(report, after, "from pptrace.analysis.calls.types import RankCalls\n", before=True)
    _insert(report, "    def __repr__(self) -> str:\n", f"{_example('a field of Report', 4)}\n", before=True)
    packages = root / "docs" / "architecture.md"
    _insert(packages, "| `pptrace/analysis/stages/` |", f"| `{folder}/` | communication of each rank |\n", before=True)
    types = ".. automodule:: pptrace.analysis.stages.types\n"
    _insert(root / "docs" / "api" / "report.md", types, ".. automodule:: pptrace.analysis.calls.types\n\n", before=True)


def _axis(root: Path) -> None:
    """An axis ``xp`` between cp and dp, to be read."""
    axes = root / "pptrace" / "axes.py"
    _insert(axes, '    EP = "ep"\n', '    XP = "xp"\n')
    _insert(axes, "MESH_ORDER = (Axis.TP, Axis.CP, ", "Axis.XP, ")
    field = "    xp: int | None = 1  #: size of the axis; null as ``tp``\n"
    mesh = root / "pptrace" / "model" / "mesh.py"
    _insert(mesh, "\n    @property\n    def axes(", field, before=True)


def make_axis_runnable(root: Path) -> None:
    """Give the runtime the axis, at size 1."""
    _insert(
        root / "pptrace" / "sizes" / "mesh.py",
        "    tp: int = 1\n    order: tuple[Axis, ...] = MESH_ORDER\n",
        "    xp: int = 1\n",
    )


_RECIPES = {
    "A schedule": _schedule,
    "The labels of a framework": _labels,
    "An input format": _format,
    "An analysis": _analysis,
    "A question": _question,
    "A parallel axis": _axis,
}


def _example(caption: str, indent: int = 0) -> str:
    return textwrap.indent(EXAMPLES[caption], " " * indent)


def _insert(path: Path, anchor: str, text: str, before: bool = False) -> None:
    """Put text after (or before) what stands in a file once; without an anchor, at its end."""
    old = path.read_text(encoding="utf-8")
    assert not anchor or old.count(anchor) == 1, (path, anchor)
    new = old.replace(anchor, text + anchor if before else anchor + text) if anchor else old + text
    path.write_text(new, encoding="utf-8")
