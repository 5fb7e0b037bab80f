"""Extent of what is recorded of a run: levels, ranks, and the times of steps without a recording."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pptrace.workflow.load import load
from tests.support.programs import EXAMPLE, one_line, pptrace, pptrace_here, sizes

pytestmark = pytest.mark.processes

ARGUMENTS = ("--steps", "14", "--schedule", "1f1b", *sizes(layers=4, hidden=16, heads=2, seq=8, microbatches=4))


def recorded(folder: Path, *options: str) -> dict[str, Any]:
    """A run of two ranks, as its run.json has it."""
    arguments = ("run", "-n", "2", "--no-analyze", "--steps", "6:9", "-o", folder, *options, EXAMPLE, *ARGUMENTS)
    ended = pptrace(*arguments, forked=True)
    assert ended.code == 0, ended.err
    run: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return run


def events_of(path: Path) -> Counter[str]:
    with gzip.open(path, "rt") as file:
        return Counter(event.get("cat", "") for event in json.load(file)["traceEvents"] if event.get("ph") == "X")


def test_light_and_full_recordings_have_the_same_ops_and_messages_of_which_the_light_one_has_no_operators(
    tmp_path: Path,
) -> None:
    for level, name in (("auto", "light"), ("full", "full")):
        recorded(tmp_path / name, "--record", level)
    reports = {name: load([tmp_path / name], as_recorded=True) for name in ("light", "full")}
    rows = {
        name: (
            Counter(
                zip(*(run.data.ops[column] for column in ("rank", "step", "kind", "stage", "microbatch")), strict=True)
            ),
            Counter(
                zip(
                    *(run.data.comms[column] for column in ("rank", "step", "kind", "axis", "peer", "bytes")),
                    strict=True,
                )
            ),
            run.report.schedule,
            run.report.mesh,
        )
        for name, run in reports.items()
    }
    assert rows["light"] == rows["full"]
    light, full = (events_of(tmp_path / name / "rank0.json.gz") for name in ("light", "full"))
    assert (light["cpu_op"], full["cpu_op"] > 1_000) == (0, True)
    assert reports["light"].report.recording.settings["level"] == "light"  # type: ignore[union-attr]


def test_all_steps_of_all_ranks_are_timed_and_only_chosen_ranks_have_a_trace(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", "--profile-ranks", "1")
    assert [rank["trace"] for rank in run["ranks"]] == [None, "rank1.json.gz"]
    quiet, traced = (rank["step_times"] for rank in run["ranks"])
    for times in (quiet, traced):
        lengths = [end - start for start, end in zip(times["start_ns"], times["end_ns"], strict=True)]
        assert (times["first_step"], len(lengths)) == (0, 14)
        assert all(length > 0 for length in lengths)
    assert (quiet["recorded"], quiet["disturbed"]) == (None, [])
    assert (traced["recorded"], traced["disturbed"]) == ([6, 9], [5, 9])
    report = load([tmp_path / "run"]).report
    assert report.mesh.num_ranks == 2
    assert [rank.rank for rank in report.steps[0].ranks] == [1]
    assert report.recording is not None
    assert report.recording.unrecorded_step_ns is not None


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    for options, line in (
        (("--record", "some"), "--record 'some': expected one of auto, full, light"),
        (
            ("--record", "light", "--memory"),
            "--record light: records the hooks' ranges without operators; leave out --memory",
        ),
        (("--profile-ranks", "2-3"), "--profile-ranks: none of them is one of the 2 ranks of the run, 0 to 1"),
    ):
        assert line in one_line(pptrace_here("run", "-n", "2", *options, "-o", tmp_path / "run", EXAMPLE), code=2)
