"""Beginnings of files, by which each format is known. Each function sees the first decompressed bytes of a file.

Some files are read together with another one, or hold the same recording in another form: companions.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path

from pptrace.ingest.common.byte_source import ByteSource
from pptrace.ingest.common.json_texts import opens_json
from pptrace.ingest.kineto.event_stream import EXECUTION_TRACE
from pptrace.ingest.kineto.event_types import has_kineto_members
from pptrace.nsys import RECORDED_SUFFIXES

PARQUET_MAGIC = b"PAR1"
DELIMITERS = ",;\t"
HEADER_BYTES = 16 * 1024
_KIND = frozenset({"kind", "optype"})
_TIME = frozenset({"start_ns", "start_us", "start_ms", "start_s", "start_ts"})
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
_SCHEMA = re.compile(rb'^\s*\{\s*"schema"\s*:\s*"pptrace\.(?:simulation|report)/1"')


_ARCHIVES = {
    b"PK\x03\x04": "zip",
    b"7z\xbc\xaf\x27\x1c": "7z",
    b"Rar!\x1a\x07": "rar",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ\x00": "xz",
    b"BZh": "bzip2",
}
_OTHERS = (
    (
        re.compile(rb"\x80[\x02-\x05].{0,32}?segments", re.DOTALL),
        "a snapshot of torch's memory, without the times of what ran; expected torch.profiler's trace of the same run",
    ),
    (re.compile(rb".{0,32}?schema.{0,8}-chakra", re.DOTALL), EXECUTION_TRACE),
)
"""Beginnings of other tools' files that are no JSON, and what to give in their place."""
_NPU_LANE = b'"Ascend Hardware"'
_TORCH = re.compile(rb'"(?:cpu_op|enqueue|python_function|traceEvents)"')
_EARLY_MSPROF = (
    "a timeline of msprof in an earlier form, which does not tell which tasks are parts of collectives; expected the "
    "trace_view.json of torch_npu.profiler, or what msprof exports with a newer CANN"
)
_TAR_OFFSET, _TAR_MAGIC = 257, b"ustar"
_TRACE_KEY = re.compile(rb'"(?:traceEvents|schemaVersion|deviceProperties|baseTimeNanoseconds)"\s*:|"ph"\s*:\s*"')


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


def sniff_kineto(start: bytes) -> bool:
    return opens_json(start) and _TRACE_KEY.search(start) is not None and not _is_early_msprof(start)


def _is_early_msprof(start: bytes) -> bool:
    """Return whether a file begins as msprof wrote before times were text: tasks of a device, and nothing of torch."""
    return _NPU_LANE in start and _TEXT_TIME.search(start) is None and _TORCH.search(start) is None


def sniff_flight(start: bytes) -> bool:
    has_dump_keys = b"pg_config" in start or b"profiling_name" in start
    is_json = start.lstrip()[:1] == b"{" and b'"traceEvents"' not in start and b'"distributedInfo"' not in start
    is_pickle = start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")
    return has_dump_keys and (is_pickle or (is_json and (b'"entries"' in start or b'"pg_status"' in start)))


def sniff_primus(start: bytes) -> bool:
    return start.lstrip()[:1] == b"{" and b'"fwd_start"' in start and b'"bwd_start"' in start


def sniff_table(start: bytes) -> bool:
    """Return whether a file that begins with these (decompressed) bytes is a table of ops."""
    return start.startswith(PARQUET_MAGIC) or bool(header_of(start)) or sniff_rows(start)


def header_of(start: bytes) -> tuple[str, ...]:
    """The column names of a CSV file that begins with these bytes; () if its first line is no header of an op table."""
    first = start[:HEADER_BYTES].removeprefix(b"\xef\xbb\xbf").split(b"\n", 1)[0]
    line = first.decode("utf-8", "replace").strip("\r")
    for delimiter in DELIMITERS:
        try:
            names = tuple(name.strip() for name in next(csv.reader([line], delimiter=delimiter), []))
        except csv.Error:  # not text
            return ()
        if _KIND & set(names) and (_TIME & set(names) or "rank" in names):
            return names
    return ()


def sniff_rows(start: bytes) -> bool:
    """Return whether a file that begins with these bytes is a table in JSON: a list of rows, or a row per line."""
    if not any(f'"{name}"'.encode() in start for name in _KIND):
        return False
    text = start.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "replace").lstrip()
    text = text.removeprefix("[").lstrip()
    if not text.startswith("{"):
        return False
    try:
        row, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):  # longer than one row, or no JSON
        return False
    return bool(_KIND & set(row) and _TIME & set(row)) and not any(
        isinstance(cell, list | dict) for cell in row.values()
    )


def sniff_pptrace_json(start: bytes) -> bool:
    return _SCHEMA.match(start) is not None


def archive_of(start: bytes) -> str | None:
    """The kind of archive, or of compression that is not read, that these (gunzipped) bytes begin; None for any other file."""
    if start[_TAR_OFFSET : _TAR_OFFSET + len(_TAR_MAGIC)] == _TAR_MAGIC:
        return "tar"
    return next((kind for magic, kind in _ARCHIVES.items() if start.startswith(magic)), None)


def tool_of(start: bytes) -> str | None:
    """The file of another tool that these bytes begin, and what to give in its place; None of any other file."""
    return next(
        (what for known, what in _OTHERS if known.match(start)), _EARLY_MSPROF if _is_early_msprof(start) else None
    )


ASCEND_OUTPUT = "ASCEND_PROFILER_OUTPUT"
ASCEND_TRACE = "trace_view.json"
ASCEND_METADATA = "profiler_metadata.json"
ASCEND_MEMORY = "memory_record.csv"
_ASCEND_OTHERS = ("communication.json", "communication_matrix.json", ASCEND_MEMORY)
_ASCEND_INFO = re.compile(r"profiler_info(?:_(\d{1,9}))?\.json")
_OPS_NAME = re.compile(r"(?<![a-z])ops(?![a-z])")


def partner(path: Path, table: str) -> Path | None:
    """The file of another table next to ``path``: comms.csv for ops.csv, rank0.comms.csv for rank0.ops.csv."""
    if not _OPS_NAME.search(path.name):
        return None
    other = path.with_name(_OPS_NAME.sub(table, path.name, count=1))
    return other if other != path and other.is_file() else None


def partners(path: Path) -> list[Path]:
    """The files of other tables that are read together with one of ops."""
    return [other for table in ("comms", "memory") if (other := partner(path, table)) is not None]


def companions_of_dump(path: Path) -> list[Path]:
    """The sizes of a run, next to the dump of each pipeline rank."""
    return [path.with_name("config.json")] if path.name.startswith("pp_rank_") else []


def companions_of_trace(path: Path) -> Sequence[Path]:
    """The files that describe a trace: they are no traces of their own."""
    if path.name != ASCEND_TRACE:
        return ()
    folder = path.parent.parent
    return [*(path.with_name(name) for name in _ASCEND_OTHERS), folder / ASCEND_METADATA, *ascend_infos(folder)]


def ascend_infos(folder: Path) -> list[Path]:
    """The files in a folder of the Ascend profiler that say which rank it is of."""
    try:
        return sorted(entry for entry in folder.iterdir() if _ASCEND_INFO.fullmatch(entry.name))
    except OSError:
        return []


def earlier_forms(path: Path) -> Sequence[Path]:
    """The files of Nsight Systems that one was exported from."""
    steps = (".sqlite", *RECORDED_SUFFIXES)
    return [path.with_suffix(step) for step in steps[steps.index(path.suffix) + 1 :]] if path.suffix in steps else []
