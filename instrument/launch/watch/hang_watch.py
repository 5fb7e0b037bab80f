"""Watches whether the ranks of this node still move, and says who is to blame when they do not."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from instrument.adapters.calls import SETUP, UNHOOKED
from instrument.launch.record import counter_path, read_counter
from instrument.launch.watch.call_log import call_log_path
from instrument.launch.watch.call_log_read import LoggedCalls, read_call_log, read_last_event, read_motion
from pptrace.hang_diagnosis.calls import Call, CallState, Group, Presence, RankCalls
from pptrace.hang_diagnosis.verdict import Diagnosis, Hang, Verdict, diagnose

_LEAST_WAIT_S = 1.0
"""A wait shorter than this is none: the other side may be about to come."""
_USUAL_WAITS = 3.0
_USUAL_SHARE = 0.8
"""A rank is late when others wait for it longer than three times what four of five of their calls take."""
_WAITING = (CallState.BLOCKING, CallState.LAUNCHED)
_SETTLE_S = 0.05
_MOST_LOOKS = 4


@dataclass(frozen=True, slots=True)
class RankEnd:
    """End of a rank's process: an exit code, or minus a signal; None where that is not known."""

    code: int | None
    text: str

    @property
    def is_abort(self) -> bool:
        """Return whether the process aborted itself, as NCCL's watchdog does where another rank does not come or is gone."""
        return self.code == -signal.SIGABRT

    @property
    def is_kill(self) -> bool:
        """Return whether a signal killed it, which it did not send itself to give up."""
        return self.code is not None and self.code < 0 and not self.is_abort


class HangWatch:
    """``ranks`` gives local → global, as far as ranks have been started. ``world_size`` counts the ranks of all nodes."""

    def __init__(self, control_dir: Path, ranks: Callable[[], Mapping[int, int]], world_size: int) -> None:
        self._control_dir = control_dir
        self._get_ranks = ranks
        self._world_size = world_size
        self._steps: dict[int, tuple[int, int]] = {}
        self._moved_at = time.monotonic_ns()

    @property
    def _ranks(self) -> Mapping[int, int]:
        return self._get_ranks()

    def stalled_s(self) -> float:
        """Time since a rank last made or finished a call, or finished a step, s."""
        steps = {local: read_counter(counter_path(self._control_dir, local)) for local in self._ranks}
        if steps != self._steps:
            self._steps = steps
            self._moved_at = time.monotonic_ns()
        events = (read_last_event(call_log_path(self._control_dir, local)) for local in self._ranks)
        self._moved_at = max([self._moved_at, *events])
        return (time.monotonic_ns() - self._moved_at) / 1e9

    def has_moved(self, locals_: Collection[int], within_s: float) -> bool:
        """Return whether the script of one of these local ranks has gone from function to function lately."""
        moved = (read_motion(call_log_path(self._control_dir, local)) for local in locals_)
        return time.monotonic_ns() - max(moved, default=0) < within_s * 1e9

    def note_progress(self) -> None:
        """A rank moves in a way that no call shows."""
        self._moved_at = time.monotonic_ns()

    def any_waits(self, ended: Collection[int] = ()) -> bool:
        """Return whether a rank waits in a call, or may wait for one on its device; not those that have ``ended``, by local
        rank.
        """
        logs = (log for local, log in self._read().items() if local not in ended)
        return any(call.state in _WAITING for log in logs for call in log.calls)

    @property
    def has_logs(self) -> bool:
        """Return whether the calls of any rank are watched at all."""
        return bool(self._read())

    def diagnose(self, ends: Mapping[int, RankEnd], *, stopped: Collection[int] = (), usual: bool = True) -> Diagnosis:
        """The verdict on the ranks as they are now. ``ends`` is by global rank; ``stopped`` are those that a signal stopped.

        With ``usual``, a rank is late only where others wait for it longer than they often do.
        """
        logs = self._settled()
        known = _with_ends(self._known(logs, ends, lambda log: _long_waits(log, _LEAST_WAIT_S)), ends)
        diagnosis = diagnose([replace(rank, is_halted=rank.is_halted or rank.rank in stopped) for rank in known])
        if usual and diagnosis.hang is not None:
            return _unless_usual(diagnosis, logs, self._ranks)
        return diagnosis

    def diagnose_setup(self, ends: Mapping[int, RankEnd], setting_up: Collection[int]) -> Diagnosis:
        """The verdict on ranks of which some, by global rank, wait for the others to make a process group with them."""
        group = Group("", tuple(range(self._world_size)), "all ranks")
        waiting = (Call(SETUP, group, 0, CallState.BLOCKING),)
        known = []
        for rank in range(self._world_size):
            is_here = rank in self._ranks.values()
            alive = Presence.GONE if rank in ends else Presence.ALIVE
            note = ends[rank].text.partition(";")[0] if rank in ends else ""
            calls = waiting if rank in setting_up else ()
            known.append(RankCalls(rank, calls, alive if is_here else Presence.UNKNOWN, note=note))
        return diagnose(known)

    def calls_at_end(self, dead: Collection[int]) -> list[RankCalls]:
        """Calls of the ranks when the first of them, ``dead`` by global rank, were seen to have ended.

        Calls that failed count as waiting: they failed because the other end was gone.
        """
        logs = self._read()
        failed = {self._ranks[local] for local, log in logs.items() if _last_failed(log) is not None}
        return self._known(logs, set(dead) - failed, _with_failed)

    def _read(self) -> dict[int, LoggedCalls]:
        logs = {
            local: read_call_log(call_log_path(self._control_dir, local), rank) for local, rank in self._ranks.items()
        }
        return _without_met({local: log for local, log in logs.items() if log is not None}, self._ranks)

    def _settled(self) -> dict[int, LoggedCalls]:
        """The logs at one moment: read twice without an event between, or what was read last of ranks that move on."""
        logs = self._read()
        for _ in range(_MOST_LOOKS):
            time.sleep(_SETTLE_S)
            again = self._read()
            same = {local: log.last_event_ns for local, log in again.items()} == {
                local: log.last_event_ns for local, log in logs.items()
            }
            logs = again
            if same:
                break
        return logs

    def _known(
        self,
        logs: Mapping[int, LoggedCalls],
        gone: Collection[int],
        calls_of: Callable[[LoggedCalls], Sequence[Call]],
    ) -> list[RankCalls]:
        known: list[RankCalls] = []
        for local, rank in self._ranks.items():
            log = logs.get(local)
            seen = Presence.ALIVE if log is not None else Presence.UNKNOWN
            presence = Presence.GONE if rank in gone else seen
            calls = tuple(calls_of(log)) if log is not None else ()
            made = log.num_made if log is not None else {}
            known.append(RankCalls(rank, calls, presence, made))
        here = set(self._ranks.values())
        elsewhere = [rank for rank in range(self._world_size) if rank not in here]
        return [*known, *(RankCalls(rank, presence=Presence.UNKNOWN) for rank in elsewhere)]


def _without_met(logs: Mapping[int, LoggedCalls], ranks: Mapping[int, int]) -> dict[int, LoggedCalls]:
    """The logs, with those collectives that C++ posted done which all their members here have posted.

    Of the others only the last is open: a rank that posts another one does not say so of those before.
    """
    by_rank = {ranks[local]: log for local, log in logs.items()}

    def state_of(call: Call, log: LoggedCalls) -> CallState:
        here = [by_rank[rank] for rank in call.group.ranks if rank in by_rank]
        stream = call.stream(0)
        least = min((member.num_made.get(stream, 0) for member in here), default=0)
        is_last = call.seq + 1 == log.num_made.get(stream, 0)
        return call.state if is_last and (call.seq >= least or call.state is CallState.FAILED) else CallState.DONE

    return {
        local: replace(
            log,
            calls=tuple(
                replace(call, state=state_of(call, log)) if call.kind == UNHOOKED else call for call in log.calls
            ),
        )
        for local, log in logs.items()
    }


def with_locations(diagnosis: Diagnosis, where: Mapping[int, str]) -> Diagnosis:
    """The diagnosis with where each rank is, by global rank."""
    ranks = {
        rank: replace(known, where=f"{where[rank]}, {_call_of(known)}" if rank in where else "")
        for rank, known in diagnosis.ranks.items()
    }
    return replace(diagnosis, ranks=ranks)


def _call_of(known: RankCalls) -> str:
    """The call that the rank is in."""
    call = next((call for call in reversed(known.calls) if call.state is CallState.BLOCKING), None)
    return "outside of any communication call" if call is None else f"in {call}"


def explain_end(ranks: Sequence[RankCalls], ends: Mapping[int, RankEnd]) -> Diagnosis:
    """The verdict on what :meth:`HangWatch.calls_at_end` saw, with how the ranks ended, which is known later.

    A rank that aborted itself while a call on its device waited for others counts as one that waits, not as one that is gone.
    """
    ended = _with_ends(ranks, ends)
    aborted = {
        known.rank
        for known in ended
        if known.rank in ends
        and ends[known.rank].is_abort
        and any(call.state is CallState.LAUNCHED for call in known.calls)
    }
    diagnosis = diagnose(_as_alive(ended, aborted), is_stuck=False)
    waited = {edge.rank for edge in diagnosis.hang.edges} if diagnosis.hang else set()
    return diagnose(_as_alive(ended, aborted & waited), is_stuck=False) if aborted - waited else diagnosis


def _as_alive(ranks: Sequence[RankCalls], which: Collection[int]) -> list[RankCalls]:
    return [replace(known, presence=Presence.ALIVE) if known.rank in which else known for known in ranks]


def _with_ends(ranks: Sequence[RankCalls], ends: Mapping[int, RankEnd]) -> list[RankCalls]:
    """The ranks, with how those ended that are gone."""
    return [
        replace(known, note=_ended(ends[known.rank].text, known.calls), is_halted=ends[known.rank].is_kill)
        if known.presence is Presence.GONE and known.rank in ends
        else known
        for known in ranks
    ]


def _ended(text: str, calls: Sequence[Call]) -> str:
    text = text.partition(";")[0]
    return f"{text} after {calls[-1]}" if calls else f"{text} without any communication call"


def _long_waits(log: LoggedCalls, seconds: float) -> list[Call]:
    """The calls, those that have not waited for so long as if nobody waited in them."""
    before = time.monotonic_ns() - seconds * 1e9
    return [
        replace(call, state=CallState.OFFERED) if call.since_ns > before and call.state in _WAITING else call
        for call in log.calls
    ]


def _with_failed(log: LoggedCalls) -> Sequence[Call]:
    last = _last_failed(log)
    return [replace(call, state=CallState.BLOCKING) if call is last else call for call in log.calls]


def _last_failed(log: LoggedCalls) -> Call | None:
    """The call that the rank made last, if it failed. What C++ posted may have been noticed only later."""
    made = [call for call in log.calls if call.kind != UNHOOKED or call.state is CallState.FAILED]
    return made[-1] if made and made[-1].state is CallState.FAILED else None


def _unless_usual(diagnosis: Diagnosis, logs: Mapping[int, LoggedCalls], ranks: Mapping[int, int]) -> Diagnosis:
    """Drop late ranks from the verdict where others wait for them no longer than calls take in this run."""
    hang = diagnosis.hang
    assert hang is not None
    late = {rank for cause in hang.causes if cause.verdict is Verdict.LATE for rank in cause.ranks}
    if not late:
        return diagnosis
    usual_s = max((_usual_s(log) for local, log in logs.items() if ranks[local] in hang.hops), default=0.0)
    now = time.monotonic_ns()
    waited_s = max(((now - edge.call.since_ns) / 1e9 for edge in hang.edges if set(edge.waits_for) & late), default=0.0)
    if waited_s >= _USUAL_WAITS * usual_s:
        return diagnosis
    reason = (
        f"the ranks still move: the longest wait has lasted {waited_s:.1f} s, and calls here often take {usual_s:.1f} s"
    )
    others = [cause for cause in hang.causes if cause.verdict is not Verdict.LATE]
    return Diagnosis(Hang.of(others, hang.edges), "" if others else reason, diagnosis.ranks)


def _usual_s(log: LoggedCalls) -> float:
    """Time that most of the rank's calls take at most, s; the first may have waited for a rank that started late."""
    ordered = sorted(log.durations_ns)
    return ordered[int((len(ordered) - 1) * _USUAL_SHARE)] / 1e9 if ordered else 0.0
