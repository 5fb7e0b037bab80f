"""Links between ranks: against sums counted by hand, and against the waits of the same report."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from pptrace.analysis.links.answer import RankTraffic, late_ranks_of, links_of, traffic_of
from pptrace.analysis.links.types import Link
from pptrace.model.tables import COMMS
from pptrace.schedule.registry import build
from pptrace.slices import slice_of
from tests.support.analysed import analyse
from tests.support.synthetic import record
from tests.support.tables import named, table_of


def traffic_with(rank: int, *rows: dict[str, object]) -> RankTraffic:
    """Traffic of a rank with rows of matched communication on axis pp; a transfer lasts to the row's end unless it is given."""
    usual = {"axis": "pp", "group_size": 2}
    edges = [{"transfer_end_ns": row.get("end_ns", 0), "asked_ns": row.get("start_ns", 0)} for row in rows]
    comms = table_of(COMMS, [usual | edge | row for edge, row in zip(edges, rows, strict=True)])
    return traffic_of(rank, slice_of(comms))


def message(kind: str, peer: int, start: int, transfer: int, end: int, **more: object) -> dict[str, object]:
    times = {"start_ns": start, "transfer_start_ns": transfer, "end_ns": end}
    return {"kind": kind, "peer": peer, "bytes": 1000, **times, **more}


def test_each_side_waits_for_the_other_and_the_link_knows_for_whom() -> None:
    first = traffic_with(0, message("send", 1, 0, 0, 50), message("send", 1, 100, 130, 150))
    second = traffic_with(
        1,
        message("recv", 0, -40, 0, 50),
        message("recv", 0, 130, 130, 150),
        message("recv", 0, 200, 200, 250, match=-1),
    )
    (link,) = links_of([first, second], {0: {"host": "a"}, 1: {"host": "b"}})
    assert link == Link(
        axis="pp",
        source=0,
        target=1,
        is_same_host=False,
        count=2,
        bytes=2000,
        transfer_ns=70,
        late_sender_ns=40,
        late_receiver_ns=30,
        slack_ns=0,
        required_gbps=None,
        algbw_gbps=2000 / 70,
        latency_ns=None,
        bandwidth_gbps=None,
        fit_reason="all messages have 1000 bytes",
    )


def test_slack_is_from_when_both_were_ready_until_the_message_was_asked_for() -> None:
    early = message("recv", 0, 0, 100, 400, asked_ns=350)
    late = message("recv", 0, 0, 100, 400, asked_ns=50)
    (link,) = links_of([traffic_with(1, early, late)], {})
    assert link.slack_ns == 250
    assert link.required_gbps == 2000 / 250
    assert link.is_same_host is None


def test_a_size_that_is_not_known_leaves_the_bandwidths_unknown() -> None:
    (link,) = links_of([traffic_with(1, message("recv", 0, 0, 0, 10, bytes=-1))], {})
    assert (link.bytes, link.algbw_gbps, link.required_gbps, link.bandwidth_gbps) == (None, None, None, None)
    assert link.transfer_ns == 10


def test_a_link_is_fitted_to_fast_transfers_whatever_others_took_and_waited() -> None:
    rng = np.random.default_rng(3)
    rows, at = [], 0
    for size in (1_000, 50_000, 2_000_000):
        for index in range(40):
            transfer = 20_000 + size // 4 + (0 if index % 4 == 0 else int(rng.integers(10_000, 5_000_000)))
            wait = int(rng.integers(0, 10_000_000))
            rows.append(message("recv", 0, at, at + wait, at + wait + transfer, bytes=size))
            at += wait + transfer + 1_000
    (link,) = links_of([traffic_with(1, *rows)], {})
    assert link.latency_ns == pytest.approx(20_000, abs=2)
    assert link.bandwidth_gbps == pytest.approx(4)
    assert link.fit_reason is None


def test_tensors_of_one_message_share_their_link_and_tell_its_latency_and_bandwidth() -> None:
    """Closed form: of 1000 and 3000 bytes at 2 bytes/ns after 100 ns the first is there after 600 ns, both after 2,100."""
    rows = []
    for start in range(0, 50_000, 10_000):
        posted = {"asked_ns": start + 900}
        rows += [message("recv", 0, start, start, start + 600, **posted, microbatch=start)]
        rows += [message("recv", 0, start, start, start + 2100, **posted, microbatch=start, bytes=3000)]
    (link,) = links_of([traffic_with(1, *rows)], {})
    assert (link.count, link.bytes, link.transfer_ns, link.slack_ns) == (10, 20_000, 5 * 2100, 5 * 900)
    assert (link.latency_ns, link.bandwidth_gbps) == (100, pytest.approx(2.0))
    assert link.algbw_gbps == pytest.approx(4000 / 2100)


def test_the_rank_that_enters_last_is_counted_and_does_not_wait() -> None:
    early, last = (
        traffic_with(
            rank, *named("kind start_ns transfer_start_ns end_ns", [("all_reduce", at, 100, 120) for at in starts])
        )
        for rank, starts in ((4, (40, 100, 70)), (9, (100, 20, 100)))
    )
    first, second = late_ranks_of([early, last])
    assert (first.rank, first.count, first.num_last, first.wait_ns) == (9, 3, 2, 80)
    assert (second.rank, second.count, second.num_last, second.wait_ns) == (4, 3, 1, 90)


def test_links_wait_as_long_as_the_ranks_of_the_same_report() -> None:
    report = analyse(record(build("1f1b", 4, 6), None, 150).traces()).report
    waits: Counter[tuple[str, int]] = Counter()
    moved: Counter[int] = Counter()
    for step in report.steps:
        for rank in step.ranks:
            for comm in rank.comms:
                assert comm.wait_ns is not None
                waits[comm.kind, rank.rank] += comm.wait_ns
                moved[rank.rank] += (comm.bytes or 0) if comm.kind == "recv" else 0
    assert sum(waits.values()) > 0
    for rank in range(4):
        assert sum(link.late_sender_ns for link in report.links if link.target == rank) == waits["recv", rank]
        assert sum(link.late_receiver_ns for link in report.links if link.source == rank) == waits["send", rank]
        assert sum(link.bytes or 0 for link in report.links if link.target == rank) == moved[rank]
    assert len(report.links) == 6


def test_a_run_without_communication_has_no_links() -> None:
    assert links_of([], {}) == ()
    assert late_ranks_of([]) == ()
    empty = traffic_with(0)
    assert links_of([empty], {}) == ()
    assert late_ranks_of([empty]) == ()


def test_what_a_rank_communicated_is_summed_by_axis_kind_peer_and_size() -> None:
    rng = random.Random(0)
    for _ in range(30):
        rows: list[dict[str, object]] = []
        messages: dict[tuple[object, ...], Counter[str]] = {}
        collectives: dict[tuple[object, ...], Counter[str]] = {}
        transfers: dict[tuple[object, ...], list[int]] = {}
        for _ in range(rng.randint(0, 30)):
            start, after = rng.randint(0, 30) + 100 * len(rows), rng.randint(0, 60)  # each is alone on its link
            asked = 100 * len(rows) + after
            begin = start + rng.choice((0, rng.randint(0, 20)))
            moved = begin + rng.randint(1, 20)
            end, size, count = moved + rng.randint(0, 5), rng.choice((1, 2, 4)), rng.choice((10, 20))
            axis, kind = rng.choice(("pp", "cp")), rng.choice(("send", "recv", "all_reduce"))
            row = message(kind, rng.randint(0, 1), start, begin, end, transfer_end_ns=moved, asked_ns=asked, axis=axis)
            rows.append(row | {"bytes": count, "group_size": size, "match": rng.choice((0, 0, -1))})
            if rows[-1]["match"] == -1:
                continue
            wait = end - start - (moved - begin)
            if kind != "all_reduce":
                key = (axis, kind, row["peer"], count)
                slack = max(asked - begin, 0) if kind == "recv" else 0
                messages.setdefault(key, Counter()).update(count=1, transfer=moved - begin, wait=wait, slack=slack)
                transfers.setdefault(key, []).append(moved - begin)
            elif size > 1:
                sums = collectives.setdefault((axis, kind), Counter())
                sums.update(count=1, wait=wait, num_last=int(begin <= start))
        traffic = traffic_with(3, *rows)
        for key, times in transfers.items():  # a tenth of them are below it
            messages[key]["fast"] = sorted(times)[(len(times) - 1) // 10]
        keys, sums_of = ("axis", "kind", "peer", "bytes"), ("count", "transfer", "wait", "slack", "fast")
        found = zip(*(traffic.messages[name].tolist() for name in (*keys, *sums_of)), strict=True)
        assert sorted(found) == sorted((*key, *(sums[name] for name in sums_of)) for key, sums in messages.items())
        names = ("count", "num_last", "wait")
        found = zip(*(traffic.collectives[name].tolist() for name in ("axis", "kind", *names)), strict=True)
        assert sorted(found) == sorted((*key, *(sums[name] for name in names)) for key, sums in collectives.items())


def test_links_with_most_waiting_come_first_and_sums_are_those_of_the_side_that_receives() -> None:
    sent = [message("send", 1, 0, 30, 50), message("send", 2, 100, 100, 150, bytes=3000)]
    received = [message("recv", 0, -5, 30, 50)]
    third = [message("recv", 0, 20, 100, 150, bytes=3000, asked_ns=110), message("recv", 0, 200, 200, 205)]
    ranks = [traffic_with(rank, *rows) for rank, rows in enumerate((sent, received, third))]
    first, second = links_of(ranks, {0: {"host": "a"}, 2: {"host": "a"}})
    assert (first.source, first.target, first.late_sender_ns, first.late_receiver_ns) == (0, 2, 80, 0)
    assert (second.source, second.target, second.late_sender_ns, second.late_receiver_ns) == (0, 1, 35, 30)
    assert (first.count, first.bytes, first.transfer_ns, first.slack_ns) == (2, 4000, 55, 10)
    assert (first.algbw_gbps, first.required_gbps) == (4000 / 55, 400)
    assert (first.is_same_host, second.is_same_host) == (True, None)
    slope = (50 - 5) / 2000
    assert first.latency_ns is None  # 5 ns of 1,000 bytes and 50 of 3,000: the line does not begin at 0 or later
    assert 5 - 1000 * slope < 0


def test_a_tenth_of_a_links_messages_are_faster_than_its_fast_one() -> None:
    for num, fast in ((10, 1), (11, 2), (20, 2), (21, 3)):
        rows = [message("recv", 1, 100 * ns, 100 * ns, 101 * ns) for ns in range(num, 0, -1)]
        assert traffic_with(0, *rows).messages["fast"].tolist() == [fast]


def test_messages_without_bytes_have_a_known_size_and_no_traffic_is_of_no_device() -> None:
    empty = traffic_with(1, message("recv", 0, 0, 0, 50, bytes=0))
    (link,) = links_of([empty], {})
    assert (link.bytes, link.algbw_gbps) == (0, 0.0)
    assert not traffic_with(1).on_device
