"""Read the JSON of rocprofv3 (``--output-format json``): the same records as in its database, of one process as a rule.

    file   = { "rocprofiler-sdk-tool": [ process, … ] }
    process = { "metadata", "agents", "kernel_symbols", "strings", "buffer_records": { kind: [ record, … ] } }
    record = { "start_timestamp", "end_timestamp" (ns), "kind", "operation", "thread_id", "correlation_id": { "internal" }, … }

What a record is called: ``strings.buffer_records[kind].operations[operation]``; of a kernel its symbol; of a range of rocTX the
message of its correlation. A call and what it launched have the same correlation. (rocm-systems,
``projects/rocprofiler-sdk/source/docs/rocprofv3-schema.json``, ``generateJSON.cpp``.)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from pptrace.errors import TraceError
from pptrace.ingest.common.byte_source import ByteSource
from pptrace.ingest.common.codes import Codes, RangeCodes
from pptrace.ingest.common.json_texts import LIMIT_NS, Integers
from pptrace.ingest.common.sort_events import EventColumns
from pptrace.ingest.rocpd.reader import Process, copy_name, streams_of, traces_of
from pptrace.model.traces import DEVICE_NAMES, HOST, HOST_NAME, ONE_CLOCK, Category, Trace

_GPU = 2
_Time = Annotated[int, msgspec.Meta(ge=-LIMIT_NS, le=LIMIT_NS)]
_EXPECTED = "expected what 'rocprofv3 --output-format json' writes; copy it anew or record again"


class _Handle(msgspec.Struct, frozen=True):
    handle: int = -1


_NONE = _Handle()


class _Correlation(msgspec.Struct, frozen=True):
    internal: int = -1


class _Dispatch(msgspec.Struct, frozen=True):
    agent_id: _Handle = _NONE
    queue_id: _Handle = _NONE
    kernel_id: int = -1


class _Record(msgspec.Struct, frozen=True):
    start_timestamp: _Time
    end_timestamp: _Time
    kind: int = -1
    operation: int = -1
    thread_id: int = -1
    correlation_id: _Correlation = _Correlation()
    dispatch_info: _Dispatch = _Dispatch()
    stream_id: _Handle = _NONE
    src_agent_id: _Handle = _NONE
    dst_agent_id: _Handle = _NONE


class _Kind(msgspec.Struct, frozen=True):
    operations: list[str] = []


class _Message(msgspec.Struct, frozen=True):
    key: int
    value: str


class _Strings(msgspec.Struct, frozen=True):
    buffer_records: list[_Kind] = []
    marker_api: list[_Message] = []


class _Symbol(msgspec.Struct, frozen=True):
    kernel_id: int = -1
    formatted_kernel_name: str = ""


class _Agent(msgspec.Struct, frozen=True):
    id: _Handle = _NONE
    type: int = 0
    product_name: str = ""


class _Records(msgspec.Struct, frozen=True):
    kernel_dispatch: list[_Record] = []
    memory_copy: list[_Record] = []
    hip_api: list[_Record] = []
    hsa_api: list[_Record] = []
    rccl_api: list[_Record] = []
    marker_api: list[_Record] = []


class _Process(msgspec.Struct, frozen=True):
    metadata: dict[str, Any] = {}
    agents: list[_Agent] = []
    strings: _Strings = _Strings()
    kernel_symbols: list[_Symbol] = []
    buffer_records: _Records = _Records()


class _File(msgspec.Struct, frozen=True):
    processes: list[_Process] = msgspec.field(name="rocprofiler-sdk-tool")


def read_json(path: Path) -> tuple[Trace, ...]:
    """Read a trace for each process.

    Raises:
        TraceError: the file cannot be read, is damaged, or holds no events.
    """
    with ByteSource(path) as source:
        text = b"".join(iter(source.read, b""))
    try:
        file = msgspec.json.decode(text, type=_File)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as err:
        raise TraceError(f"{path}: damaged or truncated JSON of rocprofv3 ({str(err)[:80]}); {_EXPECTED}") from err
    return traces_of(path, [_events_of(process) for process in file.processes], [], "rocprofv3 JSON", _EXPECTED)


def _events_of(process: _Process) -> Process:
    names, records = Codes(), process.buffer_records
    gpus = [agent for agent in process.agents if agent.type == _GPU]
    devices = {agent.id.handle: number for number, agent in enumerate(gpus)}
    symbols = {symbol.kernel_id: symbol.formatted_kernel_name for symbol in process.kernel_symbols}
    messages = {message.key: message.value for message in process.strings.marker_api}
    kinds = process.strings.buffer_records

    def name_of(record: _Record) -> str:
        is_known = 0 <= record.kind < len(kinds) and 0 <= record.operation < len(kinds[record.kind].operations)
        return kinds[record.kind].operations[record.operation] if is_known else ""

    def message_of(record: _Record) -> bytes:
        return messages.get(record.correlation_id.internal, name_of(record)).encode("utf-8", "replace")

    ranges = RangeCodes(names)
    calls = [*records.hip_api, *records.hsa_api]
    kernels, copies = records.kernel_dispatch, records.memory_copy
    rows = [
        _columns(kernels, Category.KERNEL, names.of(symbols.get(row.dispatch_info.kernel_id) for row in kernels)),
        _columns(copies, Category.MEMCPY, names.of(copy_name(name_of(row)) for row in copies)),
        _columns(calls, Category.RUNTIME, names.of(map(name_of, calls))),
        _columns(records.rccl_api, Category.ANNOTATION, names.of(map(name_of, records.rccl_api))),
        _columns(records.marker_api, Category.ANNOTATION, [ranges[message_of(row)] for row in records.marker_api]),
    ]
    rows[0].device = _devices([row.dispatch_info.agent_id.handle for row in kernels], devices)
    ends = [(row.dst_agent_id.handle, row.src_agent_id.handle) for row in copies]
    rows[1].device = _devices([target if target in devices else source for target, source in ends], devices)
    rows[-1].category[np.isin(rows[-1].name, list(ranges.torch_ops))] = Category.CPU_OP
    facts: dict[str, Any] = {DEVICE_NAMES: [gpu.product_name for gpu in gpus]} if gpus else {}
    node = process.metadata.get("node")
    if isinstance(node, dict) and node.get("hostname"):
        facts |= {HOST_NAME: str(node["hostname"]), ONE_CLOCK: f"{HOST}{node['hostname']}"}
    return Process([columns for columns in rows if len(columns)], names.texts, None, facts)


def _columns(records: Sequence[_Record], category: Category, names: Any) -> EventColumns:
    """The columns of records of one kind; where they ran on no device, their thread."""
    is_work = category > Category.HOST_LIMIT
    has_launch = is_work or category is Category.RUNTIME
    times = [(row.start_timestamp, row.end_timestamp) for row in records]
    start, end = np.array(times, dtype=np.int64).reshape(-1, 2).T
    stream, queue, thread, correlation = map(
        Integers(),  # they are unsigned, the largest one for none
        (
            [row.stream_id.handle for row in records],
            [row.dispatch_info.queue_id.handle for row in records],
            [row.thread_id for row in records],
            [row.correlation_id.internal if has_launch else -1 for row in records],
        ),
    )
    correlation[correlation <= 0] = -1
    lane = streams_of(stream, queue) if is_work else thread
    return EventColumns.of(category, np.array(names, dtype=np.int32), start, end, -1, lane, correlation)


def _devices(agents: Sequence[int], devices: dict[int, int]) -> Any:
    return np.array([devices.get(agent, -1) for agent in agents], dtype=np.int32)
