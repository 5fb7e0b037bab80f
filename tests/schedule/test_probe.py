"""Probes: read back as they are written, refused where they make no sense, and which ops and steps they are of."""

from __future__ import annotations

import pytest

from pptrace.errors import UsageError
from pptrace.schedule.actions import Action, Kind, parse_action
from pptrace.schedule.probe import Probe, parse_probe, parse_probes, probe_of, steps_for


@pytest.mark.parametrize(
    ("text", "probe"),
    [
        ("F:0.2", Probe(Kind.F, 0.2)),
        ("B:1", Probe(Kind.B, 1.0)),
        ("I:0.05", Probe(Kind.I, 0.05)),
        ("W:0.5", Probe(Kind.W, 0.5)),
        ("stage=12:0.1", Probe(12, 0.1)),
    ],
)
def test_a_probe_is_read_as_it_is_written(text: str, probe: Probe) -> None:
    assert parse_probe(text) == probe
    assert str(probe) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F",
        "F:",
        "F:0",
        "F:-0.1",
        "F:1.5",
        "F:nan",
        "F:1e-2",
        "G:0.1",
        "stage:0.1",
        "stage=-1:0.1",
        "2:0.1",
        "F=1:0.1",
    ],
)
def test_what_is_no_probe_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError, match=rf"^--probe {text}: expected [^\n]+$"):
        parse_probe(text)


def test_each_target_is_probed_once() -> None:
    assert [probe.target for probe in parse_probes(["F:0.2", "stage=0:0.2"])] == [Kind.F, 0]
    with pytest.raises(UsageError, match="--probe F: given twice"):
        parse_probes(["F:0.2", "B:0.1", "F:0.1"])


@pytest.mark.parametrize(
    ("target", "action", "delays", "divides"),
    [
        ("F:0.1", "2F3", False, False),
        ("F:0.1", "2B3", True, False),
        ("B:0.1", "2I3", True, False),
        ("stage=2:0.1", "2B3", False, False),
        ("stage=2:0.1", "1B3", True, False),
        ("F:0.1", "(2F3;0B1)OVERLAP_F_B", False, True),
        ("W:0.1", "(2F3;0B1)OVERLAP_F_B", True, False),
        ("stage=0:0.1", "(2F3;0I1)OVERLAP_F_B", False, True),
        ("stage=2:0.1", "(2F3;2B1)OVERLAP_F_B", False, False),
    ],
)
def test_all_ops_but_the_targets_are_delayed(target: str, action: str, delays: bool, divides: bool) -> None:
    probe, op = parse_probe(target), parse_action(action)
    assert (probe.delays(op), probe.divides(op)) == (delays, divides)


def test_an_op_whose_stage_nobody_knows_may_be_the_targets() -> None:
    op = Action(Kind.B, -1, 0)
    assert not parse_probe("stage=1:0.1").delays(op)
    assert parse_probe("F:0.1").delays(op)


def test_probes_take_turns_in_every_second_step() -> None:
    probes = parse_probes(["F:0.2", "B:0.2"])
    assert [probe_of(probes, step) for step in range(8)] == [None, probes[0], None, probes[1]] * 2
    assert probe_of((), 1) is None
    window = range(2, 2 + steps_for(len(probes), 5))
    probed = [probe_of(probes, step) for step in window]
    assert [probed.count(probe) for probe in probes] == [5, 5]
    assert probed[0] is probed[-1] is None
