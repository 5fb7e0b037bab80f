"""Read pipeline dumps of AMD Primus (``--dump_pp_data`` and its simulator): a JSON file per pipeline rank.

    pp_rank_R.json = { iteration: { "total", "memory", "fwd_start": [ms, …], "fwd_end", "bwd_start", "bwd_end",
                                    ["wgrad_start", "wgrad_end"], ["fwd_minibatch", "fwd_chunk", "bwd_minibatch", …] }, … }
    config.json    = { "pp_size", "vp_size" | "vpp_size", "num_mbs" | "micro_batches", "world_size", "dp_size", … }

(github.com/AMD-AGI/Primus, primus/modules/trainer/megatron/utils.py and core/pipeline_parallel/scheduler.) Times are
milliseconds since that rank began the iteration; ``memory`` is GiB, torch's ``max_memory_reserved``. Iterations are placed
one after another, each as long as the longest rank's ``total``, for which the other files of the dump are read too.
Megatron-LM's schedules write no ids: they follow from the plan with the same order of ops
(:mod:`pptrace.recognise.infer.complete_pipelines`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from pptrace.errors import TraceError
from pptrace.ingest.common.byte_source import unreadable
from pptrace.ingest.common.time_units import to_ns
from pptrace.ingest.ops.build import Tables, ops_table
from pptrace.ingest.ops.stages import assign_stages, stages_of_chunks
from pptrace.model.tables import MEMORY, Int64, make_table
from pptrace.regular import read_regular

_FILE = re.compile(r"pp_rank_(\d{1,6})\.json")
_MODES = {"fwd": "F", "bwd": "B", "wgrad": "W"}
_GIB = 2**30
_UNKNOWN = -1
_MAX_RANKS = 1_000_000


def sniff_primus(start: bytes) -> bool:
    return start.lstrip()[:1] == b"{" and b'"fwd_start"' in start and b'"bwd_start"' in start


def companions_of_dump(path: Path) -> list[Path]:
    """The sizes of a run, next to the dump of each pipeline rank."""
    return [path.with_name("config.json")] if path.name.startswith("pp_rank_") else []


def read_primus(path: Path) -> Tables:
    """Read one rank's dump.

    Raises:
        TraceError: the file is damaged, or its lists have different lengths.
    """
    pp_rank = _rank(path)
    siblings = sorted(other for other in path.parent.glob("pp_rank_*.json") if _FILE.fullmatch(other.name))
    files = siblings if path in siblings else [path]
    stamps = tuple((str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    totals, is_v = _layout(stamps) if len(files) > 1 else ({}, False)
    iterations = _iterations(path)
    config = _config(path.parent / "config.json")
    pp = _size(config, "pp_size") or max(map(_rank, files)) + 1
    begins = _begins({step: max(totals.get(step, 0), _total_ns(path, step, it)) for step, it in iterations.items()})
    parts = [_ops(path, step, iteration, begins[step]) for step, iteration in iterations.items()]
    ops = pd.concat(parts, ignore_index=True).assign(rank=pp_rank)
    ops["stage"] = _stages(ops, pp_rank, pp, is_v)
    memory = (
        _memory(iterations, _first_op_ns(ops), pp_rank)
        if "activation_memory_usage" not in next(iter(iterations.values()))
        else None
    )
    chunks = int(ops["chunk"].max()) + 1 or _size(config, "vp_size") or _size(config, "vpp_size")
    facts = {**_facts(config, pp, chunks), "notes": _notes(config, pp, memory is not None)}
    empty = make_table(MEMORY, {name: [] for name in MEMORY})
    table = ops_table({str(name): ops[name] for name in ops}, len(ops))
    return Tables(
        "primus",
        "primus pp dump",
        table,
        memory=empty if memory is None else memory,
        facts=facts,
    )


def _rank(path: Path) -> int:
    """The pipeline rank in a file's name; -1 without one."""
    match = _FILE.fullmatch(path.name)
    return int(match[1]) if match else _UNKNOWN


def _iterations(path: Path) -> dict[int, Mapping[str, Any]]:
    try:
        document = json.loads(read_regular(path))
    except OSError as err:
        raise unreadable(path, err) from err
    except (ValueError, RecursionError) as err:
        raise TraceError(f"{path}: damaged JSON ({err}); expected a complete Primus dump; copy it again") from err
    if not isinstance(document, dict):
        raise TraceError(f"{path}: expected an object of iterations, as Primus' --dump_pp_data writes it")
    members: Mapping[str, Any] = document
    iterations = {step: value for step, value in members.items() if isinstance(value, dict) and len(step) < 10}
    with_forwards = {int(step): it for step, it in iterations.items() if step.isdecimal() and it.get("fwd_start")}
    if not with_forwards:
        raise TraceError(
            f"{path}: no iteration with a forward in it; expected Primus' --dump_pp_data; was it truncated?"
        )
    return dict(sorted(with_forwards.items()))


def _numbers(path: Path, step: int, iteration: Mapping[str, Any], name: str) -> Int64:
    values = iteration.get(name) or []
    is_list_of_numbers = isinstance(values, list) and all(isinstance(value, int | float) for value in values)
    times, is_valid = (
        to_ns(pd.Series(values, dtype="float64"), "ms")
        if is_list_of_numbers
        else (np.zeros(0, np.int64), np.zeros(1) > 0)
    )
    if not is_valid.all():
        raise TraceError(
            f"{path}: iteration {step}: {name!r} is no list of times; expected milliseconds; dump it again"
        )
    return times


def _total_ns(path: Path, step: int, iteration: Mapping[str, Any]) -> int:
    """Duration of an iteration, ns: its total, and at least until the end of its last op."""
    total = to_ns(pd.Series([iteration.get("total") or 0.0], dtype="float64"), "ms")[0]
    ends = [_numbers(path, step, iteration, f"{mode}_end") for mode in _MODES]
    return int(max([*total.tolist(), *(part.max() for part in ends if len(part))]))


def _begins(totals: Mapping[int, int]) -> dict[int, int]:
    """Start of each iteration, ns, one after another."""
    begins, time_ns = {}, 0
    for step, total in totals.items():
        begins[step] = time_ns
        time_ns += total
    return begins


@lru_cache(maxsize=4)
def _layout(stamps: tuple[tuple[str, int, int], ...]) -> tuple[dict[int, int], bool]:
    """(longest total of each iteration, whether chunks are placed in a V) over all readable ranks of a dump.

    ``stamps`` are path, mtime and size of the files, so that a rewritten dump is read again.
    """
    totals: dict[int, int] = {}
    parts = []
    for name, _, _ in stamps:
        path = Path(name)
        try:
            iterations = _iterations(path)
            for step, iteration in iterations.items():
                totals[step] = max(totals.get(step, 0), _total_ns(path, step, iteration))
            step, iteration = next(reversed(iterations.items()))
            parts.append(_ops(path, step, iteration, 0).assign(rank=max(_rank(path), 0)))
        except TraceError:
            continue  # reported when this file itself is read
    if not parts:
        return totals, False
    ops = pd.concat(parts, ignore_index=True)
    ranks = {int(rank): int(rank) for rank in ops["rank"].unique()}
    interleaved = (ops["chunk"] * (max(ranks) + 1) + ops["rank"]).where(ops["chunk"] >= 0, _UNKNOWN)
    return totals, bool((assign_stages(ops, ranks) != interleaved).any())


def _ops(path: Path, step: int, iteration: Mapping[str, Any], begin_ns: int) -> pd.DataFrame:
    """The ops of one iteration: columns step, kind, chunk, microbatch, start_ns, end_ns, pair."""
    is_split = bool(iteration.get("wgrad_start"))
    parts = []
    for mode, kind in _MODES.items():
        start, end = (_numbers(path, step, iteration, f"{mode}_{side}") for side in ("start", "end"))
        if len(start) != len(end) or (end < start).any():
            finding = (
                f"{len(start)} starts and {len(end)} ends" if len(start) != len(end) else "ends before their starts"
            )
            raise TraceError(f"{path}: iteration {step}: {mode} has {finding}; expected pairs; was the dump truncated?")
        chunk = _ids(iteration, f"{mode}_chunk", len(start))
        microbatch = _ids(iteration, f"{mode}_minibatch", len(start))
        part = pd.DataFrame({"step": step, "kind": kind, "start_ns": start + begin_ns, "end_ns": end + begin_ns})
        part["chunk"] = _UNKNOWN if chunk is None else chunk
        part["microbatch"] = part.groupby("chunk").cumcount() if microbatch is None else microbatch
        parts.append(part)
    ops = pd.concat([part for part in parts if len(part)], ignore_index=True)
    if is_split:
        weights = ops.loc[ops["kind"] == "W", ["chunk", "microbatch"]].apply(tuple, axis=1)
        iterations = ops[["chunk", "microbatch"]].apply(tuple, axis=1)
        ops.loc[(ops["kind"] == "B") & iterations.isin(set(weights)), "kind"] = "I"
    return ops


def _ids(iteration: Mapping[str, Any], name: str, num: int) -> Sequence[int] | None:
    values = iteration.get(name)
    if isinstance(values, list) and len(values) == num and all(isinstance(value, int) for value in values):
        return values
    return None


def _stages(ops: pd.DataFrame, pp_rank: int, pp: int, is_v: bool) -> Int64:
    chunk = ops["chunk"].to_numpy(dtype=np.int64)
    return stages_of_chunks(chunk, np.full(len(ops), pp_rank, dtype=np.int64), pp, is_v)


def _first_op_ns(ops: pd.DataFrame) -> dict[int, int]:
    """Start of the first op of each iteration, ns."""
    first = ops.groupby("step")["start_ns"].min()
    return dict(zip(first.index.tolist(), first.tolist(), strict=True))


def _memory(
    iterations: Mapping[int, Mapping[str, Any]], first_op_ns: Mapping[int, int], pp_rank: int
) -> pd.DataFrame | None:
    memory_by_step = {
        step: it["memory"] for step, it in iterations.items() if isinstance(it.get("memory"), int | float)
    }
    if not memory_by_step:
        return None
    reserved = [round(value * _GIB) for value in memory_by_step.values()]
    time_ns = [first_op_ns[step] for step in memory_by_step]  # within the step's window, whichever rank begins it
    return make_table(
        MEMORY,
        {"rank": [pp_rank] * len(time_ns), "t_ns": time_ns, "allocated_bytes": reserved, "reserved_bytes": reserved},
    )


def _config(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _size(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) and 0 < value <= _MAX_RANKS else None


def _facts(config: Mapping[str, Any], pp: int, chunks: int | None) -> dict[str, Any]:
    sizes = {axis: _size(config, f"{axis}_size") for axis in ("tp", "dp", "ep")}
    return {"mesh": {"pp": pp, "vpp": chunks, "cp": None, **sizes}, "world_size": pp, "pp_ranks": list(range(pp))}


def _notes(config: Mapping[str, Any], pp: int, has_memory: bool) -> list[str]:
    world = _size(config, "world_size")
    lines = [
        "each rank's times count from its own start of the iteration: waits are only as exact as these starts were simultaneous"
    ]
    if world is not None and world > pp:
        lines.append(f"the dump holds one pipeline ({pp} ranks) of a job of {world}")
    if has_memory:
        lines.append(
            "memory is the allocator's peak of reserved memory since the start of the run, read once per iteration"
        )
    return lines
