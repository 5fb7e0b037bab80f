"""Directories of several runs, distinguished from those of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pptrace.errors import TraceError
from pptrace.ingest import open_inputs
from pptrace.ingest.inputs.several import runs_at
from tests.ingest.conftest import Op, Write

TABLE = "rank,step,kind,stage,microbatch,start_ns,end_ns\n"


def names(path: Path) -> list[str]:
    """The runs at a path, as they are named from there; "." is the path itself."""
    return [str(run.relative_to(path)) for run in runs_at(path)]


def write_run(directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / "run.json").write_text(json.dumps({"schema": "pptrace.run/1", "ranks": []}))


def write_table(path: Path, step: int) -> None:
    path.parent.mkdir(parents=True)
    rows = [f"{rank},{step},F,{rank},0,{1000 * step},{1000 * step + 10}" for rank in (0, 1)]
    path.write_text(TABLE + "\n".join(rows) + "\n")


def test_run_directories_are_runs_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("10", "2", "1"):
        write_run(tmp_path / "runs" / name)
    (tmp_path / "runs" / "notes.txt").write_text("quiet machine")
    assert names(tmp_path / "runs") == ["1", "2", "10"]
    assert names(tmp_path / "runs" / "1") == ["."]


def test_subdirectories_that_have_the_same_ranks_each_are_runs(write: Write, op: Op, tmp_path: Path) -> None:
    for run in ("a", "b"):
        for rank in (0, 1):
            write([op(ts=rank + ord(run))], f"runs/{run}/rank{rank}.json")
    (tmp_path / "runs" / "c").symlink_to(tmp_path / "runs" / "a")
    (tmp_path / "elsewhere").mkdir()
    for name in ("x", "y"):
        (tmp_path / "elsewhere" / name).symlink_to(tmp_path / "runs" / {"x": "a", "y": "b"}[name])
    assert names(tmp_path / "runs")[:2] == ["a", "b"]
    assert names(tmp_path / "elsewhere") == ["x", "y"]


def test_subdirectories_with_other_ranks_each_are_one_run(write: Write, op: Op, tmp_path: Path) -> None:
    for rank in (0, 1):
        write([op(ts=rank)], f"job/node{rank}/rank{rank}.json")
    assert names(tmp_path / "job") == ["."]


def test_names_with_the_rank_on_a_host_are_one_run_by_what_is_in_the_traces(
    write: Write, op: Op, tmp_path: Path
) -> None:
    for node in (0, 1):
        for local in (0, 1):
            whose = {"distributedInfo": {"rank": 2 * node + local, "world_size": 4}}
            write([op(ts=node)], f"job/node{node}/rank{local}.json", whose)
    assert names(tmp_path / "job") == ["."]


@pytest.mark.parametrize(("ranks", "found"), [((0, 0), ["one", "two"]), ((0, 1), ["."]), ((None, None), ["."])])
def test_names_without_a_rank_are_runs_by_what_is_in_the_traces(
    ranks: tuple[int | None, ...], found: list[str], write: Write, op: Op, tmp_path: Path
) -> None:
    for ts, (name, rank) in enumerate(zip(("one", "two"), ranks, strict=True)):
        whose = {} if rank is None else {"distributedInfo": {"rank": rank}}
        write([op(ts=ts)], f"logs/{name}/host_{ts}.17.pt.trace.json", whose)
    assert names(tmp_path / "logs") == found


def test_tables_of_the_same_steps_are_runs_and_of_other_steps_one_run(tmp_path: Path) -> None:
    for name, step in (("same/1", 4), ("same/2", 4), ("more/1", 4), ("more/2", 5)):
        write_table(tmp_path / name / "ops.csv", step)
    (tmp_path / "same" / "2" / "ops.csv").write_text((tmp_path / "same/1/ops.csv").read_text().replace("010", "020"))
    assert names(tmp_path / "same") == ["1", "2"]
    assert names(tmp_path / "more") == ["."]


def test_tables_that_lie_together_are_runs_where_they_have_the_same_steps(tmp_path: Path) -> None:
    for name, step in (("same/1", 4), ("same/2", 4), ("more/1", 4), ("more/2", 5), ("ranks/1", 4), ("ranks/2", 4)):
        write_table(tmp_path / name / "ops.csv", step)
        (tmp_path / name / "ops.csv").rename(tmp_path / f"{name}.csv")
    (tmp_path / "same" / "2.csv").write_text((tmp_path / "same/1.csv").read_text().replace("010", "020"))
    (tmp_path / "ranks" / "2.csv").write_text(f"{TABLE}2,4,F,2,0,4000,4010\n")
    for folder in tmp_path.glob("*/*/"):
        if folder.is_dir():
            folder.rmdir()
    assert names(tmp_path / "same") == ["1.csv", "2.csv"]
    assert names(tmp_path / "more") == ["."]
    assert names(tmp_path / "ranks") == ["."]


def test_a_directory_with_traces_of_its_own_is_one_run(write: Write, op: Op, tmp_path: Path) -> None:
    for name in ("rank0.json", "a/rank0.json", "b/rank0.json"):
        write([op(ts=len(name))], f"job/{name}")
    write_run(tmp_path / "job" / "run")
    assert names(tmp_path / "job") == ["."]
    assert names(tmp_path / "job" / "a") == ["."]


def test_a_file_and_a_directory_without_traces_are_what_reading_them_says(write: Write, op: Op, tmp_path: Path) -> None:
    file = write([op()], "rank0.json")
    (tmp_path / "empty").mkdir()
    assert runs_at(file) == (file,)
    assert names(tmp_path / "empty") == ["."]
    assert runs_at(tmp_path / "nowhere") == (tmp_path / "nowhere",)


def test_one_directory_of_runs_in_another_is_these_runs(tmp_path: Path) -> None:
    for name in ("1", "2"):
        write_table(tmp_path / "runs" / "a" / name / "ops.csv", 3)
        (tmp_path / "runs" / "a" / name / "ops.csv").write_text(f"{TABLE}0,3,F,0,0,0,1{name}\n")
    assert names(tmp_path / "runs") == ["a/1", "a/2"]


def test_what_may_be_one_run_or_several_is_refused_in_one_line(write: Write, op: Op, tmp_path: Path) -> None:
    for number, name in enumerate(("some/a/rank0", "some/a/rank1", "some/b/rank0", "mixed/a/rank0", "mixed/b/rank0")):
        write([op(ts=number)], f"{name}.json")
    write_run(tmp_path / "mixed" / "c")
    with pytest.raises(TraceError, match=r"some: the traces in a, b are of some ranks alike and of others not"):
        runs_at(tmp_path / "some")
    with pytest.raises(TraceError, match=r"mixed: holds run directories \(c\) and other traces \(in a, b\)"):
        runs_at(tmp_path / "mixed")
    assert len(open_inputs([tmp_path / "mixed"]).files) == 2  # as one job, as ever


def test_the_directory_of_both_sides_is_refused(write: Write, op: Op, tmp_path: Path) -> None:
    for side in ("a", "b"):
        for run in (1, 2):
            write_run(tmp_path / "recorded" / side / str(run))
            write([op(ts=ord(side) + run)], f"written/{side}/{run}/rank0.json")
    for name in ("recorded", "written"):
        with pytest.raises(TraceError, match=rf"{name}: holds directories of several runs \(a, b\); expected one run"):
            runs_at(tmp_path / name)
