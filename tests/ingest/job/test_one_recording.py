"""Ranks that were recorded several times: the files of one recording are analysed, and the others are no ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pptrace.ingest import ReadResult, open_inputs
from pptrace.ingest.job import read_job
from tests.ingest.conftest import Op, Write
from tests.support.read import read_traces

LENGTH, TURN = 50, 100
"""Times in µs: how long a recording lasts, and from one to the next."""


@pytest.fixture
def record(write: Write, op: Op) -> Callable[..., Path]:
    """Write the recording of a rank in a turn of the profiler's schedule, ``late`` by so many µs."""

    def make(name: str, turn: int, rank: int | None, late: int = 0) -> Path:
        events = [op(ts=turn * TURN + late + at) for at in (0, LENGTH)]
        return write(events, name, {} if rank is None else {"distributedInfo": {"rank": rank}})

    return make


def names(result: ReadResult[Any]) -> dict[int | None, str]:
    return {trace.rank: "/".join(Path(trace.path).parts[-2:]) for trace in result.traces}


@pytest.mark.parametrize("late", [0, 70])
def test_the_last_of_equally_many_recordings_of_each_rank_is_read(
    tmp_path: Path, record: Callable[..., Path], late: int
) -> None:
    """Also where the clock of a rank is another one."""
    paths = [
        record(f"iteration_{turn}/rank{rank}_trace.json", turn, rank, late * rank) for turn in (2, 3) for rank in (0, 1)
    ]
    result = read_traces(open_inputs(paths), 1)
    assert names(result) == {rank: f"iteration_3/rank{rank}_trace.json" for rank in (0, 1)}
    (line,) = result.warnings
    assert line.startswith(
        f"2 files of other recordings of ranks 0, 1, made at other times, left out: {paths[0]}, {paths[1]}; "
    )


def test_the_last_recording_that_most_ranks_have_is_read(record: Callable[..., Path]) -> None:
    """The file of rank 2 in the last turn is missing; rank 3 has one in that turn alone, and rank 4 one at another time."""
    paths = [record(f"{turn}/rank{rank}.json", turn, rank, rank) for turn in (0, 1, 2) for rank in (0, 1)]
    paths += [record(f"{turn}/rank2.json", turn, 2) for turn in (0, 1)]
    paths += [record("2/rank3.json", 2, 3), record("9/rank4.json", 9, 4)]
    result = read_traces(open_inputs(paths), 1)
    expected = {rank: f"2/rank{rank}.json" for rank in (0, 1, 3)} | {4: "9/rank4.json"}
    assert names(result) == expected
    assert result.warnings[0].startswith("6 files of other recordings of ranks 0 to 2, ")


def test_a_rank_that_was_recorded_at_other_times_alone_has_no_trace(record: Callable[..., Path]) -> None:
    paths = [record(f"{turn}/rank{rank}.json", turn, rank) for turn in (0, 1, 2) for rank in (0, 1)]
    paths += [record(f"{turn}/rank2.json", turn, 2) for turn in (5, 6)]
    assert names(read_traces(open_inputs(paths), 1)) == {rank: f"2/rank{rank}.json" for rank in (0, 1)}


@pytest.mark.parametrize("suffix", [".pt.trace.json", ".trace.json.gz"])
def test_files_of_one_worker_without_a_rank_are_recordings_of_one_process(
    record: Callable[..., Path], suffix: str
) -> None:
    """By the name that torch's handler gives them: host, process and time."""
    paths = [record(f"host_123.179602715{turn}35384243{suffix}", turn, None) for turn in (0, 1)]
    result = read_traces(open_inputs(paths), 1)
    assert names(result) == {0: "/".join(paths[1].parts[-2:])}
    assert result.warnings[0].startswith("1 file of other recordings of one process, made at other times, left out: ")


def test_files_of_several_workers_are_several_ranks(record: Callable[..., Path]) -> None:
    paths = [record(f"host_{123 + turn}.1796027157353842438.pt.trace.json", turn, None) for turn in (0, 1)]
    assert len(read_traces(open_inputs(paths), 1).traces) == 2


def turns_of(record: Callable[..., Path], workers: dict[str, int | None], turns: int = 3, hour: int = 0) -> list[Path]:
    """The files of torch's handler in some turns, each named by the time of its export, ``hour`` later."""
    ended = EPOCH_US + LENGTH + 5 + hour * 3_600_000_000
    return [
        record(f"{worker}.{(ended + turn * TURN) * 1000}.pt.trace.json", turn, rank, EPOCH_US + at)
        for at, (worker, rank) in enumerate(workers.items())
        for turn in range(turns)
    ]


@pytest.fixture
def read_files(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are read."""
    files: list[Path] = []
    read = read_job.read_file

    def noted(path: Path, *rest: Any) -> Any:
        files.append(path)
        return read(path, *rest)

    monkeypatch.setattr(read_job, "read_file", noted)
    return files


EPOCH_US = 1_790_000_000_000_000
TWO = {"host_12": 1, "host_11": 0}


def test_files_of_earlier_turns_of_the_profilers_schedule_are_not_read(
    record: Callable[..., Path], read_files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, progress = turns_of(record, TWO), []
    result = read_traces(open_inputs(paths), 1, progress.append)
    assert read_files == [paths[2], paths[5]]
    assert progress[-1].files_read == len(paths)
    monkeypatch.setattr(read_job, "last_recordings", lambda _: ({}, ()))
    reference = read_traces(open_inputs(paths), 1)
    assert len(read_files) == 2 + len(paths)
    assert names(result) == names(reference) == {0: "/".join(paths[5].parts[-2:]), 1: "/".join(paths[2].parts[-2:])}
    assert result.warnings == reference.warnings


def test_all_files_are_read_where_names_and_heads_do_not_tell_the_last_recording(
    record: Callable[..., Path], read_files: list[Path]
) -> None:
    assert len(read_traces(open_inputs(turns_of(record, TWO, turns=1)), 1).traces) == 2
    for workers, hour, extra in (
        (TWO, 1, None),  # the names say that the last recording began before the one before it was over
        ({"host_12": 1, "host_11": 1}, 0, None),
        ({"host_12": 1, "host_11": None}, 0, None),
        ({"host_11": 0}, 0, "rank1.json"),
        ({"host_11": 0}, 0, "host_12.1790000000000001000.pt.trace.json"),
    ):
        paths = turns_of(record, workers, hour=hour) + ([] if extra is None else [record(extra, 2, 1, EPOCH_US)])
        read_files.clear()
        read_traces(open_inputs(paths), 1)
        assert sorted(read_files) == sorted(paths), (workers, hour, extra)


def test_a_last_recording_that_cannot_be_read_leaves_the_others(record: Callable[..., Path]) -> None:
    paths = turns_of(record, TWO)
    paths[2].write_text(paths[2].read_text()[:150])
    assert len(read_traces(open_inputs(paths), 1).traces) == 2
