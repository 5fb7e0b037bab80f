"""Fixtures and hooks that all tests share."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.support.extent import ALL

if TYPE_CHECKING:
    from tests.support.pool import Pool

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # so that tests and the processes of the pool import the same modules by the same names
    sys.path.insert(0, str(ROOT))

_LONG = (
    *("models/test_mixes.py", "dashboards/test_browser.py", "frameworks/test_torch_pipelining.py"),
    *("optim/test_validation.py", "pipeline/test_kinds.py", "cli/test_scripts.py"),
    *("cli/test_run.py", "models/test_marked_mixes.py", "adapters/test_real_frameworks.py"),
    *("workflow/test_dask.py", "cli/test_hang_runs.py", "cli/test_nsys.py"),
    *("pipeline/test_memory.py", "pipeline/test_exact.py", "roundtrip/test_roundtrip.py"),
    *("ingest/op_tables/test_reader.py", "analysis/test_analyse.py", "ingest/kineto/test_decode_pool.py"),
    *("docs/test_site.py", "schedule/test_builders.py", "cli/test_real_nsys.py"),
    *("cli/test_sleeping.py", "api/test_outside.py", "adapters/test_torch_pipelining.py"),
    *("cli/test_output.py", "workflow/test_analyse_on_workers.py", "unlabelled/test_match_chain.py"),
    *("ingest/test_fuzz.py", "gpu/test_gpu_run.py", "support/test_pool.py"),
    *("context/test_context.py", "pipeline/test_outstanding.py", "pipeline/test_sleeping_schedules.py"),
    *("models/test_train_gpt.py", "cli/test_volume.py", "docs/test_recipes_followed.py"),
    *("recognise/test_run.py", "clock/test_clock.py", "kineto/test_salvage.py"),
    *("models/test_dropout.py",),
)
"""Files that take long, and those that wait for others: begun first, so that none of them runs alone at the end."""

# A busy machine is no failure. In continuous integration the same examples are drawn each time, so that a change is judged by
# what it changed; everywhere else they are new ones each time.
settings.register_profile(
    "unhurried", deadline=None, derandomize=bool(os.environ.get("CI")), max_examples=100 if ALL else 20
)
settings.load_profile("unhurried")

# Tests start pptrace and ranks a hundred times. Where Python is set to keep no bytecode, each start would compile all anew, and
# each worker of pytest-xdist all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Live processes for the cases of all tests, eight at most and four where a test does not say how many."""
    from tests.support.pool import Pool

    with Pool(size=8, world=4) as started:
        yield started


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--own-cores",
        action="store_true",
        help="each worker of pytest-xdist, with its processes, keeps to its share of the cores",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Processes that exchange small messages all the time wake each other; from another core that takes twice as long.

    A worker with one core also has torch compute with one thread: several would wait for each other while others compute.

    No process interrupts another when it wakes (SCHED_BATCH). Otherwise the thread in which gloo receives interrupts the one that
    sends, which holds a lock, and tries to get that lock again and again until its share of time is over: most of the system time
    of a small message.
    """
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    gc.disable()  # while tests are collected: what they import stays
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if config.getoption("--own-cores") and worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        num_workers = min(int(os.environ["PYTEST_XDIST_WORKER_COUNT"]), len(cores))
        os.sched_setaffinity(0, cores[int(worker.removeprefix("gw")) % num_workers :: num_workers])


def pytest_collection_finish() -> None:
    """Keep what is imported: looking through all of it for cycles takes half a second each time."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what takes long first; tests that keep many processes busy are marked.

    pytest-xdist deals the files out in this order, given ``--no-loadscope-reorder``.
    """
    items.sort(key=lambda item: next((n for n, name in enumerate(_LONG) if item.path.match(name)), len(_LONG)))
    for item in items:
        if isinstance(item, pytest.Function) and "pool" in item.fixturenames:
            item.add_marker(pytest.mark.processes)
