"""The registry of formats: one entry per reader. A new format is one entry here, and a file of its own that reads it.

Nothing else in :mod:`pptrace.ingest` knows a format by its name: which files of a directory are read, and which belong
to another file or complete it, are fields of the entry. How to add one: docs/extending.md.

The readers of some formats are imported for such a file alone (:func:`on_use`): the beginnings of these files are here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from importlib import import_module
from pathlib import Path

from pptrace.errors import TraceError
from pptrace.ingest.ascend.reader import TRACE_NAME as ASCEND_NAME
from pptrace.ingest.ascend.reader import companions_of_trace
from pptrace.ingest.common.byte_source import SQLITE_MAGIC, ByteSource, first_bytes
from pptrace.ingest.common.device_clock import with_host_clock
from pptrace.ingest.common.json_texts import opens_json
from pptrace.ingest.common.sequential_streams import with_sequential_streams
from pptrace.ingest.flight_recorder.dump import sniff_flight
from pptrace.ingest.flight_recorder.reader import read_flight
from pptrace.ingest.kineto.event_stream import EXECUTION_TRACE
from pptrace.ingest.kineto.event_types import has_kineto_members
from pptrace.ingest.kineto.reader import ReadProgress, read_ranks
from pptrace.ingest.nsight.reader import RECORDED_MAGIC, RECORDED_SUFFIXES
from pptrace.ingest.op_tables.files import sniff_pptrace_json
from pptrace.ingest.op_tables.primus import companions_of_dump, read_primus, sniff_primus
from pptrace.ingest.op_tables.reader import TABLE_SUFFIXES, partners, read_simulation, read_table, sniff_table
from pptrace.ingest.ops.build import Tables, traces_of
from pptrace.model.traces import InputFormat, Trace

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
"""Files of other tools that are no JSON by their beginnings, and what to give in their place."""
_PERFETTO = (".pftrace", ".perfetto-trace")
_TAR_OFFSET, _TAR_MAGIC = 257, b"ustar"
_TRACE_KEY = re.compile(rb'"(?:traceEvents|schemaVersion|deviceProperties|baseTimeNanoseconds)"\s*:|"ph"\s*:\s*"')


class Priority(IntEnum):
    """Information of a format about a run, as a rank among formats. Of a directory that holds ops in several forms, those
    that say most are read.
    """

    EXTRACT = 0
    """Extracts that pptrace wrote itself, and dumps of calls alone."""
    PICTURE = 1
    """Another program's picture of ops."""
    TABLE = 2
    PROFILE = 3


@dataclass(frozen=True, slots=True)
class Format:
    """Format of files: how it is recognised and read, and which of its files are preferred to others.

    ``name`` is what the report calls it, and several readers may share one. ``sniff`` sees the first decompressed bytes of a
    file; ``read`` gives a trace for each rank that the file holds, at least one, or ready ops. Of the entries whose ``sniff``
    agrees, the first in :data:`FORMATS` reads. A reader that ``takes_cores`` takes their number, and a callback for the part that
    has been read, as well (:func:`read_ranks`).

    ``suffixes`` are those that its files usually have, ``own_suffixes`` those that no other file has. ``companions`` are the
    files that are read with one of these, and ``other_forms`` those that hold the same recording. A format that
    ``is_dump`` holds calls alone and completes the traces of one that ``takes_dumps``. ``is_own_output``: what pptrace wrote.
    ``has_folder_per_rank``: its recorder gives each rank a folder.
    """

    name: InputFormat
    sniff: Callable[[bytes], bool]
    read: Callable[..., tuple[Trace, ...] | Tables]
    priority: Priority
    suffixes: tuple[str, ...] = ()
    own_suffixes: tuple[str, ...] = ()
    companions: Callable[[Path], Sequence[Path]] = lambda _: ()
    other_forms: Callable[[Path], Sequence[Path]] = lambda _: ()
    takes_dumps: bool = False
    is_dump: bool = False
    is_own_output: bool = False
    has_folder_per_rank: bool = False
    takes_cores: bool = False


def on_use(module: str, function: str, file: str = "reader") -> Callable[[Path], tuple[Trace, ...]]:
    """A reader that is imported for such a file alone: nearly all runs are of one format."""
    return lambda path: getattr(import_module(f"pptrace.ingest.{module}.{file}"), function)(path)


_read_chrome = on_use("chrome", "read_chrome")


def _earlier_forms(path: Path) -> Sequence[Path]:
    """The files of Nsight Systems that one was exported from."""
    steps = (".sqlite", *RECORDED_SUFFIXES)
    return [path.with_suffix(step) for step in steps[steps.index(path.suffix) + 1 :]] if path.suffix in steps else []


def _sniff_kineto(start: bytes) -> bool:
    return opens_json(start) and _TRACE_KEY.search(start) is not None


def _read_kineto(path: Path, cores: int, on_progress: ReadProgress | None) -> tuple[Trace, ...]:
    """Kineto's, or another tool's whose begin/end events come after the first bytes."""
    try:
        traces = read_ranks(path, cores, on_progress)
    except TraceError:
        if has_pairs(path):
            return _read_chrome(path)
        raise
    return _read_chrome(path) if traces[0].producer == "chrome trace" and has_pairs(path) else traces


_NSYS_MAGIC = (SQLITE_MAGIC, *RECORDED_MAGIC)
FORMATS: tuple[Format, ...] = (
    Format(
        InputFormat.ROCPD,
        lambda start: opens_json(start) and b'"rocprofiler-sdk-tool"' in start,
        on_use("rocpd", "read_json", "json_output"),
        Priority.PROFILE,
        (".json",),
    ),
    Format(
        InputFormat.ROCPD,
        lambda start: start.startswith(SQLITE_MAGIC) and b'"rocpd_api_ops"' in start,
        on_use("rocpd", "read_rpd", "rpd"),
        Priority.PROFILE,
        (".rpd",),
    ),
    Format(
        InputFormat.ROCPD,
        lambda start: start.startswith(SQLITE_MAGIC) and b"rocpd_" in start,  # in the first pages: a name of a table
        on_use("rocpd", "read_rocpd"),
        Priority.PROFILE,
        (".db",),
    ),
    Format(
        InputFormat.XPLANE,
        sniff_xplane,
        on_use("xplane", "read_xplane"),
        Priority.PROFILE,
        (XPLANE_SUFFIX,),
        own_suffixes=(XPLANE_SUFFIX,),
    ),
    Format(
        InputFormat.NSYS_SQLITE,
        lambda start: start.startswith(_NSYS_MAGIC),
        on_use("nsight", "read_nsight"),
        Priority.PROFILE,
        (".sqlite", ".db", *RECORDED_SUFFIXES),
        own_suffixes=RECORDED_SUFFIXES,
        other_forms=_earlier_forms,
        takes_dumps=True,
    ),
    Format(InputFormat.OPLOG, sniff_primus, read_primus, Priority.TABLE, (".json",), companions=companions_of_dump),
    Format(InputFormat.OPLOG, sniff_flight, read_flight, Priority.EXTRACT, is_dump=True),
    Format(InputFormat.OPLOG, sniff_pptrace_json, read_simulation, Priority.EXTRACT, (".json",), is_own_output=True),
    Format(InputFormat.OPLOG, sniff_table, read_table, Priority.TABLE, TABLE_SUFFIXES, companions=partners),
    Format(
        InputFormat.ASCEND,
        sniff_ascend,
        on_use("ascend", "read_ascend"),
        Priority.PROFILE,
        (".json", ".json.gz"),
        own_suffixes=(ASCEND_NAME,),
        companions=companions_of_trace,
        has_folder_per_rank=True,
    ),
    Format(InputFormat.CHROME, sniff_chrome, _read_chrome, Priority.PICTURE, (".json", ".json.gz")),
    Format(InputFormat.OTLP, sniff_otlp, on_use("otlp", "read_otlp"), Priority.PROFILE),
    Format(
        InputFormat.NCCL_INSPECTOR,
        sniff_nccl_inspector,
        on_use("nccl_inspector", "read_nccl_inspector"),
        Priority.PROFILE,
    ),
    Format(
        InputFormat.KINETO,
        lambda start: _sniff_kineto(start) and has_kineto_members(start),
        _read_kineto,
        Priority.PROFILE,
        (".json", ".json.gz", ".gz"),
        takes_dumps=True,
        takes_cores=True,
    ),
    Format(InputFormat.KINETO, _sniff_kineto, _read_kineto, Priority.PICTURE, takes_dumps=True, takes_cores=True),
)
PROFILE_SUFFIXES = tuple(suffix for known in FORMATS if known.priority is Priority.PROFILE for suffix in known.suffixes)
SUFFIXES = tuple(dict.fromkeys(suffix for known in FORMATS for suffix in known.suffixes))


def entry_of(start: bytes) -> Format | None:
    """The entry that reads a file that begins with these (decompressed) bytes; None where no reader knows it."""
    return None if archive_of(start) else next((known for known in FORMATS if known.sniff(start)), None)


def detect(start: bytes) -> InputFormat | None:
    """The format of a file that begins with these (decompressed) bytes; None where no reader knows it."""
    return known.name if (known := entry_of(start)) else None


def readers_of(name: InputFormat | None) -> tuple[Format, ...]:
    """The entries that share a name."""
    return tuple(known for known in FORMATS if known.name is name)


def format_of(path: Path, name: InputFormat) -> Format:
    """The entry that reads a file of this name: of several the one that its first bytes choose, else the last.

    Raises:
        TraceError: the file cannot be read.
    """
    entries = readers_of(name)
    if len(entries) == 1:
        return entries[0]
    start = first_bytes(path)
    return next((known for known in entries if known.sniff(start)), entries[-1])


def named_format(path: Path) -> InputFormat | None:
    """The format that a file's name alone tells for certain."""
    return next((known.name for known in FORMATS if path.name.endswith(known.own_suffixes)), None)


def without_companions(paths: Iterable[Path]) -> list[Path]:
    """The files without those that are read together with another of them."""
    return _without(paths, lambda known: known.companions)


def without_other_forms(paths: Iterable[Path]) -> list[Path]:
    """The files without those whose recording another of them holds as well, in a form that is read faster."""
    return _without(paths, lambda known: known.other_forms)


def _without(paths: Iterable[Path], related: Callable[[Format], Callable[[Path], Sequence[Path]]]) -> list[Path]:
    paths = list(paths)
    left_out = {other for path in paths for known in FORMATS for other in related(known)(path)}
    return [path for path in paths if path not in left_out]


def archive_of(start: bytes) -> str | None:
    """The kind of archive, or of compression that is not read, that these (gunzipped) bytes begin; None for any other file."""
    if start[_TAR_OFFSET : _TAR_OFFSET + len(_TAR_MAGIC)] == _TAR_MAGIC:
        return "tar"
    return next((kind for magic, kind in _ARCHIVES.items() if start.startswith(magic)), None)


def read_file(
    path: Path, name: InputFormat | None, cores: int = 1, on_progress: ReadProgress | None = None
) -> tuple[Trace, ...]:
    """Read one file, a large one on several ``cores``: a trace for each rank in it.

    Without a format it is read as what its name says, else as Kineto's, whose reader says what it found instead.

    Raises:
        TraceError: the file gives nothing to analyse.
    """
    if name is None:
        _refuse_others(path)
    reader = format_of(path, name or format_by_suffix(path) or InputFormat.KINETO)
    read = reader.read(path, cores, on_progress) if reader.takes_cores else reader.read(path)
    traces = traces_of(path, read) if isinstance(read, Tables) else read
    return tuple(with_sequential_streams(with_host_clock(trace)) for trace in traces)


def _refuse_others(path: Path) -> None:
    """Refuse a file that is known, and no trace that can be read."""
    start = first_bytes(path)
    if archive := archive_of(start):
        raise TraceError(f"{path}: a {archive} archive; expected a trace; unpack it and give what it holds")
    if what := next((what for known, what in _OTHERS if known.match(start)), None):
        raise TraceError(f"{path}: {what}")
    if path.name.endswith(_PERFETTO):
        raise TraceError(
            f"{path}: a trace of Perfetto, which is not read; expected what its recorder writes besides, as rocprofv3 does with "
            "--output-format rocpd"
        )


def format_by_suffix(path: Path) -> InputFormat | None:
    """The format as which a file of unknown content is read; None for JSON, of which Kineto's reader says best what is wrong."""
    rest = (known for known in FORMATS if not {".json", ".gz"} & set(known.suffixes))
    return next((known.name for known in rest if path.name.endswith(known.suffixes)), None)


def read_trace(path: Path, name: InputFormat | None) -> Trace:
    """The first of :func:`read_file`: the only one, but for files that hold several ranks."""
    return read_file(path, name)[0]
