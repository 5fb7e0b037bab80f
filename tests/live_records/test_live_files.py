"""Live files: round trips, size, cut and damaged files."""

from __future__ import annotations

import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pptrace.live_records.codec import KEY_EVERY, MOST_BYTES, Decoder, Encoder, Flag, StepHead, encode_bounds
from pptrace.live_records.file import MOST_PROGRAMS, LiveFile, LiveWriter, live_files
from pptrace.live_records.frames import FACTS, PROGRAM, STEP, frame, frames


def _frames(data: bytes) -> list[tuple[bytes, bytes, int]]:
    return list(frames(BytesIO(data), len(data)))


def _ranges(generator: np.random.Generator, num: int, scale_ns: float = 2e6) -> tuple[list[int], list[int]]:
    """Consecutive ranges of about ``scale_ns``, ns after an origin."""
    lengths = generator.lognormal(np.log(scale_ns), 0.3, num).astype(np.int64)
    gaps = generator.exponential(scale_ns / 10, num).astype(np.int64)
    ends = np.cumsum(lengths + gaps)
    return (ends - lengths).tolist(), ends.tolist()


def _write(path: Path, steps: int, num: int = 40) -> list[tuple[list[int], list[int]]]:
    writer, generator, written = LiveWriter(path), np.random.default_rng(3), []
    writer.facts({"rank": 0})
    program = writer.program([f"pp1:{i}F0 chunk=0 step=0" for i in range(num)])
    assert program is not None
    for step in range(steps):
        begin = 10**12 + step * 10**9
        begins, ends = _ranges(generator, num)
        begins, ends = [begin + ns for ns in begins], [begin + ns for ns in ends]
        writer.step(StepHead(step, Flag.OBSERVED, begin, ends[-1] - begin), program, begins, ends)
        written.append((begins, ends))
    writer.close()
    return written


@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_times_come_back_within_a_quantum_and_in_their_order(seed: int, num: int, steps: int) -> None:
    generator, encoder, decoder = np.random.default_rng(seed), Encoder(), Decoder()
    for step in range(steps):
        begins, ends = _ranges(generator, num, 10.0 ** generator.uniform(3, 9))
        head = StepHead(step, Flag.OBSERVED, 5 * 10**12, ends[-1])
        ((_, content, _),) = _frames(
            encoder.encode(head, 0, [5 * 10**12 + b for b in begins], [5 * 10**12 + e for e in ends])
        )
        decoder.programs[0] = ("",) * num
        record = decoder.decode(content)
        assert record.head.dur_ns == ends[-1]
        for read, true in ((record.begin_ns, begins), (record.end_ns, ends)):
            error = np.asarray(true) + 5 * 10**12 - read
            assert (error >= 0).all()
            assert (error < record.quantum_ns).all()
        assert (record.begin_ns <= record.end_ns).all()


@pytest.mark.parametrize("num", [10, 300, 20_000])
def test_a_record_has_at_most_4_kb_however_long_the_plan(num: int) -> None:
    generator, encoder, decoder = np.random.default_rng(1), Encoder(), Decoder()
    for step in range(4):
        begins, ends = _ranges(generator, num)
        data = encoder.encode(StepHead(step, Flag.OBSERVED, 0, ends[-1]), 0, begins, ends)
        assert len(data) <= MOST_BYTES
        ((_, content, _),) = _frames(data)
        decoder.programs[0] = ("",) * num
        record = decoder.decode(content)
        assert np.abs(record.end_ns - ends).max() < record.quantum_ns
        assert record.quantum_ns in [1000 * 2**power for power in range(24)]


def test_what_is_expected_costs_less_than_what_is_new() -> None:
    """Equal steps but for some µs: a deviation takes a fraction of the times themselves."""
    generator, encoder = np.random.default_rng(5), Encoder()
    base, ends = _ranges(generator, 400)
    sizes = []
    for step in range(8):
        moved = generator.integers(0, 3000, 400)
        sizes.append(
            len(encoder.encode(StepHead(step, Flag.OBSERVED, 0, 1), 0, base, (np.asarray(ends) + moved).tolist()))
        )
    assert sizes[-1] < 0.5 * sizes[0]


def test_a_half_written_record_loses_nothing_before_it(tmp_path: Path) -> None:
    path, cut = tmp_path / "rank0.live", tmp_path / "rank1.live"
    _write(path, 5)
    data = path.read_bytes()
    ends = [end for _, _, end in _frames(data)]
    for size in [*range(ends[-2], ends[-1]), ends[1] + 3]:
        cut.write_bytes(data[:size])
        steps = list(LiveFile(cut).poll())
        assert [step.head.step for step in steps] == list(range(4 if size >= ends[-2] else 0))


def test_a_file_is_followed_as_it_grows(tmp_path: Path) -> None:
    path, growing = tmp_path / "rank0.live", tmp_path / "rank3.live"
    written = _write(path, 6)
    data = path.read_bytes()
    growing.write_bytes(b"")
    follower, seen = LiveFile(growing), []
    for start in range(0, len(data), 97):
        with growing.open("ab") as file:
            file.write(data[start : start + 97])
        seen += follower.poll()
    assert [step.head.step for step in seen] == list(range(6))
    assert follower.facts == {"rank": 0}
    assert np.abs(seen[-1].end_ns - written[-1][1]).max() < 1000


def test_a_reader_that_comes_late_decodes_from_a_key_record_on(tmp_path: Path) -> None:
    path = tmp_path / "rank0.live"
    written = _write(path, 2 * KEY_EVERY + 10)
    steps = list(LiveFile(path, last=5).poll())
    assert steps[0].head.step == 2 * KEY_EVERY
    for step in steps:
        assert np.abs(step.end_ns - written[step.head.step][1]).max() < step.quantum_ns


def test_damage_in_the_middle_ends_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rank0.live"
    _write(path, 6)
    data = bytearray(path.read_bytes())
    ends = [end for _, _, end in _frames(bytes(data))]
    data[ends[3] + 40] ^= 0xFF
    path.write_bytes(data)
    assert [step.head.step for step in LiveFile(path).poll()] == [0, 1]


@pytest.mark.parametrize(
    "content",
    [
        frame(PROGRAM, (1).to_bytes(2, "little") + zlib.compress(b"5")),
        frame(FACTS, zlib.compress(b"[" * 100_000)),
        frame(FACTS, b"no zlib"),
        frame(STEP, b"\0"),
        Encoder().encode(StepHead(9, Flag.OBSERVED, 0, 1), 9, [0], [1]),
        frame(b"?", b"of a later version"),
    ],
    ids=["program", "deep facts", "packed facts", "short step", "unknown program", "unknown kind"],
)
def test_a_frame_that_this_version_does_not_write_is_left_out(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rank0.live"
    _write(path, 2)
    data = path.read_bytes()
    path.write_bytes(data + content + encode_bounds(StepHead(2, Flag(0), 0, 1)))
    for last in (None, 1):
        assert [step.head.step for step in LiveFile(path, last).poll()][-1:] == [2]
    assert [step.head.step for step in LiveFile(path).poll()][:2] == [0, 1]


def test_orders_of_ranges_beyond_the_most_have_no_program(tmp_path: Path) -> None:
    writer = LiveWriter(tmp_path / "rank0.live")
    numbers = [writer.program([f"range {index}"]) for index in range(MOST_PROGRAMS + 1)]
    writer.close()
    assert numbers == [*range(MOST_PROGRAMS), None]


def test_files_of_a_run_are_found_by_rank(tmp_path: Path) -> None:
    for name in ("rank10.live", "rank2.live", "rank2.json.gz", "rankX.live"):
        (tmp_path / name).write_bytes(b"")
    assert list(live_files(tmp_path)) == [2, 10]
