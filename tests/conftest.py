"""Fixtures and hooks that all tests share."""

from __future__ import annotations

import gc
import os
import signal
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

from tests.support import loaded_once  # noqa: E402 - before anything imports what it replaces

loaded_once.install()

_LONG = (
    *("models/test_mixes.py", "expert/test_exact.py", "cli/test_run.py"),
    *("pipeline/test_kinds.py", "cli/test_hang_runs.py", "adapters/test_real_frameworks.py"),
    *("workflow/test_dask.py", "dashboards/test_browser.py", "dashboards/test_every_page_in_browser.py"),
    *("frameworks/test_torch_pipelining.py", "models/test_marked_mixes.py", "cli/test_spawned_ranks.py"),
    *("optim/test_validation.py", "dashboards/test_attacks.py", "cli/test_faults.py"),
    *("cli/test_memory_runs.py", "pipeline/test_memory.py", "api/test_outside.py"),
    *("cli/test_scripts.py", "schedule/test_builders.py", "dashboards/test_timeline_page.py"),
    *("examples/test_delayed_ops.py", "docs/test_site.py", "cli/test_nsys.py"),
    *("pipeline/test_exact.py", "context/test_context.py", "op_tables/test_reader.py"),
    *("kineto/test_decode_pool.py", "roundtrip/test_roundtrip.py", "cli/test_output.py"),
    *("dashboards/test_more_pages_in_browser.py", "tensor/test_tensor.py", "cli/test_sleeping.py"),
    *("unlabelled/test_match_chain.py", "analysis/test_properties.py", "dashboards/test_many_browsers.py"),
    *("gpu/test_gpu_run.py", "compare/test_compare.py", "verify/test_execute.py"),
    *("cli/test_live_run.py", "analysis/test_analyse.py", "dashboards/test_live_page.py"),
    *("models/test_train_gpt.py", "tools/test_house.py", "explain/test_causes.py"),
    *("pipeline/test_sleeping_schedules.py", "tests/test_samples.py", "partial/test_traced_ranks.py"),
    *("adapters/test_torch_pipelining.py", "job/test_disk_cache.py", "unlabelled/test_match_lone_rank.py"),
    *("simulator/test_simulation.py", "cli/test_volume.py"),
    *("pipeline/test_marks.py", "api/test_run.py", "schedule/test_plan_per_step.py"),
    *("schedule/test_validate.py", "job/test_read_job.py", "schedule/test_zb_auto.py"),
    *("docs/test_recipes_followed.py", "report/test_text.py", "damage/test_audit.py"),
    *("report/test_one_decomposition.py", "dashboards/test_address_in_browser.py", "dashboards/test_dark_charts.py"),
    *("dashboards/test_more_pages.py", "sizes/test_expert_activations.py", "infer/test_match_chain.py"),
    *("early_receives/test_repair_order.py", "schedule/test_outstanding.py", "analysis/test_outside_pipeline.py"),
    *("whatif/test_whatif.py", "whatif/test_same_step.py", "sizes/test_weight_work.py"),
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
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # a shell began it in the background; what tests start inherits that
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # while tests are collected: what they import stays
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if config.getoption("--own-cores") and worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        num_workers = min(int(os.environ["PYTEST_XDIST_WORKER_COUNT"]), len(cores))
        os.sched_setaffinity(0, cores[int(worker.removeprefix("gw")) % num_workers :: num_workers])


def pytest_runtest_setup(item: pytest.Item) -> None:
    loaded_once.keep_for(item.path)


def pytest_collection_finish() -> None:
    """Keep what is imported: looking through all of it for cycles takes half a second each time.

    And look less often: what tests read makes objects by the ten thousands, of which few are in cycles.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what takes long first; tests that keep many processes busy are marked.

    pytest-xdist deals the files out in this order, given ``--no-loadscope-reorder``.
    """
    places = {
        path: next((n for n, name in enumerate(_LONG) if path.match(name)), len(_LONG))
        for path in {item.path for item in items}
    }
    items.sort(key=lambda item: places[item.path])
    for item in items:
        if isinstance(item, pytest.Function) and "pool" in item.fixturenames:
            item.add_marker(pytest.mark.processes)
