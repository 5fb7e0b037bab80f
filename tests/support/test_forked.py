"""A fork does what a new interpreter does: arguments, paths, environment, streams, exit codes and signals."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forked import ROOT, start_python

SHOWN = """
import os, sys
print(sys.argv, sys.path[0], __name__, os.getcwd(), os.environ.get("GIVEN"), os.environ.get("NOT_GIVEN"), sys.stdin.read())
print(os.getpid() == os.getsid(0), sorted(map(int, os.listdir("/proc/self/fd"))), file=sys.stderr)
"""
STARTING = """
import subprocess, sys
told = subprocess.run([sys.executable, "-c", sys.argv[1]], capture_output=True, text=True)
print(told.returncode, told.stdout, told.stderr)
"""
STARTED = """
import os, sys
print("torch" in sys.modules, os.getppid() == int(os.environ["PARENT"]), sorted(map(int, os.listdir("/proc/self/fd"))))
sys.exit(5)
"""


def ended(*arguments: str, cwd: Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    process = start_python(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={"PYTHONPATH": "/some/where", **environ},
        start_new_session=True,
    )
    out, err = process.communicate("typed", timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_code_a_module_and_a_script_are_run_as_python_runs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOT_GIVEN", "1")
    (tmp_path / "shown.py").write_text(SHOWN)
    commands = [
        ("-c", SHOWN, "-m", "x"),
        ("-m", "shown", "x"),
        (str(tmp_path / "shown.py"), "x"),
        ("-P", "-m", "shown"),
    ]
    for command in commands:
        forked = ended(*command, cwd=tmp_path, GIVEN="yes")
        anew = subprocess.run(
            [sys.executable, *command],
            input="typed",
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={"PYTHONPATH": "/some/where", "GIVEN": "yes"},
            start_new_session=True,
            check=False,
        )
        assert (forked.returncode, forked.stdout) == (anew.returncode, anew.stdout), command
        assert forked.stderr.splitlines()[-1:] == anew.stderr.splitlines()[-1:], command


@pytest.mark.parametrize(
    ("code", "exit_code", "error"),
    [
        ("raise SystemExit(7)", 7, ""),
        ("raise SystemExit('no data')", 1, "no data\n"),
        (
            "raise ValueError('bad')",
            1,
            'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\nValueError: bad\n',
        ),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("import atexit, sys; atexit.register(sys.stderr.write, 'end')", 0, "end"),
    ],
)
@pytest.mark.parametrize("program", ["", "pptrace.cli"], ids=["program", "launcher"])
def test_a_fork_ends_as_a_new_interpreter_would(code: str, exit_code: int, error: str, program: str) -> None:
    done = ended("-c", code, program)
    assert (done.returncode, done.stdout, done.stderr) == (exit_code, "", error)


@pytest.mark.parametrize(
    ("options", "environ", "out"), [((), {}, ""), (("-u",), {}, "1\n"), ((), {"PYTHONUNBUFFERED": "1"}, "1\n")]
)
def test_what_was_printed_before_a_sudden_end_is_lost_unless_python_keeps_nothing_back(
    options: tuple[str, ...], environ: dict[str, str], out: str
) -> None:
    assert ended(*options, "-c", "import os; print(1); os._exit(0)", **environ).stdout == out


def test_what_a_launcher_starts_is_its_child_and_has_nothing_of_its_streams() -> None:
    code = f"import os; os.environ['PARENT'] = str(os.getpid()){STARTING}"
    done = ended("-c", code, STARTED, "pptrace.cli")
    assert (done.stdout, done.stderr) == ("5 True True [0, 1, 2, 3]\n \n", "")


def test_a_process_that_is_killed_is_known_to_be() -> None:
    process = start_python(
        [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"], stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout.readline() == b"1\n"
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL
