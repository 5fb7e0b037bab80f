"""``pptrace compare --fail-on``: exit codes for CI."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.programs import SAMPLES, pptrace_here

FAST, SLOW = str(SAMPLES / "1f1b_p2"), str(SAMPLES / "1f1b_p4")


def table_of(folder: Path, step_us: int, num_steps: int) -> str:
    """A table of one rank whose steps all take so long."""
    rows = [f"0,{step},F,0,0,{step * 1000},{step * 1000 + step_us}" for step in range(num_steps)]
    file = folder / f"{step_us}-{num_steps}.csv"
    file.write_text("\n".join(["rank,step,kind,stage,microbatch,start_us,end_us", *rows]) + "\n", encoding="utf-8")
    return str(file)


@pytest.mark.parametrize(
    ("a", "b", "fail_on", "code"),
    [
        (FAST, SLOW, None, 0),
        (FAST, SLOW, "slower", 3),
        (FAST, SLOW, "slower:10%", 3),
        (FAST, SLOW, "slower:121.9", 3),  # the interval begins at 122 %
        (FAST, SLOW, "slower:123", 0),
        (SLOW, FAST, "slower", 0),
        (FAST, FAST, "slower", 0),
    ],
)
def test_a_build_fails_where_the_whole_interval_is_beyond_the_limit(
    a: str, b: str, fail_on: str | None, code: int
) -> None:
    options = () if fail_on is None else ("--fail-on", fail_on)
    ended = pptrace_here("compare", a, b, *options)
    assert ended.code == code
    assert "a typical step" in " ".join(ended.out.split())


@pytest.mark.parametrize("fail_on", ["", "fast", "slower:", "slower:-1", "slower:x", "faster"])
def test_other_texts_are_wrong_usage(fail_on: str) -> None:
    ended = pptrace_here("compare", FAST, SLOW, "--fail-on", fail_on)
    assert (ended.code, ended.out) == (2, "")
    assert f"--fail-on {fail_on}: expected slower" in ended.err


def test_what_is_not_known_is_no_success(tmp_path: Path) -> None:
    ended = pptrace_here("compare", table_of(tmp_path, 500, 1), table_of(tmp_path, 700, 1), "--fail-on", "slower")
    assert ended.code == 1
    assert "--fail-on: not known how certain the change of the step is" in ended.err
