"""Labels that name chunks of their rank and no stages."""

from __future__ import annotations

import pandas as pd
import pytest

from pptrace.model.tables import COMMS, UNKNOWN, make_table
from pptrace.model.traces import Category
from pptrace.recognise.labels.label import chunks_in, stage_text, with_stage_of_chunk
from pptrace.recognise.rank import recognise_rank
from pptrace.recognise.recognised_rank import RecognisedRank
from tests.support.synthetic import MAIN_THREAD, START, Event, make_trace

PAIR = "forward chunk 0 (phase0) backward chunk 1 (phase1)"


def recognised(*names: str) -> RecognisedRank:
    """A rank with ranges of these names, one after the other."""
    times = [(START + 100 * index, START + 100 * index + 90) for index in range(len(names))]
    return recognise_rank(
        make_trace(
            [
                Event(Category.ANNOTATION, name, *span, thread=MAIN_THREAD)
                for name, span in zip(names, times, strict=True)
            ]
        )
    )


def named(table: pd.DataFrame) -> list[tuple[str, int, int, int]]:
    rows = table.sort_values("start_ns", kind="stable")
    return list(zip(*(rows[name].tolist() for name in ("kind", "stage", "chunk", "microbatch")), strict=True))


def test_an_unknown_stage_is_no_number_of_a_chunk() -> None:
    rank = recognised("F0.0.0", "SEND_FORWARD.0.0.0", "F0.1.0", "B0.1.0", "SEND_BACKWARD.0.1.0", "B0.0.0")
    assert named(rank.ops) == [("F", UNKNOWN, 0, 0), ("F", UNKNOWN, 1, 0), ("B", UNKNOWN, 1, 0), ("B", UNKNOWN, 0, 0)]
    assert named(rank.comms) == [("send", UNKNOWN, 0, 0), ("send", UNKNOWN, 1, 0)]


def test_the_only_chunk_of_a_rank_is_as_unknown_as_its_stage() -> None:
    assert {chunk for _, _, chunk, _ in named(recognised("F0.0.0", "B0.0.0").ops)} == {UNKNOWN}


def test_a_pair_says_its_chunks_in_its_text() -> None:
    (text,) = recognised(PAIR).ops["pair"]
    assert text == "(?0F0;?1B1)OVERLAP_F_B"
    assert chunks_in(text) == (0, 1)
    assert with_stage_of_chunk(text, lambda chunk: 7 - 4 * chunk) == "(7F0;3B1)OVERLAP_F_B"


@pytest.mark.parametrize(
    ("stage", "chunk", "text"),
    [(None, 2, "?2"), (UNKNOWN, 0, "?0"), (UNKNOWN, UNKNOWN, "?0"), (3, 1, "3"), (0, 0, "0")],
)
def test_the_text_of_a_stage_is_its_number_else_its_chunk(stage: int | None, chunk: int, text: str) -> None:
    assert stage_text(stage, chunk) == text


def test_messages_need_not_say_their_chunk() -> None:
    columns = {name: [0] for name in COMMS if name != "chunk"}
    assert make_table(COMMS, columns)["chunk"].tolist() == [UNKNOWN]
    with pytest.raises(KeyError, match="stage"):
        make_table(COMMS, {name: values for name, values in columns.items() if name != "stage"})
