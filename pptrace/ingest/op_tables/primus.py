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

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from pptrace.errors import TraceError
from pptrace.ingest.common.json_texts import LIMIT_NS, document_in, object_in, to_ns
from pptrace.ingest.ops.build import Tables
from pptrace.ingest.ops.steps import assign_stages, stages_of_chunks
from pptrace.model.tables import MEMORY, Int64, make_table, ops_table

_FILE = re.compile(r"pp_rank_(\d{1,6})\.json")
_MODES = {"fwd": "F", "bwd": "B", "wgrad": "W"}
_GIB = 2**30
_UNKNOWN = -1
_MOST_MS, _MOST_GIB = LIMIT_NS / 1e6, 2.0**30
_MAX_RANKS = 1_000_000


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
    config = object_in(path.parent / "config.json")
    sizes = {name: value for name, value in config.items() if isinstance(value, int) and 0 < value <= _MAX_RANKS}
    pp = sizes.get("pp_size") or max(map(_rank, files)) + 1
    parts, begin_ns = [], 0
    for step, iteration in iterations.items():  # one after another
        parts.append(_ops(path, step, iteration, begin_ns))
        begin_ns += max(totals.get(step, 0), _total_ns(path, step, iteration))
    ops = pd.concat(parts, ignore_index=True).assign(rank=pp_rank)
    chunk = ops["chunk"].to_numpy(dtype=np.int64)
    ops["stage"] = stages_of_chunks(chunk, np.full(len(ops), pp_rank, dtype=np.int64), pp, is_v)
    memory = _memory(iterations, ops, pp_rank)
    world, notes = sizes.get("world_size", 0), [_OWN_STARTS]
    if world > pp:
        notes.append(f"the dump holds one pipeline ({pp} ranks) of a job of {world}")
    if len(memory):
        notes.append(_MEMORY_NOTE)
    vpp = int(ops["chunk"].max()) + 1 or sizes.get("vp_size") or sizes.get("vpp_size")
    other_axes = {axis: sizes.get(f"{axis}_size") for axis in ("tp", "dp", "ep")}
    facts = {
        "mesh": {"pp": pp, "vpp": vpp, "cp": None, **other_axes},
        "world_size": pp,
        "pp_ranks": list(range(pp)),
        "notes": notes,
    }
    table = ops_table({"step": 0, **{str(name): ops[name] for name in ops}})
    return Tables("primus", "primus pp dump", table, memory=memory, facts=facts)


_OWN_STARTS = (
    "each rank's times count from its own start of the iteration: waits are only as exact as these starts were "
    "simultaneous"
)
_MEMORY_NOTE = "memory is the allocator's peak of reserved memory since the start of the run, read once per iteration"


def _rank(path: Path) -> int:
    """The pipeline rank in a file's name; -1 without one."""
    match = _FILE.fullmatch(path.name)
    return int(match[1]) if match else _UNKNOWN


def _iterations(path: Path) -> dict[int, Mapping[str, Any]]:
    document = document_in(path, "Primus dump; copy it again")
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
    if isinstance(values, list) and all(_is_number(value, _MOST_MS) for value in values):
        times, is_valid = to_ns(pd.Series(values, dtype="float64"), "ms")
        if is_valid.all():
            return times
    raise TraceError(f"{path}: iteration {step}: {name!r} is no list of times; expected milliseconds; dump it again")


def _total_ns(path: Path, step: int, iteration: Mapping[str, Any]) -> int:
    """Duration of an iteration, ns: its total, and at least until the end of its last op."""
    total = iteration.get("total")
    total_ns, _ = to_ns(pd.Series([total if _is_number(total, _MOST_MS) else 0.0], dtype="float64"), "ms")
    ends = [_numbers(path, step, iteration, f"{mode}_end") for mode in _MODES]
    return int(max([*total_ns.tolist(), *(part.max() for part in ends if len(part))]))


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
    if (
        isinstance(values, list)
        and len(values) == num
        and all(isinstance(value, int) and abs(value) <= _MAX_RANKS for value in values)
    ):
        return values
    return None


def _is_number(value: object, most: float) -> bool:
    return isinstance(value, int | float) and abs(value) <= most


def _memory(iterations: Mapping[int, Mapping[str, Any]], ops: pd.DataFrame, pp_rank: int) -> pd.DataFrame:
    """The memory of each iteration, within the step's window, whichever rank begins it."""
    memory = {step: it["memory"] for step, it in iterations.items() if _is_number(it.get("memory"), _MOST_GIB)}
    if "activation_memory_usage" in next(iter(iterations.values())):
        memory = {}
    reserved = [round(value * _GIB) for value in memory.values()]
    first_op_ns = ops.groupby("step")["start_ns"].min()
    return make_table(
        MEMORY,
        {
            "rank": [pp_rank] * len(memory),
            "t_ns": [int(first_op_ns[step]) for step in memory],
            "allocated_bytes": reserved,
            "reserved_bytes": reserved,
        },
    )
