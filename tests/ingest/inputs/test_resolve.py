from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pptrace.errors import TraceError, UsageError
from pptrace.ingest import open_inputs
from pptrace.ingest.common.byte_source import first_bytes, unreadable
from pptrace.ingest.formats import detect
from pptrace.ingest.inputs import resolve
from pptrace.model.traces import InputFormat
from tests.ingest.conftest import Op, Write
from tests.support.read import read_traces


def opened(*paths: Path) -> tuple[list[str], tuple[str, ...]]:
    inputs = open_inputs(paths)
    return [file.path.name for file in inputs.files], inputs.warnings


def write_run(directory: Path, ranks: Any, **members: Any) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / "run.json"
    path.write_text(json.dumps({"schema": "pptrace.run/1", "ranks": ranks} | members))
    return path


def test_one_file_is_itself(write: Write, op: Op) -> None:
    path = write([op()])
    inputs = open_inputs([path])
    file = inputs.files[0]
    assert (file.path, file.format, file.rank, file.num_bytes) == (path, InputFormat.KINETO, None, path.stat().st_size)
    assert (inputs.warnings, inputs.run, inputs.run_dir) == ((), None, None)


def test_the_format_is_told_by_content_not_by_suffix(write: Write, op: Op, tmp_path: Path) -> None:
    packed = write([op()], "trace.gz")
    packed.rename(tmp_path / "trace.json")
    database = tmp_path / "report.json.gz"
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE StringIds (id INTEGER)")
    formats = [file.format for file in open_inputs([tmp_path / "trace.json", database]).files]
    assert formats == [InputFormat.KINETO, InputFormat.NSYS_SQLITE]


@pytest.mark.parametrize(
    ("start", "name"),
    [
        (b'{"schemaVersion": 1, ', InputFormat.KINETO),
        (b'\xef\xbb\xbf \n[{"name": "a", "ph": "X"', InputFormat.KINETO),
        (b'{"total": 1}', None),
        (b"name,ph\n", None),
        (b"", None),
        (b"SQLite format 3\0", InputFormat.NSYS_SQLITE),
        (b"ops.csv".ljust(257, b"\0") + b"ustar".ljust(255, b"\0") + b"rank,kind,start_ns\n", None),
    ],
)
def test_formats_are_recognised_by_their_first_bytes(start: bytes, name: InputFormat | None) -> None:
    assert detect(start) is name


@pytest.mark.parametrize(("suffix", "kind"), [("zip", "zip"), ("tar", "tar"), ("tar.gz", "tar"), ("tar.bz2", "bzip2")])
def test_an_archive_is_to_be_unpacked(write: Write, op: Op, tmp_path: Path, suffix: str, kind: str) -> None:
    formats = {"zip": "zip", "tar": "tar", "tar.gz": "gztar", "tar.bz2": "bztar"}
    write([op()], "job/rank0.json")
    packed = Path(shutil.make_archive(str(tmp_path / "traces"), formats[suffix], tmp_path / "job"))
    with pytest.raises(TraceError, match=f"a {kind} archive; expected a trace; unpack it and give what it holds"):
        read_traces(open_inputs([packed]), 1)
    beside = packed.rename(tmp_path / "job" / packed.name)
    assert opened(tmp_path / "job")[1] == (f"{tmp_path / 'job'}: skipped {beside.name} (a {kind} archive; unpack it)",)


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("snapshot.pickle", pickle.dumps({"segments": [], "device_traces": []}), "a snapshot of torch's memory"),
        (
            "rank.0.et",
            b"\x2a\x12\x1d\n\x06schema\xea\x01\x121.0.2-chakra.0.0.4",
            "an execution trace of torch or Chakra",
        ),
        ("a.pftrace", b"\n\x10\x0a", "a trace of Perfetto"),
        ("ascend_pytorch_profiler_3.db", b"SQLite format 3\0", "a database of torch_npu's profiler"),
        ("x_ascend_pt/ASCEND_PROFILER_OUTPUT/analysis.db", b"SQLite format 3\0", "a database of torch_npu's profiler"),
        (
            "msprof_0_2_1.json",
            b'[{"name": "process_name", "pid": 3, "args": {"name": "Ascend Hardware"}, "ph": "M"}, '
            b'{"name": "Cast-op239", "pid": 3, "tid": 2, "ts": 56635864664.91, "dur": 23.1, "ph": "X"}]',
            "a timeline of msprof in an earlier form",
        ),
    ],
)
def test_a_file_of_another_tool_says_what_it_is(write: Write, name: str, content: bytes, what: str) -> None:
    with pytest.raises(TraceError, match=f"{what}.*; expected"):
        read_traces(open_inputs([write(content, name)]), 1)


@pytest.mark.parametrize("content", [b"<!doctype html><html></html>", b"\x7fELF\x02\x01", b"hello"])
def test_what_is_no_trace_gets_told_all_that_can_be_given(write: Write, content: bytes) -> None:
    line = r"begins with .* give a trace of torch\.profiler .*Nsight Systems .*table of ops"
    with pytest.raises(TraceError, match=line):
        read_traces(open_inputs([write(content)]), 1)


def test_a_directory_gives_its_traces_in_the_order_of_numbers(write: Write, op: Op, tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        write([op()], f"job/rank{rank}.json.gz")
    write(b"notes", "job/notes.txt")
    write(b'{"a": 1}', "job/config.json")
    write(b"", "job/rank3.json")
    write([op()], "job/.hidden.json")
    files, warnings = opened(tmp_path / "job")
    assert files == ["rank0.json.gz", "rank2.json.gz", "rank10.json.gz"]
    skipped = """config.json (no trace: begins with '{"a": 1}'), rank3.json (empty)"""
    assert warnings == (f"{tmp_path / 'job'}: skipped {skipped}",)


def test_a_directory_says_why_each_file_that_is_named_as_a_trace_is_none(
    write: Write, op: Op, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write([op()], "job/rank0.json")
    write(b"hello there\n", "job/rank1.json")
    (tmp_path / "job" / "rank2.json.gz").write_bytes(b"\x1f\x8b\x08\x00damaged gzip")
    denied = write([op()], "job/rank3.json")
    (tmp_path / "job" / "rank4.json").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "job" / "rank5.json")
    (tmp_path / "job" / "rank6.json").mkdir()

    def first_of_allowed(path: Path) -> bytes:
        if path == denied:
            raise unreadable(path, PermissionError(errno.EACCES, "Permission denied"))
        return first_bytes(path)

    monkeypatch.setattr(resolve, "first_bytes", first_of_allowed)
    files, (warning,) = opened(tmp_path / "job")
    assert files == ["rank0.json"]
    assert warning.partition(": skipped ")[2].split(", ") == [
        "rank1.json (no trace: begins with 'hello there\\n')",
        "rank2.json.gz (damaged gzip)",
        "rank3.json (cannot be read (Permission denied))",
        "rank4.json (a link to nothing)",
        "rank5.json (a pipe or a device)",
    ]


def test_a_tensorboard_directory_has_its_traces_one_level_down(write: Write, op: Op, tmp_path: Path) -> None:
    for worker in (0, 1):
        write([op()], f"logs/run/worker{worker}.1700.pt.trace.json.gz")
    write([op()], "logs/run/deeper/worker2.1700.pt.trace.json.gz")
    write([op()], "logs/run/other.json")
    write(b"", "logs/events.out.tfevents")
    files, warnings = opened(tmp_path / "logs")
    assert files == ["worker0.1700.pt.trace.json.gz", "worker1.1700.pt.trace.json.gz"]
    other = "run/other.json (not named *.pt.trace.json as the other traces in its folder are; give it to read it)"
    deeper = "run/deeper/worker2.1700.pt.trace.json.gz (in a subdirectory; give it to read it)"
    skipped = f"{tmp_path / 'logs'}: skipped {other}, {deeper}"
    assert warnings == (skipped,)
    for number in range(5):
        write([op()], f"logs/run/deeper/worker{number + 3}.1700.pt.trace.json.gz")
    many = ", ".join(f"run/deeper/worker{number}.1700.pt.trace.json.gz" for number in (2, 3, 4))
    assert opened(tmp_path / "logs")[1] == (
        f"{tmp_path / 'logs'}: skipped {other}, {many} and 3 more (in a subdirectory; give one to read it)",
    )
    for number in range(5):
        (tmp_path / f"logs/run/deeper/worker{number + 3}.1700.pt.trace.json.gz").unlink()
    write([op()], "logs/run2/worker0.1800.pt.trace.json")
    assert opened(tmp_path / "logs")[1] == (
        f"{tmp_path / 'logs'}: traces in more than one subdirectory; all taken as one job",
        skipped,
    )


@pytest.mark.parametrize(
    ("name", "recorder"), [("job.db", "rocprofv3"), ("host.xplane.pb", "jax.profiler"), ("job.sqlite", "nsys export")]
)
def test_an_empty_file_is_told_in_the_words_of_its_own_recorder(tmp_path: Path, name: str, recorder: str) -> None:
    (tmp_path / name).touch()
    for given in (tmp_path / name, tmp_path):
        with pytest.raises(TraceError, match=rf"{name}: .*empty.*; expected .*{recorder}"):
            read_traces(open_inputs([given]))


def test_without_traces_above_those_of_all_subdirectories_are_one_job(write: Write, op: Op, tmp_path: Path) -> None:
    for rank, index in enumerate(("node0", "node1", "a/b/c")):
        write([op(ts=rank)], f"nodes/{index}/rank{rank}.json")
    write([op(ts=3)], "nodes/.hidden/rank3.json")
    write([op(ts=4)], "nodes/a/b/c/too_deep/rank4.json")
    files, warnings = opened(tmp_path / "nodes")
    assert sorted(files) == ["rank0.json", "rank1.json", "rank2.json"]
    assert warnings == (f"{tmp_path / 'nodes'}: traces in more than one subdirectory; all taken as one job",)


def test_traces_that_are_not_read_are_named_in_one_line(write: Write, op: Op, tmp_path: Path) -> None:
    write([op()], "job/rank0.json")
    write(b"", "job/rank1.json")
    write([op(ts=5)], "job/second/worker0.5.pt.trace.json")
    write_run(tmp_path / "job" / "third", [])
    files, (warning,) = opened(tmp_path / "job")
    assert files == ["rank0.json"]
    for name in ("rank1.json (empty)", "third (a run directory", "second/worker0.5.pt.trace.json (in a subdirectory"):
        assert name in warning


def test_a_copy_of_a_trace_is_read_once(write: Write, op: Op, tmp_path: Path) -> None:
    for name in ("rank0 (copy).json", "copy.json", "rank0.json"):
        write([op(ts=1)], f"job/{name}")
    write([op(ts=2)], "job/rank1.json")
    files, warnings = opened(tmp_path / "job")
    assert files == ["rank0.json", "rank1.json"]
    assert sorted(warnings) == sorted(
        f"{tmp_path / 'job' / name}: is a copy of {tmp_path / 'job' / 'rank0.json'}; read once"
        for name in ("rank0 (copy).json", "copy.json")
    )


def test_equal_traces_whose_names_tell_different_ranks_are_no_copies(write: Write, op: Op, tmp_path: Path) -> None:
    for rank in (0, 1):
        write([op()], f"job/rank{rank}.json")
    assert opened(tmp_path / "job") == (["rank0.json", "rank1.json"], ())


def test_a_path_given_twice_is_read_once(write: Write, op: Op, tmp_path: Path) -> None:
    path = write([op()], "job/rank0.json")
    files, warnings = opened(path, tmp_path / "job")
    assert files == ["rank0.json"]
    assert warnings == (f"{path}: given more than once; read once",)


@pytest.mark.parametrize("given", ["", "run.json"])
def test_a_run_directory_says_whose_each_file_is(write: Write, op: Op, tmp_path: Path, given: str) -> None:
    write([op()], "run/a.json")
    write([op()], "run/b.json.gz")
    write([op()], "run/unnamed.json")
    ranks = [
        {"rank": 1, "trace": "a.json", "status": "ok"},
        {"rank": 0, "trace": "b.json.gz", "status": "ok", "error": None},
    ]
    write_run(tmp_path / "run", ranks, command=["train.py"])
    inputs = open_inputs([tmp_path / "run" / given])
    assert [(file.path.name, file.rank) for file in inputs.files] == [("a.json", 1), ("b.json.gz", 0)]
    assert (inputs.run["command"], inputs.run_dir, inputs.warnings) == (["train.py"], tmp_path / "run", ())


@pytest.mark.parametrize(("named", "there"), [("a.json.gz", "a.json"), ("a.json", "a.json.gz")])
def test_a_trace_packed_or_unpacked_since_the_run_is_the_one_that_was_recorded(
    write: Write, op: Op, tmp_path: Path, named: str, there: str
) -> None:
    write([op()], f"run/{there}")
    write_run(tmp_path / "run", [{"rank": 3, "trace": named, "status": "ok"}])
    inputs = open_inputs([tmp_path / "run"])
    assert [(file.path.name, file.rank) for file in inputs.files] == [(there, 3)]
    assert inputs.warnings == ()


def test_ranks_without_a_trace_are_named_with_the_reason(write: Write, op: Op, tmp_path: Path) -> None:
    write([op()], "run/rank0.json")
    write([op()], "run/rank3.json")
    ranks: list[Any] = [
        {"rank": 0, "trace": "rank0.json", "status": "ok"},
        {"rank": 1, "trace": None, "status": "failed", "error": "Traceback …\nRuntimeError: out of memory"},
        {"rank": 2, "trace": "rank2.json", "status": "ok"},
        {"rank": 3, "trace": "rank3.json", "status": "killed", "error": ""},
        {"rank": "x", "trace": "rank0.json"},
        7,
    ]
    write_run(tmp_path / "run", ranks)
    files, warnings = opened(tmp_path / "run")
    assert files == ["rank0.json", "rank3.json"]
    assert warnings == (
        f"{tmp_path / 'run'}: 2 of 5 ranks have no trace: "
        "rank 1 (failed: RuntimeError: out of memory), rank 2 (no trace written)",
        f"{tmp_path / 'run' / 'run.json'}: rank 'x' is no number; skipped its trace",
        "rank 3 ended badly (killed); its trace may be incomplete",
    )


@pytest.mark.parametrize(
    ("states", "warning"),
    [
        (["stopped"] * 4, "ranks 0 to 3 ended badly (stopped); their traces may be incomplete"),
        (["ok", "stopped", "ok", "stopped"], "ranks 1, 3 ended badly (stopped); their traces may be incomplete"),
        (
            ["failed", "stopped", "stopped", "ok"],
            "3 ranks ended badly: rank 0 (failed), ranks 1, 2 (stopped); their traces may be incomplete",
        ),
    ],
)
def test_ranks_that_ended_badly_are_one_warning(
    write: Write, op: Op, tmp_path: Path, states: list[str], warning: str
) -> None:
    for rank in range(len(states)):
        write([op()], f"run/rank{rank}.json")
    ranks = [{"rank": rank, "trace": f"rank{rank}.json", "status": state} for rank, state in enumerate(states)]
    write_run(tmp_path / "run", ranks)
    assert opened(tmp_path / "run")[1] == (warning,)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"ranks": 3}', '"run"', "[" * 100_000])
def test_an_unreadable_run_file_is_said_and_the_traces_beside_it_taken(
    write: Write, op: Op, tmp_path: Path, text: str
) -> None:
    write([op()], "run/rank0.json")
    write(text.encode(), "run/run.json")
    inputs = open_inputs([tmp_path / "run"])
    assert [file.path.name for file in inputs.files] == ["rank0.json"]
    assert inputs.run is None
    assert inputs.warnings[0].startswith(f"{tmp_path / 'run' / 'run.json'}: unreadable")


def test_another_schema_of_run_file_is_said(write: Write, op: Op, tmp_path: Path) -> None:
    write([op()], "run/rank0.json")
    write_run(tmp_path / "run", [{"rank": 0, "trace": "rank0.json"}], schema="pptrace.run/9")
    assert "'pptrace.run/9'" in opened(tmp_path / "run")[1][0]


def test_a_run_file_does_not_lead_out_of_its_directory(write: Write, op: Op, tmp_path: Path) -> None:
    outside = write([op()], "outside.json")
    for name in ("../outside.json", str(outside)):
        write_run(tmp_path / "run", [{"rank": 0, "trace": name}])
        with pytest.raises(TraceError, match=r"names no trace that exists"):
            open_inputs([tmp_path / "run"])


def test_the_traces_of_the_scripts_own_profiler_are_read_where_there_are_no_others(
    write: Write, op: Op, tmp_path: Path
) -> None:
    note = "the script's own torch.profiler recorded all"
    ranks: list[Any] = [
        {"rank": rank, "trace": None, "script_trace": f"script_profiler/rank{rank}.json", "status": "ok", "note": note}
        for rank in range(2)
    ]
    for rank in range(2):
        write([op()], f"run/script_profiler/rank{rank}.json")
    write_run(tmp_path / "run", ranks)
    inputs = open_inputs([tmp_path / "run"])
    assert [(file.path.name, file.rank) for file in inputs.files] == [("rank0.json", 0), ("rank1.json", 1)]
    assert [line.split(":")[0] for line in inputs.warnings] == ["pptrace recorded none"]
    write([op()], "run/rank0.json")
    write_run(tmp_path / "run", [{**ranks[0], "trace": "rank0.json"}, ranks[1]])
    inputs = open_inputs([tmp_path / "run"])
    assert [file.path.parent.name for file in inputs.files] == ["run"]
    assert inputs.warnings[0].endswith(
        f"1 of 2 ranks have no trace: rank 1 ({note}; its trace is script_profiler/rank1.json)"
    )


def test_a_run_without_any_trace_says_each_reason_once_and_who_is_to_blame_for_a_hang(tmp_path: Path) -> None:
    note = "the script's own torch.profiler recorded all, and wrote no trace"
    ranks = [{"rank": rank, "trace": None, "status": "ok", "note": note} for rank in range(4)]
    hang = {"verdict": "late", "detail": "late: rank 3 sleeps", "ranks": [3], "edges": []}
    write_run(tmp_path / "run", ranks, hang=hang)
    with pytest.raises(TraceError) as caught:
        open_inputs([tmp_path / "run"])
    assert str(caught.value).count(note) == 1
    assert f"ranks 0 to 3 ({note}); the run hung: late: rank 3 sleeps" in str(caught.value)


def test_no_path_is_wrong_usage() -> None:
    with pytest.raises(UsageError, match="no path"):
        open_inputs([])


def test_paths_that_hold_nothing_are_errors_of_one_line(write: Write, op: Op, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write(b'{"a": 1}', "configs/config.json")
    write(b"text", "texts/notes.txt")
    write([op()], "runs/first/rank0.json")
    write_run(tmp_path / "runs" / "first", [{"rank": 0, "trace": "rank0.json"}])
    expected = {
        "absent": "not found; expected",
        "empty": "empty; expected one Kineto trace",
        "configs": """no trace among config.json (no trace: begins with '{"a": 1}'); expected""",
        "texts": "no trace files; expected",
        "runs": "holds run directories (first) and no traces; expected one run; give one of them",
        "a\0b": "not found",
    }
    for name, message in expected.items():
        with pytest.raises(TraceError) as caught:
            open_inputs([tmp_path / name])
        assert str(caught.value).startswith(f"{tmp_path / name}: {message}")
        assert "\n" not in str(caught.value)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trace.json")
    with pytest.raises(TraceError, match=r"trace\.json: a pipe or a device"):
        open_inputs([tmp_path / "trace.json"])
