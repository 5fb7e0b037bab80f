"""Analysing on a laptop must not need torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def printed(program: str, *arguments: str, environ: dict[str, str] | None = None) -> str:
    """Output of a program in an interpreter of its own."""
    command = [sys.executable, "-c", program, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


_WITHOUT_TORCH = """
import importlib, pkgutil, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "nvtx"):
            raise ImportError(f"{name} must not be imported")
sys.meta_path.insert(0, Refuse())
package = importlib.import_module(sys.argv[1])
names = [info.name for info in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


@pytest.mark.parametrize("package", ["pptrace", "dashboards"])
def test_every_module_imports_without_torch(package: str) -> None:
    assert int(printed(_WITHOUT_TORCH, package)) >= 3


_NOT_NEEDED = {
    "pptrace.analysis.compare.compare",
    "pptrace.api.urls",
    "pptrace.ingest.ascend.reader",
    "pptrace.ingest.flight_recorder.dump",
    "pptrace.ingest.nsight.reader",
    "pptrace.ingest.op_tables.files",
    "pptrace.recognise.infer.match",
    "pptrace.workflow.dask_cluster",
    "pptrace.workflow.dask_engine",
    "multiprocessing",
    "sqlite3",
}
"""Modules of other commands, engines and formats: an import costs each `pptrace analyze` some milliseconds."""


def test_analyze_imports_what_a_run_of_hosts_needs() -> None:
    sample = Path(__file__).parents[1] / "sample_traces" / "1f1b_p4"
    program = (
        f"import sys; from pptrace.cli.main import cli; "
        f"cli.main(['analyze', '--no-cache', {str(sample)!r}], standalone_mode=False); print(*sys.modules)"
    )
    imported = set(printed(program).splitlines()[-1].split())
    assert "pptrace.workflow.load" in imported
    assert not _NOT_NEEDED & imported


def test_the_help_of_the_command_line_imports_no_tables() -> None:
    imported = printed("import sys, pptrace.cli.main; print(*sys.modules)").split()
    assert "click" in imported
    assert {"numpy", "pandas", "pptrace.ingest"}.isdisjoint(imported)


@pytest.mark.parametrize(
    "command",
    [
        "schedule show 1f1b",
        "simulate 1f1b",
        "estimate 1f1b --layers 2 --hidden 8 --heads 2 --sequence 8 --vocabulary 8",
    ],
)
def test_a_schedule_on_paper_needs_no_tables(command: str) -> None:
    """pandas takes as long to import as all else of these commands."""
    arguments = [*command.split(), "--pp", "2", "--microbatches", "4"]
    program = f"import sys; from pptrace.cli.main import cli; cli.main({arguments}, standalone_mode=False); print(*sys.modules)"
    imported = printed(program).splitlines()[-1].split()
    assert "pptrace.schedule.registry" in imported
    assert "pandas" not in imported


def test_the_html_page_is_written_without_dash_and_plotly() -> None:
    program = (
        "import sys, pptrace; page = pptrace.load('sample_traces/1f1b_p4').to_html(); "
        "print({'dash', 'plotly', 'flask'} & set(sys.modules), 'plotly' in page, len(page) < 400_000)"
    )
    assert printed(program) == "set() False True\n"


_WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None
from pptrace.schedule import lower, registry, replay, validate
print(sum(map(len, registry.build("zbv", 2, 4).ranks)))
"""


def test_plans_are_built_with_the_standard_library_alone() -> None:
    """Ranks of a run that is traced build plans too, and load nothing that the run does not."""
    assert printed(_WITHOUT_NUMPY) == "48\n"


def test_the_package_runs_as_the_program() -> None:
    ended = subprocess.run([sys.executable, "-m", "pptrace", "frob"], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (2, "pptrace: No such command 'frob' (see `pptrace --help`)\n")


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted by Linux's /proc")
@pytest.mark.parametrize("of_user", [None, "2"])
def test_numpy_starts_no_threads_for_a_command_and_what_is_started_later_does(of_user: str | None) -> None:
    """They spin for a tenth of the start; a training that ``pptrace run`` starts has the environment of the user."""
    program = (
        "import os; from pptrace.cli.main import cli; cli.get_command(None, 'analyze'); "
        "print(len(os.listdir('/proc/self/task')), os.environ.get('OPENBLAS_NUM_THREADS'))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    if of_user is not None:
        environment["OPENBLAS_NUM_THREADS"] = of_user
    num_threads, variable = printed(program, environ=environment).split()
    assert variable == str(of_user)
    assert of_user is not None or num_threads == "1"
