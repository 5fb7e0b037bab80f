"""Damage of every kind to real and made-up files: a report or one clear error, soon, and nothing else.

The suite makes a few hundred changes, the same ones each time. With PPTRACE_ALL
set, new ones for a minute, or for as many seconds as ``PPTRACE_FUZZ_S`` says.
"""

from __future__ import annotations

import gzip
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from pptrace.errors import PptraceError
from pptrace.report.to_json import dump, report_object
from pptrace.workflow.load import load
from tests.ingest.kineto.test_salvage import in_kineto_layout
from tests.support.extent import ALL
from tests.support.programs import SAMPLES

SECONDS = float(os.environ.get("PPTRACE_FUZZ_S", "60" if ALL else "0"))
LIMIT_S = 60.0
"""Of processor time for one file that takes well under a second when whole."""
SEEDS = range(40 if ALL else 16)
"""Changes to the files of one format."""
_MOST_BYTES = 400_000 if SECONDS else 100_000
_NUMBER = re.compile(rb"\d+")

Change = Callable[[bytes, random.Random], bytes]


def truncated(text: bytes, rng: random.Random) -> bytes:
    return text[: rng.randrange(len(text))]


def flipped(text: bytes, rng: random.Random) -> bytes:
    changed = bytearray(text)
    for _ in range(rng.choice([1, 1, 3, 30, 300])):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def overwritten(text: bytes, rng: random.Random) -> bytes:
    size = min(len(text), rng.choice([1, 16, 512, 5000]))
    index = rng.randrange(len(text) - size + 1)
    filler = rng.choice([bytes(size), b"\xff" * size, rng.randbytes(size), b'"' * size, b"{" * size, b"[" * size])
    return text[:index] + filler + text[index + size :]


def _cuts(text: bytes, rng: random.Random) -> tuple[int, int, int]:
    first, second, third = sorted(rng.randrange(len(text) + 1) for _ in range(3))
    return first, second, third


def doubled(text: bytes, rng: random.Random) -> bytes:
    first, second, _ = _cuts(text, rng)
    return text[:second] + text[first:]


def removed(text: bytes, rng: random.Random) -> bytes:
    first, second, _ = _cuts(text, rng)
    return text[:first] + text[second:]


def reordered(text: bytes, rng: random.Random) -> bytes:
    first, second, third = _cuts(text, rng)
    return text[:first] + text[second:third] + text[first:second] + text[third:]


def odd_numbers(text: bytes, rng: random.Random) -> bytes:
    """Other numbers, many of them beyond every range, in a few places."""
    odd = [b"0", b"-1", b"1e400", b"9" * 30, b"-9223372036854775808", b"1e-400", b"NaN", b'"7"', b"null", b"[]"]
    indices = {rng.randrange(len(text)) for _ in range(20)}
    pieces, done = [], 0
    for index in sorted(indices):
        match = _NUMBER.search(text, max(index, done), index + 5000)
        if match:
            pieces += [text[done : match.start()], rng.choice(odd)]
            done = match.end()
    return b"".join([*pieces, text[done:]])


CHANGES: Sequence[Change] = (truncated, flipped, overwritten, doubled, removed, reordered, odd_numbers)


def sources(data: Path | None) -> Iterator[tuple[str, bytes]]:
    """Whole files, (name, content): JSON as text, and as gzip where the damage is to be in the compression."""
    made_up = in_kineto_layout(300)
    yield "made-up.json", made_up
    yield "made-up.json.gz", gzip.compress(made_up)
    sample = gzip.decompress((SAMPLES / "1f1b_p2" / "rank0.json.gz").read_bytes())
    yield "rank0.json", _shortened(sample)
    if data is None:
        return
    for path in sorted(path for path in data.rglob("*") if path.is_file()):
        if path.name.endswith(".json.gz"):
            text = _shortened(gzip.decompress(path.read_bytes()))
            yield path.name.removesuffix(".gz"), text
            yield path.name, gzip.compress(text)
        elif path.suffix == ".json":
            yield path.name, _shortened(path.read_bytes())
        elif path.stat().st_size <= _MOST_BYTES or (SECONDS and path.suffix == ".sqlite"):
            yield path.name, path.read_bytes()


def _shortened(text: bytes) -> bytes:
    """The head of a long trace, its events and its tail, as a shorter file of the same layout."""
    if len(text) <= _MOST_BYTES:
        return text
    cut = text.rfind(b"\n  {", 0, _MOST_BYTES)
    last = text.rfind(b"\n  {")
    return text[:cut] + text[last:] if 0 <= cut < last else text[:_MOST_BYTES]


def check(name: str, content: bytes, folder: Path) -> None:
    """The file gives a report that can be written, or an error of ours in one line, in good time."""
    path = folder / name
    path.write_bytes(content)
    begin = time.process_time()
    try:
        dump(report_object(load([path], cache=False).report, True))
    except PptraceError as err:
        if len(str(err).strip().splitlines()) != 1:
            raise AssertionError(f"an error is not one line: {err}") from err
    finally:
        path.unlink()
    assert time.process_time() - begin < LIMIT_S


def run(originals: Sequence[tuple[str, bytes]], seeds: Sequence[int], folder: Path) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        name, content = originals[seed % len(originals)]
        changed, changes = content, []
        for _ in range(rng.choice([1, 1, 2, 4])):
            change = rng.choice(CHANGES)
            changed = change(changed, rng) or b" "
            changes.append(change.__name__)
        try:
            check(name, changed, folder)
        except Exception as err:
            kept = folder / f"seed{seed}-{name}"
            kept.write_bytes(changed)
            raise AssertionError(f"seed {seed}: {name} after {', '.join(changes)}; kept as {kept}") from err


@pytest.fixture(scope="module")
def originals() -> list[tuple[str, bytes]]:
    data = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    return list(sources(data if data.is_dir() else None))


def test_whole_files_can_be_read_or_are_refused_in_one_line(originals: list[tuple[str, bytes]], tmp_path: Path) -> None:
    for name, content in originals:
        if SECONDS or not name.endswith(".parquet"):  # seconds for its many steps; op_tables/test_reader.py reads it
            check(name, content, tmp_path)


@pytest.mark.parametrize("part", range(4))
def test_damaged_files_give_a_report_or_one_error(
    originals: list[tuple[str, bytes]], tmp_path: Path, part: int
) -> None:
    run(originals, range(part, 60, 4), tmp_path)


@pytest.mark.skipif(not SECONDS, reason="neither PPTRACE_ALL nor PPTRACE_FUZZ_S is set")
def test_new_damage_for_as_long_as_is_asked(originals: list[tuple[str, bytes]], tmp_path: Path) -> None:
    end = time.monotonic() + SECONDS
    first = seed = random.SystemRandom().randrange(2**40)
    while time.monotonic() < end:
        run(originals, [seed], tmp_path)
        seed += 1
    print(f"{seed - first} files from seed {first}")


def test_salvage_is_counted_in_the_report(tmp_path: Path) -> None:
    text = in_kineto_layout(300)
    whole = text.count(b'"ph": "X"')
    path = tmp_path / "rank1.json"
    middle = text.index(b"{\n", len(text) // 2)
    path.write_bytes(text[:middle] + b"?" * 5 + text[middle + 5 : -700])
    (entry,) = report_object(load([path], cache=False).report, False)["inputs"]
    lost = int(re.search(r"left out (\d+) event", " ".join(entry["warnings"]))[1])
    assert 0 < lost < 5
    assert whole - 10 < entry["num_events"] + lost <= whole
    assert any("ends early" in line for line in entry["warnings"])
