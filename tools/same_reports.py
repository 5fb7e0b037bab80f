"""Shows that a change leaves every report as it was: records the JSON of each that the tests make, compares two records.

    git worktree add /tmp/before COMMIT
    python tools/same_reports.py record before.jsonl --checkout /tmp/before
    python tools/same_reports.py record after.jsonl
    python tools/same_reports.py compare before.jsonl after.jsonl

A report is known by the name of its test, whatever file that is in, and its number within the test. The texts of
warnings, findings and mismatches may change; how many there are may not. Left out are tests that start programs, themselves
or by a fixture, since those measure real time, and those of random examples: Hypothesis draws numbers that stand in the code, so
that other code has others.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

FILE_VARIABLE = "PPTRACE_RECORD_REPORTS"
TEXTS = {
    "warnings": "a warning",
    "mismatches": "a mismatch",
    "title": "a title",
    "detail": "a detail",
    "note": "a note",
}
"""Members that hold prose, and what stands for each text of theirs in a record."""
MOST_RANK_STEPS = 5_000
"""Ranks × steps of the largest reports that are recorded: larger ones are copies of one step, made to fill a screen."""
ADDED = ("verdict",)
"""Members that newer versions add at the top: prose, left out."""
READERS = ("pptrace.ingest.kineto.decode_pool", "pptrace.nsys")
"""Modules that start programs to read files: what they read is the same each time."""


# As a plugin of pytest: ``pytest -p tools.same_reports`` with FILE_VARIABLE in the environment.


def pytest_configure(config: pytest.Config) -> None:
    if FILE_VARIABLE in os.environ:
        config.pluginmanager.register(Recorder(Path(os.environ[FILE_VARIABLE])), "reports-recorder")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if FILE_VARIABLE not in os.environ:
        return
    random = [item for item in items if getattr(getattr(item, "obj", None), "is_hypothesis_test", False)]
    config.hook.pytest_deselected(items=random)
    items[:] = [item for item in items if item not in random]


class Recorder:
    """Writes every report that a test makes as one line: the test, the number within it, and the JSON.

    The reports of a test are written when it has ended, and only where neither it nor a fixture of its has started a program.
    Those in which pptrace reads traces do not count.
    """

    def __init__(self, path: Path) -> None:
        from pptrace.analysis.report import Report

        self._path = path.with_suffix(f".{os.environ.get('PYTEST_XDIST_WORKER', 'main')}.part")
        self._test = ""
        self._lines: list[str] = []
        self._folder = Path.cwd()
        self._starts_programs = False
        self._fixtures: list[pytest.FixtureDef[Any]] = []
        self._fixtures_of_programs: set[pytest.FixtureDef[Any]] = set()
        original = Report.__init__
        original_popen = subprocess.Popen.__init__

        def recorded(report: Report, *args: Any, **kwargs: Any) -> None:
            original(report, *args, **kwargs)
            self._add(report)

        def started(process: Any, *args: Any, **kwargs: Any) -> None:
            if sys._getframe(1).f_globals["__name__"] not in READERS:
                self._starts_programs = True
                self._fixtures_of_programs.update(self._fixtures)
            original_popen(process, *args, **kwargs)

        Report.__init__ = recorded  # type: ignore[method-assign]
        subprocess.Popen.__init__ = started  # type: ignore[method-assign]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, bool, bool]:
        self._test, self._lines, self._starts_programs = item.name, [], False
        self._folder = item.config.rootpath
        ended = yield
        info = getattr(item, "_fixtureinfo", None)
        fixtures = {fixture for of_name in info.name2fixturedefs.values() for fixture in of_name} if info else set()
        if not self._starts_programs and not fixtures & self._fixtures_of_programs:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(self._lines)
        return ended

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        self._fixtures.append(fixturedef)
        try:
            return (yield)
        finally:
            self._fixtures.pop()

    def _add(self, report: Any) -> None:
        if sum(len(step.ranks) for step in report.steps) > MOST_RANK_STEPS:
            return
        from pptrace.report.to_json import dump, report_object

        text = dump(report_object(report, with_ops=True))
        text = re.sub(r"[^\" ]*/pytest-[0-9][^\" ]*/", "", text).replace(str(self._folder), "")
        value = {key: item for key, item in json.loads(text).items() if key not in ADDED}
        line = {"test": self._test, "number": len(self._lines), "report": without_texts(value)}
        self._lines.append(json.dumps(line, sort_keys=True) + "\n")


def without_texts(value: Any) -> Any:
    """A JSON value with a word in place of each text that people read."""
    if isinstance(value, dict):
        return {key: _word(TEXTS[key], item) if key in TEXTS else without_texts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_texts(item) for item in value]
    return value


def _word(word: str, value: Any) -> Any:
    return [word] * len(value) if isinstance(value, list) else value and word


def record(path: Path, checkout: Path, tests: list[str]) -> int:
    """Run the tests of a checkout and write what they report, sorted, to one file."""
    environ = os.environ | {FILE_VARIABLE: str(path.resolve()), "PYTHONPATH": f"{checkout}:{Path(__file__).parent}"}
    environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(path.resolve().with_suffix(".hypothesis"))
    selected = [
        "-m",
        "not processes and not browser",
        "-p",
        "same_reports",
        "--hypothesis-seed=0",
        "-n",
        "2",
        "-q",
        *tests,
    ]
    for left in path.parent.resolve().glob(f"{path.stem}.*.part"):  # by a run that was ended
        left.unlink()
    ended = subprocess.run([sys.executable, "-m", "pytest", *selected], cwd=checkout, env=environ, check=False)
    lines: list[str] = []
    for part in path.parent.resolve().glob(f"{path.stem}.*.part"):
        lines += part.read_text(encoding="utf-8").splitlines()
        part.unlink()
    path.write_text("\n".join(sorted(lines)) + "\n", encoding="utf-8")
    print(f"{len(lines)} reports written to {path}")
    return ended.returncode


def compare(before: Path, after: Path) -> int:
    """Print what differs, each place once; 1 where anything does, or where the two have no report in common.

    Members that are new are no difference.
    """
    first, second = _read(before), _read(after)
    common = first.keys() & second.keys()
    differing = sorted(key for key in common if first[key] != second[key])
    kinds: dict[str, list[str]] = defaultdict(list)
    for test, number in differing:
        difference = first_difference(json.loads(first[test, number]), json.loads(second[test, number]))
        kinds[re.sub(r"\[\d+\]", "[]", difference.split(": ")[0])].append(f"{test} #{number}: {difference}")
    longer = len(kinds.pop("", ()))
    for of_kind in sorted(kinds.values(), key=len, reverse=True):
        print(f"{len(of_kind)} × {of_kind[0]}")
    if longer:
        print(f"{longer} have members that only the newer version has, and are the same otherwise")
    only = Counter({"before": len(first.keys() - common), "after": len(second.keys() - common)})
    print(
        f"{len(common)} reports in both, {len(differing) - longer} differ; {only['before']} only before, "
        f"{only['after']} only after"
    )
    return int(bool(kinds) or not common)


def _read(path: Path) -> dict[tuple[str, int], str]:
    entries = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {(entry["test"], entry["number"]): json.dumps(entry["report"], sort_keys=True) for entry in entries}


def first_difference(before: Any, after: Any, where: str = "$") -> str:
    """Describe where two JSON values differ first, and how; "" where the later one has more members, and no other."""
    if isinstance(before, dict) and isinstance(after, dict):
        if before.keys() - after.keys():
            return f"{where}: {sorted(before.keys() - after.keys())} → left out"
        pairs = [(f"{where}.{key}", before[key], after[key]) for key in before]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = [(f"{where}[{index}]", *pair) for index, pair in enumerate(zip(before, after, strict=True))]
    else:
        return f"{where}: {str(before)[:80]} → {str(after)[:80]}"
    return next(filter(None, (first_difference(*pair[1:], pair[0]) for pair in pairs if pair[1] != pair[2])), "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run the tests and write their reports to FILE")
    recording.add_argument("file", type=Path)
    recording.add_argument("--checkout", type=Path, default=Path(__file__).parents[1], help="whose tests and code")
    recording.add_argument("tests", nargs="*", help="some of its tests; left out, all")
    comparing = commands.add_parser("compare", help="compare two records")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "record":
        return record(options.file, options.checkout.resolve(), options.tests)
    return compare(options.before, options.after)


if __name__ == "__main__":
    sys.exit(main())
