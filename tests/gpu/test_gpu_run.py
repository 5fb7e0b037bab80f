"""The GPU run without a GPU: its plan, its budget, what it does with parts that fail or hang, and a part for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from pptrace.errors import UsageError
from pptrace.schedule.registry import SCHEDULES
from tests.support.extent import ALL
from tests.support.programs import ROOT
from tools.gpu import exact, offline_venv, recorded, samples
from tools.gpu.checks import Check, Checks, Outcome, Skip, read_checks
from tools.gpu.examples import EXAMPLES
from tools.gpu.marked_tests import read_junit
from tools.gpu.parts import PARTS, Part, gpu_test_files
from tools.gpu.run import BUDGET_S, main, run_parts
from tools.gpu.summary import outcome_of

TOOL = ROOT / "tools" / "gpu" / "run.py"


def part(module: str, limit_s: float = 30.0, least_s: float = 1.0) -> Part:
    return Part("made up", "for this test", module, (), limit_s, least_s)


def test_the_plan_names_every_part_with_its_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--plan"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [part.name for part in PARTS]
    assert len({part.name for part in PARTS}) == len(PARTS)
    for each in PARTS:
        assert find_spec(each.module) is not None, each.module
        assert each.least_s < each.limit_s < BUDGET_S


def test_parts_run_dry_and_leave_their_results(tmp_path: Path) -> None:
    options = ["--dry-run", "--parts", "environment", *(["schedules"] if ALL else []), "--work", str(tmp_path / "work")]
    environ = {**os.environ, "OUT": str(tmp_path / "out")}
    done = subprocess.run(
        [sys.executable, str(TOOL), *options], capture_output=True, text=True, timeout=240, env=environ, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["outcome"], summary["dry"]) == ("passed", True)
    result, *more = summary["parts"]
    outcomes = {check["name"]: check["outcome"] for check in result["checks"]}
    assert outcomes["a product and a pinned copy are right"] == "passed"
    assert outcomes["a GPU is there"] == "skipped"
    assert all(part["outcome"] == "passed" for part in more)
    assert "environment" in (tmp_path / "out" / "summary.txt").read_text()
    with tarfile.open(tmp_path / "out" / "logs.tar.gz") as archive:
        assert "logs/environment.log" in archive.getnames()


def test_what_the_budget_leaves_no_time_for_is_skipped_and_named(tmp_path: Path) -> None:
    summary = run_parts(PARTS, 12.0, tmp_path / "out", tmp_path / "work", dry=False)
    assert [result.outcome for result in summary.parts] == [Outcome.SKIPPED] * len(PARTS)
    assert "run it alone: --parts record" in (tmp_path / "out" / "summary.txt").read_text()
    assert summary.outcome is Outcome.SKIPPED


def test_a_part_that_cannot_start_fails_and_the_next_one_runs(tmp_path: Path) -> None:
    chosen = [part("tools.gpu.no_such_module"), part("tools.gpu.checks")]
    summary = run_parts(chosen, 100.0, tmp_path / "out", tmp_path / "work", dry=False)
    assert [result.outcome for result in summary.parts] == [Outcome.FAILED, Outcome.SKIPPED]
    assert "ended with code 1" in summary.parts[0].note
    assert summary.outcome is Outcome.FAILED


HANGS = """
import subprocess, sys, time
sleeper = "import time; time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", sleeper], start_new_session=True)
open(sys.argv[1], "w").write(str(child.pid))
time.sleep(600)
"""
LIMITS = """
import os, sys
from pathlib import Path
from tools.gpu import processes
from tools.gpu.processes import adopt_orphans, descendants, run
adopt_orphans()
processes._STACKS_S = 0.1  # it has no stacks to write
command = [sys.executable, "-I", "-S", "-c", sys.argv[1], sys.argv[2]]
ended = run(command, Path(sys.argv[3]), float(sys.argv[4]), os.environ, Path.cwd())
print(ended.code, descendants(os.getpid()))
"""


def test_a_part_that_hangs_is_killed_with_processes_of_other_sessions(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    arguments = [HANGS, str(pid_file), str(tmp_path / "log"), "4"]
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", LIMITS, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=120, check=True
    )
    assert done.stdout.split() == ["None", "[]"]
    assert time.monotonic() - started < 60
    assert not Path(f"/proc/{pid_file.read_text()}").exists()


def test_checks_say_how_they_ended_also_when_the_file_is_cut(tmp_path: Path) -> None:
    checks = Checks(tmp_path / "checks.jsonl")
    with checks.check("right") as figures:
        figures["ops"] = 3
    with checks.check("not here"):
        raise Skip("no GPU")
    assert not checks.any_failed
    with checks.check("wrong"):
        raise ValueError("1 is not 2")
    assert checks.any_failed
    with (tmp_path / "checks.jsonl").open("a") as file:
        file.write('{"name": "cut of')
    result = read_checks(tmp_path / "checks.jsonl")
    assert [(check.name, check.outcome) for check in result] == [
        ("right", Outcome.PASSED),
        ("not here", Outcome.SKIPPED),
        ("wrong", Outcome.FAILED),
    ]
    assert result[0].figures == {"ops": 3}
    assert result[2].detail == "ValueError: 1 is not 2"


@pytest.mark.parametrize(
    ("code", "outcomes", "expected"),
    [
        (0, (Outcome.PASSED, Outcome.SKIPPED), Outcome.PASSED),
        (0, (Outcome.SKIPPED,), Outcome.SKIPPED),
        (1, (Outcome.PASSED,), Outcome.FAILED),
        (None, (Outcome.PASSED,), Outcome.FAILED),
        (0, (Outcome.PASSED, Outcome.FAILED), Outcome.FAILED),
    ],
)
def test_a_part_ends_as_its_checks_and_its_exit_code_say(
    code: int | None, outcomes: tuple[Outcome, ...], expected: Outcome
) -> None:
    assert outcome_of(code, [Check("", outcome) for outcome in outcomes]) is expected


def test_tests_of_pytest_become_checks() -> None:
    text = (
        '<testsuites><testsuite><testcase classname="tests.a" name="b" time="0.5"/>'
        '<testcase classname="tests.a" name="c" time="0"><failure message="m">E   wrong</failure></testcase>'
        '<testcase classname="tests.a" name="d" time="0"><skipped message="no GPU"/></testcase></testsuite></testsuites>'
    )
    rows = [(check.name, check.outcome, check.detail) for check in read_junit(text)]
    assert rows == [
        ("a::b", Outcome.PASSED, ""),
        ("a::c", Outcome.FAILED, "E   wrong"),
        ("a::d", Outcome.SKIPPED, "no GPU"),
    ]


def test_every_test_marked_gpu_is_among_the_files() -> None:
    names = {path.name for path in gpu_test_files()}
    assert {"test_cuda.py", "test_context_parts.py"} <= names
    assert Path(__file__).name not in names


def test_every_schedule_and_axis_is_among_the_cases() -> None:
    assert {exact.schedule_case(name).plan.name for name in SCHEDULES} == set(SCHEDULES)
    mixes = list(exact.MESHES.values())
    assert {mix.zero for mix in mixes} == {0, 1, 2, 3}
    for axis in ("tp", "cp", "dp", "pp", "ulysses"):
        assert any(getattr(mix, axis) > 1 for mix in mixes), axis
    assert any(mix.overlap and mix.sequence for mix in mixes)
    assert all(mix.world in (exact.RANKS, exact.LARGE) for mix in mixes)
    assert set(exact.SMALL_MESHES) <= set(exact.MESHES)


ARGUMENTS = {name: run.arguments for name, run in recorded.RUNS.items()} | dict(EXAMPLES) | dict(samples.CASES)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_arguments_of_the_runs_fit_together(name: str) -> None:
    from instrument.examples.gpt_arguments import make_parser
    from instrument.examples.gpt_settings import RankInfo, resolve_settings

    ranks = 2 if name.endswith("_p2") else 4
    options = make_parser().parse_args([*ARGUMENTS[name], "--backend", "gloo"])
    if options.cuda_graphs:  # what is checked last
        with pytest.raises(UsageError, match="--cuda-graphs needs a GPU"):
            resolve_settings(options, RankInfo(0, ranks, 0, ranks))
        return
    assert resolve_settings(options, RankInfo(0, ranks, 0, ranks)).shape.world == ranks


def test_the_wheels_bring_all_that_they_need_in_turn() -> None:
    listed = offline_venv.requirements(offline_venv.WHEELS_LIST.read_text(encoding="utf-8"))
    given = {*offline_venv.GIVEN, "packaging"}
    for name in listed:
        needed = [line for line in metadata.requires(name) or () if "extra ==" not in line]
        for line in needed:
            needs = line.split(";")[0].strip()
            plain = "".join(c if c.isalnum() or c in "-_." else " " for c in needs).split()[0].lower()
            assert plain in listed or plain in given or ";" in line, (name, line)


def test_an_environment_without_its_wheels_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline_venv, "WHEELS_LIST", tmp_path / "wheels.txt")
    (tmp_path / "wheels.txt").write_text("# of this test\nno-such-package>=1.0\n")
    assert offline_venv.main(["make", str(tmp_path / "env"), str(tmp_path / "wheels")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("has no wheel of it; collect them with `make gpu-wheels`")
    assert not (tmp_path / "env").exists()


def test_an_environment_sees_this_checkout_and_the_packages_of_its_maker(tmp_path: Path) -> None:
    assert offline_venv.main(["make", str(tmp_path / "env"), str(tmp_path / "wheels")]) == 0
    program = "import pptrace, msgspec, sys; print(pptrace.__file__, sys.prefix)"
    done = subprocess.run(
        [str(tmp_path / "env" / "bin" / "python"), "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == [str(ROOT / "pptrace" / "__init__.py"), str(tmp_path / "env")]
    version = subprocess.run(
        [str(tmp_path / "env" / "bin" / "pptrace"), "--version"], capture_output=True, timeout=60, check=True
    )
    assert version.stdout.startswith(b"pptrace")
