"""The second look at a large trace: the same answer, from the disk."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from msgspec.structs import replace

import pptrace.ingest.job.disk_cache as cache_module
from pptrace.ingest import open_inputs, read_each
from pptrace.ingest.formats import read_file
from pptrace.ingest.inputs.resolve import InputFile
from pptrace.ingest.job import read_job
from pptrace.ingest.job.disk_cache import Cache, Packed, cache_for
from pptrace.ingest.job.packing import pack, unpack
from pptrace.model.device import IdleTime, RangedPauses, Synchronisations
from pptrace.model.traces import Category
from pptrace.recognise.recognised_rank import RecognisedRank
from pptrace.report.to_json import report_object
from pptrace.workflow import load as loading
from pptrace.workflow.load import load
from pptrace.workflow.rank_store import RankStore, recognise_trace
from tests.ingest import nsight_files
from tests.ingest.conftest import Op, Write
from tests.support.programs import SAMPLES
from tests.support.synthetic import START, Event, make_trace

SECRET = "hunter2-do-not-tell"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for each test, into which small files go as well."""
    index = tmp_path / "cache"
    monkeypatch.setenv("PPTRACE_CACHE_DIR", str(index))
    monkeypatch.setattr(loading, "RankStore", partial(RankStore, 0))
    return index


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files that were really read."""
    names: list[str] = []

    def counted(path: Path, *options: Any) -> Any:
        names.append(path.name)
        return read_file(path, *options)

    monkeypatch.setattr(read_job, "read_file", counted)
    return names


def report_of(path: Path, **options: Any) -> dict[str, Any]:
    return report_object(load([path], **options).report, True)


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.npz"))


def copy_of(sample: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLES / sample, tmp_path / sample))


def test_the_second_look_says_the_same_and_reads_nothing(tmp_path: Path, folder: Path, reads: list[str]) -> None:
    run = copy_of("1f1b_p2", tmp_path)
    without = report_of(run, cache=False)
    assert not folder.exists()
    reads.clear()
    first = report_of(run)
    assert first["recording"]["figures"] == "unrecorded"
    assert sorted(reads) == ["rank0.json.gz", "rank1.json.gz"], "not again to take out what recording cost"
    reads.clear()
    second = report_of(run)
    assert reads == []
    assert len(entries(folder)) == 4
    assert without == first == second


def test_public_traces_say_the_same_from_the_cache(data: Path, reads: list[str]) -> None:
    for path in (data / "nsys_ai" / "mock.sqlite", data / "hta" / "nccl_parser_config" / "nccl_data.json.gz"):
        without, first = report_of(path, cache=False), report_of(path)
        reads.clear()
        assert report_of(path) == first == without
        assert reads == []


def test_what_was_found_comes_back_column_by_column() -> None:
    path = SAMPLES / "1f1b_p2" / "rank0.json.gz"
    (trace,) = read_file(path, None)
    rank = recognise_trace(trace)
    (again,) = unpack(pack([rank], [path]), tuple[RecognisedRank, ...], [path])
    assert again.info == rank.info
    assert again.framework == rank.framework
    for name in ("ops", "comms", "memory", "calls"):
        before, after = getattr(rank, name), getattr(again, name)
        pd.testing.assert_frame_equal(after, before)
    for name in ("start_ns", "end_ns", "stream", "launch_ns", "is_compute", "is_communication"):
        assert np.array_equal(getattr(again.work, name), getattr(rank.work, name))
        assert getattr(again.work, name).dtype == getattr(rank.work, name).dtype


def test_why_a_device_was_idle_comes_back() -> None:
    call = Event(Category.RUNTIME, "cudaStreamSynchronize", 4, 25, thread=1)
    launches = [Event(Category.RUNTIME, "cudaLaunchKernel", at, at + 2, thread=1, correlation=at + 1) for at in (0, 30)]
    kernels = [Event(Category.KERNEL, "gemm", at, at + 10, 0, 7, correlation=of) for at, of in ((10, 1), (40, 31))]
    rank = recognise_trace(make_trace([*launches, call, *kernels]))
    pauses = RangedPauses(np.array([4]), np.array([9]), np.array([0]), ("load",))
    rank = replace(rank, work=replace(rank.work, idle=replace(rank.work.idle, in_ranges=pauses)))
    (again,) = unpack(pack([rank]), tuple[RecognisedRank, ...])
    for name in IdleTime.__struct_fields__:
        before, after = getattr(rank.work.idle, name), getattr(again.work.idle, name)
        if isinstance(before, Synchronisations):
            assert [getattr(after, times).tolist() for times in ("start_ns", "drained_end_ns")] == [[4], [40]]
            assert after.names == before.names == (("cudaStreamSynchronize", ""),)
        elif isinstance(before, RangedPauses):
            assert all(np.array_equal(getattr(before, part), getattr(after, part)) for part in before.__struct_fields__)
        else:
            assert np.array_equal(before, after)
    assert len(rank.work.idle.launch_starved)


def test_columns_of_large_entries_are_mapped_and_written_nowhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {"few": np.arange(3, dtype=np.int8), "none": np.empty(0, np.int64), "many": np.arange(10.0)[::2]}
    cache = Cache((folder,))
    cache.write("key", Packed("facts", arrays))
    monkeypatch.setattr(cache_module, "MAPPED_BYTES", 0)
    for _ in range(2):
        packed = cache.read("key")
        assert packed.facts == "facts"
        for name, values in packed.arrays.items():
            assert (values.dtype, values.tolist()) == (arrays[name].dtype, arrays[name].tolist())
            assert values.flags.aligned
            assert values.ctypes.data % 8 == 0
            values[:] = 7
    (entry,) = entries(folder)
    with np.load(entry) as same:
        assert set(same) == {"facts", "index", "columns"}
    mapped = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    assert str(entry) in mapped


def test_a_file_that_has_changed_is_read_again(write: Write, op: Op, reads: list[str]) -> None:
    path = write([op("aten::one")], "rank0.json")
    report_of(path)
    path = write([op("aten::one"), op("aten::two")], "rank0.json")
    assert report_of(path)["inputs"][0]["num_events"] == 2
    assert reads == ["rank0.json", "rank0.json"]


def test_the_same_size_and_time_are_not_the_same_content(write: Write, op: Op) -> None:
    path = write([op(dur=2.25, cat="kernel", tid=1)], "rank0.json")
    before = path.stat()
    assert report_of(path)["device"][0]["busy_ns"] == 2250
    path = write([op(dur=3.25, cat="kernel", tid=1)], "rank0.json")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert report_of(path)["device"][0]["busy_ns"] == 3250


def test_a_copy_is_known_by_its_content_and_called_by_its_own_name(
    write: Write, op: Op, reads: list[str], tmp_path: Path
) -> None:
    path = write([op()], "a/rank3.json")
    report_of(path)
    copy = tmp_path / "b" / "rank3.json"
    copy.parent.mkdir()
    shutil.copy(path, copy)
    reads.clear()
    assert report_of(copy)["inputs"][0]["path"] == str(copy)
    assert reads == []
    other = copy.rename(copy.with_name("rank5.json"))
    assert report_of(other)["inputs"][0]["rank"] == 5, "the name says the rank"


def test_an_unchanged_file_is_not_hashed_again(write: Write, op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write([op()], "rank0.json")
    first = report_of(path)

    def never(path: Path) -> str:
        raise AssertionError("hashed")

    monkeypatch.setattr(cache_module, "_hash_of", never)
    assert report_of(path) == first


def test_another_version_of_the_code_finds_for_itself(
    write: Write, op: Op, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write([op()], "rank0.json")
    report_of(path)
    monkeypatch.setattr(cache_module, "code_version", lambda: "another")
    report_of(path)
    assert reads == ["rank0.json"] * 2


@pytest.mark.parametrize(
    ("damage", "mapped_bytes"),
    [
        *((damage, 0) for damage in ("cut", "flip", "empty", "garbage", "other arrays", "other type", "fewer bytes")),
        *((damage, cache_module.MAPPED_BYTES) for damage in ("cut", "flip", "other columns")),
    ],
)
def test_a_damaged_entry_is_ignored_and_written_again(
    write: Write,
    op: Op,
    folder: Path,
    reads: list[str],
    damage: str,
    mapped_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache_module, "MAPPED_BYTES", mapped_bytes)
    path = write([op(), op(cat="kernel", tid=1)], "rank0.json")
    first = report_of(path)
    (entry,) = entries(folder)
    whole = entry.read_bytes()
    if damage.startswith(("other", "fewer")):
        with np.load(entry) as old:
            arrays = dict(old.items())
        if damage == "other arrays":
            index = json.loads(arrays["index"].tobytes())
            next(column for column in index.values() if column[1])[1] = 0
            arrays["index"] = np.frombuffer(json.dumps(index).encode(), np.uint8)
        elif damage == "other type":
            arrays["index"] = np.frombuffer(arrays["index"].tobytes().replace(b"<i8", b"|O8"), np.uint8)
        elif damage == "fewer bytes":
            arrays["columns"] = arrays["columns"][:-8]
        else:
            arrays["facts"] = np.frombuffer(arrays["facts"].tobytes().replace(b"microbatch", b"macrobatch"), np.uint8)
        np.savez(entry, **arrays)
    else:
        middle = whole.index(b"info") + 1
        texts = {"cut": whole[:-30], "empty": b"", "garbage": b"PK" + bytes(50)}
        entry.write_bytes(texts.get(damage, whole[:middle] + b"\xff" + whole[middle + 1 :]))
    reads.clear()
    assert report_of(path) == first
    assert reads == ["rank0.json"]
    assert entry.read_bytes()[:4] == b"PK\x03\x04"
    reads.clear()
    assert report_of(path) == first
    assert reads == [], "it was written again"


def test_no_wrong_byte_of_an_entrys_headers_is_an_error_or_another_content(folder: Path) -> None:
    """Among them are flags of encryption and kinds of compression that Python has not."""
    cache, packed = Cache((folder,)), Packed("facts", {"a": np.arange(5)})
    cache.write("key", packed)
    (entry,) = entries(folder)
    whole = entry.read_bytes()
    for place in range(whole.index(b"PK\x01\x02"), len(whole)):  # the headers that are read first
        entry.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        found = cache.read("key")
        assert found is None or (found.facts, found.arrays["a"].tolist()) == ("facts", [0, 1, 2, 3, 4])


def test_a_pickle_in_an_entry_is_not_opened(write: Write, op: Op, folder: Path, tmp_path: Path) -> None:
    path = write([op()], "rank0.json")
    first = report_of(path)
    (entry,) = entries(folder)

    class Planted:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "opened",))

    np.savez(entry, facts=np.array([Planted()], dtype=object))
    assert report_of(path) == first
    assert not (tmp_path / "opened").exists()


def test_an_entry_lies_in_the_runs_directory_else_in_the_users_cache(
    write: Write, op: Op, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PPTRACE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    path = write([op()], "run/rank0.json")
    assert cache_for(path).folders == (tmp_path / "home" / "pptrace",), "nobody asked for a folder beside a trace"
    (path.parent / "run.json").write_text("{}")
    assert cache_for(path).folders == (tmp_path / "run" / ".pptrace_cache", tmp_path / "home" / "pptrace")
    report_of(path)
    assert len(entries(path.parent / ".pptrace_cache")) == 1
    assert (path.parent / ".pptrace_cache" / ".gitignore").read_text() == "*\n"
    assert [file.path for file in open_inputs([path.parent]).files] == [path], "the folder is no trace"
    blocked = write([op()], "other/rank0.json")
    (blocked.parent / "run.json").write_text("{}")
    (blocked.parent / ".pptrace_cache").write_text("a file where the folder would be")
    report_of(blocked)
    assert len(entries(tmp_path / "home" / "pptrace")) == 1


def test_a_folder_of_somebodys_own_arrays_keeps_them(folder: Path) -> None:
    (folder / "files").mkdir(parents=True)
    own = [folder / "weights.npz", folder / "files" / "notes.txt"]
    for path in own:
        path.write_bytes(bytes(1000))
    cache = Cache((folder,), max_bytes=500)
    for name in ("a", "b"):
        cache.write(cache_module.key_of(name), Packed("", {"x": np.zeros(40)}))
    assert all(path.is_file() for path in own)
    assert cache.read(cache_module.key_of("a")) is None, "two entries are more than the limit"
    assert len(entries(folder)) < 3


def test_the_folder_may_be_in_the_home_directory_and_its_name_too_long(
    write: Write, op: Op, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = write([op()], "rank0.json")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PPTRACE_CACHE_DIR", "~/kept")
    assert cache_for(path).folders == (tmp_path / "home" / "kept",)
    monkeypatch.setenv("PPTRACE_CACHE_DIR", str(tmp_path / ("a" * 5000)))
    assert report_of(path) == report_of(path, cache=False)


def test_where_nothing_can_be_written_nothing_is_kept_or_said(write: Write, op: Op, folder: Path) -> None:
    folder.write_text("a file where the folder would be")
    path = write([op()], "rank0.json")
    assert report_of(path) == report_of(path, cache=False)


def test_small_files_are_not_kept(write: Write, op: Op, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "RankStore", partial(RankStore, 1024))
    report_of(write([op()], "rank0.json"))
    assert not folder.exists()
    report_of(write([op()] * 20, "rank1.json"))
    assert len(entries(folder)) == 1


def test_the_cache_stays_below_its_limit_and_forgets_what_was_not_used_for_longest(folder: Path) -> None:
    cache = Cache((folder,), max_bytes=20_000)
    packed = Packed("", {"numbers": np.zeros(1000, dtype=np.int64)})
    old, used, new, newest = map(cache_module.key_of, ("old", "used", "new", "newest"))
    for age, key in ((400, old), (300, used), (200, new)):
        if key == new:
            assert cache.read(used) is not None
        cache.write(key, packed)
        if key != new:
            os.utime(folder / f"{key}.npz", (10**9 - age, 10**9 - age))
    os.utime(folder / f"{used}.npz")
    cache.write(newest, packed)
    assert {path.stem for path in entries(folder)} <= {used, new, newest}
    assert sum(path.stat().st_size for path in entries(folder)) <= 20_000
    assert cache.read(newest) is not None
    cache.write("huge", Packed("", {"numbers": np.zeros(10_000, dtype=np.int64)}))
    assert cache.read("huge") is None
    assert cache.read(newest) is not None, "what is too large pushes nothing out"


def test_what_ended_processes_left_half_written_goes_after_a_day(folder: Path) -> None:
    folder.mkdir()
    old, fresh = folder / ".part-old", folder / ".part-fresh"
    old.touch()
    fresh.touch()
    os.utime(old, (10**9, 10**9))
    Cache((folder,)).write("key", Packed("", {}))
    assert (old.exists(), fresh.exists()) == (False, True)


def test_processes_share_a_cache(tmp_path: Path, folder: Path, reads: list[str]) -> None:
    run = copy_of("1f1b_p2", tmp_path)
    inputs = open_inputs([run])
    many_large = pytest.MonkeyPatch()
    with many_large.context() as patch:
        patch.setattr(read_job, "_LARGE_BYTES", 100)
        first = read_each(inputs, recognise_trace, 2, store=RankStore(0))
        assert len(entries(folder)) == 2
        second = read_each(inputs, recognise_trace, 2, store=RankStore(0))
    assert reads == [], "the processes read, and the second time nobody"
    assert [result.info for result in second.traces] == [result.info for result in first.traces]
    for a, b in zip(first.traces, second.traces, strict=True):
        pd.testing.assert_frame_equal(a.ops, b.ops)


def test_a_file_that_is_written_meanwhile_is_not_kept(
    write: Write, op: Op, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write([op()], "rank0.json")
    hash_of = cache_module._hash_of

    def growing(path: Path) -> str:
        with path.open("ab") as file:
            file.write(b"\n")
        return hash_of(path)

    monkeypatch.setattr(cache_module, "_hash_of", growing)
    report_of(path)
    assert entries(folder) == []


def everything_below(*folders: Path) -> bytes:
    texts = []
    for path in (path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()):
        content = path.read_bytes()
        texts.append(gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content)
        if path.suffix == ".npz":
            with np.load(path) as arrays:
                texts += [array.tobytes() for array in arrays.values()]
    return b"\0".join(texts)


def outputs_of(path: Path, out: Path) -> None:
    from click.testing import CliRunner

    from pptrace.cli.analyze import command

    out.mkdir()
    targets = ("--json", "report.json", "--html", "page.html", "--csv", "tables", "--perfetto", "trace.json")
    options = [name if name.startswith("--") else str(out / name) for name in targets]
    result = CliRunner().invoke(command, [str(path), "--ops", *options])
    assert result.exit_code == 0, result.output
    (out / "text").write_text(result.output)


def test_secrets_of_a_kineto_export_reach_no_output(tmp_path: Path, folder: Path) -> None:
    run = copy_of("1f1b_p2", tmp_path)
    for path in run.glob("*.json.gz"):
        document = json.loads(gzip.decompress(path.read_bytes()))
        document["environment"] = {"API_TOKEN": SECRET}
        document["pptrace"]["environment"] = {"API_TOKEN": SECRET}
        document["pptrace"]["argv"] = [f"/home/{SECRET}/train.py"]
        document["distributedInfo"]["command"] = SECRET
        document["deviceProperties"] = [{"name": "NVIDIA H200", "uuid": SECRET}]
        document["traceName"] = f"/home/{SECRET}/trace.json"
        document["traceEvents"] += [
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": SECRET}},
            {"ph": "M", "name": "process_labels", "pid": 1, "tid": 0, "ts": 0, "args": {"labels": SECRET}},
        ]
        path.write_bytes(gzip.compress(json.dumps(document).encode()))
    outputs_of(run, tmp_path / "out")
    written = everything_below(folder, tmp_path / "out")
    assert b'"framework"' in written
    assert len(entries(folder)) == 4, "as recorded, and without what recording cost"
    assert SECRET.encode() not in written


@pytest.mark.parametrize("generation", [nsight_files.EARLY, nsight_files.LATEST], ids=lambda each: each.version)
def test_environment_home_and_processes_of_an_nsight_export_are_in_no_entry(
    generation: nsight_files.Generation, tmp_path: Path, folder: Path
) -> None:
    """Such as the writer of tests puts into every export: variables, the host, paths of homes, other people's processes."""
    label = Event(Category.ANNOTATION, "forward step", 0, 5_000, thread=1)
    launch = Event(Category.RUNTIME, "cudaLaunchKernel", 1_000, 2_000, thread=1, correlation=7)
    kernel = Event(Category.KERNEL, "gemm_of_the_program", 3_000, 4_000, stream=7, correlation=7, device=0)
    events = [
        dataclasses.replace(event, start=START + event.start, end=START + event.end)
        for event in (label, launch, kernel)
    ]
    exported = nsight_files.Report([nsight_files.Process(4711, events)], generation)
    path = nsight_files.write_report(exported, tmp_path / "rank0.sqlite")
    inputs = open_inputs([path])
    read_each(inputs, recognise_trace, 1, store=RankStore(0))
    assert len(entries(folder)) == 1
    assert RankStore(0).peek(inputs.files[0]) is not None
    in_export, in_cache = path.read_bytes(), everything_below(folder)
    for secret in map(str.encode, nsight_files.SECRETS):
        assert secret in in_export
        assert secret not in in_cache
    assert str(tmp_path).encode() not in in_cache


def test_the_path_of_a_trace_is_not_in_its_entry(write: Write, op: Op, folder: Path) -> None:
    path = write([op(), op(ts=None)], f"{SECRET}/rank0.json")
    assert report_of(path)["inputs"][0]["path"] == str(path)
    assert SECRET.encode() not in everything_below(folder)


def test_a_store_is_asked_for_files_of_any_format(write: Write, op: Op) -> None:
    path = write([op()], "rank0.json")
    file = InputFile(path, None, None, path.stat().st_size)
    store = RankStore(0)
    assert (store.peek(file), store.get(file)) == (None, None)
    store.put(file, tuple(map(recognise_trace, read_file(path, None))))
    result = store.peek(file)
    assert result[0].info.path == str(path)
