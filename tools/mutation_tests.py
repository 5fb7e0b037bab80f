"""The tests that judge mutants (``mutants.py``): which lines each executes, which to run, and processes to run them in.

What coverage.py measured is kept in ``.mutants.json`` for each file of tests until it or the packages change. Tests marked
``processes``, ``browser`` or ``gpu`` are not run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from tools.mutations import Mutant

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("schedule", "clock", "timeline", "analysis")
TESTS = (
    *("schedule", "clock", "timeline", "analysis", "simulator", "hang_diagnosis", "report", "roundtrip"),
    *(f"api/test_{name}.py" for name in ("docs", "hang", "notebook", "run", "simulate")),
    *(f"cli/test_{name}.py" for name in ("analyze", "schedule_and_simulate", "volume")),
    "tools/test_schedule_table.py",
    *("test_marks.py", "test_samples.py", "test_slices.py", "test_together.py"),
)
"""Folders and files of tests that run in one process and reach the packages."""
BUDGET_S = 30.0
WALL_S = 600.0
"""Time after which a child that uses no processor time is killed, s: other processes may keep it from running."""
MEMORY_BYTES = 16 << 30
CACHE = ROOT / ".mutants.json"
Measured = dict[str, dict[str, Any]]
"""Per test: its processor time in s (``seconds``) and the lines that it executes by file (``lines``)."""


class Plugin:
    """Runs chosen tests alone, in the given order; examples of hypothesis are the same each time and not made smaller."""

    def __init__(
        self,
        order: dict[str, int] | None = None,
        coverage: Any = None,
        instead: Callable[[list[Any]], None] | None = None,
    ) -> None:
        self.order, self.coverage, self.instead, self.seconds, self._begin = order, coverage, instead, {}, 0.0
        self.failed: list[str] = []

    def pytest_sessionstart(self) -> None:
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutants", deadline=None, derandomize=True, database=None, phases=phases)
        settings.load_profile("mutants")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if (order := self.order) is not None:
            items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])

    def pytest_runtestloop(self, session: Any) -> bool | None:
        """Run ``instead`` with the tests collected, if there is one."""
        if self.instead is None:
            return None
        self.instead(session.items)
        return True

    def pytest_collectreport(self, report: Any) -> None:
        self._note_failure(report)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._note_failure(report)

    def _note_failure(self, report: Any) -> None:
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self.coverage:
            self.coverage.switch_context(nodeid)
            self._begin = sum(os.times()[:4])

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if self.coverage:
            self.seconds[nodeid] = sum(os.times()[:4]) - self._begin


def run_pytest(files: Sequence[str], plugin: Plugin, *more: str) -> int:
    import pytest

    marks = ("-m", "not processes and not browser and not gpu")
    imported = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # plugins are, before the fork
    return int(pytest.main([*files, "-qs", *marks, *imported, "-p", "no:cacheprovider", *more], plugins=[plugin]))


class Children:
    """Child processes that run a function each, ``jobs`` at a time."""

    def __init__(self, jobs: int) -> None:
        self._jobs, self._live = jobs, {}

    def start(self, run: Callable[[], int], done: Callable[[int], None], seconds: float = 3_600) -> None:
        """Call ``done`` with what ``run`` returned, or −1 where it took more than that much processor time."""
        while len(self._live) >= self._jobs:
            self._collect()
        sys.stdout.flush()
        if pid := os.fork():
            self._live[pid] = (done, time.monotonic() + WALL_S + 5 * seconds)
            return
        code = 1
        try:
            os.setpgid(0, 0)
            resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), math.ceil(seconds) + 1))
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
            quiet = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(quiet, stream)
            code = run()
        finally:
            os._exit(code)

    def wait(self) -> None:
        while self._live:
            self._collect()

    def _collect(self) -> None:
        for child in self._live:  # and no other child of this process
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)  # what it has started
                self._live.pop(pid)[0](code if code >= 0 else -1)
                return
        for pid, (_, deadline) in self._live.items():
            if time.monotonic() > deadline:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        time.sleep(0.01)


def measure(children: Children) -> tuple[Measured, list[str]]:
    """Run each file of tests whose measurement is not kept, without a change; the tests that fail so are named apart.

    Where a file ends its process, none of its tests is measured, and the file is named.
    """
    kept = json.loads(CACHE.read_text()) if CACHE.exists() else {}
    code = sorted(ROOT.glob("pptrace/**/*.py")) + sorted(ROOT.glob("tests/support/*.py")) + [ROOT / "tests/conftest.py"]
    measured: Measured = {}
    failing: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for path in files_of_tests():
            name = str(path.relative_to(ROOT))
            neighbours = sorted(other for other in path.parent.glob("*.py") if not other.name.startswith("test_"))
            key = hashlib.sha256(b"".join(part.read_bytes() for part in [*code, *neighbours, path])).hexdigest()
            if kept.get(name, {}).get("key") == key:
                measured[name] = kept[name]
                continue
            print(f"measuring {name}", flush=True)
            out = Path(folder, name.replace("/", "-")).with_suffix(".json")

            def done(code: int, name: str = name, key: str = key, out: Path = out) -> None:
                found = json.loads(out.read_text()) if out.exists() else {"tests": {}, "failed": [name]}
                measured[name] = {"key": key, "tests": found["tests"]}
                if code in (0, 5):
                    CACHE.write_text(json.dumps(kept | {name: measured[name]}))
                    kept[name] = measured[name]
                else:
                    failing.extend(found["failed"] or [name])

            children.start(lambda name=name, out=out: _measure_file(name, out), done)
        children.wait()
    return {test: row for name in measured for test, row in measured[name]["tests"].items()}, sorted(failing)


def files_of_tests() -> list[Path]:
    """The files of ``TESTS``, those in folders of folders too."""
    paths = [ROOT / "tests" / name for name in TESTS]
    return [file for path in paths for file in (sorted(path.rglob("test_*.py")) if path.is_dir() else [path])]


def _measure_file(name: str, out: Path) -> int:
    from coverage import Coverage

    watched = [str(ROOT / "pptrace" / package / "*") for package in PACKAGES]
    coverage = Coverage(data_file=None, config_file=False, include=watched)
    plugin = Plugin(coverage=coverage)
    coverage.start()
    code = run_pytest([name], plugin)
    coverage.stop()
    passed = {test: seconds for test, seconds in plugin.seconds.items() if test not in plugin.failed}
    tests: Measured = {test: {"seconds": seconds, "lines": {}} for test, seconds in passed.items()}
    data = coverage.get_data()
    for file in data.measured_files():
        path = str(Path(file).relative_to(ROOT))
        for line, contexts in data.contexts_by_lineno(file).items():
            for test in set(contexts) & set(tests):
                tests[test]["lines"].setdefault(path, []).append(line)
    out.write_text(json.dumps({"tests": tests, "failed": plugin.failed}))
    return code


def choose_tests(mutant: Mutant, measured: Measured) -> list[str]:
    """The tests to run against a mutant, in order."""
    by_time = sorted(measured, key=lambda test: measured[test]["seconds"])
    near = {test for test, row in measured.items() if mutant.path in row["lines"]}
    if mutant.is_in_function:
        near = {test for test in near if not set(measured[test]["lines"][mutant.path]).isdisjoint(mutant.lines)}
    files = {test.split("::")[0] for test in near} or {f"tests/{mutant.path.split('/')[1]}"}
    rest = [test for test in by_time if test not in near and test.startswith(tuple(files))]
    chosen, total = [], 0.0
    for test in [*sorted((test for test in by_time if test in near), key=lambda test: _distance(test, mutant)), *rest]:
        total += measured[test]["seconds"]
        if chosen and total > BUDGET_S:
            break
        chosen.append(test)
    files_in_order = list(dict.fromkeys(test.split("::")[0] for test in chosen))
    return sorted(
        chosen, key=lambda test: files_in_order.index(test.split("::")[0])
    )  # fixtures of a file are made once


def _distance(test: str, mutant: Mutant) -> tuple[int, int]:
    """Sort key of a test: first those in the folder that mirrors the mutant's, then those that have most of its path."""
    folder, mirrored = Path(test.split("::")[0]).parent.parts, ("tests", *Path(mutant.path).parent.parts[1:])
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(folder, mirrored, strict=False)))
    return -common, len(folder) - common
