"""Part ``tests``: pytest's tests with the mark ``gpu``, each of which becomes a check."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree

from tests.support.programs import ROOT
from tools.gpu.checks import Check, Outcome
from tools.gpu.part import Setting, main
from tools.gpu.parts import gpu_test_files


def part(setting: Setting) -> None:
    report = setting.work / "tests.xml"
    report.unlink(missing_ok=True)
    files = [str(path) for path in gpu_test_files()]
    options = ["-m", "gpu", "-n", "0", "-q", f"--junitxml={report}", "-p", "no:cacheprovider"]
    with setting.checks.check("pytest -m gpu") as figures:
        figures["files"] = len(files)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *files], cwd=ROOT, check=False, timeout=max(1.0, setting.left_s)
        )
        assert done.returncode in (0, 1), f"pytest ended with code {done.returncode}; its lines say why"
        assert report.exists(), "pytest wrote no report"
    if report.exists():
        for check in read_junit(report.read_text(encoding="utf-8")):
            setting.checks.add(check)


def read_junit(text: str) -> list[Check]:
    """The tests in a report of pytest."""
    return [_check(case) for case in ElementTree.fromstring(text).iter("testcase")]


def _check(case: ElementTree.Element) -> Check:
    name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name', '')}"
    seconds = float(case.get("time", "0"))
    for tag, outcome in (("failure", Outcome.FAILED), ("error", Outcome.FAILED), ("skipped", Outcome.SKIPPED)):
        if (reason := case.find(tag)) is not None:
            text = (reason.text or "")[-1500:] if outcome is Outcome.FAILED else reason.get("message", "")
            return Check(name, outcome, seconds, text)
    return Check(name, Outcome.PASSED, seconds)


if __name__ == "__main__":
    main(part)
