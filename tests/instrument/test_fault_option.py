"""``--fault`` of the example: what is written is read, and what a run cannot have is refused in one line."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from instrument.examples import faults
from instrument.examples.faults import Fault, check_faults
from instrument.pipeline import runtime, transport
from pptrace.errors import UsageError
from pptrace.schedule import registry
from pptrace.schedule.actions import Kind
from tools.faults import CASES

PLAN = registry.build("1f1b", 4, 8)


@pytest.mark.parametrize("case", [case for case in CASES if case.fault], ids=lambda case: case.name)
def test_every_fault_of_the_docs_is_an_option(case) -> None:
    assert Fault.read(str(case.fault)) == case.fault


def test_the_fields_of_a_fault() -> None:
    fault = Fault.read("slow:ranks=1+3,stages=2,times=1.5,chance=0.02,since=5,seed=7")
    assert fault == Fault("slow", (1, 3), 1.5, 0.02, 7, 5, (2,))
    assert Fault.read(str(fault)) == fault
    assert Fault.read("link:ranks=1+2,ms=40") == Fault("link", (1, 2), 0.04)
    assert Fault.read("crossed:ranks=1+2,since=3") == Fault("crossed", (1, 2), since=3)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "slow",
            "slow:times=2",
            "slow:ranks=1",
            "slow:ranks=1,ms=2",
            "slow:ranks=one,times=2",
            "odd:ranks=1,ms=2",
        ),
        *("slow:ranks=1,times=-1", "slow:ranks=1,times=nan", "slow:ranks=-1,times=2", "python:ranks=1,ms=2,chance=2"),
        *("link:ranks=1,ms=2", "link:ranks=1+1,ms=2", "link:stages=1+2,ms=2", "crossed:ranks=1+2,since=x"),
        "crossed:ranks=1+2,chance=0.5",
    ],
)
def test_anything_else_is_one_line_with_what_there_is(text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"--fault {text!r}: expected slow:ranks=R,times=N, ")):
        Fault.read(text)


def test_faults_that_a_run_cannot_have() -> None:
    check_faults([Fault.read("slow:ranks=3,times=2")], 4, PLAN, is_sleeping=True)
    check_faults([Fault.read("link:ranks=3+0,ms=1")], 4, registry.build("interleaved-1f1b", 4, 8), is_sleeping=True)
    with pytest.raises(UsageError, match="pipeline ranks 0 and 3 send each other nothing; give two with stages that"):
        check_faults([Fault.read("link:ranks=0+3,ms=1")], 4, PLAN, is_sleeping=True)
    for text in ("python:ranks=8,ms=1", "python:stages=4,ms=1", "link:ranks=3+4,ms=1"):
        with pytest.raises(UsageError, match=r"there are ranks 0 to \d and stages 0 to 3"):
            check_faults([Fault.read(text)], 8, PLAN, is_sleeping=True)
    with pytest.raises(UsageError, match="let them sleep, with --sleep-forward"):
        check_faults([Fault.read("slow:ranks=3,times=2")], 4, PLAN, is_sleeping=False)


@pytest.mark.parametrize("text", ["python:ranks=1,ms=3", "late:ranks=1,ms=3", "link:ranks=1+2,ms=3"])
def test_before_its_first_step_a_fault_does_nothing(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    occurred: list[object] = []
    monkeypatch.setattr(faults, "time", SimpleNamespace(sleep=occurred.append))
    monkeypatch.setattr(faults, "_Delayed", lambda post, seconds: occurred.append(seconds))
    monkeypatch.setattr(runtime, "HANDLERS", {Kind.F: lambda run, instruction: None})
    monkeypatch.setattr(runtime.PipelineRuntime, "run", lambda self: None)
    monkeypatch.setattr(transport.Wire, "_post_one", lambda self, parcel: None)
    mesh: Any = SimpleNamespace(rank=1, pp_rank=1)
    faults.install_faults([Fault.read(f"{text},since=5")], mesh, PLAN)
    for num_steps in (4, 5):
        monkeypatch.setattr(faults.session, "current", lambda: SimpleNamespace(num_steps=num_steps))  # noqa: B023
        runtime.HANDLERS[Kind.F](None, None)
        runtime.PipelineRuntime.run(None)
        transport.Wire._post_one(SimpleNamespace(_rank=1), SimpleNamespace(sending=True, pp_rank=2))
        assert occurred == [0.003] * (num_steps - 4)
