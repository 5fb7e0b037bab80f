"""Types of Chrome-trace events as Kineto writes them, for typed decoding.

    event = { "ph": "X", "cat", "name", "pid", "tid", "ts", "dur", "args": {...} }     complete
          | { "ph": "i" | "I" | "C", "name", "ts", "args": {...} }                     instant or counter
          | { "ph": "M", "name", "pid", "args": {"name" | "labels"} }                  metadata
          | { "ph": any other phase, ... }                                             skipped

Keys may be in any order; others are skipped. Numbers whose digits matter, and ``args``, most of which are never used, stay
undecoded (``Raw``) until needed, so that an unexpected type there does no harm. Flow events (ac2g, fwdbwd: phases s, t, f) are
skipped: correlation ids contain the same information. Formats of which only flows tell what launched what decode them too
(:data:`WITH_FLOWS`).

``[memory]`` instants (profile_memory=True) become :data:`pptrace.model.tables.MEMORY`:

    args = { "Device Type", "Device Id", "Bytes", "Total Allocated", "Total Reserved" }     torch ≥ 1.11
         | { "Device Type", "Device Id", "Bytes" }                                          before

``Device Type`` is c10's: 0 is the host, all others are accelerators.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pandas as pd
from msgspec import Raw, Struct, field

from pptrace.ingest.common.json_texts import LIMIT_NS, Integers, Scalar, nanoseconds
from pptrace.model.tables import MEMORY, Int64, make_table

ABSENT = Raw(b"")


class CallArgs(Struct, frozen=True, gc=False):
    """The ``args`` used of device work and of the calls that launch it."""

    device: Scalar = -1
    stream: Scalar = -1
    correlation: Scalar = -1


class Args(Struct, frozen=True, gc=False):
    """The ``args`` used of communication."""

    collective: Raw = field(default=ABSENT, name="Collective name")
    in_nelems: Raw = field(default=ABSENT, name="In msg nelems")
    out_nelems: Raw = field(default=ABSENT, name="Out msg nelems")
    in_size: Raw = field(default=ABSENT, name="In msg size")
    out_size: Raw = field(default=ABSENT, name="Out msg size")
    in_split: Raw = field(default=ABSENT, name="In split size")
    out_split: Raw = field(default=ABSENT, name="Out split size")
    dtype: Raw = ABSENT
    group_size: Raw = field(default=ABSENT, name="Group size")
    group_id: Raw = field(default=ABSENT, name="Process Group Name")
    group_description: Raw = field(default=ABSENT, name="Process Group Description")
    group_ranks: Raw = field(default=ABSENT, name="Process Group Ranks")
    rank_start: Raw = field(default=ABSENT, name="Global rank start")
    rank_stride: Raw = field(default=ABSENT, name="Global rank stride")
    rank: Raw = field(default=ABSENT, name="Rank")
    src: Raw = field(default=ABSENT, name="Src Rank")
    dst: Raw = field(default=ABSENT, name="Dst Rank")
    seq: Raw = field(default=ABSENT, name="Seq")
    inputs: Raw = field(default=ABSENT, name="Concrete Inputs")
    dims: Raw = field(default=ABSENT, name="Input Dims")
    types: Raw = field(default=ABSENT, name="Input type")


class MemoryArgs(Struct, frozen=True, gc=False):
    """The ``args`` used of a ``[memory]`` event."""

    device_type: Scalar = field(default=None, name="Device Type")
    device_id: Scalar = field(default=None, name="Device Id")
    change: Scalar = field(default=None, name="Bytes")
    allocated: Scalar = field(default=None, name="Total Allocated")
    reserved: Scalar = field(default=None, name="Total Reserved")


class MetadataArgs(Struct, frozen=True, gc=False):
    name: Raw = ABSENT
    labels: Raw = ABSENT


class Complete(Struct, gc=False, tag="X", tag_field="ph"):
    cat: str | None = ""
    name: str | None = ""
    pid: Scalar = -1
    tid: Scalar = -1
    ts: Raw = ABSENT
    dur: Raw = ABSENT
    args: Raw = ABSENT


class Instant(Struct, gc=False, tag="i", tag_field="ph"):
    name: str | None = ""
    pid: Scalar = -1
    ts: Raw = ABSENT
    args: MemoryArgs | None = MemoryArgs()


class Metadata(Struct, gc=False, tag="M", tag_field="ph"):
    name: str | None = ""
    pid: Scalar = -1
    args: MetadataArgs | None = MetadataArgs()
    tid: Scalar = -1


class Begin(Struct, gc=False, tag="B", tag_field="ph"):
    """Begin event, only counted: begin/end pairs are another format."""


class Skipped(Struct, gc=False, tag="s", tag_field="ph"):
    """Flow, async range or object snapshot, not used."""


class FlowStart(Struct, gc=False, tag="s", tag_field="ph"):
    """Begin of an arrow from one event to another, which has the same ``id``."""

    cat: str | None = ""
    id: Scalar = -1
    pid: Scalar = -1
    tid: Scalar = -1
    ts: Raw = ABSENT


class FlowEnd(FlowStart, gc=False, tag="f", tag_field="ph"):
    pass


Event: TypeAlias = Complete | Instant | Metadata | Begin | Skipped | FlowStart


class Decoders(Struct, frozen=True):
    """Decoders of one event and of a list of events, whose fields have any types if ``is_lax``."""

    event: msgspec.json.Decoder[Any]
    events: msgspec.json.Decoder[list[Any]]
    is_lax: bool = False


def _decoders(decoded: Any, skipped_phases: str) -> Decoders:
    """Decoders of some types of events; each further phase of a type, and each that is skipped, needs a type of its own."""
    shape: Any = decoded
    for base, phases in ((Instant, "IC"), (Skipped, skipped_phases)):
        for phase in phases:
            shape |= msgspec.defstruct(
                f"{base.__name__}_{phase}", [], bases=(base,), tag=phase, tag_field="ph", gc=False
            )
    many: Any = list.__class_getitem__(shape)
    return Decoders(msgspec.json.Decoder(shape), msgspec.json.Decoder(many))


_DECODED: Any = Complete | Instant | Metadata | Begin
_SKIPPED = "EtbneNODPRcvVSTpF()="
"""Every other phase of the format but flows."""
WITHOUT_FLOWS = _decoders(_DECODED | Skipped, _SKIPPED + "f")
WITH_FLOWS = _decoders(_DECODED | FlowStart | FlowEnd, _SKIPPED)
SPANS_DECODER: msgspec.json.Decoder[list[Raw]] = msgspec.json.Decoder(list[Raw])
FIELDS_DECODER: msgspec.json.Decoder[dict[str, Raw]] = msgspec.json.Decoder(dict[str, Raw])

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError)
"""Everything that msgspec raises on malformed text."""


_MEMBERS = re.compile(rb'"(?:schemaVersion|deviceProperties|baseTimeNanoseconds|distributedInfo)"\s*:')


def has_kineto_members(start: bytes) -> bool:
    """Return whether a trace has a top-level member that only Kineto writes."""
    return _MEMBERS.search(start) is not None


def value_of(raw: Raw) -> Any:
    """Decode a field; None if it is absent or malformed."""
    if not raw:
        return None
    try:
        return msgspec.json.decode(raw)
    except DECODE_ERRORS:
        return None


def int_of(raw: Raw) -> int:
    """Decode a field with an integer, as number or text; -1 if there is none that fits int64."""
    value = value_of(raw)
    try:
        number = int(value) if isinstance(value, int | float | str) else -1
    except (ValueError, OverflowError):
        return -1
    return number if -(2**63) <= number < 2**63 else -1


def text_of(raw: Raw) -> str:
    value = value_of(raw)
    if value is None:
        return ""
    return value if isinstance(value, str) else str(value)


MEMORY_EVENT = "[memory]"
_HOST = 0
_UNKNOWN = -(2**62)
_MAX_DEVICES = 1024


def memory_columns(instants: Sequence[Instant]) -> Int64:
    """Time and arguments of the memory events of a batch, shape (6, n), as in the file."""
    pairs = [(event.ts, event.args) for event in instants if event.name == MEMORY_EVENT and event.args is not None]
    integers = Integers({None: _UNKNOWN})
    names = ("device_type", "device_id", "change", "allocated", "reserved")
    arguments = (integers([getattr(args, name) for _, args in pairs]) for name in names)
    return np.stack((nanoseconds([ts for ts, _ in pairs]), *arguments))


def memory_table(parts: Sequence[Int64], base_ns: int) -> pd.DataFrame:
    """Memory over time, bytes, rank -1: of all accelerators together where there are any, else of the host.

    Totals of several devices are summed. Traces from before torch 1.11 have only changes: there ``allocated_bytes`` counts from
    the first event and ``reserved_bytes`` is -1.
    """
    columns = np.concatenate([np.zeros((6, 0), dtype=np.int64), *parts], axis=1)
    columns = columns[:, np.abs(columns[0].astype(np.float64) + float(base_ns)) < LIMIT_NS]
    accelerated = columns[:, columns[1] > _HOST]
    if accelerated.shape[1]:
        columns = accelerated
    time, kind, device, change, allocated, reserved = columns[:, np.lexsort(columns[[5, 4, 3, 2, 1, 0]])]
    has_totals = allocated != _UNKNOWN
    if has_totals.any():
        group = (kind[has_totals] * _MAX_DEVICES + device[has_totals]).astype(np.int64)
        time = time[has_totals]
        allocated = _sum_over_groups(allocated[has_totals], group)
        reserved = _sum_over_groups(np.where(reserved[has_totals] == _UNKNOWN, 0, reserved[has_totals]), group)
    else:
        allocated = np.cumsum(np.where(change == _UNKNOWN, 0, change))
        reserved = np.full(len(time), -1)
    rank = np.full(len(time), -1)
    return make_table(
        MEMORY,
        {"rank": rank, "t_ns": time + base_ns, "allocated_bytes": allocated, "reserved_bytes": reserved},
    )


def _sum_over_groups(level: Int64, group: Int64) -> Int64:
    """Sum over groups of the latest level of each, at every row."""
    step = np.zeros_like(level)
    for group_id in np.unique(group):
        rows = group == group_id
        step[rows] = np.diff(level[rows], prepend=0)
    return np.cumsum(step)
