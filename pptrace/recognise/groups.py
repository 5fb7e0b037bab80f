"""Process groups → axes of the mesh (tp, pp, cp, dp, ep), pipelines of global ranks, and what that was taken from.

In this order: the description that the framework gave the group; what the group is used for; the shape of its rank list. A group
that nothing tells about keeps the axis "unknown".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from pptrace.recognise.group_descriptions import axis_of_description
from pptrace.recognise.group_shapes import (
    GROUP_COLUMNS,
    UNKNOWN,
    CallKey,
    Group,
    key_of,
    one_way_rings,
    peer_pipelines,
    ranks_of,
    sizes_of,
)


@dataclass(slots=True)
class Use:
    """What a group, or a family of equal groups, was used for."""

    kinds: Counter[str] = field(default_factory=Counter)
    sizes: Counter[tuple[str, int]] = field(default_factory=Counter)
    backward: Counter[int] = field(default_factory=Counter)

    def add(self, calls: pd.DataFrame) -> None:
        self.kinds.update(calls["kind"].tolist())
        self.sizes.update(zip(calls["kind"].tolist(), calls["bytes"].tolist(), strict=True))
        self.backward.update(calls.loc[calls["kind"] == "all_reduce", "backward"].tolist())


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of a run with their axes.

    ``of_call`` finds a group by (rank, id, description, ranks as JSON, size), the columns of a call; ``axes`` by group.
    ``pipelines`` are rank lists of the pp groups; ``sizes`` the axes' sizes as far as the groups tell; ``evidence`` says how.
    ``unnamed`` is by rank the group of messages that name none, as gloo's do. ``rings`` are groups whose messages go one way
    around a ring, which those of no pipeline do.
    """

    of_call: Mapping[CallKey, Group]
    axes: Mapping[Group, str]
    world_size: int | None
    sizes: Mapping[str, int]
    pipelines: tuple[tuple[int, ...], ...]
    evidence: tuple[str, ...] = ()
    unnamed: Mapping[int, Group] = field(default_factory=dict)
    rings: frozenset[Group] = frozenset()


def find_groups(calls: Mapping[int, pd.DataFrame], distributed: Mapping[int, Mapping[str, Any]]) -> Groups:
    """The groups of all ranks.

    Args:
        calls: by rank its communication (schema ``CALLS``).
        distributed: by rank what its profiler wrote about the job (Kineto's ``distributedInfo``).
    """
    world = _world_size(distributed)
    configured = {rank: configured_groups(info) for rank, info in distributed.items()}
    of_call: dict[CallKey, Group] = {}
    uses: dict[Group, Use] = {}
    for rank, table in calls.items():
        for columns, part in table.groupby(GROUP_COLUMNS, sort=False):
            key = key_of(rank, columns)
            group = _complete(_group_of(key), configured.get(rank, {}), world)
            of_call[key] = group
            uses.setdefault(group, Use()).add(part)
    for known in configured.values():
        for group in known.values():
            uses.setdefault(_complete(group, known, world), Use())
    unnamed = {rank: _group_of_messages(configured.get(rank, {}), world) for rank in calls}
    rings = one_way_rings(calls, of_call, unnamed)
    axes, evidence = _axes(uses, world, rings)
    peers = peer_pipelines(calls, of_call, axes, unnamed, rings)
    pipelines = tuple(sorted({g.ranks for g, axis in axes.items() if axis == "pp" and len(g.ranks) > 1})) or peers
    return Groups(of_call, axes, world, sizes_of(axes, pipelines, world), pipelines, evidence, unnamed, rings)


def configured_groups(distributed: Mapping[str, Any]) -> dict[str, Group]:
    """The groups that ``distributedInfo.pg_config`` lists, by name: those that the rank belongs to."""
    config = distributed.get("pg_config")
    entries = list(config.values()) if isinstance(config, Mapping) else config
    if not isinstance(entries, list):
        return {}
    found = {}
    for entry in entries:
        if isinstance(entry, Mapping) and entry.get("pg_name") is not None:
            ranks = ranks_of(entry.get("ranks"))
            size = entry.get("pg_size")
            name = str(entry["pg_name"])
            known = size if isinstance(size, int) else len(ranks) or -1
            found[name] = Group(name, str(entry.get("pg_desc") or ""), ranks if len(ranks) == known else (), known)
    return found


def _group_of(key: CallKey) -> Group:
    _, group_id, description, ranks, size = key
    return Group(group_id, description, ranks_of(ranks), size)


def _complete(group: Group, configured: Mapping[str, Group], world: int | None) -> Group:
    """The group with what its configuration adds. Without a list of ranks, one as large as the world holds them all."""
    known = configured.get(group.id) if group.id else None
    if not group.id and not group.ranks and len({(known.ranks, known.size) for known in configured.values()}) == 1:
        known = next(iter(configured.values()))  # a call that names no group can only mean one like this
    description = group.description or (known.description if known else "")
    ranks = group.ranks or (known.ranks if known else ())
    size = group.size if group.size > 0 else len(ranks) or (known.size if known else -1)
    if not ranks and world is not None and size == world and size <= 2**20:
        ranks = tuple(range(world))
    return Group(group.id or (known.id if known else ""), description, ranks, size)


def _group_of_messages(configured: Mapping[str, Group], world: int | None) -> Group:
    """The pipeline's group where the configuration describes one, else the default group, in which places are global ranks."""
    described = [group for group in configured.values() if axis_of_description(group.description) == "pp"]
    return _complete(described[0], configured, world) if described else Group("", "default_pg", (), -1)


def _world_size(distributed: Mapping[int, Mapping[str, Any]]) -> int | None:
    sizes = {info.get("world_size") for info in distributed.values()}
    told = [size for size in sizes if isinstance(size, int) and size > 0]
    return max(told) if told else None


def _axes(
    uses: Mapping[Group, Use], world: int | None, rings: frozenset[Group]
) -> tuple[dict[Group, str], tuple[str, ...]]:
    """The axis of each group, and a line for each that use or shape tells.

    Calls that name no group are not one group: kernels without arguments may be of any. They have no axis of their own.
    """
    axes: dict[Group, str] = {}
    evidence: dict[str, list[str]] = {}

    def tell(groups: Iterable[Group], axis: str, why: str) -> None:
        for group in groups:
            axes[group] = axis
        evidence.setdefault(f"{axis} by {why}", []).extend(_named(group) for group in groups)

    for group in uses:
        if axis := axis_of_description(group.description):
            axes[group] = axis
    around = [
        group
        for group in uses
        if group not in axes and group in rings and group.description != "default_pg" and _is_named(group)
    ]
    if around:
        tell(around, "cp", "its ring of sends and receives, which go one way around")
    families = _families([group for group in uses if group not in axes and _is_named(group)], world)
    whole = families.pop("world", [])
    undecided = []
    for family in sorted(families.values(), key=lambda family: (family[0].stride or 0, family[0].size)):
        found = _axis_of_use(_together(uses[group] for group in family), set(axes.values()), family[0])
        if found is None:
            undecided += [family] if not any(uses[group].kinds["all_to_all"] for group in family) else []
        else:
            tell(family, *found)
    for axis, why, alike in _by_rank_lists(undecided, set(axes.values()), world):
        tell(alike, axis, why)
    whole_use = _together(uses[group] for group in whole)
    if whole and sum(whole_use.kinds.values()):
        split = {axis for axis in axes.values() if axis in ("tp", "cp", "dp", "pp", "dp-cp")}
        found = None if split else _axis_of_use(whole_use, set(), whole[0])
        if found is not None and found[0] != "pp" and whole[0].size > 1:
            tell(whole, *found)
    for group in uses:
        axes.setdefault(group, "world" if group in whole else UNKNOWN)
    return axes, tuple(f"{what} (group {_shown(names)})" for what, names in evidence.items())


def _is_named(group: Group) -> bool:
    """Whether calls with this group are of one group: it has a name or its ranks."""
    return bool(group.id or group.ranks)


def _families(groups: Sequence[Group], world: int | None) -> dict[object, list[Group]]:
    """Groups of one shape: equal size and stride. Those that hold the whole world are the family "world"."""
    families: dict[object, list[Group]] = {}
    for group in groups:
        if group.description == "default_pg" or (world is not None and world > 1 and group.size == world):
            families.setdefault("world", []).append(group)
        else:
            shape = (group.size, group.stride) if group.ranks else (group.id, group.size)
            families.setdefault(shape, []).append(group)
    return families


def _together(uses: Iterable[Use]) -> Use:
    whole = Use()
    for use in uses:
        whole.kinds += use.kinds
        whole.sizes += use.sizes
        whole.backward += use.backward
    return whole


_SEVERAL = 2
"""A single all-to-all may be anything."""
_MANY = 8
"""So many all-reduces of one size are more than the buckets of gradients in a few steps."""


def _axis_of_use(use: Use, taken: set[str], group: Group) -> tuple[str, str] | None:
    """(axis, why) of a group from what is done in it; None where that does not tell. ``taken`` have groups already."""
    kinds = use.kinds
    messages = kinds["send"] + kinds["recv"]
    if messages and messages >= sum(kinds.values()) / 2:
        return ("cp", "its ring of sends and receives") if "pp" in taken else ("pp", "its sends and receives")
    if kinds["all_to_all"] >= _SEVERAL and kinds["all_to_all"] >= (sum(kinds.values()) - messages) / 2:
        return ("cp", "its all-to-alls") if "ep" in taken else ("ep", "its all-to-alls")
    total = sum(use.backward[flag] for flag in (0, 1))
    share = use.backward[1] / total if total else None
    _, most = max(
        ((key, n) for key, n in use.sizes.items() if key[0] == "all_reduce" and key[1] >= 0),
        key=lambda e: e[1],
        default=(None, 0),
    )
    uniform = most >= _MANY and 2 * most >= kinds["all_reduce"]
    if kinds["all_reduce"]:
        if share is not None and share >= 0.95 and not uniform:
            return "dp", "its all-reduces in the backward"
        if uniform and (share is None or share < 0.95) and "tp" not in taken:
            return "tp", "its many equal all-reduces"
        return ("dp", "its all-reduces of gradients") if "dp" not in taken or "tp" in taken else None
    if kinds["reduce_scatter"] or kinds["all_gather"]:
        if group.stride == 1 and "tp" not in taken and "dp" in taken:
            return "tp", "its all-gathers and reduce-scatters between neighbours"
        return ("dp", "its all-gathers and reduce-scatters") if "dp" not in taken else None
    return None


def _by_rank_lists(
    families: Sequence[Sequence[Group]], taken: set[str], world: int | None
) -> list[tuple[str, str, Sequence[Group]]]:
    """Axes of unused groups that form a mesh: strides 1, n₁, n₁·n₂ …, as Megatron-LM orders ranks: tp fastest, then dp."""
    shaped = [family for family in families if family[0].stride is not None and family[0].size > 1]
    shaped.sort(key=lambda family: family[0].stride or 0)
    if not shaped or world is None:
        return []
    found: list[tuple[str, str, Sequence[Group]]] = []
    for family in shaped:
        first = family[0]
        axis = "tp" if first.stride == 1 and "tp" not in taken else "dp" if "dp" not in taken else None
        if axis is not None:
            taken = taken | {axis}
            found.append((axis, f"its rank list, stride {first.stride}", family))
    return found


def _named(group: Group) -> str:
    name = f"'{group.id}'" if group.id else "without a name"
    if not group.ranks:
        return name
    shown = ", ".join(map(str, group.ranks[:4]))
    return f"{name} [{shown}{', …' if len(group.ranks) > 4 else ''}]"


def _shown(names: Sequence[str]) -> str:
    unique = list(dict.fromkeys(names))
    return ", ".join(unique[:2]) + (f" and {len(unique) - 2} more" if len(unique) > 2 else "")
