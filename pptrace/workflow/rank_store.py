"""Serialise recognised ranks for the disk cache: see :mod:`pptrace.ingest.job.disk_cache`.

Only those facts of a trace that the analysis uses are passed on, cached or not: an export may also hold environment
variables, command lines and home directories.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from pptrace.analysis.links.peaks import PORTS
from pptrace.analysis.shared_devices import DEVICE_ID
from pptrace.environment import read_environment
from pptrace.ingest.common.byte_source import num_text_bytes
from pptrace.ingest.inputs.resolve import InputFile
from pptrace.ingest.job.disk_cache import MIN_TEXT_BYTES, Cache, cache_for, key_of
from pptrace.ingest.job.packing import DAMAGE, pack, unpack
from pptrace.model.predicted import PREDICTED
from pptrace.model.tables import CALLS, COMMS, HOST_ORDER, MEMORY, OPS
from pptrace.model.traces import BOOT_NS, DEVICE_NAMES, HOST_NAME, InputFormat, Trace
from pptrace.recognise.damage import damage_of, without_damaged_events
from pptrace.recognise.rank import recognise_rank
from pptrace.recognise.recognised_rank import RecognisedRank
from pptrace.recognise.recording.rank import SETTINGS, STEP_TIMES, recording_of
from pptrace.recognise.recording.replay import Corrections

_FACTS = frozenset(
    {
        *("schema", "rank", "local_rank", "world_size", "host", "mesh", "pp_ranks", "plan", "model", "steps"),
        *("backend", "device", "clock", "one_clock", "notes", "framework", "hooks", "groups", "parallel"),
        *("communicators", "memory", "versions", "environment", "core_wait", "experts", PORTS, HOST_NAME, DEVICE_NAMES),
        *(BOOT_NS, DEVICE_ID, SETTINGS, STEP_TIMES, PREDICTED),
    }
)
_DISTRIBUTED = frozenset({"backend", "rank", "world_size", "pg_count", "pg_config"})
_SCHEMAS = {"ops": OPS, "comms": COMMS, "memory": MEMORY, "calls": CALLS, "host": HOST_ORDER}


def recognise_trace(trace: Trace) -> RecognisedRank:
    """:func:`recognise_rank` with what its recording did to it, without the facts that the analysis does not use."""
    trace = without_damaged_events(trace)
    rank = _public_rank(trace)
    recording = recording_of(trace, (rank.ops, rank.comms, rank.calls))
    return replace(rank, recording=replace(recording, damage=damage_of(trace, rank.work)))


def recognise_corrected(corrections: Corrections, trace: Trace) -> RecognisedRank:
    """:func:`recognise_rank` of the trace as it would have been without its recording."""
    return _public_rank(corrections.corrected(without_damaged_events(trace)))


def _public_rank(trace: Trace) -> RecognisedRank:
    rank = recognise_rank(trace)
    info = rank.info
    public_info = replace(
        info, metadata=_only(info.metadata, _FACTS), distributed=_only(info.distributed, _DISTRIBUTED)
    )
    return rank.with_info(public_info)


def _only(facts: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    kept = {name: value for name, value in facts.items() if name in names}
    if isinstance(kept.get("environment"), Mapping):  # of another writer: anything may be in it
        kept["environment"] = read_environment(kept["environment"])
    return kept


class RankStore(Struct, frozen=True):
    """Disk cache of recognised ranks, for files of at least ``min_text_bytes`` of text. Picklable.

    ``corrections`` is the digest of those with which the files are recognised, "" without.
    """

    min_text_bytes: int = MIN_TEXT_BYTES
    corrections: str = ""

    def peek(self, file: InputFile) -> tuple[RecognisedRank, ...] | None:
        """The cached ranks of a file whose size and times have not changed since it was hashed; reads no content."""
        return self._read(file, hash_now=False)

    def get(self, file: InputFile) -> tuple[RecognisedRank, ...] | None:
        """The cached ranks of a file with this content, at whatever path; hashes it if necessary."""
        return self._read(file, hash_now=True)

    def put(self, file: InputFile, ranks: Sequence[RecognisedRank]) -> None:
        if not self._is_cached(file):
            return
        cache = cache_for(file.path)
        key = self._key(cache, file, hash_now=True)
        if key is None:
            return
        try:
            packed = pack(ranks, [file.path])
        except (TypeError, ValueError):  # a value that cannot be cached
            return
        cache.write(key, packed)

    def _key(self, cache: Cache, file: InputFile, hash_now: bool) -> str | None:
        key = cache.key(file.path, hash_now)
        return key_of(key, self.corrections) if key is not None and self.corrections else key

    def _is_cached(self, file: InputFile) -> bool:
        """Return whether a file is large enough, and no op table, the reading of which depends on other files as well."""
        return num_text_bytes(file.path) >= self.min_text_bytes and file.format is not InputFormat.OPLOG

    def _read(self, file: InputFile, hash_now: bool) -> tuple[RecognisedRank, ...] | None:
        if not self._is_cached(file):
            return None
        cache = cache_for(file.path)
        key = self._key(cache, file, hash_now)
        packed = cache.read(key) if key is not None else None
        if packed is None:
            return None
        try:
            ranks = unpack(packed, tuple[RecognisedRank, ...], [file.path])
        except DAMAGE:  # damaged, or from another version
            return None
        tables = [(getattr(rank, name), schema) for rank in ranks for name, schema in _SCHEMAS.items()]
        return ranks if all(tuple(table) == tuple(schema) for table, schema in tables) else None
