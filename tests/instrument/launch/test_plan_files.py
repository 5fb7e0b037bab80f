"""Plans among a script's arguments are checked before any process starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from instrument.launch.options import check_plan_files
from pptrace.errors import ScheduleError
from pptrace.schedule.lower import lower
from pptrace.schedule.registry import build
from pptrace.schedule.text import to_csv
from tests.support.programs import EXAMPLE, pptrace


@pytest.mark.parametrize("with_comms", [True, False])
@pytest.mark.parametrize("form", ["--schedule {}", "--schedule={}", "{}"])
def test_sound_plans_pass(with_comms: bool, form: str, tmp_path: Path) -> None:
    plan = build("zbv", 2, 4)
    path = tmp_path / "sound.csv"
    path.write_text(to_csv(lower(plan) if with_comms else plan))
    check_plan_files(form.format(path).split())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("0F0,0B0\n1F0,1B0,1B0\n", "rank 1 has 1B0 2 times"),
        ("0B0,0F0\n1F0,1B0\n", "deadlock"),
        ("0F0,0X0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n", "'0X0' is not an action"),
    ],
)
def test_broken_plans_are_refused_with_their_reason(rows: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.csv"
    path.write_text(rows)
    with pytest.raises(ScheduleError, match=message):
        check_plan_files(["script.py", f"--schedule={path}"])


@pytest.mark.parametrize("text", ["", "name,value\na,1\nb,2\n", "0F0,a,b,c\n", "\xff"])
def test_other_files_are_the_scripts_own_business(text: str, tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text, encoding="latin-1")
    check_plan_files([str(path), "no such file.csv", "--table", str(tmp_path)])


def test_no_process_starts_for_a_broken_plan(tmp_path: Path) -> None:
    path = tmp_path / "broken.csv"
    path.write_text("0B0,0F0\n1F0,1B0\n")
    run = tmp_path / "run"
    ended = pptrace("run", "-n", "2", "-o", run, EXAMPLE, "--schedule", path, forked=True)
    assert ended.code != 0
    assert "deadlock: rank 0 waits at 0B0 for 0F0" in ended.err
    assert not run.exists()
