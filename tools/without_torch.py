"""A plugin of pytest that skips what cannot be imported without torch: ``pytest -p tools.without_torch``."""

from __future__ import annotations

from collections.abc import Generator

import pytest

_OPTIONAL = ("torch", "nvtx", "playwright", "megatron", "deepspeed", "pyarrow")


def needs_training_packages(error: BaseException | None) -> str | None:
    """The optional package that was missing, if that is why something failed."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in _OPTIONAL:
            return error.name
        error = error.__cause__
    return None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    call = getattr(report, "call", None)
    if report.failed and call is not None and (name := needs_training_packages(call.excinfo.value)):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: needs {name}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and call.excinfo is not None and (name := needs_training_packages(call.excinfo.value)):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: needs {name}")
    return report
