"""The verdict on a run that hangs, from the flight-recorder dumps of its ranks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from msgspec import Struct

from pptrace.errors import TraceError
from pptrace.hang_diagnosis.calls import Call, CallState, Group, Presence, RankCalls, Stream
from pptrace.hang_diagnosis.verdict import Diagnosis, diagnose
from pptrace.ingest.common.rank_names import rank_of_dump_name
from pptrace.ingest.flight_recorder.dump import Dump, DumpCall, DumpGroup, read_dump
from pptrace.marks import P2P

_FRESH_NS = 10**9
"""Calls that were made so shortly before a dump was written are no sign of a hang."""
_ALL_COMPLETE = "outside of any communication call, with none open"
_UNRECORDED = "outside of any collective (gloo's recorder keeps no messages: it may wait in one)"


class DumpedRanks(Struct, frozen=True):
    """The dumps of a run, the ranks whose file cannot be read with the reason, and lines about files that are left out."""

    dumps: tuple[Dump, ...]
    unreadable: Mapping[int, str]
    warnings: tuple[str, ...] = ()


def read_dumped_ranks(paths: Sequence[Path]) -> DumpedRanks:
    """Read the dumps of a run. What cannot be read is evidence as well, where the name says whose it is."""
    dumps: dict[int, Dump] = {}
    unreadable: dict[int, str] = {}
    warnings: list[str] = []
    for path in paths:
        try:
            dump = read_dump(path)
        except TraceError as err:
            rank = rank_of_dump_name(path.name)
            warnings.append(str(err))
            if rank is not None:
                unreadable[rank] = "an empty dump" if path.stat().st_size == 0 else "a dump that cannot be read"
            continue
        if dump.rank < 0:
            warnings.append(
                f"{path}: neither the name nor the dump says whose it is; expected nccl_trace_rank_3; left out"
            )
        elif dump.rank in dumps:
            warnings.append(f"{path}: a second dump of rank {dump.rank}; {dumps[dump.rank].path} is read")
        else:
            dumps[dump.rank] = dump
    kept = {rank: why for rank, why in unreadable.items() if rank not in dumps}
    return DumpedRanks(tuple(dumps[rank] for rank in sorted(dumps)), kept, tuple(warnings))


def diagnose_dumps(dumped: DumpedRanks) -> Diagnosis:
    """Diagnose which rank or call blocks the run, as far as the dumps show."""
    ages = [
        _written_ns(dump.path) - call.created_ns
        for dump in dumped.dumps
        for call in dump.calls
        if not call.done and call.created_ns >= 0
    ]
    if ages and max(ages) < _FRESH_NS and min(ages) > -_FRESH_NS:
        reason = "the calls that are not complete were made less than a second before the dumps were written"
        return Diagnosis(None, reason, {})
    return diagnose(list(_ranks(dumped)))


def _written_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _ranks(dumped: DumpedRanks) -> Iterator[RankCalls]:
    members = {rank for dump in dumped.dumps for group in dump.groups for rank in group.ranks}
    highest = max([*(dump.rank for dump in dumped.dumps), *dumped.unreadable], default=-1)
    world = members | set(range(highest + 1))
    starts = _starts(dumped.dumps, world)
    known = {dump.rank for dump in dumped.dumps}
    have_most = 2 * len(known | dumped.unreadable.keys()) > len(world)
    with_messages = {
        _group(call.group, world)
        for dump in dumped.dumps
        for call in dump.calls
        if call.kind in P2P or call.counts[1] > 0
    }
    for dump in dumped.dumps:
        if not dump.calls and not dump.last_enqueued:
            yield RankCalls(dump.rank, presence=Presence.EMPTY, note="a dump without calls")
            continue
        calls = tuple(_calls(dump, world, starts))
        made, done = _status(dump, calls, world, with_messages)
        is_gloo = bool(calls) and all(call.backend == "gloo" for call in dump.calls)
        where = _UNRECORDED if is_gloo else _ALL_COMPLETE if not (calls or made) else ""
        if is_gloo:
            done = {}  # its ranks carry each other's data: one may be done while another waits for a third
        yield RankCalls(dump.rank, calls, num_made=made, num_done=done, where=where, may_wait=is_gloo)
    for rank, why in dumped.unreadable.items():
        yield RankCalls(rank, presence=Presence.EMPTY, note=why)
    absent = Presence.EMPTY if have_most else Presence.UNKNOWN  # of few, those of others may not have been copied
    for rank in sorted(world - known - dumped.unreadable.keys()):
        yield RankCalls(rank, presence=absent, note="no dump")


def _status(
    dump: Dump, calls: Sequence[Call], world: set[int], with_messages: Collection[Group]
) -> tuple[dict[Stream, int], dict[Stream, int]]:
    """Number of collectives of each group that the rank has enqueued, and of those complete, before the first that is open.

    The status of a group has one number for collectives and messages, that of the last call.
    """
    groups = {number: _group(group, world) for number, group in dump.numbered_groups.items()}
    numbers = {number: Stream(group) for number, group in groups.items() if group not in with_messages}
    made = {stream: dump.last_enqueued[number] + 1 for number, stream in numbers.items()}
    done = {stream: dump.last_completed.get(number, -1) + 1 for number, stream in numbers.items()}
    for call in reversed([call for call in calls if not call.is_message]):
        stream = Stream(call.group)
        count = done.get(stream, 0)
        done[stream] = max(count, call.seq + 1) if call.state is CallState.DONE else min(count, call.seq)
    return made, done


def _calls(dump: Dump, world: set[int], starts: Mapping[tuple[int, Stream], int]) -> Iterator[Call]:
    counts: dict[Stream, int] = {}
    for call in dump.calls:
        begun = CallState.BLOCKING if call.started or call.backend == "gloo" else CallState.QUEUED
        made = Call(
            kind=call.kind,
            group=_group(call.group, world),
            seq=call.seq,
            state=CallState.DONE if call.done else begun,
            peer=call.peer,
            num_bytes=call.bytes,
            dtype=call.dtype,
            launch=call.launch,
            since_ns=call.created_ns,
            recorded=call.seq,
        )
        if _is_counted_here(dump, call):
            stream = made.stream(dump.rank)
            number = counts.get(stream, starts.get((dump.rank, stream), 0))
            counts[stream] = number + 1
            made = replace(made, seq=number)
        yield made


def _is_counted_here(dump: Dump, call: DumpCall) -> bool:
    """Return whether the recorder's number is not the same for all calls that meet: of messages, and in the first versions."""
    return call.kind in P2P or dump.version.startswith("1")


def _group(group: DumpGroup, world: set[int]) -> Group:
    ranks = group.ranks or (tuple(sorted(world)) if group.is_world else ())
    return Group(group.id or group.name, ranks, group.name)


def _starts(dumps: Sequence[Dump], world: set[int]) -> dict[tuple[int, Stream], int]:
    """The number of the first call of a stream in the dump of each of its ranks.

    Where a recorder has dropped the oldest, the last complete calls of the ranks are taken to be the same one.
    """
    streams: dict[Stream, dict[int, list[DumpCall]]] = defaultdict(lambda: defaultdict(list))
    for dump in dumps:
        for call in dump.calls:
            if _is_counted_here(dump, call):
                group = _group(call.group, world)
                ends = {"send": (dump.rank, call.peer), "recv": (call.peer, dump.rank)}.get(call.kind, (-1, -1))
                streams[Stream(group, *ends)][dump.rank].append(call)
    whole = {dump.rank: dump.is_whole for dump in dumps}
    starts: dict[tuple[int, Stream], int] = {}
    for stream, calls in streams.items():
        if len(calls) < 2 or all(whole[rank] for rank in calls):
            continue
        last = {
            rank: max((index for index, call in enumerate(made) if call.done), default=-1)
            for rank, made in calls.items()
        }
        most = max(last.values())
        starts |= {(rank, stream): most - index for rank, index in last.items()}
    return starts


def dump_paths(directory: Path, paths: Sequence[Path]) -> list[Path]:
    """The dumps in ``paths``, and files of a directory with similar names, which may be empty or damaged."""
    shapes = {_shape(path.name) for path in paths}
    try:
        similar = [path for path in directory.iterdir() if path.is_file() and _shape(path.name) in shapes]
    except OSError:
        similar = []
    return sorted({*paths, *similar})


def _shape(name: str) -> str:
    return re.sub(r"\d+", "0", name)
