"""The usual run of this folder, read once: what a fault costs is what a run is longer than this one."""

from __future__ import annotations

import pytest

from pptrace.analysis.report import Report
from pptrace.schedule.plan_table import PlanTable
from pptrace.schedule.registry import build
from tests.analysis.stragglers.test_reasons import MICROBATCHES, PP, report_of, usual


@pytest.fixture(scope="package")
def table() -> PlanTable:
    return build("1f1b", PP, MICROBATCHES).table


@pytest.fixture(scope="package")
def healthy(table: PlanTable, tmp_path_factory: pytest.TempPathFactory) -> Report:
    return report_of(tmp_path_factory.mktemp("healthy") / "run", table, usual(table))
