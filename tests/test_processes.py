"""Tasks shared with forked processes. The programs run in processes of their own, without pytest's threads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pptrace.processes import SharedTasks

ROOT = Path(__file__).resolve().parents[1]

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")

_PROGRAM = """
import json, os, time
from functools import partial
from pptrace.processes import SharedTasks

parent = os.getpid()
"""


def run(program: str) -> Any:
    """JSON that a program prints, read."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _PROGRAM + program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    return json.loads(done.stdout)


@linux_only
def test_two_processes_do_the_tasks_and_the_results_are_in_order() -> None:
    done = run("""
def task(index):
    time.sleep(0.1)
    return index, os.getpid()

with SharedTasks([partial(task, index) for index in range(8)], jobs=2) as shared:
    results = shared.results()
print(json.dumps({"order": [index for index, _ in results], "processes": [pid == parent for _, pid in results]}))
""")
    assert done["order"] == list(range(8))
    assert done["processes"][0] is False
    assert done["processes"][-1] is True
    assert done["processes"] == sorted(done["processes"])


@linux_only
def test_an_error_of_a_task_in_another_process_is_raised_here() -> None:
    done = run("""
def task(index):
    time.sleep(0.1)
    if index == 0:
        raise ValueError("here" if os.getpid() == parent else "elsewhere")

try:
    with SharedTasks([partial(task, index) for index in range(4)], jobs=2) as shared:
        shared.results()
except ValueError as err:
    print(json.dumps(str(err)))
""")
    assert done == "elsewhere"


@linux_only
def test_tasks_of_a_process_that_was_ended_are_done_here() -> None:
    done = run("""
def task(index):
    if os.getpid() != parent:
        os._exit(9)  # as the kernel ends a process where memory is short
    return index

with SharedTasks([partial(task, index) for index in range(5)], jobs=2) as shared:
    print(json.dumps(shared.results()))
""")
    assert done == list(range(5))


def test_one_process_does_all_tasks_where_no_other_is_asked_for() -> None:
    done: list[int] = []
    with SharedTasks([lambda: done.append(1), lambda: done.append(2)]) as shared:
        assert done == []
        assert shared.results() == [None, None]
    assert sorted(done) == [1, 2]


@linux_only
def test_steps_of_many_ops_explained_in_two_processes_are_those_of_one() -> None:
    done = run("""
from pptrace.analysis.explain import explain
from pptrace.recognise.rank import recognise_rank
from pptrace.report.to_json import dump, report_in_parts
from pptrace.schedule.registry import build
from pptrace.workflow.analyse import analyse_ranks
from tests.support.synthetic import record

explain._LEAST_CELLS = 1  # a part for each step
pids, explain_together = [], explain._explain_together
explain._explain_together = lambda *args: (time.sleep(0.1), pids.append(os.getpid()), explain_together(*args))[2]

def report(jobs):
    traces = record(build("1f1b", 2, 4), lambda action: 100 + 37 * action.stage, latency=9, dp=2, steps=6).traces()
    return dump(report_in_parts(analyse_ranks([recognise_rank(trace) for trace in traces], jobs=jobs).report))

alone, few = report(1), report(2)
of_few = len(pids)
pids.clear()
explain._LEAST_SHARED = explain._LEAST_SHARED_OF_RANK = 0
together = report(2)
print(json.dumps({
    "same": alone == few == together, "few": of_few, "here": len(pids), "blamed": alone.count('"blame": {')
}))
""")
    assert done["same"] is True
    assert done["blamed"] == 6
    assert done["few"] == 2, "both reports in this process, their steps in one part"
    assert 0 < done["here"] < 6


@linux_only
def test_tasks_that_no_process_takes_any_more_are_done_here() -> None:
    done = run("""
import concurrent.futures

class Ended(concurrent.futures.ProcessPoolExecutor):
    def submit(self, function, index):
        if index == 2:
            raise concurrent.futures.process.BrokenProcessPool("a process was ended")
        return super().submit(function, index)

concurrent.futures.ProcessPoolExecutor = Ended
with SharedTasks([partial(pow, index, 2) for index in range(5)], jobs=2) as shared:
    print(json.dumps(shared.results()))
""")
    assert done == [0, 1, 4, 9, 16]
