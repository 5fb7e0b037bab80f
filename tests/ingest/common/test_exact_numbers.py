from __future__ import annotations

import gzip
import json
from decimal import ROUND_HALF_EVEN, Context, Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pptrace.ingest.common.json_texts import ABSURD, LIMIT_NS, MISSING, Integers, nanoseconds
from tests.support.extent import ALL
from tests.support.read import read_kineto

REAL = [
    "hta/ns_resolution_trace/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz",
    "hta/nccl_parser_config/nccl_data.json.gz",
    "hta/cpu_only/rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz",
    "hta/distributed_info_unavailable/distributed_info_not_found.json.gz",
    "kineto_tb_plugin/worker0.1623143089861.pt.trace.json.gz",
    "tracelens/mi300_Qwen1.5-0.5B.json.gz",
]


def to_ns(value: Any) -> int:
    wide = Context(prec=100)
    return int(Decimal(value).scaleb(3, wide).to_integral_value(ROUND_HALF_EVEN, wide))


@pytest.mark.parametrize("name", REAL if ALL else REAL[::2])
def test_every_time_in_a_real_file_equals_its_decimal_digits(data: Path, name: str) -> None:
    document = json.loads(gzip.decompress((data / name).read_bytes()), parse_float=Decimal)
    base = document.get("baseTimeNanoseconds", 0)
    expected = sorted(
        (to_ns(event["ts"]) + base, to_ns(event["dur"]), event["name"])
        for event in document["traceEvents"]
        if event["ph"] == "X"
    )
    events = read_kineto(data / name).events
    names = [events.names[code] for code in events.name_id]
    assert sorted(zip(events.start_ns.tolist(), events.dur_ns.tolist(), names, strict=True)) == expected


@given(st.lists(st.decimals(min_value=-(10**15), max_value=4 * 10**15 - 1, allow_nan=False, places=3), min_size=1))
def test_three_decimals_are_exact_at_any_size(values: list[Decimal]) -> None:
    texts = [format(value, "f").encode() for value in values]
    assert nanoseconds(texts).tolist() == [to_ns(value) for value in values]


@given(st.lists(st.decimals(min_value=-(10**15), max_value=10**15, allow_nan=False, allow_infinity=False), min_size=1))
def test_any_number_of_decimals_rounds_half_to_even(values: list[Decimal]) -> None:
    texts = [str(value).encode() for value in values]
    assert nanoseconds(texts).tolist() == [to_ns(value) for value in values]


@given(st.lists(st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False)), min_size=1))
def test_numbers_of_any_size_are_exact_or_absurd(values: list[int | float]) -> None:
    texts = [json.dumps(value).encode() for value in values]
    expected = [to_ns(text.decode()) for text in texts]
    for got, want in zip(nanoseconds(texts).tolist(), expected, strict=True):
        assert got == want if abs(want) <= LIMIT_NS else got == ABSURD


@given(st.lists(st.text(alphabet='0123456789.-+eE"n,x ', max_size=24).map(str.encode), min_size=1))
def test_any_text_gives_one_number_or_a_mark_of_none(texts: list[bytes]) -> None:
    result = nanoseconds(texts)
    assert len(result) == len(texts)
    assert ((np.abs(result) <= LIMIT_NS) | (result == MISSING) | (result == ABSURD)).all()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"0.5", 500),
        (b"-0.001", -1),
        (b"0.0005", 0),
        (b"0.0015", 2),
        (b"1e3", 1_000_000),
        (b"1.5E-3", 2),
        (b'"1711964646123456.789"', 1711964646123456789),
        (b"1623142623460111", 1623142623460111000),
        (b"null", MISSING),
        (b"true", MISSING),
        (b'""', MISSING),
        (b'"1,2"', MISSING),
        (b"", MISSING),
        (b"[1]", MISSING),
        (b"18446744073709551615", ABSURD),
        (b"-9999999999999999999", ABSURD),
        (b"9999999999999999.999", ABSURD),
        (b"1e400", ABSURD),
        (b"1e99999999999999999999", MISSING),
    ],
)
def test_odd_numbers_among_plain_ones_are_read_alone(text: bytes, expected: int) -> None:
    assert nanoseconds([b"1.25", text, b'"2"']).tolist() == [1250, expected, 2000]


def test_ids_are_read_from_numbers_digits_and_labels() -> None:
    values = [7, "7", "stream 7", "Spans", None, 7.0, 2.5, 2**70, "", "pid 1 tid 12"]
    assert Integers()(values).tolist() == [7, 7, 7, -1, -1, 7, -1, -1, -1, 12]
