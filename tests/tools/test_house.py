"""First lines of docstrings: an imperative verb, or the noun and its unit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.house import ASIDES, PACKAGES, QUESTIONS, odd_openings_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_of_the_packages_begin_with_a_verb_or_a_noun(package: str) -> None:
    assert not [line for path in (ROOT / package).rglob("*.py") for line in odd_openings_of(path, QUESTIONS | ASIDES)]


def test_docstrings_of_tests_begin_with_no_question() -> None:
    assert not [line for path in (ROOT / "tests").rglob("*.py") for line in odd_openings_of(path, QUESTIONS)]


@pytest.mark.parametrize(
    "source",
    [
        '"""What a module holds."""',
        'class A:\n    """Which one."""',
        'class A:\n    class B:\n        async def f(self):\n            r"""Whether it is."""',
        'def f():\n    """\n    how many there are.\n    """',
        'def f():\n    "When" " it was."',
        'def f():\n    """(whether it is, number)"""',
        'def f():\n    """``where``: a place."""',
        'A = 1\n"""Why it is one."""',
        'if A:\n    B: int = 1\nelse:\n    B: int = 2\n    """Who it is."""',
        'class A:\n    def __init__(self):\n        self.b = 1\n        """Whose it is."""',
    ],
)
def test_a_question_is_seen_wherever_and_however_it_is_written(source: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(source, encoding="utf-8")
    assert len(odd_openings_of(tmp_path / "module.py", QUESTIONS)) == 1


def test_verbs_nouns_and_texts_that_are_no_docstrings_pass(tmp_path: Path) -> None:
    source = 'def f():\n    """Return whether it is."""\n    x = 1\n    g("What?")\n    "Which one"\n\nA = "How"\n'
    (tmp_path / "module.py").write_text(source, encoding="utf-8")
    assert odd_openings_of(tmp_path / "module.py", QUESTIONS) == []
