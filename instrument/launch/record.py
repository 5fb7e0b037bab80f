"""Record that a rank writes for its launcher: a small JSON file, replaced whole at every change, and a counter of steps.

The file is ``rank{R}.facts.json`` in the run directory; the launcher merges it into ``run.json`` at the end. The
counter is 16 bytes in the launcher's own temporary directory: steps ended, steps expected (0 where unknown), int64.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

_COUNTER = struct.Struct("=qq")


class State(StrEnum):
    RUNNING = "running"
    OK = "ok"
    FAILED = "failed"
    STOPPED = "stopped"  # ended by the launcher, because of another rank, Ctrl-C or a timeout
    KILLED = "killed"  # ended by a signal without a chance to say anything


@dataclass(frozen=True, slots=True)
class RankRecord:
    """Everything known about one rank."""

    rank: int
    local_rank: int
    host: str
    pid: int
    state: State = State.RUNNING
    saving: bool = False
    """Still writing its trace, or a checkpoint of its own, after its end was decided: worth waiting for."""
    exit_code: int | None = None
    error: str | None = None
    traceback: str | None = None
    failed_at_ns: int | None = None
    steps_seen: int = 0
    trace: str | None = None
    script_trace: str | None = None
    """A trace that the script's own profiler wrote, where there is none of pptrace's; within the run directory."""
    note: str | None = None
    """Reason for which there is no trace, or one shorter than requested."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Mesh, plan, versions and so on, as they stand in the trace's metadata."""


def record_path(run_dir: Path, rank: int) -> Path:
    return run_dir / f"rank{rank}.facts.json"


def write_json(path: Path, content: object) -> None:
    """Replace ``path`` whole: a reader sees the old or the new content, never a part.

    Raises:
        OSError: it cannot be written; ``filename`` is ``path``, also where the disk is full.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        scratch.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        scratch.replace(path)
    except OSError as err:
        with suppress(OSError):
            scratch.unlink()
        raise OSError(err.errno, err.strerror, str(path)) from err


def read_record(path: Path) -> RankRecord | None:
    """The record at ``path``; None where there is none, or none that this version can read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return replace(RankRecord(**content), state=State(content["state"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def spawned_dir(control_dir: Path) -> Path:
    """Folder of the records of ranks that the script starts by itself."""
    return control_dir / "spawned"


def spawned_records(control_dir: Path) -> list[RankRecord]:
    """The records of the ranks that the script started by itself, if any of them ran a step."""
    paths = sorted(spawned_dir(control_dir).glob("rank*.facts.json"))
    records = [record for record in map(read_record, paths) if record is not None]
    return records if any(record.trace or record.steps_seen for record in records) else []


class RecordWriter:
    """Keeps a rank's record and writes it down at every change; usable from any thread.

    A change that cannot be written, as on a full disk, ends nothing: a line says so once, and the next change tries again.
    """

    def __init__(self, run_dir: Path, record: RankRecord, folder: Path | None = None) -> None:
        """``folder`` is where the record goes, if not into the run directory."""
        self.run_dir = run_dir
        self._path = record_path(folder or run_dir, record.rank)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._is_reported = False
        self.record = record
        self.update()

    def update(self, **changes: Any) -> None:
        if os.getpid() != self._pid:  # a forked child is not the rank
            return
        with self._lock:
            self.record = replace(self.record, **changes)
            try:
                write_json(self._path, asdict(self.record))
            except OSError as err:
                self._report(err)

    def _report(self, err: OSError) -> None:
        if not self._is_reported:
            line = f"pptrace: {err.filename}: cannot be written ({err.strerror}); the script goes on"
            print(line, file=sys.stderr, flush=True)
        self._is_reported = True

    def add_facts(self, **facts: Any) -> None:
        self.update(facts={**self.record.facts, **facts})


class StepCounter:
    """The rank's end of the counter."""

    def __init__(self, control_dir: Path, local_rank: int) -> None:
        self._fd = os.open(counter_path(control_dir, local_rank), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        self._pid = os.getpid()

    def write(self, steps: int, expected: int) -> None:
        if os.getpid() == self._pid:  # no forked child of the rank
            os.pwrite(self._fd, _COUNTER.pack(steps, expected), 0)


def counter_path(control_dir: Path, local_rank: int) -> Path:
    return control_dir / f"rank{local_rank}.steps"


def read_counter(path: Path) -> tuple[int, int]:
    """Steps ended and steps expected; zeros before the rank has begun."""
    try:
        steps, expected = _COUNTER.unpack(path.read_bytes())
    except (OSError, struct.error):
        return (0, 0)
    return (steps, expected)


class MadeOptimizers:
    """The ranks of a node that had made an optimizer when their first pass of a pipeline began, as they write it down.

    At the end of a rank's first pass all ranks of its pipeline have begun theirs, so that all of them find the same.
    """

    def __init__(self, control_dir: Path, rank: int) -> None:
        self._dir, self._rank = control_dir, rank
        self._is_noted = False

    def note(self, *, has_one: bool) -> None:
        """Write it down for this rank, whose first pass begins; later ones change nothing."""
        if not self._is_noted:
            self._is_noted = True
            write_json(self._path(self._rank), has_one)

    def on_all(self, ranks: Iterable[int]) -> bool:
        """Return whether all of some ranks had; those of other nodes are not known to."""
        return all(self._had_one(rank) for rank in ranks)

    def _had_one(self, rank: int) -> bool:
        try:
            return json.loads(self._path(rank).read_bytes()) is True
        except (OSError, ValueError):
            return False

    def _path(self, rank: int) -> Path:
        return self._dir / f"rank{rank}.has_optimizer"


class AgreedStart:
    """The step from which all ranks of a node record, where a profiler of the script's kept one from recording when it should.

    The rank that was late names the step; the others record again from there. What was named last counts.
    """

    def __init__(self, control_dir: Path) -> None:
        self._path = control_dir / "record_from"

    def name(self, step: int) -> None:
        """Let all ranks record from ``step`` on."""
        write_json(self._path, step)

    def read(self) -> int | None:
        """The step that was named; None where none was."""
        try:
            step = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return None
        return step if isinstance(step, int) else None
