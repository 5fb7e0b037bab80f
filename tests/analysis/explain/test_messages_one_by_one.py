"""Messages and collectives looked at all at once are those found one by one, on random times of a few nanoseconds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pptrace.analysis.explain.inner_waits import InnerWaits, collectives_in_ops, holds_of, inner_waits
from pptrace.analysis.explain.rank_messages import (
    NEVER,
    longest_moved_with,
    received_messages,
    waits_for_peers,
    with_moved_times,
)
from pptrace.intervals import EMPTY, union
from pptrace.model.tables import MESSAGES
from pptrace.schedule.actions import Kind
from pptrace.schedule.registry import build
from pptrace.slices import Slice
from pptrace.timeline.lanes import Lane
from tests.support.tables import rows_of, slice_with

PIPELINE = (7, 3, 5)
Row = dict[str, Any]
SEEDS = range(120)


def random_comms(rng: random.Random) -> list[Row]:
    """Communication of one rank in three windows, in their order."""
    rows = []
    for window in range(3):
        for _ in range(rng.randint(0, 14)):
            start = 100 * window + rng.choice((1, 3, 4, 9))
            posted = rng.choice((start, start + 2))
            asked = start + rng.randint(0, 10)
            begin = start + rng.randint(0, 10)
            end = max(begin, asked) + rng.randint(0, 12)
            rows.append(
                {
                    "window": window,
                    "axis": rng.choice(("pp", "pp", "tp")),
                    "kind": rng.choice((*MESSAGES, "recv", "recv", "recv", "all_reduce")),
                    "direction": rng.choice("FB"),
                    "stage": rng.randint(-1, 3),
                    "microbatch": rng.choice((-1, -1, 0, 1)),
                    "match": rng.choice((-1, 4, 5, 6)),
                    "group_size": rng.choice((1, 2, 2, 4)),
                    "peer": rng.choice((7, 7, 7, *PIPELINE, 4)),
                    "start_ns": start,
                    "posted_ns": posted,
                    "asked_ns": asked,
                    "end_ns": end,
                    "transfer_start_ns": begin,
                    "transfer_end_ns": end - rng.randint(0, min(2, end - begin)),
                    "stream": rng.choice((20, 20, 21)),
                    "clock": rng.choice(("device", "device", "host")),
                }
            )
    return rows


NAMES = tuple(random_comms(random.Random(0))[0])


def is_message(row: Row) -> bool:
    return row["axis"] == "pp" and row["kind"] in MESSAGES and row["match"] >= 0


def comms_of(rows: Sequence[Row]) -> tuple[Slice, Any]:
    table = slice_with(rows, NAMES)
    window = table["window"]
    return with_moved_times(table, window), window


def moved_times(rows: Sequence[Row]) -> list[int]:
    """Time at which each was moved: of those posted together one by the end, the others by the least of their link.

    Of the link, those whose sender came last count, if there are any.
    """
    together = [row for row in rows if is_message(row) and row["posted_ns"] == row["start_ns"]]

    def likely(row: Row) -> int:
        link = [other for other in together if all(other[key] == row[key] for key in ("window", "peer", "kind"))]
        whole = [
            other for other in link if (other["kind"] == "send") == (other["transfer_start_ns"] == other["start_ns"])
        ]
        least = min(other["transfer_end_ns"] - other["transfer_start_ns"] for other in whole or link)
        return int(min(row["transfer_start_ns"] + least, row["transfer_end_ns"]))

    def moved(row: Row) -> int:
        batch = [other for other in together if all(other[key] == row[key] for key in ("window", "start_ns"))]
        is_last = row not in together or likely(row) == max(map(likely, batch))
        return int(row["transfer_end_ns"]) if is_last else likely(row)

    return [moved(row) for row in rows]


def test_a_rank_that_begins_ops_while_its_sends_wait_is_held_up_by_none_of_them() -> None:
    """Sends of 100 ns each for which the reader came 60 ns late; receives hold it up all the same."""
    begins = np.arange(10) * 1000
    rows = [
        dict(random_comms(random.Random(0))[0], **times, **kind)
        for begin in begins.tolist()
        for times, kind in (
            ({"start_ns": begin, "transfer_start_ns": begin + 60}, {"kind": "send"}),
            ({"start_ns": begin + 200, "transfer_start_ns": begin + 260}, {"kind": "recv"}),
        )
    ]
    for row in rows:
        at = row["start_ns"]
        row |= {"axis": "pp", "match": 4, "peer": PIPELINE[0], "posted_ns": at, "asked_ns": at}
        row |= {"end_ns": at + 100, "transfer_end_ns": at + 100}
    comms, window = comms_of(rows)
    for starts, of_sends in (
        (begins + 100, 10),
        (begins - 1, 10),
        (np.r_[begins[:1], 9500], 10),
        (begins, 0),
        (begins + 59, 0),
    ):
        ops = Slice({"start_ns": starts, "end_ns": starts + 70})
        waits = waits_for_peers(3, PIPELINE, comms, window, ops)
        assert len(waits) == 10 + of_sends


@pytest.mark.parametrize(
    ("op_ms", "next_ms", "num_held"),
    [
        pytest.param(30, 101, 10, id="idle when the reader comes, and on as soon as the send is over"),
        pytest.param(70, 101, 0, id="in an op when the reader comes"),
        pytest.param(30, 150, 0, id="on long after the send was over"),
    ],
)
def test_a_send_that_a_rank_asks_for_after_an_op_holds_it_up(op_ms: int, next_ms: int, num_held: int) -> None:
    """Sends of 100 ms whose readers come 60 ms late; the rank runs an op meanwhile, as torch's 1F1B does."""
    begins = np.arange(10) * 1_000
    row = dict(random_comms(random.Random(0))[0], axis="pp", match=4, peer=PIPELINE[0], kind="send")
    rows = []
    for begin in begins.tolist():
        at, ready, end = (1_000_000 * (begin + ms) for ms in (0, 60, 100))
        times = {"start_ns": at, "posted_ns": at, "asked_ns": at, "transfer_start_ns": ready}
        rows.append({**row, **times, "end_ns": end, "transfer_end_ns": end})
    starts = np.concatenate((begins - 20, begins + 1, begins + next_ms))
    ends = np.concatenate((begins - 10, begins + op_ms, begins + next_ms + 50))
    comms, window = comms_of(rows)
    ops = Slice({"start_ns": 1_000_000 * starts, "end_ns": 1_000_000 * ends})
    assert len(waits_for_peers(3, PIPELINE, comms, window, ops)) == num_held


def sent_with(rows: Sequence[Row], row: Row) -> int:
    """The time at which all messages of a message's kernel had been sent, one by one, ns."""
    names = ("window", "stream", "start_ns", "end_ns")
    carried = [
        other
        for other in rows
        if other["kind"] in MESSAGES and other["clock"] == "device" and all(other[name] == row[name] for name in names)
    ]
    is_known = row["clock"] == "device" and all(other["match"] >= 0 for other in carried)
    return max(other["transfer_end_ns"] for other in carried) if is_known else NEVER


def test_messages_of_the_plan_that_a_rank_received() -> None:
    """One of several tensors is there with the last of them, and takes from when the first could begin."""
    table = build("interleaved-1f1b", 2, 2).table
    messages = {}
    for entry in np.flatnonzero(table.dep_is_message).tolist():
        sender = table.dep[entry]
        direction, hop = ("F", 1) if table.kind[sender] == Kind.F.code else ("B", -1)
        key = direction, int(table.stage[sender]) + hop, int(table.microbatch[sender])
        messages[key] = int(table.dep_message[entry])
    for seed in SEEDS:
        rows = random_comms(random.Random(seed))
        comms, window = comms_of(rows)
        parts: dict[tuple[int, int], list[Row]] = {}
        for row, moved in zip(rows, moved_times(rows), strict=True):
            number = messages.get((row["direction"], row["stage"], row["microbatch"]))
            if row["kind"] == "recv" and row["match"] >= 0 and number is not None:
                begin = row["transfer_start_ns"]
                is_last = begin > row["start_ns"]
                parts.setdefault((row["window"], number), []).append(
                    {
                        "arrival": moved,
                        "sent": sent_with(rows, row),
                        "received": row["end_ns"],
                        "began": max(begin, row["asked_ns"]),
                        "recorded": row["transfer_end_ns"],
                        "sender_is_last": is_last,
                        "is_early": is_last and begin <= row["asked_ns"],
                    }
                )
        expected = []
        for (of_window, number), tensors in parts.items():
            last = {name: max(part[name] for part in tensors) for name in tensors[0]}
            del last["began"]
            began = min(part["began"] for part in tensors)
            last |= {"transfer": max(last["arrival"] - began, 0), "recorded": max(last["recorded"] - began, 0)}
            last |= {"window": of_window, "message": number, "is_early": all(part["is_early"] for part in tensors)}
            expected.append(last)
        received = rows_of(received_messages(table, comms, window))
        assert sorted(received, key=key_of) == sorted(expected, key=key_of)


def key_of(row: Row) -> tuple[int, int]:
    return row["window"], row["message"]


def random_ops(rng: random.Random) -> list[Row]:
    ops = []
    for window in range(3):
        at = 100 * window + rng.randint(0, 4)
        for row in range(rng.randint(0, 5)):
            at += rng.choice((0, rng.randint(0, 5)))
            length = rng.randint(1, 9)
            ops.append({"window": window, "row": 10 * window + row, "start": at, "end": at + length})
            at += max(length - rng.choice((0, 0, 2)), 0)
    return ops


def test_peers_of_the_longest_messages_before_an_op() -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        rows, ops = random_comms(rng), random_ops(rng)
        lengths: list[list[tuple[int, int]]] = [[] for _ in ops]
        for row in rows:
            begin = max(row["transfer_start_ns"], row["asked_ns"])
            length = row["transfer_end_ns"] - begin
            if is_message(row) and row["peer"] in PIPELINE and length > 0:
                after = (
                    index
                    for index, op in enumerate(ops)
                    if op["window"] == row["window"] and op["start"] >= begin + length // 2
                )
                if (index := next(after, None)) is not None:
                    lengths[index].append((length, PIPELINE.index(row["peer"])))
        expected = []
        for of_op in lengths:
            most = max((length for length, _ in of_op), default=0)
            expected.append(sum({1 << place for length, place in of_op if 2 * length >= most}))
        comms, window = comms_of(rows)
        found = longest_moved_with(PIPELINE, comms, window, slice_with(ops, ("window", "row", "start", "end")))
        assert found.tolist() == expected


def random_times(rng: random.Random) -> set[int]:
    """Some nanoseconds of the three windows."""
    begins = [100 * window + rng.randint(0, 40) for window in range(3) for _ in range(3)]
    return {at for begin in begins for at in range(begin, begin + rng.randint(0, 4))}


def test_collectives_inside_ops_with_what_a_rank_did_before_them_and_how_long_it_waited() -> None:
    num_waits = 0
    for seed in SEEDS:
        rng = random.Random(seed)
        rows, ops = random_comms(rng), random_ops(rng)
        compute, exposed = random_times(rng), random_times(rng)
        computing, moving = (union(sorted(times), [at + 1 for at in sorted(times)]) for times in (compute, exposed))
        lane = Lane(computing, EMPTY, moving, EMPTY, EMPTY)
        expected: list[Row] = []
        latest = -1
        for row in sorted(rows, key=lambda row: (row["window"], row["start_ns"])):
            is_of_pp = row["axis"] == "pp" and row["kind"] in MESSAGES
            if is_of_pp or row["microbatch"] >= 0 or row["match"] < 0 or row["group_size"] == 1:
                continue
            start = row["start_ns"]
            begun = [index for index, op in enumerate(ops) if op["window"] == row["window"] and op["start"] <= start]
            if not begun or start >= ops[begun[-1]]["end"]:
                continue
            op = ops[begun[-1]]
            since = max(op["start"], latest)
            begin = max(start, since, *(earlier["end"] for earlier in ops[: begun[-1]]), 0)
            until = min(row["transfer_start_ns"], op["end"])
            expected.append(
                {
                    "window": row["window"],
                    "row": op["row"],
                    "match": row["match"],
                    "start": start,
                    "since": max(start - since, 0),
                    "wait": sum(at not in compute | exposed for at in range(begin, until)),
                }
            )
            num_waits += expected[-1]["wait"] > 0
            latest = max(latest, row["end_ns"])
        comms, window = comms_of(rows)
        found = collectives_in_ops(comms, window, slice_with(ops, ("window", "row", "start", "end")), lane)
        assert rows_of(found) == expected, seed
    assert num_waits > len(SEEDS) / 4


def random_collectives(rng: random.Random) -> list[Slice]:
    """Collectives inside the ops of four ranks, each with members of its own."""
    ranks: list[list[Row]] = [[] for _ in range(4)]
    for match in range(rng.randint(0, 9)):
        window = rng.randrange(3)
        for rank in rng.sample(range(4), rng.randint(1, 3)):
            start = rng.randint(0, 60)
            row = {"window": window if rank < 3 else 2 - window, "row": rng.randint(0, 3), "match": match}
            ranks[rank].append(
                row | {"start": start, "since": rng.randint(0, 9), "wait": rng.choice((0, rng.randint(0, 9)))}
            )
    return [slice_with(rows, ("window", "row", "match", "start", "since", "wait")) for rows in ranks]


def test_each_wait_is_for_the_member_that_comes_last_and_holds_are_against_the_one_before_it() -> None:
    for seed in SEEDS:
        rng = random.Random(seed)
        ranks = random_collectives(rng)
        is_whole = np.array([rng.random() < 0.7 for _ in range(3)])
        number = {int(window): index for index, window in enumerate(np.flatnonzero(is_whole))}
        rows = [row for rank in ranks for row in rows_of(rank)]
        expected = []
        for row in rows:
            members = [other for other in rows if other["match"] == row["match"]]
            late = max(reversed(members), key=lambda other: other["start"])
            if row["wait"] > 0 and row is not late and row["window"] in number and late["window"] in number:
                longer = min(max(late["since"] - row["since"], 0), row["wait"])
                ends = number[row["window"]], row["row"], row["wait"], number[late["window"]], late["row"]
                expected.append((*ends, longer, row["match"]))
        waits = inner_waits(ranks, is_whole)
        columns = [getattr(waits, name).tolist() for name in InnerWaits.__struct_fields__]
        assert list(zip(*columns, strict=True)) == expected
        global_ranks = np.arange(12).reshape(3, 4)
        holds = []
        for match in sorted({wait[-1] for wait in expected}):
            of_match = [wait for wait in expected if wait[-1] == match]
            ns = min(longer for *_, longer, _ in of_match)
            _, _, _, late_step, late_row, *_ = of_match[0]
            late_cell = late_step, late_row
            rank = int(global_ranks[late_cell])
            if ns:
                holds += [(step, row_, rank, ns, 0) for step, row_, *_ in of_match] + [(*late_cell, rank, ns, 1)]
        found = holds_of(waits, global_ranks)
        names = ("window", "row", "rank", "ns", "is_late")
        assert sorted(zip(*(found[name].tolist() for name in names), strict=True)) == sorted(holds)
        assert (np.diff(found["window"]) >= 0).all()
        sums = np.zeros((3, 4), dtype=np.int64)
        for step, row_, ns, *_ in expected:
            sums[step, row_] += ns
        assert waits.sums((3, 4)).tolist() == sums.tolist()
