"""The report as metrics of Prometheus, in its text format (version 0.0.4).

    # HELP pptrace_step_duration_seconds Length of the step …
    # TYPE pptrace_step_duration_seconds gauge
    pptrace_step_duration_seconds{step="typical"} 0.0312

Names follow Prometheus' conventions: base units, no labels in names. All are gauges: they are of a report, which another one
follows. What the report has as null has no sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from pptrace.analysis.live_cost import LiveCosts
from pptrace.analysis.report import Report
from pptrace.analysis.result import RankStep, Severity, StepReport
from pptrace.workflow.live.follow import LiveStepFigures

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_NS = 1e9
_RANK_PARTS = {"compute": "compute_ns", "exposed_communication": "exposed_comm_ns", "bubble": "bubble_ns"}

Samples = Iterable[tuple[Mapping[str, object], float | None]]
"""(labels, value) of a gauge, None where the value is not known."""


def metrics_of(report: Report | None) -> str:
    """All metrics of a report; of None that there is none."""
    text = _gauge("report_available", "1 where the traces could be analysed, else 0.", [({}, int(report is not None))])
    if report is None:
        return text
    steps = {"typical": report.typical_step, "last": report.steps[-1] if report.steps else None}
    known = {name: step for name, step in steps.items() if step is not None}
    return text + "".join([*_run(report), *_steps(known), *_ranks(known), *_communication(known), *_findings(report)])


def live_metrics_of(steps: Sequence[LiveStepFigures], costs: LiveCosts) -> str:
    """Metrics of a run that goes on: its last step, the last one that was observed, and what observing costs."""
    if not steps:
        return ""
    last = steps[-1]
    observed = next((step for step in reversed(steps) if step.observed), None)
    ranks, slow = (observed.ranks, observed.slow_ranks) if observed is not None else ((), ())
    parts = [
        ({"rank": rank.rank, "part": part}, _seconds(getattr(rank, name)))
        for rank in ranks
        for part, name in _RANK_PARTS.items()
    ]
    excesses = [({"rank": one.rank, "than": one.than}, one.excess) for one in slow]
    cost = None if costs.measured is None else costs.measured.share
    length = "Length of that step: the longest of the ranks'."
    gauges = (
        _gauge("live_step_number", "Last step that all ranks have ended.", [({}, last.step)]),
        _gauge("live_step_duration_seconds", length, [({}, last.step_ns / _NS)]),
        _gauge("live_rank_part_seconds", "What a rank did in the last observed step.", parts),
        _gauge("live_slow_ranks", "Ranks that are named as slow in the last observed step.", [({}, len(slow))]),
        _gauge("live_slow_rank_excess_ratio", "How much longer the ops of a slow rank take.", excesses),
        _gauge(
            "live_observing_cost_ratio", "What observing adds to a step, by unobserved steps in between.", [({}, cost)]
        ),
    )
    return "".join(gauges)


def _gauge(name: str, meaning: str, samples: Samples) -> str:
    """A gauge with its samples as text; "" where no value is known."""
    lines = []
    for labels, value in samples:
        if value is not None:
            texts = {label: _escaped(str(text)).replace('"', r"\"") for label, text in labels.items()}
            quoted = ",".join(f'{label}="{text}"' for label, text in texts.items())
            lines.append(f"pptrace_{name}{f'{{{quoted}}}' if labels else ''} {float(value)!r}\n")
    head = f"# HELP pptrace_{name} {_escaped(meaning)}\n# TYPE pptrace_{name} gauge\n"
    return head + "".join(lines) if lines else ""


def _escaped(text: str) -> str:
    valid = text.encode("utf-8", "replace").decode()  # a trace may have half a pair of UTF-16
    return valid.replace("\\", r"\\").replace("\n", r"\n")


def _seconds(ns: int | None) -> float | None:
    return None if ns is None else ns / _NS


def _run(report: Report) -> Iterator[str]:
    about = {
        "framework": report.framework,
        "schedule": report.schedule.name,
        "clock": report.clock.method,
        "version": report.pptrace_version,
    }
    yield _gauge("run_info", "Framework, schedule, clock and pptrace's version, as labels.", [(about, 1)])
    yield _gauge("run_ranks", "Ranks of the run, with and without a trace.", [({}, report.mesh.num_ranks)])
    yield _gauge("run_steps", "Steps in the report.", [({}, len(report.steps))])
    yield _gauge("run_warnings", "Warnings about what the traces lack.", [({}, len(report.warnings))])
    uncertainty = _seconds(report.clock.uncertainty_ns)
    yield _gauge(
        "clock_uncertainty_seconds", "How far the ranks' clocks may differ after alignment.", [({}, uncertainty)]
    )
    yield _gauge("run_hung", "1 where the run hung, else 0.", [({}, int(report.hang is not None))])
    peaks = () if report.memory is None else report.memory.ranks
    memory = [({"rank": row.rank, "kind": row.kind}, row.peak_bytes) for row in peaks]
    yield _gauge("rank_peak_memory_bytes", "Highest measured memory of a rank, in any step.", memory)


def _steps(steps: Mapping[str, StepReport]) -> Iterator[str]:
    def of_each(name: str, meaning: str, values: Mapping[str, float | None]) -> str:
        return _gauge(name, meaning, [({"step": which}, value) for which, value in values.items()])

    yield of_each("step_number", "Number of the step.", {which: step.step for which, step in steps.items()})
    spans = {which: _seconds(step.length_ns) for which, step in steps.items()}
    yield of_each(
        "step_duration_seconds", "Time from the start of the step to that of the next one, else its span.", spans
    )
    for name, meaning in (
        ("ratio", "Bubble over compute, of all ranks."),
        ("share", "Bubble over the whole step, of all ranks."),
        ("ideal_ratio", "Bubble over compute of the plan with equal ops and free messages."),
        ("ideal_share", "Bubble over the whole step of the plan with equal ops and free messages."),
    ):
        shown = f"bubble_{name}" if name.endswith("ratio") else f"bubble_{name}_ratio"
        yield of_each(shown, meaning, {which: getattr(step.bubble, name) for which, step in steps.items()})
    parts = [
        ({"step": which, "part": part}, _seconds(ns))
        for which, step in steps.items()
        for part, ns in (step.parts or {}).items()
    ]
    yield _gauge("step_part_seconds", "Part of the step by cause; the parts sum to its length.", parts)


def _ranks(steps: Mapping[str, StepReport]) -> Iterator[str]:
    def labels(which: str, rank: RankStep) -> dict[str, object]:
        return {"step": which, "rank": rank.rank, "stage": "" if rank.stage is None else rank.stage}

    parts = [
        (labels(which, rank) | {"part": part}, _seconds(getattr(rank, name)))
        for which, step in steps.items()
        for rank in step.ranks
        for part, name in _RANK_PARTS.items()
    ]
    yield _gauge("rank_part_seconds", "What a rank did in its window of the step; the parts sum to the window.", parts)
    slowest = []
    for which, step in steps.items():
        known = [rank for rank in step.ranks if rank.compute_ns is not None]
        if known:
            rank = max(known, key=lambda rank: rank.compute_ns or 0)
            slowest.append((labels(which, rank), _seconds(rank.compute_ns)))
    yield _gauge(
        "slowest_rank_compute_seconds", "Compute of the rank that has most of it, which the labels name.", slowest
    )


def _communication(steps: Mapping[str, StepReport]) -> Iterator[str]:
    """Mean over the ranks that communicate on an axis: exposed, hidden and waiting time of all its kinds."""
    for part, meaning in (
        ("exposed", "Transfers that overlap no compute"),
        ("hidden", "Transfers that overlap compute"),
        ("wait", "Waiting for the other side"),
    ):
        samples = []
        for which, step in steps.items():
            for axis in dict.fromkeys(comm.axis for rank in step.ranks for comm in rank.comms):
                of_ranks = [
                    [getattr(comm, f"{part}_ns") for comm in rank.comms if comm.axis == axis] for rank in step.ranks
                ]
                sums: list[Any] = [None if None in times else sum(times) for times in of_ranks if times]
                samples.append(({"step": which, "axis": axis}, None if None in sums else fmean(sums) / _NS))
        yield _gauge(f"communication_{part}_seconds", f"{meaning}, by axis, mean over the ranks that use it.", samples)


def _findings(report: Report) -> Iterator[str]:
    counts = Counter(finding.severity for finding in report.findings)
    by_severity = [({"severity": severity.value}, counts[severity]) for severity in Severity]
    yield _gauge("findings", "Findings about the run, by severity.", by_severity)
    gains: dict[tuple[str, str], int] = {}
    for finding in report.findings:
        if finding.gain_ns is not None:
            where = ", ".join(f"{name} {value}" for name, value in (finding.evidence.get("where") or {}).items())
            key = str(finding.evidence.get("cause") or finding.title), where
            gains[key] = max(gains.get(key, 0), finding.gain_ns)
    samples = [({"cause": cause, "where": where}, _seconds(ns)) for (cause, where), ns in gains.items()]
    yield _gauge("finding_gain_seconds", "What a step would get back without this cause, at most.", samples)
