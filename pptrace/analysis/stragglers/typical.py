"""What every op and message costs where nothing straggles: what its kind typically costs in all steps, on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pptrace.analysis.stragglers.costs import RECEIVES, MeasuredCosts
from pptrace.model.tables import Int64
from pptrace.schedule.plan_table import PlanTable
from pptrace.simulator import makespans


@dataclass(frozen=True, slots=True)
class Typical:
    """Cost by code of kind, ns: of ops the mean; of messages the median, as few long ones make their mean nobody's cost.

    A kind of message that was never matched is left out: it costs nothing in any replay.
    """

    of_kind: Mapping[int, int]

    @classmethod
    def of(cls, plans: Sequence[MeasuredCosts]) -> Typical:
        sums: dict[int, tuple[int, int]] = {}
        matched: dict[int, list[Int64]] = {}
        for costs in plans:
            for code in np.unique(costs.table.kind).tolist():
                of_code = costs.durations[:, costs.table.kind == code]
                total, count = sums.get(code, (0, 0))
                sums[code] = total + int(of_code.sum(dtype=np.int64)), count + of_code.size
            for code in RECEIVES:
                of_messages = costs.transfers[:, costs.message_kind == code]
                matched.setdefault(code, []).append(of_messages[of_messages >= 0])
        means = {code: round(total / count) for code, (total, count) in sums.items() if count}
        medians = {code: every for code, parts in matched.items() if len(every := np.concatenate(parts))}
        return cls(means | {code: round(float(np.median(every))) for code, every in medians.items()})

    @property
    def codes(self) -> tuple[int, ...]:
        return tuple(sorted(self.of_kind))

    def costs(self, plan: MeasuredCosts) -> IdealCosts:
        of_code = np.zeros(max(*self.of_kind, *RECEIVES) + 1, dtype=np.int64)
        of_code[list(self.of_kind)] = list(self.of_kind.values())
        return IdealCosts(plan.table, of_code[plan.table.kind], of_code[plan.message_kind])


@dataclass(frozen=True, slots=True, eq=False)
class IdealCosts:
    """Typical costs of one plan's rows (``durations``) and messages (``transfers``), ns."""

    table: PlanTable
    durations: Int64
    transfers: Int64

    def makespan(self) -> int:
        return int(makespans(self.table, self.durations, self.transfers))
