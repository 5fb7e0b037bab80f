"""Packed files that unpack to far more than a trace are refused before they keep anybody waiting."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from pptrace.errors import TraceError
from pptrace.ingest.common.byte_source import ByteSource
from pptrace.ingest.op_tables.files import read_frame
from pptrace.live_records.codec import inflate
from tests.support.read import read_kineto

_PIECE = b" " * 2**20


@cache
def _spaces(num_pieces: int) -> bytes:
    """A gzip member of spaces, MiB."""
    packer = zlib.compressobj(9, wbits=31)
    return b"".join([packer.compress(_PIECE) for _ in range(num_pieces)]) + packer.flush()


def _packed(path: Path, start: bytes, num_pieces: int) -> Path:
    """A gzip file of a text that ends with spaces, MiB."""
    path.write_bytes(gzip.compress(start) + _spaces(num_pieces))
    return path


@pytest.mark.parametrize("read", [read_kineto, read_frame])
@pytest.mark.parametrize("start", [b"", b'{"traceEvents": ['])
def test_spaces_without_end_are_refused(start: bytes, read: Callable[[Path], object], tmp_path: Path) -> None:
    path = _packed(tmp_path / "rank0.json.gz", start, 128)
    assert path.stat().st_size < 2**18
    with pytest.raises(
        TraceError, match=r"bytes of gzip unpack to more than .* at most 500 times as many; if it is"
    ) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    unpacked = int(str(caught.value).split("more than ")[1].split(";")[0].replace(",", ""))
    assert unpacked < 2**26 + 2**22, "it is not read to its end"


def test_small_files_may_be_packed_densely(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": []}).encode()
    with ByteSource(_packed(tmp_path / "rank0.json.gz", text, 32)) as source:
        assert sum(map(len, iter(source.read, b""))) == len(text) + 32 * len(_PIECE)
    assert source.damage == ""


def test_a_live_record_unpacks_to_what_it_may_hold() -> None:
    packed = zlib.compress(_PIECE)
    assert inflate(packed, len(_PIECE)) == _PIECE
    with pytest.raises(ValueError, match="a record that is cut or has more than 1000 bytes"):
        inflate(packed, 1000)
    with pytest.raises(ValueError, match="cut"):
        inflate(packed[:-9], len(_PIECE))
