"""Read ranks of processes, start of the session and producer from an Nsight Systems export.

An export also contains environments, the list of processes, home directories and host names. Only the ranks in these are
returned from this module.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pptrace.ingest.common.json_texts import LIMIT_NS, object_of
from pptrace.ingest.common.rank_names import rank_of_labels, rank_of_value
from pptrace.ingest.common.sqlite import Database
from pptrace.marks import METADATA_TABLE

RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
"""Variables of the environment in which launchers tell a process its rank, the first of them counts."""
_VARIABLE = re.compile(rf'(?:^|[\0\n\s])({"|".join(RANK_VARIABLES)})="?(\d{{1,9}})"?(?=$|[\0\n\s])')
_VERSION = re.compile(r"\d+(?:\.\d+){1,4}")
_NAMED_THREAD = (39, 72)  # event types NvtxThread and NvtxtMetaThread
_TID_BITS = 24
_ABSOLUTE_NS = 10**18  # no session lasts thirty years: later times are wall-clock times


def session_of(db: Database) -> tuple[int | None, Mapping[str, Any]]:
    """(start of the session, UTC ns, to which all times of the export are relative; facts from which :mod:`pptrace.clock` knows
    that the processes of a report share a clock); None and {} if it is unknown.
    """
    table = "TARGET_INFO_SESSION_START_TIME"
    start, monotonic = (
        next((value for (value,) in db.all_rows(table, (name,)) if type(value) is int), None)
        for name in ("utcEpochNs", "systemClockNs")
    )
    if start is None or not 0 < start < LIMIT_NS:
        return None, {}
    reading = {"time_ns": start, "monotonic_ns": monotonic or 0}
    return start, {"host": f"session {start}", "clock": {"start": reading}}


def base_ns(db: Database, session_ns: int | None, first_ns: int) -> tuple[int, list[str]]:
    """(offset to add to the export's times, ns; a warning if it is unknown). ``first_ns`` is one of these times."""
    if _exported(db).get("EXPORT_PARAM_TIME_NORMALIZE") == "true" or first_ns > _ABSOLUTE_NS:
        return 0, []  # nsys export --ts-normalize
    if session_ns is None:
        return 0, ["the start of the recording is not in it: times cannot be compared with those of other files"]
    return session_ns, []


def producer_of(db: Database) -> str:
    """Name the producer, such as ``nsys 2026.2.1.210 (schema 3.25.0)``."""
    facts = _exported(db)
    version = _VERSION.fullmatch(facts.get("EXPORT_PRODUCT_VERSION", ""))
    schema = _VERSION.fullmatch(facts.get("EXPORT_SCHEMA_VERSION", ""))
    return f"nsys{f' {version[0]}' if version else ''}{f' (schema {schema[0]})' if schema else ''}"


def recorded_facts(db: Database) -> Mapping[int, Mapping[str, Any]]:
    """Facts by pid that ``pptrace run`` wrote into the export of its run."""
    rows = db.all_rows(METADATA_TABLE, ("pid", "facts"))
    return {pid: facts for pid, text in rows if type(pid) is int and (facts := object_of(text))}


def ranks_of(db: Database, pids: Sequence[int]) -> Mapping[int, int]:
    """Rank by pid, where known: from MPI, names of threads and processes, or the environment.

    A rank that two processes claim is assigned to neither.
    """
    of_mpi = [(_pid(tid), rank_of_value(rank)) for tid, rank in db.all_rows("MPI_RANKS", ("globalTid", "rank"))]
    rank_by_pid: dict[int, int] = {}
    for pid in pids:
        ranks = {rank for other, rank in of_mpi if other == pid}
        rank = ranks.pop() if len(ranks) == 1 else None
        if rank is not None or (rank := rank_of_labels(_labels(db, pid))) is not None:
            rank_by_pid[pid] = rank
    if len(pids) == 1 and not rank_by_pid and (rank := _environment_rank(db)) is not None:
        rank_by_pid = {pids[0]: rank}
    claimed_ranks = list(rank_by_pid.values())
    return {pid: rank for pid, rank in rank_by_pid.items() if claimed_ranks.count(rank) == 1}


def _labels(db: Database, pid: int) -> Iterator[str]:
    """Yield the names of the process and its threads."""
    threads = [name for name, tid in db.all_rows("ThreadNames", ("nameId", "globalTid")) if _pid(tid) == pid]
    yield from db.texts("StringIds", "value", list({name for name in threads if type(name) is int})).values()
    for global_id, name in db.all_rows("PROCESSES", ("globalPid", "name")):
        if _pid(global_id) == pid and isinstance(name, str):
            yield name.rpartition("/")[2]
    if db.has("NVTX_EVENTS", "eventType"):
        where = f"WHERE eventType IN {_NAMED_THREAD}"
        for tid, text in db.all_rows("NVTX_EVENTS", ("globalTid", "text"), where):
            if _pid(tid) == pid and isinstance(text, str):
                yield text


def _environment_rank(db: Database) -> int | None:
    """The rank in the environment of the profiled program; only valid if the export has one process."""
    texts = [
        value
        for name, value in db.all_rows("META_DATA_CAPTURE", ("name", "value"))
        if isinstance(name, str) and isinstance(value, str) and name.endswith("ENVIRONMENT_VARIABLE")
    ]
    if not texts:  # older exports keep it as one of their strings
        texts = [value for (value,) in db.all_rows("StringIds", ("value",), "WHERE instr(value, 'RANK=')") if value]
    ranks: dict[str, set[int]] = {}
    for text in texts:
        for match in _VARIABLE.finditer(text):
            ranks.setdefault(match[1], set()).add(int(match[2]))
    ranks_of_variable = next((ranks[name] for name in RANK_VARIABLES if name in ranks), set())
    return ranks_of_variable.pop() if len(ranks_of_variable) == 1 else None


def _exported(db: Database) -> Mapping[str, str]:
    """Facts of the exporter, from the table of either schema generation."""
    rows = [row for table in ("META_DATA_EXPORT", "EXPORT_META_DATA") for row in db.all_rows(table, ("name", "value"))]
    return {name: value for name, value in rows if isinstance(name, str) and isinstance(value, str)}


def _pid(serialized: object) -> int | None:
    return serialized >> _TID_BITS & 0xFFFFFF if type(serialized) is int else None
