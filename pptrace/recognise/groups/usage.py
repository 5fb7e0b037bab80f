"""The usage of a process group, the axis that it suggests, and the global ranks of the members of communicators in which each
process records only its own rank.

Where no call names its process group, as of Kineto of older versions of torch, collectives of all ranks are found by their ends:
a collective ends together on its ranks, however late each of them came to it. Where all ranks of a run have a trace and make the
same collectives in one order, one offset of each rank's clock lets them end together, and some ranks come much later than
others, they are collectives of all ranks: groups of fewer would end as far apart as they began.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from enum import IntEnum
from typing import Any

import numpy as np
import pandas as pd
from msgspec import Struct, field
from msgspec.structs import replace

from pptrace.clock.bounds import ALL_TO_ALL
from pptrace.clock.result import READING_NS
from pptrace.marks import P2P
from pptrace.model.tables import are_uneven
from pptrace.model.traces import COMMUNICATORS
from pptrace.model.wording import counted
from pptrace.recognise.groups.topology import Group

USE_COLUMNS = ("kind", "hint", "backward", "bytes", "splits")
"""The columns of calls that tell how their group is used."""


class When(IntEnum):
    """Time of a call in a rank's step: in autograd's engine, before an update that comes before any backward, in forwards; else
    outside of the engine, or it has none.
    """

    WITHOUT_ENGINE = -1
    OUTSIDE = 0
    IN_ENGINE = 1
    BEFORE_UPDATE = 2
    IN_FORWARD = 3


class Use(Struct):
    """Use of a group, or of a family of equal groups.

    ``kinds``, ``backward`` (of all-reduces, a :class:`When`) and ``hints`` count the calls of all ranks; ``trains`` says whether
    a trace has an engine. ``num_equal`` is how many all-reduces of one size a rank makes in a step, where these are most of them,
    of all sizes where no call tells its own; ``largest_bytes`` is of an all-reduce, -1 where no call tells its size.
    ``is_uneven``: an all-to-all has parts of different sizes, as those of tokens to experts have.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    backward: Counter[int] = field(default_factory=Counter)
    hints: Counter[str] = field(default_factory=Counter)
    trains: bool = False
    num_equal: float = 0.0
    largest_bytes: int = -1
    is_uneven: bool = False

    @property
    def is_of_experts(self) -> bool:
        """Return whether something but the kind of its calls says that they carry tokens to experts."""
        return self.is_uneven or "ep" in self.hints

    @property
    def gathers_and_sums(self) -> bool:
        """Return whether it gathers and all-reduces: keys of other parts of a sequence and their gradients, or what an optimizer
        has of each rank.
        """
        return self.kinds["all_gather"] > 0 and self.kinds["all_reduce"] > 0 and not self.kinds["reduce_scatter"]

    def without_messages(self) -> Use:
        """The use by collectives alone."""
        return replace(self, kinds=Counter({kind: count for kind, count in self.kinds.items() if kind not in P2P}))

    def add(self, calls: pd.DataFrame, num_steps: int) -> None:
        """Count the calls that one rank made in so many steps."""
        self.kinds.update(_counts(calls["kind"]))
        self.hints.update({hint: count for hint, count in _counts(calls["hint"]).items() if hint})
        self.trains = self.trains or bool((calls["backward"] >= 0).any())
        reduced = calls[calls["kind"] == "all_reduce"]
        self.backward.update(_counts(reduced["backward"]))
        sizes = {size: count for size, count in _counts(reduced["bytes"]).items() if size >= 0}
        most = max(sizes.values(), default=0 if (reduced["bytes"] >= 0).any() else len(reduced))
        if 2 * most >= len(reduced):
            self.num_equal = max(self.num_equal, most / max(num_steps, 1))
        self.largest_bytes = max(self.largest_bytes, max(sizes, default=-1))
        self.is_uneven = self.is_uneven or bool(are_uneven(calls["splits"].unique().tolist()).any())


def _counts(column: pd.Series[Any]) -> dict[Any, int]:
    """The number of rows of each value, values as they come first."""
    codes, values = pd.factorize(column)
    return dict(zip(values.tolist(), np.bincount(codes, minlength=len(values)).tolist(), strict=True))


def merge_usage(uses: Iterable[Use]) -> Use:
    """Add up the usage of several groups."""
    merged = Use()
    for use in uses:
        merged.kinds += use.kinds
        merged.backward.update(use.backward)
        merged.hints += use.hints
        merged.trains = merged.trains or use.trains
        merged.num_equal = max(merged.num_equal, use.num_equal)
        merged.largest_bytes = max(merged.largest_bytes, use.largest_bytes)
        merged.is_uneven = merged.is_uneven or use.is_uneven
    return merged


_SEVERAL = 2
"""A single all-to-all may be anything."""
_MANY = 8
"""Number of equal all-reduces per rank and step above which they are not a few buckets of gradients."""
_IN_FORWARDS = 0.25
"""Share of all-reduces in forwards from which on they are none of gradients."""
_FEW_BYTES = 64
"""Bytes of an all-reduce up to which it is not one of gradients but of a norm, a loss, a flag."""


_IN_BACKWARD = ("dp", "its all-reduces in the backward")


def axis_of_use(use: Use, assigned: Collection[str], group: Group) -> tuple[str, str] | None:
    """(axis, reason) that the calls in a group suggest; None where they suggest none. ``assigned`` axes have groups already."""
    kinds, num_calls = use.kinds, sum(use.kinds.values())
    for axis, count in use.hints.most_common(1):
        if 2 * count >= num_calls:
            return axis, f"its kernels or the ranges around its calls, which are made for {axis}"
    messages = kinds["send"] + kinds["recv"]
    if messages and messages >= num_calls / 2:
        return ("cp", "its ring of sends and receives") if "pp" in assigned else ("pp", "its sends and receives")
    if kinds["all_to_all"] >= _SEVERAL and kinds["all_to_all"] >= (num_calls - messages) / 2:
        if use.is_uneven:
            return "ep", "its all-to-alls of uneven parts"
        if _axis_of_all_reduces(use, assigned) == _IN_BACKWARD:
            return _IN_BACKWARD  # embeddings may be exchanged along it as well
        return ("cp", "its all-to-alls") if "ep" in assigned else ("ep", "its all-to-alls")
    if kinds["all_reduce"] and kinds["all_reduce"] >= kinds["reduce_scatter"]:
        return _axis_of_all_reduces(use, assigned)
    if kinds["reduce_scatter"] or (kinds["all_gather"] and use.trains):
        if group.stride == 1 and "tp" not in assigned and "dp" in assigned:
            return "tp", "its all-gathers and reduce-scatters between neighbours"
        return ("dp", "its all-gathers and reduce-scatters") if "dp" not in assigned else None
    return None


def _axis_of_all_reduces(use: Use, assigned: Collection[str]) -> tuple[str, str] | None:
    """Tell the axis of all-reduces: those of activations come in the forward and in the backward, those of gradients in the
    backward or after it.
    """
    total = sum(count for when, count in use.backward.items() if when != When.WITHOUT_ENGINE)
    share = use.backward[When.IN_ENGINE] / total if total else None
    is_mixed = share is None or 0.05 <= share < 0.95
    if use.num_equal >= _MANY and is_mixed and 2 * use.backward[When.BEFORE_UPDATE] <= total:
        return ("tp", "its many equal all-reduces") if "tp" not in assigned else None
    if share is None or 0 <= use.largest_bytes <= _FEW_BYTES:
        return None  # without a backward there are no gradients
    if use.gathers_and_sums and "dp" in assigned:
        return None
    if use.backward[When.IN_FORWARD] >= _IN_FORWARDS * total:
        return None  # where there are no gradients
    if share >= 0.95 and use.num_equal < _MANY:
        return _IN_BACKWARD
    return ("dp", "its all-reduces of gradients") if "dp" not in assigned or "tp" in assigned else None


Facts = Mapping[int, Mapping[str, Any]]
_UNSURE = (
    "no communicator contains all processes of these files: their ranks are null, and so are the peers of messages"
)


Members = tuple[Mapping[int, pd.DataFrame], Facts, tuple[str, ...]]
"""(calls with the ranks of their groups, each rank's facts of the job, warnings where ranks are uncertain)."""


def with_members(calls: Mapping[int, pd.DataFrame], facts: Facts, distributed: Facts) -> Members:
    """Fill in the ranks of communicators whose members all have a trace and record their rank.

    In files of NCCL's Inspector a process takes its place in the largest communicator for its rank where that has as many ranks
    as there are files: which is right if all of them are in one.

    Args:
        calls, facts, distributed: by rank; ``facts`` name the communicators of ranks whose calls are to be filled in. Those that
            took a place for their rank say so in ``distributed``.
    """
    communicators = {
        rank: rank_facts[COMMUNICATORS]
        for rank, rank_facts in facts.items()
        if isinstance(rank_facts.get(COMMUNICATORS), Mapping)
    }
    took_place = [rank for rank in communicators if distributed.get(rank, {}).get("rank") == rank]
    claimed = took_place or [rank for rank in communicators if facts[rank].get("rank") == rank]
    if not claimed:
        return calls, distributed, ()
    by_group: dict[str, tuple[int, dict[int, int]]] = {}  # size, and the global rank of each member by its rank in it
    for rank in claimed:
        for group, (position, size) in communicators[rank].items():
            by_group.setdefault(group, (size, {}))[1][position] = rank
    ranks = {
        group: [members[position] for position in range(size)] if set(members) == set(range(size)) else []
        for group, (size, members) in by_group.items()
    }
    if took_place and sorted(claimed) not in ranks.values():
        unsure = {rank: {} if rank in communicators else rank_facts for rank, rank_facts in distributed.items()}
        return calls, unsure, (_UNSURE,)
    known = {group: json.dumps(members) for group, members in ranks.items() if members}
    filled = {
        rank: table.assign(group_ranks=[known.get(group, "") for group in table["group_id"]])
        if rank in communicators
        else table
        for rank, table in calls.items()
    }
    return filled, distributed, ()


_TOGETHER_NS = 2 * READING_NS
"""Largest distance of the ends of one collective on clocks whose drift is not known."""
_MOST = 0.9
"""Share of the collectives that have to end together: an exchange may be over on one rank before it is on others."""
_LEAST = 3
"""Number of collectives that ranks have to come to at different times: a single one can end together by chance."""
_LATER = 5
"""Times as far apart as their ends are the beginnings of those collectives."""


def with_group_of_all(
    calls: Mapping[int, pd.DataFrame], world: int
) -> tuple[Mapping[int, pd.DataFrame], tuple[str, ...]]:
    """Fill in the group of collectives that are of all ranks for sure; with a warning about them.

    Unchanged where a call names a group, or may be a message between two ranks.

    Args:
        calls: by rank its communication (schema CALLS), each rank in its own time.
        world: the number of ranks of the job.
    """
    if world < 2 or set(calls) != set(range(world)):
        return calls, ()
    ordered = [calls[rank].sort_values("start_ns", kind="stable") for rank in range(world)]
    kinds = ordered[0]["kind"].tolist()
    if not len(kinds) >= _LEAST or not set(kinds) <= set(ALL_TO_ALL):
        return calls, ()
    if any(table["kind"].tolist() != kinds or (table["group_size"] >= 0).any() for table in ordered):
        return calls, ()
    if any((table[["group_id", "description", "group_ranks"]] != "").to_numpy().any() for table in ordered):
        return calls, ()
    ran = np.all([(table["clock"] == "device").to_numpy() for table in ordered], axis=0)
    if ran.sum() < _LEAST:
        return calls, ()
    begins, ends = (np.array([table[name].to_numpy()[ran] for table in ordered]) for name in ("start_ns", "end_ns"))
    offset = np.median(ends - ends[0], axis=1).astype(np.int64)[:, None]
    apart, ended_apart = np.ptp(begins - offset, axis=0), np.ptp(ends - offset, axis=0)
    is_together = ended_apart <= _TOGETHER_NS
    is_late = is_together & (apart >= _LATER * ended_apart) & (apart > _TOGETHER_NS)
    if is_together.mean() < _MOST or is_late.sum() < _LEAST:
        return calls, ()
    ranks = json.dumps(list(range(world)))
    line = (
        f"no call names its process group: the {counted(len(kinds), 'collective')} of each rank are taken for those of all "
        f"{world} ranks, since every rank makes them in one order and they end together (within "
        f"{np.median(ended_apart) / 1e3:,.1f} µs, where ranks begin up to {apart.max() / 1e3:,.1f} µs apart)"
    )
    return {rank: table.assign(group_ranks=ranks, group_size=world) for rank, table in calls.items()}, (line,)
