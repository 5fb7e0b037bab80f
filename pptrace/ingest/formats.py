"""The registry of formats: one entry per reader. A new format is one entry here, and a file of its own that reads it.

Nothing else in :mod:`pptrace.ingest` knows a format by its name: which files of a directory are read, and which belong
to another file or complete it, are fields of the entry. How to add one: docs/extending.md.

Readers are imported for such a file alone (:func:`on_use`). :mod:`pptrace.ingest.sniff` tells the beginnings of files apart, and
which files belong together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from importlib import import_module
from pathlib import Path
from typing import Any

from msgspec import Struct

from pptrace.errors import TraceError
from pptrace.ingest.common.byte_source import SQLITE_MAGIC, first_bytes
from pptrace.ingest.common.device_times import with_host_clock, with_sequential_streams
from pptrace.ingest.common.json_texts import opens_json
from pptrace.ingest.kineto.event_types import has_kineto_members
from pptrace.ingest.kineto.reader import ReadProgress, read_ranks
from pptrace.ingest.ops.build import Tables, traces_of
from pptrace.ingest.sniff import (
    ASCEND_OUTPUT,
    ASCEND_TRACE,
    archive_of,
    companions_of_dump,
    companions_of_trace,
    earlier_forms,
    has_pairs,
    partners,
    sniff_ascend,
    sniff_chrome,
    sniff_flight,
    sniff_kineto,
    sniff_nccl_inspector,
    sniff_otlp,
    sniff_pptrace_json,
    sniff_primus,
    sniff_table,
    sniff_xplane,
    tool_of,
)
from pptrace.model.traces import InputFormat, Trace
from pptrace.nsys import RECORDED_MAGIC, RECORDED_SUFFIXES

XPLANE_SUFFIX = ".xplane.pb"
_PERFETTO = (".pftrace", ".perfetto-trace")


class Priority(IntEnum):
    """Information of a format about a run. Of a directory that holds ops in several forms, those that say most are read."""

    EXTRACT = 0
    """Extracts that pptrace wrote itself, and dumps of calls alone."""
    PICTURE = 1
    """Another program's picture of ops."""
    TABLE = 2
    PROFILE = 3


class Format(Struct, frozen=True):
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


def on_use(module: str, function: str, file: str = "reader") -> Callable[[Path], Any]:
    """A reader that is imported for such a file alone: nearly all runs are of one format."""
    return lambda path: getattr(import_module(f"pptrace.ingest.{module}.{file}"), function)(path)


_read_chrome: Callable[[Path], tuple[Trace, ...]] = on_use("chrome", "read_chrome")


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
        other_forms=earlier_forms,
        takes_dumps=True,
    ),
    Format(
        InputFormat.OPLOG,
        sniff_primus,
        on_use("op_tables", "read_primus", "primus"),
        Priority.TABLE,
        (".json",),
        companions=companions_of_dump,
    ),
    Format(InputFormat.OPLOG, sniff_flight, on_use("flight_recorder", "read_flight"), Priority.EXTRACT, is_dump=True),
    Format(
        InputFormat.OPLOG,
        sniff_pptrace_json,
        on_use("op_tables", "read_simulation"),
        Priority.EXTRACT,
        (".json",),
        is_own_output=True,
    ),
    Format(
        InputFormat.OPLOG,
        sniff_table,
        on_use("op_tables", "read_table"),
        Priority.TABLE,
        (".csv", ".csv.gz", ".parquet", ".pq"),
        companions=partners,
    ),
    Format(
        InputFormat.ASCEND,
        sniff_ascend,
        on_use("ascend", "read_ascend"),
        Priority.PROFILE,
        (".json", ".json.gz"),
        own_suffixes=(ASCEND_TRACE,),
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
        lambda start: sniff_kineto(start) and has_kineto_members(start),
        _read_kineto,
        Priority.PROFILE,
        (".json", ".json.gz", ".gz"),
        takes_dumps=True,
        takes_cores=True,
    ),
    Format(InputFormat.KINETO, sniff_kineto, _read_kineto, Priority.PICTURE, takes_dumps=True, takes_cores=True),
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


_NPU_DATABASE = re.compile(r"(?:ascend_\w+_profiler|msprof)\w*\.db\Z")


def read_file(
    path: Path, name: InputFormat | None, cores: int = 1, on_progress: ReadProgress | None = None
) -> tuple[Trace, ...]:
    """Read one file, a large one on several ``cores``: a trace for each rank in it.

    Without a format it is read as what its name says, else as Kineto's, whose reader says what it found instead.

    Raises:
        TraceError: the file gives nothing to analyse.
    """
    if name is InputFormat.NSYS_SQLITE and (_NPU_DATABASE.match(path.name) or path.parent.name == ASCEND_OUTPUT):
        raise TraceError(
            f"{path}: a database of torch_npu's profiler, which is not read; expected the {ASCEND_TRACE} that it writes with "
            "export_type=[torch_npu.profiler.ExportType.Text]; give that if it is there too, else record again"
        )
    if name is None:  # it may be known, and no trace that can be read
        start = first_bytes(path)
        if archive := archive_of(start):
            raise TraceError(f"{path}: a {archive} archive; expected a trace; unpack it and give what it holds")
        if what := tool_of(start):
            raise TraceError(f"{path}: {what}")
        if path.name.endswith(_PERFETTO):
            raise TraceError(
                f"{path}: a trace of Perfetto, which is not read; expected what its recorder writes besides, as rocprofv3 does "
                "with --output-format rocpd"
            )
    reader = format_of(path, name or format_by_suffix(path) or InputFormat.KINETO)
    read = reader.read(path, cores, on_progress) if reader.takes_cores else reader.read(path)
    traces = traces_of(path, read) if isinstance(read, Tables) else read
    return tuple(with_sequential_streams(with_host_clock(trace)) for trace in traces)


def format_by_suffix(path: Path) -> InputFormat | None:
    """The format as which a file of unknown content is read; None for JSON, of which Kineto's reader says best what is wrong."""
    rest = (known for known in FORMATS if not {".json", ".gz"} & set(known.suffixes))
    return next((known.name for known in rest if path.name.endswith(known.suffixes)), None)
