"""Calls of dumps that are the same call, ranks that are known, and dumps that are too fresh to say anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from pptrace.analysis.hang import DumpedRanks, diagnose_dumps, dump_paths, read_dumped_ranks
from pptrace.hang_diagnosis.calls import CallState, Presence, RankCalls, Stream
from pptrace.ingest.flight_recorder.dump import Dump, DumpCall, DumpGroup

WORLD = DumpGroup("0", "default_pg", (0, 1))
BEGIN_NS = 1_700_000_000_000_000_000


def call(
    kind: str, seq: int, state: str = "done", group: DumpGroup = WORLD, peer: int = -1, **more: object
) -> DumpCall:
    """A call; ``state`` is done, started or scheduled."""
    flags = {"done": state == "done", "started": state == "started"}
    times = {"created_ns": BEGIN_NS, "start_ns": -1, "end_ns": -1}
    fields = {"backend": "nccl", "bytes": 8, "local_peer": peer, "raw_group": 0} | flags | times | more
    return DumpCall(kind=kind, group=group, seq=seq, **fields)


def dump(rank: int, *calls: DumpCall, groups: Sequence[DumpGroup] = (WORLD,), **more: object) -> Dump:
    fields: dict[str, object] = {"version": "2.10"} | more
    return Dump(Path(f"/nowhere/a_dump_{rank}"), rank, groups=tuple(groups), calls=calls, **fields)


def ranks_of(*dumps: Dump, unreadable: dict[int, str] | None = None) -> dict[int, RankCalls]:
    return dict(diagnose_dumps(DumpedRanks(dumps, unreadable or {})).ranks)


def test_a_call_keeps_what_its_dump_says_and_waits_unless_a_device_has_only_queued_it() -> None:
    queued, started = call("all_reduce", 5, "scheduled"), call("all_gather", 6, "started", dtype="Half", launch=3)
    on_gloo = call("broadcast", 7, "scheduled", backend="gloo")
    rank = ranks_of(dump(0, call("all_reduce", 4), queued, started, on_gloo))[0]
    assert [made.state for made in rank.calls] == [
        CallState.DONE,
        CallState.QUEUED,
        CallState.BLOCKING,
        CallState.BLOCKING,
    ]
    assert [(made.kind, made.seq, made.num_bytes) for made in rank.calls] == [
        ("all_reduce", 4, 8),
        ("all_reduce", 5, 8),
        ("all_gather", 6, 8),
        ("broadcast", 7, 8),
    ]
    gathering = rank.calls[2]
    assert (gathering.dtype, gathering.launch, gathering.since_ns) == ("Half", 3, BEGIN_NS)
    assert (gathering.group.name, gathering.group.ranks, str(gathering.group)) == ("0", (0, 1), "default_pg")
    assert rank.where == "", "not all calls are gloo's"
    assert ranks_of(dump(0, on_gloo))[0].where.startswith(
        "outside of any collective (gloo's recorder keeps no messages"
    )


@pytest.mark.parametrize(
    ("num_known", "num_unreadable", "absent"),
    [
        (1, 0, Presence.UNKNOWN),
        (4, 0, Presence.UNKNOWN),
        (5, 0, Presence.EMPTY),
        (2, 3, Presence.EMPTY),
        (2, 2, Presence.UNKNOWN),
    ],
)
def test_a_rank_without_a_dump_is_missing_where_most_of_the_ranks_have_one(
    num_known: int, num_unreadable: int, absent: Presence
) -> None:
    world = DumpGroup("0", "default_pg", tuple(range(8)))
    dumps = [dump(rank, call("barrier", 1, "started", world), groups=[world]) for rank in range(num_known)]
    unreadable = dict.fromkeys(range(num_known, num_known + num_unreadable), "a dump that cannot be read")
    ranks = ranks_of(*dumps, unreadable=unreadable)
    assert sorted(ranks) == list(range(8))
    assert ranks[0].presence is Presence.ALIVE
    assert (ranks[7].presence, ranks[7].note) == (absent, "no dump")
    empty = ranks_of(dump(0, groups=[world]), *dumps[1:])[0]
    assert (empty.presence, empty.note) == (Presence.EMPTY, "a dump without calls")


def numbers(rank: RankCalls, kind: str) -> list[int]:
    return [made.seq for made in rank.calls if made.kind == kind]


def test_messages_are_counted_for_each_pair_and_direction_and_collectives_as_the_recorder_counts_them() -> None:
    ranks = ranks_of(
        dump(0, call("send", 9, peer=1), call("recv", 10, peer=1), call("send", 11, peer=1), call("all_reduce", 3)),
        dump(1, call("recv", 2, peer=0), call("recv", 4, "started", peer=0), call("all_reduce", 3, "started")),
    )
    assert (numbers(ranks[0], "send"), numbers(ranks[0], "recv"), numbers(ranks[1], "recv")) == ([0, 1], [0], [0, 1])
    assert (numbers(ranks[0], "all_reduce"), numbers(ranks[1], "all_reduce")) == ([3], [3])
    first = ranks_of(dump(0, call("send", 9, peer=1), call("all_reduce", 3), call("all_reduce", 4), version="1.5"))
    assert numbers(first[0], "all_reduce") == [0, 1], "of the first versions those of collectives are of messages too"


def test_where_the_first_calls_were_dropped_the_last_complete_ones_are_the_same() -> None:
    """Rank 0 has sent four, of which it waits in the last; of rank 1's receives two are left."""
    sends = [call("send", seq, peer=1) for seq in (1, 2, 3)] + [call("send", 4, "started", peer=1)]
    receives = [call("recv", 8, peer=0), call("recv", 9, peer=0)]
    for is_whole, expected in ((False, [1, 2]), (True, [0, 1])):
        ranks = ranks_of(dump(0, *sends), dump(1, *receives, is_whole=is_whole))
        assert (numbers(ranks[0], "send"), numbers(ranks[1], "recv")) == ([0, 1, 2, 3], expected)
    waiting = [call("recv", 8, "started", peer=0)]
    ranks = ranks_of(dump(0, *sends), dump(1, *waiting, is_whole=False))
    assert numbers(ranks[1], "recv") == [3], "none is complete: it waits for the one after the last complete one"
    reduces = [call("all_reduce", seq) for seq in (1, 2, 3)]
    old = ranks_of(dump(0, *reduces, version="1.5"), dump(1, reduces[-1], version="1.5", is_whole=False))
    assert (numbers(old[0], "all_reduce"), numbers(old[1], "all_reduce")) == ([0, 1, 2], [2])
    alone = ranks_of(dump(0, *sends, is_whole=False), dump(1, call("barrier", 1)))
    assert numbers(alone[0], "send") == [0, 1, 2, 3]


def test_the_status_of_a_group_counts_collectives_unless_messages_are_counted_with_them() -> None:
    pipeline, data = DumpGroup("1", "pp", (0, 1)), DumpGroup("2", "dp", (0, 1))
    calls = [
        call("all_reduce", 7, "started", data, raw_group=5),
        call("send", 3, "done", pipeline, 1, raw_group=4),
        call("barrier", 3, "done", pipeline, raw_group=4),
        call("barrier", 1, "done", WORLD, raw_group=0),
    ]
    (rank, _) = ranks_of(dump(0, *calls, last_enqueued={4: 8, 5: 9}), dump(1)).values()
    (stream,) = rank.num_made
    assert (stream.group.name, stream.source, stream.target) == ("2", -1, -1)
    assert rank.num_made == {Stream(rank.calls[0].group): 10}


def test_without_an_open_call_of_known_time_dumps_are_not_fresh(tmp_path: Path) -> None:
    path = tmp_path / "a_dump_0"
    path.touch()
    for unknown in (call("barrier", 9, "started", created_ns=-1), call("barrier", 8)):
        dumps = (Dump(path, 0, "2.10", (WORLD,), (unknown,)),)
        assert sorted(diagnose_dumps(DumpedRanks(dumps, {})).ranks) == [0, 1]
    started = call("barrier", 9, "started", created_ns=10**8)
    gone = Dump(tmp_path / "moved away", 0, "2.10", (WORLD,), (started,))
    assert diagnose_dumps(DumpedRanks((gone,), {})).reason.startswith("the calls that are not complete")


def test_dumps_are_read_once_for_each_rank_and_the_others_are_named(tmp_path: Path) -> None:
    text = '{"version": "2.5", "pg_config": {}, "entries": []%s}'
    for name, content in (
        ("nccl_trace_rank_2", text % ""),
        ("nccl_trace_rank_0", text % ""),
        ("a_dump", text % ""),
        ("other_rank_0", text % ', "rank": 0'),
        ("nccl_trace_rank_3", ""),
        ("nccl_trace_rank_4", "no dump"),
        ("copy_rank_2", "no dump either"),
    ):
        (tmp_path / name).write_text(content)
    names = ["nccl_trace_rank_2", "nccl_trace_rank_0", "a_dump", "other_rank_0"]
    names += ["nccl_trace_rank_3", "nccl_trace_rank_4", "copy_rank_2"]
    result = read_dumped_ranks([tmp_path / name for name in names])
    assert [(read.rank, read.path.name) for read in result.dumps] == [
        (0, "nccl_trace_rank_0"),
        (2, "nccl_trace_rank_2"),
    ]
    assert result.unreadable == {3: "an empty dump", 4: "a dump that cannot be read"}
    assert len(result.warnings) == 5
    assert "a_dump: neither the name nor the dump says whose it is" in result.warnings[0]
    assert "other_rank_0: a second dump of rank 0; " in result.warnings[1]


def test_files_with_the_names_of_dumps_but_for_their_numbers_are_dumps_too(tmp_path: Path) -> None:
    for name in ("job7_rank_0", "job7_rank_11", "job12_rank_3", "job_rank_3", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "job7_rank_5").mkdir()
    result = [tmp_path / "job7_rank_0", tmp_path / "notes.txt"]
    assert [path.name for path in dump_paths(tmp_path, result)] == [
        "job12_rank_3",
        "job7_rank_0",
        "job7_rank_11",
        "notes.txt",
    ]
    assert dump_paths(tmp_path / "nowhere", result) == result
