"""Read OpenTelemetry spans as JSON (:mod:`pptrace.ingest.otlp.spans`); one file can hold several ranks.

Each span becomes a host range. Attributes of iteration and microbatch become part of the range's name, which the label
catalogues parse: ``megatron.train.iteration [iteration=12]``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from pptrace.errors import TraceError
from pptrace.ingest.common.byte_source import ByteSource
from pptrace.ingest.common.json_texts import split_values
from pptrace.ingest.common.rank_names import rank_of_file_name
from pptrace.ingest.common.sort_events import EventColumns, sorted_events
from pptrace.ingest.ops.build import traces_of
from pptrace.ingest.otlp.sglang import forwards_of_batches, is_thread
from pptrace.ingest.otlp.spans import (
    Attributes,
    SpanColumns,
    attributes_of,
    distributed_of,
    one_clock_of,
    parallel_of,
    process_of,
    rank_of,
    run_id_of,
)
from pptrace.model.traces import PARALLEL, Category, InputFormat, Trace
from pptrace.model.wording import counted

MEGATRON = "megatron-lm"
_PREFIX = "megatron."
_TRUNCATED = "nemo.span.truncated"
_SUFFIXES = {
    "iteration": ("megatron.iteration", "dl.iteration"),
    "microbatch": ("megatron.microbatch_id", "dl.microbatch_id"),
    "chunk": ("megatron.vp_stage", "megatron.model_chunk_id", "dl.virtual_pipeline_parallel.rank"),
    "microbatches": ("num_microbatches", "megatron.num_microbatches"),
}
"""Keys added to a range's name, and the attributes that hold their values."""
_PASS = re.compile(r"megatron\.(?:train\.iteration\.)?forward_backward \[microbatches=(\d{1,6})\]")
_FORWARD = "megatron.microbatch.forward"
_HOST_TIMES = (
    "OpenTelemetry spans are timed on the host: where a GPU runs the ops, they show when work was launched, "
    "not when it ran"
)


def read_otlp(path: Path) -> tuple[Trace, ...]:
    """Read a trace for each rank, and for each process without one.

    Raises:
        TraceError: the file cannot be read or holds no span.
    """
    columns = SpanColumns(
        lambda name: name.startswith(_PREFIX) or is_thread(name), lambda name: not name.startswith(_PREFIX)
    )
    with ByteSource(path) as source:
        for text, is_complete in split_values(source):
            columns.add(text, is_complete=is_complete)
        damage = source.damage
    if not columns.name:
        raise TraceError(
            f"{path}: no OpenTelemetry span that can be read; expected OTLP as JSON (resourceSpans) or printed spans; "
            "export them again"
        )
    if (of_batches := forwards_of_batches(columns)) is not None:
        return traces_of(path, of_batches, _damages(columns, damage))
    names, spans = _distinct_spans(columns)
    resources = [attributes_of(text) for text in columns.resources]
    runs, warnings = _last_runs(spans, resources)
    warnings = (*_damages(columns, damage), *warnings)
    indices_of: dict[tuple[bool, Any], list[int]] = {}
    for index in runs:  # a checkpoint worker has its trainer's rank
        rank = rank_of(resources[index])
        key = (True, process_of(resources[index])) if rank is None else (False, rank)
        indices_of.setdefault(key, []).append(index)
    traces: list[Trace] = []
    for (has_no_rank, process), indices in sorted(indices_of.items()):
        rank = None if has_no_rank else int(process)
        if has_no_rank and len(indices_of) == 1:
            rank = rank_of_file_name(path.name)
        own = spans.select(np.isin(spans.lane, indices))
        trace = _trace(path, rank, names, own, [resources[index] for index in indices])
        traces.append(replace(trace, warnings=(*warnings, *trace.warnings) if not traces else trace.warnings))
    return tuple(traces)


def _damages(columns: SpanColumns, damage: str | None) -> list[str]:
    """Warnings of what could not be read."""
    damages = [f"{damage}: the data before that was read, so that the last steps may lack ops"] if damage else []
    if columns.num_damaged:
        count = counted(columns.num_damaged, "value is", "values are")
        damages.append(f"{count} truncated or damaged: only complete spans were read; figures may lack ops")
    if columns.num_lost:
        damages.append(f"left out {counted(columns.num_lost, 'span')} without a name or with impossible times")
    return damages


def _distinct_spans(columns: SpanColumns) -> tuple[list[str], EventColumns]:
    """(names of ranges, the spans without duplicates from repeated exports and without those that were never ended).

    Spans have no threads: the lane of each is its resource.
    """
    name, start, end, resource = columns.arrays()
    names = dict(columns.names)
    names_in_order = list(names)
    is_left = np.ones(len(name), dtype=np.bool_)
    for index, attributes in columns.attributes_of_span.items():
        is_left[index] = attributes.get(_TRUNCATED) is not True
        parts = ",".join(
            f"{key}={attributes[source]}"
            for key, sources in _SUFFIXES.items()
            for source in sources
            if type(attributes.get(source)) is int
        )
        if parts:
            name[index] = names.setdefault(f"{names_in_order[name[index]]} [{parts}]", len(names))
    order = np.lexsort((name, end, start, resource))
    is_duplicate = np.ones(len(order), dtype=np.bool_)
    for column in (name, end, start, resource):
        is_duplicate[1:] &= column[order][1:] == column[order][:-1]
    is_duplicate[:1] = False
    is_left[order[is_duplicate]] = False
    spans = EventColumns.of(Category.ANNOTATION, name, start, end, lane=resource)
    return list(names), spans.select(is_left)


def _last_runs(spans: EventColumns, resources: Sequence[Attributes]) -> tuple[list[int], tuple[str, ...]]:
    """The resources of the run that began last, where several runs were appended to one file; with a warning."""
    used_resources = np.unique(spans.lane).tolist()
    runs = {index: run_id_of(resources[index]) for index in used_resources}
    start_by_run: dict[str, int] = {}
    for index in used_resources:
        first = int(spans.start_ns[spans.lane == index].min())
        start_by_run[runs[index]] = min(first, start_by_run.get(runs[index], first))
    if len(start_by_run) < 2:
        return used_resources, ()
    last_run = max(start_by_run, key=start_by_run.__getitem__)
    run_name = last_run or "without an id"
    warning = f"contains {len(start_by_run)} runs: only the last one ({run_name}) was read; put the others into separate files"
    return [index for index in used_resources if runs[index] == last_run], (warning,)


def _trace(
    path: Path, rank: int | None, names: Sequence[str], spans: EventColumns, resources: Sequence[Attributes]
) -> Trace:
    is_megatron = any(names[code].startswith(_PREFIX) for code in np.unique(spans.name).tolist())
    facts = dict(parallel_of(resources[0]))
    if PARALLEL in facts:
        facts[PARALLEL] = {**facts[PARALLEL], "vpp": _num_chunks(names, spans)}
    ordered = sorted_events([spans], names, 0)
    notes = {"notes": [_HOST_TIMES]} if is_megatron else {}
    service = str(resources[0].get("service.name", ""))
    return Trace(
        path=str(path),
        format=InputFormat.OTLP,
        rank=rank,
        producer=f"OpenTelemetry ({service})" if service else "OpenTelemetry",
        events=ordered.without_comm_args,
        metadata={**facts, **notes, **one_clock_of(resources)},
        distributed=distributed_of(resources[0], rank),
        warnings=ordered.warnings,
        framework=MEGATRON if is_megatron else "",
    )


def _num_chunks(names: Sequence[str], spans: EventColumns) -> int | None:
    """Number of model chunks of a rank: forwards per pass over microbatches; None if unknown or not constant."""
    microbatches_by_code = {code: int(match[1]) for code, name in enumerate(names) if (match := _PASS.fullmatch(name))}
    forwards = [code for code, name in enumerate(names) if name.split(" ")[0] == _FORWARD]
    rows = np.flatnonzero(np.isin(spans.name, list(microbatches_by_code)))
    starts = np.sort(spans.start_ns[np.isin(spans.name, forwards)])
    num_inside = np.searchsorted(starts, (spans.start_ns + spans.dur_ns)[rows]) - np.searchsorted(
        starts, spans.start_ns[rows]
    )
    num_microbatches = np.array([microbatches_by_code[code] for code in spans.name[rows].tolist()], dtype=np.int64)
    ratios = {
        divmod(inside, expected)
        for inside, expected in zip(num_inside.tolist(), num_microbatches.tolist(), strict=True)
        if expected > 0
    }
    if len(ratios) != 1:
        return None
    ((chunks, remainder),) = ratios
    return int(chunks) if chunks > 0 and remainder == 0 else None
