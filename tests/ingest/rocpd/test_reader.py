"""rocpd databases, from synthetic ones in the schemas of rocprofiler-sdk."""

from __future__ import annotations

import gzip
import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pptrace.errors import TraceError
from pptrace.ingest.common.byte_source import first_bytes
from pptrace.ingest.common.sqlite_pages import PageReader
from pptrace.ingest.formats import detect
from pptrace.ingest.rocpd.json_output import read_json
from pptrace.ingest.rocpd.reader import read_rocpd
from pptrace.ingest.rocpd.rpd import read_rpd
from pptrace.model.damage import KINDS, Damage
from pptrace.model.traces import Category, Events, InputFormat
from pptrace.recognise.device.work import breakdown, device_work
from pptrace.report.to_json import dump, report_object
from pptrace.workflow.load import load
from tests.ingest import test_fuzz
from tests.ingest.rocpd.rocpd_files import SECRET, Entry, Recording, write, write_json, write_rpd

MARK = Entry("roctxRangePushA", 500, 60_000, stack=10, category="MARKER_CORE_RANGE_API", message="forward_step")
STEP = Recording(
    regions=(
        Entry("hipLaunchKernel", 1_000, 1_400, stack=11),
        Entry("hipMemcpyAsync", 2_000, 2_300, stack=12),
        MARK,
        Entry("ncclAllReduce", 3_000, 3_500, stack=13, category="RCCL_API"),
        Entry("hipLaunchKernel", 3_100, 3_200, stack=14),
        replace(MARK, start=900, end=1_500, stack=16, message="aten::mm, seq = 3, op_id = 4"),
        Entry("hsa_signal_wait", 4_000, 9_000, stack=15, category="HSA_CORE_API", tid=501),
    ),
    kernels=(
        Entry("Cijk_MT64", 10_000, 30_000, stack=11, stream=1, agent=5),
        Entry("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage)", 25_000, 45_000, stack=14, stream=2, agent=5),
    ),
    copies=(Entry("MEMORY_COPY_HOST_TO_DEVICE", 50_000, 54_000, stack=12, stream=1, agent=5),),
)


def _rows(events: Events, name: str) -> list[int]:
    return [row for row, code in enumerate(events.name_id.tolist()) if events.names[code] == name]


def columns_of(events: Events) -> dict[str, list[object]]:
    names = ("category", "name_id", "start_ns", "dur_ns", "device", "stream", "thread", "correlation", "names")
    return {name: list(getattr(events, name)) for name in names}


@pytest.mark.parametrize("has_tracks", [False, True])
def test_kernels_copies_calls_and_ranges_of_every_schema(tmp_path: Path, has_tracks: bool) -> None:
    (trace,) = read_rocpd(write(tmp_path / "77_results.db", STEP, has_tracks=has_tracks))
    events = trace.events
    kinds = {name: int(events.category[_rows(events, name)[0]]) for name in events.names}
    assert kinds == {
        "Cijk_MT64": Category.KERNEL,
        "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage)": Category.KERNEL,
        "Memcpy HtoD (Host -> Device)": Category.MEMCPY,
        "hipLaunchKernel": Category.RUNTIME,
        "hipMemcpyAsync": Category.RUNTIME,
        "hsa_signal_wait": Category.RUNTIME,
        "ncclAllReduce": Category.ANNOTATION,
        "forward_step": Category.ANNOTATION,
        "aten::mm": Category.CPU_OP,
    }
    (row,) = _rows(events, "Cijk_MT64")
    assert (events.device[row], events.stream[row], events.start_ns[row], events.dur_ns[row]) == (1, 1, 10_000, 20_000)
    assert events.thread[_rows(events, "hsa_signal_wait")[0]] == 501


def test_the_json_of_the_same_recording_gives_the_same_events(tmp_path: Path) -> None:
    (expected,) = read_rocpd(write(tmp_path / "rank3.db", STEP))
    path = write_json(tmp_path / "rank3.json", STEP)
    assert detect(first_bytes(path)) is InputFormat.ROCPD
    (trace,) = read_json(path)
    assert columns_of(trace.events) == columns_of(expected.events)
    assert (trace.rank, trace.metadata["host_name"]) == (3, "node-7")
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(TraceError, match=r"damaged or truncated JSON of rocprofv3 .*; expected"):
        read_json(path)
    with pytest.raises(TraceError, match="no kernel, copy, call or range; expected"):
        read_json(write_json(path, Recording()))


def test_numbers_beyond_those_of_arrays_are_no_times_and_no_places(tmp_path: Path) -> None:
    path = write_json(tmp_path / "rank3.json", STEP)
    document = json.loads(path.read_text())
    calls = document["rocprofiler-sdk-tool"][0]["buffer_records"]["hip_api"]
    calls[0]["thread_id"], calls[0]["correlation_id"] = 2**64 - 1, {"internal": 2**64 - 1}
    del calls[0]["kind"]
    path.write_text(json.dumps(document))
    (trace,) = read_json(path)
    (call,) = np.flatnonzero((trace.events.category == Category.RUNTIME) & (trace.events.thread == -1))
    assert trace.events.names[trace.events.name_id[call]] == "", "and no other call's name"
    calls[0]["end_timestamp"] = 10**30
    path.write_text(json.dumps(document))
    with pytest.raises(TraceError, match=r"damaged or truncated JSON of rocprofv3 .*; expected"):
        read_json(path)


def test_a_database_of_rocmprofiledata_gives_the_same_events(tmp_path: Path) -> None:
    calls = replace(STEP, regions=[entry for entry in STEP.regions if entry.category[:4] in ("", "MARK")])
    (expected,) = read_rocpd(write(tmp_path / "a.db", calls))
    path = write_rpd(tmp_path / "rank3.rpd", calls)
    assert detect(first_bytes(path)) is InputFormat.ROCPD
    (trace,) = read_rpd(path)
    assert (columns_of(trace.events), trace.rank) == (columns_of(expected.events), 3)
    packed = tmp_path / "a.rpd.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(
        TraceError, match=r"an SQLite database packed by gzip; expected it unpacked; run gunzip -k on it$"
    ):
        read_rpd(packed)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DROP TABLE rocpd_op")
    with pytest.raises(TraceError, match="without a whole table rocpd_op; expected"):
        read_rpd(path)


def test_device_time_and_launches_are_those_written(tmp_path: Path) -> None:
    (trace,) = read_rocpd(write(tmp_path / "results.db", STEP))
    work = device_work(trace.events)
    found = breakdown(work)
    assert (found.compute_ns, found.communication_ns, found.memory_ns) == (20_000, 15_000, 4_000)
    assert found.overlap_ratio == pytest.approx(5 / 20)
    assert work.launch_ns.tolist() == [1_000, 3_100, 2_000]


def test_kernels_that_were_launched_and_are_not_there_are_lost(tmp_path: Path) -> None:
    regions, kernels = [], []
    for step in range(20):
        begin = 1_000_000 * (step + 1)
        times = {"start": begin, "end": begin + 900_000, "stack": 1_000 + step}
        regions.append(replace(MARK, message=f"ProfilerStep#{step}", **times))
        regions.append(Entry("hipLaunchKernel", begin + 1_000, begin + 2_000, stack=10 + step))
        kernels.append(Entry("Cijk_MT64", begin + 10_000, begin + 500_000, stack=10 + step, stream=1, agent=5))
    path = write(tmp_path / "results.db", Recording(tuple(regions), tuple(kernels[::2])))
    report = load([path], cache=False).report
    (entry,) = (entry for entry in report.recording.audit if entry.kind == Damage.LOST_KERNELS)
    assert entry.count == 10
    assert [step.step for step in report.steps for rank in step.ranks if rank.compute_ns is not None] == [0]


def test_what_to_do_about_unknown_idle_time_is_about_rocprof(tmp_path: Path) -> None:
    path = write(tmp_path / "results.db", Recording(kernels=(Entry("a", 0, 1_000), Entry("b", 5_000, 6_000))))
    (line,) = (line for line in load([path], cache=False).report.warnings if "why the device was idle" in line)
    assert "no runtime calls of CUDA or HIP" in line
    assert line.endswith("(rocprofv3 --sys-trace)")


def test_large_tables_have_the_launches_of_small_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of many rows are read from the file's pages, where an id that is SQLite's own number has no value."""
    monkeypatch.setattr(PageReader.__init__, "__defaults__", (2_000,))
    count = 3_000
    regions = [Entry("hipLaunchKernel", 100 * n, 100 * n + 10, stack=n + 1) for n in range(count)]
    kernels = [Entry(f"kernel{n % 7}", 100 * n + 20, 100 * n + 90, stack=n + 1) for n in range(count)]
    (trace,) = read_rocpd(write(tmp_path / "results.db", Recording(regions, kernels)))
    work = device_work(trace.events)
    assert work.launch_ns.tolist() == [100 * n for n in range(count)]
    assert breakdown(work).compute_ns == 70 * count


def test_where_streams_were_not_recorded_queues_tell_what_ran_at_the_same_time(tmp_path: Path) -> None:
    kernels = (Entry("a", 0, 100_000, stack=1, queue=3), Entry("b", 10_000, 20_000, stack=2, queue=4))
    (trace,) = read_rocpd(write(tmp_path / "results.db", Recording(kernels=kernels)))
    assert trace.events.stream.tolist() == [3, 4]


@pytest.mark.parametrize(
    ("environment", "name", "rank"),
    [({"RANK": "5"}, "77_results.db", 5), ({}, "rank3_results.db", 3), ({}, "77_results.db", None)],
)
def test_the_rank_is_that_of_the_environment_else_of_the_files_name(
    tmp_path: Path, environment: dict[str, str], name: str, rank: int | None
) -> None:
    (trace,) = read_rocpd(write(tmp_path / name, replace(STEP, environment=environment)))
    assert trace.rank == rank
    assert trace.metadata == {"device_names": ["MI300X", "MI300X"], "one_clock": "host 9", "host_name": "node-7"}


def test_several_processes_merged_into_a_file_are_ranks(tmp_path: Path) -> None:
    recordings = [
        replace(STEP, pid=70 + rank, environment={"RANK": str(rank)}, uuid=f"_0197_{rank}") for rank in (1, 0)
    ]
    launcher = Recording(regions=(Entry("hipInit", 0, 10),), pid=60, uuid="_0197_a")
    traces = read_rocpd(write(tmp_path / "merged.db", *recordings, launcher))
    assert [trace.rank for trace in traces] == [0, 1]
    assert any("left out 1 process without kernels" in line for trace in traces for line in trace.warnings)


def test_files_of_one_process_each_are_one_run_and_no_secret_is_passed_on(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path / f"{rank}_results.db", replace(STEP, environment={"RANK": str(rank)}))
    report = load([tmp_path], cache=False).report
    assert [entry.format for entry in report.inputs] == [InputFormat.ROCPD] * 2
    assert [entry.breakdown.compute_ns for entry in report.device] == [20_000] * 2
    assert SECRET not in json.dumps(json.loads(dump(report_object(report, True))))


def test_it_is_told_from_other_databases(tmp_path: Path) -> None:
    path = write(tmp_path / "results.db", STEP)
    assert detect(first_bytes(path)) is InputFormat.ROCPD
    other = tmp_path / "other.db"
    with closing(sqlite3.connect(other)) as connection, connection:
        connection.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
    assert detect(first_bytes(other)) is InputFormat.NSYS_SQLITE
    with pytest.raises(TraceError, match="without the tables of rocpd; expected"):
        read_rocpd(other)


def test_a_database_without_events_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no kernel, copy, call or range; expected"):
        read_rocpd(write(tmp_path / "results.db", Recording()))


def test_a_cut_file_says_so(tmp_path: Path) -> None:
    regions = [Entry("hipLaunchKernel", n, n + 1, n + 1) for n in range(3_000)]
    path = write(tmp_path / "results.db", Recording(regions, STEP.kernels))
    path.write_bytes(path.read_bytes()[:-40_960])
    (trace,) = read_rocpd(path)
    assert Damage.CUT_FILE in {KINDS[kind] for kind in trace.damage.kind.tolist()}
    assert any("truncated" in line for line in trace.warnings)


def test_damaged_files_give_a_report_or_one_error(tmp_path: Path) -> None:
    content = write(tmp_path / "whole.db", STEP).read_bytes()
    test_fuzz.run([("results.db", content)], test_fuzz.SEEDS, tmp_path)
