"""Runs at URLs: a store in memory has the samples' files, and figures are those of the files themselves."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from click.testing import CliRunner
from fsspec.implementations.memory import MemoryFileSystem

import pptrace
from pptrace.api.urls import local_copy
from pptrace.cli.main import cli
from pptrace.errors import PptraceError, TraceError, UsageError

SAMPLE = Path(__file__).parents[2] / "sample_traces" / "1f1b_p4"
RUN = "memory://bucket/runs/7"


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryFileSystem]:
    """A store with a run, and with it weights, a hidden file and a dump without an ending."""
    monkeypatch.setenv("PPTRACE_CACHE_DIR", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    for file in (*SAMPLE.glob("rank*.json.gz"), SAMPLE / "run.json"):
        memory.pipe(f"/bucket/runs/7/{file.name}", file.read_bytes())
    for name in ("weights/model.safetensors", ".hidden/rank0.json", "dumps/nccl_trace_rank_0"):
        memory.pipe(f"/bucket/runs/7/{name}", b"1")
    yield memory
    memory.store.clear()


def test_a_run_at_a_url_has_the_figures_of_its_files_and_only_what_may_be_a_trace_is_copied() -> None:
    at_url, here = pptrace.load(RUN, cache=False), pptrace.load(SAMPLE, cache=False)
    assert at_url.report.steps == here.report.steps
    assert at_url.report.findings == here.report.findings
    ranks = {f"rank{rank}.json.gz" for rank in range(4)}
    copied = {str(file.relative_to(local_copy(RUN))) for file in local_copy(RUN).rglob("*") if file.is_file()}
    assert copied == {*ranks, "run.json", "dumps/nccl_trace_rank_0"}
    assert local_copy(f"{RUN}/") == local_copy(RUN)


def test_one_file_is_a_trace() -> None:
    path = local_copy(f"{RUN}/rank2.json.gz")
    assert path.name == "rank2.json.gz"
    assert path.read_bytes() == (SAMPLE / "rank2.json.gz").read_bytes()


def test_what_did_not_change_is_not_copied_again_what_changed_is_and_what_is_gone_goes(store: MemoryFileSystem) -> None:
    copied: list[tuple[int, int]] = []

    def copy() -> Path:
        return local_copy(RUN, lambda files, size: copied.append((files, size)))

    path = copy()
    assert copied == [(6, sum(file.stat().st_size for file in path.rglob("*") if file.is_file()))]
    assert copy() == path
    assert len(copied) == 1
    store.pipe("/bucket/runs/7/rank1.json.gz", b"other")
    store.rm("/bucket/runs/7/rank3.json.gz")
    copy()
    assert copied[1:] == [(1, 5)]
    assert (path / "rank1.json.gz").read_bytes() == b"other"
    assert not (path / "rank3.json.gz").exists()


def test_copies_that_nobody_asks_for_are_deleted(tmp_path: Path) -> None:
    old = local_copy(f"{RUN}/rank0.json.gz")
    os.utime(old.parent / "copied.json", (0, 0))
    new = local_copy(f"{RUN}/rank1.json.gz")
    assert new.is_file()
    assert not old.parent.exists()


@pytest.mark.parametrize(
    ("url", "kind", "line"),
    [
        ("memory://bucket/none", TraceError, "memory://bucket/none: nothing there; expected"),
        (f"{RUN}/weights", TraceError, f"{RUN}/weights: 1 file, none named as a trace; expected"),
        ("never-heard-of://a/b", PptraceError, "never-heard-of://a/b: cannot be read (ValueError: Protocol not known"),
    ],
)
def test_a_url_with_nothing_to_read_is_one_line(url: str, kind: type[PptraceError], line: str) -> None:
    with pytest.raises(kind) as caught:
        pptrace.load(url)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_without_fsspec_the_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(PptraceError, match=r"pip install 'pptrace\[urls\]'"):
        pptrace.load("s3://bucket/run")


SIGNED = "https://user:word@host/runs/rank2.json.gz?Signature=secret"


def test_a_presigned_url_is_got_each_time(store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url: (store, "/bucket/runs/7/rank2.json.gz"))
    copied: list[tuple[int, int]] = []
    for _ in range(2):
        path = local_copy(SIGNED, lambda files, size: copied.append((files, size)))
        assert path.name == "rank2.json.gz"
        assert path.read_bytes() == (SAMPLE / "rank2.json.gz").read_bytes()
    assert copied == [(1, 0), (1, 0)]


def test_neither_signature_nor_password_of_a_url_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(url: str) -> tuple[object, str]:
        raise RuntimeError(f"403, message='Forbidden', url='{url.replace('user:word@', '')}'\nmore")

    monkeypatch.setattr(fsspec.core, "url_to_fs", refuse)
    with pytest.raises(PptraceError) as caught:
        local_copy(SIGNED)
    assert str(caught.value).startswith(
        "https://host/runs/rank2.json.gz: cannot be read (RuntimeError: 403, message='Forbidden', url='https://host/runs/"
        "rank2.json.gz?…'); check"
    )


def test_a_file_url_is_the_file_itself() -> None:
    assert local_copy(SAMPLE.as_uri()) == SAMPLE


def test_results_are_written_to_files_of_this_machine_alone() -> None:
    with pytest.raises(UsageError, match="is a URL; expected the name of a file or directory of this machine"):
        pptrace.load(SAMPLE).to_perfetto("s3://bucket/trace.json")
    answer = CliRunner().invoke(cli, ["analyze", str(SAMPLE), "--html", "s3://bucket/report.html"])
    assert answer.exit_code == 2
    assert "is a URL" in answer.output


def test_the_commands_take_urls_and_say_what_they_copy() -> None:
    answer = CliRunner().invoke(cli, ["doctor", RUN])
    assert "copying 6 files" in answer.stderr
    assert "copying" not in answer.stdout
    assert "4 ranks" in answer.stdout
    again = CliRunner().invoke(cli, ["analyze", RUN])
    assert again.stdout.startswith("The typical step takes")
    assert again.stderr == ""
