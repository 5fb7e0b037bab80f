"""The house: no rooms import each other; first lines of docstrings are an imperative verb, or the noun and its unit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tools.house import (
    ASIDES,
    PACKAGES,
    QUESTIONS,
    arrows_of,
    describe_circles,
    odd_openings_of,
    private_once,
    recipes_of,
)

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_of_the_packages_begin_with_a_verb_or_a_noun(package: str) -> None:
    assert not [line for path in (ROOT / package).rglob("*.py") for line in odd_openings_of(path, QUESTIONS | ASIDES)]


def test_no_rooms_import_each_other() -> None:
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert describe_circles(Counter(arrow for path in paths for arrow in arrows_of(path, ROOT))) == "none"


def test_a_circle_is_seen_over_any_number_of_rooms(tmp_path: Path) -> None:
    for room, imported in (("a", "b"), ("b", "c"), ("c", "a"), ("d", "a")):
        (tmp_path / "pptrace" / room).mkdir(parents=True)
        (tmp_path / "pptrace" / room / "x.py").write_text(f"from pptrace.{imported}.x import y\n", encoding="utf-8")
    arrows = Counter(arrow for path in tmp_path.rglob("*.py") for arrow in arrows_of(path, tmp_path))
    assert describe_circles(arrows) == "pptrace/a ↔ pptrace/b ↔ pptrace/c"


def test_the_files_that_recipes_touch_are_read_from_the_page() -> None:
    assert dict(recipes_of(ROOT / "docs" / "extending.md"))["An analysis"] == "5"
    assert recipes_of(ROOT / "nowhere.md") == []


def test_private_once_called_once_are_counted(tmp_path: Path) -> None:
    one, two = tmp_path / "one.py", tmp_path / "two.py"
    one.write_text("def _once(): pass\ndef _twice(): pass\n_once()\n_twice()\n_twice()\n")
    two.write_text(
        "class A:\n    def _once(self): self._once()\n    def __init__(self): self._method()\n    def _method(self): ...\n"
    )
    assert private_once([one]) == (2, 1)
    assert private_once([one, two]) == (5, 3)


def test_docstrings_of_tests_and_tools_begin_with_no_question() -> None:
    paths = [path for folder in ("tests", "tools") for path in (ROOT / folder).rglob("*.py")]
    assert not [line for path in paths for line in odd_openings_of(path, QUESTIONS)]


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
