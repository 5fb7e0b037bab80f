"""The two ends of a transfer, the members of a collective, and what of them is waiting."""

from __future__ import annotations

import pandas as pd
import pytest

from pptrace.model.mesh import MeshInfo
from pptrace.model.tables import COMMS, empty_table
from pptrace.recognise.messages import match
from pptrace.recognise.messages.match import match_comms, with_transfers
from pptrace.schedule.registry import build
from tests.support.analysed import recognise
from tests.support.synthetic import BYTES, Recording, record, without
from tests.support.tables import table_of

MESH = MeshInfo(4, pp=2, vpp=1, tp=1, cp=1, dp=2, ep=1, pipelines=((0, 2), (1, 3)))


def comms_of(*rows: dict[str, object]) -> pd.DataFrame:
    blank = {"axis": "pp", "clock": "host", "match": -1, "peer": -1, "stage": -1, "microbatch": -1}
    times = [{"transfer_start_ns": row["start_ns"], "transfer_end_ns": row["end_ns"]} for row in rows]
    return table_of(COMMS, [blank | row | of_row for row, of_row in zip(rows, times, strict=True)])


def pair(send: tuple[int, int], recv: tuple[int, int], clock: str = "host") -> pd.DataFrame:
    """A matched send and receive with their (start, end)."""
    both = {"match": 0, "direction": "F", "clock": clock}
    return comms_of(
        {"rank": 0, "kind": "send", "start_ns": send[0], "end_ns": send[1], **both},
        {"rank": 1, "kind": "recv", "start_ns": recv[0], "end_ns": recv[1], **both},
    )


def transfers(comms: pd.DataFrame) -> list[tuple[int, int]]:
    filled = with_transfers(comms)
    return list(zip(filled["transfer_start_ns"].tolist(), filled["transfer_end_ns"].tolist(), strict=True))


def test_messages_without_a_microbatch_meet_in_the_order_of_their_posting() -> None:
    def ring(rank: int, times: tuple[int, ...]) -> list[dict[str, object]]:
        links = (("send", (rank + 1) % 3), ("recv", (rank - 1) % 3))
        shared = {"rank": rank, "axis": "cp"}
        return [
            shared | {"kind": kind, "peer": peer, "start_ns": at, "end_ns": at + 5}
            for at in times
            for kind, peer in links
        ]

    rows = [*ring(0, (10, 20)), *ring(1, (40, 50)), *ring(2, (12, 90))]
    matched = match_comms(comms_of(*rows[::-1]), None)
    sends, receives = (matched[matched["kind"] == kind].set_index("match") for kind in ("send", "recv"))
    pairs = sends.merge(receives, left_index=True, right_index=True, suffixes=("_send", "_recv"))
    assert sorted(zip(pairs["rank_send"], pairs["start_ns_send"], pairs["rank_recv"], pairs["start_ns_recv"], strict=True)) == [
        (0, 10, 1, 40), (0, 20, 1, 50), (1, 40, 2, 12), (1, 50, 2, 90), (2, 12, 0, 10), (2, 90, 0, 20),
    ]  # fmt: skip


def message(kind: str, at: int, size: int, **more: object) -> dict[str, object]:
    rank = 0 if kind == "send" else 1
    return {"kind": kind, "rank": rank, "peer": 1 - rank, "bytes": size, "start_ns": at, "end_ns": at + 5} | more


@pytest.mark.parametrize(
    ("received", "matches"), [((8, 9), [0, 1, 0, 1]), ((9, 8), [-1] * 4), ((-1, 9), [0, 1, 0, 1]), ((9,), [-1, 0, 0])]
)
def test_messages_that_only_one_end_names_meet_in_order_if_their_sizes_agree(
    received: tuple[int, ...], matches: list[int]
) -> None:
    sends = [message("send", at, 8 + at, direction="F", stage=0, microbatch=at) for at in range(2)]
    receives = [message("recv", 10 + at, size) for at, size in enumerate(received)]
    assert match_comms(comms_of(*sends, *receives), None)["match"].tolist() == matches


@pytest.mark.parametrize(("received", "matches"), [((16, 128), [0, 1, 0, 1]), ((128, 16), [-1] * 4)])
def test_several_messages_of_one_activation_meet_in_order_if_their_sizes_agree(
    received: tuple[int, ...], matches: list[int]
) -> None:
    named = {"direction": "F", "microbatch": 3}
    sends = [message("send", at, size, stage=0, **named) for at, size in enumerate((16, 128))]
    receives = [message("recv", at, size, stage=1, **named) for at, size in enumerate(received)]
    assert match_comms(comms_of(*sends, *receives), None)["match"].tolist() == matches


def test_a_posting_call_beside_work_on_devices_tells_no_transfer() -> None:
    comms = pair((10, 12), (20, 50))
    comms.loc[0, "posted_ns"] = 12
    assert transfers(comms)[0] == (10, 12), "a host without devices sends while it posts"
    kernel = comms_of({"rank": 0, "kind": "all_reduce", "axis": "dp", "start_ns": 60, "end_ns": 70, "clock": "device"})
    assert transfers(pd.concat([comms, kernel], ignore_index=True))[0] == (12, 12)


RECORDINGS = {
    "gpipe": record(build("gpipe", 3, 4), latency=70),
    "1f1b": record(build("1f1b", 4, 6), latency=70, steps=2),
    "interleaved": record(build("interleaved-1f1b", 2, 4, 2), latency=70),
    "replicas": record(build("1f1b", 2, 3), latency=70, dp=3),
    "devices": record(build("1f1b", 4, 6), latency=70, device=True),
    "interleaved on devices": record(build("interleaved-1f1b", 2, 4, 2), latency=70, device=True, steps=2),
}


@pytest.mark.parametrize("recording", RECORDINGS.values(), ids=RECORDINGS.keys())
def test_every_transfer_of_a_plan_finds_its_other_end(recording: Recording) -> None:
    comms = recognise(recording.traces()).comms
    p2p = comms[comms["kind"].isin(("send", "recv"))]
    job = recording.job
    expected = sum(len(recording.run.transfers(rank)) for rank in range(job.plan.pp)) * job.dp * job.steps
    assert len(p2p) == expected > 0
    assert (p2p["match"] >= 0).all()
    assert (p2p["bytes"] == BYTES).all()
    for _, ends in p2p.groupby("match"):
        send, recv = (ends[ends["kind"] == kind].iloc[0] for kind in ("send", "recv"))
        assert len(ends) == 2
        assert (send["rank"], send["peer"]) == (recv["peer"], recv["rank"])
        assert all(send[column] == recv[column] for column in ("step", "direction", "microbatch"))
        assert recv["stage"] - send["stage"] == (1 if send["direction"] == "F" else -1)


@pytest.mark.parametrize("recording", RECORDINGS.values(), ids=RECORDINGS.keys())
def test_waiting_and_moving_data_are_told_apart_as_they_were(recording: Recording) -> None:
    """The paper run knows when both sides were there and when the message was through: latency after that."""
    comms = with_transfers(recognise(recording.traces()).comms)
    job = recording.job
    for rank in range(job.dp * job.plan.pp):
        messages = comms[(comms["rank"] == rank) & (comms["axis"] == "pp") & (comms["step"] == 0)]
        met = {str(done.action): done.met + recording.begin(0) for done in recording.run.transfers(rank // job.dp)}
        assert len(messages) == len(met)
        for row in messages.itertuples():
            cell = f"{row.stage}{row.kind.upper()}_{row.direction}{row.microbatch}"
            assert row.transfer_start_ns == met[cell], cell
            assert row.transfer_end_ns >= row.transfer_start_ns + 70
            if row.kind == "send":
                assert row.transfer_end_ns == row.transfer_start_ns + 70, cell


def test_the_side_that_comes_first_waits() -> None:
    assert transfers(pair(send=(10, 50), recv=(30, 52))) == [(30, 50), (30, 52)]
    assert transfers(pair(send=(30, 50), recv=(10, 52))) == [(30, 50), (30, 52)]


def test_a_buffered_send_does_not_wait_and_its_late_receive_only_copies() -> None:
    assert transfers(pair(send=(10, 14), recv=(30, 33))) == [(10, 14), (30, 33)]


def test_a_receive_never_counts_its_wait_as_transfer_even_when_clocks_are_a_little_off() -> None:
    """It seems to end before its send began: all of it was waiting."""
    assert transfers(pair(send=(100, 120), recv=(10, 98))) == [(100, 120), (98, 98)]


def test_a_message_that_takes_no_time_is_all_waiting() -> None:
    assert transfers(pair(send=(10, 30), recv=(30, 30))) == [(30, 30), (30, 30)]


def test_a_send_is_over_with_its_receive_though_its_group_lasts_longer() -> None:
    assert transfers(pair(send=(10, 90), recv=(30, 41), clock="device")) == [(30, 41), (30, 41)]
    assert transfers(pair(send=(10, 41), recv=(30, 90), clock="device")) == [(30, 41), (30, 41)]


def test_on_the_host_a_receive_may_outlast_its_buffered_send() -> None:
    assert transfers(pair(send=(30, 31), recv=(10, 60))) == [(30, 31), (30, 60)]


def test_the_kernel_of_a_send_waits_for_its_peer_even_when_clocks_are_a_little_off() -> None:
    """It seems to end before its receive began: kernels spin until both are there."""
    assert transfers(pair(send=(10, 99), recv=(100, 103), clock="device")) == [(99, 99), (100, 103)]


def test_what_is_not_matched_keeps_its_own_times() -> None:
    assert transfers(comms_of({"rank": 0, "kind": "recv", "start_ns": 5, "end_ns": 9})) == [(5, 9)]


def members_of(kind: str, *times: tuple[int, int]) -> pd.DataFrame:
    return comms_of(
        *({"rank": r, "kind": kind, "match": 3, "start_ns": s, "end_ns": e} for r, (s, e) in enumerate(times))
    )


def test_the_members_of_a_collective_wait_for_the_last() -> None:
    assert transfers(members_of("all_reduce", (10, 52), (30, 50), (20, 51))) == [(30, 52), (30, 50), (30, 51)]


def test_the_root_of_a_broadcast_may_be_done_before_the_others_come() -> None:
    assert transfers(members_of("broadcast", (10, 12), (30, 35))) == [(10, 12), (30, 35)]


def collective(rank: int, start: int, axis: str = "dp", size: int = 2, kind: str = "all_reduce") -> dict[str, object]:
    return {"rank": rank, "kind": kind, "axis": axis, "group_size": size, "start_ns": start, "end_ns": start + 5}


def test_collectives_are_matched_within_their_group_in_order() -> None:
    rows = [collective(r, start) for r in range(4) for start in (10 + r, 50 + r)]
    matched = match_comms(comms_of(*rows), MESH)
    groups = {tuple(sorted(members["rank"])): set(members["start_ns"] // 40) for _, members in matched.groupby("match")}
    assert matched["match"].nunique() == 4
    assert set(groups) == {(0, 1), (2, 3)}
    for _, members in matched.groupby("match"):
        assert members["start_ns"].max() - members["start_ns"].min() < 40


def test_a_collective_whose_kernel_was_not_recorded_comes_after_those_that_were_called_before_it() -> None:
    """The host of rank 0 runs ahead: it has posted the last one while its device is at the first."""
    ran = [
        collective(rank, start) | {"clock": "device"}
        for rank, starts in enumerate(((100, 200, 300), (110, 210, 310)))
        for start in starts
    ]
    lost = [
        collective(rank, start) | {"posted_ns": start + 5, "asked_ns": start + 5, "end_ns": start + 5}
        for rank, start in ((0, 105), (1, 305))
    ]
    comms = match_comms(comms_of(*ran[:3], lost[0], *ran[3:], lost[1]), MESH)
    assert comms["match"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_collective_that_lacks_a_member_is_not_matched() -> None:
    matched = match_comms(comms_of(collective(0, 10), collective(2, 10), collective(3, 12)), MESH)
    assert matched["match"].tolist()[0] == -1
    assert matched["match"].tolist()[1] == matched["match"].tolist()[2] >= 0


def test_transfers_to_a_rank_without_a_trace_stay_unmatched() -> None:
    comms = recognise(without(RECORDINGS["1f1b"].traces(), 2), num_ranks=4).comms
    to_missing = comms["peer"] == 2
    assert (comms.loc[to_missing, "match"] == -1).all()
    assert (comms.loc[~to_missing, "match"] >= 0).all()


def test_an_end_that_occurs_twice_is_not_guessed_at() -> None:
    comms = recognise(RECORDINGS["gpipe"].traces()).comms.drop(columns="match").assign(match=-1)
    doubled = pd.concat([comms, comms.head(1)], ignore_index=True)
    matched = match_comms(doubled, RECORDINGS_MESH)
    assert (matched["match"] == -1).sum() == 3
    assert matched.iloc[0]["match"] == -1


@pytest.mark.parametrize("doubled", ["send", "recv"])
def test_neither_two_sends_nor_two_receives_of_one_message_are_one(doubled: str) -> None:
    named = {"direction": "F", "microbatch": 3}
    ends = {"send": message("send", 0, 8, stage=0, **named), "recv": message("recv", 1, 8, stage=1, **named)}
    comms = comms_of(*ends.values(), ends[doubled])
    assert (match_comms(comms, None)["match"] == -1).sum() == 3
    alone = comms_of(ends[doubled], ends[doubled])
    assert match_comms(alone, None)["match"].tolist() == [-1, -1]


RECORDINGS_MESH = recognise(RECORDINGS["gpipe"].traces()).mesh


def test_nothing_is_matched_in_an_empty_table() -> None:
    assert len(match_comms(empty_table(COMMS), MESH)) == len(with_transfers(empty_table(COMMS))) == 0


def test_blocks_of_steps_match_as_all_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    comms = recognise(record(build("1f1b", 3, 4), steps=5, dp=2).traces()).comms

    def partners_and_transfers() -> list[tuple[int, ...]]:
        """Per row: the first row of its match, and its transfer."""
        filled = with_transfers(match_comms(comms.assign(match=-1), RECORDINGS_MESH))
        first = pd.Series(range(len(filled))).groupby(filled["match"].to_numpy()).transform("first")
        return list(zip(first, filled["transfer_start_ns"], filled["transfer_end_ns"], strict=True))

    together = partners_and_transfers()
    assert len(set(together)) < len(comms) > 100
    monkeypatch.setattr(match, "_BLOCK", 20)
    monkeypatch.setattr(match, "_MOST_BLOCKS", 3)
    assert len(match._blocks_of_steps(comms["step"].to_numpy())) > 2
    assert partners_and_transfers() == together
