"""``--engine dask``: the same report from the workers of a real cluster, and one clear line where there is none."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from pptrace.errors import PptraceError
from pptrace.ingest.inputs.resolve import InputFile
from pptrace.ingest.job.read_job import ProgressMeter
from pptrace.model.traces import Trace
from pptrace.recognise.recognised_rank import RecognisedRank
from pptrace.schedule.registry import build
from pptrace.workflow import dask_cluster, dask_engine
from pptrace.workflow.rank_store import recognise_trace
from tests.support.extent import ALL
from tests.support.forked import PROGRAM
from tests.support.programs import SAMPLES, one_line, pptrace, pptrace_here
from tests.support.synthetic import record

dask = pytest.importorskip("dask")
distributed = pytest.importorskip("distributed")
from distributed.utils import get_mp_context  # noqa: E402

P2, P4 = SAMPLES / "1f1b_p2", SAMPLES / "1f1b_p4"

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def scheduler() -> Iterator[str]:
    """The address of a scheduler with two worker processes, which are started again when they die.

    Forks of a process that has imported what they need: tests kill them. After five minutes they are ended, so that a test that
    waits for them fails.
    """
    settings = {"distributed.scheduler.allowed-failures": 1, "distributed.worker.multiprocessing-method": "forkserver"}
    with dask.config.set(settings):
        get_mp_context().set_forkserver_preload(["distributed", __name__])
    with (
        dask.config.set(settings),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0", silence_logs=60
        ) as cluster,
    ):
        deadline = threading.Timer(300, cluster.close)
        deadline.daemon = True
        deadline.start()
        yield cluster.scheduler_address
        deadline.cancel()


def json_of(*arguments: str | Path) -> str:
    ended = pptrace_here("analyze", *arguments, "--no-cache", "--json", "-")
    assert ended.code == 0, ended.err
    return ended.out


@cache
def json_here(*arguments: str | Path) -> str:
    """The report of this process."""
    return json_of(*arguments)


def dies(marker: Path | None, trace: Trace) -> RecognisedRank:
    """Recognise a rank, but kill the process on rank 2: the first time, or always without ``marker``."""
    if trace.rank == 2 and (marker is None or not marker.exists()):
        if marker is not None:
            marker.touch()
        time.sleep(0.1)  # as long as what kills workers takes at least, so that others begin as well
        os.kill(os.getpid(), signal.SIGKILL)
    return recognise_trace(trace)


FEW = ["1f1b_p4", "gpu_nccl_experts_pp2_ep2", "hang_p4"]
"""A run whose recording is taken out, one of GPUs, and one with dumps."""
EVERY = sorted(path.name for path in SAMPLES.iterdir() if path.is_dir())


@pytest.mark.parametrize("name", EVERY if ALL else FEW)
def test_a_cluster_reports_byte_for_byte_what_this_process_reports(scheduler: str, name: str) -> None:
    arguments = (SAMPLES / name, "--ops")
    assert json_of(*arguments, "--engine", "dask", "--scheduler", scheduler) == json_here(*arguments)


@pytest.mark.parametrize("options", [("--step", "3"), *[("--as-recorded",)] * ALL])
def test_a_run_of_several_tables_of_each_rank_is_the_same(
    scheduler: str, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Each rank is joined from two files, which different workers may have read."""
    pptrace_here("analyze", P2, "--csv", tmp_path)
    header, *rows = (tmp_path / "ops.csv").read_text().splitlines()
    step = header.split(",").index("step")
    files = []
    for number in ("3", "4"):
        files.append(tmp_path / f"step{number}.csv")
        of_step = [row for row in rows if row.split(",")[step] == number]
        assert len(of_step) > 8
        files[-1].write_text("\n".join([header, *of_step]) + "\n")
    report = json_of(*files, *options, "--engine", "dask", "--scheduler", scheduler)
    assert report == json_of(*files, *options)
    assert [len(entry["ranks"]) for entry in json.loads(report)["steps"]][:1] == [2]


def test_a_report_is_the_same_when_a_worker_is_killed_half_way(
    scheduler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker, expected = tmp_path / "killed", json_here(P4)
    monkeypatch.setattr("pptrace.workflow.load.recognise_trace", partial(dies, marker))
    assert json_of(P4, "--engine", "dask", "--scheduler", scheduler) == expected
    assert marker.exists()


def test_a_report_is_the_same_when_a_worker_is_killed_with_what_it_has_read(
    scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed, result_of, expected = [], dask_engine.DaskEngine._result_of, json_here(P4)

    def result_of_the_dead(engine: dask_engine.DaskEngine, future: Any, path: Path) -> Any:
        """Kill the worker that holds the first result, before it comes here."""
        if not killed:
            (address,) = engine.client.who_has([future])[future.key]
            killed.append(engine.client.run(os.getpid, workers=[address])[address])
            os.kill(killed[0], signal.SIGKILL)
            while _bytes_of(Path(f"/proc/{killed[0]}/cmdline")):
                time.sleep(0.01)
        return result_of(engine, future, path)

    monkeypatch.setattr(dask_engine.DaskEngine, "_result_of", result_of_the_dead)
    assert json_of(P4, "--engine", "dask", "--scheduler", scheduler) == expected
    assert killed


def test_a_file_that_kills_every_worker_is_named(scheduler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pptrace.workflow.load.recognise_trace", partial(dies, None))
    line = one_line(pptrace_here("analyze", P4, "--no-cache", "--engine", "dask", "--scheduler", scheduler), code=1)
    assert "rank2.json.gz: " in line
    assert "workers died" in line
    assert "--engine local" in line


def test_workers_started_for_a_command_end_with_it(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    ended = pptrace(
        *("analyze", P2, "--no-cache", "--engine", "dask", "--jobs", "1", "--json", tmp_path / "report.json"),
        environ={"TMPDIR": str(tmp_path / "tmp")},
        timeout_s=180,
    )
    assert (ended.code, ended.err) == (0, "")
    assert (tmp_path / "report.json").read_text() == json_here(P2).removesuffix("\n")
    assert list((tmp_path / "tmp").iterdir()) == []  # where workers kept their files
    assert _all_end(tmp_path)


def test_an_interrupted_command_says_so_in_one_line_and_its_workers_end(tmp_path: Path) -> None:
    """Ctrl-C interrupts all processes of a terminal's command, here as soon as there is a worker."""
    command = [PROGRAM, "analyze", str(P2), "--no-cache", "--engine", "dask", "--jobs", "1"]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environ) as process:
        try:
            deadline = time.monotonic() + 180
            while not any(b"spawn_main" in _bytes_of(path) for path in _started_with(tmp_path, "cmdline")):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGINT)
            _, err = process.communicate(timeout=180)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, err.strip()) == (130, "pptrace: interrupted")
    assert _all_end(tmp_path)


def _all_end(folder: Path) -> bool:
    """Return whether all processes with the folder in their environment end at once; the one of multiprocessing ends last."""
    deadline = time.monotonic() + 60
    while _started_with(folder, "cmdline") and time.monotonic() < deadline:
        time.sleep(0.05)
    return not _started_with(folder, "cmdline")


def _started_with(folder: Path, name: str) -> list[Path]:
    """A file of each process in whose environment the folder is."""
    return [
        path.with_name(name) for path in Path("/proc").glob("[0-9]*/environ") if str(folder).encode() in _bytes_of(path)
    ]


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # ended meanwhile, or another user's
        return b""


def test_the_python_api_reads_on_a_cluster(scheduler: str) -> None:
    import pptrace as package

    progress: list[tuple[float, int]] = []
    on_cluster: dict[str, Any] = {"engine": "dask", "scheduler": scheduler, "cache": False}
    run = package.load(P4, progress=lambda *status: progress.append(status), **on_cluster)
    assert run.to_json() == json_here(P4).removesuffix("\n")
    assert progress[0] == (0, 4)
    assert progress[-1] == (4, 4)


def test_a_file_that_a_worker_does_not_see_is_named_with_the_worker(scheduler: str, tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    path.write_text("[]")
    with dask_cluster.open_dask(scheduler) as engine:
        for num_bytes, gone in ((3, False), (2, True)):
            if gone:
                path.unlink()
            file = InputFile(path, None, None, num_bytes)
            with pytest.raises(dask_engine.InvisibleFileError) as error:
                engine.read_files({0: file}, _never, ProgressMeter([num_bytes], print))
            assert str(path) in str(error.value)
            assert "worker tcp://127.0.0.1:" in str(error.value)
            assert ("No such file" if gone else "2 bytes there, 3 here") in str(error.value)


def test_a_relative_path_is_that_of_the_program_wherever_its_workers_run(
    scheduler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rank0.json").write_text("[]")
    monkeypatch.chdir(tmp_path)
    with dask_cluster.open_dask(scheduler) as engine:
        file = InputFile(Path("rank0.json"), None, None, 2)
        assert engine.read_files({7: file}, _text, ProgressMeter([0] * 8, print)) == {7: "[]"}


def _text(file: InputFile, *_: Any) -> Any:
    return file.path.read_text()


def _never(*_: Any) -> Any:
    raise AssertionError("a file of other bytes is not read")


def test_workers_of_another_version_are_refused(scheduler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("pptrace.version.__version__", "99.0")
        line = one_line(pptrace_here("analyze", P4, "--engine", "dask", "--scheduler", scheduler), code=1)
        assert "worker tcp://127.0.0.1:" in line
        assert "pptrace 99.0" in line
    monkeypatch.setattr(dask_cluster, "python_version", lambda: "3.99.0")
    line = one_line(pptrace_here("analyze", P4, "--engine", "dask", "--scheduler", scheduler), code=1)
    assert f"Python {sys.version_info[0]}.{sys.version_info[1]}" in line
    assert "Python 3.99.0" in line


def test_a_scheduler_without_workers_or_that_loses_them_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask_cluster, "_CONNECT_S", 0.5)
    monkeypatch.setattr(dask_engine, "_NO_WORKERS_S", 1.0)
    with (
        distributed.LocalCluster(n_workers=0, host="127.0.0.1", dashboard_address="127.0.0.1:0") as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        address = cluster.scheduler_address
        line = one_line(pptrace_here("analyze", P4, "--engine", "dask", "--scheduler", address), code=1)
        assert f"--scheduler {address}: has no workers; start some with `dask worker {address}`" in line
        engine, file = dask_engine.DaskEngine(client, "the cluster"), InputFile(P4 / "rank0.json.gz", None, None, 2)
        with pytest.raises(PptraceError, match="the cluster: has no workers any more"):
            engine.read_files({0: file}, _never, ProgressMeter([2], print))


def test_a_scheduler_that_ends_meanwhile_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        distributed.LocalCluster(n_workers=0, host="127.0.0.1", dashboard_address="127.0.0.1:0") as cluster,
        distributed.Client(cluster.scheduler_address, timeout=1, set_as_default=False) as client,
    ):
        monkeypatch.setattr(dask_engine.DaskEngine, "_has_workers", lambda _: cluster.close() is None)
        engine, file = dask_engine.DaskEngine(client, "the cluster"), InputFile(P4 / "rank0.json.gz", None, None, 2)
        with pytest.raises(PptraceError, match="the cluster: the connection is lost; is the scheduler still running"):
            engine.read_files({0: file}, _never, ProgressMeter([2], print))


def test_an_address_without_a_scheduler_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask_cluster, "_CONNECT_S", 0.5)
    line = one_line(pptrace_here("analyze", P4, "--engine", "dask", "--scheduler", "tcp://127.0.0.1:1"), code=1)
    assert "--scheduler tcp://127.0.0.1:1: no dask scheduler answers" in line


@pytest.mark.parametrize("address", ["nonsense://", "nonsense://127.0.0.1:8786", "127.0.0.1:x", "127.0.0.1", ""])
def test_what_is_not_an_address_is_refused_at_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "Client", None)  # which would go on trying in the background
    line = one_line(pptrace_here("analyze", P4, "--engine", "dask", "--scheduler", address), code=1)
    assert f"--scheduler {address}: is not an address" in line


def test_without_dask_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    line = one_line(pptrace_here("analyze", P4, "--engine", "dask"), code=2)
    assert line == (
        "pptrace: --engine dask: dask.distributed is not installed; pip install 'pptrace[dask]', or use --engine local"
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--scheduler", "tcp://127.0.0.1:1"), "add --engine dask"),
        (("--engine", "dask", "--scheduler", "tcp://127.0.0.1:1", "--jobs", "2"), "leave out --jobs"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: tuple[str, ...], expected: str) -> None:
    assert expected in one_line(pptrace_here("analyze", P4, *options), code=2)


def test_what_comes_here_of_a_rank_grows_by_as_many_bytes_a_row_as_the_limits_say() -> None:
    def rows_and_bytes(steps: int) -> tuple[int, int]:
        rank = recognise_trace(record(build("1f1b", 3, 8), dp=2, steps=steps).traces()[2])
        return len(rank.ops) + len(rank.comms), len(pickle.dumps(rank, protocol=5))

    (rows, num_bytes), (more_rows, more_bytes) = rows_and_bytes(2), rows_and_bytes(20)
    assert more_rows == 10 * rows
    limits = (SAMPLES.parent / "docs" / "limits.md").read_text()
    match = re.search(r"(\d+) bytes a row of a table of ops and messages", limits)
    assert (more_bytes - num_bytes) / (more_rows - rows) == pytest.approx(int(match[1]), rel=0.1)
