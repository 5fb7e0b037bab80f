"""Range names: written and read back; what cannot be read is said, and what is no mark is none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pptrace.marks import (
    PREFIX,
    VERSION,
    AwaitMark,
    Axis,
    CallMark,
    Collective,
    CollectiveMark,
    ExchangeMark,
    Link,
    Mark,
    OpMark,
    P2PMark,
    SpanKind,
    SpanMark,
    Transfer,
    Uneven,
    UnknownMark,
    WaitMark,
    format_mark,
    parse_mark,
)
from pptrace.schedule.actions import Action, Kind, Phase

small = st.integers(0, 999)
large = st.integers(0, 10**15)
compute = st.builds(
    Action, st.sampled_from([Kind.F, Kind.B, Kind.I, Kind.W]), small, small, small, st.sampled_from(Phase)
)
overlapped = st.builds(
    lambda forward, backward, chunk, phase: Action(
        Kind.OVERLAP_F_B, forward.stage, forward.microbatch, chunk, phase, (forward, backward)
    ),
    st.builds(Action, st.just(Kind.F), small, small),
    st.builds(Action, st.sampled_from([Kind.B, Kind.I]), small, small),
    small,
    st.sampled_from(Phase),
)
p2p_kinds = st.sampled_from([kind for kind in Kind if kind.is_p2p])
links = st.builds(Link, st.booleans(), small, large)
handles = st.none() | large
transfers = st.builds(Transfer, st.builds(Action, p2p_kinds, small, small), small, large, handles)
rows = st.lists(large, min_size=1, max_size=5).map(tuple)
unevens = st.builds(Uneven, large, rows, rows)
marks: st.SearchStrategy[Mark] = st.one_of(
    st.builds(OpMark, st.one_of(compute, overlapped), large),
    st.builds(P2PMark, st.lists(transfers, min_size=1, max_size=4).map(tuple), st.sampled_from(Axis), large),
    st.builds(WaitMark, transfers, large),
    st.builds(CollectiveMark, st.sampled_from(Collective), st.sampled_from(Axis), small, large, large, handles),
    st.builds(CollectiveMark, st.just(Collective.ALL_TO_ALL), st.just(Axis.EP), small, large, large, handles, unevens),
    st.builds(ExchangeMark, st.lists(links, min_size=1, max_size=4).map(tuple), st.sampled_from(Axis), large, handles),
    st.builds(
        CallMark,
        st.sampled_from(["send", "recv", *Collective]),
        st.from_regex(r"[!-~]+", fullmatch=True),
        large,
        large,
        large,
        st.none() | small,
        handles,
    ),
    st.builds(AwaitMark, st.sampled_from(Axis), large, large),
    st.builds(lambda action, step: OpMark(replace(action, phase=Phase.STEADY), step, has_phase=False), compute, large),
    st.builds(SpanMark, st.sampled_from(SpanKind), large),
)


@given(marks)
def test_a_mark_is_read_back_from_its_name(mark: Mark) -> None:
    assert parse_mark(format_mark(mark)) == mark


@given(marks, st.sampled_from([", seq = 12", ", seq = 0, op_id = 5", ", op_id = 3", ", seq = 4, sizes = [[2, 3], []]"]))
def test_what_emit_nvtx_adds_to_a_name_is_read_over(mark: Mark, suffix: str) -> None:
    assert parse_mark(format_mark(mark) + suffix) == mark


def test_names_are_those_of_the_grammar() -> None:
    op = Action(Kind.F, 2, 3, 1, Phase.STEADY)
    send, recv = Transfer(Action(Kind.SEND_F, 2, 3), 5, 4096), Transfer(Action(Kind.RECV_B, 2, 0), 5, 4096)
    named: dict[str, Mark] = {
        "pp1:2F3 chunk=1 phase=steady step=7": OpMark(op, 7),
        "pp1:p2p step=7 axis=pp ops=2SEND_F3>5@4096,2RECV_B0<5@4096": P2PMark((send, recv), Axis.PP, 7),
        "pp1:wait step=7 op=2RECV_B0<5@4096": WaitMark(recv, 7),
        "pp1:wait step=7 op=2RECV_B0.1<5@4096": WaitMark(replace(recv, tensor=1), 7),
        "pp1:all_reduce step=7 axis=dp size=4 bytes=1048576": CollectiveMark(
            Collective.ALL_REDUCE, Axis.DP, 4, 1048576, 7
        ),
        "pp1:exchange step=7 axis=cp ops=>5@4096,<3@4096 handle=12": ExchangeMark(
            (Link(True, 5, 4096), Link(False, 3, 4096)), Axis.CP, 7, 12
        ),
        "pp1:await step=7 axis=cp handle=12": AwaitMark(Axis.CP, 7, 12),
        "pp1:STEP step=7": SpanMark(SpanKind.STEP, 7),
    }
    for name, mark in named.items():
        assert format_mark(mark) == name
        assert parse_mark(name) == mark


@given(marks, st.integers(0, 10**6).filter(lambda version: version != VERSION))
def test_another_version_of_the_grammar_is_reported_and_not_guessed_at(mark: Mark, version: int) -> None:
    name = format_mark(mark).replace(PREFIX, f"pp{version}:", 1)
    parsed = parse_mark(name)
    assert isinstance(parsed, UnknownMark)
    assert parsed.text == name
    assert parsed.reason == f"grammar version {version}; this pptrace reads version 1"


@pytest.mark.parametrize(
    "name",
    [
        *("pp1:", "pp1: ", "pp1:2F3", "pp1:2F3 chunk=0 phase=steady", "pp1:2F3 phase=steady step=1"),
        *("pp1:2F3xyz chunk=0 phase=steady step=1", "pp1:2F3 chunk=0 phase=fast step=1", "pp1:2F3 chunk=x phase=steady step=1"),
        *("pp1:2F3 chunk=0 phase=steady step=-1", "pp1:2F3 chunk=0 phase=steady step=1_0", "pp1:STEP step=+1"),
        *("pp1:STEP step=٣", f"pp1:STEP step={'9' * 25}", f"pp1:STEP step={'9' * 5000}", f"pp1:{'9' * 5000}F0 step=1"),
        *("pp1:2SEND_F3 chunk=0 phase=steady step=1", "pp1:0UNSHARD chunk=0 phase=steady step=1", "pp1:step step=1"),
        *("pp1:p2p step=1 axis=pp ops=", "pp1:p2p step=1 axis=pp ops=2SEND_F3<5@1", "pp1:p2p step=1 axis=pp ops=2RECV_F3>5@1"),
        *("pp1:p2p step=1 axis=pp ops=2F3>5@1", "pp1:p2p step=1 axis=pp ops=2SEND_F3>5"),
        "pp1:p2p step=1 axis=xx ops=2SEND_F3>5@1",
        *("pp1:p2p step=1 axis=pp ops=2SEND_F3>5@1,", "pp1:wait step=1", "pp1:wait step=1 op=2SEND_F3>x@1"),
        *("pp1:all_reduce step=1 axis=dp size=4", "pp1:all_reduce step=1 axis=dp size=4 bytes=1e6", "pp1:allreduce step=1"),
        *("pp1:call step=1 kind=sent group=0 seq=0 bytes=1", "pp1:call step=1 kind=send seq=0 bytes=1"),
        *("pp1:STEP  step=1", "pp1:STEP step=1 ", "pp1:STEP step=", "pp1:STEP step=1 extra", "pp1:STEP\nstep=1"),
    ],
)  # fmt: skip
def test_a_damaged_name_is_reported_with_its_reason(name: str) -> None:
    mark = parse_mark(name)
    assert isinstance(mark, UnknownMark), mark
    assert mark.text == name
    assert mark.reason
    assert "version" not in mark.reason


@pytest.mark.parametrize(
    "name",
    [
        "",
        "pp",
        "pp1",
        "ppx:2F3",
        "pp:2F3",
        "PP1:2F3",
        " pp1:2F3",
        "PP:2F3",
        "xpp1:2F3",
        "aten::mm",
        "Forward 0",
        "pp١:STEP step=1",
    ],
)
def test_a_foreign_name_is_no_mark(name: str) -> None:
    assert parse_mark(name) is None


@given(st.text(alphabet="p12:F SENDRCVB_step=<>@,chunkaxiso٣\n", max_size=40), st.booleans())
def test_any_text_is_a_mark_an_unknown_mark_or_none(text: str, prefixed: bool) -> None:
    mark = parse_mark(PREFIX + text if prefixed else text)
    assert mark is not None or not prefixed
    if mark is not None and not isinstance(mark, UnknownMark):
        assert parse_mark(format_mark(mark)) == mark


@pytest.mark.parametrize("cut", ["got=256", "got=256 rows=3,7", "rows=3,7>3,1"])
def test_an_uneven_exchange_that_was_cut_off_is_reported(cut: str) -> None:
    """Without the rows it would be taken for an even one."""
    whole = "pp1:all_to_all step=7 axis=ep size=2 bytes=640 got=256 rows=3,7>3,1"
    assert isinstance(parse_mark(whole), CollectiveMark)
    assert isinstance(parse_mark(whole.replace("got=256 rows=3,7>3,1", cut)), UnknownMark)


@given(marks, st.data())
def test_a_truncated_name_is_another_mark_or_reported_but_never_an_error(mark: Mark, data: st.DataObject) -> None:
    """Profilers cut long names off; a cut number is still a number, everything else shows."""
    name = format_mark(mark)
    cut = name[: data.draw(st.integers(len(PREFIX), len(name) - 1))]
    parsed = parse_mark(cut)
    assert parsed is not None
    if not isinstance(parsed, UnknownMark):
        assert format_mark(parsed) == cut
