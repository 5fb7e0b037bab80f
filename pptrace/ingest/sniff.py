"""Beginnings of files of the formats whose readers are imported for such a file alone (:func:`pptrace.ingest.formats.on_use`)."""

from __future__ import annotations

import re
from pathlib import Path

from pptrace.ingest.common.byte_source import ByteSource
from pptrace.ingest.common.json_texts import opens_json
from pptrace.ingest.kineto.event_types import has_kineto_members

XPLANE_SUFFIX = ".xplane.pb"
_PLANE = re.compile(
    rb"\n[\x80-\xff]{0,9}[\x00-\x7f](?:\x08[\x80-\xff]{0,9}[\x00-\x7f])?\x12.(?:/(?:host|device):|Task Environment)",
    re.DOTALL,
)
_TEXT_TIME = re.compile(rb'"ts"\s*:\s*"\d')
_ASCEND = re.compile(
    rb'"(?:Fwd thread id|Physic Stream Id|Python parent id|connection_id)"\s*:|"(?:Ascend Hardware|CANN|torch_to_npu)"'
    rb'|"cat"\s*:\s*"(?:enqueue|dequeue|async_npu|HostToDevice)"'
)
_PAIR = re.compile(rb'"ph"\s*:\s*"[BE]"')
_IDS = re.compile(
    rb'"(?:rel_ts|mb_id|microbatch|micro_batch_index|microbatch_id|seq_id)"\s*:|"rank"\s*:\s*\d+\s*,\s*"step"\s*:'
)
_SPANS = re.compile(
    rb'"(?:resourceSpans|scopeSpans|startTimeUnixNano)"\s*:|"context"\s*:\s*\{[^{}]*"trace_id"\s*:'  # exported, printed
)
_INSPECTOR = re.compile(rb'"(?:coll_perf|p2p_perf|inspector_output_format_version)"\s*:')


def sniff_xplane(start: bytes) -> bool:
    """Return whether a file begins with a plane of a host or a device."""
    return _PLANE.match(start) is not None


def sniff_ascend(start: bytes) -> bool:
    """Return whether a file begins as the Ascend profiler writes: times are text, and names that only it has."""
    has_names = opens_json(start) and _TEXT_TIME.search(start) is not None and _ASCEND.search(start) is not None
    return has_names and not has_kineto_members(start)


def sniff_chrome(start: bytes) -> bool:
    """Return whether a file has begin/end events or ids of microbatches or steps, which Kineto's never have."""
    has_events = opens_json(start) and b'"ph"' in start
    return has_events and (_PAIR.search(start) or _IDS.search(start)) is not None and not has_kineto_members(start)


def has_pairs(path: Path) -> bool:
    """Return whether a file that is not Kineto's contains a begin or end event."""
    overlap = b""
    with ByteSource(path) as source:
        while piece := source.read():
            text = overlap + piece
            if has_kineto_members(text):
                return False
            if _PAIR.search(text):
                return True
            overlap = text[-64:]
    return False


def sniff_otlp(start: bytes) -> bool:
    """Return whether a file that begins with these (decompressed) bytes holds OpenTelemetry spans."""
    return _SPANS.search(start) is not None


def sniff_nccl_inspector(start: bytes) -> bool:
    """Return whether a file that begins with these (decompressed) bytes was written by NCCL's Inspector."""
    return _INSPECTOR.search(start) is not None and b'"header"' in start
