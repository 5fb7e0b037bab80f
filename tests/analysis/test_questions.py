"""Questions of the report: the rows behind what they show are found by name."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from dashboards.tables import TABLES
from pptrace.analysis.questions import QUESTIONS


def test_every_file_of_a_question_has_a_name_of_its_own_and_is_offered_by_the_dashboard() -> None:
    shown = [name for name in QUESTIONS if find_spec(f"pptrace.analysis.{name}.show")]
    files = [name for question in shown for name in import_module(f"pptrace.analysis.{question}.show").FILES]
    assert len(shown) >= 6
    assert len(files) == len(set(files))
    assert set(files) <= set(TABLES)
