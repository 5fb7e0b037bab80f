"""Nsight Systems exports of every generation become the traces that other readers give."""

from __future__ import annotations

import random
import sqlite3
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pptrace.errors import PptraceError, TraceError
from pptrace.ingest import open_inputs
from pptrace.ingest.common.sqlite import NONE, Database
from pptrace.ingest.common.sqlite_pages import PageReader
from pptrace.ingest.nsight.reader import STREAM_MAGIC, read_nsight
from pptrace.model.traces import Category, InputFormat, Trace
from pptrace.recognise.device.work import breakdown, device_work
from pptrace.schedule.registry import build
from tests.ingest.nsight.nsight_oracle import device_times
from tests.ingest.nsight_files import (
    EARLY,
    GENERATIONS,
    LATEST,
    OLD,
    SESSION,
    Generation,
    Process,
    Report,
    write_report,
)
from tests.support.analysed import analyse
from tests.support.read import read_traces
from tests.support.synthetic import AUTOGRAD_THREAD, MAIN_THREAD, START, Event, record

generations = pytest.mark.parametrize("generation", GENERATIONS, ids=lambda item: item.version)


def kernel(name: str, start: int, end: int, stream: int = 7, correlation: int = -1, device: int = 0) -> Event:
    return Event(Category.KERNEL, name, START + start, START + end, device, stream, correlation=correlation)


def call(start: int, end: int, correlation: int, thread: int = MAIN_THREAD) -> Event:
    return Event(
        Category.RUNTIME, "cudaLaunchKernel", START + start, START + end, thread=thread, correlation=correlation
    )


def annotation(name: str, start: int, end: int, thread: int = MAIN_THREAD) -> Event:
    return Event(Category.ANNOTATION, name, START + start, START + end, thread=thread)


MIXED = (
    annotation("forward", 0, 50),
    annotation("backward", 60, 90, AUTOGRAD_THREAD),
    annotation("forward", 100, 100),
    call(1, 3, 11),
    call(61, 64, 12, AUTOGRAD_THREAD),
    kernel("void gemm<float>(int)", 10, 40, correlation=11),
    kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 30, 95, 20, 12),
    Event(Category.MEMCPY, "Memcpy HtoD (Pinned -> Device)", START + 96, START + 99, 0, 7, correlation=13),
    Event(Category.MEMSET, "Memset (Device)", START + 99, START + 120, 0, 7, correlation=14),
)


def listed(trace: Trace) -> Counter[tuple[Any, ...]]:
    """Every event with everything known of it."""
    events = trace.events
    columns = (
        events.category.tolist(),
        [events.names[code] for code in events.name_id.tolist()],
        events.start_ns.tolist(),
        events.end_ns.tolist(),
        events.device.tolist(),
        events.stream.tolist(),
        events.thread.tolist(),
        events.correlation.tolist(),
    )
    return Counter(zip(*columns, strict=True))


def described(events: Sequence[Event]) -> Counter[tuple[Any, ...]]:
    return Counter((e.category, e.name, e.start, e.end, e.device, e.stream, e.thread, e.correlation) for e in events)


def only(path: Path) -> Trace:
    (trace,) = read_nsight(path)
    return trace


@generations
def test_every_generation_gives_exactly_the_events_described(generation: Generation, tmp_path: Path) -> None:
    trace = only(write_report(Report([Process(4711, MIXED)], generation), tmp_path / "a.sqlite"))
    assert listed(trace) == described(MIXED)
    assert (trace.format, trace.memory.empty, trace.warnings) == (InputFormat.NSYS_SQLITE, True, ())
    assert trace.producer == f"nsys {generation.product} (schema {generation.version})"
    assert (np.diff(trace.events.start_ns) >= 0).all()


@pytest.mark.parametrize(
    ("generation", "device"),
    [*((generation, True) for generation in GENERATIONS), (LATEST, False)],
    ids=lambda value: getattr(value, "version", value),
)
def test_a_report_of_all_ranks_is_recognised_as_the_traces_that_kineto_would_give(
    generation: Generation, device: bool, tmp_path: Path
) -> None:
    plan = build("interleaved-1f1b", pp=2, num_microbatches=4, num_chunks=2)
    recording = record(plan, lambda action: 400, 100, steps=2, device=device)
    expected = recording.traces()
    processes = [Process(900 - t.rank, recording.events_of(t.rank), facts=t.metadata) for t in expected]
    path = write_report(Report(processes, generation), tmp_path / "node.sqlite")
    read = read_traces(open_inputs([path]), 1)
    assert [trace.rank for trace in read.traces] == [0, 1]
    result, wanted = analyse(read.traces), analyse(expected)
    assert result.data.ops.equals(wanted.data.ops)
    assert result.data.comms.equals(wanted.data.comms)
    assert result.report.steps == wanted.report.steps
    assert result.report.schedule == wanted.report.schedule
    assert result.report.device == wanted.report.device
    assert result.report.schedule.name == "interleaved-1f1b"


def test_ranks_are_told_apart_without_any_facts_of_pptrace(tmp_path: Path) -> None:
    plan = build("1f1b", pp=3, num_microbatches=5)
    recording = record(plan, lambda action: 400, 100, device=True)
    processes = [Process(900 + rank, recording.events_of(rank)) for rank in range(3)]
    path = write_report(Report(processes), tmp_path / "node.sqlite")
    read = read_traces(open_inputs([path]), 1)
    report = analyse(read.traces).report
    assert (report.schedule.name, report.schedule.num_microbatches, report.mesh.pp) == ("1f1b", 5, 3)
    assert report.clock.method == "same-session"  # one session has one clock
    assert read.warnings == (f"{path}: no rank is named in it; read as ranks 0 to 2",)


def test_kernels_without_a_process_go_to_the_one_that_launched_them(tmp_path: Path) -> None:
    first = [call(0, 2, 21), kernel("a", 5, 9, correlation=21)]
    second = [call(1, 2, 22), kernel("b", 6, 8, correlation=22)]
    report = Report([Process(10, first), Process(11, second)], EARLY)
    traces = read_nsight(write_report(report, tmp_path / "a.sqlite"))
    assert [listed(trace) for trace in traces] == [described(first), described(second)]
    ambiguous = [call(1, 2, 21), kernel("b", 6, 8, correlation=21)]
    report = Report([Process(10, first), Process(11, ambiguous)], EARLY)
    trace = only(write_report(report, tmp_path / "b.sqlite"))
    assert listed(trace) == described([*first, ambiguous[1]])
    assert any(line.startswith("2 events lack their process, and 2 were recorded") for line in trace.warnings)


def test_processes_beside_the_ranks_are_left_out_and_counted(tmp_path: Path) -> None:
    loader = [annotation("load a batch", 0, 5)]
    report = Report([Process(10, loader), Process(11, MIXED), Process(12, loader)])
    trace = only(write_report(report, tmp_path / "a.sqlite"))
    assert listed(trace) == described(MIXED)
    assert trace.warnings == ("left out 2 processes without device work",)


def test_processes_come_in_the_order_of_their_devices_where_each_has_one(tmp_path: Path) -> None:
    def working(device: int) -> list[Event]:
        return [kernel(f"on {device}", 5, 9, correlation=1, device=device)]

    def order(*devices: int) -> list[int]:
        processes = [Process(20 + index, working(device)) for index, device in enumerate(devices)]
        traces = read_nsight(write_report(Report(processes), tmp_path / f"{devices}.sqlite"))
        return [int(trace.events.device[0]) for trace in traces]

    assert order(2, 0, 1) == [0, 1, 2]
    assert order(1, 0, 1) == [1, 0, 1]  # two share one: by their pids


def test_a_process_that_only_copies_is_no_rank_beside_those_that_compute(tmp_path: Path) -> None:
    helper = [Event(Category.MEMSET, "Memset (Device)", 5, 6, device=0, stream=7)]
    path = write_report(Report([Process(10, helper), Process(11, MIXED)]), tmp_path / "a.sqlite")
    assert only(path).warnings == ("left out 1 process without kernels",)
    assert len(read_nsight(write_report(Report([Process(10, helper)]), tmp_path / "b.sqlite"))) == 1


def ranks(path: Path) -> list[int | None]:
    return [trace.rank for trace in read_nsight(path)]


@generations
def test_the_rank_is_what_mpi_the_names_the_environment_or_the_file_name_say(
    generation: Generation, tmp_path: Path
) -> None:
    path = tmp_path / "a.sqlite"

    def written(**about: Any) -> Path:
        environment = about.pop("environment", {})
        return write_report(Report([Process(10, MIXED, **about)], generation, environment=environment), path)

    assert ranks(written()) == [None]
    assert ranks(written(mpi_rank=6, thread_names=("python3", "MPI Rank 5"))) == [6]
    assert ranks(written(thread_names=("python3", "MPI Rank 5"), environment={"RANK": "4"})) == [5]
    assert ranks(written(environment={"SLURM_PROCID": "1", "RANK": "4", "LOCAL_RANK": "9", "A": "2"})) == [4]
    if generation.enums:
        assert ranks(written(environment={"OMPI_COMM_WORLD_RANK": "3"})) == [3]
    written().rename(tmp_path / "report_rank7.sqlite")
    assert ranks(tmp_path / "report_rank7.sqlite") == [7]


def test_several_processes_are_no_rank_of_their_launcher_s_environment(tmp_path: Path) -> None:
    report = Report([Process(11, MIXED), Process(10, MIXED)], environment={"RANK": "4"})
    path = write_report(report, tmp_path / "rank3.sqlite")
    assert ranks(path) == [None, None]
    report = Report([Process(11, MIXED, ("MPI Rank 0",)), Process(10, MIXED, ("MPI Rank 1",))])
    assert ranks(write_report(report, path)) == [0, 1]
    doubled = Report([Process(11, MIXED, ("MPI Rank 1",)), Process(10, MIXED, ("MPI Rank 1",))])
    assert ranks(write_report(doubled, path)) == [None, None]


def test_reports_of_several_nodes_are_one_run_on_one_clock(tmp_path: Path) -> None:
    plan = build("gpipe", pp=4, num_microbatches=3)
    recording = record(plan, lambda action: 400, 100)
    for node in range(2):
        processes = [
            Process(50 + rank, recording.events_of(rank), (f"rank {rank}",)) for rank in (2 * node, 2 * node + 1)
        ]
        write_report(Report(processes, session=SESSION - node * 10**9), tmp_path / f"node{node}.sqlite")
    read = read_traces(open_inputs([tmp_path]), 1)
    assert [trace.rank for trace in read.traces] == [0, 1, 2, 3]
    wanted = recording.traces(with_metadata=False)
    assert [listed(trace) for trace in read.traces] == [listed(trace) for trace in wanted]
    assert analyse(read.traces).report.schedule.name == "gpipe"


def test_times_that_are_utc_already_stay_and_unknown_sessions_are_said(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    assert listed(only(write_report(Report([Process(1, MIXED)], normalized=True), path))) == described(MIXED)
    relative = [replace(event, start=event.start - START, end=event.end - START) for event in MIXED]
    trace = only(write_report(Report([Process(1, relative)], session=None), path))
    assert listed(trace) == described(relative)
    assert trace.warnings == (
        "the start of the recording is not in it: times cannot be compared with those of other files",
    )


@generations
def test_ranges_that_are_still_open_are_left_out_and_counted(generation: Generation, tmp_path: Path) -> None:
    report = Report([Process(1, MIXED)], generation, open_ranges=["train", "step"])
    trace = only(write_report(report, tmp_path / "a.sqlite"))
    assert listed(trace) == described(MIXED)
    assert trace.warnings == ("left out 2 NVTX ranges that were still open when recording stopped",)


def test_what_emit_nvtx_adds_to_names_is_taken_away_and_torch_ops_are_no_annotations(tmp_path: Path) -> None:
    events = [
        annotation("aten::mm, seq = 5, op_id = 77, sizes = [[2, 3], [3, 2]]", 0, 5),
        annotation("aten::mm, op_id = 78", 6, 9),
        annotation("forward, seq = 6, op_id = 79", 10, 20),
        annotation("a, b", 30, 40),
    ]
    trace = only(write_report(Report([Process(1, events)]), tmp_path / "a.sqlite"))
    result = sorted((Category(category), name) for category, name, *_ in listed(trace).elements())
    assert result == [
        (Category.CPU_OP, "aten::mm"),
        (Category.CPU_OP, "aten::mm"),
        (Category.ANNOTATION, "a, b"),
        (Category.ANNOTATION, "forward"),
    ]


def test_tables_of_graphs_synchronisation_overhead_and_mpi_are_read(tmp_path: Path) -> None:
    path = write_report(Report([Process(9, MIXED)]), tmp_path / "a.sqlite")
    owner, at = 1 << 48 | 9 << 24, START - SESSION
    device = "start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER"
    host = "start INTEGER, end INTEGER, globalTid INTEGER"
    graphs, waits = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
    with_statements(
        path,
        f"CREATE TABLE {graphs} ({device}, graphId INTEGER)",
        f"INSERT INTO {graphs} VALUES ({at + 200}, {at + 210}, 0, 7, 31, {owner}, 1)",
        f"CREATE TABLE {waits} ({device}, syncType INTEGER)",
        f"INSERT INTO {waits} VALUES ({at}, {at + 1}, 0, 4294967295, 32, {owner}, 4)",
        "INSERT INTO StringIds VALUES (900, 'MPI_Send'), (901, 'CUPTI buffer flush')",
        f"CREATE TABLE MPI_P2P_EVENTS ({host}, textId INTEGER, size INTEGER)",
        f"INSERT INTO MPI_P2P_EVENTS VALUES ({at + 2}, {at + 3}, {owner | 5}, 900, 4)",
        f"CREATE TABLE PROFILER_OVERHEAD ({host}, nameId INTEGER)",
        f"INSERT INTO PROFILER_OVERHEAD VALUES ({at + 4}, {at + 6}, {owner | 5}, 901)",
        "CREATE TABLE CUDNN_EVENTS (globalTid INTEGER)",
    )
    trace = only(path)
    more = [
        kernel("CUDA graph", 200, 210, correlation=31),
        Event(Category.DEVICE_SYNC, "Context Sync", START, START + 1, 0, -1, correlation=32),
        annotation("MPI_Send", 2, 3, 5),
        Event(Category.OVERHEAD, "CUPTI buffer flush", START + 4, START + 6, thread=5),
    ]
    assert listed(trace) == described([*MIXED, *more])
    assert trace.warnings[0] == "left out table CUDNN_EVENTS: it has no columns start and end"
    assert trace.warnings[1].startswith("each CUDA graph was recorded as one event")


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1), st.sampled_from(["gemm", "ncclKernel_AllReduce", "copy", "fill"]), st.integers(0, 40),
            st.integers(0, 12),
        ),
        min_size=1,
        max_size=40,
    ),
    st.randoms(use_true_random=False),
)  # fmt: skip
@settings(max_examples=40)
def test_the_device_breakdown_is_that_of_the_oracle(
    tmp_path_factory: pytest.TempPathFactory, work: list[tuple[int, str, int, int]], chance: random.Random
) -> None:
    kinds = {"copy": Category.MEMCPY, "fill": Category.MEMSET}
    events: list[list[Event]] = [[kernel("gemm", 0, 1)], [kernel("gemm", 0, 1)]]
    for process, name, start, length in work:
        result = kernel(name, start, start + length, chance.randrange(3))
        events[process].append(replace(result, category=kinds.get(name, Category.KERNEL)))
    path = tmp_path_factory.mktemp("oracle") / "a.sqlite"
    write_report(Report([Process(10, events[0]), Process(11, events[1])]), path)
    check_device_times(path)


def check_device_times(path: Path) -> None:
    expected = device_times(path)
    traces = read_nsight(path)
    rows = [breakdown(device_work(trace.events)) for trace in traces]
    names = ("compute_ns", "communication_ns", "memory_ns", "idle_ns", "busy_ns")
    wanted = [{name: expected[pid][name] for name in names} for pid in sorted(expected)]
    assert [{name: getattr(part, name) for name in names} for part in rows] == wanted


REAL = (
    ("pipit_nsys/saxpy-mpi-cuda_nsys_perlmutter0.sqlite", [0], "nsys 2022.2.1.31 (schema 2.9.1)"),
    ("nsys_ai/h100_2gpu_1s.sqlite", [None, None], "nsys 2026.2.1.210 (schema 3.25.0)"),
    ("nsys_ai/mock.sqlite", [None], "nsys 2026.1.1.204 (schema 3.24.14)"),
)


@pytest.mark.parametrize(("name", "ranks", "producer"), REAL)
def test_real_exports_give_the_device_times_of_the_oracle(
    data: Path, name: str, ranks: list[int | None], producer: str
) -> None:
    traces = read_nsight(data / name)
    assert [trace.rank for trace in traces] == ranks
    assert {trace.producer for trace in traces} == {producer}
    check_device_times(data / name)


def test_a_real_export_launches_its_kernels_from_the_calls_of_its_own_process(data: Path) -> None:
    for trace in read_nsight(data / "nsys_ai/h100_2gpu_1s.sqlite"):
        work = device_work(trace.events)
        known = work.launch_ns >= 0
        assert known.sum() > 1000
        assert (work.launch_ns[known] <= work.start_ns[known]).mean() > 0.99
        assert "aten::clone" in trace.events.names
        assert not any("op_id" in text for text in trace.events.names)


# --- what is no export, or a damaged one ---------------------------------------------------------------------------


def with_statements(path: Path, *statements: str) -> bytes:
    """Run them in a database; returns its bytes."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)
    return path.read_bytes()


def test_what_is_no_export_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    foreign = with_statements(tmp_path / "foreign", "CREATE TABLE users (name TEXT)")
    bare = with_statements(tmp_path / "bare", "CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
    empty = with_statements(tmp_path / "empty", "CREATE TABLE t (a)", "DROP TABLE t")
    whole = write_report(Report([Process(9, MIXED)]), tmp_path / "whole").read_bytes()
    cases = {
        b"": "an empty file; expected the SQLite file that",
        b"\x8fE\x01 random bytes of a cipher": "no SQLite database, or an encrypted one (begins with '\\x8fE\\x01 random",
        b"SQLite format 3\0": "a damaged or encrypted SQLite database",
        whole[:100] + bytes(len(whole) - 100): "a damaged or encrypted SQLite database",
        foreign: "an SQLite database without any table of Nsight Systems, rocprofv3 or RPD; expected the SQLite file that",
        empty: "an SQLite database without any table of Nsight Systems, rocprofv3 or RPD; expected the SQLite file that",
        bare: "an Nsight Systems export without device work, CUDA calls or NVTX ranges; expected a recording",
    }
    for content, message in cases.items():
        path.write_bytes(content)
        with pytest.raises(TraceError) as caught:
            read_traces(open_inputs([path]), 1)
        assert str(caught.value).startswith(f"{path}: {message}")
        assert "\n" not in str(caught.value)


def outcome(path: Path) -> tuple[Trace, ...] | str:
    """The traces, or the line of the error; any other exception passes."""
    try:
        return read_nsight(path)
    except PptraceError as err:
        return str(err)


def large_report(path: Path, num_kernels: int = 3000) -> Path:
    events = [
        kernel(f"k{number % 50}", 10 * number, 10 * number + 5, correlation=number + 1) for number in range(num_kernels)
    ]
    events += [annotation(f"range {number}", number, number + 1) for number in range(1000)]
    return write_report(Report([Process(9, events)]), path)


def test_a_truncated_export_keeps_what_is_whole_and_counts_it(tmp_path: Path) -> None:
    content = large_report(tmp_path / "whole").read_bytes()
    path = tmp_path / "a.sqlite"
    kept = []
    for share in (0.9, 0.7, 0.5, 0.3):
        path.write_bytes(content[: int(len(content) * share)])
        (trace,) = read_nsight(path)
        kept.append(len(trace.events))
        size = f"{path.stat().st_size:,} of {len(content):,} bytes"
        assert any("the file is truncated" in line and size in line for line in trace.warnings)
        assert any("is damaged" in line and "kept the" in line for line in trace.warnings)
    assert kept == sorted(kept, reverse=True)
    assert 0 < kept[-1] < kept[1] < 4000


def test_a_damaged_page_costs_the_rows_behind_it_in_its_table_only(tmp_path: Path) -> None:
    path = large_report(tmp_path / "a.sqlite")
    content = bytearray(path.read_bytes())
    connection = sqlite3.connect(path)
    (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'NVTX_EVENTS'").fetchone()
    connection.close()
    size = int.from_bytes(content[16:18], "big")
    content[(root - 1) * size : root * size] = b"\xff" * size
    path.write_bytes(content)
    trace = only(path)
    assert Counter(trace.events.category.tolist()) == {Category.KERNEL: 3000}
    assert [line for line in trace.warnings if line.startswith("table NVTX_EVENTS is damaged (")]


@cache
def fuzzed_content(tmp: Path, generation: Generation) -> bytes:
    report = Report([Process(9, MIXED * 4, mpi_rank=1), Process(10, MIXED)], generation, open_ranges=["x"])
    return write_report(report, tmp / "base").read_bytes()


@given(
    st.sampled_from([OLD, LATEST]),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=30),
    st.one_of(st.just(1.0), st.floats(0, 1)),
    st.booleans(),
)
@settings(max_examples=150)
def test_no_damage_raises_anything_but_a_pptrace_error(
    tmp_path_factory: pytest.TempPathFactory,
    generation: Generation,
    flips: list[tuple[float, int]],
    kept: float,
    spare_head: bool,
) -> None:
    folder = tmp_path_factory.getbasetemp()
    content = bytearray(fuzzed_content(folder, generation))
    first = 100 if spare_head else 0
    for index, value in flips:
        content[first + int(index * (len(content) - first))] = value
    path = folder / "fuzzed.sqlite"
    path.write_bytes(content[: int(len(content) * kept)])
    result = outcome(path)
    assert "\n" not in result if isinstance(result, str) else sum(trace.info.num_events for trace in result) > 0


values = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(-300, 300),
    st.sampled_from([0, 1, -1, 127, 128, 32767, 32768, 2**23, 2**31, 2**47, -(2**47)]),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.text("añ☃", min_size=50, max_size=90),
    st.binary(max_size=5),
)


@given(
    st.lists(st.tuples(values, values, values), min_size=1, max_size=200),
    st.sampled_from([512, 4096, 65536]),
    st.integers(1, 400),
)
@settings(max_examples=60)
def test_pages_give_the_columns_that_sqlite_gives(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[Any, ...]], page_bytes: int, copies: int
) -> None:
    path = tmp_path_factory.mktemp("pages") / "a.db"
    repeated = (rows * copies)[:1500]
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA page_size = {page_bytes}")
    connection.execute("CREATE TABLE t (a, b, c)")  # without types, so that values stay as they are
    connection.executemany("INSERT INTO t VALUES (?, ?, ?)", repeated)
    connection.execute("DELETE FROM t WHERE rowid % 7 = 3")
    connection.commit()
    wanted = connection.execute("SELECT a, c, b FROM t ORDER BY rowid").fetchall()
    (root,) = connection.execute("SELECT rootpage FROM sqlite_master").fetchone()
    connection.close()
    reader = PageReader(path, min_rows=1)
    numbers = reader.integers(root, [0, 2], text=1)
    if numbers is None:
        reader.close()
        longest = max((sum(len(str(value).encode()) for value in row) for row in wanted), default=0)
        assert not wanted or longest > page_bytes - 100, "a record that goes on in another page is left to SQLite"
        return
    texts = [reader.text(*pair) if pair[0] >= 0 else None for pair in zip(*numbers[2:], strict=True)]
    reader.close()
    assert texts == [row[2].encode() if type(row[2]) is str else None for row in wanted]
    for column, index in zip(numbers[:2], range(2), strict=True):
        assert column.tolist() == [row[index] if type(row[index]) is int else NONE for row in wanted]


def test_a_record_that_ends_with_the_file_is_read_from_its_page(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "a.db")
    connection.execute("PRAGMA page_size = 512")
    connection.execute("CREATE TABLE t (a, b, c)")
    connection.executemany("INSERT INTO t VALUES (?, ?, ?)", [(None, None, None), ("x" * 137, 0.5, "y" * 157)])
    connection.commit()
    connection.close()
    reader = PageReader(tmp_path / "a.db", min_rows=1)
    numbers = reader.integers(2, [0, 1], text=2)
    reader.close()
    assert [column.tolist() for column in numbers[:2]] == [[NONE, NONE]] * 2
    assert (numbers[3] - numbers[2]).tolist() == [0, 157]


def test_large_tables_are_read_from_their_pages_and_small_ones_by_sqlite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PageReader.__init__, "__defaults__", (2_000,))
    with Database(large_report(tmp_path / "a.sqlite"), "") as db:
        pages = db._pages.integers(db._roots["CUPTI_ACTIVITY_KIND_KERNEL"], [0, 1])
        assert len(pages[0]) == 3000
        assert db._pages.integers(db._roots["NVTX_EVENTS"], [0]) is None
        start, end, absent = db.integers("CUPTI_ACTIVITY_KIND_KERNEL", ["start", "end", None])
        assert np.array_equal(end - start, np.full(3000, 5))
        assert (absent == NONE).all()


# --- reports that only nsys can read -------------------------------------------------------------------------------

FAKE_NSYS = """#!{python}
import shutil, sys
arguments = sys.argv[1:]
assert arguments[:6] == ["export", "--type", "sqlite", "--force-overwrite", "true", "-o"], arguments
content = open(arguments[7], "rb").read()
if b"broken" in content:
    sys.exit("Processing [50%]\\rImporter error: the report is broken")
shutil.copy({export!r}, arguments[6])
"""


def put_nsys(folder: Path, export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    program = folder / "nsys"
    program.write_text(FAKE_NSYS.format(python=sys.executable, export=str(export)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


REPORT = b"NVIDIA Tegra Profiler Report 1."


@pytest.mark.parametrize("name", ["run.nsys-rep", "run.qdrep", "run.bin"])
def test_a_report_is_exported_by_the_nsys_on_the_path(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = write_report(Report([Process(9, MIXED)]), tmp_path / "export")
    put_nsys(tmp_path / "bin", export, monkeypatch)
    path = tmp_path / "runs" / name
    path.parent.mkdir()
    path.write_bytes(REPORT if name == "run.bin" else b"another layout")
    (trace,) = read_traces(open_inputs([path.parent if name != "run.bin" else path]), 1).traces
    assert listed(trace) == described(MIXED)
    assert (trace.path, trace.format) == (str(path), InputFormat.NSYS_SQLITE)
    path.write_bytes(REPORT + b"broken")
    with pytest.raises(TraceError, match=r"'nsys export' gave no SQLite file \(Importer error: the report is broken\)"):
        read_nsight(path)


def test_without_nsys_one_line_says_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    path = tmp_path / "run.nsys-rep"
    path.write_bytes(REPORT)
    with pytest.raises(TraceError) as caught:
        read_traces(open_inputs([path]), 1)
    assert str(caught.value).startswith(f"{path}: a report of Nsight Systems, which only its own nsys can read")
    assert "'nsys export --type sqlite run.nsys-rep'" in str(caught.value)


def test_a_report_beside_its_export_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "run.nsys-rep").write_bytes(REPORT)
    write_report(Report([Process(9, MIXED)]), tmp_path / "run.sqlite")
    (tmp_path / "notes.sqlite").write_bytes(b"")
    inputs = open_inputs([tmp_path])
    assert [file.path.name for file in inputs.files] == ["run.sqlite"]
    assert inputs.warnings == (f"{tmp_path}: skipped notes.sqlite (empty)",)


def put_importer(folder: Path, export: Path) -> None:
    """A QdstrmImporter that makes a report of what begins as a stream, for the nsys of :func:`put_nsys`."""
    script = f"""#!{sys.executable}
import pathlib, sys
stream, report = (pathlib.Path(sys.argv[sys.argv.index(option) + 1]) for option in ("-i", "-o"))
if not stream.read_bytes().startswith({STREAM_MAGIC!r}):
    sys.exit("not a stream")
report.write_bytes({REPORT!r})
"""
    (folder / "QdstrmImporter").write_text(script)
    (folder / "QdstrmImporter").chmod(0o755)


@pytest.mark.parametrize("name", ["run.qdstrm", "run.bin"])
def test_a_stream_is_imported_and_exported(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export = write_report(Report([Process(9, MIXED)]), tmp_path / "export")
    put_nsys(tmp_path / "bin", export, monkeypatch)
    path = tmp_path / name
    path.write_bytes(STREAM_MAGIC + b" 2022.4.2.1")
    with pytest.raises(TraceError, match="there is no QdstrmImporter next to nsys or on PATH"):
        read_nsight(path)
    put_importer(tmp_path / "bin", export)
    (trace,) = read_traces(open_inputs([path]), 1).traces
    assert listed(trace) == described(MIXED)
    assert (trace.path, trace.format) == (str(path), InputFormat.NSYS_SQLITE)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(["bin", "export", name])


def test_a_stream_without_nsys_says_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "run.qdstrm").write_bytes(STREAM_MAGIC)
    with pytest.raises(TraceError, match=r"run 'QdstrmImporter -i run.qdstrm' and then 'nsys export"):
        read_nsight(tmp_path / "run.qdstrm")


def test_of_a_recording_in_several_forms_the_furthest_is_read(tmp_path: Path) -> None:
    for name in ("a.qdstrm", "a.nsys-rep", "b.qdstrm", "b.nsys-rep", "c.qdstrm"):
        (tmp_path / name).write_bytes(STREAM_MAGIC if name.endswith("qdstrm") else REPORT)
    write_report(Report([Process(9, MIXED)]), tmp_path / "a.sqlite")
    assert [file.path.name for file in open_inputs([tmp_path]).files] == ["a.sqlite", "b.nsys-rep", "c.qdstrm"]


def add_overhead(path: Path, *pids: int) -> Path:
    """Add what nsys writes of every process that it was in: its own work there."""
    table = "CREATE TABLE PROFILER_OVERHEAD (start INTEGER, end INTEGER, globalTid INTEGER, nameId INTEGER)"
    threads = [1 << 48 | pid << 24 | 1 for pid in pids]
    with_statements(path, table, *(f"INSERT INTO PROFILER_OVERHEAD VALUES (10, 20, {one}, 10)" for one in threads))
    return path


def test_a_launcher_without_ranges_is_no_rank_beside_ranks_that_have_them(tmp_path: Path) -> None:
    ranks = [Process(pid, [annotation("forward_step", 0, 50)]) for pid in (31, 32)]
    path = add_overhead(write_report(Report(ranks), tmp_path / "a.sqlite"), 29, 30, 31, 32)
    first, second = read_nsight(path)
    assert "left out 2 processes without ranges" in first.warnings
    found = [name for trace in (first, second) for _, name, *_ in listed(trace).elements()]
    assert found.count("forward_step") == 2


def test_a_process_with_nothing_but_the_work_of_nsys_in_it_is_no_rank(tmp_path: Path) -> None:
    calls = Process(31, [call(0, 5, 1)])
    (trace,) = read_nsight(add_overhead(write_report(Report([calls]), tmp_path / "a.sqlite"), 29, 30, 31))
    assert "left out 2 processes without CUDA calls" in trace.warnings


def test_a_recording_of_nothing_but_nsys_itself_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    path = add_overhead(write_report(Report([Process(9, [])]), tmp_path / "a.sqlite"), 9)
    with pytest.raises(
        TraceError, match=r"without device work, CUDA calls or NVTX ranges; .*use a newer nsys or 'nvtx<0.2.12'"
    ):
        read_nsight(path)


def test_a_run_of_pptrace_without_its_ranges_is_one_line_or_where_devices_worked_a_warning(tmp_path: Path) -> None:
    bare = [Process(9, [annotation("data loading", 0, 5)], facts={"rank": 0})]
    with pytest.raises(TraceError, match=r"a run of pptrace of which nsys recorded no range; .*nvtx<0.2.12"):
        read_nsight(write_report(Report(bare), tmp_path / "a.sqlite"))
    working = [replace(bare[0], events=[*bare[0].events, kernel("gemm", 0, 5)])]
    (trace,) = read_nsight(write_report(Report(working), tmp_path / "b.sqlite"))
    assert any("recorded no range, only what its devices did" in line for line in trace.warnings)


def test_gpus_of_which_nothing_was_recorded_are_said(tmp_path: Path) -> None:
    path = write_report(Report([Process(9, [annotation("forward_step", 0, 50)])]), tmp_path / "a.sqlite")
    (trace,) = read_nsight(path)
    assert trace.warnings == ()
    table = "CREATE TABLE TARGET_INFO_GPU (vmId INTEGER, id INTEGER, name TEXT)"
    with_statements(path, table, "INSERT INTO TARGET_INFO_GPU VALUES (1, 0, 'H200')")
    (trace,) = read_nsight(path)
    (line,) = trace.warnings
    assert line.startswith("the machine has GPUs, but no device event was recorded:")


def test_an_export_that_is_refused_is_left_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = large_report(tmp_path / "a.sqlite")
    path.write_bytes(path.read_bytes()[:100] + b"\xff" * 4000)
    opened: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def remember(*arguments: Any, **options: Any) -> sqlite3.Connection:
        opened.append(connect(*arguments, **options))
        return opened[-1]

    monkeypatch.setattr(sqlite3, "connect", remember)
    with pytest.raises(TraceError, match="damaged"):
        Database(path, "")
    (connection,) = opened
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("SELECT 1")
