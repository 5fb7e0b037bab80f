"""The recipes of docs/extending.md hold: what they name is there, and their examples run."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import pptrace.analysis.result as results
from pptrace.errors import TraceError
from pptrace.ingest import formats
from pptrace.model.traces import InputFormat
from pptrace.recognise.labels.label import Label
from pptrace.schedule.shape import Shape
from pptrace.schedule.validate import validate
from pptrace.simulator import IDEAL, simulate
from pptrace.workflow.load import load
from tests.docs.recipes import EXAMPLES, NEW, PAGE
from tests.support.programs import ROOT, SAMPLES


@pytest.fixture
def made() -> Iterator[list[str]]:
    """The names of modules to forget afterwards."""
    names: list[str] = []
    yield names
    for name in names:
        sys.modules.pop(name, None)


def module(path: str, made: list[str]) -> ModuleType:
    """The module that following the recipe makes."""
    new = ModuleType(path.removesuffix(".py").replace("/", "."))
    sys.modules[new.__name__] = new
    made.append(new.__name__)
    exec(compile(EXAMPLES[path], path, "exec"), new.__dict__)
    return new


def test_every_path_that_a_recipe_names_exists_but_for_those_that_it_adds() -> None:
    named = set(re.findall(r"`((?:pptrace|instrument|dashboards|tests|docs)/[\w/.]*)`", PAGE))
    assert len(named) > 30
    assert {name for name in named | NEW if not (ROOT / name).exists()} <= NEW


def test_every_field_of_a_format_that_tells_its_files_from_others_is_described() -> None:
    described = set(re.findall(r"`(\w+)`", PAGE.split("| field of `Format` |")[1].split("\n\n")[0]))
    assert described == set(formats.Format.__struct_fields__) - {"name", "sniff", "read"}


def test_the_schedule_is_valid_and_has_the_bubble_of_its_closed_form(made: list[str]) -> None:
    schedule = module("pptrace/schedule/builders/gpipe_reversed.py", made)
    plan = schedule.build(Shape(4, 8))
    validate(plan)
    assert [str(action) for action in plan.compute_actions(1)] == [
        *(f"1F{mb}" for mb in range(8)),
        *(f"1B{mb}" for mb in reversed(range(8))),
    ]
    assert simulate(plan, IDEAL).bubble_ratio == pytest.approx(3 / 8)


def test_the_labels_are_read(made: list[str]) -> None:
    labels = module("pptrace/recognise/labels/acme.py", made)

    def read(name: str) -> Label | None:
        return next((make(match) for pattern, make in labels.RULES if (match := pattern.fullmatch(name))), None)

    backward, step = read("acme/bwd/s3/mb12"), read("acme/step/7")
    assert [str(action) for action in backward.actions] == ["3B12"]
    assert (step.span, step.step) == ("STEP", 7)
    assert read("acme/bwd/s3") is None


def lines(*ops: tuple[int, str, int, float, float]) -> str:
    names = ("rank", "op", "mb", "begin_us", "end_us")
    rows = (dict(zip(names, op, strict=True)) for op in ops)
    return "".join(json.dumps({"acme": 1, "step": 0, "stage": row["rank"], **row}) + "\n" for row in rows)


def test_the_format_gives_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[str]) -> None:
    acme = module("pptrace/ingest/op_tables/acme.py", made)
    names = {**vars(formats), **vars(acme)}
    (entry,) = eval(EXAMPLES["an entry of FORMATS"], names)
    monkeypatch.setattr(formats, "FORMATS", (entry, *formats.FORMATS))
    path = tmp_path / "run.jsonl"
    path.write_text(lines((0, "fwd", 0, 0, 1.5), (1, "fwd", 0, 1.5, 3), (1, "bwd", 0, 3, 5), (0, "bwd", 0, 5, 7)))
    report = load([path]).report
    (step,) = report.steps
    assert (report.framework, report.inputs[0].format, report.mesh.pp) == ("acme", InputFormat.OPLOG, 2)
    assert [[(op.kind, op.start_ns, op.end_ns) for op in rank.ops] for rank in step.ranks] == [
        [("F", 0, 1500), ("B", 5000, 7000)],
        [("F", 1500, 3000), ("B", 3000, 5000)],
    ]
    assert [(rank.window_ns, rank.compute_ns) for rank in step.ranks] == [(7000, 3500), (7000, 3500)]


GOOD = {"acme": 1, "rank": 1, "step": 0, "op": "fwd", "stage": 1, "mb": 0, "begin_us": 1, "end_us": 2}
DAMAGED = (
    *({"rank": value} for value in (10**30, -4, None, True, 1.5, "x", [1], {})),
    *({"mb": value} for value in (10**30, -4, "x")),
    *(*({"begin_us": value} for value in (3, "x", None, 1e400, [])), {"op": "evaluate"}, {"op": []}),
    {"rank": 0, "stage": 0},
)


@pytest.mark.parametrize(
    "text",
    [
        *('{"acme": 1}\n', '{"acme": 1, "rank": \n', "\0", "[]", "3", "[" * 100_000),
        *(json.dumps(GOOD | damage) for damage in DAMAGED),
        json.dumps(GOOD).replace('"mb": 0', f'"mb": {"[" * 500}{"]" * 500}'),
        json.dumps(GOOD).replace('"mb": 0', f'"mb": {"9" * 10_000}'),
    ],
    ids=lambda text: text[:40],
)
def test_damage_of_the_format_is_one_line(tmp_path: Path, made: list[str], text: str) -> None:
    path = tmp_path / "run.jsonl"
    acme = module("pptrace/ingest/op_tables/acme.py", made)
    path.write_text(lines((0, "fwd", 0, 0, 1)) + json.dumps(GOOD) + "\n")
    assert len(acme.read_acme(path).ops) == 2
    path.write_text(lines((0, "fwd", 0, 0, 1)) + text)
    with pytest.raises(TraceError, match=r"row 2[: ]") as raised:
        acme.read_acme(path)
    assert "\n" not in str(raised.value)


def test_a_file_of_the_format_that_is_no_text_is_one_line(tmp_path: Path, made: list[str]) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(lines((0, "fwd", 0, 0, 1)).encode() + b"\xff\xfe")
    with pytest.raises(TraceError, match=r"run\.jsonl"):
        module("pptrace/ingest/op_tables/acme.py", made).read_acme(path)


def test_the_analysis_gives_the_longest_op_of_each_stage_as_a_table(
    monkeypatch: pytest.MonkeyPatch, made: list[str]
) -> None:
    (caption,) = (name for name in EXAMPLES if name.startswith("pptrace/analysis/result.py:"))
    names = {"Struct": results.Struct, "__name__": __name__}
    exec(EXAMPLES[caption], names)
    monkeypatch.setattr(results, "LongestOp", names["LongestOp"], raising=False)
    step = load([SAMPLES / "1f1b_p4"]).report.steps[0]
    result = module("pptrace/analysis/steps/longest_ops.py", made).longest_ops(step.ranks)
    assert [op.stage for op in result] == [0, 1, 2, 3]
    for op in result:
        same = [other for rank in step.ranks for other in rank.ops if other.stage == op.stage]
        assert op.duration_ns == max(other.end_ns - other.start_ns for other in same)
    shown = type("Step", (), {"longest_ops": result})
    table = module("pptrace/report/tables/longest_ops.py", made).longest_ops_table(shown)
    assert len(table.rows) == 4
    assert all(len(row) == len(table.columns) for row in table.rows)
