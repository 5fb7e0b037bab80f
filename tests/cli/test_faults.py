"""Faults on real ranks: the first finding names each, and states what its steps really are longer than those of a clean run.

One on two ranks; all of tools/faults.py, on four, with PPTRACE_ALL set. Its table in the docs has the measured gains.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from instrument.examples.faults import Fault
from tests.support.extent import ALL
from tools.faults import CASES, Case, Setting, outcome_of

pytestmark = pytest.mark.processes

_SETTING = Setting(pp=2, microbatches=4, forward_ms=25, steps=6)
_FEW = (Case("Python between ops", Fault("python", (1,), 0.03), "host", {"rank": 1}, "late launches", _SETTING),)
_MOST_ERROR = 0.3
"""Busy cores add to the steps of one run more than to those of the other."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder in which runs are kept, so that all cases share their clean one."""
    return tmp_path_factory.mktemp("faults")


@pytest.mark.parametrize("case", CASES if ALL else _FEW, ids=lambda case: case.name)
def test_the_first_finding_names_the_fault_and_what_it_costs(case: Case, folder: Path) -> None:
    outcome = outcome_of(case, folder)
    assert outcome.is_named, [finding.title for finding in outcome.findings]
    assert abs(outcome.error) < _MOST_ERROR, (outcome.stated_ms, outcome.gained_ms)
