"""The frames of a live file: appended whole, so that a file that was cut loses nothing but what was being written.

file   = { frame }
frame  = "ppl1" length:u32 crc32:u32 body        little endian; the checksum is that of the body
body   = kind:u8 …
kind   = "F" facts, JSON under zlib; those of the last such frame count
       | "P" program: number:u16, JSON list of range names under zlib
       | "S" step (:mod:`pptrace.live_records.codec`)
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO

SUFFIX = ".live"
MAGIC = b"ppl1"
FACTS, PROGRAM, STEP = b"F", b"P", b"S"
_HEAD = struct.Struct("<4sII")
HEAD_BYTES = _HEAD.size


def frame(kind: bytes, content: bytes) -> bytes:
    """One frame."""
    body = kind + content
    return _HEAD.pack(MAGIC, len(body), zlib.crc32(body)) + body


def frames(file: BinaryIO, end: int) -> Iterator[tuple[bytes, bytes, int]]:
    """Yield kind, content and end of each whole frame from the place of ``file`` up to ``end``, until one is cut or damaged."""
    while True:
        head = file.read(HEAD_BYTES)
        if len(head) < HEAD_BYTES:
            return
        magic, length, checksum = _HEAD.unpack(head)
        if magic != MAGIC or length == 0 or file.tell() + length > end:
            return
        body = file.read(length)
        if zlib.crc32(body) != checksum:
            return
        yield body[:1], body[1:], file.tell()
