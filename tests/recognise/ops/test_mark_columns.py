"""Marks by columns: what is read of all ranges at once is what each name says alone."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pptrace.marks import (
    AwaitMark,
    CallMark,
    CollectiveMark,
    ExchangeMark,
    OpMark,
    P2PMark,
    SpanMark,
    UnknownMark,
    WaitMark,
    format_mark,
    parse_mark,
)
from pptrace.model.traces import Category
from pptrace.recognise.ops.mark_names import NameLines, read_marks, shapes_of
from pptrace.recognise.ops.mark_ranges import AXES, KINDS_OF_COLLECTIVES, KINDS_OF_SPANS, MarkedRanges, split_marks
from pptrace.schedule.actions import Kind, Phase
from pptrace.slices import Slice
from tests.support.synthetic import MAIN_THREAD, START, Event, make_trace
from tests.test_marks import marks

KINDS, PHASES = tuple(Kind), tuple(Phase)
suffixes = st.sampled_from(["", "", ", seq = 12", ", op_id = 3", ", seq = 4, sizes = [[2, 3]]\n"])
marked_names = st.builds(lambda mark, suffix: format_mark(mark) + suffix, marks, suffixes)
padded_names = marks.map(lambda mark: format_mark(mark).replace("step=", "step=00"))
damaged_names = st.builds(lambda name, at: name[:at], marked_names, st.integers(4, 30))
other_names = st.sampled_from(
    ["aten::mm", "pp", "pp1", "pp2:x", "pp01:STEP step=3", "ppx", "", "a\nb", "pp1:\ud800", "ü 12"]
)
names = st.lists(st.one_of(marked_names, marked_names, padded_names, damaged_names, other_names), max_size=30)


TRANSFER = ("at", "step", "axis", "kind", "stage", "microbatch", "peer", "bytes")
COLUMNS: dict[str, tuple[str, ...]] = {
    "ops": ("at", "step", "kind", "stage", "chunk", "microbatch", "phase", "pair"),
    "spans": ("at", "step", "kind"),
    "transfers": TRANSFER,
    "waits": TRANSFER,
    "collectives": ("at", "step", "axis", "kind", "size", "bytes", "handle"),
    "links": ("at", "step", "axis", "is_send", "peer", "bytes", "handle"),
    "calls": ("at", "kind", "group", "sequence", "bytes", "peer", "handle"),
    "awaits": ("at", "handle"),
}


def split(listed: list[str]) -> tuple[MarkedRanges, list[str]]:
    events = [
        Event(Category.ANNOTATION, name, START + 10 * at, START + 10 * at + 7, thread=MAIN_THREAD)
        for at, name in enumerate(listed)
    ]
    result, rest = split_marks(make_trace(events).events)
    return result, [rest.names[index] for index in rest.name_id.tolist()]


def rows(table: Slice, *columns: str) -> list[tuple[object, ...]]:
    return list(zip(*(table[name].tolist() for name in columns), strict=True))


def number(value: int | None) -> int:
    return -1 if value is None else value


@settings(max_examples=40)
@given(names)
def test_every_column_holds_what_the_names_say_one_by_one(listed: list[str]) -> None:
    result, _ = split(listed)
    read = [mark for mark in map(parse_mark, listed) if mark is not None and not isinstance(mark, UnknownMark)]
    expected: dict[str, list[tuple[object, ...]]] = {name: [] for name in COLUMNS}
    for at, mark in enumerate(read):
        match mark:
            case OpMark(action, step, has_phase):
                phase = PHASES.index(action.phase) if has_phase else -1
                pair = str(action) if action.parts else ""
                own = (action.stage, action.chunk, number(action.microbatch), phase, pair)
                expected["ops"].append((at, step, KINDS.index(action.kind), *own))
            case SpanMark(kind, step):
                expected["spans"].append((at, step, KINDS_OF_SPANS.index(kind)))
            case P2PMark() | WaitMark():
                moved = mark.transfers if isinstance(mark, P2PMark) else (mark.transfer,)
                axis = AXES.index(mark.axis) if isinstance(mark, P2PMark) else -1
                for one in moved:
                    own = (KINDS.index(one.action.kind), one.action.stage, number(one.action.microbatch))
                    table = "transfers" if isinstance(mark, P2PMark) else "waits"
                    expected[table].append((at, mark.step, axis, *own, one.peer, one.bytes))
            case CollectiveMark(kind, axis, size, num_bytes, step, handle):
                row = (at, step, AXES.index(axis), KINDS_OF_COLLECTIVES.index(kind), size, num_bytes, number(handle))
                expected["collectives"].append(row)
            case ExchangeMark(links, axis, step, handle):
                for link in links:
                    own = (int(link.sends), link.peer, link.bytes, number(handle))
                    expected["links"].append((at, step, AXES.index(axis), *own))
            case CallMark(kind, group, sequence, num_bytes, _, peer, handle):
                expected["calls"].append((at, kind, group, sequence, num_bytes, number(peer), number(handle)))
            case AwaitMark(_, _, handle):
                expected["awaits"].append((at, handle))
    assert {name: rows(getattr(result, name), *columns) for name, columns in COLUMNS.items()} == expected
    assert len(result) == len(read)


@settings(max_examples=40)
@given(names)
def test_names_that_cannot_be_read_are_counted_by_reason(listed: list[str]) -> None:
    result, _ = split(listed)
    unreadable = [mark for mark in map(parse_mark, listed) if isinstance(mark, UnknownMark)]
    by_reason = {reason: [mark.text for mark in unreadable if mark.reason == reason] for reason in result.unreadable}
    assert result.unreadable == by_reason
    assert sum(map(len, by_reason.values())) == len(unreadable)


@settings(max_examples=40)
@given(names)
def test_all_marks_but_spans_get_one_name_and_all_else_keeps_its_own(listed: list[str]) -> None:
    for name, kept in zip(listed, split(listed)[1], strict=True):
        mark = parse_mark(name)
        if mark is None or isinstance(mark, SpanMark):
            assert kept == name
        else:
            assert kept == "pp1:"


@settings(max_examples=40)
@given(names)
@example([f"pp1:2F3 chunk=0 phase=steady step={end}" for end in ("7", "07", "7, seq = 1", "7, seq = 2", "8")])
def test_ops_transfers_and_waits_are_equal_where_their_marks_are(listed: list[str]) -> None:
    result, _ = split(listed)
    read = [mark for mark in map(parse_mark, listed) if mark is not None and not isinstance(mark, UnknownMark)]
    repeatable = [mark if isinstance(mark, OpMark | P2PMark | WaitMark) else None for mark in read]
    assert [number >= 0 for number in result.equal.tolist()] == [mark is not None for mark in repeatable]
    known = [(code, mark) for code, mark in zip(result.equal.tolist(), repeatable, strict=True) if mark is not None]
    assert len({code for code, _ in known}) == len({mark for _, mark in known}) == len(set(known))


def test_marks_of_one_form_are_read_as_one_shape() -> None:
    listed = [
        f"pp1:{stage}F{number} chunk=0 phase=steady step={number}" for stage in range(12) for number in range(200)
    ]
    assert len(read_marks(listed)[0]) == 1
    waits = [f"pp1:p2p step={step} axis=pp ops=2SEND_F{step}>5@{10**step}" for step in range(12)]
    assert len(read_marks(waits)[0]) == 2  # numbers of more digits than those of a stage are read apart


@given(st.lists(st.text(st.sampled_from("ab 0123456789ü=")).map(str), max_size=12))
def test_a_name_is_its_shape_with_its_numbers(listed: list[str]) -> None:
    rebuilt: dict[int, str] = {}
    for shape in shapes_of(NameLines.of(listed)):
        for index, values, widths in zip(
            shape.names.tolist(), shape.numbers.tolist(), shape.widths.tolist(), strict=True
        ):
            if max(widths, default=0) <= 18:
                pieces = shape.text.split("0")
                numbers = [f"{value:0{width}d}" for value, width in zip(values, widths, strict=True)]
                rebuilt[index] = pieces[0] + "".join(map(str.__add__, numbers, pieces[1:]))
            else:
                rebuilt[index] = listed[index]
    assert rebuilt == dict(enumerate(listed))


def test_names_with_line_breaks_are_no_lines() -> None:
    lines = NameLines.of(["a", "b\nc", "", "\n", "d"])
    assert lines.names.tolist() == [0, 2, 4]
    assert Counter(shape.text for shape in shapes_of(lines)) == Counter(["a", "", "d"])
    assert lines.beginning_with("a").tolist() == [True, False, False]
    assert lines.beginning_with("ab").tolist() == [False, False, False]
    assert np.array_equal(lines.where(np.array([False, True, True])).names, [2, 4])
