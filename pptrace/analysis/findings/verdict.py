"""The whole report in one sentence: how long a step takes, where it goes, and what would give most of it back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from pptrace.analysis.findings.plain import ANYWHERE, LOOK_AT_LONG_CALLS, is_long_call, place_of_pauses
from pptrace.analysis.findings.root_causes import FOLLOWS_FROM, in_groups
from pptrace.analysis.findings.window_parts import (
    BETWEEN_OPERATORS,
    COMPUTE,
    EXPOSED,
    NOT_SEPARATED,
    WAITING_FOR_LAUNCHES,
    WindowParts,
    window_parts,
)
from pptrace.analysis.part_words import IDLE_WORDS, RECORD_ALL_RANKS, in_brackets, place_of_part, words_of_part
from pptrace.analysis.report import Report
from pptrace.analysis.result import Finding, RankDevice, Severity, StepReport
from pptrace.analysis.stragglers.alike import SLOW_RANK
from pptrace.analysis.whole_run import OUTSIDE
from pptrace.model.known import sum_of

_WORTH_NAMING = 0.02
"""A part below this share of the step is left out of the sentence."""

_WON_BACK, _ONLY = "; the most to win back is ", " Only "


def with_verdict(report: Report) -> Report:
    """The report with one sentence about the run, which is about its typical step."""
    sentence, series = _sentence(report), report.step_series
    if not _speaks_of_hosts(report):
        sentence = sentence.replace(
            WAITING_FOR_LAUNCHES, f"{WAITING_FOR_LAUNCHES} (the recorder's part of it is not known)"
        )
    if series is not None and report.steps and series.num_steps < _FEWEST_STEPS and report.hang is None:
        number = "1 step was" if series.num_steps == 1 else f"{series.num_steps} steps were"
        sentence += f"{_ONLY}{number} timed: what recurs cannot be told from what happened once."
    return replace(report, verdict=sentence)


class VerdictLines(Struct, frozen=True):
    """The verdict in three short lines: what the step is made of, why, and what to do first; "" where there is nothing to say.

    ``finding`` is the number of the finding that the last one is about, in the order of the report; None if none.
    """

    made_of: str
    cause: str = ""
    first: str = ""
    finding: int | None = None


def verdict_lines(report: Report) -> VerdictLines:
    """The lines on a run; all of what is known goes into the first one where no step was recognised."""
    step = report.typical_step
    if report.hang is not None or step is None or step.length_ns is None or not step.ranks:
        return VerdictLines(report.verdict)
    # what steps are made of, and how few there are, without what would be won back
    sentence, only, number_of_steps = report.verdict.partition(_ONLY)
    before, found_gain, _ = sentence.partition(_WON_BACK)
    made_of, few = f"{before}." if found_gain else sentence, f"{only}{number_of_steps}"
    actionable = [(number, found) for number, found in enumerate(report.findings) if _is_actionable(found)]
    root = next((root for root, _ in in_groups(report.root_causes, report.findings) if root is not None), None)
    if not actionable:
        if root is None:
            for number, found in enumerate(report.findings):
                if found.gain_ns is None and found.evidence.get("share", 0) >= _RULES:
                    first = f"{_capital(_advice(found, step))}; what that saves is not known.{few}"
                    return VerdictLines(made_of, f"{found.title}.", first, number)
            if not _speaks_of_hosts(report):
                reasons = [missing.reason for missing in report.missing_evidence if "host" in missing.findings]
                for why, _, cure in (reason.partition(": ") for reason in reasons):
                    return VerdictLines(made_of, "", f"{_capital(cure)}: {why}.{few}")
            return VerdictLines(made_of, "", f"{_of_the_schedule(report)}{few}")
        return VerdictLines(made_of, f"{_capital(root.title)}: {root.detail}.", f"{_capital(root.advice)}.{few}")
    below = [entry for entry in actionable if root is not None and entry[1].evidence.get(FOLLOWS_FROM) == root.name]
    number, found = max(below or actionable, key=lambda entry: _saved_ns(entry[1]))
    largest = max(actionable, key=lambda entry: _saved_ns(entry[1]))
    if root is not None and not root.gain and _saved_ns(found) < _MOST_OF_IT * _saved_ns(largest[1]):
        below, (number, found) = [], largest  # what has another cause comes first
    miss = _replay_miss(step)
    gain = _gain_words(found) if miss is None or found.evidence.get("is_outside") else _NOT_KNOWN.format(miss)
    if root is None or not below:
        first = f"{_capital(_advice(found, step))}: {gain}.{few}"
        return VerdictLines(made_of, f"{found.title}.", first, number)
    follows = f"the largest finding that follows from it {gain.replace('saves', 'costs', 1)}"
    gain = root.gain or (follows if miss is None else gain)
    return VerdictLines(
        made_of, f"{_capital(root.title)}: {root.detail}.", f"{_capital(root.advice)}: {gain}.{few}", number
    )


_MOST_MISS = 0.1
"""A replay that misses the step by more tells no gain."""
_NOT_KNOWN = "what that saves is not known, as the replay that tells it misses the step by {:.0%}"


def _replay_miss(step: StepReport) -> float | None:
    """The part of a step that its replay lacks or has too much, where that is too much for it to tell what a change gains."""
    miss = abs((step.parts or {}).get("unexplained", 0)) / (step.length_ns or 1)
    return miss if miss > _MOST_MISS else None


def doubt_of_gain(finding: Finding, report: Report) -> str:
    """Words behind what a finding costs where that is not sure, else "": the replay that tells it misses the step, and it is
    neither measured nor what the replay misses.
    """
    step = report.typical_step
    is_told_otherwise = finding.evidence.get("is_outside") or _is_unexplained(finding)
    if step is None or step.length_ns is None or finding.gain_ns is None or is_told_otherwise:
        return ""
    miss = _replay_miss(step)
    return "" if miss is None else f"by a replay that misses the step by {miss:.0%}"


def _saved_ns(finding: Finding) -> int:
    """Time that the advice on a finding saves a step, ns: work that is moved is not gone."""
    is_moved = finding.evidence.get("cause") == "imbalance" and "same_work" not in finding.evidence
    spread = finding.evidence.get("gain_if_spread_ns") if is_moved else None
    return int(spread if spread is not None else finding.gain_ns or 0)


_OF_ALL_RANKS = (
    f"{RECORD_ALL_RANKS.capitalize()}: only the traces of all tell what the step waits for, and what another schedule "
    "would gain."
)


def _of_the_schedule(report: Report) -> str:
    """Advice where nothing but the schedule costs."""
    fill = max(
        (found.evidence["share"] for found in report.findings if (found.evidence.get("cause") == "structural")),
        default=0.0,
    )
    if fill < _RULES:
        step = report.typical_step
        if any(
            found.evidence.keys() & {"step", "steps"}
            for found in report.findings
            if found.severity is not Severity.INFO
        ):
            return "Nothing stands out in the typical step; some steps differ from it: see the findings."
        if step is None or not step.has_pipeline or step.is_evaluation:
            return "Nothing stands out."
        if any(one.causes is not None for one in report.steps):
            return "Nothing stands out; pptrace whatif tells what another schedule would gain."
        return _OF_ALL_RANKS if len(report.device) < report.mesh.num_ranks else "Nothing stands out."
    return f"Ask pptrace whatif which schedule or number of microbatches has less fill and drain, here {fill:.0%} of the step."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _is_actionable(finding: Finding) -> bool:
    """Return whether something may be done about it: not of the schedule itself, nor of what is not explained."""
    return finding.severity is not Severity.INFO and not _is_unexplained(finding) and (finding.gain_ns or 0) > 0


def _is_unexplained(finding: Finding) -> bool:
    return finding.evidence.get("cause") == "unexplained" and "reason" not in finding.evidence


def _advice(finding: Finding, step: StepReport) -> str:
    """Advice on a finding: that of its part, else what its detail ends with."""
    if finding.evidence.get("is_outside"):
        return finding.detail.partition(": ")[2]
    if (same := finding.evidence.get("same_work")) is not None:
        stage = finding.evidence["where"]["stage"]
        return f"look at the host, clocks and neighbours of stage {stage}'s rank, before layers are moved: {same}"
    of_part = words_of_part(step, str(finding.evidence.get("reason") or finding.evidence.get("cause"))).advice
    kind, most = next(iter(finding.evidence.get("idle_spans", {}).items()), ("", 0.0))
    if most > _MOST_OF_IT:
        return IDLE_WORDS[kind].advice
    waits = finding.evidence.get("synchronisations", ())
    long = [call for call in waits if is_long_call(call["call"])]
    if sum(call["drained_ns"] for call in long) > _MOST_OF_IT * finding.evidence.get("launch_starved_ns", 0):
        names = ", ".join(dict.fromkeys(call["call"] for call in long))
        return f"{LOOK_AT_LONG_CALLS} ({names})"
    if sum(wait["drained_ns"] for wait in waits) > _MOST_OF_IT * finding.evidence.get("launch_starved_ns", 0):
        names = ", ".join(dict.fromkeys(wait["operator"] or wait["call"] for wait in waits))
        return f"avoid calls in which the host waits for the device ({names})"
    if of_span := next(
        (words for words in IDLE_WORDS.values() if words.phrase == finding.evidence.get("reason")), None
    ):
        return of_span.advice
    if of_part and not {"step", "steps"} & finding.evidence.keys():
        return of_part
    detail = finding.detail
    return detail.rpartition("; ")[2] if "; " in detail else detail.partition(": ")[2] or detail


def _gain_words(finding: Finding) -> str:
    """Words for what the advice on a finding saves."""
    gain, low, high = finding.gain_ns or 0, finding.gain_low_ns, finding.gain_high_ns
    if _saved_ns(finding) != gain:
        return f"saves {_ms(_saved_ns(finding))} ms a step if the work is spread evenly"
    of = f"saves {_ms(gain)} ms a step"
    if low is None or high is None:
        return f"{of} if it recurs, as only one step tells"
    between = f"90 % interval {_ms(max(low, 0))} to {_ms(high)}"
    return f"{of} ({between})" if low > 0 else f"may save {_ms(gain)} ms a step, which is not sure ({between})"


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
        lacks_work = any(rank.compute_ns is None for rank in step.ranks)
        why = "ops or kernels are missing in the traces" if lacks_work else "the ranks' clocks cannot be compared"
        return f"{number} recognised; how long is not known, because {why}."
    length = _length(report, step)
    if parts := step.parts:
        shares = {_name(step, part): ns / (step.length_ns or 1) for part, ns in parts.items()}
        if schedule.name not in ("", "custom"):
            shares = {name.replace("the schedule", schedule.name): share for name, share in shares.items()}
        largest = _largest(report.findings, step)
        may_rule = _speaks_of_hosts(report) and not report.root_causes
        rules = _ruling_part(step, parts, report.findings) if may_rule else ""
        return f"{rules}{length}: {_shares_text(shares)}{largest}."
    sentence = _without_causes(step, length, _largest(report.findings, step), report.mesh.num_ranks)
    return sentence if _speaks_of_hosts(report) else sentence.removeprefix(_LAUNCHING)


def _speaks_of_hosts(report: Report) -> bool:
    """Return whether the recording leaves anything to say about hosts."""
    return report.recording is None or not report.recording.is_too_uncertain


def _name(step: StepReport, part: str) -> str:
    """The name of a part in the sentence about a step."""
    return f"{words_of_part(step, part).phrase}{place_of_part(step, part)}"


def _without_causes(step: StepReport, length: str, largest: str, num_ranks: int) -> str:
    """The sentence about a step of which only the parts of its ranks' windows are known, of a run of so many ranks."""
    ranks = [rank for rank in step.ranks if rank.compute_ns is not None]
    if 0 < len(ranks) < len(step.ranks):
        length = f"{length} (shares of {len(ranks)} of {len(step.ranks)} ranks)"
    parts = window_parts(step, num_ranks)
    if parts is None:
        return f"{length}; what it was spent on is not known."
    # Windows are the pipelines' spans: what is outside of them is a part of the step by itself.
    window = (
        parts.window_ns * (step.length_ns or 1) / (step.span_ns or 1) if step.outside is not None else parts.window_ns
    )
    shares = {name: ns / window for name, ns in parts.parts.items()}
    first = _first_of_plain(parts) if not step.has_pipeline or EXPOSED not in parts.named else ""
    if between := shares.pop(BETWEEN_OPERATORS, 0):
        shares[f"{BETWEEN_OPERATORS} ({place_of_pauses(ranks)})"] = between
    for part in step.outside or ():
        name = _name(step, f"{OUTSIDE}{part.part}")
        shares[name] = shares.get(name, 0) + part.ns / (step.length_ns or 1)
    rest = ""
    if parts.rest == NOT_SEPARATED:
        del shares[NOT_SEPARATED]
        rest = f"; the rest is {NOT_SEPARATED}, which these traces do not separate"
    return f"{first}{length}: {_shares_text(shares)}{rest}{largest}."


def _first_of_plain(parts: WindowParts) -> str:
    """A sentence before all others where devices mostly wait for their hosts."""
    ns, least = parts.named, _RULES * parts.window_ns
    launching = ns.get(WAITING_FOR_LAUNCHES, 0)
    if EXPOSED not in ns:
        return _LAUNCHING if launching >= max(least, parts.window_ns - ns[COMPUTE] - launching) else ""
    of_hosts = {"run no operator": BETWEEN_OPERATORS} | {words.takes: words.phrase for words in IDLE_WORDS.values()}
    does, most = max(((does, ns.get(name, 0)) for does, name in of_hosts.items()), key=lambda part: part[1])
    if launching >= max(least, ns[EXPOSED], parts.rest_ns, most):
        return _LAUNCHING
    is_ruled = WAITING_FOR_LAUNCHES in ns and most >= max(least, ns[EXPOSED], launching + parts.rest_ns)
    return f"The devices wait while hosts {does}. " if is_ruled else ""


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
    for found in findings:
        if found.evidence.get("reason") == SLOW_RANK:
            rank = found.evidence["where"]["rank"]
            return f"The bubble is not your problem: rank {rank} computes longer than the others. "
    if stage is None or stages[stage] < _MOST_OF_IT * ns:
        return ""
    if any(
        found.evidence.get("where") == {"stage": stage} and (found.gain_ns or 0) < _RULES * step.length_ns
        for found in findings
        if "gain_if_spread_ns" in found.evidence
    ):
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
    is_periodic = step.period_ns is not None
    lengths = [each.length_ns for each in report.steps if (each.period_ns is not None) == is_periodic]
    known = [length for length in lengths if length is not None]
    if (mean := (sum(known) // max(len(known), 1))) >= (1 + _FAR_FROM_TYPICAL) * length_ns:
        some = [str(found.evidence["reason"]) for found in report.findings if found.evidence.get("in_some_steps")]
        named = f" with {', '.join(some)} in some steps" if some else ""
        span = f", {_ms(mean)} on average{named}{span}"
    noun = f"{'typical ' if len(report.steps) > 1 else ''}step"
    traced, num_ranks = sorted(entry.rank for entry in report.device), report.mesh.num_ranks
    if not 0 < len(traced) < num_ranks:
        return f"The {noun} takes {_ms(length_ns)} ms{span}"
    if len(traced) == 1:
        whose = f"rank {traced[0]}, the only one of {num_ranks} with a trace"
    else:
        whose = f"the {len(traced)} of {num_ranks} ranks with a trace"
    span = f"{span} (in that of all ranks, as much or more)".replace(") (", "; ")
    return f"In the window of {whose}, the {noun} takes {_ms(length_ns)} ms{span}"


_FAR_FROM_TYPICAL = 0.05
"""A mean step that takes so much longer than the typical one is named beside it."""


def _without_steps(device: Sequence[RankDevice]) -> str:
    on_devices = [entry for entry in device if entry.breakdown.busy_ns is not None]
    known = [entry.breakdown for entry in on_devices]
    whole = sum((part.busy_ns or 0) + (part.idle_ns or 0) for part in known)
    if not whole:
        return f"No training step was recognised in these traces.{_of_hosts(device)}"
    devices = "The device" if len(known) == 1 else f"The {len(known)} devices"
    moved = sum(part.memory_ns or 0 for part in known)
    if moved == sum(part.busy_ns or 0 for part in known):
        return f"No training step was recognised in these traces. {devices} ran no kernel; it moved memory for {_ms(moved)} ms."
    shares = {
        "computing": sum(part.compute_ns or 0 for part in known) / whole,
        "communicating": sum(part.communication_ns or 0 for part in known) / whole,
        "moving memory": moved / whole,
    }
    idle = sum(part.idle_ns or 0 for part in known)
    starved = sum_of(entry.host.launch_starved_ns if entry.host else None for entry in on_devices)
    if starved is None:
        shares["idle"] = idle / whole
    else:
        shares["idle because nothing was launched"] = starved / whole
        shares["idle for other reasons"] = (idle - starved) / whole
    verb = "was" if len(known) == 1 else "were"
    return f"No training step was recognised in these traces. {devices} {verb} {_shares_text(shares)}."


def _of_hosts(device: Sequence[RankDevice]) -> str:
    """A sentence about what hosts without devices did in their whole traces; "" where that is not known."""
    known = [entry.on_host for entry in device if entry.on_host is not None]
    whole = sum(window.last_ns - window.first_ns for window in known)
    if not whole:
        return ""
    shares = {
        "compute": sum(window.compute_ns for window in known) / whole,
        "communication and waiting for it": sum(window.communication_ns for window in known) / whole,
        f"{BETWEEN_OPERATORS} ({ANYWHERE})": sum(window.rest_ns for window in known) / whole,
    }
    whose = "The trace lasts" if len(known) == 1 else f"The {len(known)} traces last, at the mean,"
    return f" {whose} {_ms(whole // len(known))} ms: {_shares_text(shares)}."


def _shares_text(shares: Mapping[str, float]) -> str:
    """Name compute and the shares that count, the largest first; what made the step shorter at the end, so that all add up."""
    named = sorted(shares.items(), key=lambda item: (item[0] != "compute", -item[1]))
    longer = [f"{share:.0%} {name}" for name, share in named if share >= _WORTH_NAMING or name == "compute"]
    shorter = [f"less {-share:.0%} {_SHORTER.get(name, name)}" for name, share in named if share <= -_WORTH_NAMING]
    return ", ".join([*longer, *shorter]) or ", ".join(f"{share:.0%} {name}" for name, share in named[:1])


_SHORTER = {"shared by several causes": "counted in several causes", "unexplained": "by which its replay is too long"}


def _largest(findings: Sequence[Finding], step: StepReport) -> str:
    """Name the largest finding to act on, and what it would give back, as the finding says: not the schedule itself, nor the
    unexplained; nor what a replay tells that misses the step.
    """
    gains: list[tuple[int, str]] = []
    for finding in findings:
        is_outside = finding.evidence.get("is_outside")
        if not _is_actionable(finding) or (_replay_miss(step) is not None and not is_outside):
            continue
        where = in_brackets(finding.evidence.get("where", {}))
        if "steps" in finding.evidence:  # of these two the gain is not that of a typical step
            what = f"on average of outliers{where}"
        elif "step" in finding.evidence:
            what = f"on average of the slowdown since step {finding.evidence['step']}{where}"
        else:
            part = finding.evidence.get("reason") or finding.evidence.get("cause")
            what = f"of {words_of_part(step, str(part)).phrase if part else finding.title}{where}"
        gains.append((finding.gain_ns or 0, what))
    gain, what = max(gains, key=lambda pair: pair[0], default=(0, ""))
    return f"{_WON_BACK}{_ms(gain)} ms a step {what}" if gain > 0 else ""


def _ms(ns: int) -> str:
    if ns < 1e6:
        return f"{ns / 1e6:.2f}" if ns >= 1e5 else f"{ns / 1e6:.3f}"
    return f"{ns / 1e6:,.1f}" if ns < 1e9 else f"{ns / 1e6:,.0f}"
