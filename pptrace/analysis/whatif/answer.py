"""The answer to what a run would gain: scenarios of changes, the best first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from msgspec.structs import replace

from pptrace.analysis.whatif.change import Change
from pptrace.analysis.whatif.result import Scenario, Standing, WhatIf
from pptrace.analysis.whatif.study import Study
from pptrace.model.wording import counted
from pptrace.simulator import Simulation

OnCount = Callable[[int, int], None]
"""Takes how many changes are predicted, and of how many."""
_LEAST_GAIN = 0.005
"""Ideals that gain a smaller part of the step are left out of the table of all changes."""


def answer(study: Study, changes: Sequence[tuple[str, Change]], on_count: OnCount | None = None) -> WhatIf:
    """Predict changes by their names.

    ``on_count`` is called before each of them, and after the last one.

    Raises:
        PptraceError: one of the changes cannot be made.
    """
    scenarios: list[Scenario] = []
    for done, (name, change) in enumerate(changes if study.refusal is None else ()):
        if on_count is not None:
            on_count(done, len(changes))
        scenarios.append(study.scenario(change, name))
    if on_count is not None and study.refusal is None:
        on_count(len(changes), len(changes))
    return ranked(study, changes, scenarios)


def ranked(study: Study, changes: Sequence[tuple[str, Change]], scenarios: Sequence[Scenario]) -> WhatIf:
    """The answer from scenarios of changes, of all or of the first ones: what is sure to help first, then by standing and gain.

    What costs less than it does and gains next to nothing is left out of several changes.
    """
    baseline = study.baseline
    known = (baseline.measured_span, baseline.replay_span, baseline.error)
    periods = (study.outside.period_ns, study.outside.period_of(baseline.replay_span))
    if study.refusal is not None:
        lines = (*study.warnings, study.refusal)
        return WhatIf(*known, (), None, len(baseline.measured), lines, *periods, doubts=study.doubts)
    least = _LEAST_GAIN * study.measured_length if len(changes) > 1 else -math.inf
    is_alone = {name: change == Change(ideals=change.ideals, link_speed=change.link_speed) for name, change in changes}
    scenarios = [one for one in scenarios if not is_alone[one.name] or one.gain_ns >= least]
    order = list(Standing)
    best_first = sorted(scenarios, key=lambda scenario: (order.index(scenario.standing), -scenario.gain_ns))
    warnings = (*study.warnings, *_warnings_of_limit(study, scenarios))
    return WhatIf(
        *(*known, _with_front(best_first), study.today, len(baseline.measured), warnings, *periods),
        framework="" if study.framework is None else study.framework.name,
        doubts=study.doubts,
    )


def _warnings_of_limit(study: Study, scenarios: Sequence[Scenario]) -> Iterator[str]:
    if study.memory_limit is None:
        return
    unknown = [one.name for one in scenarios if one.peak_memory_bytes is None]
    if unknown:
        reason = (
            "the trace does not tell the memory of its ranks" if not study.uses else "nor what of it its layers have"
        )
        yield (
            f"--memory-limit: not known whether {counted(len(unknown), 'change')} would fit ({', '.join(unknown[:3])}"
            f"{', …' if len(unknown) > 3 else ''}): {reason}; record with `pptrace run`"
        )
    can_split = study.costs.layers is not None and study.costs.plan.num_stages == study.costs.plan.pp > 1
    if can_split and study.memory_of_layers is not None and study.best_split is None:
        yield "--memory-limit: no split of the layers over these stages fits"


def _with_front(scenarios: Sequence[Scenario]) -> tuple[Scenario, ...]:
    """Mark the scenarios that no other one beats in both time and memory; the ideals are no choices."""
    choices = [one for one in scenarios if one.is_choice]
    bytes_known = all(one.peak_memory_bytes is not None for one in choices)

    def size(one: Scenario) -> float:
        return float(one.peak_memory_bytes or 0) if bytes_known else one.activations

    def is_beaten(one: Scenario) -> bool:
        return any(
            other.gain_ns >= one.gain_ns
            and size(other) <= size(one)
            and (other.gain_ns, -size(other)) != (one.gain_ns, -size(one))
            for other in choices
        )

    return tuple(replace(one, on_pareto_front=one.is_choice and not is_beaten(one)) for one in scenarios)


def pictures(study: Study, changes: Sequence[tuple[str, Change]], result: WhatIf) -> list[tuple[str, Simulation]]:
    """The replay of a typical step as it was, and with the best change that can be made, each with its title."""
    best = next((one.name for one in result.scenarios if one.is_choice), None)
    chosen = [(f"predicted step of {name}", change) for name, change in changes if name == best]
    chosen = [(f"step {study.typical_step} as it was, replayed", Change()), *chosen]
    return [(title, study.picture(change)) for title, change in chosen] if result.scenarios else []
