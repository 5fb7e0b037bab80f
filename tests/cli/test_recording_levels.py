"""Extent of what is recorded of a run: levels, ranks, and the times of steps without a recording."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from pptrace.workflow.load import load
from tests.support.programs import EXAMPLE, one_line, pptrace, pptrace_here, sizes

ENGINE = "autograd::engine::evaluate_function"
pytestmark = pytest.mark.processes

ARGUMENTS = ("--steps", "14", "--schedule", "1f1b", *sizes(layers=4, hidden=16, heads=2, seq=8, microbatches=4))


def recorded(folder: Path, *options: str) -> dict[str, Any]:
    """A run of two ranks, as its run.json has it."""
    arguments = ("run", "-n", "2", "--no-analyze", "--steps", "6:9", "-o", folder, *options, EXAMPLE, *ARGUMENTS)
    ended = pptrace(*arguments, forked=True)
    assert ended.code == 0, ended.err
    return json.loads((folder / "run.json").read_text())


def events_of(path: Path) -> Counter[str]:
    with gzip.open(path, "rt") as file:
        return Counter(event.get("cat", "") for event in json.load(file)["traceEvents"] if event.get("ph") == "X")


def parts_of_backwards(path: Path) -> Counter[str]:
    """Time of the parts in the marked backwards of a rank, ns: of each stretch between two events that of those around it."""
    with gzip.open(path, "rt") as file:
        content = json.load(file, parse_float=str)
    chosen = ("cpu_op", "user_annotation")
    whole = [event for event in content["traceEvents"] if event.get("ph") == "X" and event.get("cat") in chosen]
    for event in whole:
        start, length = (round(Decimal(event[name]) * 1000) for name in ("ts", "dur"))
        event["start"], event["end"] = start, start + length
    whole.sort(key=lambda event: (event["start"], -event["end"]))
    numbered: dict[int, dict[str, Any]] = {}  # the part in which the last operator with each sequence number ran
    found: Counter[str] = Counter()
    opened: list[dict[str, Any]] = []
    time = 0
    for event in [*whole, {"name": "", "start": whole[-1]["end"] + 1, "end": 0}]:
        while opened and opened[-1]["end"] <= event["start"]:
            found[_part(opened)] += opened[-1]["end"] - time
            time = opened.pop()["end"]
        found[_part(opened)] += event["start"] - time
        time = event["start"]
        number, name = event.get("args", {}).get("Sequence number"), event["name"]
        if name.startswith(ENGINE):
            previous = numbered.get(-1, {})
            event["part"] = previous if name.endswith("AccumulateGrad") else numbered.get(number, {})
            numbered[-1] = event["part"]
        elif name.startswith("part: "):
            event["part"] = event
        elif number is not None and "Backward" not in name:
            numbered[number] = next((e["part"] for e in reversed(opened) if "part" in e), {})
        opened.append(event)
    del found[None]
    return found


def _part(opened: list[dict[str, Any]]) -> str | None:
    """The part of what runs inside some events, the innermost last; None outside of marked backwards."""
    if not any(re.match(r"pp1:\dB", event["name"]) for event in opened):
        return None
    ran = [event for event in opened if event["name"].startswith(("aten::", "part: ", ENGINE))]
    part = next((event["part"] for event in reversed(ran) if "part" in event), {})
    return str(part.get("name", "")).removeprefix("part: ")


def test_light_recordings_have_the_same_ops_messages_and_flops_as_those_with_operators_and_shapes(
    tmp_path: Path,
) -> None:
    for level, name in (("auto", "light"), ("shapes", "full")):
        recorded(tmp_path / name, "--record", level)
    reports = {name: load([tmp_path / name], as_recorded=True) for name in ("light", "full")}
    of_ops = ["rank", "step", "kind", "stage", "microbatch"]
    of_comms = ["rank", "step", "kind", "axis", "peer", "bytes"]
    rows = [
        (run.data.ops.value_counts(of_ops).to_dict(), run.data.comms.value_counts(of_comms).to_dict())
        for run in reports.values()
    ]
    assert rows[0] == rows[1]
    assert reports["light"].report.schedule == reports["full"].report.schedule
    assert reports["light"].report.mesh == reports["full"].report.mesh
    light, full = (events_of(tmp_path / name / "rank0.json.gz") for name in ("light", "full"))
    assert (light["cpu_op"], full["cpu_op"] > 1_000) == (0, True)
    assert reports["light"].report.recording.settings["level"] == "light"
    stages = {name: {(ops.stage, ops.kind): ops for ops in run.report.stages.ops} for name, run in reports.items()}
    for (stage, kind), ops in stages["full"].items():
        of_sizes = stages["light"][stage, kind]
        assert (ops.flops_from, of_sizes.flops_from) == ("operators", "sizes")
        of_classes = {part.name: part.flops for part in ops.classes}
        again = of_classes["attention"] // 5 if kind == "B" else 0  # of five products of an attention's backward, one
        assert ops.flops == of_sizes.flops + again == sum(of_classes[name] or 0 for name in ("matmul", "attention"))
        if kind == "B":
            parts = {part.name: part.ns for part in ops.parts}
            found = parts_of_backwards(tmp_path / "full" / f"rank{stage}.json.gz")
            assert parts == {name: ns for name, ns in found.items() if ns}
            assert parts["layers"] > 0


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
    assert report.recording.unrecorded_step_ns is not None


def test_ranks_are_chosen_within_a_budget_by_a_step_on_trial(tmp_path: Path) -> None:
    arguments = ("--profile-ranks", "auto", "--profile-budget", "1kB", EXAMPLE, "--pp", "1", "--dp", "2", *ARGUMENTS)
    ended = pptrace("run", "-n", "2", "--no-analyze", "--steps", "6:9", "-o", tmp_path / "run", *arguments, forked=True)
    assert ended.code == 0, ended.err
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert [rank["trace"] for rank in run["ranks"]] == ["rank0.json.gz", None]
    assert [rank["step_times"]["recorded"] for rank in run["ranks"]] == [[6, 9], None]
    chosen = run["profile_ranks"]
    assert (chosen["ranks"], chosen["budget_bytes"]) == ([0], 1000)
    events = sum(events_of(tmp_path / "run" / "rank0.json.gz").values())
    assert chosen["events_per_step"] * 3 == pytest.approx(events, rel=0.2)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"rank0.json.gz", "run.json"}
    assert f"pptrace: --profile-ranks auto recorded rank 0: {chosen['why']}" in ended.err
    assert chosen["why"].endswith("1 of 2 ranks, 1 beyond the budget, as one is recorded always")


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    for options, line in (
        (("--record", "some"), "--record 'some': expected one of auto, full, light"),
        (
            ("--record", "light", "--memory"),
            "--record light: records the hooks' ranges without operators; leave out --memory",
        ),
        (("--profile-ranks", "2-3"), "--profile-ranks: 2, 3: expected ranks of the run, 0 to 1"),
    ):
        assert line in one_line(pptrace_here("run", "-n", "2", *options, "-o", tmp_path / "run", EXAMPLE), code=2)
