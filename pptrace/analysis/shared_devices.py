"""GPUs that several ranks have: by the identity that a recorder wrote, or because kernels of different ranks take turns.

Ranks that waited for a processor core: what other work on their machine, or more threads than cores, cost them.

``pptrace run`` records for how long the threads of a rank were ready to run and had no core (Linux: schedstat of its threads).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median_low
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from pptrace.analysis.result import Finding, RankDevice, StepReport
from pptrace.analysis.stragglers.alike import LONG_OPS
from pptrace.analysis.stragglers.hosts import LATE_LAUNCHES, LATE_OP, LATE_START, PAUSES
from pptrace.analysis.stragglers.reason import FEWEST_STEPS, LEAST_LOW
from pptrace.analysis.whole_run import CoreWait
from pptrace.intervals import Int64, intersect, length, union
from pptrace.model.traces import HOST_NAME
from pptrace.model.wording import as_ranges
from pptrace.timeline.lanes import Lane

DEVICE_ID = "device_id"
"""The fact of a rank that is equal to another one's exactly if they share a GPU."""
_LEAST_CHANCE = 10.0
"""Pairs of kernels that would overlap by chance from which none that does is no accident (once in 20,000 such runs)."""
_LEAST_OF_RANK = 3.0
"""The same of one rank: one that never works while the others do shows nothing."""
_MOST_RANKS, _MOST_KERNELS = 32, 5_000
"""Ranks of a host that are compared, each with each, and kernels of each that are looked at."""


class SharedDevice(Struct, frozen=True):
    """Ranks that share a GPU. ``by_chance`` is how many of their kernels would overlap one of another rank by chance, where that
    none does is how it is known; None where their recorders wrote which GPU they had. ``busy_share`` is the part of the time in
    which they keep it busy, all together; None where that is not known.
    """

    ranks: tuple[int, ...]
    by_chance: int | None = None
    busy_share: float | None = None


TAKING_TURNS = "kernels begin late and run long while those of another rank run"
OWN_DEVICE = "give each rank a GPU of its own, as torch.cuda.set_device(local_rank) does"


def who_shares(sharing: Sequence[SharedDevice]) -> str:
    """The ranks that share a GPU, with how that is known where no recorder wrote it."""
    who = f"{' and '.join(f'ranks {as_ranges(device.ranks)}' for device in sharing)} share a GPU, where their work takes turns"
    chance = next((device.by_chance for device in sharing if device.by_chance is not None), None)
    if chance is None:
        return who
    return f"{who} (no kernel of one overlaps a kernel of another, where by chance {chance:,} pairs would)"


def with_busy_shares(sharing: Sequence[SharedDevice], devices: Sequence[RankDevice]) -> tuple[SharedDevice, ...]:
    """The GPUs with the part of the whole trace in which each is busy, from the sums of its ranks (``devices``)."""
    times = {device.rank: (device.breakdown.busy_ns, device.breakdown.idle_ns) for device in devices}
    with_shares = []
    for shared in sharing:
        known = [times[rank] for rank in shared.ranks if rank in times]
        sums = [(busy, busy + idle) for busy, idle in known if busy is not None and idle is not None]
        longest = max((total for _, total in sums), default=0)
        is_known = longest and len(sums) == len(shared.ranks)
        with_shares.append(
            replace(shared, busy_share=min(1.0, sum(busy for busy, _ in sums) / longest) if is_known else None)
        )
    return tuple(with_shares)


def devices_by_identity(facts: Mapping[int, Mapping[str, Any]]) -> tuple[SharedDevice, ...]:
    """The GPUs that several ranks have by what their recorders wrote."""
    ranks_of: dict[str, list[int]] = {}
    for rank, of_rank in sorted(facts.items()):
        if of_rank.get(DEVICE_ID):
            ranks_of.setdefault(str(of_rank[DEVICE_ID]), []).append(rank)
    return tuple(SharedDevice(tuple(ranks)) for ranks in ranks_of.values() if len(ranks) > 1)


def shared_devices(
    facts: Mapping[int, Mapping[str, Any]],
    lanes: Mapping[int, Lane],
    steps: Sequence[StepReport],
    num_microbatches: int | None,
) -> tuple[SharedDevice, ...]:
    """The same, and of ranks without such a fact those whose kernels of compute take turns in steps as they were recorded.

    A GPU runs kernels of one process at a time, unless they are longer than its slices of time: short ones never overlap.
    On GPUs of their own, those of ranks that work at the same time do about as often as chance would have it. Ranks of a pipeline
    without a second microbatch never work at the same time.
    """
    known = devices_by_identity(facts)
    if known or not steps or num_microbatches == 1:
        return known
    of_host: dict[str, list[int]] = {}
    for rank, lane in sorted(lanes.items()):
        of_rank = facts.get(rank, {})
        if lane.on_device and not of_rank.get(DEVICE_ID):
            of_host.setdefault(str(of_rank.get("host") or of_rank.get(HOST_NAME)), []).append(rank)
    bounds = np.array([(step.start_ns, step.end_ns) for step in steps], dtype=np.int64)
    within = union(bounds[:, 0], bounds[:, 1])
    return tuple(group for ranks in of_host.values() for group in _taking_turns(ranks, lanes, within))


def _taking_turns(ranks: Sequence[int], lanes: Mapping[int, Lane], within: Int64) -> Iterator[SharedDevice]:
    """Groups of ranks of a host, of which no kernel of one overlaps a kernel of another."""
    if not 1 < len(ranks) <= _MOST_RANKS:
        return
    kernels = {rank: intersect(lanes[rank].compute, within)[:_MOST_KERNELS] for rank in ranks}
    active = {}
    for rank, of_rank in kernels.items():  # from its first to its last kernel in each step
        starts = of_rank[:, 0]
        first, last = np.searchsorted(starts, within[:, 0]), np.searchsorted(starts, within[:, 1])
        has = last > first
        active[rank] = np.stack((starts[first[has]], of_rank[last[has] - 1, 1]), axis=1)
    by_chance = dict.fromkeys(ranks, 0.0)
    left = list(ranks)
    while left:
        group = left[:1]
        for rank in left[1:]:
            found = [_chance(kernels[rank], kernels[one], intersect(active[rank], active[one])) for one in group]
            if any(overlaps for overlaps, _ in found):
                continue
            for member, (_, expected) in zip(group, found, strict=True):
                by_chance[member] += expected
                by_chance[rank] += expected
            group.append(rank)
        left = [rank for rank in left if rank not in group]
        shown = tuple(rank for rank in group if by_chance[rank] >= _LEAST_OF_RANK)
        total = sum(by_chance[rank] for rank in shown) / 2  # each pair is of two
        if len(shown) > 1 and total >= _LEAST_CHANCE:
            yield SharedDevice(shown, round(total))


def _chance(one: Int64, other: Int64, both: Int64) -> tuple[int, float]:
    """(pairs of kernels of two ranks that overlap, those that would by chance) while both ranks are active."""
    one, other, total = intersect(one, both), intersect(other, both), length(both)
    if not total:
        return 0, 0.0
    return len(intersect(one, other)), (len(one) * length(other) + len(other) * length(one)) / total


USUAL_CORE_WAIT = 0.03
"""Share of the time up to which ranks may wait for a core without their runs deviating more from one another."""
CORE_WAIT = 0.2
"""Standard deviation from run to run as a share of the time for which ranks waited for a core: what else a machine does differs
from run to run. Runs of one program deviated by 0.16 % where they waited for 0.9 %, with ops a quarter as long by 0.4 % where
they waited for 1.9 %, and by 3 to 5 % where they waited for 20 to 50 %.
"""
_DOUBTFUL = 0.1
"""Share of the time for which ranks wait for a core from which on a report says so."""
_LEAST_SHARE = 0.05
"""Smaller shares are named in no finding."""
_STEADY = 0.05
"""Width of a gain's 90 % interval, as a share of it, below which it varies less from step to step than waits for a core do: if
these deviate by :data:`CORE_WAIT`, it is 0.2 with ten steps, and this with 170.
"""
_CAUSES = frozenset({"host", "jitter", "straggler", "unexplained"})
"""Causes that a wait for a core may explain."""
_MAY_BE_STEADY = ("host", "straggler")
_REASONS = frozenset({None, LONG_OPS, LATE_LAUNCHES, LATE_OP, LATE_START, PAUSES})
"""Reasons that it may explain; others are explained."""


def core_waits_of(facts: Mapping[int, Mapping[str, Any]]) -> tuple[CoreWait, ...]:
    """Waits of the ranks for a core, by the facts of their traces; of those that tell."""
    waits = ((rank, _share(of_rank.get("core_wait"))) for rank, of_rank in sorted(facts.items()))
    return tuple(CoreWait(rank, share) for rank, share in waits if share is not None)


def _share(recorded: object) -> float | None:
    if not isinstance(recorded, Mapping):
        return None
    waited, elapsed = recorded.get("wait_ns"), recorded.get("elapsed_ns")
    is_known = isinstance(waited, int) and isinstance(elapsed, int) and waited >= 0 and elapsed > 0
    return waited / elapsed if is_known else None  # type: ignore[operator]


def line_of_waits(waits: Sequence[CoreWait]) -> str:
    """The line about waits that make times of a run doubtful; "" where they are short or not known."""
    share = fmean(wait.share for wait in waits) if waits else 0.0
    if share <= _DOUBTFUL:
        return ""
    return f"{waiting_words(share)}: what ops take has that in it; record on a quiet machine"


def waiting_words(share: float) -> str:
    """Words for how long ranks waited for a core, of whose threads several may wait at once."""
    waited = f"ranks waited for a core for {share:.1%} of the time, the threads of each added up"
    if share > 1:
        waited = f"on average {share:.2f} threads of a rank waited for a core"
    return f"{waited}, because of other work on the machine or more threads than cores"


def wait_behind(
    finding: Finding, waits: Sequence[CoreWait], step_ns: int, num_steps: int = FEWEST_STEPS
) -> CoreWait | None:
    """The wait for a core of the finding's rank, or of the rank that waited most, where it is long enough to be all of it in a
    step of this length, ns; else None. What others waited too is not why one rank is later than they are, what ranks waited in
    all steps not why single ones are long, which the interval of so many steps shows; and what hosts take of each step alike (a
    sleep, a lock) is no such wait.
    """
    evidence, low, high, gain = finding.evidence, finding.gain_low_ns, finding.gain_high_ns, finding.gain_ns or 0
    if evidence.get("cause") not in _CAUSES or evidence.get("reason") not in _REASONS:
        return None
    named = evidence["where"].get("rank")
    most = max((wait for wait in waits if named in (None, wait.rank)), key=lambda wait: wait.share, default=None)
    if most is None or (low is not None and num_steps >= FEWEST_STEPS and low < LEAST_LOW * gain):
        return None
    is_steady = low is not None and high is not None and num_steps >= FEWEST_STEPS and high - low < _STEADY * gain
    if is_steady and evidence["cause"] in _MAY_BE_STEADY:
        return None
    others = [] if named is None else [wait.share for wait in waits if wait.rank != named]
    least = max(_LEAST_SHARE, gain / max(step_ns, 1))
    return most if most.share - (median_low(others) if others else 0) >= least else None
