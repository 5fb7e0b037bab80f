"""The run directory: traces, and ``run.json`` that says what they are.

``run.json`` is written when a run starts (status ``running``) and replaced when it ends; the ranks' own files are
merged into it then. So a launcher that was killed leaves a directory that can still be read. On other nodes than the
first the file is called ``run.node{K}.json``, for directories that the nodes share.
"""

from __future__ import annotations

import datetime
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import pptrace
from instrument.launch.facts import host_name, sample_clock
from instrument.launch.options import RunOptions, make_directory, refused_directory
from instrument.launch.record import (
    RankRecord,
    State,
    counter_path,
    read_counter,
    read_record,
    record_path,
    spawned_records,
    write_json,
)
from pptrace.environment import read_environment
from pptrace.errors import PptraceError

RUN_SCHEMA = "pptrace.run/1"
_MERGED = ("versions", "environment", "mesh", "plan", "profile_ranks")


class Status(StrEnum):
    RUNNING = "running"
    OK = "ok"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class RunEnd:
    """End of a run."""

    status: Status
    exit_code: int


class RunDirectory:
    """Writes ``run.json`` at the start and at the end of a run."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._started_at = _now()
        self._environment = read_environment(os.environ)
        self._clock = {"start": sample_clock()}

    def begin(self) -> None:
        """Make the directory and write ``run.json`` there.

        Raises:
            UsageError: it cannot be made or written.
        """
        make_directory(self._options.run_dir)
        with refused_directory(self._options.run_dir):
            self._write(Status.RUNNING, None, None, ())

    def finish(self, end: RunEnd, records: Sequence[RankRecord], hang: Mapping[str, object] | None = None) -> None:
        """Write ``run.json`` and remove what the ranks wrote for it.

        Raises:
            PptraceError: it cannot be written, as on a full disk.
        """
        self._clock["stop"] = sample_clock()
        for record in records:
            for scratch in self._options.run_dir.glob(f".rank{record.rank}.*"):  # of a rank killed while it wrote
                scratch.unlink(missing_ok=True)
        try:
            self._write(end.status, end.exit_code, _now(), records, hang)
        except OSError as err:
            why = f"cannot be written ({err.strerror}); expected room for the end of the run"
            raise PptraceError(f"{self._options.run_file}: {why}: traces that are in the directory stay") from None
        for record in records:
            record_path(self._options.run_dir, record.rank).unlink(missing_ok=True)

    def _write(
        self,
        status: Status,
        exit_code: int | None,
        ended_at: str | None,
        records: Sequence[RankRecord],
        hang: Mapping[str, object] | None = None,
    ) -> None:
        options = self._options
        content: dict[str, Any] = {
            "schema": RUN_SCHEMA,
            "pptrace_version": pptrace.__version__,
            "command": list(options.command),
            "script": options.script_name,
            "started_at": self._started_at,
            "ended_at": ended_at,
            "status": status,
            "exit_code": exit_code,
            "profiler": options.profiler,
            "steps": [options.window.first, options.window.stop],
            "nnodes": options.nnodes,
            "node_rank": options.node_rank,
            "nproc_per_node": options.nproc,
            "world_size": max(options.nnodes * options.nproc, len(records)),
            "host": host_name(),
            "pid": os.getpid(),
        }
        merged = _merge_facts(records)
        merged["environment"] = merged["environment"] or self._environment  # a script may set some itself
        content |= merged
        content["clock"] = self._clock
        content["hang"] = hang
        content["ranks"] = [_rank_entry(record) for record in records]
        write_json(self._options.run_file, content)


def collect_records(
    run_dir: Path,
    control_dir: Path,
    ranks: Mapping[int, int],
    exit_codes: Mapping[int, int],
    forced: Collection[int] = (),
) -> list[RankRecord]:
    """The last word of every rank of this node. ``ranks`` is local → global, ``exit_codes`` by global rank where known.
    ``forced`` are those that the launcher killed, since they did not end when they were told to.

    A rank that ended without a word, or in the middle of one, was killed.
    """
    records: list[RankRecord] = []
    for local_rank, rank in ranks.items():
        code = exit_codes.get(rank)
        record = read_record(record_path(run_dir, rank)) or RankRecord(rank, local_rank, host_name(), 0)
        if record.state is State.RUNNING:
            steps, _ = read_counter(counter_path(control_dir, local_rank))
            error = "it did not end when told to" if rank in forced else None
            record = replace(_without_word(record, code, error), steps_seen=steps)
        elif record.exit_code is None:
            record = replace(record, exit_code=code)
        records.append(record)
    if len(records) == 1 and records[0].trace is None:
        records = _of_spawned(spawned_records(control_dir), records[0]) or records
    return sorted((_at_end(record, run_dir) for record in records), key=lambda record: record.rank)


def _at_end(record: RankRecord, run_dir: Path) -> RankRecord:
    trace = record.trace if record.trace and (run_dir / record.trace).is_file() else None
    return replace(record, trace=trace, saving=False)


def _of_spawned(records: Sequence[RankRecord], parent: RankRecord) -> list[RankRecord]:
    """The ranks that the script started by itself, in its place. What one failed of, torch's ``spawn`` tells the parent alone."""
    ended = []
    for record in records:
        if record.state is State.RUNNING:
            record = _without_word(record, None, None)
        if record.state is State.FAILED and record.traceback is None and parent.error is not None:
            record = replace(record, error=parent.error, traceback=parent.traceback)
        ended.append(record)
    return ended


def _without_word(record: RankRecord, code: int | None, error: str | None) -> RankRecord:
    if error is not None:
        return replace(record, state=State.KILLED, exit_code=code, error=error)
    if code == 0:
        return replace(record, state=State.OK, exit_code=0, note="left by os._exit: nothing was saved after that")
    if code is not None and code > 0:
        return replace(record, state=State.FAILED, exit_code=code, error=f"exited with code {code}")
    return replace(record, state=State.KILLED, exit_code=code, error=killed_by(code))


def killed_by(code: int | None) -> str:
    """Name the signal that an exit code (minus its number) stands for."""
    if code is None:
        return "it ended without a word"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = "; the kernel does so when memory runs out" if name == "SIGKILL" else ""
    return f"by {name}{hint}"


def _merge_facts(records: Sequence[RankRecord]) -> dict[str, Any]:
    """The facts that are the same for all ranks, from the first rank that has them."""
    merged: dict[str, Any] = dict.fromkeys(_MERGED)
    for record in reversed(records):
        merged |= {key: record.facts[key] for key in _MERGED if record.facts.get(key) is not None}
    return merged


def _rank_entry(record: RankRecord) -> dict[str, Any]:
    return {
        "rank": record.rank,
        "local_rank": record.local_rank,
        "host": record.host,
        "trace": record.trace,
        "script_trace": record.script_trace,
        "status": record.state,
        "exit_code": record.exit_code,
        "error": record.error,
        "steps_seen": record.steps_seen,
        "note": record.note,
        "backend": record.facts.get("backend"),
        "device": record.facts.get("device"),
        "clock": record.facts.get("clock"),
        "memory": record.facts.get("memory"),
        "step_times": record.facts.get("step_times"),
        "out_of_memory": record.facts.get("out_of_memory"),
    }


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")
