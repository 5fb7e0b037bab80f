"""Output of a command: files, stdout, and a stdout that takes nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pptrace.cli.output import report_console
from tests.support.extent import ALL
from tests.support.forked import PROGRAM, start_python
from tests.support.programs import SAMPLES, one_line, pptrace_here, pptrace_in_shell

P2 = SAMPLES / "1f1b_p2"
SHAPE = "1f1b --pp 2 --microbatches 4"


@pytest.mark.parametrize(
    "command",
    ["schedule list", f"simulate {SHAPE} --json -"] + [f"analyze {P2}", f"analyze {P2} --json -", "--help", ""] * ALL,
)
def test_a_stdout_that_is_closed_or_full_is_told_in_one_line(command: str) -> None:
    assert "stdout: cannot be written (it is closed)" in one_line(pptrace_in_shell(f"pptrace {command} >&-"), 1)
    full = one_line(pptrace_in_shell(f"pptrace {command} >/dev/full"), 1)
    assert "stdout: cannot be written (No space left on device)" in full


def test_a_reader_that_has_gone_ends_a_command_without_a_word() -> None:
    ended = pptrace_in_shell("pptrace schedule list | true")
    assert (ended.code, ended.out, ended.err) == (1, "", "")


def test_a_closed_stderr_is_no_failure() -> None:
    ended = pptrace_in_shell("pptrace schedule list 2>&-")
    assert ended.code == 0
    assert "interleaved-1f1b" in ended.out


@pytest.mark.parametrize("printed", ["", *["--json -"] * ALL])
def test_files_are_written_before_what_the_reader_of_stdout_may_cut_off(tmp_path: Path, printed: str) -> None:
    files = {option: tmp_path / option for option in ("html", "csv", "perfetto")}
    given = " ".join(f"--{option} {path}" for option, path in files.items())
    pptrace_in_shell(f"pptrace analyze {P2} {given} {printed} | true")
    assert [path.name for path in files.values() if path.exists()] == list(files)


def test_a_file_that_cannot_be_written_keeps_the_report_on_stdout(tmp_path: Path) -> None:
    ended = pptrace_here("analyze", P2, "--html", tmp_path / "missing" / "page.html")
    assert "page.html: cannot be written" in one_line(ended, 1)
    assert "Steps" in ended.out


@pytest.mark.parametrize(
    "arguments",
    [
        ("analyze", str(P2), "--json", "-", "--html", "-"),
        ("simulate", *SHAPE.split(), "--csv", "-", "--json", "-"),
        ("schedule", "show", *SHAPE.split(), "--csv", "-", "--html", "-"),
    ],
)
def test_stdout_takes_one_output_alone(arguments: tuple[str, ...]) -> None:
    ended = pptrace_here(*arguments)
    assert "stdout can take one of them" in one_line(ended, 2)
    assert ended.out == ""


def test_a_page_for_stdout_comes_with_nothing_else() -> None:
    out = pptrace_here("simulate", *SHAPE.split(), "--html", "-").out
    assert out.startswith("<!doctype html>")
    assert out.rstrip().endswith("</html>")


def test_a_pipe_has_tables_of_one_width_with_colours_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich takes it for a terminal then, of 80 columns."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert report_console().width == 140


def test_tables_need_a_directory(tmp_path: Path) -> None:
    file = tmp_path / "tables.csv"
    file.touch()
    assert "expected a directory, for one file per table" in one_line(pptrace_here("analyze", P2, "--csv", file), 1)
    assert "--csv -: there are several tables" in one_line(pptrace_here("analyze", P2, "--csv", "-"), 2)


def test_a_run_goes_on_where_what_its_ranks_print_is_lost(tmp_path: Path) -> None:
    """More than a pipe holds: a rank whose output nobody took would wait for ever."""
    script = tmp_path / "talks.py"
    script.write_text("import sys\nprint('line\\n' * 50_000)\nopen(sys.argv[1], 'w').close()\n", encoding="utf-8")
    done = tmp_path / "done"
    command = [PROGRAM, "run", "--profiler", "none", "-o", str(tmp_path / "run"), str(script), str(done)]
    with Path("/dev/full").open("w") as full:
        process = start_python(command, stdout=full, stderr=subprocess.PIPE, text=True, start_new_session=True)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert done.exists()
    assert err.count("stdout: cannot be written") == err.count("the run goes on") == 1
