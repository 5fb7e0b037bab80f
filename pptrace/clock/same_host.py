"""Clocks of ranks that ran on one host, from the readings that each recorder took of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def same_host_spread(ranks: Sequence[int], facts: Mapping[int, Mapping[str, object]]) -> int | None:
    """How far the ranks' (wall − monotonic) differ, ns, when all ran on one host; None otherwise."""
    hosts = {str(facts.get(rank, {}).get("host")) for rank in ranks}
    if len(hosts) != 1 or "None" in hosts:
        return None
    differences = [
        int(sample["time_ns"]) - int(sample["monotonic_ns"])
        for rank in ranks
        for sample in _samples(facts.get(rank, {}))
    ]
    return max(differences) - min(differences) if differences else None


def _samples(facts: Mapping[str, object]) -> list[Mapping[str, int]]:
    """The clock readings of a rank: {"start": {…}, "stop": {…}}, each with ``time_ns`` and ``monotonic_ns``."""
    readings = facts.get("clock")
    if not isinstance(readings, Mapping):
        return []
    return [
        reading
        for reading in readings.values()
        if isinstance(reading, Mapping)
        and all(isinstance(reading.get(key), int) for key in ("time_ns", "monotonic_ns"))
    ]
