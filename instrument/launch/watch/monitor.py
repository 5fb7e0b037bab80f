"""Watches the ranks of this node while torch's launcher runs them: shows progress and the first error, names hangs, and
sees to it that a run that is to end does end."""

from __future__ import annotations

import os
import re
import select
import signal
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from instrument.launch.options import RunOptions
from instrument.launch.output import RankPipes, Terminal
from instrument.launch.record import RankRecord, State, counter_path, read_counter, read_record, record_path
from instrument.launch.rundir import killed_by
from instrument.launch.watch.hang_watch import HangWatch, RankEnd, explain_end, with_locations
from instrument.launch.watch.motion import Stacks, Usage, describe_rank, read_usage, stayed_stopped
from instrument.launch.watch.stacks import Frame, describe_wait, is_setting_up
from pptrace.hang_diagnosis.calls import RankCalls, lines, rank_text
from pptrace.hang_diagnosis.verdict import Diagnosis, Verdict, as_json, sentence

_POLL_S = 0.1
_SETTLE_S = 0.3
"""Errors that follow from one another are recorded within this time; the cause is shown, not the first to report."""
_GRACE_S = 6.0
_SAVING_S = 25.0
_BETWEEN_LOOKS_S = 0.3
_CONSEQUENCE = re.compile(
    r"connection (closed|reset|refused)|broken pipe|closed by peer|remote process|NCCL|socket|recvValue|store",
    re.IGNORECASE,
)


_MOST_CAUSES = 8


class Monitor:
    """Runs in a thread of its own. Read ``signals`` and ``timed_out`` after :meth:`stop`."""

    def __init__(self, options: RunOptions, control_dir: Path, pipes: RankPipes, terminal: Terminal) -> None:
        self._options = options
        self._control_dir = control_dir
        self._pipes = pipes
        self._terminal = terminal
        self._records: dict[int, RankRecord] = {}
        self._stamps: dict[int, int] = {}
        self._dead: set[int] = set()
        self._started = time.monotonic()
        self._doomed_at: float | None = None
        self._hangs = HangWatch(control_dir, lambda: pipes.ranks, options.nnodes * options.nproc)
        self._stacks = Stacks(control_dir)
        self._usage: dict[int, Usage] = {}
        """Usage of the ranks when half of --hang-timeout was over."""
        self._ended_first: set[int] = set()
        """The ranks, by global rank, that had ended when the first was seen to have failed."""
        self._ended_at = 0.0
        self._at_end: list[RankCalls] = []
        """Calls of the ranks then; those that lost a connection have had the time to notice."""
        self._is_explained = False
        self._pidfds: dict[int, int] = {}
        """Become readable when a rank ends: before torch's launcher has looked, and taken its exit code."""
        self._stopped = threading.Event()
        self._read_fd, self._write_fd = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="pptrace-monitor", daemon=True)
        self.exit_codes: dict[int, int] = {}
        """Exit codes by global rank, as far as they were seen here."""
        self.forced: set[int] = set()
        """Global ranks that had to be killed here, since they did not end when they were told to."""
        self.signals: list[int] = []
        self.timed_out = False
        self.causes: tuple[int, ...] = ()
        """The ranks whose failures were shown."""
        self.hang: dict[str, Any] | None = None
        """The verdict that was shown, as JSON."""

    def start(self) -> None:
        """Call it in the main thread: signals that come are noticed here as well."""
        os.set_blocking(self._write_fd, False)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching, and end every process that the ranks left."""
        signal.set_wakeup_fd(-1)
        self._stopped.set()
        self._thread.join()
        self._look()
        self._show_failure(settled=True)
        self._kill(everything=True)
        self._terminal.status("")
        for fd in (self._read_fd, self._write_fd, *self._pidfds.values()):
            os.close(fd)

    def _watch(self) -> None:
        while not self._stopped.is_set():
            ready, _, _ = select.select([self._read_fd, *self._pidfds.values()], [], [], _POLL_S)
            if self._read_fd in ready:
                self._note_signals(os.read(self._read_fd, 64))
            self._look()
            self._show_failure(settled=False)
            self._explain_end()
            self._show_progress()
            self._check_timeout()
            self._check_hang()
            self._hasten()

    def _note_signals(self, signums: bytes) -> None:
        self.signals += [signum for signum in signums if signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        if not self.signals:
            return
        if self._doomed_at is None:
            self._doomed_at = time.monotonic()
            if not self.timed_out:
                name = "Ctrl-C" if self.signals[0] == signal.SIGINT else signal.Signals(self.signals[0]).name
                self._terminal.err(f"pptrace: {name}: ending the ranks and keeping their traces (again: kill them now)")
        elif len(self.signals) > 1 + self.timed_out:
            self._kill(everything=True)

    def _look(self) -> None:
        """Read the records that have changed, and see which ranks are dead."""
        for local_rank, rank in self._pipes.ranks.items():
            path = record_path(self._options.run_dir, rank)
            try:
                stamp = path.stat().st_mtime_ns
            except OSError:
                continue
            if stamp != self._stamps.get(local_rank):
                record = read_record(path)
                if record is not None:
                    self._records[local_rank] = record
                    self._stamps[local_rank] = stamp
            if local_rank in self._records and local_rank not in self._dead:
                self._look_for_death(local_rank, self._records[local_rank])
        if not self._ended_first and any(map(self._has_failed, self._records)):
            ended = {local for local, record in self._records.items() if record.state is State.FAILED} | self._dead
            self._ended_first = {self._records[local].rank for local in ended}
            self._ended_at = time.monotonic()
        is_settled = self._stopped.is_set() or time.monotonic() - self._ended_at >= _SETTLE_S
        if self._ended_first and not self._at_end and is_settled:
            self._ended_first |= {record.rank for record in self._records.values() if self._ended_by_itself(record)}
            self._at_end = self._hangs.calls_at_end(self._ended_first)

    def _has_failed(self, local_rank: int) -> bool:
        """Return whether a rank says so, or is dead and has not ended well as far as is known."""
        record = self._records[local_rank]
        is_silent = local_rank in self._dead and record.state is not State.OK and self.exit_codes.get(record.rank) != 0
        return record.state is State.FAILED or is_silent

    def _ended_by_itself(self, record: RankRecord) -> bool:
        """Return whether a rank has ended, and was not stopped after another one's end."""
        if record.state is State.FAILED:
            return True
        terminated = (-signal.SIGTERM, 128 + signal.SIGTERM)
        was_stopped = (
            record.state is State.STOPPED
            or record.rank in self.forced
            or self.exit_codes.get(record.rank) in terminated
        )
        return record.local_rank in self._dead and not was_stopped

    def _look_for_death(self, local_rank: int, record: RankRecord) -> None:
        if local_rank not in self._pidfds:
            with suppress(OSError, AttributeError):  # it has ended, or the system has none
                self._pidfds[local_rank] = os.pidfd_open(record.pid)
        try:
            end = os.waitid(os.P_PID, record.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # left for torch to reap
        except ChildProcessError:
            self._note_death(local_rank)
            return
        if end is None:
            return
        self._note_death(local_rank)
        code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        self.exit_codes[record.rank] = code
        if code != 0 and self._doomed_at is None:
            self._doomed_at = time.monotonic()

    def _note_death(self, local_rank: int) -> None:
        self._dead.add(local_rank)
        if (fd := self._pidfds.pop(local_rank, None)) is not None:
            os.close(fd)

    def _show_failure(self, *, settled: bool) -> None:
        failures = [record for record in self._records.values() if record.state is State.FAILED]
        if self.causes or not failures:
            return
        first_at = min(record.failed_at_ns or 0 for record in failures)
        if not settled and time.time_ns() - first_at < _SETTLE_S * 1e9:
            return
        same: dict[str | None, list[RankRecord]] = {}
        for record in find_causes(failures)[:_MOST_CAUSES]:
            same.setdefault(record.error, []).append(record)
        self.causes = tuple(record.rank for records in same.values() for record in records)
        for error, records in same.items():
            self._terminal.err(f"pptrace: {rank_text(record.rank for record in records)} failed: {error}")
            if records[0].traceback:
                self._terminal.err(records[0].traceback.rstrip("\n"))

    def _show_progress(self) -> None:
        if not self._terminal.live or self._doomed_at is not None or not self._pipes.ranks:
            return
        counts = {
            rank: read_counter(counter_path(self._control_dir, local_rank))
            for local_rank, rank in self._pipes.ranks.items()
        }
        self._terminal.status(progress_line(counts, self._options, time.monotonic() - self._started))

    def _check_timeout(self) -> None:
        limit = self._options.timeout_s
        if limit is None or self.timed_out or self._doomed_at is not None:
            return
        if time.monotonic() - self._started < limit:
            return
        before = self._usage or self._read_usage()
        time.sleep(_BETWEEN_LOOKS_S)
        diagnosis = self._hangs.diagnose(self._ends(self._ended()), stopped=self._stayed_stopped(before))
        self._end_hung(diagnosis, before, f"still running after --timeout {limit:g} s; where each rank is:")

    def _check_hang(self) -> None:
        """End the run where ranks wait, and none has moved for as long as --hang-timeout says."""
        limit = self._options.hang_timeout_s
        if limit is None or self.timed_out or self._doomed_at is not None or self._ended_first:
            return
        ended = self._ended()
        stalled_s = self._hangs.stalled_s()
        if stalled_s < limit / 2 or not self._hangs.any_waits(ended):
            self._usage = {}
            return
        self._usage = self._usage or self._read_usage()
        if stalled_s < limit:
            return
        stopped = self._stayed_stopped(self._usage)
        diagnosis = self._hangs.diagnose(self._ends(ended), stopped=stopped, usual=False)
        if self._may_go_on(diagnosis, limit / 2) or self._hangs.stalled_s() < limit:
            self._hangs.note_progress()
            self._usage = {}
            return
        line = f"no progress for --hang-timeout {limit:g} s, and ranks wait; the run is ended; where each rank is:"
        self._end_hung(diagnosis, self._usage, line)

    def _ended(self) -> set[int]:
        """The local ranks whose script is over, also where their processes still take time to end."""
        return self._dead | {local for local, record in self._records.items() if record.state is State.OK}

    def _may_go_on(self, diagnosis: Diagnosis, within_s: float) -> bool:
        """Return whether a rank that the others wait for, or any where that is not known, computes its way through the script."""
        hang = diagnosis.hang
        if hang is not None and hang.verdict is not Verdict.LATE:
            return False
        watched = {
            local: pid
            for local, pid in self._live_pids().items()
            if hang is None or self._pipes.ranks[local] in hang.ranks
        }
        busy = {local: pid for local, pid in watched.items() if self._is_busy(local, pid)}
        return bool(busy) and (self._hangs.has_moved(busy, within_s) or self._stacks.change(busy))

    def _is_busy(self, local: int, pid: int) -> bool:
        return local in self._usage and read_usage(pid).is_busy(self._usage[local])

    def _stayed_stopped(self, before: Mapping[int, Usage]) -> set[int]:
        """The ranks, by global rank, that a signal had stopped before and that are stopped still."""
        return {self._pipes.ranks[local] for local in stayed_stopped(before, self._read_usage())}

    def _end_hung(self, diagnosis: Diagnosis, before: Mapping[int, Usage], reason: str) -> None:
        self.timed_out = True
        usage = self._read_usage()
        stacks = self._stacks.read(self._live_pids())
        where = {
            self._pipes.ranks[local]: describe_rank(used, before.get(local), stacks.get(local, ()))
            for local, used in usage.items()
        }
        setting_up = [self._pipes.ranks[local] for local, stack in stacks.items() if is_setting_up(stack)]
        if diagnosis.hang is None and setting_up:
            diagnosis = self._hangs.diagnose_setup(self._ends(self._ended()), setting_up)
        self._show_verdict(with_locations(diagnosis, where))
        self._terminal.err(f"pptrace: {reason}")
        self._show_stacks(stacks)
        if not self._stopped.is_set():  # else torch's launcher has returned
            os.kill(os.getpid(), signal.SIGTERM)

    def _read_usage(self) -> dict[int, Usage]:
        return {local: read_usage(pid) for local, pid in self._live_pids().items()}

    def _show_verdict(self, diagnosis: Diagnosis) -> None:
        hang = as_json(diagnosis)
        if hang is None:
            if self._hangs.has_logs:  # without, nothing was looked at
                self._terminal.err(f"pptrace: {sentence(diagnosis)}")
            return
        self.hang = hang
        self._terminal.err(f"pptrace: hang: {sentence(diagnosis)}")
        for line in lines(hang):
            self._terminal.err(f"  {line}")

    def explain_end(self, exit_codes: Mapping[int, int]) -> None:
        """Show the verdict on a run that a rank's end has ended, where the end does not say it all itself.

        Call it after :meth:`stop`. ``exit_codes`` are by global rank.
        """
        self.exit_codes |= exit_codes
        self._explain_end(is_over=True)

    def _explain_end(self, *, is_over: bool = False) -> None:
        """Explain the end as soon as it is known how those ended that the others wait for; at the latest when all is over."""
        if self.timed_out or self.signals or self._is_explained or not self._at_end:
            return
        diagnosis = explain_end(self._at_end, self._ends(self._records))
        hang = diagnosis.hang
        if hang is None or hang.verdict not in (Verdict.MISMATCH, Verdict.MISSING):
            return
        failed = {record.rank for record in self._records.values() if record.state is State.FAILED}
        if hang.verdict is Verdict.MISSING and (
            failed >= set(hang.ranks) or not (is_over or self.exit_codes.keys() >= set(hang.ranks))
        ):
            return
        self._is_explained = True
        self._show_verdict(diagnosis)

    def _ends(self, local_ranks: Iterable[int]) -> dict[int, RankEnd]:
        """Ends of these ranks, by global rank."""
        ends = {}
        for record in (self._records[local_rank] for local_rank in local_ranks):
            code = self.exit_codes.get(record.rank, record.exit_code)
            ends[record.rank] = RankEnd(code, _how_ended(code))
        return ends

    def _live_pids(self) -> dict[int, int]:
        return {local: record.pid for local, record in self._records.items() if local not in self._dead}

    def _show_stacks(self, stacks: Mapping[int, tuple[Frame, ...]]) -> None:
        for local_rank, rank in self._pipes.ranks.items():
            steps, _ = read_counter(counter_path(self._control_dir, local_rank))
            stack = stacks.get(local_rank, ())
            state = "has ended" if local_rank in self._dead else describe_wait(stack)
            self._terminal.err(f"  rank {rank}, {steps} {'step' if steps == 1 else 'steps'} done: {state}")
            for frame in stack:
                self._terminal.err(f"      {frame.path}:{frame.line} {frame.function}")

    def _hasten(self) -> None:
        """End ranks that were asked to end and do not."""
        now = time.monotonic()
        for record in self._records.values():
            late = record.failed_at_ns is not None and time.time_ns() - record.failed_at_ns > _GRACE_S * 1e9
            if late and not record.saving and record.local_rank not in self._dead:
                _kill_group(record.pid)  # failed, yet kept alive by a thread of the script
        if self._doomed_at is not None and now - self._doomed_at > _GRACE_S:
            self._kill(everything=now - self._doomed_at > _SAVING_S)

    def _kill(self, *, everything: bool) -> None:
        for local_rank, record in self._records.items():
            alive = local_rank not in self._dead
            if everything or (alive and not record.saving):
                _kill_group(record.pid)  # what a dead rank started may still be there
                self.forced |= {record.rank} if alive else set()


def find_causes(failures: list[RankRecord]) -> list[RankRecord]:
    """The failures that the others follow from, the first one first: those that are no lost connection, else the first."""
    ordered = sorted(failures, key=lambda record: record.failed_at_ns or 0)
    return [record for record in ordered if not _CONSEQUENCE.search(record.error or "")] or ordered[:1]


def progress_line(counts: Mapping[int, tuple[int, int]], options: RunOptions, elapsed_s: float) -> str:
    """One line for the terminal: the slowest rank's step, and whether it is being profiled."""
    slowest = min(counts, key=lambda rank: counts[rank])
    step, expected = counts[slowest]
    total = f" of {expected}" if expected else ""
    spread = f", slowest: rank {slowest}" if len({done for done, _ in counts.values()}) > 1 else ""
    if options.profiler == "none":
        doing = ""
    elif step in options.window:
        doing = ", profiling"
    elif options.window.stop is not None and step >= options.window.stop:
        doing = ", profiled"
    else:
        doing = f", profiling from step {options.window.first}"
    return f"pptrace: {elapsed_s:.0f} s, step {step}{total}{spread}{doing}"


def _how_ended(code: int | None) -> str:
    if code is None:
        return "ended without a word"
    if code < 0:
        return f"killed {killed_by(code)}"
    return "ended normally" if code == 0 else f"failed with exit code {code}"


def _kill_group(pid: int) -> None:
    """Kill a rank and what it started; torch makes each rank the leader of a group."""
    if pid > 0:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
