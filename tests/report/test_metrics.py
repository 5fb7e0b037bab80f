"""Metrics of Prometheus, read by its own client: the figures of the JSON report, in its units and with its nulls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

import pptrace
from pptrace.report.metrics import metrics_of
from tests.support.programs import SAMPLES


def read(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Value by name and labels; every family has a type and a meaning, and every sample once."""
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(text):
        assert (family.type, bool(family.documentation)) == ("gauge", True)
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in samples
            samples[key] = sample.value
    return samples


def value(samples: Mapping[Any, float], name: str, **labels: object) -> float | None:
    return samples.get((f"pptrace_{name}", frozenset((key, str(text)) for key, text in labels.items())))


@pytest.fixture(scope="module")
def run() -> pptrace.Run:
    return pptrace.load(SAMPLES / "1f1b_p4")


def test_the_figures_are_those_of_the_json_report(run: pptrace.Run) -> None:
    samples, report = read(metrics_of(run.report)), json.loads(run.to_json())
    last = report["steps"][-1]
    for which, number in (("last", last["step"]), ("typical", run.report.typical_step.step)):
        step = next(entry for entry in report["steps"] if entry["step"] == number)
        assert value(samples, "step_number", step=which) == number
        assert value(samples, "step_duration_seconds", step=which) == pytest.approx(step["period_ns"] / 1e9)
        assert value(samples, "bubble_ratio", step=which) == step["bubble"]["ratio"]
        assert value(samples, "bubble_ideal_share_ratio", step=which) == step["bubble"]["ideal_share"]
        parts = [
            amount
            for (name, labels), amount in samples.items()
            if name.endswith("step_part_seconds") and ("step", which) in labels
        ]
        assert sum(parts) == pytest.approx(step["period_ns"] / 1e9)
        for rank in step["ranks"]:
            labels = {"step": which, "rank": rank["rank"], "stage": rank["stage"]}
            names = {"compute": "compute_ns", "exposed_communication": "exposed_comm_ns", "bubble": "bubble_ns"}
            shown = {part: value(samples, "rank_part_seconds", **labels, part=part) for part in names}
            assert shown == {part: pytest.approx(rank[name] / 1e9) for part, name in names.items()}
        slowest = max(step["ranks"], key=lambda rank: rank["compute_ns"])
        labels = {"step": which, "rank": slowest["rank"], "stage": slowest["stage"]}
        assert value(samples, "slowest_rank_compute_seconds", **labels) == pytest.approx(slowest["compute_ns"] / 1e9)
        exposed = [sum(comm["exposed_ns"] for comm in rank["comms"] if comm["axis"] == "pp") for rank in step["ranks"]]
        mean = sum(exposed) / len(exposed) / 1e9
        assert value(samples, "communication_exposed_seconds", step=which, axis="pp") == pytest.approx(mean)
    assert value(samples, "run_ranks") == 4
    gains = [finding["gain_ns"] / 1e9 for finding in report["findings"] if finding["gain_ns"] is not None]
    found = [amount for (name, _), amount in samples.items() if name == "pptrace_finding_gain_seconds"]
    assert max(found) == pytest.approx(max(gains))


@pytest.mark.parametrize(
    "name", ['"', "\\", "\n", '\\"', '\\n"} 1\nevil_metric 2', "{a=1}", "é 中", "", "a\tb", "# HELP x", "\\\\n"]
)
def test_names_of_a_trace_are_labels_whatever_they_hold(name: str, run: pptrace.Run) -> None:
    report = replace(run.report, framework=name, schedule=replace(run.report.schedule, name=name))
    (labels,) = (dict(labels) for key, labels in read(metrics_of(report)) if key == "pptrace_run_info")
    assert (labels["framework"], labels["schedule"]) == (name, name)


def test_half_a_character_is_no_reason_to_answer_nothing(run: pptrace.Run) -> None:
    text = metrics_of(replace(run.report, framework="a\ud800b"))
    assert 'framework="a?b"' in text.encode().decode()


def test_what_is_not_known_has_no_sample(run: pptrace.Run) -> None:
    step = run.report.steps[-1]
    bubble = replace(step.bubble, ratio=None, share=None)
    ranks = tuple(
        replace(rank, bubble_ns=None, comms=tuple(replace(comm, exposed_ns=None) for comm in rank.comms))
        for rank in step.ranks
    )
    unknown = replace(step, span_ns=None, period_ns=None, outside=None, bubble=bubble, ranks=ranks, causes=None)
    samples = read(metrics_of(replace(run.report, steps=(unknown,))))
    names = {name for name, _ in samples}
    assert not names & {
        "pptrace_step_duration_seconds",
        "pptrace_bubble_ratio",
        "pptrace_communication_exposed_seconds",
    }
    assert value(samples, "step_number", step="last") == step.step
    assert not any(("part", "bubble") in labels for _, labels in samples)
    assert any(("part", "compute") in labels for _, labels in samples)


def test_without_steps_or_a_report_the_rest_is_answered(run: pptrace.Run) -> None:
    assert value(read(metrics_of(replace(run.report, steps=()))), "run_steps") == 0
    assert read(metrics_of(None)) == {("pptrace_report_available", frozenset()): 0}
