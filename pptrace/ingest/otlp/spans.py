"""Decode OpenTelemetry spans in JSON into columns.

    document  = {"resourceSpans": [{"resource": {"attributes": …}, "scopeSpans": [{"spans": [span, …]}]}]}
    span      = {"name", "startTimeUnixNano", "endTimeUnixNano", "attributes": [{"key", "value": {"intValue": …}}], …}
    printed   = {"name", "context", "start_time", "end_time", "attributes": {…}, "resource": {"attributes": {…}}}

A file of the collector's exporter holds a document per line; the SDK's ConsoleSpanExporter prints spans between other lines of
the program (OTLP 1.x, ``opentelemetry/proto/trace/v1/trace.proto``; opentelemetry-python, ``sdk/trace/export``). 64-bit numbers
are text or numbers. ``batches`` and ``instrumentationLibrarySpans`` are older names of the same.

The resource of the spans has facts of the process: rank, sizes of the mesh, host, GPU. Megatron-LM's are
``dl.rank``, ``dl.world_size``, ``dl.{pipeline,tensor,data}_parallel.size``, ``host.name``, ``process.pid``,
``nemo.run.id`` (``megatron/training/global_vars.py``; NVIDIA-NeMo/Lens, ``providers.py``, ``semconv.py``). The context-parallel
size and the number of model chunks are not among them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import Struct, field

from pptrace.ingest.common.json_texts import LIMIT_NS, close_brackets
from pptrace.ingest.common.rank_names import rank_of_value
from pptrace.model.tables import Int32, Int64
from pptrace.model.traces import HOST, ONE_CLOCK, PARALLEL, SPANS_DEVICE

Attributes = Mapping[str, str | int | float | bool]
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_Decoded = TypeVar("_Decoded")


class _Span(msgspec.Struct, gc=False, rename="camel"):
    name: str = ""
    start_time_unix_nano: int | str = -1
    end_time_unix_nano: int | str = -1
    attributes: msgspec.Raw = msgspec.Raw(b"")
    trace_id: str = ""
    span_id: str = ""
    parent_span_id: str = ""


class _Part(msgspec.Struct, gc=False):
    """A scope, which has spans, or a resource."""

    spans: msgspec.Raw = msgspec.Raw(b"[]")
    attributes: msgspec.Raw = msgspec.Raw(b"")


class _Resources(msgspec.Struct, gc=False, rename="camel"):
    resource: _Part | None = None
    scope_spans: list[_Part] = []
    instrumentation_library_spans: list[_Part] = []


class _Document(msgspec.Struct, gc=False, rename={"resource_spans": "resourceSpans"}):
    """A document of OTLP, or one printed span, according to the members present."""

    resource_spans: list[_Resources] = []
    batches: list[_Resources] = []
    trace: msgspec.Raw = msgspec.Raw(b"")
    name: str = ""
    start_time: str | None = None
    end_time: str | None = None
    attributes: msgspec.Raw = msgspec.Raw(b"")
    resource: _Part | None = None


_DOCUMENT = msgspec.json.Decoder(_Document, strict=False)
_DOCUMENTS = msgspec.json.Decoder(list[msgspec.Raw])
_SPANS = msgspec.json.Decoder(list[_Span], strict=False)
_SPAN = msgspec.json.Decoder(_Span, strict=False)
_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


class SpanColumns(Struct):
    """The spans of a file. A span's ``resource`` is an index into ``resources``, the distinct sets of resource attributes.

    ``attributes_of_span`` has the attributes of the spans whose name ``keeps_attributes`` accepts, by index of the span, and
    ``ids_of_span`` the ids of the trace, the span and its parent, of those whose name ``keeps_ids`` accepts. ``num_lost`` spans
    could not be read, and ``num_damaged`` values were truncated or damaged.
    """

    keeps_attributes: Callable[[str], bool]
    keeps_ids: Callable[[str], bool] = lambda _: False
    names: dict[str, int] = field(default_factory=dict)
    name: list[int] = field(default_factory=list)
    start_ns: list[int] = field(default_factory=list)
    end_ns: list[int] = field(default_factory=list)
    resource: list[int] = field(default_factory=list)
    resources: dict[bytes, int] = field(default_factory=dict)
    attributes_of_span: dict[int, Attributes] = field(default_factory=dict)
    ids_of_span: dict[int, tuple[str, str, str]] = field(default_factory=dict)
    num_lost: int = 0
    num_damaged: int = 0

    def add(self, data: bytes, *, is_complete: bool) -> None:
        """Add the spans of one JSON value; of a damaged one those that are complete."""
        if is_complete and self._add_value(data):
            return
        self.num_damaged += 1
        if (rescued := close_brackets(data)) is not None:
            self._add_value(rescued)

    def _add_value(self, data: bytes) -> bool:
        """Return whether the value could be read."""
        if data[:1] == b"[":
            parts = _decoded(_DOCUMENTS.decode, data)
            read = [self._add_value(bytes(part)) for part in parts or ()]
            return parts is not None and all(read)
        document = _decoded(_DOCUMENT.decode, data)
        if document is None:
            return False
        for resources in (*document.resource_spans, *document.batches):
            resource_index = self._number_of(resources.resource)
            for scope in (*resources.scope_spans, *resources.instrumentation_library_spans):
                self._add_spans(scope.spans, resource_index)
        if document.start_time is not None and document.end_time is not None:
            times = nanoseconds_of(document.start_time), nanoseconds_of(document.end_time)
            self._add_span(document.name, *times, self._number_of(document.resource), document.attributes)
        trace = bytes(document.trace)
        return self._add_value(trace) if trace[:1] == b"{" else True

    def _number_of(self, resource: _Part | None) -> int:
        text = b"" if resource is None else bytes(resource.attributes)
        return self.resources.setdefault(text, len(self.resources))

    def _add_spans(self, text: msgspec.Raw, resource: int) -> None:
        spans = _decoded(_SPANS.decode, text)
        if spans is None:
            parts = _decoded(_DOCUMENTS.decode, text) or []
            made = [_decoded(_SPAN.decode, part) for part in parts]
            spans = [span for span in made if span is not None]
            self.num_lost += len(made) - len(spans)
        for span in spans:
            start, end = _number(span.start_time_unix_nano), _number(span.end_time_unix_nano)
            is_added = self._add_span(span.name, start, end, resource, span.attributes)
            if is_added and self.keeps_ids(span.name):
                self.ids_of_span[len(self.name) - 1] = (span.trace_id, span.span_id, span.parent_span_id)

    def _add_span(self, name: str, start_ns: int, end_ns: int, resource: int, attributes: msgspec.Raw) -> bool:
        """Return whether the span has a time that can be."""
        if not 0 < start_ns <= end_ns <= LIMIT_NS:
            self.num_lost += 1
            return False
        if len(attributes) > 2 and self.keeps_attributes(name) and (attributes_of_span := attributes_of(attributes)):
            self.attributes_of_span[len(self.name)] = attributes_of_span
        self.name.append(self.names.setdefault(name, len(self.names)))
        self.start_ns.append(start_ns)
        self.end_ns.append(end_ns)
        self.resource.append(resource)
        return True

    def arrays(self) -> tuple[Int32, Int64, Int64, Int32]:
        """(name, start, end, resource) of every span."""
        return (
            np.array(self.name, dtype=np.int32),
            np.array(self.start_ns, dtype=np.int64),
            np.array(self.end_ns, dtype=np.int64),
            np.array(self.resource, dtype=np.int32),
        )


def _decoded(decode: Callable[[bytes | msgspec.Raw], _Decoded], data: bytes | msgspec.Raw) -> _Decoded | None:
    try:
        return decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _number(value: int | str) -> int:
    """Parse a 64-bit number or text; -1 if it is none."""
    try:
        return int(value)
    except ValueError:
        return -1


def nanoseconds_of(text: str) -> int:
    """Convert an ISO 8601 time to ns since 1970; -1 if it is none."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return -1
    since = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _EPOCH
    return (since.days * 86_400 + since.seconds) * 10**9 + since.microseconds * 1000


def attributes_of(text: msgspec.Raw | bytes) -> Attributes:
    """Decode attributes to scalars; lists and maps are dropped."""
    value = _decoded(_ANY.decode, text) if len(text) else None
    if isinstance(value, dict):
        pairs: Sequence[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict)]
        pairs = [(entry.get("key"), _plain(entry.get("value"))) for entry in entries]
    else:
        return {}
    return {key: value for key, value in pairs if isinstance(key, str) and isinstance(value, str | int | float | bool)}


def _plain(value: object) -> object:
    """The value in an attribute's ``{"intValue": "3"}``; None if it is no scalar."""
    if not isinstance(value, dict) or len(value) != 1:
        return None
    ((kind, content),) = value.items()
    if kind == "intValue":
        number = _number(content) if isinstance(content, int | str) else -1
        return number if not isinstance(content, bool) else None
    return content if kind in ("stringValue", "boolValue", "doubleValue") else None


_RANK = ("dl.rank", "global_rank", "rank", "process.rank", "torch.distributed.rank")
_INSTANCE = re.compile(r"-rank(\d{1,9})$")
_SIZES = {
    "pp": "dl.pipeline_parallel.size",
    "tp": "dl.tensor_parallel.size",
    "dp": "dl.data_parallel.size",
    "cp": "dl.context_parallel.size",
}
_MAX_RANKS = 1_000_000
_RUN = ("nemo.run.id", "nemo.lens.run_uuid")
_PROCESS = ("service.name", "service.instance.id", "host.name", "process.pid")
_GPU = ("dl.gpu.name", "dl.gpu.uuid")


def rank_of(resource: Attributes) -> int | None:
    """The global rank, None if no attribute has it."""
    for name in _RANK:
        if (rank := rank_of_value(resource.get(name))) is not None:
            return rank
    match = _INSTANCE.search(str(resource.get("service.instance.id", "")))
    return int(match[1]) if match else None


def process_of(resource: Attributes) -> tuple[str, ...]:
    """Identifies a process without a rank."""
    return tuple(str(resource.get(name, "")) for name in _PROCESS)


def run_id_of(resource: Attributes) -> str:
    return next((str(resource[name]) for name in _RUN if name in resource), "")


def one_clock_of(resources: Sequence[Attributes]) -> Mapping[str, str]:
    """The ``one_clock`` fact of processes on one host, whose clock times all their spans; {} if the host is not known."""
    hosts = {str(resource.get("host.name", "")) for resource in resources}
    host = hosts.pop() if len(hosts) == 1 else ""
    return {ONE_CLOCK: f"{HOST}{host}"} if host and host != "localhost" else {}


def distributed_of(resource: Attributes, rank: int | None) -> Mapping[str, Any]:
    """Facts of the job, with the keys of Kineto's ``distributedInfo``; with a GPU, its name, as host spans only show launches."""
    facts: dict[str, Any] = {}
    world = rank_of_value(resource.get("dl.world_size"))
    if rank is not None and world and rank < world <= _MAX_RANKS:
        facts |= {"rank": rank, "world_size": world}
    gpus = rank_of_value(resource.get("host.gpu.count"))
    names = [str(resource[name]) for name in _GPU if name in resource]
    if names or gpus:
        facts |= {"backend": "nccl", SPANS_DEVICE: names[0] if names else "host.gpu.count"}
    return facts


def parallel_of(resource: Attributes) -> Mapping[str, Any]:
    """Facts of the sizes of the axes; {} if that of pp is missing or the product is not the number of ranks."""
    world = rank_of_value(resource.get("dl.world_size"))
    sizes = {axis: rank_of_value(resource.get(name)) for axis, name in _SIZES.items()}
    known_sizes = [size for size in sizes.values() if size]
    product = math.prod(known_sizes)
    if not sizes["pp"] or not world or world > _MAX_RANKS or world % product:
        return {}
    unknown_axes = [axis for axis, size in sizes.items() if not size]
    if unknown_axes == ["cp"]:
        sizes["cp"] = world // product
    elif unknown_axes or product != world:
        return {}
    pp_rank = rank_of_value(resource.get("dl.pipeline_parallel.rank"))
    return {PARALLEL: {**sizes, "pp_rank": pp_rank}, "world_size": world}
