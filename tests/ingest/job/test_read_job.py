from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pptrace.errors import TraceError
from pptrace.ingest import JobProgress, ReadResult, open_inputs
from pptrace.ingest.inputs.resolve import InputFile, OpenedInputs
from pptrace.ingest.job import read_in_processes, read_job
from pptrace.model.traces import InputFormat
from tests.ingest.conftest import Op, Write
from tests.support.read import read_traces


def ranks(result: ReadResult) -> list[tuple[int | None, str]]:
    return [(trace.rank, Path(trace.path).name) for trace in result.traces]


def moment() -> dict[str, Any]:
    args = {"Device Type": 0, "Device Id": -1, "Total Allocated": 5, "Total Reserved": 0, "Bytes": 5}
    return {"ph": "i", "name": "[memory]", "ts": 1, "args": args}


def test_traces_come_in_the_order_of_their_ranks(write: Write, op: Op) -> None:
    paths = [
        write([op()], f"{name}.json", {"distributedInfo": {"rank": rank}})
        for name, rank in (("a", 2), ("b", 0), ("c", 1))
    ]
    result = read_traces(open_inputs(paths), 1)
    assert ranks(result) == [(0, "b.json"), (1, "c.json"), (2, "a.json")]
    assert result.warnings == ()
    assert all(trace.warnings == () for trace in result.traces)


def test_files_without_a_rank_become_ranks_of_their_own(write: Write, op: Op) -> None:
    paths = [write([op(), moment()], "x.json"), write([op()], "rank0.json"), write([op(ts=9)], "y.json")]
    result = read_traces(open_inputs(paths), 1)
    assert ranks(result) == [(0, "rank0.json"), (1, "x.json"), (2, "y.json")]
    line = "{}: no rank is named in it; read as rank {}"
    assert result.warnings == (line.format(paths[0], 1), line.format(paths[2], 2))
    assert all(trace.warnings == () for trace in result.traces)
    memory = result.traces[1].memory
    assert memory["rank"].tolist() == [1]
    assert str(memory["rank"].dtype) == "int64"


def test_two_files_of_one_rank_and_time_become_two_ranks(write: Write, op: Op) -> None:
    paths = [write([op(ts=index), op(ts=9)], f"{name}/rank1.json") for index, name in enumerate(("a", "b", "c"))]
    result = read_traces(open_inputs(paths), 1)
    assert [(trace.rank, Path(trace.path).parent.name) for trace in result.traces] == [(0, "b"), (1, "a"), (2, "c")]
    assert result.warnings[0] == f"{paths[1]}: says rank 1, as {paths[0]} does; read as rank 0"


@pytest.mark.parametrize(("name", "taken"), [("x.json", 0), ("rank2.json", 2), ("rank7.json", 0)])
@pytest.mark.parametrize(("declared", "size"), [(9, 4), (1_000_000_000, 4), (4, 4)])
def test_a_rank_that_its_job_does_not_have_is_not_believed(
    write: Write, op: Op, name: str, taken: int, declared: int, size: int
) -> None:
    path = write([op()], name, {"distributedInfo": {"rank": declared, "world_size": size}})
    result = read_traces(open_inputs([path]), 1)
    assert ranks(result) == [(taken, name)]
    line = f"{path}: says rank {declared} of a job of {size} ranks, which cannot be; read as rank {taken}"
    assert result.warnings == (line,)


@pytest.mark.parametrize("size", [None, "4", 10**12])
def test_a_rank_beyond_any_job_is_not_believed(write: Write, op: Op, size: object) -> None:
    path = write([op()], "x.json", {"distributedInfo": {"rank": 1_000_000_000, "world_size": size}})
    result = read_traces(open_inputs([path]), 1)
    assert ranks(result) == [(0, "x.json")]
    assert "says rank 1000000000 where ranks below 1,000,000 are expected" in result.warnings[0]
    assert ranks(read_traces(open_inputs([write([op()], "rank5000000.json")]), 1)) == [(0, "rank5000000.json")]


def test_traces_of_jobs_of_other_sizes_are_refused(write: Write, op: Op) -> None:
    """One report of both would be of no run, where ranks alone tell them from each other."""
    paths = [
        write([op()], f"{rank}.json", {"distributedInfo": {"rank": rank, "world_size": size}})
        for rank, size in ((0, 8), (3, 8), (1, 2))
    ]
    with pytest.raises(TraceError, match=r"is of another run than .*0\.json \(another number of ranks\)"):
        read_traces(open_inputs(paths), 1)
    assert len(read_traces(open_inputs(paths[:2]), 1).traces) == 2


def test_the_runs_word_counts_where_the_trace_is_silent(write: Write, op: Op) -> None:
    silent, other = write([op()], "s.json"), write([op()], "o.json", {"pptrace": {"rank": 2}})
    files = tuple(InputFile(path, InputFormat.KINETO, rank, 1) for path, rank in ((silent, 7), (other, 1)))
    result = read_traces(OpenedInputs(files, ("from the opener",)), 1)
    assert ranks(result) == [(2, "o.json"), (7, "s.json")]
    assert result.warnings == ("from the opener", f"{other}: says rank 2, but run.json says 1; read as rank 2")


def test_a_file_that_fails_among_others_is_a_warning_not_an_error(write: Write, op: Op) -> None:
    paths = [write([op()], "rank0.json"), write(b'{"traceEvents": [', "rank1.json"), write([op()], "rank2.json")]
    result = read_traces(open_inputs(paths), 1)
    assert ranks(result) == [(0, "rank0.json"), (2, "rank2.json")]
    (line,) = result.warnings
    assert line.startswith(f"{paths[1]}: damaged or truncated")
    assert line.endswith(" (left out; read the other 2)")


def test_when_all_fail_the_first_error_is_raised(write: Write) -> None:
    paths = [write(b"", "rank0.json"), write(b"[]", "rank1.json")]
    with pytest.raises(TraceError, match=r"rank0\.json: empty"):
        read_traces(open_inputs(paths), 1)
    with pytest.raises(TraceError, match="no trace files"):
        read_traces(OpenedInputs(()), 1)


def test_a_file_that_vanishes_before_it_is_read_is_a_warning(write: Write, op: Op) -> None:
    paths = [write([op()], "rank0.json"), write([op()], "rank1.json")]
    inputs = open_inputs(paths)
    paths[1].unlink()
    (line,) = read_traces(inputs, 2).warnings
    assert line.startswith(f"{paths[1]}: cannot be read")


@pytest.mark.parametrize("jobs", [1, 2, None])
def test_processes_give_the_same_as_reading_here(
    write: Write, op: Op, jobs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_job, "_LARGE_BYTES", 100)
    paths = [write([op(ts=index + rank) for index in range(500)], f"rank{rank}.json.gz") for rank in range(3)]
    paths.append(write(b'{"traceEvents": [' + b" " * 200, "rank3.json"))
    steps: list[JobProgress] = []
    result = read_traces(open_inputs(paths), jobs, steps.append)
    assert ranks(result) == [(rank, f"rank{rank}.json.gz") for rank in range(3)]
    assert [int(trace.events.start_ns[0]) for trace in result.traces] == [0, 1000, 2000]
    assert all(np.array_equal(np.diff(trace.events.start_ns), np.full(499, 1000)) for trace in result.traces)
    assert [line.partition(": ")[0] for line in result.warnings] == [str(paths[3])]
    assert_grows_to_all(steps, paths)


@pytest.mark.parametrize("name", ["rank0.json", "rank0.json.gz"])
def test_a_large_file_tells_how_much_of_it_has_been_read(write: Write, op: Op, name: str) -> None:
    path = write([op(name=random.Random(index).randbytes(40).hex()) for index in range(6000)], name)
    steps: list[JobProgress] = []
    read_traces(open_inputs([path]), 1, steps.append)
    assert_grows_to_all(steps, [path])
    assert len({step.bytes_read for step in steps if 0 < step.files_read < 1}) > 3


def test_progress_of_reading_processes_includes_files_that_are_not_read_to_their_end(
    write: Write, op: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_job, "_LARGE_BYTES", 100)
    monkeypatch.setattr(read_in_processes, "_POLL_S", 0.001)
    events = [op(name=random.Random(index).randbytes(40).hex()) for index in range(40_000)]
    paths = [write(events, f"rank{rank}.json") for rank in range(2)]
    steps: list[JobProgress] = []
    read_traces(open_inputs(paths), 2, steps.append)
    assert_grows_to_all(steps, paths)
    assert any(0 < step.files_read < 1 and 0 < step.bytes_read < step.num_bytes / 2 for step in steps)


def assert_grows_to_all(steps: Sequence[JobProgress], paths: Sequence[Path]) -> None:
    """From none to all files and bytes, without a step back."""
    num_bytes = sum(path.stat().st_size for path in paths)
    assert steps[0] == JobProgress(0, len(paths), 0, num_bytes)
    assert steps[-1] == JobProgress(len(paths), len(paths), num_bytes, num_bytes)
    for before, after in pairwise(steps):
        assert before.files_read <= after.files_read
        assert before.bytes_read <= after.bytes_read


class Deadly(InputFile):
    """Ends the process that it is sent to."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (3,)


def test_a_reader_process_that_dies_is_replaced_by_reading_here(
    write: Write, op: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_job, "_LARGE_BYTES", 100)
    paths = [write([op() for _ in range(50)], f"rank{rank}.json") for rank in range(3)]
    steps: list[JobProgress] = []
    files = tuple(Deadly(path, InputFormat.KINETO, None, path.stat().st_size) for path in paths)
    result = read_traces(OpenedInputs(files), 2, steps.append)
    assert ranks(result) == [(rank, f"rank{rank}.json") for rank in range(3)]
    assert_grows_to_all(steps, paths)


_READS_TWO = """
import multiprocessing, sys, threading
from pathlib import Path
from pptrace.ingest import open_inputs, read_each
from pptrace.ingest.job import read_in_processes, read_job
from pptrace.workflow.rank_store import recognise_trace
read_job._LARGE_BYTES = 100
ways, get = [], multiprocessing.get_context
multiprocessing.get_context = lambda way: ways.append(way) or get(way)
over = threading.Event()
if sys.argv[2] == "threads":
    threading.Thread(target=over.wait).start()
result = read_each(open_inputs([Path(sys.argv[1])]), recognise_trace, 2)
over.set()
print(*ways, [rank.info.num_events for rank in result.traces], multiprocessing.active_children())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
@pytest.mark.parametrize(("threads", "way"), [("none", "fork"), ("threads", "spawn")])
def test_processes_are_forked_where_no_other_thread_could_hold_a_lock(
    write: Write, op: Op, tmp_path: Path, threads: str, way: str
) -> None:
    for rank in range(2):
        write([op() for _ in range(50 + rank)], f"rank{rank}.json")
    command = [sys.executable, "-c", _READS_TWO, str(tmp_path), threads]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr == ""
    assert done.stdout.split("\n")[0] == f"{way} [50, 51] []"
