"""Assign process groups to axes of the mesh (tp, pp, cp, dp, ep), and derive the pipelines of global ranks.

In this order: the description that the framework gave the group; what the group is used for; the shape of its rank list. A group
that nothing tells about keeps the axis "unknown".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
from msgspec import Struct, field

from pptrace.axes import MESH_ORDER, WITHIN_STAGE, Axis
from pptrace.ingest.common.rank_names import ranks_of
from pptrace.marks import P2P
from pptrace.model.wording import listed
from pptrace.recognise.groups.topology import (
    UNKNOWN,
    CallKey,
    Chain,
    Group,
    KeyedCalls,
    axis_of_description,
    call_keys,
    chains_of,
    edges_of,
    exchanges,
    multiply_up,
    one_way_rings,
    sizes_of,
)
from pptrace.recognise.groups.usage import USE_COLUMNS, Use, axis_of_use, merge_usage


class Groups(Struct, frozen=True):
    """The groups of a run with their axes.

    ``of_call`` finds a group by (rank, id, description, ranks as JSON, size), the columns of a call; ``axes`` by group.
    ``pipelines`` are rank lists of the pp groups; ``sizes`` the axes' sizes as far as the groups tell; ``evidence`` says how.
    ``unnamed`` is by rank the group of messages that name none, as gloo's do. ``rings`` are groups whose messages go one way
    around a ring, or both ways at once, which those of no pipeline do for sure.
    """

    of_call: Mapping[CallKey, Group]
    axes: Mapping[Group, str]
    world_size: int | None
    sizes: Mapping[str, int]
    pipelines: tuple[tuple[int, ...], ...]
    evidence: tuple[str, ...] = ()
    unnamed: Mapping[int, Group] = field(default_factory=dict)
    rings: frozenset[Group] = frozenset()


def find_groups(
    calls: Mapping[int, pd.DataFrame],
    distributed: Mapping[int, Mapping[str, Any]],
    steps: Mapping[int, int],
    by_use: bool = True,
    no_pipeline: Collection[int] = (),
    pipelines: Collection[tuple[int, ...]] = (),
) -> Groups:
    """Find the groups of all ranks and their axes.

    Args:
        calls: by rank its communication (schema ``CALLS``).
        distributed: by rank what its profiler wrote about the job (Kineto's ``distributedInfo``).
        steps: by rank how many steps its trace has, where that is known.
        by_use: whether use and shape may tell the axis of a group that no description tells: not where the traces show neither
            steps nor backwards, between which tp and dp, or pipelines and other exchanges, look alike.
        no_pipeline: ranks whose messages no pipeline explains: their groups of messages are none of a pipeline.
        pipelines: those whose messages are known.
    """
    world_sizes = [info.get("world_size") for info in distributed.values()]
    world = max((size for size in world_sizes if isinstance(size, int) and size > 0), default=None)
    configured = {rank: configured_groups(info) for rank, info in distributed.items()}
    keyed = {rank: KeyedCalls(table, *call_keys(rank, table)) for rank, table in calls.items() if len(table)}
    of_call, uses = _used(keyed, configured, world, steps)
    unnamed = {}
    for rank in calls:
        of_rank = configured.get(rank, {})
        pp = next((group for group in of_rank.values() if axis_of_description(group.description) == "pp"), None)
        # Without a group that is described as the pipeline's it is the default group, in which places are global ranks.
        unnamed[rank] = Group("", "default_pg", (), -1) if pp is None else _complete(pp, of_rank, world)
    edges = edges_of(keyed, of_call, unnamed)
    rings = one_way_rings(edges) | exchanges(keyed, of_call, edges)
    rings |= {group for group, pairs in edges.items() if all(set(pair) <= set(no_pipeline) for pair in pairs)}
    if not by_use:
        axes = _with_axes_of_ranks(
            {
                group: axis_of_description(group.description) or ("world" if _is_world(group, world) else UNKNOWN)
                for group in uses
            }
        )
        pipelines = _pipelines(axes, ())
        is_complete = all(axis != UNKNOWN for group, axis in axes.items() if group.size > 1)
        sizes = sizes_of(axes, pipelines, world if is_complete else None)
        return Groups(of_call, axes, world, sizes, pipelines, (), unnamed, rings | set(edges) | set(uses))

    def chains(axes: Mapping[Group, str]) -> tuple[Chain, ...]:
        return chains_of(edges, axes, rings, set(calls), world)

    of_everyone = frozenset(rank for rank in calls if configured.get(rank))
    assignments = _axes(uses, world, one_way_rings(edges), rings, chains, of_everyone, pipelines)
    pipelines = _pipelines(assignments.axes, chains(assignments.axes))
    sizes = sizes_of(assignments.axes, pipelines, world)
    if world is not None and not multiply_up(sizes, world):
        assignments.withdraw(sizes, world)
        pipelines = _pipelines(assignments.axes, chains(assignments.axes))
        # Sizes are dropped until they multiply up to the number of ranks; dp first, whose groups frameworks split most often.
        sizes = sizes_of(assignments.axes, pipelines, world)
        fewer = (
            {axis: size for axis, size in sizes.items() if axis not in doubtful}
            for doubtful in ((), (Axis.DP,), WITHIN_STAGE, MESH_ORDER)
        )
        sizes = next((candidate for candidate in fewer if multiply_up(candidate, world)), {})
    axes = _with_axes_of_ranks(assignments.axes)
    return Groups(of_call, axes, world, sizes, pipelines, assignments.lines(), unnamed, rings)


def _used(
    calls: Mapping[int, KeyedCalls],
    configured: Mapping[int, Mapping[str, Group]],
    world: int | None,
    steps: Mapping[int, int],
) -> tuple[dict[CallKey, Group], dict[Group, Use]]:
    """The group of each call key, and the usage of each group; groups without calls have an empty one."""
    of_call: dict[CallKey, Group] = {}
    uses: dict[Group, Use] = {}
    for rank, table in calls.items():
        for key, part in table.by_key(USE_COLUMNS):
            _, group_id, description, ranks, size = key
            named = Group(group_id, description, ranks_of(ranks), size)
            group = _complete(named, configured.get(rank, {}), world)
            of_call[key] = group
            uses.setdefault(group, Use()).add(part, steps.get(rank, 1))
    for by_name in configured.values():
        for group in by_name.values():
            uses.setdefault(_complete(group, by_name, world), Use())
    return of_call, uses


def _pipelines(axes: Mapping[Group, str], chains: Sequence[Chain]) -> tuple[tuple[int, ...], ...]:
    """The pipelines of the groups of pp, else of messages: also where groups are of neighbours, as of libraries that make one for
    each link.
    """
    declared = sorted({group.ranks for group, axis in axes.items() if axis == "pp" and len(group.ranks) > 1})
    members = [rank for ranks in declared for rank in ranks]
    are_links = all(len(ranks) == 2 for ranks in declared) and len(members) > len(set(members))
    whole = tuple(chain.ranks for chain in chains if chain.is_whole)
    return whole if are_links else tuple(declared) or whole


def configured_groups(distributed: Mapping[str, Any]) -> dict[str, Group]:
    """The groups in ``distributedInfo.pg_config`` by name: those that the rank belongs to."""
    config = distributed.get("pg_config")
    entries = list(config.values()) if isinstance(config, Mapping) else config
    if not isinstance(entries, list):
        return {}
    groups = {}
    for entry in entries:
        if isinstance(entry, Mapping) and entry.get("pg_name") is not None:
            ranks = ranks_of(entry.get("ranks"))
            size = entry.get("pg_size")
            name = str(entry["pg_name"])
            known = size if isinstance(size, int) else len(ranks) or -1
            groups[name] = Group(name, str(entry.get("pg_desc") or ""), ranks if len(ranks) == known else (), known)
    return groups


def groups_by_members(distributed: Mapping[str, Any]) -> dict[tuple[int, ...], Group]:
    """The first group of each set of ranks that a rank is in; () where one does not tell its ranks."""
    groups: dict[tuple[int, ...], Group] = {}
    for group in configured_groups(distributed).values():
        groups.setdefault(group.ranks, group)
    return groups


def _complete(group: Group, configured: Mapping[str, Group], world: int | None) -> Group:
    """Fill in what the configuration knows of a group. Without a rank list, a group of world size holds all ranks."""
    known = configured.get(group.id, NO_GROUP) if group.id else NO_GROUP
    if not group.id and not group.ranks and len({(other.ranks, other.size) for other in configured.values()}) == 1:
        known = next(iter(configured.values()))  # a call that names no group can only mean one like this
    ranks = group.ranks or known.ranks
    size = group.size if group.size > 0 else len(ranks) or known.size
    if not ranks and world is not None and size == world and size <= 2**20:
        ranks = tuple(range(world))
    return Group(group.id or known.id, group.description or known.description, ranks, size)


NO_GROUP = Group("", "", (), -1)


class _AxisAssignments(Struct):
    """Axes assigned to groups so far, and by reason the groups that no description names."""

    axes: dict[Group, str] = field(default_factory=dict)
    inferred: dict[str, list[Group]] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)

    @property
    def assigned(self) -> set[str]:
        return set(self.axes.values())

    def assign(self, groups: Iterable[Group], axis: str, why: str) -> None:
        for group in groups:
            self.axes[group] = axis
            self.inferred.setdefault(f"{axis} by {why}", []).append(group)

    def withdraw(self, sizes: Mapping[str, int], world: int) -> None:
        """Withdraw the tp, cp and dp assigned by use and shape, since the sizes do not multiply up."""
        listed = " · ".join(f"{axis} {sizes[axis]}" for axis in MESH_ORDER if axis in sizes)
        self.doubts.append(
            f"{listed} do not multiply up to {world} ranks: sizes that only the use of groups or their rank lists "
            "suggest are null"
        )
        for reason, groups in list(self.inferred.items()):
            if not reason.startswith(("pp ", "ep ")):
                self.axes.update(dict.fromkeys(groups, UNKNOWN))
                del self.inferred[reason]

    def lines(self) -> tuple[str, ...]:
        reasons = (
            f"{what} (group {listed(dict.fromkeys(map(_named, groups)), 2)})" for what, groups in self.inferred.items()
        )
        return (*reasons, *self.doubts)


def _axes(
    uses: Mapping[Group, Use],
    world: int | None,
    one_way: frozenset[Group],
    rings: frozenset[Group],
    chains: Callable[[Mapping[Group, str]], tuple[Chain, ...]],
    everyone: frozenset[int],
    matched: Collection[tuple[int, ...]],
) -> _AxisAssignments:
    """The axis of each group, with the reason where its use or shape suggests it.

    Calls that name no group are not one group: kernels without arguments may be of any. They have no axis of their own. Nor have
    groups that leave out some of ``everyone``, the ranks whose groups are known. Messages along none of the pipelines that were
    ``matched`` are of none.
    """
    assignments = _AxisAssignments({group: axis for group in uses if (axis := axis_of_description(group.description))})
    axes = assignments.axes
    around = [
        group
        for group in uses
        if group in one_way and group not in axes and group.description != "default_pg" and group.is_named
    ]
    assignments.assign(around, "cp", "its ring of sends and receives, which go one way around")
    open_groups = [group for group in uses if group not in axes and group not in rings and group.is_named]
    # The ranks of a pipeline differ in nothing but their stages: groups of some of them alone are of no other axis.
    within = [
        (group, chain) for chain in chains(axes) for group in open_groups if _is_within(group, uses[group], chain)
    ]
    ends = [group for group, chain in within if set(group.ranks) == chain.ends and any(uses[group].kinds.values())]
    assignments.assign(ends, "embd", "its ranks, both ends of a pipeline")
    families = _families([group for group in open_groups if group not in dict(within)], world, uses)
    world_groups = families.pop("world", [])
    unused = []
    used = [(family, merge_usage(uses[group] for group in family)) for family in families.values()]
    used.sort(
        key=lambda each: (not each[1].is_of_experts, each[1].gathers_and_sums, each[0][0].stride or 0, each[0][0].size)
    )
    of_any = merge_usage(use for group, use in uses.items() if not group.is_named).without_messages()
    along_matched = [
        group
        for group in open_groups
        if not _is_world(group, world) and any(set(group.ranks) == set(ranks) for ranks in matched)
    ]
    assignments.assign(
        [group for group in along_matched if any(uses[group].kinds[kind] for kind in P2P)],
        "pp",
        "its pipeline's messages",
    )
    for family, use in used:
        if axes.keys() & family:
            continue
        is_of_all = everyone <= {rank for group in family for rank in group.ranks} or not family[0].ranks
        assigned = assignments.assigned | ({Axis.PP} if matched else set())
        axis_and_reason = axis_of_use(use, assigned, family[0]) if is_of_all else None
        if axis_and_reason is not None and _is_most(of_any, use):
            with_open = axis_of_use(merge_usage((use, of_any)), assigned, family[0])
            if with_open is None or with_open[0] != axis_and_reason[0]:
                continue
        if axis_and_reason is not None:
            assignments.assign(family, *axis_and_reason)
        elif not any(use.kinds.values()):
            unused.append(family)
    # Of the groups along whose ranks messages go that another group carried, the smallest are pipelines.
    no_axis = [group for group in open_groups if group not in axes and group.description != "default_pg"]
    for chain in chains(axes):
        along = [group for group in no_axis if chain.runs_along(group, world)]
        smallest = min((group.size for group in along), default=0)
        pipelines = [group for group in along if group.size == smallest]
        assignments.assign(pipelines, "pp", "the messages between its neighbours")
    # Where calls were recorded, groups without any are of no axis that their ranks alone could tell.
    if not any(any(use.kinds.values()) for use in uses.values()):
        _assign_by_rank_lists(assignments, [family for family in unused if not axes.keys() & family], world)
    _assign_world(assignments, world_groups, uses)
    for group in uses:
        axes.setdefault(group, "world" if group in world_groups or _is_world(group, world) else UNKNOWN)
    return assignments


def _with_axes_of_ranks(axes: Mapping[Group, str]) -> dict[Group, str]:
    """The axes, of groups without one and of dp and cp together that of the other groups of the same ranks, where it is one."""
    by_ranks: dict[tuple[int, ...], set[str]] = {}
    for group, axis in axes.items():
        if axis in MESH_ORDER and len(group.ranks) > 1:
            by_ranks.setdefault(group.ranks, set()).add(axis)
    unsure = (UNKNOWN, Axis.DP_CP)
    only = {ranks: next(iter(known)) for ranks, known in by_ranks.items() if len(known) == 1}
    return {group: only.get(group.ranks, axis) if axis in unsure else axis for group, axis in axes.items()}


def _is_most(open_calls: Use, use: Use) -> bool:
    """Return whether as many calls again may be of some groups as are known to be, which alone tell little of their use."""
    return any(open_calls.kinds[kind] >= count for kind, count in use.kinds.items() if kind not in P2P)


def _is_within(group: Group, use: Use, chain: Chain) -> bool:
    """Return whether a group makes collectives alone, between some ranks of a pipeline of three or more."""
    is_part = len(group.ranks) > 1 and set(group.ranks) < set(chain.ranks)
    return is_part and chain.is_whole and not any(use.kinds[kind] for kind in P2P)


def _assign_by_rank_lists(
    assignments: _AxisAssignments, families: Sequence[Sequence[Group]], world: int | None
) -> None:
    """Assign the axes of unused groups that form a mesh: strides 1, n₁, n₁·n₂ …, as Megatron-LM orders ranks: tp fastest, then
    dp.

    An axis holds each rank once: the first and last rank of a pipeline, which share embeddings, are none.
    """
    strides = [(family[0].stride, family) for family in families if family[0].size > 1]
    for stride, family in sorted(strides, key=lambda each: each[0] or 0):
        if world is None or stride is None or world % (stride * family[0].size):
            continue
        assigned = assignments.assigned
        axis = "tp" if stride == 1 and "tp" not in assigned else "dp" if "dp" not in assigned else None
        if axis is not None:
            assignments.assign(family, axis, f"its rank list, stride {stride}")


def _assign_world(assignments: _AxisAssignments, world_groups: Sequence[Group], uses: Mapping[Group, Use]) -> None:
    """Assign an axis by usage to the groups of all ranks: what their calls are made for, and another where no other groups split
    the ranks.
    """
    used = [
        group
        for group, use in uses.items()
        if group not in assignments.axes and group.size > 1 and any(use.kinds.values())
    ]
    is_split = any(axis in (*MESH_ORDER, Axis.DP_CP) and group.size != 1 for group, axis in assignments.axes.items())
    for group in set(used) & {group for group in world_groups if group.is_named}:
        use, axis_and_reason = uses[group], axis_of_use(uses[group], set(), group)
        is_of_one_purpose = use.is_uneven or use.hints
        if is_of_one_purpose and axis_and_reason is not None and axis_and_reason[0] in (Axis.EP, Axis.CP):
            assignments.assign([group], *axis_and_reason)
            used.remove(group)
    if not used or not set(used) <= set(world_groups) or is_split:
        return
    axis_and_reason = axis_of_use(merge_usage(uses[group] for group in used), set(), used[0])
    if axis_and_reason is not None and axis_and_reason[0] != "pp":
        assignments.assign(used, *axis_and_reason)


def _is_world(group: Group, world: int | None) -> bool:
    return group.description == "default_pg" or (world is not None and world > 1 and group.size == world)


def _families(groups: Sequence[Group], world: int | None, uses: Mapping[Group, Use]) -> dict[object, list[Group]]:
    """Groups of one shape, equal size and stride, of which libraries and ranges name one axis or none. Those that hold the whole
    world are the family "world".
    """
    families: dict[object, list[Group]] = {}
    for group in groups:
        if _is_world(group, world):
            families.setdefault("world", []).append(group)
        else:
            shape = (group.size, group.stride) if group.ranks else (group.id, group.size)
            named = uses[group].hints.most_common(1)
            families.setdefault((*shape, *(axis for axis, _ in named)), []).append(group)
    return families


def _named(group: Group) -> str:
    name = f"'{group.id}'" if group.id else "without a name"
    if not group.ranks:
        return name
    listed = ", ".join(map(str, group.ranks[:4]))
    return f"{name} [{listed}{', …' if len(group.ranks) > 4 else ''}]"
