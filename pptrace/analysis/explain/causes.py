"""Causes of a step's length beyond its compute spread evenly, each with what the step would be shorter by without it.

A step is replayed with all causes and without each of them: what a cause adds to the replay of all others is its part, never
below 0. What only several of them together add, because they happen at the same time or one behind the other, is a part of its
own, the *interaction*; below 0, the causes count some time twice. The parts sum to the difference between the replay with all and
with none, and depend on no order. What an op computes is a product: what its kind usually takes, times what is
special about its stage (``imbalance``), about its rank among the replicas of the stage (``straggler``) and about this very op
(``jitter``). ``communication`` adds the transfers of the pipeline's messages, and what ops wait for inside them; ``host`` the
time in which an op could have run and its device was idle because the host had not launched it or, on a rank without a device,
that between ops. ``routing`` is what ops take
longer because experts on some ranks have more rows than others (:mod:`pptrace.analysis.experts.routing`): all else is that of
equal rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pptrace.analysis.message_graph import Graph, spans_of
from pptrace.model.tables import Int64
from pptrace.schedule.plan_table import PlanTable

_LEVELS = {"imbalance": ("of_stage", "of_kind"), "straggler": ("of_rank", "of_stage"), "jitter": ("own", "of_rank")}
"""Causes in what ops compute: the cost with the cause, and the one without."""
MESSAGES, INNER = "pp", "inner"
"""The communication of the pipeline's messages, and that inside ops."""
HOST = "host"
ROUTING = "routing"


@dataclass(frozen=True, eq=False)
class Costs:
    """Costs of the ops of some steps, ns, shape (steps, rows): as computed (``own``), as the median of the op's kind and stage on
    its rank (``of_rank``) and on all replicas (``of_stage``), and as the mean of its kind (``of_kind``).

    ``inner`` is what ops communicated without computing, ``transfers`` (steps, messages) what messages take from their senders'
    ends, ``moving`` how long ops waited for transfers that began when their own rank was ready, ``host`` how long ops were kept
    from their devices by the host. On ranks without a device ``late`` is how late ops began, None where that is not known, and
    ``posted`` (steps, calls of the graph) how late calls were; None without a graph. ``routing`` is what unequal rows of experts
    add to ops, of which the others are free.
    ``graph`` is that of the way in which messages hold up ranks, None where they cost their readers time alone: transfers are
    then those from when both sides are ready, and none is ``moving``.
    """

    own: Int64
    of_rank: Int64
    of_stage: Int64
    of_kind: Int64
    inner: Int64
    transfers: Int64
    moving: Int64
    host: Int64
    routing: Int64
    late: Int64 | None = None
    posted: Int64 | None = None
    graph: Graph | None = None

    @cached_property
    def players(self) -> tuple[str, ...]:
        """The causes that change anything in any of these steps."""
        changed = [
            name
            for name, (with_it, without) in _LEVELS.items()
            if (getattr(self, with_it) != getattr(self, without)).any()
        ]
        of_host = tuple(times for times in (self.host, self.late, self.posted) if times is not None)
        added = {MESSAGES: (self.transfers, self.moving), INNER: (self.inner,), HOST: of_host}
        added[ROUTING] = (self.routing,)
        return (*changed, *(name for name, parts in added.items() if any(times.any() for times in parts)))

    def makespans(self, present: frozenset[str], table: PlanTable) -> Int64:
        """The makespan of every step where only some causes are present, ns."""
        ops = self._computing(present)
        for name, added in (
            *((INNER, self.inner), (HOST, self.host), (HOST, self.late)),
            *((MESSAGES, self.moving), (ROUTING, self.routing)),
        ):
            if added is not None and name in present:
                ops = ops + added
        transfers = self.transfers if MESSAGES in present else None
        spans: Int64 = spans_of(table, self.graph, ops, transfers, self.posted if HOST in present else None)
        return spans

    def _computing(self, present: frozenset[str]) -> Int64:
        changed = [name for name in self.players if name in _LEVELS]
        chosen = [name for name in changed if name in present]
        if not chosen:
            return self.of_kind
        if chosen == changed:
            return self.own
        product = self.of_kind.astype(np.float64)
        for name in chosen:
            with_it, without = (getattr(self, level) for level in _LEVELS[name])
            product *= np.divide(with_it, without, out=np.ones(product.shape), where=without != 0)
        computing: Int64 = np.rint(product).astype(np.int64)
        return computing


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """``added`` is what each cause alone adds to the makespan of every step, ns, and ``interaction`` what several add together:
    from ``without`` any of them to ``with_all``.
    """

    added: Mapping[str, Int64]
    interaction: Int64
    without: Int64
    with_all: Int64


def parts_of_causes(costs: Costs, table: PlanTable) -> Parts:
    """The part of each cause in the makespan of every step."""
    every = frozenset(costs.players)
    with_all, without = costs.makespans(every, table), costs.makespans(frozenset(), table)
    added = {
        player: np.maximum(with_all - (costs.makespans(every - {player}, table) if len(every) > 1 else without), 0)
        for player in costs.players
    }
    return Parts(added, with_all - without - sum(added.values(), np.zeros_like(without)), without, with_all)
