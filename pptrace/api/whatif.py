"""Predictions from a measured run: what ``pptrace whatif`` shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast, overload

from msgspec import structs

from pptrace.analysis.links.peaks import latencies_of
from pptrace.analysis.links.types import Link
from pptrace.analysis.whatif.answer import OnCount, answer, pictures
from pptrace.analysis.whatif.candidates import REPAIRED, all_changes, all_schedules, prefetch_name, recompute_name
from pptrace.analysis.whatif.change import Change, plan_of
from pptrace.analysis.whatif.collectives import parse_speed
from pptrace.analysis.whatif.ideals import parse_ideal
from pptrace.analysis.whatif.result import Scenario, WhatIf
from pptrace.analysis.whatif.stage_costs import Assumed
from pptrace.analysis.whatif.study import Study, study_run
from pptrace.api.files import ExportsJson, ExportsPage, FilePath, text_or_file
from pptrace.api.options import Value, options_of, require_number, require_whole
from pptrace.api.wishes import Wishes
from pptrace.errors import PptraceError, UsageError
from pptrace.model.predicted import gpt_of_run
from pptrace.model.wording import counted
from pptrace.schedule import registry
from pptrace.schedule.layout import fits
from pptrace.schedule.plan import Plan
from pptrace.schedule.text import to_csv
from pptrace.verify.execute import execute
from pptrace.verify.program import Workload
from pptrace.workflow.analyse import Analysis

if TYPE_CHECKING:
    import pandas as pd

ALL = "all"
_LEAST_TIMES, _MOST_TIMES = 1e-6, 1e6
_MOST_BYTES = 1 << 26


@dataclass(frozen=True, eq=False)
class Predictions(ExportsJson, ExportsPage):
    """Result of :meth:`pptrace.Run.whatif`."""

    study: Study
    changes: Sequence[tuple[str, Change]]
    result: WhatIf
    """Each field is that of the JSON."""

    @property
    def scenarios(self) -> pd.DataFrame:
        """One row per scenario, by standing and gain, the best first, with the fields of the JSON; unknown is <NA>."""
        import pandas as pd

        names = Scenario.__struct_fields__
        rows = [{name: getattr(one, name) for name in names} for one in self.result.scenarios]
        frame = pd.DataFrame(rows, columns=list(names))
        unknown = ("peak_memory_bytes", "verified_span_ns", "period_ns", "period_low_ns", "period_high_ns")
        return frame.astype(dict.fromkeys(unknown, "Int64"))

    @overload
    def to_csv(self, path: None = None) -> str: ...
    @overload
    def to_csv(self, path: FilePath) -> None: ...
    def to_csv(self, path: FilePath | None = None) -> str | None:
        """The plan of the change that the first line names, or of the first one where none is sure to help, as torch's CSV.

        Without a path it is returned, else written there.

        Raises:
            PptraceError: nothing was predicted, or the file cannot be written.
        """
        chosen = self.result.advice or next(iter(self.result.scenarios), None)
        if chosen is None:
            raise PptraceError("no plan to write: no change is predicted from this run")
        change = dict(self.changes)[chosen.name]
        return text_or_file(to_csv(plan_of(change, self.study.name, self.study.costs)), path)

    def __repr__(self) -> str:
        from pptrace.report.whatif import brief_lines

        return f"<pptrace.Predictions: {brief_lines(self.result)}>"

    def _json_object(self) -> dict[str, Any]:
        from pptrace.report.to_json import whatif_object

        return whatif_object(self.result)

    def _page(self) -> str:
        from pptrace.report.html import whatif_page

        return whatif_page(self.result, pictures(self.study, self.changes, self.result))


def predict_changes(analysis: Analysis, wishes: Wishes, on_count: OnCount | None = None) -> Predictions:
    """Predict what a user wishes: all of it in one scenario for each schedule; without any, all sensible changes.

    With ``wishes.verify``, what was asked for (of all changes the best one) is run in real processes. ``on_count`` takes how many
    changes are predicted, and of how many.

    Raises:
        PptraceError: the run has no whole step, or a wish does not fit it; the message is one line.
    """
    study = study_of(analysis, wishes)
    changes = changes_of(study, wishes)
    predictions = Predictions(study, changes, answer(study, changes, on_count))
    return verified(analysis, predictions, most=None if wishes else 1) if wishes.verify else predictions


def changes_of(study: Study, wishes: Wishes) -> list[tuple[str, Change]]:
    """The changes that a user wishes, each with its name; without any, all sensible ones.

    Raises:
        PptraceError: a wish does not fit the run; the message is one line.
    """
    return list(dict(_changes(study, wishes)).items()) if wishes else all_changes(study)


def verified(analysis: Analysis, predictions: Predictions, most: int | None = None) -> Predictions:
    """Run predicted plans of a run in real processes: the ``most`` best that are no ideals, or all that were predicted.

    Raises:
        UsageError: only ideals were asked for, whose gains the measured steps tell.
        PptraceError: a plan has more ranks than this machine should start, or does not end; the message is one line.
    """
    size, changes, result = message_bytes(analysis), dict(predictions.changes), predictions.result
    plans = [one for one in result.scenarios if not predictions.study.is_measured(changes[one.name])]
    if result.scenarios and not plans:
        raise UsageError(
            "--verify: nothing to run: an ideal alone changes no plan, and the measured steps tell what it gains; leave it out"
        )
    chosen = [one for one in plans if most is None or one.is_choice][:most]
    spans = {one.name: _run(predictions.study, changes[one.name], one, size) for one in chosen}
    scenarios = tuple(structs.replace(one, verified_span_ns=spans.get(one.name)) for one in result.scenarios)
    return replace(predictions, result=structs.replace(result, scenarios=scenarios))


def study_of(analysis: Analysis, wishes: Wishes) -> Study:
    """The study behind predictions, with what ``wishes`` has that is no change: layers, links, shares, the limit of memory.

    Raises:
        PptraceError: the run has no whole step, or the layers or shares do not fit it; the message is one line.
    """
    _require_legal(wishes)
    links = cast("tuple[Link, ...]", wishes.links)
    latencies = latencies_of(links)
    if links and not latencies:
        reasons = sorted({link.fit_reason or "" for link in links})
        raise PptraceError(f"--links: no latency could be fitted to a link of that run: {'; '.join(reasons)}")
    layers = _layers(analysis, wishes)
    assumed = Assumed(wishes.wgrad_share, wishes.fixed_share)
    study = study_run(
        *(analysis.report, analysis.costs, analysis.schedule, layers, wishes.memory_limit, latencies, assumed),
        order=analysis.order,
    )
    sizes = gpt_of_run(analysis.facts.values(), analysis.schedule)
    if sizes is None:
        return study
    return structs.replace(study, sequences=sizes.microbatch_size, tells_shapes=sizes.varies)


def _layers(analysis: Analysis, wishes: Wishes) -> tuple[int, ...] | None:
    """The layers of each stage: as the user says, else as the trace does."""
    sizes, plan = gpt_of_run(analysis.facts.values(), analysis.schedule), analysis.schedule.plan
    traced = None if sizes is None else sizes.layers_per_stage
    if wishes.layers is None:
        return traced
    if (plan is not None and len(wishes.layers) != plan.chain_length) or not fits(wishes.layers):
        expected = "" if plan is None else f" {plan.chain_length},"
        raise UsageError(
            f"--layers {commas(wishes.layers)}: expected{expected} one number of layers for each stage of the run, at least 1 "
            "but at the ends"
        )
    if traced is not None and tuple(wishes.layers) != tuple(traced):
        raise UsageError(f"--layers {commas(wishes.layers)}: the trace tells {commas(traced)}; leave out --layers")
    return tuple(wishes.layers)


def message_bytes(analysis: Analysis) -> int:
    """The usual size of the pipeline's messages, bytes; 0 where it is not known."""
    comms = analysis.data.comms
    sizes = comms["bytes"][(comms["axis"] == "pp") & (comms["kind"] == "recv") & (comms["bytes"] > 0)]
    return min(int(sizes.median()), _MOST_BYTES) if len(sizes) else 0


def _run(study: Study, change: Change, scenario: Scenario, size: int) -> int:
    target, durations, transfers = study.step_costs(change)
    work = Workload(
        target.plan,
        durations.tolist(),
        transfers.tolist(),
        target.messaging.name.lower(),
        round(size * change.microbatch_size),
        target.prefetch,
    )
    return execute(work, scenario.span_ns)


def _changes(study: Study, wishes: Wishes) -> Iterable[tuple[str, Change]]:
    _require_legal(wishes)
    _require_fits(wishes, study)
    if wishes.repair_order:
        yield REPAIRED, Change(order=_repaired(wishes, study))
        return
    names = set(Change.__struct_fields__) & options_of(Wishes).keys()
    given = {name: value for name in names if (value := getattr(wishes, name)) is not None}
    speeds = dict(map(parse_speed, wishes.collective_speeds))
    if len(speeds) < len(wishes.collective_speeds):
        raise UsageError(
            f"--collective-speed: an axis twice in {', '.join(wishes.collective_speeds)}; expected each once"
        )
    of_texts = {
        "ideals": tuple(map(parse_ideal, dict.fromkeys(wishes.ideals))),
        "collective_speeds": tuple(speeds.items()),
    }
    change = Change(**given | of_texts)
    others = _name(wishes)
    if not wishes.schedules:
        yield others, change
    for schedule in wishes.schedules:
        if schedule == ALL:
            every = all_schedules(study, change)
            if not every:
                raise UsageError(
                    f"--schedule all: no schedule of the catalogue has such a plan ({others}) of a size that all are tried with"
                )
        else:
            registry.get(schedule)
            every = [(schedule, structs.replace(change, schedule=schedule))]
        yield from ((f"{name}, {others}" if others else name, one) for name, one in every)


def _require_legal(wishes: Wishes) -> None:
    """Refuse numbers that no run could have."""
    for name, one in options_of(Wishes).items():
        flag, value = f"--{one.flag}", getattr(wishes, name)
        if value is None:
            continue
        match one.takes:
            case Value.WHOLE | Value.SIZE:
                require_whole(flag, value, 1)
            case Value.DEPTH:
                require_whole(flag, value, 0)
            case Value.SHARE:
                require_number(flag, value, "a part of an op", 1)
            case Value.TIMES:
                require_number(flag, value, "how many times as much as today", _MOST_TIMES)
                if value <= 0:
                    raise UsageError(f"{flag} is {value:g}; expected more than 0")
                if value < _LEAST_TIMES:
                    raise UsageError(f"{flag} is {value:g}; expected at least {_LEAST_TIMES:g}")


def _require_fits(wishes: Wishes, study: Study) -> None:
    size = wishes.microbatch_size
    if size is not None and study.sequences is not None and not (study.sequences * size).is_integer():
        raise UsageError(
            f"--microbatch-size {size:g}: microbatches of this run have {counted(study.sequences, 'sequence')}; expected whole "
            "ones"
        )
    if wishes.split is not None and not fits(wishes.split):
        raise UsageError(
            f"--split {commas(wishes.split)}: every stage but the first and the last has at least one layer; expected such as "
            "5,5,5,3 or 6,6,6,0"
        )
    pp = study.costs.plan.pp
    if wishes.placement is not None and sorted(wishes.placement) != list(range(pp)):
        raise UsageError(f"--placement {commas(wishes.placement)}: expected each of 0 to {pp - 1} once")
    layers, number = study.costs.layers, wishes.recompute_layers
    if layers is not None and number is not None and number > max(layers) and not (wishes.chunks or wishes.split):
        raise UsageError(f"--recompute-layers {number}: stages have at most {counted(max(layers), 'layer')}")
    if number == 0 and not study.costs.recompute.any():
        raise UsageError("--recompute-layers 0: backwards of this run recompute nothing, so that it changes nothing")


def _repaired(wishes: Wishes, study: Study) -> Plan:
    """The plan with sends and receives in a better order.

    Raises:
        UsageError: something else is asked for as well.
        PptraceError: no receive of the run holds up anything, or no better order is known.
    """
    if replace(wishes, repair_order=False):
        raise UsageError("--repair-order goes with no other change: it keeps the plan and moves its receives")
    if study.order is not None:
        return study.order.repaired
    early = study.early_receives
    if early is None or early.reason is not None:
        why = "it has no messages between stages" if early is None else early.reason
    else:
        why = early.gain_reason or "none of its receives holds up another call"
    raise PptraceError(f"--repair-order: nothing to repair in this run: {why}")


def _name(wishes: Wishes) -> str:
    """The changes besides the schedule, in words."""
    parts = [
        counted(wishes.chunks, "chunk") if wishes.chunks else "",
        counted(wishes.microbatches, "microbatch", "microbatches") if wishes.microbatches else "",
        f"microbatches {wishes.microbatch_size:g} times the size" if wishes.microbatch_size else "",
        f"split {commas(wishes.split)}" if wishes.split else "",
        f"links {wishes.link_speed:g} times as fast" if wishes.link_speed else "",
        *(f"collectives along {name.replace('=', ' ')} times as fast" for name in wishes.collective_speeds),
        f"placement {commas(wishes.placement)}" if wishes.placement else "",
        "" if wishes.prefetch is None else prefetch_name(wishes.prefetch),
        "" if wishes.recompute_layers is None else recompute_name(wishes.recompute_layers),
        *(f"ideal {name}" for name in dict.fromkeys(wishes.ideals)),
    ]
    return ", ".join(part for part in parts if part)


def commas(numbers: Sequence[int]) -> str:
    """Numbers as options take them."""
    return ",".join(map(str, numbers))
