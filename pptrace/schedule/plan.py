"""A schedule as data: for every pipeline rank the list of its actions, in the order in which it runs them; its phases by that
order, and its runs, one after the other: each ends where every rank has done all that it has begun.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

from pptrace.errors import ScheduleError
from pptrace.schedule.actions import Action, Key, Kind, Phase, iter_halves

if TYPE_CHECKING:
    from pptrace.schedule.plan_table import PlanTable


@dataclass(frozen=True)
class Plan:
    """The actions of every pipeline rank in one step.

    ``ranks[r]`` are the actions of pipeline rank r. ``placement[s]`` is the rank that owns stage s. Adjacent sends and
    receives of a rank form one *group*: they are posted together and waited for together, as Megatron's fused
    send-forward/receive-backward is (see :meth:`instructions`).

    The stages form ``num_chains`` equal chains, one after the other, each with a share of the microbatches in order. Only
    a bidirectional plan (DualPipe) has two: its second chain, stages p … 2p−1, runs over the ranks in reverse and holds
    copies of the first one's stages.
    """

    name: str
    num_microbatches: int
    placement: tuple[int, ...]
    ranks: tuple[tuple[Action, ...], ...]
    num_chains: int = 1

    def __repr__(self) -> str:
        """The plan's size, without its thousands of actions."""
        size = f"pp={self.pp}, num_microbatches={self.num_microbatches}, num_chunks={self.num_chunks}"
        return f"<Plan {self.name!r}: {size}>"

    def __str__(self) -> str:
        """The plan on a grid, a row per rank: :func:`pptrace.schedule.drawing.draw_in_time`."""
        from pptrace.schedule.drawing import draw_in_time

        return draw_in_time(self)

    @property
    def pp(self) -> int:
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @cached_property
    def num_chunks(self) -> int:
        """The most stages on one rank (v)."""
        return max(self.placement.count(rank) for rank in range(self.pp))

    @cached_property
    def has_comms(self) -> bool:
        return any(action.kind.is_p2p for actions in self.ranks for action in actions)

    @cached_property
    def splits_backward(self) -> bool:
        """Return whether weight gradients are separate actions (W)."""
        return any(action.kind is Kind.W for actions in self.ranks for action in iter_halves(actions))

    @cached_property
    def has_pairs(self) -> bool:
        """Return whether a forward and a backward run together somewhere (OVERLAP_F_B)."""
        return any(action.parts for actions in self.ranks for action in actions)

    @cached_property
    def by_key(self) -> dict[Key, tuple[int, Action]]:
        """(kind, stage, microbatch) → (rank, action), with overlapped pairs split."""
        return {half.key: (rank, half) for rank, actions in enumerate(self.ranks) for half in iter_halves(actions)}

    @cached_property
    def table(self) -> PlanTable:
        """The compute actions as columns, with their dependencies."""
        from pptrace.schedule.plan_table import make_table

        return make_table(self)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in chunk order."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    @property
    def chain_length(self) -> int:
        """Number of the model's stages, from the one that reads tokens to the one that computes the loss."""
        return self.num_stages // self.num_chains

    def model_stage(self, stage: int) -> int:
        """The model's stage of which a stage is (a copy of): its index in its chain."""
        return stage % self.chain_length

    def microbatches_of(self, stage: int) -> range:
        """The microbatches that pass through a stage."""
        share = self.num_microbatches // self.num_chains
        chain = stage // self.chain_length
        return range(chain * share, (chain + 1) * share)

    def previous_stage(self, stage: int) -> int | None:
        """The stage whose output this one reads; None for the first of a chain."""
        return stage - 1 if stage % self.chain_length > 0 else None

    def next_stage(self, stage: int) -> int | None:
        """The stage that reads this one's output; None for the last of a chain."""
        return stage + 1 if (stage + 1) % self.chain_length > 0 else None

    def peers_of(self, rank: int) -> frozenset[int]:
        """The pipeline ranks with which one exchanges messages."""
        around = {
            side for stage in self.stages_of(rank) for side in (self.previous_stage(stage), self.next_stage(stage))
        }
        return frozenset(self.placement[stage] for stage in around if stage is not None) - {rank}

    @cached_property
    def _compute(self) -> tuple[tuple[Action, ...], ...]:
        return tuple(map(_computing, self.ranks))

    def compute_actions(self, rank: int) -> tuple[Action, ...]:
        return self._compute[rank]

    def compute_only(self) -> Plan:
        """The same plan without sends, receives and parameter sharding actions."""
        return self if self._compute == self.ranks else replace(self, ranks=self._compute)

    def instructions(self, rank: int) -> Iterator[tuple[Action, ...]]:
        """The rank's instructions: single compute actions, and groups of sends and receives."""
        group: list[Action] = []
        for action in self.ranks[rank]:
            if action.kind.is_p2p:
                group.append(action)
                continue
            if group:
                yield tuple(group)
                group = []
            yield (action,)
        if group:
            yield tuple(group)


def _computing(row: tuple[Action, ...]) -> tuple[Action, ...]:
    if all(map(attrgetter("kind.is_compute"), row)):
        return row
    return tuple(action for action in row if action.kind.is_compute)


def make_plan(name: str, ranks: Iterable[Sequence[Action]]) -> Plan:
    """Make a plan from its actions: count microbatches, infer the placement of stages, and number the chunks.

    Two chains are inferred only from stages on a V of which the second half shares no microbatch with
    the first.

    Raises:
        ScheduleError: a stage on two ranks, stages or microbatches not numbered from 0 without gaps, or no action at all.
    """
    rows = [tuple(row) for row in ranks]
    halves = [tuple(iter_halves(row)) if any(map(_parts, row)) else row for row in rows]
    owner: dict[int, int] = {}
    for rank, row in enumerate(halves):
        for stage in sorted(set(map(attrgetter("stage"), row))):
            if owner.setdefault(stage, rank) != rank:
                raise ScheduleError(
                    f"{name}: stage {stage} has actions on rank {owner[stage]} and on rank {rank}; "
                    "a stage belongs to one rank"
                )
    computing = [_computing(row) for row in halves]
    microbatches = {mb for row in computing for mb in set(map(attrgetter("microbatch"), row)) if mb is not None}
    if not microbatches:
        raise ScheduleError(f"{name}: no compute action in any of {len(rows)} rows; expected cells such as '0F0'")
    _require_dense(name, "stage", owner)
    _require_dense(name, "microbatch", microbatches)
    placement = tuple(owner[stage] for stage in range(len(owner)))
    chunk_of = {stage: placement[:stage].count(rank) for stage, rank in enumerate(placement)}
    num_chains = 2 if _is_bidirectional(placement, computing, len(microbatches)) else 1
    return Plan(name, len(microbatches), placement, tuple(_with_chunks(row, chunk_of) for row in rows), num_chains)


_parts = attrgetter("parts")


def _is_bidirectional(placement: tuple[int, ...], rows: Sequence[Sequence[Action]], num_microbatches: int) -> bool:
    """Return whether two chains run over the ranks; ``rows`` are the simple compute actions of each rank."""
    pp, share = len(rows), num_microbatches // 2
    if pp < 2 or num_microbatches % 2 or placement != (*range(pp), *reversed(range(pp))):
        return False
    passing: dict[int, set[int]] = {}
    for action in chain.from_iterable(rows):
        if action.microbatch is not None:
            passing.setdefault(action.stage, set()).add(action.microbatch)
    halves = set(range(share)), set(range(share, num_microbatches))
    return all(passing.get(stage) == halves[stage // pp] for stage in range(2 * pp))


def _require_dense(name: str, what: str, numbers: Iterable[int]) -> None:
    present = set(numbers)
    if max(present) >= len(present):
        missing = next(number for number in range(len(present)) if number not in present)
        raise ScheduleError(f"{name}: {what} {missing} has no action though {what} {max(present)} has; number from 0")


def _with_chunks(row: tuple[Action, ...], chunk_of: dict[int, int]) -> tuple[Action, ...]:
    parts = chain.from_iterable(map(_parts, row))
    if all(chunk == chunk_of[stage] for stage, chunk in set(map(attrgetter("stage", "chunk"), chain(row, parts)))):
        return row
    return tuple(
        replace(action, chunk=chunk_of[action.stage], parts=_with_chunks(action.parts, chunk_of)) for action in row
    )


_BACKWARD = (Kind.B, Kind.I)


def tag_phases(plan: Plan) -> Plan:
    """Tag each rank's actions by order.

    The warmup ends with the last forward before the forward that precedes the first backward (so that 1F1B's last warmup
    rule holds: a forward directly followed by its pair's backward is steady); the cooldown begins after the backward
    that follows the last forward. When all forwards come before all backwards there is no steady phase, unless the rank
    runs a single forward and a single backward, which is a pair.
    """
    rows = []
    for row in plan.ranks:
        phases = phases_by_order([action.kind for action in row])
        tagged = (
            replace(action, phase=phase, parts=tuple(replace(part, phase=phase) for part in action.parts))
            for action, phase in zip(row, phases, strict=True)
        )
        rows.append(tuple(tagged))
    return replace(plan, ranks=tuple(rows))


def phases_by_order(kinds: list[Kind]) -> list[Phase]:
    """The phase of each action of one rank, from its kinds in order of execution."""
    overlaps = [index for index, kind in enumerate(kinds) if kind is Kind.OVERLAP_F_B]
    forwards = [index for index, kind in enumerate(kinds) if kind is Kind.F] + overlaps
    backwards = [index for index, kind in enumerate(kinds) if kind in _BACKWARD] + overlaps
    if not forwards or not backwards:
        return [Phase.WARMUP if kind is Kind.F else Phase.COOLDOWN for kind in kinds]
    first_backward, last_forward = min(backwards), max(forwards)
    if last_forward < first_backward and len(forwards) > 1:
        steady = range(first_backward, first_backward)  # all forwards, then all backwards
    else:
        before = [index for index in forwards if index <= first_backward]
        after = [index for index in backwards if index >= last_forward]
        steady = range(before[-1] if before else first_backward, (after[0] if after else last_forward) + 1)
    return [
        Phase.WARMUP if index < steady.start else Phase.STEADY if index < steady.stop else Phase.COOLDOWN
        for index in range(len(kinds))
    ]


def runs_of(plan: Plan) -> list[list[tuple[Action, ...]]]:
    """The compute actions of each run, rank by rank; a usual schedule is one run, and so is a plan of one rank.

    A step that accumulates gradients over two calls of a schedule has two.
    """
    rows = [plan.compute_actions(rank) for rank in range(plan.pp)]
    if len(rows) == 1:
        return [rows]
    ends = [_ends_by_forwards(row) for row in rows]
    runs, begins = [], [0] * len(rows)
    for forwards in sorted(set.intersection(*map(set, ends))):
        of_rank = [end[forwards] for end in ends]
        runs.append([row[begin:end] for row, begin, end in zip(rows, begins, of_rank, strict=True)])
        begins = of_rank
    return runs


def _ends_by_forwards(row: Sequence[Action]) -> dict[int, int]:
    """Number of actions after which nothing is under way, by the number of forwards until then."""
    ends, forwards, under_way = {}, 0, 0
    for index, action in enumerate(row, 1):
        for half in action.halves:
            forwards += half.kind is Kind.F
            under_way += (half.kind is Kind.F) - (half.kind in (Kind.B, Kind.W))
        if not under_way:
            ends[forwards] = index
    return ends
