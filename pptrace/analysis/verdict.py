"""The whole report in one sentence: how long a step takes, where it goes, and what would give most of it back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pptrace.analysis.result import Finding, RankDevice, Report, Severity, StepReport
from pptrace.analysis.step_parts import LATE_OPS, OUTSIDE, OUTSIDE_NAMES
from pptrace.analysis.stragglers.hosts import LATE_LAUNCHES
from pptrace.analysis.stragglers.late_members import LATE_MEMBER
from pptrace.analysis.stragglers.late_receives import LATE_RECEIVES
from pptrace.analysis.stragglers.unequal_routes import UNEQUAL_ROUTES

_WORTH_NAMING = 0.02
"""A part below this share of the step is left out of the sentence."""
_NAMES = {
    "compute": "compute",
    "structural": "the fill and drain of {schedule}",
    "imbalance": "stages of unequal cost",
    "straggler": "a rank slower than its replicas",
    "jitter": "ops that vary",
    "communication": "exposed communication",
    "host": "devices waiting for launches",
    LATE_OPS: "ops that begin late",
    "unexplained": "unexplained",
    UNEQUAL_ROUTES: "experts with more rows than others",
}


def with_verdict(report: Report) -> Report:
    """The report with one sentence about the run, which is about its typical step."""
    return replace(report, verdict=_verdict(report))


def _verdict(report: Report) -> str:
    sentence, series = _sentence(report), report.step_series
    if not _speaks_of_hosts(report):
        sentence = sentence.replace(_NAMES["host"], f"{_NAMES['host']} (the recorder's part of it is not known)")
    if series is None or not report.steps or series.num_steps >= _FEWEST_STEPS or report.hang is not None:
        return sentence
    number = "1 step was" if series.num_steps == 1 else f"{series.num_steps} steps were"
    return f"{sentence} Only {number} timed: what recurs cannot be told from what happened once."


_FEWEST_STEPS = 3
"""With fewer steps nothing tells what is usual from what happened once."""


def _sentence(report: Report) -> str:
    step, steps, schedule = report.typical_step, report.steps, report.schedule
    if report.hang is not None:
        return f"The run hung: {report.hang['detail']}"
    if step is None:
        return _without_steps(report.device)
    if step.span_ns is None:
        number = "1 step was" if len(steps) == 1 else f"{len(steps)} steps were"
        return f"{number} recognised; how long is not known, because the ranks' clocks cannot be compared."
    length = _length(report, step)
    if parts := _with_routes(step):
        of_names = {_name(step, name).format(schedule=schedule.name): value for name, value in parts.items()}
        of_names = _with_reasons(of_names, _name(step, "host"), report.findings)
        shares = {name: value / (step.length_ns or 1) for name, value in of_names.items()}
        largest = _largest(report.findings, step)
        of_host = {"host": of_names[_name(step, "host")]} if "host" in parts else {}
        rules = _ruling_part(step, {**parts, **of_host}, report.findings) if _speaks_of_hosts(report) else ""
        return f"{rules}{length}: {_shares_text(shares)}{largest}."
    sentence = _without_causes(step, length, _largest(report.findings, step), report.mesh.num_ranks)
    return sentence if _speaks_of_hosts(report) else sentence.removeprefix(_LAUNCHING)


def _speaks_of_hosts(report: Report) -> bool:
    """Return whether the recording leaves anything to say about hosts."""
    return report.recording is None or not report.recording.is_too_uncertain


def _name(step: StepReport, cause: str) -> str:
    """The name of a part in the sentence about a step."""
    if cause.startswith(OUTSIDE):
        return f"{OUTSIDE_NAMES[cause.removeprefix(OUTSIDE)]}{_outside_place(step, cause.removeprefix(OUTSIDE))}"
    return _NAMES[LATE_OPS if cause == "host" and not step.has_devices else cause]


def _outside_place(step: StepReport, name: str) -> str:
    """The place of nearly all of a part outside the pipeline, in brackets; "" if nowhere."""
    of_part = [part for part in step.outside or () if part.part == name]
    most = max(of_part, key=lambda part: part.ns)
    is_there = most.ns >= _NEARLY_ALL * sum(part.ns for part in of_part)
    return "".join(f" ({kind} {at})" for kind, at in most.where.items()) if is_there else ""


_NEARLY_ALL = 0.8


def _with_routes(step: StepReport) -> Mapping[str, int] | None:
    """The parts of a step, with imbalance between ranks of experts apart from that between stages."""
    parts, causes = step.parts, step.causes or ()
    routes = sum(cause.ns for cause in causes if cause.cause == "imbalance" and "axis" in cause.where)
    if parts is None or not routes:
        return parts
    return {**parts, "imbalance": parts["imbalance"] - routes, UNEQUAL_ROUTES: routes}


def _with_reasons(of_names: Mapping[str, int], of_host: str, findings: Sequence[Finding]) -> dict[str, int]:
    """The parts by their names, with what findings explain of them apart. Findings about hosts explain hosts, then what is left
    unexplained, late receives the latter, late members ops and communication.
    """
    left, apart = dict(of_names), {}
    of_members = tuple(_NAMES[cause] for cause in ("straggler", "jitter", "communication"))
    for finding in findings:
        reason = None if "is_outside" in finding.evidence else finding.evidence.get("reason")
        explained = {LATE_RECEIVES: (_NAMES["unexplained"],), LATE_MEMBER: of_members}.get(str(reason), ())
        if reason and finding.evidence.get("cause") == "host":
            explained = (of_host, _NAMES["unexplained"])
        if explained:
            reason = _reason_name(str(reason), of_host)
            ns = finding.gain_ns or 0
            for name in explained:
                taken = max(min(ns, left.get(name, 0)), 0)
                left, ns = {**left, name: left.get(name, 0) - taken}, ns - taken
            apart[f"{reason}{_place(finding)}"] = max(finding.gain_ns or 0, 0) - ns
    return {**left, **apart}


def _reason_name(reason: str, of_host: str) -> str:
    """The name of a reason in the sentence: ops of hosts without devices are not launched."""
    return _NAMES[LATE_OPS] if reason == LATE_LAUNCHES and of_host == _NAMES[LATE_OPS] else reason


def _without_causes(step: StepReport, length: str, largest: str, num_ranks: int) -> str:
    """The sentence about a step of which only the parts of its ranks' windows are known, of a run of so many ranks."""
    ranks = step.ranks
    window = sum(rank.window_ns for rank in ranks)
    compute = _sum([rank.compute_ns for rank in ranks])
    exposed = _sum([rank.exposed_comm_ns for rank in ranks])
    bubble = _sum([rank.bubble_ns for rank in ranks])
    if compute is None or not window:
        return f"{length}; what it was spent on is not known."
    starved = _sum([rank.host.launch_starved_ns if rank.host else None for rank in ranks]) or 0
    # Windows are the pipelines' spans: what is outside of them is a part of the step by itself.
    window = round(window * (step.length_ns or 1) / (step.span_ns or 1)) if step.outside is not None else window
    outside = _outside_shares(step)
    if exposed is None or bubble is None:
        launching = min(starved, window - compute)
        shares = {"compute": compute / window, _NAMES["host"]: launching / window, **outside}
        first = _LAUNCHING if launching >= max(_RULES * window, window - compute - launching) else ""
        rest = "the rest is waiting and exposed communication, which these traces do not separate"
        return f"{first}{length}: {_shares_text(shares)}; {rest}{largest}."
    shares = {"compute": compute / window, "exposed communication": exposed / window}
    if step.has_pipeline:
        return f"{length}: {_shares_text(shares | {'bubble': bubble / window} | outside)}{largest}."
    launching = min(starved, bubble)
    between = _sum([rank.between_operators_ns for rank in ranks])
    if between is None:
        shares[_rest_name(step, num_ranks)] = (bubble - launching) / window
    else:
        shares |= {BETWEEN_OPERATORS: between / window, "waiting for other ranks": (bubble - between) / window}
    shares[_NAMES["host"]] = launching / window
    rules = launching >= max(_RULES * window, exposed, bubble - launching)
    first = _LAUNCHING if rules else ""
    return f"{first}{length}: {_shares_text(shares)}{largest}."


def _rest_name(step: StepReport, num_ranks: int) -> str:
    """Name of what is neither compute nor communication nor launching: a rank alone waits for no other one."""
    if num_ranks > 1:
        return "waiting for other ranks, input and Python"
    return "copies and gaps between kernels" if step.has_devices else "waiting for input and Python"


def _outside_shares(step: StepReport) -> dict[str, float]:
    """Shares of the step outside its pipeline, by name."""
    sums: dict[str, int] = {}
    for part in step.outside or ():
        name = _name(step, f"{OUTSIDE}{part.part}")
        sums[name] = sums.get(name, 0) + part.ns
    return {name: ns / (step.length_ns or 1) for name, ns in sums.items()}


def _ruling_part(step: StepReport, parts: Mapping[str, int], findings: Sequence[Finding]) -> str:
    """A sentence before all others where the schedule is not what costs: a better one, or more microbatches, would win less than
    a host that launches earlier or a stage that computes less; not where others are about as slow, so that little is won with it.
    """
    name, ns = max(
        ((name, ns) for name, ns in parts.items() if name != "compute"), key=lambda part: part[1], default=("", 0)
    )
    assert step.length_ns
    if name not in ("host", "imbalance") or ns < _RULES * step.length_ns:
        return ""
    if name == "host" and step.has_devices:
        return "The bubble is not your problem: the devices wait for the host to launch. "
    stages = {
        cause.where["stage"]: cause.ns for cause in step.causes or () if cause.cause == name and "stage" in cause.where
    }
    stage = max(stages, key=stages.__getitem__, default=None)
    if stage is None or stages[stage] < _MOST_OF_IT * ns:
        return ""
    of_stage = [found for found in findings if found.evidence.get("where") == {"stage": stage} and _is_replayed(found)]
    if any((found.gain_ns or 0) < _RULES * step.length_ns for found in of_stage):
        return ""
    return f"The bubble is not your problem: stage {stage} computes longer than the others. "


_LAUNCHING = "The devices wait for the host to launch. "
_RULES = 0.1
"""From this share of the step on, the largest part beyond compute is named first, if it is not the schedule."""
_MOST_OF_IT = 0.5


def _length(report: Report, step: StepReport) -> str:
    """Describe how long the step takes; of some of the ranks, what their window shows: the whole run's is at least as long."""
    length_ns, span = step.length_ns or 0, ""
    if step.outside is not None and abs(length_ns - (step.span_ns or 0)) >= _WORTH_NAMING * length_ns:
        span = f" ({_ms(step.span_ns or 0)} ms of it the pipeline's span)"
        if (step.span_ns or 0) > length_ns:
            span = f" (its pipeline spans {_ms(step.span_ns or 0)} ms, into the next step)"
    if (mean := _mean_ns(report, step)) >= (1 + _FAR_FROM_TYPICAL) * length_ns:
        span = f", {_ms(mean)} on average{span}"
    noun = f"{'typical ' if len(report.steps) > 1 else ''}step"
    traced, num_ranks = sorted(entry.rank for entry in report.device), report.mesh.num_ranks
    if not 0 < len(traced) < num_ranks:
        return f"The {noun} takes {_ms(length_ns)} ms{span}"
    if len(traced) == 1:
        whose = f"rank {traced[0]}, the only one of {num_ranks} with a trace"
    else:
        whose = f"the {len(traced)} of {num_ranks} ranks with a trace"
    return (
        f"In the window of {whose}, the {noun} takes {_ms(length_ns)} ms{span} (in that of all ranks, as much or more)"
    )


_FAR_FROM_TYPICAL = 0.05
"""A mean step that takes so much longer than the typical one is named beside it."""


def _mean_ns(report: Report, typical: StepReport) -> int:
    """The mean of the steps whose lengths are measured as the typical one's is, ns."""
    is_periodic = typical.period_ns is not None
    lengths = [step.length_ns for step in report.steps if (step.period_ns is not None) == is_periodic]
    known = [length for length in lengths if length is not None]
    return sum(known) // max(len(known), 1)


def _without_steps(device: Sequence[RankDevice]) -> str:
    known = [entry.breakdown for entry in device if entry.breakdown.busy_ns is not None]
    whole = sum((part.busy_ns or 0) + (part.idle_ns or 0) for part in known)
    if not whole:
        return f"No training step was recognised in these traces.{_of_hosts(device)}"
    shares = {
        "computing": sum(part.compute_ns or 0 for part in known) / whole,
        "communicating": sum(part.communication_ns or 0 for part in known) / whole,
        "moving memory": sum(part.memory_ns or 0 for part in known) / whole,
    }
    idle = sum(part.idle_ns or 0 for part in known)
    starved = _sum(
        [
            entry.host.launch_starved_ns if entry.host else None
            for entry in device
            if entry.breakdown.busy_ns is not None
        ]
    )
    if starved is None:
        shares["idle"] = idle / whole
    else:
        shares["idle because nothing was launched"] = starved / whole
        shares["idle for other reasons"] = (idle - starved) / whole
    devices = "The device was" if len(known) == 1 else f"The {len(known)} devices were"
    return f"No training step was recognised in these traces. {devices} {_shares_text(shares)}."


def _of_hosts(device: Sequence[RankDevice]) -> str:
    """A sentence about what hosts without devices did in their whole traces; "" where that is not known."""
    known = [entry.on_host for entry in device if entry.on_host is not None]
    whole = sum(window.last_ns - window.first_ns for window in known)
    if not whole:
        return ""
    shares = {
        "compute": sum(window.compute_ns for window in known) / whole,
        "communication and waiting for it": sum(window.communication_ns for window in known) / whole,
        BETWEEN_OPERATORS: sum(window.rest_ns for window in known) / whole,
    }
    whose = "The trace lasts" if len(known) == 1 else f"The {len(known)} traces last, at the mean,"
    return f" {whose} {_ms(whole // len(known))} ms: {_shares_text(shares)}."


def _shares_text(shares: Mapping[str, float]) -> str:
    """Name compute and the shares that count, the largest first; what made the step shorter at the end, so that all add up."""
    named = sorted(shares.items(), key=lambda item: (item[0] != "compute", -item[1]))
    longer = [f"{share:.0%} {name}" for name, share in named if share >= _WORTH_NAMING or name == "compute"]
    shorter = [f"less {-share:.0%} {_SHORTER.get(name, name)}" for name, share in named if share <= -_WORTH_NAMING]
    return ", ".join([*longer, *shorter]) or ", ".join(f"{share:.0%} {name}" for name, share in named[:1])


BETWEEN_OPERATORS = "between operators (Python, input)"
_SHORTER = {_NAMES["jitter"]: "ops faster than usual"}


def _largest(findings: Sequence[Finding], step: StepReport) -> str:
    """Name the largest finding to act on, and what it would give back, as the finding says: not the schedule itself, nor the
    unexplained.
    """
    gains: list[tuple[int, str]] = []
    for finding in findings:
        cause = str(finding.evidence.get("cause"))
        is_unexplained = cause == "unexplained" and "reason" not in finding.evidence
        if finding.severity is Severity.INFO or is_unexplained:
            continue
        if of_some := _of_some_steps(finding):
            what = f"on average of {of_some}"
        elif reason := finding.evidence.get("reason"):
            what = f"of {_reason_name(str(reason), _name(step, 'host'))}{_place(finding)}"
        else:
            what = f"of {_name(step, cause) if cause in _NAMES else finding.title}{_place(finding)}"
        gains.append((finding.gain_ns or 0, what))
    gain, what = max(gains, key=lambda pair: pair[0], default=(0, ""))
    return f"; the most to win back is {_ms(gain)} ms a step {what}" if gain > 0 else ""


def _is_replayed(finding: Finding) -> bool:
    """Return whether the gain is that of a replay in which the finding's place costs what its like costs."""
    return "gain_if_spread_ns" in finding.evidence


def _of_some_steps(finding: Finding) -> str:
    """Steps that a finding about single steps is about; "" of one about all of them, whose gain is not that of a typical step."""
    if "steps" in finding.evidence:
        return f"outliers{_place(finding)}"
    return f"the slowdown since step {finding.evidence['step']}{_place(finding)}" if "step" in finding.evidence else ""


def _place(finding: Finding) -> str:
    """Place of a finding, in brackets; "" if nowhere."""
    places = ", ".join(f"{place} {name}" for place, name in finding.evidence.get("where", {}).items())
    return f" ({places})" if places else ""


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _ms(ns: int) -> str:
    if ns < 1e6:
        return f"{ns / 1e6:.2f}" if ns >= 1e5 else f"{ns / 1e6:.3f}"
    return f"{ns / 1e6:,.1f}" if ns < 1e9 else f"{ns / 1e6:,.0f}"
