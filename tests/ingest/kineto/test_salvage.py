from __future__ import annotations

import gzip
import json
import random
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pptrace.errors import TraceError
from pptrace.ingest.kineto.salvage import repaired_text
from pptrace.model.traces import Trace
from tests.ingest.conftest import Op, Write
from tests.support.extent import ALL, by_turns
from tests.support.read import read_kineto

KINETO_LAYOUT = """
{
  "schemaVersion": 1,
  "deviceProperties": [
    {
      "id": 0, "name": "NVIDIA A100", "totalGlobalMem": 42297524224
    }
  ],
  "distributedInfo": {"backend": "nccl", "rank": 1, "world_size": 2, "pg_config": [{"pg_name": "0", "ranks": [0, 1]}]},
  "pptrace": {"rank": 1, "plan": {"name": "1f1b"}},
  "displayTimeUnit": "ms",
  "baseTimeNanoseconds": 1711964646000000000,
  "traceEvents": [
  EVENTS
  ],
  "traceName": "trace.json"
}
"""


def in_kineto_layout(num: int) -> bytes:
    """Events as Kineto lays them out: several keys per line, two blanks before each brace."""
    texts = []
    for index in range(num):
        texts.append(
            f"""{{
    "ph": "X", "cat": "cpu_op", "name": "aten::op{index % 7}", "pid": 10, "tid": 11,
    "ts": {4458676522690 + index}.655, "dur": 0.{index % 1000:03d},
    "args": {{
      "External id": {index}, "Input Dims": [[2, 3], []], "Ev Idx": {index}
    }}
  }}"""
        )
        if index % 3 == 0:
            texts.append(f"""{{
    "ph": "s", "id": {index}, "pid": 10, "tid": 11, "ts": {4458676522690 + index}.655, "cat": "ac2g", "name": "ac2g"
  }}""")
            texts.append(f"""{{
    "ph": "X", "cat": "kernel", "name": "void gemm<float, {index % 5}>(float*)", "pid": 0, "tid": 7,
    "ts": {4458676522699 + index}.001, "dur": 5.5,
    "args": {{
      "device": 0, "stream": 7, "correlation": {index + 1}, "grid": [1, 1, 1]
    }}
  }}""")
    return KINETO_LAYOUT.replace("EVENTS", ",\n  ".join(texts)).encode()


def names_of(trace: Trace) -> list[str]:
    return [trace.events.names[code] for code in trace.events.name_id]


def test_truncated_json_keeps_every_whole_event(write: Write) -> None:
    text = in_kineto_layout(3000)
    cut = text.index(b'"aten::op4"', len(text) // 2)
    num = text[:cut].count(b'"ph": "X"') - 1
    trace = read_kineto(write(text[:cut]))
    assert len(trace.events) == num
    assert trace.warnings == (f"trace ends early (cut inside the list of events); kept the {num} events before it",)
    assert (trace.rank, trace.metadata["plan"]) == (1, {"name": "1f1b"})


def test_a_cut_gzip_stream_keeps_every_whole_event(write: Write) -> None:
    packed = gzip.compress(in_kineto_layout(3000))
    half = packed[: len(packed) // 2]
    num = zlib.decompressobj(31).decompress(half).count(b'"ph": "X"')
    trace = read_kineto(write(half))
    assert num - 1 <= len(trace.events) <= num
    assert trace.warnings == (f"trace ends early (gzip stream cut); kept the {len(trace.events)} events before it",)


def test_a_damaged_event_does_not_swallow_the_next(write: Write) -> None:
    texts = [f'{{"ph": "X", "name": "op{index}", "ts": {10 * index}, "dur": 5}}' for index in range(4)]
    texts[1] = texts[1].replace('"ts":', '"ts"')
    trace = read_kineto(write(f"[{', '.join(texts)}]".encode(), "trace.json"))
    assert names_of(trace) == ["op0", "op2", "op3"]
    assert any("left out 1 event that could not be read" in line for line in trace.warnings)


def test_a_damaged_gzip_stream_keeps_what_comes_before(write: Write) -> None:
    packed = bytearray(gzip.compress(in_kineto_layout(3000)))
    middle = len(packed) // 2
    packed[middle : middle + 40] = b"\xff" * 40
    trace = read_kineto(write(bytes(packed)))
    assert 1000 < len(trace.events) < 3500
    assert trace.warnings[0].startswith("trace ends early (gzip stream damaged: ")


def test_a_wrong_gzip_checksum_loses_nothing(write: Write) -> None:
    packed = bytearray(gzip.compress(in_kineto_layout(300)))
    packed[-8] ^= 1
    trace = read_kineto(write(bytes(packed)))
    assert len(trace.events) == 400
    assert "gzip stream damaged" in trace.warnings[0]
    assert "kept all 400 events" in trace.warnings[0]


def test_gzip_members_in_a_row_are_one_file(write: Write) -> None:
    text = in_kineto_layout(300)
    trace = read_kineto(write(gzip.compress(text[:5000]) + gzip.compress(text[5000:]) + bytes(100)))
    assert (len(trace.events), trace.warnings) == (400, ())


@pytest.mark.parametrize("garbage", [b"\n\n{}", b"garbage", b"]}", b"\xff\xfe"])
def test_trailing_garbage_is_ignored_and_said(write: Write, garbage: bytes) -> None:
    text = in_kineto_layout(30)
    trace = read_kineto(write(text + garbage))
    assert len(trace.events) == 40
    assert len(trace.warnings) == 1
    assert trace.warnings[0].startswith("ignored what follows the end of the trace: ")


@pytest.mark.parametrize("garbage", [b"garbage", b"{}", b"\xff\xfe"])
def test_garbage_after_a_gzip_stream_is_ignored_and_said(write: Write, garbage: bytes) -> None:
    trace = read_kineto(write(gzip.compress(in_kineto_layout(30)) + garbage))
    expected = f"ignored what follows the end of the trace: {len(garbage)} bytes after the gzip stream"
    assert (len(trace.events), trace.warnings) == (40, (expected,))


def test_a_cut_after_the_events_keeps_the_facts_that_are_whole(write: Write, op: Op) -> None:
    text = (
        f'{{"traceEvents": {json.dumps([op(), op()])}, "pptrace": {{"rank": 4}}, "distributedInfo": {{"rank": 4, "wor'
    )
    trace = read_kineto(write(text.encode()))
    assert (len(trace.events), trace.rank, trace.distributed) == (2, 4, {})
    assert trace.warnings[0].startswith("trace ends early (cut or damaged after the list of events); kept all 2 events")


DAMAGED_NAMES = [
    (b"void f<\xff\xfe>(int)", "void f<\ufffd\ufffd>(int)"),
    (b"void f<\x01\x02>(int)", "void f<  >(int)"),
    (b"void f\n(int)", "void f (int)"),
    (b"void f\t(int)", "void f (int)"),
    (b'void f<"bar">(int)', 'void f<"bar">(int)'),
    (b'operator"" _s(int)', 'operator"" _s(int)'),
    (b'f("a", "b")', 'f("a", "b")'),
    (b"C:\\work\\model.py", "C:\\work\\model.py"),
    (b"half \\ud800 pair", "half \ufffd pair"),
    (b"whole \\ud83d\\ude00 pair", "whole \U0001f600 pair"),
    (b'quoted \\"text\\"', 'quoted "text"'),
]


@pytest.mark.parametrize(("name", "compact", "place"), by_turns(DAMAGED_NAMES, [False, True], [0, 1, 2]))
def test_damaged_names_cost_no_event(write: Write, op: Op, name: tuple[bytes, str], compact: bool, place: int) -> None:
    damaged, read = name
    content = [op("NAME" if index == place else f"op{index}", index) for index in range(3)]
    layout: dict[str, Any] = {"separators": (",", ":")} if compact else {"indent": 2}
    text = json.dumps({"traceEvents": content, "pptrace": {"rank": 2}}, **layout).encode()
    trace = read_kineto(write(text.replace(b"NAME", damaged)))
    expected = [f"op{index}" for index in range(3)]
    expected[place] = read
    assert names_of(trace) == expected
    assert trace.rank == 2
    harmless = damaged in (b"whole \\ud83d\\ude00 pair", b'quoted \\"text\\"')
    assert [line.startswith("repaired ") for line in trace.warnings] == ([] if harmless else [True])


@pytest.mark.parametrize("number", [b"nan", b"-nan", b"inf", b"NaN", b"-Infinity", b"-nan(ind)"])
def test_bare_numbers_that_json_does_not_know_are_null(write: Write, op: Op, number: bytes) -> None:
    text = json.dumps({"traceEvents": [op(args={"occupancy": "NUMBER"}), op()], "x": "NUMBER"}).encode()
    trace = read_kineto(write(text.replace(b'"NUMBER"', number)))
    assert len(trace.events) == 2


def test_one_broken_event_among_many_is_left_out_alone(write: Write) -> None:
    text = in_kineto_layout(5000)
    index = text.index(b'"aten::op3"', len(text) // 2)
    broken = text[:index] + b"}{ ][" + text[index:]
    trace = read_kineto(write(broken))
    assert len(trace.events) == text.count(b'"ph": "X"') - 1
    assert trace.warnings == ("left out 1 event that could not be read (damaged JSON)",)


def test_a_hole_in_the_middle_loses_only_what_it_swallowed(write: Write) -> None:
    text = in_kineto_layout(5000)
    middle = len(text) // 2
    trace = read_kineto(write(text[:middle] + text[middle + 2000 :]))
    assert len(trace.events) >= text.count(b'"ph": "X"') - 20
    assert trace.rank == 1


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"dur": ...}, 'left out 1 event that has no "dur"; was the profiler stopped early?'),
        ({"dur": None}, 'left out 1 event that has no "dur"; was the profiler stopped early?'),
        ({"ts": ...}, 'left out 1 event that has no "ts"'),
        ({"ts": "soon"}, 'left out 1 event that has no "ts"'),
        ({"dur": -3}, "left out 1 event with a negative duration"),
        ({"dur": 18446744073709551615}, "left out 1 event with an absurd duration"),
        ({"dur": 1e13}, "left out 1 event with an absurd duration"),
        ({"ts": 9.3e18}, "left out 1 event with an absurd time"),
        ({"ts": 0}, "left out 1 event whose time was never set (0)"),
    ],
)
def test_events_with_impossible_times_are_left_out_and_counted(
    write: Write, op: Op, changes: dict[str, Any], line: str
) -> None:
    good = [op(f"op{index}", 1700000000000000 + index) for index in range(3)]
    trace = read_kineto(write([*good[:1], op("bad", **({"ts": 1700000000000009} | changes)), *good[1:]]))
    assert names_of(trace) == ["op0", "op1", "op2"]
    assert trace.warnings == (line,)


def test_a_trace_that_begins_at_zero_keeps_its_first_event(write: Write, op: Op) -> None:
    trace = read_kineto(write([op(ts=0), op(ts=1000), op(ts=-5)]))
    assert trace.events.start_ns.tolist() == [-5000, 0, 1_000_000]
    assert trace.warnings == ()


def test_zero_durations_and_overlaps_on_a_stream_are_kept(write: Write, op: Op) -> None:
    content = [
        op(cat="kernel", ts=ts, dur=dur, args={"device": 0, "stream": 7}) for ts, dur in ((1, 0), (1, 5), (2, 9))
    ]
    assert read_kineto(write(content)).events.dur_ns.tolist() == [5000, 0, 9000]


def test_an_event_with_a_huge_argument_is_read(write: Write, op: Op) -> None:
    content = [op(ts=1), op(ts=2, args={"stack": "x" * 3_000_000, "list": [{"a": 1}] * 50_000}), op(ts=3)]
    trace = read_kineto(write(content))
    assert (len(trace.events), trace.warnings) == (3, ())


def test_deep_nesting_is_no_crash(write: Write, op: Op) -> None:
    text = json.dumps({"traceEvents": [op("a", 1), op("b", 2, args={"deep": "DEEP"}), op("c", 3)]}).encode()
    trace = read_kineto(write(text.replace(b'"DEEP"', b"[" * 200_000 + b"]" * 200_000)))
    assert {"a", "c"} <= set(names_of(trace))


def test_facts_in_the_file_that_look_like_events_do_not_mislead(write: Write, op: Op) -> None:
    decoy = {"note": '"traceEvents": [', "inner": {"traceEvents": [{"ph": "X"}]}}
    trace = read_kineto(write([op(), op()], before={"first": decoy, "pptrace": {"rank": 6}}, after={"last": decoy}))
    assert (len(trace.events), trace.rank, trace.warnings) == (2, 6, ())


@given(st.binary(max_size=200))
def test_cleaning_twice_changes_nothing(text: bytes) -> None:
    once, _ = repaired_text(text)
    assert repaired_text(once) == (once, 0)


def read_whatever(path: Path) -> Trace | None:
    """The trace, or None where it is a trace no more; anything but a TraceError of one line fails the test."""
    try:
        trace = read_kineto(path)
    except TraceError as err:
        message = str(err)
    else:
        message = ""
    assert "\n" not in message
    if message:
        return None
    assert len(trace.events) > 0
    assert (np.diff(trace.events.start_ns) >= 0).all()
    assert (trace.events.dur_ns >= 0).all()
    assert all("\n" not in line for line in trace.warnings)
    return trace


def mutate(text: bytes, rng: random.Random) -> bytes:
    mutated = bytearray(text)
    for _ in range(rng.choice((1, 1, 2, 5, 40))):
        index = rng.randrange(len(mutated) + 1)
        length = rng.choice((1, 1, 2, 8, 64, 700))
        kind = rng.randrange(6)
        if kind == 0:
            del mutated[index:]
        elif kind == 1:
            mutated[index : index + 1] = bytes([rng.randrange(256)])
        elif kind == 2:
            mutated[index:index] = mutated[index : index + length]
        elif kind == 3:
            del mutated[index : index + length]
        elif kind == 4:
            mutated[index:index] = rng.choice([*map(str.encode, '"\\{}[],:\n\0'), b"null", b"1e999"])
        else:
            other = rng.randrange(len(mutated) + 1)
            mutated[index : index + length] = mutated[other : other + length]
        if not mutated:
            break
    return bytes(mutated)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("packed", [False, True])
def test_no_mutation_of_a_trace_raises_anything_else(write: Write, seed: int, packed: bool) -> None:
    rng = random.Random(seed)
    text = in_kineto_layout(12)
    compact = json.dumps(json.loads(text), separators=(",", ":")).encode()
    read = 0
    for _ in range(60 if ALL else 25):
        content = rng.choice((text, compact))
        damaged = mutate(gzip.compress(content) if packed else content, rng)
        read += read_whatever(write(damaged)) is not None
    assert read > 0


@settings(max_examples=150 if ALL else 40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=4), st.lists, max_leaves=4)
)
def test_no_value_in_any_field_raises_anything_else(write: Write, op: Op, value: Any) -> None:
    fields = ["ph", "cat", "name", "pid", "tid", "ts", "dur", "args"]
    keys = ["device", "stream", "correlation", "Collective name", "In msg nelems", "dtype", "Group size"]
    content = [op(**{field: value}) for field in fields]
    content += [op(args={key: value}) for key in (*keys, "Process Group Ranks")]
    content += [op(cat="kernel", args=value), op("c10d::send", args={"Concrete Inputs": value})]
    facts = ("pptrace", "distributedInfo", "baseTimeNanoseconds", "schemaVersion", "hip_runtime_version")
    members = dict.fromkeys(facts, value)
    info = {"rank": value, "pg_config": [value, {"pg_name": value, "ranks": value}]}
    nested = {"pptrace": {"rank": value, "versions": value}, "distributedInfo": info}
    for before in ({}, members, nested):
        trace = read_whatever(write(content, before=before))
        assert len(trace.events) >= 10


def test_cutting_a_trace_anywhere_keeps_all_events_before_the_cut(write: Write) -> None:
    text = in_kineto_layout(6)
    first_end = text.index(b"  },\n  {", text.index(b'"traceEvents"')) + 3
    for cut in range(first_end, len(text), 7):
        trace = read_whatever(write(text[:cut]))
        begun = text[:cut].split(b"\n  {\n")[1:]
        assert len(trace.events) == sum(b'"ph": "X"' in event and b"\n  }" in event for event in begun)
